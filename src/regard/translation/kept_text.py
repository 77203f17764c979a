"""Parts of a line that no model translates, and that are kept as they are: tags, unknown signs, what is no word.

They are taken out of a line before it is translated, and put back into its translation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from regard.translation.input_lines import CLOSING, is_invisible, named, unknown_signs
from regard.translation.vocabulary import LineVocabulary

LONGEST_WORD = 200
"""The most characters of a word: what is longer is an address, encoded data, or a key that was held down."""
_TAG = r"""</?[A-Za-z][\w:-]*(?:\s+[\w:-]+\s*=\s*(?:"[^"<>]*"|'[^'<>]*'))*\s*/?>"""
# Thai to Tibetan, Myanmar, Khmer, and Chinese and Japanese, which have no spaces between words.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u3190-\ua4cf\uf900-\ufaff\U00020000-\U0003ffff"
_LONG = rf"[^\s{_UNSPACED}]{{{LONGEST_WORD + 1},}}"


@dataclass(frozen=True)
class KeptPart:
    """A part that is kept.

    word: how many words of the rest of the line stand before it. glued: whether it touches what is before it, and what
    is behind it.
    """

    text: str
    word: int
    glued: tuple[bool, bool]

    @property
    def opens(self) -> bool:
        """Whether it belongs to what is behind it, as an opening tag does."""
        return self.glued == (False, True)

    def place(self, share: float) -> int:
        """The whole number of words before it, from a share of them."""
        closes = self.glued == (True, False)
        return math.floor(share) if self.opens else math.ceil(share) if closes else round(share)


@dataclass(frozen=True)
class KeptLine:
    """The text of a line without the parts that are kept, and these in their order."""

    text: str
    parts: tuple[KeptPart, ...] = ()

    def warnings(self) -> Iterator[str]:
        """A sentence about unknown signs, and one about words that are too long."""
        words = [part.text for part in self.parts if len(part.text) > LONGEST_WORD and part.text[0] != "<"]
        signs = [part.text for part in self.parts if part.text not in words and not re.fullmatch(_TAG, part.text)]
        shown = dict.fromkeys(sign for text in signs for sign in text if not is_invisible(sign))
        if shown:
            yield f"the source vocabulary does not know {named(shown)}, which it keeps as it is"
        for word in words:
            yield (
                f"{word[:20]!r}... has {len(word):,} characters without a space, and a word of more than "
                f"{LONGEST_WORD} is kept as it is"
            )


def take_out(line: str, vocabulary: LineVocabulary) -> KeptLine:
    """Take the parts that are kept out of a line: words that they separated stay separate.

    >>> from regard.translation.vocabulary import Vocabulary, VocabularySettings
    >>> known = Vocabulary.train(["I love you."], VocabularySettings(kind="characters"))
    >>> kept = take_out("I <b>love</b> you ❤.", known)
    >>> kept.text, [(part.text, part.word) for part in kept.parts]
    ('I love you.', [('<b>', 1), ('</b>', 2), ('❤', 3)])
    >>> put_back("Je t'aime.", kept.parts, words=3)
    "<b>Je t'aime.</b> ❤"
    """
    text, at, parts = "", 0, []
    for found in _kept_pattern(line, vocabulary).finditer(line):
        text = _joined(text, line[at : found.start()])
        at, before, behind = found.end(), line[: found.start()][-1:], line[found.end() :][:1]
        glued = before != "" and not before.isspace(), behind != "" and not behind.isspace() and behind not in CLOSING
        parts.append(KeptPart(found[0], len(text.split()), glued))
    return KeptLine(_joined(text, line[at:]) if parts else line, tuple(parts))


def put_back(translation: str, parts: Sequence[KeptPart], words: int) -> str:
    """Put the parts into the translation of a text of so many words.

    What stood at the beginning or the end does so again; between them a part has the same share of the words before it
    as in the source, rounded so that what opens and closes has a word between them.
    """
    if not parts:
        return translation
    said = translation.split()
    items: list[str | KeptPart] = []
    put = 0
    for part in parts:
        share = len(said) if part.word >= words else part.place(part.word * len(said) / words)
        items += [*said[put:share], part]
        put = max(share, put)
    return _spelled([*items, *said[put:]])


def _spelled(items: Sequence[str | KeptPart]) -> str:
    """Words and kept parts with spaces between them, but for parts that touch what is beside them."""
    text = ""
    for before, item in zip([None, *items], items, strict=False):
        behind = isinstance(before, KeptPart) and before.glued[1]
        touches = behind or (isinstance(item, KeptPart) and item.glued[0])
        text += ("" if before is None or touches else " ") + (item.text if isinstance(item, KeptPart) else item)
    return text


def shared_out(parts: Sequence[KeptPart], words: Sequence[int]) -> list[list[KeptPart]]:
    """The kept parts of each piece of a text that is translated in pieces of so many words.

    >>> first, last = KeptPart("<b>", 2, (False, True)), KeptPart("</b>", 3, (True, False))
    >>> [[(part.text, part.word) for part in some] for some in shared_out([first, last], [2, 5])]
    [[], [('<b>', 0), ('</b>', 1)]]
    """
    found: list[list[KeptPart]] = [[] for _ in words]
    for part in parts:
        start = 0
        for number, count in enumerate(words):
            if part.word - start < count + (not part.opens) or number == len(words) - 1:
                found[number].append(replace(part, word=part.word - start))
                break
            start += count
    return found


def _kept_pattern(line: str, vocabulary: LineVocabulary) -> re.Pattern[str]:
    """What is kept of a line."""
    unknown = unknown_signs(line, vocabulary)
    signs = "".join(sign for sign in unknown if not is_invisible(sign))
    joiners = "".join(sign for sign in unknown if is_invisible(sign))
    first, more = (rf"(?!{_TAG})[{re.escape(some)}]" for some in (signs, signs + joiners))
    symbols = [f"{first}(?:{more})*"] if signs else []
    return re.compile("|".join([_TAG, _LONG, *symbols]))


def _joined(text: str, more: str) -> str:
    """Two parts of a line that something stood between: as two words, and without a space before a full stop."""
    text, more = text.rstrip(), more.lstrip() if text.strip() else more
    more = more if text else more.lstrip()
    if not text or not more.strip():
        return text + more
    return text + more if more.lstrip()[0] in CLOSING else f"{text} {more.lstrip()}"
