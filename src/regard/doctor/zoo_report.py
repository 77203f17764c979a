"""What `examine` found in the classes of transformers: counts, the table of docs/zoo.md, and its evidence."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from regard_doctor.finding import Severity
from regard_doctor.run_explanations import KINDS

from ..comparison.single_run import machine


class ZooColumn(NamedTuple):
    """A column of the table: the check that it comes from, the codes in it, what it counts, words of the messages."""

    check: str
    codes: tuple[str, ...]
    meaning: str
    words: str = ""

    def found(self, entry: ZooEntry) -> list[dict[str, Any]]:
        """The findings of a class that the column counts."""
        return [one for one in entry.findings if one["code"] in self.codes and self.words in one["message"]]

    def cell(self, entry: ZooEntry) -> str:
        """What the table has for a class: ✗ for a finding, "swap mends", – where the check did not run, or nothing."""
        found = self.found(entry)
        if not found:
            return "" if self.check in entry.checked else "–"
        return "swap mends" if all(one["mended_by_swap"] for one in found) else "✗"


PACKED = "two documents packed by `position_ids` that start again depend on each other, without a mask"
PATHS = "chunks, or single tokens, with a cache give other outputs than the sequence at once, or raise"
COLUMNS = {
    "future": ZooColumn("future", ("RUN101",), "outputs depend on later tokens"),
    "documents": ZooColumn("documents", ("RUN102",), PACKED, "without a mask"),
    "documents, ones": ZooColumn(
        "documents", ("RUN102",), "the same with the mask of ones that tokenizers return", "with a mask of ones"
    ),
    "padding": ZooColumn("padding", ("RUN103",), "outputs of tokens depend on which token the masked padding is"),
    "left padding": ZooColumn("padding", ("RUN104",), "masked padding on the left changes the outputs of tokens"),
    "right padding": ZooColumn("padding", ("RUN105",), "masked padding on the right changes the outputs of tokens"),
    "NaN": ZooColumn("padding", ("RUN110",), "masked padding makes outputs of tokens NaN"),
    "cache": ZooColumn("cache", ("RUN120",), PATHS),
    "backends": ZooColumn("backends", ("RUN121",), "eager attention, SDPA and regard disagree, or regard raises"),
    "training": ZooColumn(
        "training", ("RUN122", "RUN123"), "without dropout, `train()` and `eval()` disagree, or evaluation is random"
    ),
    "batch": ZooColumn("batch", ("RUN107",), "a row depends on another row"),
}
LEGEND = """\
Each class has two layers, a dim of 32 and random weights. ✗: a finding that `regard.huggingface.swap` does not remove,
or that it cannot be tried on; "swap mends": one that it removes; –: not checked, the model takes no such argument, or
its configuration is that of an encoder. A finding is a fact about a call, not always a fault: it may be made so."""
LEFT = """\
Attention modules that `regard.huggingface.swap` leaves as they are, and why. A class with no others is compared by
eager attention and SDPA alone."""
"""What the page says above the modules that swap leaves."""
COUNT_HEADS = ("column", "the finding", "classes checked", "with a finding", "of these mended by swap")


@dataclass(frozen=True)
class ZooEntry:
    """One class: its examination as `Examination.as_dict`, or why it could not be examined, and its seconds.

    The examination also has `left`: by reason, how many attention modules `regard.huggingface.swap` leaves as they are.
    seconds: of processor time; of a process that was lost, on the clock.
    """

    name: str
    examination: dict[str, Any] | None
    failure: str | None
    seconds: float

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Findings that are errors or warnings."""
        found = self.examination["findings"] if self.examination is not None else []
        return [one for one in found if one["severity"] != Severity.HINT.value]

    @property
    def checked(self) -> list[str]:
        """The checks that ran."""
        return self.examination["checked"] if self.examination is not None else []

    @property
    def left(self) -> dict[str, int]:
        """By reason, the attention modules that swap leaves as they are."""
        return self.examination.get("left", {}) if self.examination is not None else {}


@dataclass(frozen=True)
class ZooReport:
    """All classes, in alphabetic order."""

    entries: tuple[ZooEntry, ...]
    version: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """All fields, of plain types."""
        return asdict(self)

    @property
    def examined(self) -> tuple[ZooEntry, ...]:
        """The classes that ran."""
        return tuple(entry for entry in self.entries if entry.examination is not None)

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """By column: classes with a finding, those that `regard.huggingface.swap` mends, and classes checked."""
        result = {}
        for name, column in COLUMNS.items():
            cells = Counter(column.cell(entry) for entry in self.examined)
            mended = cells["swap mends"]
            checked = sum(column.check in entry.checked for entry in self.examined)
            result[name] = (mended + cells["✗"], mended, checked)
        return result

    def count_rows(self) -> list[list[str]]:
        """The rows of the table of columns, below COUNT_HEADS."""
        return [
            [name, COLUMNS[name].meaning, f"{checked}", f"{found}", f"{mended}"]
            for name, (found, mended, checked) in self.counts().items()
        ]

    def class_rows(self) -> list[list[str]]:
        """The rows of the table of classes: a name, and a cell for each column."""
        return [[entry.name, *(column.cell(entry) for column in COLUMNS.values())] for entry in self.examined]

    def failures(self) -> list[tuple[str, str]]:
        """The classes that did not run, and why."""
        return [(entry.name, entry.failure or "") for entry in self.entries if entry.examination is None]

    def summary(self) -> str:
        """One line for each column, and for the classes that did not run."""
        classes = f"{len(self.examined)} of {len(self.entries)} classes examined in {self.seconds:.0f} s"
        lines = [f"transformers {self.version}: {classes}"]
        for column, (found, mended, checked) in self.counts().items():
            lines.append(f"  {column}: {found} of {checked}" + (f", swap mends {mended}" if mended else ""))
        reasons = Counter(failure.split(":")[0] for _, failure in self.failures())
        lines += [f"  not examined, {reason}: {count}" for reason, count in reasons.most_common()]
        return "\n".join(lines)

    def markdown(self) -> str:
        """The page `docs/zoo.md`: counts, a row for each class, and the evidence of each finding."""
        seconds, here = sum(entry.seconds for entry in self.entries), machine()
        lines = [
            "# What examine finds in the models of transformers",
            "",
            f"`regard examine --zoo` on transformers {self.version}, torch {here['torch']}, {here['cores']} × "
            f"{here['processor']}: {len(self.examined)} of {len(self.entries)} classes run, in {seconds:.0f} seconds "
            "of processor time.",
            "",
            LEGEND,
            "",
            *_markdown_table([*COUNT_HEADS], self.count_rows()),
            "",
            "## By class",
            "",
            *_markdown_table(["class", *COLUMNS], self.class_rows()),
            "",
            "## Evidence",
            "",
        ]
        for entry in self.examined:
            if entry.findings:
                lines += [f"- {entry.name}", *(f"    - {_words(one)}" for one in entry.findings)]
        lines += ["", "## What swap leaves to transformers", "", LEFT, ""]
        for entry in self.examined:
            for reason, count in entry.left.items():
                lines.append(f"- {entry.name}, {count} module{'' if count == 1 else 's'}: {reason}")
        lines += ["", "## Not examined", "", *(f"- {name}: {failure}" for name, failure in self.failures())]
        return "\n".join(lines) + "\n"


def _markdown_table(heads: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * len(heads), *rows)]


def _words(found: dict[str, Any]) -> str:
    evidence = found["evidence"]
    words = f"{found['code']} {KINDS[found['code']][0]}: {found['message']}"
    if evidence["by"] is not None:
        words += f" (output {evidence['moved']}, by {evidence['by']:.2g}, rounding {evidence['tolerance'] or 0:.1g})"
    if evidence["module"] is not None:
        file = (evidence["file"] or "").split("site-packages/")[-1]
        words += f", in `{evidence['module']}`, {file}:{evidence['line']}"
    if found["mended_by_swap"] is not None:
        words += "; swap mends it" if found["mended_by_swap"] else "; swap does not mend it"
    return words
