"""`regard serve`: a model behind HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard_command.command_error import CommandError
from regard_command.options import translator_folder
from regard_command.stdio import emit


def serve_model(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            parser=translator_folder,
            help="A run of `regard train`, a model that transformers saved, with its tokenizer, or the name of a "
            "translator that regard comes with, as english_french.",
        ),
    ],
    host: Annotated[
        str, typer.Option(help="The interface to listen on; others than this machine can ask 0.0.0.0.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for any that is free.")] = 8000,
    name: Annotated[
        str | None, typer.Option(help="What requests call the model. [default: the folder's name]", show_default=False)
    ] = None,
    languages: Annotated[
        str, typer.Option(metavar="FROM-TO", help="Codes of what a translator translates, as en-fr.")
    ] = "en-fr",
    pages: Annotated[
        int, typer.Option(min=1, help="Memory of a language model for keys and values, in pages of 64 tokens.")
    ] = 1024,
    lookup: Annotated[bool, typer.Option("--lookup", help="Draft next tokens by looking them up in the text.")] = False,
    cache_format: Annotated[
        Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"] | None,
        typer.Option(
            "--cache-format",
            help="Codes that the pages store keys and values as. [default: numbers, in the model's dtype]",
            show_default=False,
        ),
    ] = None,
    queue: Annotated[int, typer.Option(min=1, help="Requests that are taken at once; more get 429.")] = 256,
    seconds: Annotated[float, typer.Option(min=0.1, help="Of a request; a longer one gets 503.")] = 300.0,
    tokens: Annotated[int, typer.Option(min=1, help="New tokens of an answer; more get 413.")] = 4096,
) -> None:
    """Serve a model over HTTP, until Ctrl-C or SIGTERM; then what was begun is answered first.

    A language model is asked in OpenAI's form (/v1/completions, /v1/chat/completions), a translator in LibreTranslate's
    (/translate, /languages); /health and /metrics are there too. With "attention": {} in a request the answer says what
    its tokens attended to. There is no password and no encryption: other machines belong behind a proxy.
    """
    source, dash, target = languages.partition("-")
    if not (source and dash and target):
        raise CommandError(f"--languages is {languages!r}; it needs two codes with a hyphen, such as en-fr")
    from regard.nn import CacheFormat, Packing
    from regard.serving import ModelServer, ServedModel, ServingLimits

    limits = ServingLimits(queue=queue, seconds=seconds, tokens=tokens)
    model = ServedModel.load(folder, name=name, languages=(source, target))
    format_ = CacheFormat(Packing(cache_format), Packing(cache_format)) if cache_format else None
    server = ModelServer(model, host, port, limits=limits, pages=pages, lookup=lookup, cache_format=format_)

    def ready() -> None:
        emit([server.address])
        typer.echo("Ctrl-C ends it.", err=True)

    server.run(ready)
