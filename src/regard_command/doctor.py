"""`regard doctor`: the command of the distribution regard-doctor, which is loaded when it runs."""

from __future__ import annotations

import importlib

import typer

AS_WRITTEN = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""Settings of a command that leaves all its arguments to another one."""


def doctor(context: typer.Context) -> None:
    """Find mistakes in the attention of Python sources; nothing of them is run."""
    try:
        from regard_doctor import command
    except ModuleNotFoundError as missing:
        if missing.name != "regard_doctor":
            raise
        importlib.import_module("regard.doctor")  # which says where it is to be had
    else:
        command.main(context.args, program="regard doctor")
