"""The command line of regard; `regard_command.main` is the console script, which calls `main` here.

No optional package is imported here, so that an installation without the extras can name the one it lacks.
"""

from __future__ import annotations

import sys

from regard.cli.missing_extra import naming_the_extra
from regard.errors import MissingExtra


def main() -> None:
    """Run the command in `sys.argv` and exit.

    With 0 when all went well, 2 for what the user can mend, 130 for Ctrl-C, 143 for a training that SIGTERM ended.
    """
    try:
        with naming_the_extra():
            from regard.cli.app import app
    except MissingExtra as error:
        sys.stderr.write(f"regard: {error}\n")
        sys.exit(2)
    app()
