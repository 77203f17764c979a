"""The Typer application: all commands, and how they report errors.

Results go to standard output, everything else to standard error. The commands import what they need when they run, so
that help is there at once.
"""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import regard
from regard.cli.advise import advise
from regard.cli.align import align
from regard.cli.bench import bench
from regard.cli.compare import compare
from regard.cli.demo import demo
from regard.cli.doctor import MISTAKES, doctor
from regard.cli.evaluate import evaluate
from regard.cli.examine import examine
from regard.cli.exercise_commands import exercise_commands
from regard.cli.explore import explore
from regard.cli.missing_extra import naming_the_extra
from regard.cli.saved_runs import average, export
from regard.cli.serve import serve_model
from regard.cli.steps import steps
from regard.cli.train import train
from regard.cli.translate import translate
from regard.errors import RegardError


class Commands(TyperGroup):
    """Command group that prints a user's mistake as one message, with exit code 2 and no traceback."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Run the chosen command."""
        try:
            with naming_the_extra():
                return super().invoke(ctx)
        except (RegardError, *MISTAKES) as error:
            if ctx.params["debug"]:
                raise
            typer.echo(f"regard: {error}", err=True)
            raise typer.Exit(2) from error


# Plain text, not boxes: messages stay whole lines, which can be searched for and piped.
app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {regard.__version__}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Train translators with attention, use them, and inspect their attention."""


for name, command in {
    "demo": demo,
    "train": train,
    "test": evaluate,
    "translate": translate,
    "align": align,
    "advise": advise,
    "average": average,
    "bench": bench,
    "compare": compare,
    "doctor": doctor,
    "examine": examine,
    "explore": explore,
    "export": export,
    "serve": serve_model,
    "steps": steps,
}.items():
    app.command(name)(command)
app.add_typer(exercise_commands, name="exercise")
