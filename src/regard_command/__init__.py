"""The console script `regard`: chooses how OpenMP threads wait, then runs `regard_command.main`.

A package of its own, because `import regard` loads torch, and OpenMP reads its settings once, when it is loaded.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

from regard_command.library_loader import LibraryFinder
from regard_command.missing_extra import naming_the_extra

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables of the OpenMP runtimes that say whether waiting threads spin or sleep."""


def main() -> None:
    """Run the command in `sys.argv`, with OpenMP threads that sleep while they wait for each other, and exit.

    With 0 when all went well, 2 for what the user can mend, 130 for Ctrl-C, 143 for a training that SIGTERM ended.

    By default they spin. Where another process occupies a core, a thread that spins keeps the one that it waits for
    from running, and training or translating takes ten times as long. A user's own setting of one of `WAITING` wins.
    `regard bench` keeps the default: what it measures is used by processes that import regard, which have it too.
    The garbage collector rests while torch is loaded: see `LibraryLoader`.
    """
    if sys.argv[1:2] == ["doctor"] and find_spec("regard_doctor"):
        from regard_doctor.command import main as diagnose

        diagnose(sys.argv[2:], program="regard doctor")  # reads sources without loading torch
    command = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    if command != "bench" and not any(name in os.environ for name in WAITING):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    sys.meta_path.insert(0, LibraryFinder)
    try:
        with naming_the_extra():
            from regard_command.app import app
    except ValueError as error:  # MissingExtra, of Typer itself
        sys.stderr.write(f"regard: {error}\n")
        sys.exit(2)
    app()
