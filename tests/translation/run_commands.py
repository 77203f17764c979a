"""Commands of `regard`, run in this process."""

from typer.testing import CliRunner

from regard_command.app import app


def regard(*arguments, code=0):
    """The result of a command with this exit code."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, result.stderr
    return result
