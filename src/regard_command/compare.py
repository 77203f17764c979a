"""`regard compare`: train variants of one model with several seeds, and print a table of them."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from regard_command.command_error import CommandError
from regard_command.options import Overrides
from regard_command.stdio import emit
from regard_command.train import default_folder


def compare(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="RECIPE", show_default=False, help="The YAML file of an experiment, or `dates`, which needs none."
        ),
    ],
    vary: Annotated[
        list[str] | None,
        typer.Option(
            "--vary",
            metavar="NAME[=VALUES]",
            help="What varies: score, heads, kv_heads, position, mask, mechanism or window, or a key path, such as "
            "model.dropout=0.1,0.3; may be repeated, and all combinations are trained.",
        ),
    ] = None,
    seeds: Annotated[
        str | None, typer.Option(metavar="NUMBERS", help="Seeds of each variant, such as 1,2,3. [default: 1,2,3]")
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option("--folder", metavar="FOLDER", help="Where runs and results go. [default: comparisons/NAME]"),
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Runs at once, each on one thread.")] = 1,
    overrides: Overrides = None,
) -> None:
    """Compare variants of one model: quality with intervals, time, memory, parameters, and tests of the differences.

    Trains each variant with each seed and prints one table. The folder gets it as table.md, with results.json,
    figure.svg and page.html, which opens without a network. A run that is done is not done again: the same command
    resumes a comparison that was interrupted, and other settings are other runs.

    The recipe is the YAML of `regard train`; a section `compare` in it may say what varies. recipes/comparisons has
    some. --set compare.seeds=[1] and the like set keys of that section.
    """
    from regard.comparison import compare as run
    from regard.comparison import load_recipe
    from regard.comparison.variants import parse_vary

    options: dict[str, Any] = {}
    if vary:
        options["vary"], options["variants"] = {}, {}
        for text in vary:
            name, values = parse_vary(text)
            if name in options["vary"]:
                raise CommandError(f"--vary {name} is there twice; name all its values at once: {name}=A,B")
            options["vary"][name] = values
    if seeds is not None:
        options["seeds"] = _numbers(seeds)
    loaded = load_recipe(recipe, overrides or (), options)
    folder = folder or default_folder(loaded.name, "comparisons")
    try:
        with redirect_stdout(sys.stderr):
            report = run(loaded, folder, workers=workers, progress=lambda line: typer.echo(line, err=True))
    except (KeyboardInterrupt, SystemExit):
        typer.echo(
            f"interrupted; {folder} has the runs that are done, and the same command goes on from there", err=True
        )
        raise
    if len(report.refused) == len(report.variants):
        raise CommandError(
            "no variant can be trained: " + "; ".join(f"{one.name}: {one.reason}" for one in report.refused)
        )
    emit([str(report)])
    for path in report.save(folder):
        typer.echo(str(path), err=True)
    if report.refused:
        raise typer.Exit(2)


def _numbers(text: str) -> list[int]:
    try:
        return [int(one) for one in text.split(",")]
    except ValueError:
        raise CommandError(
            f"--seeds: has {text!r}; it needs whole numbers with commas between, such as 1,2,3"
        ) from None
