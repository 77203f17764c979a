"""Placeholders ① to ⑳: signs that stand for the parts of a line which a translation copies.

A small model cannot spell a number, a name, an address or a quoted word that it has not seen, but it can learn where a
sign belongs. The parts are replaced before a line is translated, and put back into its translation.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard.errors import CorpusError
from regard.translation.kept_record import load_record
from regard.translation.vocabulary import LineVocabulary
from regard.utils.atomic_files import atomic_write

FILE = "placeholders.json"
SIGNS = "".join(map(chr, range(0x2460, 0x2474)))
"""The placeholders, ① to ⑳."""
_MEND = "it needs to be what `regard prepare` wrote"
FREQUENT = 20
"""A name of so many pairs is a word that the model learns to spell."""
FEWEST_CAPITALS = 4
"""A line of fewer letters is no sentence in capitals: "OK!"."""
LONGEST_PART = 200
"""The most characters of a part, as of a word (see `kept_text`)."""

_SIGNS = rf"[{SIGNS}]+"  # of a text that has them itself
_ADDRESS = (
    r"(?:https?://|www\.)[^\s<>\"“”«»]*[^\s<>\"“”«».,;:!?)\]'’]"
    r"|[\w.+-]{1,64}@(?:[\w-]{1,64}\.)+[a-z]{2,}"
    r"|(?<![\w.-])(?:[\w-]{1,64}\.)+[a-z]{2,}(?:/[^\s<>\"“”«»]*[^\s<>\"“”«».,;:!?)\]'’])?(?![\w-])"
    r"|(?<!\w)[@#]\w*[^\W\d]\w*"
)
_ORDINAL = r"(?:st|nd|rd|th|s|am|pm|er|ère|e|ème|h)\b"  # which a translation does not copy
_NUMBER = rf"(?<!\w)\d+(?:[.,:/’'-]\d+)*(?=\W|$|{_ORDINAL})"
_CODE = r"(?<!\w)(?=[^\W\d_]*-?\d)[^\W_]+(?:[-._/][^\W_]+)*(?!\w)"
_NAME = r"(?<![\w'’])(?:[A-Z]['’](?=[A-Z]))?[^\W\d_]+(?:-[^\W\d_]+)*"
_FOUND = re.compile(rf"(?P<copied>{_SIGNS}|{_ADDRESS}|{_NUMBER}|{_CODE})|(?P<word>{_NAME})")
_QUOTED = re.compile(r"""(?<!\w)(?:"[^"\s]+(?: [^"\s]+){0,2}"|“[^“”\s]+(?: [^“”\s]+){0,2}”|'[^'\s]+')(?!\w)""")
_SENTENCE_MARKS = ".,;!?…"
_IN_PROSE = re.compile(  # and in no tag, variable or contraction
    r"""(?<![^\s(\["“«—–-])[^\W\d_]+(?:-[^\W\d_]+)*(?:['’]s)?(?=$|[\s)\]"”».,;:!?…—–-]|['’](?!\w))"""
)
_PART_OF_QUOTE = re.compile(r"""[^\s"“”']+""")


@dataclass(frozen=True)
class PlacedLine:
    """A line as a model reads it: `parts[i]` is what the i-th of the signs stands for.

    capitals: whether the line is in capitals, which the text is not; its translation is put back in them. unknown: the
    parts that are copied because the model does not know them, and for nothing else: words that are no names.
    """

    text: str
    parts: tuple[str, ...] = ()
    capitals: bool = False
    unknown: tuple[str, ...] = ()

    @property
    def stand_for(self) -> dict[str, str]:
        """What each sign stands for."""
        return dict(zip(SIGNS, self.parts, strict=False))

    @property
    def spelled(self) -> str:
        """The text with its unknown words spelled, and signs for its other parts.

        >>> PlacedLine("① has ② cats.", ("Ngozi", "tabby"), unknown=("tabby",)).spelled
        '① has tabby cats.'
        """
        text = self.text
        for sign, part in self.stand_for.items():
            text = text.replace(sign, part) if part in self.unknown else text
        return text

    def named(self, tokens: Sequence[str]) -> tuple[str, ...]:
        """Tokens for display, with the parts in place of their signs."""
        return tuple(self._with_parts(token) or token for token in tokens) if self.parts else tuple(tokens)

    def missing(self, translation: str) -> list[str]:
        """The parts that a translation leaves out: whose sign is not in it."""
        return [part for sign, part in self.stand_for.items() if sign in self.text and sign not in translation]

    def put_back(self, translation: str) -> str:
        """A translation with the parts in place of their signs; a sign that stands for nothing here is left out.

        >>> PlacedLine("① has ② cats.", ("Ngozi", "17")).put_back("① a ② chats.")
        'Ngozi a 17 chats.'
        """
        return self._with_parts(translation.upper() if self.capitals else translation)

    def _with_parts(self, translation: str) -> str:
        if not re.search(_SIGNS, translation):
            return translation
        extra = "".join(sign for sign in SIGNS if sign not in self.stand_for)
        if extra:
            translation = re.sub(rf"(?<!\S)[{extra}](?:\s+|$)|[{extra}]", "", translation)
        return re.sub(f"[{SIGNS}]", lambda sign: self.stand_for[sign[0]], translation)


@dataclass(frozen=True)
class Placeholders:
    """Replaces the parts of a line that a translation copies: numbers, addresses, quoted words and unknown names.

    words: those that the model translates, or can spell. A capitalised word that is none of them is a name. most: how
    many of the signs are used. unknown_words: whether other words that are none of them are copied as names are.

    Numbers are digits with what joins them (1,299.99, 3:45, 2024-05-06) and codes (A4, COVID-19); addresses are URLs,
    e-mail addresses, domain names and files, @names and #tags; quoted are one to three words in quotation marks without
    a mark of a sentence between them. Of a line with more parts than signs the first are replaced. No part has a space,
    so a line has the same number of words before and after; equal parts have one sign.

    Source: Luong et al. 2015 (arXiv 1410.8206) and Crego et al. 2016 (arXiv 1610.05540, section 3.2) replace rare words
    and entities so; there the classes have signs of their own, here one series serves all.

    >>> placeholders = Placeholders(frozenset(["has", "cats", "see"]))
    >>> placed = placeholders.take_out('Ngozi has 17 cats, see "cats.pdf".')
    >>> placed.text, placed.parts
    ('① has ② cats, see "③".', ('Ngozi', '17', 'cats.pdf'))
    """

    words: frozenset[str]
    most: int = len(SIGNS)
    unknown_words: bool = False

    def known_by(self, vocabulary: LineVocabulary) -> Placeholders:
        """The same with no more signs than a vocabulary knows."""
        unknown = vocabulary.unknown_characters(SIGNS)
        return replace(self, most=min(map(SIGNS.index, unknown), default=len(SIGNS)))

    def but_for(self, words: Collection[str]) -> Placeholders:
        """The same with words that are no names and no numbers; names with a capital letter are none either."""
        if not words:
            return self
        return replace(self, words=self.words.union(words, (word.capitalize() for word in words)))

    def as_read(self, line: str) -> PlacedLine:
        """A line as a model reads it: with placeholders, and without capitals where all its letters are.

        >>> Placeholders(frozenset(["stop", "at"])).as_read("STOP AT www.x.org!")
        PlacedLine(text='Stop at ①!', parts=('www.x.org',), capitals=True, unknown=())
        """
        placed = self.take_out(line)
        letters = "".join(filter(str.isalpha, placed.text))
        if len(letters) < FEWEST_CAPITALS or not letters.isupper():
            return placed
        lower = re.sub(r"(?:^|[.!?]\s)\W*\w", lambda start: start[0].upper(), placed.text.lower())
        return replace(placed, text=lower, capitals=True)

    def take_out(self, line: str, first: int = 0) -> PlacedLine:
        """A line with placeholders for its parts, the first of them the sign with that number, from 0."""
        signs: dict[str, str] = {}
        named: set[str] = set()
        unused = iter(SIGNS[first : self.most])
        text, at = [], 0
        for start, end, unknown in self._parts(line):
            part = line[start:end]
            sign = signs.get(part) or next(unused, None)
            if sign is None:
                continue
            signs[part] = sign
            if not unknown:
                named.add(part)
            text += [line[at:start], sign]
            at = end
        unknown_words = tuple(part for part in signs if part not in named)
        return PlacedLine("".join([*text, line[at:]]), (*[""] * first, *signs), unknown=unknown_words)

    def pair(self, source: str, target: str, first: int = 0) -> tuple[str, str]:
        """A line and its translation with placeholders for the parts that are in both.

        `first` is that of `take_out`. A number is found in a French or German spelling too: 1,299.99 as 1 299,99.

        >>> Placeholders(frozenset(["it", "costs"])).pair("It costs €1,299.50.", "Ça coûte 1 299,50 €.")
        ('It costs €①.', 'Ça coûte ① €.')
        """
        placed, target = self.placed_pair(source, target, first)
        return placed.text, target

    def placed_pair(self, source: str, target: str, first: int = 0) -> tuple[PlacedLine, str]:
        """As `pair`, with what the signs stand for."""
        placed = self.take_out(source, first)
        source = placed.text
        for sign, part in zip(SIGNS, placed.parts, strict=False):
            spelled = "|".join(map(re.escape, _spellings(part)))
            whole = rf"(?<!\w)(?<!\d[.,:])(?:{spelled})(?![.,:]?\d)(?:(?!\w)|(?={_ORDINAL}))"
            target, count = re.subn(whole, sign, target) if part else (target, 0)
            if not count:
                source = source.replace(sign, part)
        return replace(placed, text=source), target

    def _parts(self, line: str) -> Iterator[tuple[int, int, bool]]:
        """Where each part begins and ends, in their order, and whether it is an unknown word and no name."""
        quoted = [found.span() for found in _QUOTED.finditer(line) if not set(_SENTENCE_MARKS) & set(found[0][-2])]
        words = {word[0] for word in re.finditer(_NAME, line)} - {"I"}
        titled = 2 * sum(word[0].isupper() for word in words) > len(words)
        at = 0
        for start, end in [*quoted, (len(line), len(line))]:
            for found in _FOUND.finditer(line, at, start):
                if found[0] in self.words or len(found[0]) > LONGEST_PART:
                    continue
                if found["copied"] is not None or self._is_name(line, found, titled):
                    yield *found.span(), False
                elif self.unknown_words and self._is_unknown(line, found):
                    yield *found.span(), True
            yield from ((*word.span(), False) for word in _PART_OF_QUOTE.finditer(line, start, end))
            at = end

    def _is_unknown(self, line: str, found: re.Match[str]) -> bool:
        """Whether a word without a capital letter is unknown, or has an unknown part between hyphens."""
        unknown = not found[0][0].isupper() and any(part not in self.words for part in found[0].split("-"))
        return unknown and _IN_PROSE.match(line, found.start()) is not None

    def _is_name(self, line: str, found: re.Match[str], titled: bool) -> bool:
        """Whether a word is a name: capitalised and unknown, or, within a sentence, unknown in this spelling."""
        word = found[0]
        if not word[0].isupper():
            return False
        before = line[: found.start()].rstrip(", ")[-1:]
        return word.lower() not in self.words or (not titled and word[1:].islower() and before.islower())

    @classmethod
    def learn(cls, sources: Sequence[str], targets: Sequence[str], *, frequent: int | None = FREQUENT) -> Placeholders:
        """Learn from pairs which words are translated, and which capitalised ones are copied: the names.

        A capitalised word is a name where at least half of its pairs have it on both sides; one of `frequent` pairs or
        more counts as a word all the same; None: no name does.

        Raises:
            CorpusError: the sides differ in length, or are empty.

        >>> pairs = ["I saw Ngozi in London.", "Cats sleep."], ["J'ai vu Ngozi à Londres.", "Les chats dorment."]
        >>> sorted(Placeholders.learn(*pairs).words)
        ['I', 'London', 'cats', 'in', 'saw', 'sleep']
        """
        if len(sources) != len(targets) or not sources:
            raise CorpusError(
                f"there are {len(sources):,} source lines and {len(targets):,} target lines; placeholders are learned "
                "from pairs, one at least"
            )
        seen, copied, words = Counter[str](), Counter[str](), set[str]()
        first = Counter[str]()
        for source, target in zip(sources, targets, strict=True):
            said = set(re.findall(_NAME, target))
            for found in dict.fromkeys(word.span() for word in re.finditer(_NAME, source)):
                word = source[slice(*found)]
                if not word[0].isupper():
                    words.add(word)
                    continue
                seen[word] += 1
                copied[word] += word in said
                first[word] += _begins_sentence(source[: found[0]])
        for word, count in seen.items():
            if 2 * copied[word] < count:
                words.add(word.lower() if first[word] == count and word != "I" else word)
            elif frequent is not None and count >= frequent:
                words.add(word)
        return cls(frozenset(words))

    def save(self, folder: Path) -> None:
        """Write placeholders.json into a folder.

        Raises:
            CheckpointError: it cannot be written.
        """
        with atomic_write(folder / FILE) as partial:
            kept = {"words": " ".join(sorted(self.words)), "unknown_words": self.unknown_words}
            partial.write_text(json.dumps(kept, ensure_ascii=False), "utf-8")

    @classmethod
    def read(cls, path: Path) -> Placeholders:
        """Read the placeholders.json of a prepared text.

        Raises:
            CorpusError: there is no such file.
            CheckpointError: it was damaged.
        """
        if not path.is_file():
            raise CorpusError(
                f"there is no file {path}; it needs to be the placeholders.json that `regard prepare` wrote"
            )
        return load_record(path, cls._of_fields, _MEND)  # pyright: ignore[reportReturnType]

    @classmethod
    def load(cls, folder: Path) -> Placeholders | None:
        """What is kept in the folder of a model, None where nothing is.

        Raises:
            CheckpointError: placeholders.json was damaged.
        """
        return load_record(folder / FILE, cls._of_fields, _MEND)

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Placeholders:
        if not isinstance(fields["words"], str):
            raise TypeError(f"its words are {type(fields['words']).__name__}, and need to be one text")
        unknown_words = fields.get("unknown_words", False)
        if not isinstance(unknown_words, bool):
            raise TypeError(f"its unknown_words is {unknown_words!r}, and needs to be true or false")
        return cls(frozenset(fields["words"].split()), unknown_words=unknown_words)


def signs_of(text: str) -> Counter[str]:
    """How often each placeholder is in a text."""
    return Counter(re.findall(f"[{SIGNS}]", text))


def _begins_sentence(before: str) -> bool:
    """Whether a word begins a sentence, by what is before it."""
    said = before.rstrip(" \"'“”«»-")
    return not said or said[-1] in ".!?…"


def _spellings(part: str) -> list[str]:
    """A part, and a number as other languages write it."""
    if not part[:1].isdigit() or not set(",.") & set(part):
        return [part]
    swapped = part.translate({ord(","): ".", ord("."): ","})
    spaced = (part.replace(",", space).replace(".", ",") for space in (" ", "\xa0", "\u202f", ""))
    return list(dict.fromkeys([part, swapped, *spaced]))
