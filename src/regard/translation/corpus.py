"""Parallel text: lines of one language beside their translations, from two files or one table."""

from __future__ import annotations

import difflib
import gzip
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import BinaryIO

from regard.errors import CorpusError
from regard.heads.word_alignment import Link, SentenceLinks, parse_pharaoh
from regard.translation.settings import TextFiles, TextTable
from regard.translation.tokenization import words_of

_GZIP_MAGIC = b"\x1f\x8b"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"

LONGEST_LINE = 1 << 24
"""Bytes. A file with a longer line is no text of sentences: a gzip file of some megabytes can hold one of gigabytes."""


@dataclass(frozen=True)
class ParallelText:
    """Pairs of lines: `targets[i]` is the translation of `sources[i]`. Lines are NFC, without line ends, never empty.

    Made with `read`, or with `pair` from lines that are already in memory.

    >>> text = ParallelText.pair(["Guten Tag", ""], ["good day", "left over"])
    >>> text.sources, text.targets, text.dropped_empty
    (['Guten Tag'], ['good day'], 1)
    """

    sources: list[str]
    targets: list[str]
    source_name: str
    """Where the sources came from, for messages."""
    target_name: str
    dropped_empty: int = 0
    """How many pairs were left out because a side was empty."""
    links: list[frozenset[Link]] | None = None
    """The links of words of each pair (source word, target word), where they are known; words are what spaces
    separate."""

    def __len__(self) -> int:
        return len(self.sources)

    @classmethod
    def read(
        cls, text: TextFiles | TextTable, folder: str | Path = ".", *, alignments: Path | None = None
    ) -> ParallelText:
        r"""Read two files line by line, or two columns of one tab-separated file; paths are relative to `folder`.

        A file may be plain or gzip: its first bytes decide, not its name. Text is UTF-8, with or without a byte order
        mark; a line ends at "\n" or "\r\n" and nowhere else. `alignments` is a Pharaoh file of links of words, a line
        for each pair; of it the sure links count.

        Raises:
            CorpusError: a file is missing, is a folder, is not UTF-8, or is a damaged gzip; the sides differ in length;
                a line of the table has too few columns; no pair is left; the alignments have another number of lines,
                something in them is no link, or a link is of a word that is not there.
        """
        folder = Path(folder)
        if isinstance(text, TextTable):
            path = folder / text.tsv
            sources, targets = _read_table(path, text.source_column, text.target_column)
            names = f"{path} column {text.source_column}", f"{path} column {text.target_column}"
        else:
            source, target = folder / text.source, folder / text.target
            sources, targets, names = read_lines(source), read_lines(target), (str(source), str(target))
        links = None if alignments is None else _read_links(folder / alignments, sources, targets, names)
        return cls.pair(sources, targets, source_name=names[0], target_name=names[1], links=links)

    @classmethod
    def pair(
        cls,
        sources: Sequence[str],
        targets: Sequence[str],
        *,
        source_name: str = "the sources",
        target_name: str = "the targets",
        links: Sequence[frozenset[Link]] | None = None,
    ) -> ParallelText:
        """Pair lines, with links of their words; pairs with an empty side (only white space) are left out and counted.

        Raises:
            CorpusError: the sides differ in length, or no pair is left.
        """
        if len(sources) != len(targets):
            raise CorpusError(
                f"the sides do not line up: {source_name} has {len(sources):,} lines and {target_name} has "
                f"{len(targets):,}; line i of one needs to translate line i of the other"
            )
        full = [bool(source.strip() and target.strip()) for source, target in zip(sources, targets, strict=True)]
        pairs = list(compress(zip(sources, targets, strict=True), full))
        dropped = len(sources) - len(pairs)
        if not pairs:
            found = f"has {dropped:,} lines, but each has an empty side" if dropped else "has no lines"
            raise CorpusError(f"no parallel text: {source_name} with {target_name} {found}; it needs at least one pair")
        return cls(
            sources=[source for source, _ in pairs],
            targets=[target for _, target in pairs],
            source_name=source_name,
            target_name=target_name,
            dropped_empty=dropped,
            links=None if links is None else list(compress(links, full)),
        )


def read_lines(path: str | Path) -> list[str]:
    r"""The lines of a UTF-8 text file, plain or gzip, in NFC and without their line ends.

    A line ends at "\n" or "\r\n" and nowhere else: the line separator U+2028, for one, is text. A byte order mark is
    dropped.

    Raises:
        CorpusError: the file is missing, is a folder, is not UTF-8, or is a damaged gzip; a line has more than
            `LONGEST_LINE` bytes.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "two.txt"
    ...     _ = path.write_bytes("one\r\ntwo\u2028still two\n".encode())
    ...     read_lines(path)
    ['one', 'two\u2028still two']
    """
    path = Path(path)
    lines: list[str] = []
    with _open(path) as file:
        try:
            while raw := file.readline(LONGEST_LINE + 1):
                if len(raw) > LONGEST_LINE:
                    raise CorpusError(
                        f"{path}, line {len(lines) + 1} has more than {LONGEST_LINE:,} bytes; text needs to have a "
                        "sentence, or a pair, in each line"
                    )
                lines.append(_decode(raw, path, len(lines) + 1))
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            state = "truncated" if isinstance(error, EOFError) else "corrupt"
            raise CorpusError(
                f"{path} is a {state} gzip file ({error}): {len(lines):,} lines were good, the rest cannot be read; "
                "copy or download it again"
            ) from error
    return lines


@contextmanager
def _open(path: Path) -> Iterator[BinaryIO | gzip.GzipFile]:
    try:
        with path.open("rb") as file:
            if file.peek(len(_GZIP_MAGIC)).startswith(_GZIP_MAGIC):
                with gzip.GzipFile(fileobj=file) as unpacked:
                    yield unpacked
            else:
                yield file
    except FileNotFoundError:
        raise CorpusError(f"there is no file {path}{_suggest_neighbour(path)}") from None
    except IsADirectoryError:
        raise CorpusError(f"{path} is a folder; it needs to be a file of text") from None
    except OSError as error:
        raise CorpusError(f"cannot read {path}: {error.strerror or error}") from error


def _suggest_neighbour(path: Path) -> str:
    """Suggest a file in the same folder with a similar name, or one for a sentence: the end of a message."""
    if not path.parent.is_dir():
        return f": the folder {path.parent} does not exist either"
    close = difflib.get_close_matches(path.name, (file.name for file in path.parent.iterdir()), n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return "; a sentence needs to stand in a file, one a line" if " " in path.name else ""


def _decode(raw: bytes, path: Path, number: int) -> str:
    if number == 1:
        raw = raw.removeprefix(_BYTE_ORDER_MARK)
    raw = raw.removesuffix(b"\n").removesuffix(b"\r")
    try:
        return unicodedata.normalize("NFC", raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path}, line {number}: byte 0x{raw[error.start]:02x} at position {error.start + 1} is not UTF-8 "
            f"({error.reason}); save the file as UTF-8"
        ) from None


def _read_table(path: Path, source_column: int, target_column: int) -> tuple[list[str], list[str]]:
    needed = max(source_column, target_column) + 1
    sources, targets = [], []
    for number, line in enumerate(read_lines(path), start=1):
        columns = line.split("\t") if line.strip() else [""] * needed  # a blank line is an empty pair, not a bad one
        if len(columns) < needed:
            had = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
            raise CorpusError(
                f"{path}, line {number} has {had} separated by tabs; it needs {needed} for source_column "
                f"{source_column} and target_column {target_column}, counted from 0"
            )
        sources.append(columns[source_column])
        targets.append(columns[target_column])
    return sources, targets


def _read_links(
    path: Path, sources: Sequence[str], targets: Sequence[str], names: tuple[str, str]
) -> list[frozenset[Link]]:
    """The sure links of each pair, each of words that are there."""
    found = [links.sure for links in read_pharaoh(path)]
    if len(found) != len(sources):
        raise CorpusError(
            f"the alignments do not line up: {path} has {len(found):,} lines and {names[0]} has {len(sources):,}; line "
            "i of one needs to link the words of line i of the other, an empty line where there is no link"
        )
    for number, links in enumerate(found, start=1):
        words = len(words_of(sources[number - 1])), len(words_of(targets[number - 1]))
        for link in sorted(links):
            if link[0] >= words[0] or link[1] >= words[1]:
                raise CorpusError(
                    f"{path}, line {number}: {link[0]}-{link[1]} links source word {link[0]} and target word "
                    f"{link[1]}, and there are {words[0]} and {words[1]} words, from 0, in {names[0]} and {names[1]}; "
                    "words are what spaces separate: align the text as it stands there, source before target"
                )
    return found


def read_pharaoh(path: str | Path, *, first: int = 0) -> list[SentenceLinks]:
    """The links of a Pharaoh file, one line a sentence pair, as `parse_pharaoh` reads each.

    `first` is the number that the file gives to the first word: 0, or 1 as in many files of gold links. The links that
    are returned count from 0. An empty line is a pair without links. The file may be gzip.

    Raises:
        CorpusError: the file cannot be read, or something in it is no link.
    """
    found = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            found.append(parse_pharaoh(line, first=first))
        except CorpusError as error:
            raise CorpusError(f"{path}, line {number}: {error}") from None
    return found
