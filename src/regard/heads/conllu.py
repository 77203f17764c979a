"""Sentences with their dependencies, from CoNLL-U."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ..errors import CorpusError

COLUMNS = 10
ROOT = -1


@dataclass(frozen=True)
class Sentence:
    """Syntactic words, and for each the number of its head, from 0, -1 for the root, and the relation to it."""

    words: tuple[str, ...]
    heads: tuple[int, ...]
    relations: tuple[str, ...]


def read_conllu(path: str | Path) -> list[Sentence]:
    """The sentences of a CoNLL-U file, plain or gzip. See `parse_conllu`.

    Raises:
        CorpusError: the file cannot be read, or is no CoNLL-U.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if content.startswith(b"\x1f\x8b") else content).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise CorpusError(f"cannot read {path}: {error}; it needs CoNLL-U in UTF-8, plain or gzip") from error
    return list(parse_conllu(text.split("\n"), name=str(path)))


def parse_conllu(lines: Iterable[str], *, name: str = "the text") -> Iterator[Sentence]:
    r"""The sentences of lines of CoNLL-U: ten columns between tabs, an empty line after each sentence.

    Comments, multiword tokens (1-2) and empty nodes (8.1) are passed over: the words are the syntactic ones.

    Raises:
        CorpusError: a line that has not ten columns, a word out of its order, a head that is not there.

    Source: the format's description, https://universaldependencies.org/format.html.

    >>> lines = ["1\tShe\t_\t_\t_\t_\t2\tnsubj\t_\t_", "2\tsings\t_\t_\t_\t_\t0\troot\t_\t_", ""]
    >>> list(parse_conllu(lines))
    [Sentence(words=('She', 'sings'), heads=(1, -1), relations=('nsubj', 'root'))]
    """
    rows: list[tuple[str, int, str]] = []
    place = name
    for number, raw in enumerate(lines, start=1):
        line = raw.rstrip("\r\n")
        if not line.strip():
            if rows:
                yield _sentence(rows, place)
            rows = []
            continue
        if line.startswith("#"):
            continue
        place = f"{name}, line {number}"
        columns = line.split("\t")
        if len(columns) != COLUMNS:
            raise CorpusError(f"{place}: {len(columns)} columns between tabs; CoNLL-U needs {COLUMNS}")
        if "-" in columns[0] or "." in columns[0]:
            continue
        if columns[0] != str(len(rows) + 1):
            raise CorpusError(f"{place}: the word has the number {columns[0]!r}; it needs {len(rows) + 1}")
        if not columns[6].isdecimal():
            raise CorpusError(f"{place}: the head is {columns[6]!r}; it needs the number of a word, or 0 for the root")
        rows.append((columns[1], int(columns[6]), columns[7]))
    if rows:
        yield _sentence(rows, place)


def _sentence(rows: list[tuple[str, int, str]], place: str) -> Sentence:
    heads = tuple(head - 1 for _, head, _ in rows)
    wrong = [head + 1 for head in heads if head >= len(rows)]
    if wrong:
        raise CorpusError(f"{place}, the end of a sentence: a word has the head {wrong[0]}, and there are {len(rows)}")
    return Sentence(tuple(word for word, _, _ in rows), heads, tuple(relation for _, _, relation in rows))
