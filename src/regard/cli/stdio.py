"""Lines from standard input, as they arrive, and results to standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from io import BufferedIOBase
from typing import cast

from regard.errors import CorpusError

CHUNK_BYTES = 1 << 14
"""As much as is read at once where more has arrived: some hundreds of sentences."""


def standard_input() -> BufferedIOBase:
    """The bytes of standard input."""
    return cast(BufferedIOBase, sys.stdin.buffer)


def arriving_lines(stream: BufferedIOBase) -> Iterator[list[str]]:
    r"""Whole lines, all that have arrived at a time: one that is typed, hundreds from a file.

    Raises:
        CorpusError: a line is not UTF-8; the lines before it are given first.

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
                yield lines
                raise CorpusError(
                    f"standard input, line {number}: byte 0x{raw[error.start]:02x} at position {error.start + 1} is "
                    f"not UTF-8 ({error.reason}); convert the text to UTF-8, for instance with iconv"
                ) from None
        yield lines


def _arriving_bytes(stream: BufferedIOBase) -> Iterator[list[bytes]]:
    begun = b""
    # read1 waits until something is there, and then takes it without waiting for more.
    while chunk := stream.read1(CHUNK_BYTES):
        *whole, begun = (begun + chunk).split(b"\n")
        if whole:
            yield whole
    if begun:
        yield [begun]


def emit(lines: Iterable[str]) -> None:
    """Write results to standard output, at once, and in UTF-8 whatever the locale says."""
    sys.stdout.buffer.write("".join(f"{line}\n" for line in lines).encode("utf-8"))
    sys.stdout.buffer.flush()
