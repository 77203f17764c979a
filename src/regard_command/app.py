"""The Typer application: all commands, and how they report errors.

Results go to standard output, everything else to standard error. The commands import what they need when they run, so
that help is there at once.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from regard_command.advise import advise
from regard_command.align import align
from regard_command.bench import bench
from regard_command.command_error import CommandError
from regard_command.compare import compare
from regard_command.demo import demo
from regard_command.doctor import AS_WRITTEN, doctor
from regard_command.evaluate import evaluate
from regard_command.examine import examine
from regard_command.exercise_commands import exercise_commands
from regard_command.explore import explore
from regard_command.missing_extra import naming_the_extra
from regard_command.prepare import prepare
from regard_command.saved_runs import average, export
from regard_command.serve import serve_model
from regard_command.steps import steps
from regard_command.train import train
from regard_command.translate import translate


class Commands(TyperGroup):
    """Command group that prints a user's mistake as one message, with exit code 2 and no traceback."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Run the chosen command."""
        try:
            with naming_the_extra():
                return super().invoke(ctx)
        except ValueError as error:
            if ctx.params["debug"] or not isinstance(error, _mistakes()):
                raise
            typer.echo(f"regard: {error}", err=True)
            raise typer.Exit(2) from error


def _mistakes() -> tuple[type[ValueError], ...]:
    """The errors that say what a user can mend: those of the library can only come from where it is loaded."""
    library = sys.modules.get("regard.errors")
    return CommandError, *((library.RegardError,) if library else ())


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
        typer.echo(f"regard {version('regard')}")
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
    "prepare": prepare,
    "serve": serve_model,
    "steps": steps,
}.items():
    app.command(name, context_settings=AS_WRITTEN if command is doctor else None)(command)
app.add_typer(exercise_commands, name="exercise")
