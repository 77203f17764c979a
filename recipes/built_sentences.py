"""Sentences built of others for `recipes/english-french-built-text.yaml`: longer, with words that no text has.

    python recipes/built_sentences.py --data DIR --to data/built/train.tsv.gz

DIR has the texts of `recipes/english-french-text.yaml`, whose sentences have nine words at most where they are no
captions. Of them, and of the long sentences of `recipes/news-sentences.tsv`, this makes pairs in three steps:

- a word that `recipes/news-words.tsv` has, in both languages, becomes another of its class, as in Fadaee et al. 2017
  (arXiv 1705.00440), there chosen by a language model, here drawn;
- some words that are linked to one word of the other side become a code, which `regard prepare` turns into a
  placeholder as it does names: so a model learns what to do about a word that it does not know (Luong et al. 2015,
  arXiv 1410.8206);
- statements are joined by what `recipes/news-joints.tsv` has: to clauses of one sentence.
"""

from __future__ import annotations

import argparse
import gzip
import random
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, Self

import english_french_floors
from inflected_words import inflected

from regard.heads.word_alignment import Link
from regard.translation.corpus import ParallelText
from regard.translation.data_split import unseen
from regard.translation.pair_variations import Pair, clean
from regard.translation.word_aligner import align_words

SENTENCES = Path(__file__).with_name("news-sentences.tsv")
JOINTS = Path(__file__).with_name("news-joints.tsv")
ROUNDS, ROUNDS_OF_LONG = 2, 70
"""How often each pair is varied, and each of the long sentences."""
VARIED, JOINED = 55_000, 60_000
"""How many varied pairs of the texts are kept, and how many joined ones are built."""
LONGEST = 45
"""Words of the clauses that are joined, at most."""
COMMON = 250
"""So many of the most frequent words never become a code."""

_ENGLISH = re.compile(r"^(\W*)([^\W\d_]+(?:-[^\W\d_]+)*)((?:'s)?\W*)$")
_FRENCH = re.compile(r"^(\W*(?:\w{1,2}['’])?)([^\W\d_]+(?:-[^\W\d_]+)*)(\W*)$")
_WORD = re.compile(r"(?<![\w'’])[^\W\d_]+(?:-[^\W\d_]+)*")
_ELIDED_BEFORE = tuple("aeiouyhàâéèêëîïôûœ")
_ASPIRATE = (
    "h" + rest for rest in ("aut", "éros", "arbour", "onte", "asard", "ollandais", "ongrois", "ambourg", "ockey")
)
_ASPIRATES = tuple(_ASPIRATE)
_AN_EXCEPTIONS = ("uni", "use", "euro", "one", "ura")


class Cut(NamedTuple):
    """A word of a text between white space: what is before its letters, they, and what is behind."""

    before: str
    word: str
    behind: str


def cut(words: Sequence[str], pattern: re.Pattern[str]) -> list[Cut | None]:
    """Each word in three parts; None where it has no letters, or several runs of them."""
    found = (pattern.match(word) for word in words)
    return [Cut(one[1], one[2], one[3]) if one else None for one in found]


def elided(french: str) -> bool:
    """Whether "le" is "l'" before a word."""
    return french.lower().startswith(_ELIDED_BEFORE) and not french.lower().startswith(_ASPIRATES)


@dataclass(frozen=True)
class WordClasses:
    """English forms and their French ones, by classes whose forms can stand for each other in a sentence.

    French forms of a class are apart by whether articles are elided before them, so that no article has to change.
    """

    of_english: dict[str, list[tuple[str, str]]]
    """Class and French form of an English one."""
    members: dict[tuple[str, bool], list[tuple[str, str]]]

    @classmethod
    def of_forms(cls, forms: Iterable[tuple[str, str, str]]) -> Self:
        """The classes of forms, each a class, an English form and its French one."""
        of_english: defaultdict[str, list[tuple[str, str]]] = defaultdict(list)
        members: defaultdict[tuple[str, bool], list[tuple[str, str]]] = defaultdict(list)
        for kind, english, french in forms:
            of_english[english].append((kind, french))
            members[kind, elided(french)].append((english, french))
        return cls(dict(of_english), dict(members))

    def substituted(self, pair: Pair, share: float, draw: random.Random) -> Pair:
        """A pair with another word of its class for a share of those that stand once on either side."""
        source, target = pair[0].split(" "), pair[1].split(" ")
        english, french = cut(source, _ENGLISH), cut(target, _FRENCH)
        said = Counter(one.word.lower() for one in english if one)
        heard = Counter(one.word.lower() for one in french if one)
        for at, one in enumerate(english):
            if one is None or said[one.word.lower()] != 1:
                continue
            key = one.word if one.word in self.of_english else one.word.lower()
            known = [(kind, form) for kind, form in self.of_english.get(key, ()) if heard[form.lower()] == 1]
            if not known or draw.random() > share:
                continue
            form = known[0][1]
            kind = draw.choice([kind for kind, other in known if other == form])
            new, translation = draw.choice(self.members[kind, elided(form)])
            there = next(row for row, other in enumerate(french) if other and other.word.lower() == form.lower())
            source[at] = replaced(one, new, key)
            target[there] = replaced(french[there], translation, form)
        return " ".join(with_articles(source)), " ".join(target)


def replaced(one: Cut | None, word: str, was: str) -> str:
    """Another word in the place of one, with a capital where that had one that is not its own."""
    if one is None:
        return word
    capital = one.word[0].isupper() and not was[0].isupper()
    return one.before + (word[0].upper() + word[1:] if capital else word) + one.behind


def with_articles(words: list[str]) -> list[str]:
    """English words with "a" or "an" as the next word asks for."""
    for at, (word, following) in enumerate(pairwise(words)):
        letters = following.strip('"(').lower()
        if word.lower() in ("a", "an") and letters:
            vowel = letters[0] in "aeiou" and not letters.startswith(_AN_EXCEPTIONS)
            words[at] = word[0] + ("n" if vowel else "")
    return words


class Codes:
    """Codes in place of words of which a model is not to learn the spelling."""

    def __init__(self, common: Collection[str]) -> None:
        self.common = common
        self.used = 0

    def hidden(self, pair: Pair, links: Collection[Link], share: float, draw: random.Random) -> Pair:
        """A pair with codes for a share of the words that are linked to one word, and that one to no other."""
        source, target = pair[0].split(" "), pair[1].split(" ")
        english, french = cut(source, _ENGLISH), cut(target, _FRENCH)
        said, heard = Counter(row for row, _ in links), Counter(column for _, column in links)
        for row, column in sorted(links):
            one, other = english[row], french[column]
            if one is None or other is None or said[row] != 1 or heard[column] != 1:
                continue
            elision = other.before[-1:] in "'’" and other.before[-2:-1] != "d" and other.before != ""
            if one.word.lower() in self.common or min(len(one.word), len(other.word)) < 3 or elision:
                continue
            if draw.random() < share:
                self.used += 1
                code = f"xq{1000 + self.used % 9000}"
                source[row] = one.before + code + one.behind
                target[column] = re.sub("d['’]$", "de ", other.before) + code + other.behind
        return " ".join(source), " ".join(target)


@dataclass(frozen=True)
class Clauses:
    """Joins statements to longer sentences.

    joints: what stands between, before and after clauses, in both languages. inner: English and French words that begin
    in lower case within a sentence.
    """

    joints: dict[str, list[Pair]]
    inner: tuple[frozenset[str], frozenset[str]]

    @classmethod
    def of(cls, pairs: Sequence[Pair], joints: Path = JOINTS) -> Self:
        """The joints of a table, and the words of pairs."""
        table: defaultdict[str, list[Pair]] = defaultdict(list)
        for line in joints.read_text(encoding="utf-8").splitlines():
            place, english, french = line.split("\t")
            table[place].append((english, french))
        english, french = (
            frozenset(word for pair in pairs for word in _WORD.findall(pair[side]) if word[0].islower())
            for side in (0, 1)
        )
        return cls(dict(table), (english, french))

    def joined(self, statements: Sequence[Sequence[Pair]], shares: Sequence[float], draw: random.Random) -> Pair:
        """Two or three statements, drawn from several texts by shares, in one sentence, at times with one more."""

        def one() -> Pair:
            return draw.choice(draw.choices(statements, shares)[0])

        built = one()
        for _ in range(draw.choice((1, 1, 1, 2, 2))):
            following = one()
            if built[0].count(" ") + following[0].count(" ") + 2 < LONGEST:
                between = draw.choice(self.joints["between"])
                built = self._with(built, between, self._lowered(following))
        if draw.random() < 0.3:
            after = draw.choice(self.joints["after"])
            built = built[0][:-1] + after[0] + ".", built[1][:-1] + after[1] + "."
        if draw.random() < 0.35:
            before = draw.choice(self.joints["before"])
            built = self._with(("", ""), before, self._lowered(built))
        if draw.random() < 0.15:
            following = one()
            built = f"{built[0]} {following[0]}", f"{built[1]} {following[1]}"
        if draw.random() < 0.05:
            built = f'"{built[0]}"', f"« {built[1]} »"
        return built

    @staticmethod
    def _with(first: Pair, joint: Pair, following: Pair) -> Pair:
        """A statement, if any, without its full stop, a joint, and a clause behind it."""
        english, french = first[0][:-1] + joint[0], first[1][:-1] + joint[1]
        que = french.endswith("que") and elided(following[1])
        return f"{english} {following[0]}", (french[:-1] + "'" if que else french + " ") + following[1]

    def _lowered(self, pair: Pair) -> Pair:
        """A statement as it is within a sentence: "I" and names keep their capital."""
        sides = []
        for text, inner in zip(pair, self.inner, strict=True):
            first = re.split(r"[\W_]", text, maxsplit=1)[0]
            small = first.lower() in inner or re.match(r"[^\W\d_]['’]", text) is not None
            sides.append(text[0].lower() + text[1:] if small and not re.match(r"I\b", text) else text)
        return sides[0], sides[1]


def is_statement(pair: Pair) -> bool:
    """Whether both sides are one sentence that ends with a full stop, without quotation marks."""
    return all(text.endswith(".") and not re.search('[.!?"«»]', text[:-1]) for text in pair)


@dataclass(frozen=True)
class Texts:
    """What sentences are built of: everyday sentences and captions, and long sentences of our own."""

    short: list[Pair]
    long: list[Pair]

    @classmethod
    def read(cls, data: Path) -> Self:
        """The texts that are trained on: no sentence of them is in one that is validated or tested on."""
        everyday = english_french_floors.everyday(data)
        held_out = [everyday["validation"], english_french_floors.english_french(data, "multi30k/val")]
        held_out += english_french_floors.texts(data).values()
        captions = english_french_floors.english_french(data, "multi30k/train")
        short = [pair for text in (everyday["train"], captions) for pair in _unseen(_pairs(text), held_out)]
        lines = SENTENCES.read_text(encoding="utf-8").splitlines()
        return cls(short, _unseen([(line.split("\t")[0], line.split("\t")[1]) for line in lines], held_out))

    @cached_property
    def links(self) -> list[list[Link]]:
        """The links of the words of each pair, those of the long sentences last."""
        sides = ([pair[side].split(" ") for pair in (*self.short, *self.long)] for side in (0, 1))
        return align_words(*sides)


def _pairs(text: ParallelText) -> list[Pair]:
    return list(zip(text.sources, text.targets, strict=True))


def _unseen(pairs: Iterable[Pair], held_out: Sequence[ParallelText]) -> list[Pair]:
    kept = clean(pairs, 80, 3.0)
    sources, targets = ([pair[side] for pair in kept] for side in (0, 1))
    return unseen(ParallelText.pair(sources, targets), held_out)


def built(texts: Texts, draw: random.Random) -> list[Pair]:
    """Pairs with other words and with codes, those of the long sentences, and pairs joined of both."""
    classes = WordClasses.of_forms(inflected())
    frequent = Counter(word.lower() for source, _ in texts.short for word in _WORD.findall(source))
    codes = Codes({word for word, _ in frequent.most_common(COMMON)})
    rows = [(pair, links) for pair, links in zip([*texts.short, *texts.long], texts.links, strict=True)]

    def vary(pair: Pair, links: Collection[Link], shares: Sequence[float], hidden: Sequence[float]) -> Pair:
        found = classes.substituted(pair, draw.choice(shares), draw)
        share = draw.choice(hidden)
        return codes.hidden(found, links, share, draw) if share else found

    few, many = (0.0, 0.0, 0.0, 0.15, 0.3), (0.0,) * 5 + (0.15, 0.3, 0.5)
    every = [vary(*row, (0.0, *[0.8] * 6), many) for _ in range(ROUNDS) for row in rows[: len(texts.short)]]
    varied = [pair for pair, (was, _) in zip(every, rows[: len(texts.short)] * ROUNDS, strict=True) if pair != was]
    long = [vary(*row, (0.3, 0.6, 0.9), few) for _ in range(ROUNDS_OF_LONG) for row in rows[len(texts.short) :]]
    draw.shuffle(varied)
    parts = [[pair for pair in some if is_statement(pair)] for some in (varied, texts.short, long)]
    clauses = Clauses.of([*texts.short, *texts.long])
    joined = [clauses.joined(parts, (0.675, 0.225, 0.1), draw) for _ in range(JOINED)]
    return [*varied[:VARIED], *long, *joined]


def main() -> None:
    """Build, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the texts")
    parser.add_argument("--to", type=Path, required=True, help="table to write")
    arguments = parser.parse_args()
    pairs = built(Texts.read(arguments.data), random.Random(1))
    arguments.to.parent.mkdir(parents=True, exist_ok=True)
    table = "".join(f"{source}\t{target}\n" for source, target in pairs).encode()
    arguments.to.write_bytes(gzip.compress(table, mtime=0))
    sys.stdout.write(f"{len(pairs):,} pairs in {arguments.to}\n")


if __name__ == "__main__":
    main()
