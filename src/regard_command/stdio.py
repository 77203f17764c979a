"""Lines from standard input as they arrive, and results to standard output in UTF-8."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from io import BufferedIOBase
from typing import Literal, cast

from regard_command.command_error import CommandError

CHUNK_BYTES = 1 << 14
"""As much as is read at once where more has arrived: some hundreds of sentences."""


def standard_input() -> BufferedIOBase:
    """The bytes of standard input."""
    return cast(BufferedIOBase, sys.stdin.buffer)


Errors = Literal["strict", "replace", "skip"]
"""Whether a line that is not UTF-8 is refused, gets replacement characters, or is taken for an empty one."""


def arriving_lines(
    stream: BufferedIOBase, errors: Errors = "strict", warn: Callable[[str], None] | None = None
) -> Iterator[list[str]]:
    r"""Yield the whole lines that have arrived: one at a time if typed, hundreds at a time from a file.

    `warn` gets a message for each line that is not UTF-8, unless that is an error; commands that have the option
    --errors pass it.

    Raises:
        CommandError: a line is not UTF-8 (`errors` "strict"), or longer than any text has; the lines before it are
            yielded first.

    >>> import io
    >>> list(arriving_lines(io.BytesIO(b"one\ntwo\r\nthree")))
    [['one', 'two'], ['three']]
    """
    number = 0
    for raw_lines in _arriving_bytes(stream):
        lines: list[str] = []
        for raw in raw_lines:
            number += 1
            try:
                lines.append(raw.removesuffix(b"\r").decode("utf-8"))
            except UnicodeDecodeError as error:
                problem = (
                    f"standard input, line {number}: byte 0x{raw[error.start]:02x} at position {error.start + 1} is "
                    f"not UTF-8 ({error.reason})"
                )
                if errors == "strict":
                    yield lines
                    mend = ", or leave such lines out with --errors skip" if warn else ""
                    raise CommandError(f"{problem}; convert the text to UTF-8, for instance with iconv{mend}") from None
                replaced = errors == "replace"
                lines.append(raw.removesuffix(b"\r").decode("utf-8", "replace") if replaced else "")
                what = "replaced by \ufffd" if replaced else "the line is left out, and its translation is empty"
                if warn:
                    warn(f"{problem}; {what}")
        yield lines


def _arriving_bytes(stream: BufferedIOBase) -> Iterator[list[bytes]]:
    from regard.translation.corpus import LONGEST_LINE

    number, unfinished = 1, b""
    # read1 waits until something is there, and then takes it without waiting for more.
    while chunk := stream.read1(CHUNK_BYTES):
        *whole, unfinished = (unfinished + chunk).split(b"\n")
        if whole:
            yield whole
            number += len(whole)
        if len(unfinished) > LONGEST_LINE:
            raise CommandError(
                f"standard input, line {number} has more than {LONGEST_LINE:,} bytes; text needs to have a sentence in "
                "each line"
            )
    if unfinished:
        yield [unfinished]


def emit(lines: Iterable[str]) -> None:
    """Write results to standard output and flush, in UTF-8 whatever the locale."""
    sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
    sys.stdout.buffer.flush()
