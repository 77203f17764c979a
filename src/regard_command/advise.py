"""`regard advise`: which attention to take for a task, by predicted time and memory."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Literal

import typer

from regard_command.command_error import CommandError
from regard_command.stdio import emit

VERDICTS = {
    "en": {True: "holds here", False: "not so here", None: "of quality, which its price here does not decide"},
    "ko": {True: "여기서도 맞음", False: "여기서는 다름", None: "품질의 규칙이라 여기서의 비용으로는 정해지지 않음"},
}
"""Whether a rule of the textbooks holds on this machine."""


def advise(
    model: Annotated[
        Path | None, typer.Option(help="A config.json, or the folder of one: its heads are then not changed.")
    ] = None,
    task: Annotated[str, typer.Option(help="train, prefill or decode.")] = "prefill",
    tokens: Annotated[
        str, typer.Option(metavar="NUMBER", help="Tokens of a sequence; while decoding, those before the next.")
    ] = "4096",
    architecture: Annotated[
        str | None, typer.Option(help="decoder, encoder or translation; of the model, or decoder.")
    ] = None,
    source_tokens: Annotated[int | None, typer.Option(help="Tokens of the source, of a translation.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences at once.")] = 1,
    layers: Annotated[int | None, typer.Option(help="Attention layers; without a model 32.")] = None,
    heads: Annotated[int | None, typer.Option(help="Query heads; without a model 32.")] = None,
    key_heads: Annotated[int | None, typer.Option(help="Key and value heads; as many as heads without it.")] = None,
    head_dim: Annotated[int | None, typer.Option(help="Dim of a head; without a model 128.")] = None,
    window: Annotated[int | None, typer.Option(help="Positions that a query attends to, of a windowed model.")] = None,
    local: Annotated[
        int | None, typer.Option(help="Positions within which is all that a token needs: what is local, by a window.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16 or float64; of the model, or bfloat16.")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda, of this machine.")] = "cpu",
    gpu: Annotated[
        str | None, typer.Option(help="A card that need not be here, such as h100, a100 or l4: by its data sheet.")
    ] = None,
    memory: Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for attention, such as 16GB.")] = None,
    exact: Annotated[
        bool, typer.Option("--exact/--any", help="Recommend attention to all pairs alone, or any mechanism.")
    ] = True,
    table: Annotated[bool, typer.Option("--table", help="Print the textbooks' rules and what holds here.")] = False,
    language: Annotated[
        Literal["en", "ko"] | None,
        typer.Option("--lang", help="Language of --table. [default: en]", show_default=False),
    ] = None,
    output: Annotated[str, typer.Option("--format", help="text or json.")] = "text",
) -> None:
    """Compare attention mechanisms for a task, and recommend one.

    Prints for each mechanism what computes it, its floating-point operations, the bytes that it reads and writes, its
    cache, its memory and its predicted time, of attention alone in all layers; then the recommended one with its mask,
    positions, cache and kernel. --table compares the rules of textbooks with predictions for this machine instead.
    """
    if output not in ("text", "json"):
        raise CommandError(f"there is no format {output!r}: text or json")
    as_json = output == "json"
    if table:
        _print_rules(as_json, language or "en")
        return
    if language is not None:
        raise CommandError("--lang is the language of --table: add --table, or leave --lang out")
    from regard.advisor import advise as compare

    settings = {
        "task": task,
        "tokens": _number("tokens", tokens),
        "batch": batch,
        "device": device,
        "gpu": gpu,
        "architecture": architecture,
        "source_tokens": source_tokens,
        "layers": layers,
        "heads": heads,
        "key_heads": key_heads,
        "head_dim": head_dim,
        "window": window,
        "local": local,
        "dtype": dtype,
        "memory": memory,
    }
    found = compare(model, exact=exact, **{name: value for name, value in settings.items() if value is not None})
    emit([json.dumps(found.as_dict(), indent=2) if as_json else str(found)])


def _number(name: str, text: str) -> int:
    """A whole number that may have separators: 131072, 131,072 or 131_072."""
    if short := re.fullmatch(r"\s*(\d+)([km])i?\s*", text, re.IGNORECASE):
        power = 1 if short[2].lower() == "k" else 2
        decimal, binary = (int(short[1]) * step**power for step in (1000, 1024))
        raise CommandError(f"{name} is {text!r}: write the number out, {decimal} or {binary}")
    try:
        return int(re.sub(r"(?<=\d)[,_](?=\d)", "", text))
    except ValueError:
        raise CommandError(f"{name} needs a whole number, such as 131072; it is {text!r}") from None


def _print_rules(as_json: bool, language: str) -> None:
    from dataclasses import asdict

    from regard.advisor import decision_table

    rules = decision_table(language)
    if as_json:
        emit([json.dumps([asdict(rule) for rule in rules], indent=2)])
        return
    lines = []
    for rule in rules:
        lines += [
            f"{rule.situation}: {rule.textbook}",
            f"   {VERDICTS[language][rule.holds]}: {rule.here}",
        ]
    emit(lines)
