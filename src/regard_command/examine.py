"""`regard examine`: change the inputs of a model, and report which outputs move that must not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from regard_command.command_error import CommandError
from regard_command.options import PageFile, check_page_file, save_page
from regard_command.stdio import emit


def examine(
    model: Annotated[
        str | None,
        typer.Argument(help="A folder of transformers, a class of transformers, or FILE.py:NAME, a class or function."),
    ] = None,
    tokens: Annotated[int, typer.Option(help="Tokens of each sequence.")] = 72,
    rows: Annotated[int, typer.Option(help="Sequences of the batch.")] = 2,
    vocabulary: Annotated[int | None, typer.Option(help="Token ids are below it; the model's without it.")] = None,
    dim: Annotated[int | None, typer.Option(help="Embeddings of this dim instead of token ids.")] = None,
    causal: Annotated[
        bool | None, typer.Option("--causal/--bidirectional", help="Whether outputs may depend on the past alone.")
    ] = None,
    packed: Annotated[bool | None, typer.Option("--packed/--unpacked", help="Check packed documents.")] = None,
    checks: Annotated[str | None, typer.Option(help="Names of checks, with commas; all without it.")] = None,
    zoo: Annotated[
        bool, typer.Option("--zoo", help="Examine every decoder and encoder-decoder class of transformers.")
    ] = False,
    only: Annotated[str | None, typer.Option(help="With --zoo: classes whose name has this in it.")] = None,
    workers: Annotated[int, typer.Option(help="With --zoo: processes.")] = 2,
    seconds: Annotated[float, typer.Option(help="With --zoo: processor time that a class may take.")] = 60.0,
    results: Annotated[
        Path | None, typer.Option(help="With --zoo: folder of a JSON for each class; those in it are not run again.")
    ] = None,
    table: Annotated[Path | None, typer.Option(help="With --zoo: write the table, as Markdown, to this file.")] = None,
    output: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
    html: PageFile = None,
) -> None:
    """Run a model on random tokens, change them, and report outputs that move though they must not.

    Checked are leaks of the future, of padding, documents and other rows, left padding, positions, caches, backends,
    training against evaluation, and heads. Exit code 1 when an error was found. A class of transformers has a tiny
    random configuration; a file is run, and NAME called without arguments.
    """
    if output not in ("text", "json"):
        raise CommandError(f"there is no format {output!r}: text or json")
    if html is not None:
        check_page_file(html)
    if zoo:
        _examine_zoo(only, workers, seconds, results, table, output, html)
        return
    if model is None:
        raise CommandError("examine needs a model: a folder, a class of transformers, FILE.py:NAME, or --zoo")
    import torch

    from regard.doctor import CHECKS, Severity
    from regard.doctor import examine as examine_model
    from regard.doctor.model_source import load_model, random_batch

    torch.manual_seed(0)
    loaded = load_model(model)
    found = examine_model(
        loaded,
        random_batch(loaded, rows, tokens, vocabulary, dim),
        causal=causal,
        packed=packed,
        checks=CHECKS if checks is None else [name.strip() for name in checks.split(",")],
        maps=html is not None,
    )
    if html is not None:
        from regard.doctor.examination_page import examination_page

        save_page(examination_page(found), html)
    emit([found.to_json() if output == "json" else str(found)])
    if any(one.severity is Severity.ERROR for one in found.findings):
        raise typer.Exit(1)


def _examine_zoo(
    only: str | None,
    workers: int,
    seconds: float,
    results: Path | None,
    table: Path | None,
    output: str,
    html: Path | None,
) -> None:
    from regard.doctor.zoo import examine_zoo

    def report_line(line: str) -> None:
        typer.echo(line, err=True)

    report = examine_zoo(only=only, workers=workers, seconds=seconds, folder=results, on_done=report_line)
    if table is not None:
        table.write_text(report.markdown(), encoding="utf-8")
    if html is not None:
        from regard.doctor.zoo_page import zoo_page

        save_page(zoo_page(report), html)
    emit([json.dumps(report.as_dict(), indent=2) if output == "json" else report.summary()])
