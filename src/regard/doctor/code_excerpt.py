"""Source code as escaped HTML: the lines around a finding with its range marked, and the diff of a rewrite."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

CONTEXT = 4
"""Lines before a range, and behind it."""
MOST_LINES = 14
"""Lines of a range that are displayed; of a longer one the first of them, and the last two."""
MOST_CHARACTERS = 320
"""Characters of a line that are displayed."""
LINE_ENDS = re.compile("\r\n|\r|\n")
# Control characters but tabs, bidirectional marks, characters without width, separators, tags, and halves of pairs.
HIDDEN = re.compile(
    "[\0-\b\n-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f\ud800-\udfff]"
)


@dataclass(frozen=True, slots=True)
class CodeRange:
    """A range of source code; lines and columns count from 1, the end column is exclusive; column 0 for whole lines."""

    line: int
    column: int
    end_line: int
    end_column: int

    @classmethod
    def of_line(cls, line: int) -> CodeRange:
        """The whole of one line."""
        return cls(line, 0, line, 0)


def source_lines(text: str) -> list[str]:
    r"""The lines of Python source, as its parser counts them: form feeds and separators of Unicode end none.

    >>> source_lines("a\r\nb\fc\n")
    ['a', 'b\x0cc', '']
    """
    return LINE_ENDS.split(text)


def escaped(text: str) -> str:
    r"""Text for HTML, in elements and attributes; invisible characters become visible signs, as in the explorer.

    >>> escaped("<b>\0\u202e")
    '&lt;b&gt;␀⟨U+202E⟩'
    """
    return html.escape(HIDDEN.sub(_sign, text))


def _sign(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code == 0x7F:
        return "␡"
    return chr(0x2400 + code) if code < 0x20 else f"⟨U+{code:04X}⟩"


def excerpt(lines: Sequence[str], place: CodeRange, *, after: int = CONTEXT) -> str:
    """The lines around a range as `<pre>`, the range marked; empty where the source has no such line.

    after: lines behind the range.
    """
    if not 1 <= place.line <= len(lines):
        return ""
    last = min(max(place.end_line, place.line), len(lines))
    shown = list(range(max(place.line - CONTEXT, 1), min(last + after, len(lines)) + 1))
    if last - place.line >= MOST_LINES:
        shown = [number for number in shown if number < place.line + MOST_LINES - 2 or number > last - 2]
    while len(shown) > 1 and not lines[shown[-1] - 1].strip() and shown[-1] > last:
        shown.pop()
    while len(shown) > 1 and not lines[shown[0] - 1].strip() and shown[0] < place.line:
        shown.pop(0)
    label = f"lines {shown[0]} to {shown[-1]}"
    return _block("code", label, _numbered(lines, shown, place))


def _numbered(lines: Sequence[str], shown: Sequence[int], place: CodeRange) -> Iterable[str]:
    previous = shown[0] - 1
    for number in shown:
        if number > previous + 1:
            yield f'<i class="gap">{number - previous - 1} more lines</i>'
        previous = number
        inside = place.line <= number <= max(place.end_line, place.line)
        text = _marked(lines[number - 1], number, place) if inside else escaped(_cut(lines[number - 1], 0)[0])
        yield f'<i data-n="{number}"{_CLASS_OF_RANGE if inside else ""}>{text}</i>'


_CLASS_OF_RANGE = ' class="of"'


def _marked(line: str, number: int, place: CodeRange) -> str:
    """A line of the range, its part in the range within `<mark>`."""
    indent = len(line) - len(line.lstrip())
    start = place.column - 1 if number == place.line and place.column else indent
    end = place.end_column - 1 if number == place.end_line and place.end_column else len(line.rstrip())
    text, cut = _cut(line, start)
    start, end = max(start - cut, 0), min(end - cut, len(text))
    if start >= end:
        return escaped(text)
    return f"{escaped(text[:start])}<mark>{escaped(text[start:end])}</mark>{escaped(text[end:])}"


def _cut(line: str, start: int) -> tuple[str, int]:
    """At most MOST_CHARACTERS of a line, with what the range starts at, and how far its text moved to the left."""
    if len(line) <= MOST_CHARACTERS:
        return line, 0
    first = max(min(start - MOST_CHARACTERS // 4, len(line) - MOST_CHARACTERS), 0)
    text = ("…" if first else "") + line[first : first + MOST_CHARACTERS]
    return text + ("…" if first + MOST_CHARACTERS < len(line) else ""), first - (1 if first else 0)


def example(code: str) -> str:
    """A short piece of code as `<pre>`, without line numbers."""
    return _block("example", "example", (f"<i>{escaped(line)}</i>" for line in source_lines(code)))


def changed_blocks(before: Sequence[str], after: Sequence[str]) -> list[tuple[int, int, int, int]]:
    """The differing stretches of two texts: before[i1:i2] became after[j1:j2]."""
    return [
        (i1, i2, j1, j2) for tag, i1, i2, j1, j2 in SequenceMatcher(None, before, after).get_opcodes() if tag != "equal"
    ]


def diff(before: Sequence[str], after: Sequence[str], blocks: Sequence[tuple[int, int, int, int]]) -> str:
    """Some of the differing stretches of two texts as `<pre>`, each with a line around it."""
    written: list[str] = []
    previous = 0
    for number, (i1, i2, j1, j2) in enumerate(blocks):
        first = max(i1 - 1, previous)
        if first > previous or not written:
            written.append(f'<i class="gap">line {first + 1}</i>')
        following = blocks[number + 1][0] if number + 1 < len(blocks) else len(before)
        previous = min(i2 + 1, following, len(before))
        written += [_changed(" ", line) for line in before[first:i1]]
        written += [_changed("-", line) for line in before[i1:i2]]
        written += [_changed("+", line) for line in after[j1:j2]]
        written += [_changed(" ", line) for line in before[i2:previous]]
    return _block("diff", "difference", written)


def _changed(sign: str, line: str) -> str:
    return f'<i data-sign="{sign}">{escaped(_cut(line, 0)[0])}</i>'


def _block(kind: str, label: str, lines: Iterable[str]) -> str:
    # What scrolls sideways can be reached by the keyboard.
    return f'<pre class="{kind}" tabindex="0" role="group" aria-label="{label}"><code>{"".join(lines)}</code></pre>'
