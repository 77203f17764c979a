"""The result of a comparison: a table of its variants as text, Markdown and JSON, its figure and its page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.comparison.bootstrap import SAMPLES, Numbers, holm, paired_p_value, seed_interval
from regard.comparison.quality import HEADINGS, HIGHER_IS_BETTER, score_of_sums
from regard.comparison.recipe import Recipe
from regard.comparison.run_record import RunRecord
from regard.translation.experiment import TRANSLATION
from regard.utils.atomic_files import atomic_write
from regard.utils.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE, RESULTS, FIGURE, PAGE = "table.md", "results.json", "figure.svg", "page.html"
"""Files of a comparison in its folder."""


@dataclass
class VariantRuns:
    """The finished runs of a variant by seed, and why it cannot be trained, if so."""

    name: str
    values: dict[str, Any]
    reason: str | None = None
    records: dict[int, RunRecord] = field(default_factory=dict)


@dataclass(frozen=True)
class VariantResult:
    """A row of the table.

    qualities: of each seed, in the order of the seeds. interval: of their mean, None of one seed. difference: of the
    mean to that of the baseline, over the seeds that both have. p_value: of the difference, adjusted by Holm.
    by_length: mean quality in each class of source length. The others are means over seeds, None where not measured.
    """

    name: str
    values: dict[str, Any]
    reason: str | None
    seeds: list[int]
    qualities: list[float]
    quality: float | None
    interval: tuple[float, float] | None
    difference: float | None
    p_value: float | None
    seconds: float | None
    cpu_seconds: float | None
    peak_bytes: float | None
    parameters: int | None
    speed: float | None
    cache_bytes: float | None
    by_length: list[float]
    gradients: dict[str, float]


@dataclass(frozen=True)
class ComparisonReport:
    """Variants with their runs; `str` gives the table as text, `save` writes all files."""

    recipe: Recipe
    variants: Sequence[VariantRuns]
    workers: int = 1

    @property
    def baseline(self) -> str:
        """The variant that the others are tested against: the one that is named, or the first that can be trained."""
        trained = (one.name for one in self.variants if one.reason is None)
        return self.recipe.compare.baseline or next(trained, self.variants[0].name)

    @property
    def refused(self) -> list[VariantRuns]:
        """The variants that cannot be trained."""
        return [one for one in self.variants if one.reason is not None]

    @cached_property
    def results(self) -> list[VariantResult]:
        """A row for each variant, in their order, from the runs that are done when it is first read."""
        against = next(one for one in self.variants if one.name == self.baseline)
        tested = {one.name: self._p_value(against, one) for one in self.variants if one is not against}
        known = {name: p_value for name, p_value in tested.items() if p_value is not None}
        adjusted = dict(zip(known, holm(list(known.values())), strict=True))
        return [self._result(one, against, adjusted.get(one.name)) for one in self.variants]

    def line(self, variant: str, seed: int) -> str:
        """One line about a run."""
        record = next(one for one in self.variants if one.name == variant).records[seed]
        quality = self._format(self._score(record.sums.sum(0)))
        return f"{variant}, seed {seed}: {HEADINGS[self.recipe.measure]} {quality}, {record.seconds:.1f} s"

    def _score(self, sums: Numbers) -> float:
        return score_of_sums(self.recipe.measure, sums)

    def _p_value(self, against: VariantRuns, other: VariantRuns) -> float | None:
        seeds = [seed for seed in other.records if seed in against.records]
        if not seeds:
            return None
        pair = [np.sum([one.records[seed].sums for seed in seeds], axis=0) for one in (against, other)]
        return paired_p_value(pair[0], pair[1], self._score)

    def _result(self, one: VariantRuns, against: VariantRuns, p_value: float | None) -> VariantResult:
        seeds = [seed for seed in self.recipe.compare.seeds if seed in one.records]
        records = [one.records[seed] for seed in seeds]
        qualities = [self._score(record.sums.sum(0)) for record in records]
        both = [seed for seed in seeds if seed in against.records]
        differences = [
            self._score(one.records[seed].sums.sum(0)) - self._score(against.records[seed].sums.sum(0)) for seed in both
        ]
        return VariantResult(
            one.name,
            one.values,
            one.reason,
            seeds,
            qualities,
            mean(qualities) if qualities else None,
            seed_interval(qualities),
            mean(differences) if differences and one is not against else None,
            p_value,
            _mean(record.seconds for record in records),
            _mean(record.cpu_seconds for record in records),
            _mean(record.peak_bytes for record in records),
            records[0].parameters if records else None,
            _mean(record.speed for record in records),
            _mean(record.cache_bytes for record in records),
            self._by_length(records),
            {name: mean(record.gradients[name] for record in records) for name in records[0].gradients}
            if records
            else {},
        )

    def _by_length(self, records: Sequence[RunRecord]) -> list[float]:
        """Mean quality over seeds in each class of source length; NaN of a class without sentences."""
        bounds = self.recipe.compare.lengths
        if not bounds or not records:
            return []
        classes = np.searchsorted(bounds, np.array(records[0].lengths))
        return [
            mean(self._score(record.sums[classes == number].sum(0)) for record in records)
            for number in range(len(bounds) + 1)
        ]

    @property
    def length_names(self) -> list[str]:
        """Names of the classes of source length: "to 10", "11 to 20", "21", "above 21"."""
        bounds = self.recipe.compare.lengths
        if not bounds:
            return []
        inner = [str(high) if high == low + 1 else f"{low + 1} to {high}" for low, high in itertools.pairwise(bounds)]
        return [f"to {bounds[0]}", *inner, f"above {bounds[-1]}"]

    def cells(self) -> list[list[str]]:
        """The table as texts, the heading first; columns that no variant has are left out."""
        results = self.results
        columns: list[tuple[str, Callable[[VariantResult], str]]] = [
            ("variant", lambda one: one.name),
            (HEADINGS[self.recipe.measure], lambda one: self._format(one.quality)),
            ("95 % interval", lambda one: _interval(one.interval, self._format)),
            (f"against {self.baseline}", lambda one: self._format(one.difference, signed=True)),
            ("p", lambda one: _p_text(one.p_value)),
            *(
                (name, lambda one, number=number: self._format(one.by_length[number]) if one.by_length else "")
                for number, name in enumerate(self.length_names)
            ),
            ("seconds", lambda one: _number(one.seconds, "{:,.1f}")),
            ("CPU s", lambda one: _number(one.cpu_seconds, "{:,.1f}")),
            ("memory", lambda one: "" if one.peak_bytes is None else format_bytes(one.peak_bytes)),
            ("parameters", lambda one: _number(one.parameters, "{:,}")),
            (self._speed_heading, lambda one: _number(one.speed, "{:,.0f}")),
            ("cache", lambda one: "" if one.cache_bytes is None else format_bytes(one.cache_bytes)),
            *(
                (name.replace("_", " "), lambda one, name=name: _number(one.gradients.get(name), "{:.2g}"))
                for name in next((one.gradients for one in results if one.gradients), {})
            ),
        ]
        trained = [one for one in results if one.qualities]
        rows = [[heading, *(cell(one) for one in trained)] for heading, cell in columns]
        return [list(row) for row in zip(*(row for row in rows if any(row[1:]) or row[0] == "variant"), strict=True)]

    @property
    def _speed_heading(self) -> str:
        return "sentences/s" if self.recipe.task == TRANSLATION else "bytes/s"

    def notes(self) -> list[str]:
        """How to read the table: seeds, interval, test, times, and what could not be trained."""
        seeds = self.recipe.compare.seeds
        better = "more is better" if self.recipe.measure in HIGHER_IS_BETTER else "less is better"
        records = [record for one in self.variants for record in one.records.values()]
        texts = "test sentences" if self.recipe.task == TRANSLATION else "held-out sequences"
        about = records[0].machine if records else {}
        tests = sum(one.p_value is not None for one in self.results)
        about_p = ", and p is about the test set alone" if tests else ""
        interval = (
            f"the mean of seeds {', '.join(map(str, seeds))} with its 95 % interval by Student's t"
            if len(seeds) > 1
            else f"one seed, {', '.join(map(str, seeds))}: no interval is claimed{about_p}"
        )
        runs = "one run at a time" if self.workers == 1 else f"up to {self.workers} runs at once"
        notes = [
            f"{HEADINGS[self.recipe.measure]}: {better}; {interval}; "
            f"{len(records[0].statistics) if records else 0:,} {texts}.",
            f"p: two-sided paired bootstrap over these, {SAMPLES:,} resamples, adjusted by Holm for {tests} tests."
            if tests
            else f"p: none, as there are no two variants to compare, of which one is the baseline {self.baseline!r}.",
            "seconds: of training, without validating and saving; CPU s: of the processor for all of it; "
            "memory: the most while training, above what the "
            f"process had before. {about.get('processor', 'unknown processor')}, one thread, {runs}, torch "
            f"{about.get('torch', '?')}.",
        ]
        if self.length_names:
            notes.append(f"Columns {self.length_names[0]!r} to {self.length_names[-1]!r}: by tokens of the source.")
        if self.recipe.compare.gradients:
            notes.append(
                "query key, other: root mean square of the gradient of W_q and W_k, and of all other weights; entropy: "
                "of the encoder's attention weights, as a share of the largest; before and after training."
            )
        return [*notes, *(f"{one.name} cannot be trained: {one.reason}" for one in self.refused)]

    def __str__(self) -> str:
        """The table with its notes, aligned for a terminal."""
        rows = self.cells()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            ).rstrip()
            for row in rows
        ]
        question = self.recipe.compare.question
        return "\n".join([*([question, ""] if question else []), *lines, "", *self.notes()])

    def markdown(self) -> str:
        """The table in Markdown, with its notes below."""
        heading, *rows = ([cell.replace("|", "\\|") for cell in row] for row in self.cells())
        lines = [
            f"| {' | '.join(heading)} |",
            f"| --- |{' ---: |' * (len(heading) - 1)}",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes())])

    def as_dict(self) -> dict[str, Any]:
        """All numbers of the table, for JSON."""
        return {
            "recipe": self.recipe.origin,
            "question": self.recipe.compare.question,
            "measure": self.recipe.measure,
            "baseline": self.baseline,
            "lengths": self.length_names,
            "notes": self.notes(),
            "variants": [asdict(one) for one in self.results],
        }

    def figure(self) -> Figure:
        """The quality of every seed and its interval, seconds, and quality by length or gradients where measured.

        Raises:
            MissingExtra: matplotlib is not installed.
        """
        from regard.plots.variant_plot import VariantPoints, draw_variants

        points = [
            VariantPoints(one.name, one.qualities, one.interval, one.cpu_seconds or 0.0, one.by_length)
            for one in self.results
            if one.qualities
        ]
        return draw_variants(points, HEADINGS[self.recipe.measure], self.recipe.name, self.length_names)

    def save(self, folder: str | Path) -> list[Path]:
        """Write table.md, results.json, figure.svg and page.html into a folder, and return their paths.

        Raises:
            CheckpointError: a file cannot be written.
            MissingExtra: matplotlib is not installed.
        """
        from regard.comparison.comparison_page import comparison_page
        from regard.plots import save

        folder = Path(folder)
        save(self.figure(), folder / FIGURE)
        texts = {
            TABLE: self.markdown(),
            RESULTS: json.dumps(self.as_dict(), indent=1) + "\n",
            PAGE: comparison_page(self, (folder / FIGURE).read_bytes()),
        }
        for name, text in texts.items():
            with atomic_write(folder / name) as partial:
                partial.write_text(text, encoding="utf-8")
        return [folder / name for name in (TABLE, RESULTS, FIGURE, PAGE)]

    def _format(self, quality: float | None, *, signed: bool = False) -> str:
        digits = 2 if self.recipe.measure in HIGHER_IS_BETTER else 3
        return "" if quality is None else f"{quality:{'+' if signed else ''}.{digits}f}"


def _mean(numbers: Iterable[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return mean(known) if known else None


def _number(number: float | None, form: str) -> str:
    return "" if number is None else form.format(number)


def _interval(interval: tuple[float, float] | None, form: Callable[[float], str]) -> str:
    return "" if interval is None else f"{form(interval[0])} to {form(interval[1])}"


def _p_text(p_value: float | None) -> str:
    return "" if p_value is None else "<0.01" if p_value < 0.01 else f"{p_value:.2f}"
