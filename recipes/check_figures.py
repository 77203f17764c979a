"""Are the figures of docs/ those that `make figures` has printed and drawn? Tables row by row, pictures byte by byte.

    python recipes/check_figures.py [--printed build/figures] [--docs docs]

docs/figures.md says which output stands on which page, and by how much a figure may differ: its table is read here. A
row of a page is held beside the row, or the printed line, that has its words and its numbers. Listed is what lies
outside its spread, with page and line; then the exit code is 1. Nothing is written.
"""

from __future__ import annotations

import argparse
import itertools
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

EQUAL, WITHIN, OUTSIDE, OTHER_MACHINE = "equal", "within the spread", "outside", "of another processor"
NOT_RUN, SAME_FILE, OTHER_FILE = "not run", "pictures the same file", "pictures another file"
NUMBER = r"(?<![\w.])[-+]?\d+(?:,\d{3})*(?:\.\d+)?"
INTERVAL = re.compile(
    rf"({NUMBER})(?: ?%)? *(?:\| ({NUMBER}) to ({NUMBER})|\(({NUMBER})-({NUMBER})\)|\[({NUMBER}), ({NUMBER})\])"
)
MEASURED = re.compile(r"/s\b|\ba second\b|\bs$|\b(?:ms|µs|seconds|times?|memory)\b")
LEAST_LIKENESS = 0.5
"""Of a printed row to a page's: 1 for the same words, and 1 for the same numbers."""


@dataclass(frozen=True)
class Number:
    """A number as it is written; `place` is where it stands in the text of its row, `ends` those of its interval."""

    text: str
    percent: bool
    place: int
    ends: tuple[Number, ...] = ()
    is_end: bool = False

    @property
    def value(self) -> float:
        return float(self.text.replace(",", ""))

    @property
    def decimals(self) -> int:
        return len(self.text.partition(".")[2])

    @property
    def factor(self) -> float:
        """Of times: "+25 %" more is 1.25 times as much."""
        return 1 + self.value / 100 if self.percent and self.text[0] in "+-" else abs(self.value)

    def is_that_of(self, printed: Number) -> bool:
        """Whether the printed number, rounded to the decimals here, is this one."""
        return abs(self.value - printed.value) <= 0.5 * 10**-self.decimals * (1 + 1e-6)

    def is_near(self, figure: Number) -> bool:
        """Whether a figure lies in the interval of this one, which is wider by half of its last digit."""
        low, high = self.ends
        return low.value - 0.5 * 10**-low.decimals <= figure.value <= high.value + 0.5 * 10**-high.decimals

    def likeness(self, other: Number | None) -> float:
        """1 for the same number, less for one that is farther, 0 for none."""
        if other is None:
            return 0.0
        if self.is_that_of(other):
            return 1.0
        return max(0.01, 0.9 - abs(self.value - other.value) / max(abs(self.value), abs(other.value)))


Pair = tuple[Number, Number | None]


@dataclass(frozen=True)
class Row:
    """A row of a table in Markdown, with the headings of its columns, or a printed line, which has none."""

    line: int
    cells: tuple[str, ...]
    headings: tuple[str, ...] = ()
    section: str = ""

    @cached_property
    def words(self) -> frozenset[str]:
        """Of the first cell and of those without numbers, or of the line without its decimal numbers."""
        labels = (cell for number, cell in enumerate(self.cells) if not number or not re.search(r"\d", cell))
        label = " ".join(labels) if self.headings else re.sub(r"\d[\d,]*\.\d+ ?%?|\d+ ?%", "", self.cells[0])
        return frozenset(re.findall(r"[^\W_]+", label.lower().replace(",", "")))

    @cached_property
    def text(self) -> str:
        """What the numbers are in: all cells but the first."""
        return " | ".join(self.cells[1:] if self.headings else self.cells)

    @cached_property
    def numbers(self) -> tuple[Number, ...]:
        return numbers_of(self.text)

    def column_of(self, number: Number) -> int:
        """The column that a number stands in, of a row with headings."""
        starts = itertools.accumulate((len(cell) + 3 for cell in self.cells[1:]), initial=0)
        return max(column for column, start in enumerate(starts, 1) if start <= number.place)

    def is_measured(self, number: Number) -> bool:
        """Whether the column of a number, or its cell, is of times, rates or memory."""
        column = self.column_of(number)
        return any(MEASURED.search(text) for text in (self.headings[column], self.cells[column]))


def numbers_of(text: str) -> tuple[Number, ...]:
    """The numbers of a text, in their order; the ends of an interval are those of the number before it."""
    intervals = {match.start(1): match for match in INTERVAL.finditer(text)}
    ends = {match.start(group) for match in intervals.values() for group in range(2, 8) if match[group]}
    found = []
    for match in re.finditer(NUMBER, text):
        place = match.start()
        if place not in ends:
            behind = [part for part in intervals[place].groups()[1:] if part] if place in intervals else []
            percent = text[match.end() :].lstrip().startswith("%")
            found.append(
                Number(match[0], percent, place, tuple(Number(end, percent, place, (), True) for end in behind))
            )
    return tuple(found)


def rows_of(text: str, *, lines_too: bool = False) -> Iterator[Row]:
    """The rows of all tables of a page, each with its section, "## / ###"; with `lines_too` all other lines as well."""
    titles: list[str] = []
    headings: tuple[str, ...] = ()
    for number, line in enumerate(text.splitlines(), 1):
        if title := re.match(r"(#{2,4}) (.*)", line):
            titles = [*titles[: len(title[1]) - 2], title[2].strip()]
        if not line.startswith("|"):
            headings = ()
            if lines_too and line.strip():
                yield Row(number, (line,))
            continue
        cells = tuple(cell.replace("*", "").strip() for cell in line.strip().strip("|").split(" |"))
        if not headings:
            headings = cells
        elif set(line) - set("|-: "):
            yield Row(number, cells, headings, " / ".join(titles))


def aligned(page: Sequence[Number], printed: Sequence[Number]) -> list[Pair]:
    """The numbers of a page, each with one of the printed numbers, in their order, so that they are most alike."""
    if len(page) == len(printed):
        return list(zip(page, printed, strict=True))
    best = [[0.0] * (len(printed) + 1) for _ in range(len(page) + 1)]
    for i, j in itertools.product(range(1, len(page) + 1), range(1, len(printed) + 1)):
        together = best[i - 1][j - 1] + page[i - 1].likeness(printed[j - 1])
        best[i][j] = max(best[i - 1][j], best[i][j - 1], together)
    pairs: list[Pair] = []
    i, j = len(page), len(printed)
    while i:
        if j and best[i][j] == best[i][j - 1]:
            j -= 1
        elif best[i][j] == best[i - 1][j]:
            pairs.append((page[i - 1], None))
            i -= 1
        else:
            pairs.append((page[i - 1], printed[j - 1]))
            i, j = i - 1, j - 1
    return pairs[::-1]


def pairs_of(row: Row, printed: Row) -> list[Pair]:
    """The numbers of a page's row with those of a printed one: column by column where both have the same headings."""
    wanted, there = row.headings[1:], printed.headings[1:]
    if not wanted or (wanted != there and (len(set(wanted)) < len(wanted) or not set(wanted) <= set(there))):
        return aligned(row.numbers, printed.numbers)
    pairs: list[Pair] = []
    for column, heading in enumerate(wanted, 1):
        other = column if wanted == there else there.index(heading) + 1
        mine = [number for number in row.numbers if row.column_of(number) == column]
        theirs = [number for number in printed.numbers if printed.column_of(number) == other]
        pairs += aligned(mine, theirs)
    return pairs


def likeness(row: Row, printed: Row) -> float:
    """Of two rows: by their words, from 0 to 1, and by their numbers, from 0 to 1."""
    words = len(row.words & printed.words) / max(len(row.words | printed.words), 1)
    if not row.numbers:
        return words + (row.cells == printed.cells)
    if not printed.numbers:
        return 0.0
    return words + sum(mine.likeness(theirs) for mine, theirs in pairs_of(row, printed)) / len(row.numbers)


def matched(rows: Sequence[Row], printed: Sequence[Row]) -> dict[int, Row]:
    """By the number of a page's row: the printed row that is most like it; each printed row is taken once."""
    scores = sorted(
        ((likeness(row, other), -i, -j) for i, row in enumerate(rows) for j, other in enumerate(printed)), reverse=True
    )
    found: dict[int, Row] = {}
    taken: set[int] = set()
    for score, i, j in scores:
        if score >= LEAST_LIKENESS and -i not in found and -j not in taken:
            found[-i] = printed[-j]
            taken.add(-j)
    return found


@dataclass(frozen=True)
class Spread:
    """By how much a figure may differ, as docs/figures.md writes it: see there."""

    text: str
    here: bool

    @property
    def interval(self) -> bool:
        return "interval" in self.text

    @property
    def one_training(self) -> bool:
        """Whether the figures are those of one training, which another processor's rounding makes another one."""
        return self.text == "one training"

    @cached_property
    def most(self) -> tuple[float, float]:
        """The largest difference, of a number with a percent sign and of one without."""
        found = re.search(r"± ([\d.]+)( %)?(?: or ([\d.]+))?", self.text)
        if found is None:
            return 0.0, 0.0
        return (float(found[1]), float(found[3] or 0)) if found[2] else (0.0, float(found[1]))

    @cached_property
    def factor(self) -> float | None:
        """By which measured times may differ; None where nothing is measured."""
        found = re.search(r"times within ([\d.]+)", self.text)
        return None if found is None else float(found[1])

    def judged(self, row: Row, printed: Row) -> list[tuple[str, Pair]]:
        """Each number of a page's row with what becomes of it."""
        pairs = pairs_of(row, printed)
        near = [
            mine.is_near(theirs) if mine.ends else theirs.is_near(mine)
            for mine, theirs in pairs
            if theirs is not None and (mine.ends or theirs.ends)
        ]
        trained = self.interval and bool(near) and all(near)
        ends: list[Pair] = [
            (end, theirs.ends[number] if theirs is not None and theirs.ends else None)
            for mine, theirs in pairs
            for number, end in enumerate(mine.ends)
        ]
        return [(self._judge(row, pair, trained=trained), pair) for pair in (*pairs, *ends)]

    def _judge(self, row: Row, pair: Pair, *, trained: bool) -> str:
        mine, theirs = pair
        if theirs is None:
            return OUTSIDE
        if mine.is_that_of(theirs):
            return EQUAL
        if self.one_training and not self.here:
            return OTHER_MACHINE
        if self.factor is not None and (self.text.startswith("times") or row.is_measured(mine)):
            if not self.here:
                return OTHER_MACHINE
            low, high = sorted((mine.factor, theirs.factor))
            return WITHIN if high <= self.factor * low else OUTSIDE
        if self.interval:
            return WITHIN if trained and (mine.decimals or mine.ends or mine.is_end) else OUTSIDE
        most = self.most[0 if mine.percent else 1]
        return WITHIN if abs(mine.value - theirs.value) <= most * (1 + 1e-6) else OUTSIDE


@dataclass(frozen=True)
class Entry:
    """A row of docs/figures.md: the file that `make figures` writes, and the tables of a page that hold its figures."""

    output: str
    page: str
    section: str
    spread: str
    processor: str


@dataclass
class Finding:
    """What became of the figures of one entry; `lines` tells of those outside."""

    counts: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


def entries(page: Path) -> list[Entry]:
    """The table of docs/figures.md, found by its first heading."""
    rows = rows_of(page.read_text("utf-8"))
    cells = ([cell.strip("`") for cell in row.cells] for row in rows if row.headings[0] == "output")
    return [Entry(*row) for row in cells]


def this_processor() -> str:
    """As in docs/figures.md: family and model on Linux, else what Python knows."""
    try:
        text = Path("/proc/cpuinfo").read_text("utf-8")
    except OSError:
        return platform.processor()
    fields = dict(re.findall(r"^(\w[\w ]*?)\s*: (.*)$", text, flags=re.MULTILINE))
    return f"family {fields.get('cpu family')}, model {fields.get('model')}"


def in_section(rows: Iterable[Row], section: str) -> list[Row]:
    """The rows below a heading; "all" is the whole page."""
    return [row for row in rows if section == "all" or section in row.section]


def printed_rows(entry: Entry, page: Sequence[Row], printed: Path) -> list[Row]:
    """The rows of an output for a section: those under its title, or all where the output has no titles of the page."""
    if not (printed / entry.output).exists():
        return []
    rows = list(rows_of((printed / entry.output).read_text("utf-8"), lines_too=True))
    shared = {row.section for row in page} & {row.section for row in rows} - {""}
    return in_section(rows, entry.section) if shared else rows


def check(entry: Entry, docs: Path, printed: Path, processor: str) -> Finding:
    """Hold the tables of a section beside an output."""
    found = Finding()
    page = list(rows_of((docs / entry.page).read_text("utf-8")))
    rows, others = in_section(page, entry.section), printed_rows(entry, page, printed)
    if not rows:
        found.counts[OUTSIDE] += 1
        found.lines.append(f"{entry.page} has no table under {entry.section!r}")
    if not others:
        found.counts[NOT_RUN] += 1
        return found
    spread = Spread(entry.spread, here=entry.processor == processor)
    partners = matched(rows, others)
    for number, row in enumerate(rows):
        place = f"{docs / entry.page}:{row.line}: {row.cells[0]}:"
        other = partners.get(number)
        if other is None:
            elsewhere = spread.text.startswith("times") and not spread.here
            found.counts[OTHER_MACHINE if elsewhere else OUTSIDE] += max(len(row.numbers), 1)
            found.lines += [] if elsewhere else [f"{place} no such row in {entry.output}"]
            continue
        for status, (mine, theirs) in spread.judged(row, other):
            found.counts[status] += 1
            if status == OUTSIDE:
                is_printed = "nothing" if theirs is None else theirs.text
                found.lines.append(f"{place} {mine.text}, printed {is_printed} ({entry.output}:{other.line})")
        if row.headings[1:] == other.headings[1:] and entry.spread == "same digits":
            for heading, mine, theirs in zip(row.headings[1:], row.cells[1:], other.cells[1:], strict=True):
                if not numbers_of(mine) and (mine or theirs):
                    found.counts[EQUAL if mine == theirs else OUTSIDE] += 1
                    if mine != theirs:
                        found.lines.append(f"{place} {heading} {mine!r}, printed {theirs!r} ({entry.output})")
    return found


def pictures(docs: Path, printed: Path) -> Iterator[tuple[str, bool]]:
    """Each picture of docs/ that was drawn again, and whether it is the same file."""
    for shown in sorted((docs / "pictures").rglob("*.*")):
        drawn = printed / "docs" / shown.relative_to(docs)
        if drawn.exists():
            yield shown.relative_to(docs).as_posix(), shown.read_bytes() == drawn.read_bytes()


def say(text: str) -> None:
    """Print a line."""
    sys.stdout.write(f"{text}\n")


def told(counts: Counter[str]) -> str:
    """How many figures are what, in one order."""
    order = EQUAL, WITHIN, OTHER_MACHINE, OUTSIDE, NOT_RUN, SAME_FILE, OTHER_FILE
    return ", ".join(f"{counts[name]:,} {name}" for name in order if counts[name])


def main(arguments: list[str] | None = None) -> int:
    """Print what is equal and what is not; 1 where a figure lies outside its spread."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--printed", type=Path, default=Path("build/figures"), help="what make figures wrote")
    parser.add_argument("--docs", type=Path, default=Path("docs"), help="folder of the pages")
    chosen = parser.parse_args(arguments)
    total: Counter[str] = Counter()
    processor = this_processor()
    for entry in entries(chosen.docs / "figures.md"):
        name = f"{entry.output}, {entry.page}, {entry.section}"
        found = check(entry, chosen.docs, chosen.printed, processor)
        total += found.counts
        say(f"{name}: {told(found.counts)}")
        for line in found.lines:
            say(f"  {line}")
    for name, same in pictures(chosen.docs, chosen.printed):
        total[SAME_FILE if same else OTHER_FILE] += 1
        if not same:
            say(f"{name}: another file than in {chosen.docs}")
    say(f"on {processor}: {told(total)}")
    return 1 if total[OUTSIDE] else 0


if __name__ == "__main__":
    sys.exit(main())
