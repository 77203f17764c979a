"""A run that was trained through the command line, and two ways to give commands: in this process, and in a shell's."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from regard_command.app import app

DIGITS = ["null", "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun"]

EXPERIMENT = """\
name: digits
data:
  folder: {folder}
  train: {{source: train.digits, target: train.words}}
  validation: {{source: test.digits, target: test.words}}
  test: {{source: test.digits, target: test.words}}
vocabulary: {{kind: words, size: 40}}
model: {{embedding_dim: 16, hidden_dim: 32, dropout: 0.0}}
training: {{batch_tokens: 120, max_epochs: 9, learning_rate: 0.01, accelerator: cpu}}
search: {{beam: 3}}
"""


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits and their German names, and the experiment that learns to read them."""
    folder = tmp_path_factory.mktemp("corpus")
    generator = random.Random(1)
    for name, count in (("train", 600), ("test", 30)):
        lines = [[generator.randrange(10) for _ in range(generator.randint(1, 4))] for _ in range(count)]
        digits = "".join(" ".join(map(str, line)) + "\n" for line in lines)
        words = "".join(" ".join(DIGITS[digit] for digit in line) + "\n" for line in lines)
        (folder / f"{name}.digits").write_text(digits, encoding="utf-8")
        (folder / f"{name}.words").write_text(words, encoding="utf-8")
    (folder / "digits.yaml").write_text(EXPERIMENT.format(folder=folder), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a trained run."""
    folder = tmp_path_factory.mktemp("runs") / "digits"
    result = CliRunner().invoke(app, ["train", str(corpus / "digits.yaml"), "--folder", str(folder)])
    assert result.exit_code == 0, result.stderr
    return folder


@pytest.fixture
def regard() -> Callable[..., Any]:
    """Run a command in this process: `regard("translate", "--beam", 2, input="1 2")`."""

    def command(*arguments: object, input: str | bytes | None = None) -> Any:  # noqa: A002
        return CliRunner().invoke(app, [str(argument) for argument in arguments], input=input)

    return command


class Command:
    """A command as a shell starts it, with someone at its other ends."""

    def __init__(self, python: list[str], *arguments: object, **environment: str) -> None:
        self.process = subprocess.Popen(
            [*python, "-c", "from regard_command import main; main()", *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ | environment,
        )

    def say(self, text: bytes) -> None:
        assert self.process.stdin
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def hear(self) -> bytes:
        assert self.process.stdout
        return self.process.stdout.readline()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def stop_listening(self) -> None:
        assert self.process.stdout
        self.process.stdout.close()
        self.process.stdout = None

    def end(self) -> tuple[int, bytes, bytes]:
        """Exit code, and what is left of standard output and standard error."""
        stdout, stderr = self.process.communicate(timeout=200)
        return self.process.returncode, stdout or b"", stderr


@contextmanager
def commands(python: list[str]) -> Iterator[Callable[..., Command]]:
    """Start commands by that Python, and end them at the end."""
    started: list[Command] = []

    def start(*arguments: object, **environment: str) -> Command:
        started.append(Command(python, *arguments, **environment))
        return started[-1]

    yield start
    for command in started:
        command.process.kill()
        command.process.communicate()


@pytest.fixture
def shell() -> Iterator[Callable[..., Command]]:
    """Start a command in a process of its own: `shell("translate", "--beam", 2)`."""
    with commands([sys.executable]) as start:
        yield start


@pytest.fixture
def warm_shell(warm_python: list[str]) -> Iterator[Callable[..., Command]]:
    """As `shell`, with torch loaded when the command starts."""
    with commands(warm_python) as start:
        yield start


@pytest.fixture
def training_shell(warm_training: list[str]) -> Iterator[Callable[..., Command]]:
    """As `shell`, with all that a training needs loaded when the command starts."""
    with commands(warm_training) as start:
        yield start
