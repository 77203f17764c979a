"""Parts of a line that no model translates, and that are kept: tags, placeholders, unknown signs, what is no word.

They are taken out of a line before it is translated; `put_back` puts them into its translation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from regard.translation.input_lines import CLOSING, is_invisible, named, unknown_signs
from regard.translation.vocabulary import LineVocabulary

LONGEST_WORD = 200
"""The most characters of a word: what is longer is an address, encoded data, or a key that was held down."""
_TAG = r"""</?[A-Za-z][\w:-]*(?:\s+[\w:-]+\s*=\s*(?:"[^"<>]*"|'[^'<>]*'))*\s*/?>"""
_PLACEHOLDER = r"\{\{[^{}\s]*\}\}|\$?\{[^{}\s]*\}|%\(\w+\)[sdif]|(?<![\w%])%(?:\d+\$)?[sdif](?!\w)"
_MARKUP = rf"{_TAG}|{_PLACEHOLDER}"
_ALONE = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
"""Elements of HTML without a closing tag."""
_JOINTS = "'’-/"
CLOSING_MARKS, OPENING_MARKS = '.,;:!?…)]}»”"', '([{«“"¿¡'
"""Punctuation at the end of a word, and at its beginning."""
# Thai to Tibetan, Myanmar, Khmer, and Chinese and Japanese, which have no spaces between words.
_UNSPACED = "\u0e00-\u0fff\u1000-\u109f\u1780-\u17ff\u2e80-\u312f\u3190-\ua4cf\uf900-\ufaff\U00020000-\U0003ffff"
_LONG = rf"[^\s{_UNSPACED}]{{{LONGEST_WORD + 1},}}"


@dataclass(frozen=True)
class KeptPart:
    """A part that is kept.

    word: how many words of the rest of the line stand before it. glued: whether it touches what is before it, and what
    is behind it, but for tags. element: the number of the element whose tag it is; None for what has no partner.
    beside_marks: whether the text before it ends in punctuation, and none touches it behind, and whether that behind it
    begins with some. ends: whether nothing follows.
    """

    text: str
    word: int
    glued: tuple[bool, bool]
    element: int | None = None
    beside_marks: tuple[bool, bool] = (False, False)
    ends: bool = False

    @property
    def closes(self) -> bool:
        """Whether it is the closing tag of an element."""
        return self.element is not None and self.text.startswith("</")

    @property
    def opens(self) -> bool:
        """Whether it belongs to what is behind it, as an opening tag does."""
        return self.glued == (False, True) if self.element is None else not self.closes


@dataclass(frozen=True)
class KeptLine:
    """The text of a line without the parts that are kept, and these in their order."""

    text: str
    parts: tuple[KeptPart, ...] = ()

    def warnings(self) -> Iterator[str]:
        """A sentence about unknown signs, and one about words that are too long."""
        words = [part.text for part in self.parts if len(part.text) > LONGEST_WORD and part.text[0] != "<"]
        signs = [part.text for part in self.parts if part.text not in words and not re.fullmatch(_MARKUP, part.text)]
        shown = dict.fromkeys(sign for text in signs for sign in text if not is_invisible(sign))
        if shown:
            yield f"the source vocabulary does not know {named(shown)}, which it keeps as it is"
        alone = (part.text for part in self.parts if part.element is None and _tag_name(part.text))
        for tag in dict.fromkeys(alone):
            what = "closes nothing" if tag.startswith("</") else "is not closed"
            yield f"the tag {tag} {what}; it is kept behind the words that it stood behind"
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
    """
    found = list(_kept_pattern(line, vocabulary).finditer(line))
    text, at, places, inline = "", 0, [], False
    for part in found:
        text, at = _joined(text, line[at : part.start()], inline), part.end()
        places.append(len(text.rstrip()))
        inline = re.fullmatch(_MARKUP, part[0]) is not None
    text = _joined(text, line[at:], inline).rstrip() if found else line
    elements = _elements([part[0] for part in found])
    parts = [_part(*one, text) for one in zip(found, elements, places, strict=True)]
    for number, part in enumerate(parts):
        if part.closes and part.element is not None and places[part.element] == places[number]:
            parts[part.element] = replace(parts[part.element], word=part.word)  # an element of no text
    return KeptLine(text, tuple(parts))


def _part(found: re.Match[str], element: int | None, place: int, text: str) -> KeptPart:
    """What was found in a line, at this place of the rest of its text."""
    line = found.string
    before = re.sub(rf"(?:{_TAG})+$", "", line[: found.start()])[-1:]
    behind = re.sub(rf"^(?:{_TAG})+", "", line[found.end() :])[:1]
    glued = before != "" and not before.isspace(), behind != "" and not behind.isspace() and behind not in CLOSING
    said, rest = text[:place], text[place:]
    opens = element is not None and not found[0].startswith("</")
    following = rest.lstrip()[:1]
    # An opening tag may stand in a word, behind a bracket, and is before it.
    word = len((text[: len(text) - len(rest.lstrip())] + following).split()) - 1 if opens and following else None
    return KeptPart(
        text=found[0],
        word=len(said.split()) if word is None else word,
        glued=glued,
        element=element,
        beside_marks=(
            _is_in(said[-1:], CLOSING_MARKS) and not _is_in(rest[:1], CLOSING_MARKS),
            _is_in(following, OPENING_MARKS),
        ),
        ends=not following,
    )


def _is_in(character: str, marks: str) -> bool:
    return character != "" and character in marks


def _elements(texts: Sequence[str]) -> list[int | None]:
    """The number of each tag's element; None for a tag without a partner, and for what is no tag.

    >>> _elements(["<b>", "<br>", "<i>", "</i>", "<u/>", "</p>", "</b>", "<i>"])
    [0, None, 2, 2, None, None, 0, None]
    """
    elements: list[int | None] = [None] * len(texts)
    around: list[tuple[str, int]] = []
    for number, text in enumerate(texts):
        name = _tag_name(text)
        if name and not text.startswith("</"):
            around.append((name, number))
        elif name in dict(around):
            while around:  # what is not closed inside has no partner
                opened, first = around.pop()
                if opened == name:
                    elements[first] = elements[number] = first
                    break
    return elements


def _tag_name(text: str) -> str:
    """The name of the element that a tag opens or closes; "" of what stands alone, as <br> does, and of no tag."""
    if not re.fullmatch(_TAG, text) or text.endswith("/>"):
        return ""
    name = re.split(r"[\s>]", text.lstrip("</"), maxsplit=1)[0]
    return "" if name.lower() in _ALONE else name


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
    first, more = (rf"(?!{_MARKUP})[{re.escape(some)}]" for some in (signs, signs + joiners))
    symbols = [f"{first}(?:{more})*"] if signs else []
    return re.compile("|".join([_MARKUP, _LONG, *_unread(line, vocabulary), *symbols]))


def _unread(line: str, vocabulary: LineVocabulary) -> list[str]:
    """What finds long words of letters that are all unknown, also in writing that has no spaces between words."""
    if len(line) <= LONGEST_WORD:
        return []
    letters = "".join(character for character in vocabulary.unknown_characters(line) if character.isalpha())
    return [f"[{re.escape(letters)}]{{{LONGEST_WORD + 1},}}"] if letters else []


def _joined(text: str, more: str, inline: bool) -> str:
    """Two parts of a line that something stood between: as two words, but punctuation keeps touching, through a tag."""
    if not text.strip() or not more.strip():
        return (text if not more else text.rstrip() + more) if text.strip() else more.lstrip()
    joined = text[-1] in OPENING_MARKS + _JOINTS or more[0] in CLOSING_MARKS + _JOINTS
    touching = inline and joined and not text[-1].isspace() and not more[0].isspace()
    text, more = text.rstrip(), more.lstrip()
    return text + more if touching or more[0] in CLOSING else f"{text} {more}"
