"""Texts with known relations between words, for recipes/roles_of_heads.py: treebanks, pronouns, synonyms.

Of each text the words, and for each relation its cases. Texts of one group are variants of each other: they are on one
side when heads are chosen, and are resampled together.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from regard.heads import RelationCase, Sentence, WordRelation, read_conllu, repeated_nouns

FEWEST_WORDS = 5
SYNONYMS = Path(__file__).with_name("synonyms.tsv")
FRAMES = {
    ("en", "noun"): "We talked about the {} , the {} and the {} .",
    ("en", "verb"): "Some {} , some {} and others {} .",
    ("en", "adjective"): "One is {} , one is {} and one is {} .",
    ("ko", "noun"): "{} , {} 그리고 {} .",
    ("ko", "verb"): "{} , {} 그리고 {} .",
    ("ko", "adjective"): "{} , {} 그리고 {} .",
}
PRONOUNS = {"he", "she", "they", "his", "her", "their", "him", "them"}
TITLES = {"mr", "mrs", "ms", "dr", "st", "jr", "sr", "prof", "rev", "no", "vs"}
WORDS = re.compile(r"\w+|[^\w\s]")


@dataclass(frozen=True)
class AnnotatedText:
    """A text and the cases of each relation in it."""

    sentence: Sentence
    cases: Mapping[str, Sequence[RelationCase]]
    group: str


def treebank(path: Path, relations: Iterable[WordRelation], most_words: int) -> Iterator[AnnotatedText]:
    """The relations in a treebank's sentences of 5 to `most_words` words, and nouns that the next sentence repeats."""
    relations = tuple(relations)
    sentences = [one for one in read_conllu(path) if FEWEST_WORDS <= len(one.words) <= most_words]
    for sentence in sentences:
        cases = {relation.name: relation.cases(sentence) for relation in relations}
        yield AnnotatedText(sentence, cases, sentence.identifier)
    for first, second in itertools.pairwise(sentences):
        if _follows(first.identifier, second.identifier) and (cases := repeated_nouns(first, second)):
            name = "noun → same noun, sentence before"
            yield AnnotatedText(_joined(first, second), {name: cases}, first.identifier)


def _follows(first: str, second: str) -> bool:
    """Whether a sentence is the next one of the same document, by identifiers such as NAME-0001 and NAME-s1."""
    (one, _, a), (two, _, b) = first.rpartition("-"), second.rpartition("-")
    numbers = a.removeprefix("s"), b.removeprefix("s")
    return one == two and all(map(str.isdecimal, numbers)) and int(numbers[1]) == int(numbers[0]) + 1


def _joined(first: Sentence, second: Sentence) -> Sentence:
    """The words of two sentences as one text, without annotation."""
    words, spaces = first.words + second.words, (*first.spaces[:-1], True, *second.spaces)
    return Sentence(words, (-1,) * len(words), ("root",) * len(words), spaces=spaces)


def plain(words: Sequence[str], spaces: Sequence[bool] | None = None) -> Sentence:
    """A text without annotation; no space stands before commas and full stops unless `spaces` says so."""
    if spaces is None:
        spaces = [following not in (",", ".") for following in [*words[1:], ""]]
    return Sentence(tuple(words), (-1,) * len(words), ("root",) * len(words), spaces=tuple(spaces))


def gap(path: Path) -> Iterator[AnnotatedText]:
    """GAP: which of two names, both before it, a pronoun refers to; one of them and not the other."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(io.StringIO(file.read()), delimiter="\t", quoting=csv.QUOTE_NONE))
    for row in rows:
        found = list(WORDS.finditer(row["Text"]))
        spans = [_span(found, int(row[f"{name}-offset"]), row[name]) for name in ("Pronoun", "A", "B")]
        right = [row["A-coref"] == "TRUE", row["B-coref"] == "TRUE"]
        if right[0] == right[1] or None in spans:
            continue
        pronoun, a, b = (span for span in spans if span is not None)
        if max(a[1], b[1]) >= pronoun[0]:
            continue
        words = [word.group() for word in found]
        spaces = [row["Text"][word.end() : word.end() + 1].isspace() for word in found]
        case = RelationCase.of_choice(pronoun, (a, b), [right.index(True)])
        crossed = [_boundaries(words[name[1] : pronoun[0] + 1]) > 0 for name in (a, b)]
        names = {0: "both in its sentence", 1: "one in its sentence", 2: "both in sentences before"}
        cases = {"pronoun → name": [case], f"pronoun → name, {names[sum(crossed)]}": [case]}
        yield AnnotatedText(plain(words, spaces), cases, row["ID"])


def _span(found: Sequence[re.Match[str]], begin: int, name: str) -> tuple[int, int] | None:
    """The first and last word of a name at an offset of the text."""
    end = begin + len(name)
    inside = [at for at, word in enumerate(found) if word.start() < end and word.end() > begin]
    return (inside[0], inside[-1]) if inside else None


def _boundaries(words: Sequence[str]) -> int:
    """Ends of sentences by their marks: . ! ? before a capital, but for a full stop after an initial or a title."""
    return sum(
        mark in (".", "!", "?")
        and following[:1].isupper()
        and not (mark == "." and (len(before) == 1 or before.lower() in TITLES))
        for before, mark, following in zip(words, words[1:], words[2:], strict=False)
    )


def winogender(path: Path) -> Iterator[AnnotatedText]:
    """Winogender schemas: which of an occupation and a participant a pronoun refers to; a group for each occupation."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        lines = [line.rstrip("\n").split("\t") for line in file][1:]
    for name, text in lines:
        words = WORDS.findall(text)
        lower = [word.lower() for word in words]
        candidates = [noun_phrase(lower, who.split()) for who in name.split(".")[:2]]
        at = next(number for number, word in enumerate(lower) if word in PRONOUNS)
        case = RelationCase.of_choice((at, at), candidates, [int(name.split(".")[2])])
        yield AnnotatedText(plain(words), {"pronoun → person": [case]}, name.split(".")[0])


def noun_phrase(words: Sequence[str], name: Sequence[str]) -> tuple[int, int]:
    """The first and last word of a participant, with its article."""
    first = next(number for number in range(len(words)) if list(words[number : number + len(name)]) == list(name))
    last = first + len(name) - 1
    return (first - 1, last) if first and words[first - 1] in ("the", "a", "an") else (first, last)


def synonyms(language: str) -> Iterator[AnnotatedText]:
    """Of two words before it, which is a synonym of the last; a group for each pair of synonyms.

    The other word is one of another pair of the same half, and stands once before and once after the synonym: every
    rule by position is right in half of the cases. For comparison the word itself stands in place of the synonym, and
    an antonym of both, where the table has one, in place of the other word.
    """
    with SYNONYMS.open(encoding="utf-8") as file:
        table = [row for row in csv.DictReader(file, delimiter="\t") if row["language"] == language]
    for kind, same in itertools.groupby(table, key=lambda row: row["class"]):
        rows = list(same)
        pairs = [(row["word"], row["synonym"]) for row in rows]
        frame = FRAMES[language, kind].split()
        slots = [at for at, word in enumerate(frame) if word == "{}"]
        for number, pair in enumerate(pairs):
            others = pairs[(number + 2) % len(pairs)]  # pairs of even and of odd number are the two halves
            opposite = [rows[number]["antonym"]] if rows[number]["antonym"] else []
            for word, synonym in (pair, pair[::-1]):
                for name, right, wrong in (
                    ("word → synonym", synonym, others),
                    ("word → synonym, not antonym", synonym, opposite),
                    ("word → same word", word, others),
                ):
                    for other, first in itertools.product(wrong, (True, False)):
                        fill = iter((right, other, word) if first else (other, right, word))
                        words = [next(fill) if each == "{}" else each for each in frame]
                        spans = [(at, at) for at in slots]
                        case = RelationCase.of_choice(spans[2], spans[:2], [0 if first else 1])
                        yield AnnotatedText(plain(words), {name: [case]}, f"{kind} {number}")
