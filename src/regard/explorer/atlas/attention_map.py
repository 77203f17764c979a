"""The `AttentionMap` class: weights, pyramid, profiles and metrics of one call on one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...errors import AtlasError
from ...heads.word_alignment import SentenceLinks
from ...kernels.lens_pass import run_reductions
from ...lenses import Weights
from ...lenses.base import WeightsLayout
from ...lenses.contribution import KeyScaled
from ...lenses.pooled import cell_state
from .pyramid import PyramidLevels, unpacked
from .recorded_problem import RecordedProblem, RecordErrors
from .tokenized_text import read_words
from .translation_info import RankedTranslation, WordNumbers, from_json, read_word_numbers

Record = Mapping[str, Any]
Floats = NDArray[np.float32]


@dataclass(frozen=True, eq=False, repr=False)
class AttentionMap:
    """All heads of one call of an attention module on one sequence of the batch; tiles of weights are recomputed.

    name: of the module in its model. call: which of its calls; where several are rows of one map, the first of them.
    sequence: which of the batch. kind: "self", or "cross" to another sequence.
    """

    record: Record
    arrays: Mapping[str, Tensor]
    sequence: int

    @property
    def name(self) -> str:
        """The name of the module in its model."""
        return self.record["name"]

    @property
    def call(self) -> int:
        """The index of the module's call, from 0; of the first one where several calls are rows of one map."""
        return self.record["call"]

    @property
    def steps(self) -> int:
        """The number of calls that are rows of this map."""
        return self.record["steps"]

    @property
    def operator(self) -> str:
        """How rows are normalized: "softmax", "linear" for linear attention, or the name of a normalizer."""
        return self.record["operator"]

    @property
    def kind(self) -> Literal["self", "cross"]:
        """Self-attention within one sequence, or cross-attention between two."""
        return self.record["kind"]

    @property
    def heads(self) -> int:
        """The number of heads."""
        return self.record["heads"]

    @property
    def queries(self) -> int:
        """M, the number of queries."""
        return self.record["queries"]

    @property
    def keys(self) -> int:
        """N, the number of keys."""
        return self.record["keys"]

    @property
    def rounding(self) -> float:
        """Bound on the relative error of weights, from storing q and k in half precision; 0 if stored exactly.

        Most weights are several times nearer.
        """
        return self.record["rounding"]

    @cached_property
    def query_tokens(self) -> tuple[str, ...]:
        """Tokens of the queries; their positions if the atlas has no tokens."""
        return self._words("query", self.query_positions)

    @cached_property
    def key_tokens(self) -> tuple[str, ...]:
        """Tokens of the keys; their positions if the atlas has no tokens."""
        return self._words("key", self.key_positions)

    @cached_property
    def query_positions(self) -> NDArray[np.int64]:
        """Positions of the queries, (M,)."""
        return self._positions("query", self.queries)

    @cached_property
    def key_positions(self) -> NDArray[np.int64]:
        """Positions of the keys, (N,)."""
        return self._positions("key", self.keys)

    @cached_property
    def query_words(self) -> WordNumbers | None:
        """Index of the word of each query token, (M,), -1 for tokens of no word; None if words are unknown."""
        return self._word_numbers("query")

    @cached_property
    def key_words(self) -> WordNumbers | None:
        """Index of the word of each key token, (N,), as `query_words`."""
        return self._word_numbers("key")

    @property
    def hypothesis(self) -> RankedTranslation | None:
        """The translation that the map belongs to, as `Atlas.with_hypotheses` set it; None if it has none."""
        told = self.record.get("hypotheses")
        return RankedTranslation(**told[self.sequence]) if told and told[self.sequence] else None

    @property
    def gold(self) -> SentenceLinks | None:
        """Gold word links (source, target), as `Atlas.with_gold` set them; None if it has none."""
        told = self.record.get("gold")
        return from_json(told[self.sequence]) if told and told[self.sequence] else None

    def weights(self, head: int, rows: slice, columns: slice) -> Floats:
        """Recompute the weights of a head on rows × columns, (m, n); 0 where a pair is masked.

        They are computed from the stored q, k and log-sum-exp, and are those of the model up to `rounding`,
        each row normed over all its keys.

        Raises:
            AtlasError: there is no such head; rows or columns that are not there, or not a plain slice; more of them
                than there is memory for.
        """
        rows, columns = self._ranges(head, rows, columns)
        if self.record["score"] == "weights":
            return self._array("weights")[self.sequence, head, rows, columns].float().numpy()
        with torch.no_grad(), self._faults():
            problem, lens = self.recorded_problem.head(head), Weights(rows, columns)
            lens.check(problem)
            return lens.compute(problem, self.recorded_problem.lse[head]).float().numpy()

    @property
    def has_value_norms(self) -> bool:
        """Whether the atlas has norms of values, so that contributions can be shown."""
        return "norms" in self.record["arrays"]

    def value_norms(self, head: int) -> Floats:
        """‖v_j W_h‖ of each key, (N,): the norm of what a key adds to a row of the module's output at weight 1.

        Raises:
            AtlasError: there is no such head, or the atlas has no norms: of `Atlas.from_weights`, and of modules with
                something else than an output projection behind their heads.
        """
        self._check("head", head, self.heads)
        if not self.has_value_norms:
            raise AtlasError(
                f"the map {self.name!r} has no norms of values, so that contributions are not known: record the model "
                "anew, with an output projection behind its heads"
            )
        return self._array("norms")[self.sequence, head].numpy()

    def contributions(self, head: int, rows: slice, columns: slice) -> Floats:
        """‖α_ij v_j W_h‖ of a head on rows × columns, (m, n): the weights times the norms of the keys' values.

        Source: Kobayashi et al. 2020 (arXiv 2004.10102), section 3; lenses of any length: `lenses.Contribution`.

        Raises:
            AtlasError: as `weights` and `value_norms`.
        """
        norms = self.value_norms(head)
        return self.weights(head, rows, columns) * norms[_plain_slice("columns", columns, self.keys)]

    def exists(self, head: int, rows: slice, columns: slice) -> NDArray[np.bool_]:
        """The mask of a head on rows × columns, (m, n), True = attend; all True for `Atlas.from_weights`.

        Raises:
            AtlasError: as `weights`.
        """
        rows, columns = self._ranges(head, rows, columns)
        shape = rows.stop - rows.start, columns.stop - columns.start
        if self.record["score"] == "weights":
            return np.ones(shape, dtype=np.bool_)
        with torch.no_grad(), self._faults():
            problem = self.recorded_problem.head(head)
            keep = problem.keep(problem.grid().tile(rows, columns))
            return np.ones(shape, dtype=np.bool_) if keep is None else keep.expand(shape).numpy().copy()

    @property
    def levels(self) -> tuple[tuple[int, int], ...]:
        """Rows and columns of cells of each level of the pyramid, the finest first; the last fits in 64 × 64."""
        return self._levels.shapes

    def cell(self, level: int) -> tuple[int, int]:
        """Queries and keys in one cell of a level; the last cells may have fewer."""
        self._check("level", level, len(self.levels))
        return self._levels.cell(level)

    def pooled(self, head: int, level: int, reduce: Literal["mean", "max"] = "mean") -> Floats:
        """Mean or largest weight of each cell of a pyramid level, (rows, columns); NaN where all pairs are masked.

        So have all cells of a row that attends to NaN.

        A mean is over all pairs of its cell, those that do not exist with the weight 0: means times the sizes of their
        cells sum to the sum of all weights. Kept in one byte a cell: for a head whose largest cell is t, a cell v is
        off by at most t · (√(v/t)/254 + 4e-6).

        Raises:
            AtlasError: there is no such head, level or way to reduce.
        """
        cells = self.pooled_pairs(head, level, reduce)
        cells[np.isposinf(cells)] = np.nan
        return cells

    def pooled_pairs(self, head: int, level: int, reduce: Literal["mean", "max"] = "mean") -> Floats:
        """As `pooled`, but infinity where a cell has pairs and one of its rows attends to NaN.

        Raises:
            AtlasError: as `pooled`.
        """
        self._check("head", head, self.heads)
        self._check("level", level, len(self.levels))
        if reduce not in ("mean", "max"):
            raise AtlasError(f"a map has the cells' 'mean' and 'max'; there is no {reduce!r}")
        column = level + (len(self.levels) if reduce == "mean" else 0)
        top = self._stored("tops")[self.sequence, head, column]
        cells = unpacked(self._stored(f"{reduce}.{level}")[self.sequence, head], top).numpy()
        if (broken := self.attends_to_nan(head)).any():
            high = self.cell(level)[0]
            rows = np.pad(broken, (0, -self.queries % high)).reshape(-1, high).max(axis=1)
            cells[rows[:, None] & ~np.isnan(cells)] = np.inf
        return cells

    def pooled_contributions(self, head: int, level: int, reduce: Literal["mean", "max"] = "mean") -> Floats:
        """Mean or largest contribution of each cell of a pyramid level, exact, (rows, columns).

        NaN where a cell has no pair, infinity where it has one and one of its rows attends to NaN. One pass over the
        weights of the head computes it: some 0.1 s for 4,096 tokens, and by the square of that for more.

        Raises:
            AtlasError: there is no such head, level or way to reduce; the atlas has no norms.
        """
        weights = self.pooled_pairs(head, level, reduce)  # which tells of cells without numbers
        norms = torch.from_numpy(self.value_norms(head))[None, None]
        high, wide = self.cell(level)
        rows, columns = [*range(0, self.queries, high), self.queries], [*range(0, self.keys, wide), self.keys]
        with torch.no_grad(), self._faults():
            problem, lse = self.recorded_problem.head(head), self.recorded_problem.lse[head]
            state = cell_state(WeightsLayout.from_problem(problem), rows, columns, reduce)
            run_reductions(problem, lse, [KeyScaled(reduction, norms) for reduction in state.reductions])
            cells = state.finish(problem, lse).float().numpy()
        return np.where(np.isfinite(weights), cells, weights)

    def attends_to_nan(self, head: int) -> NDArray[np.bool_]:
        """Rows that attend to NaN or infinity, (M,), True = its weights are not numbers.

        Raises:
            AtlasError: there is no such head.
        """
        # A head with such a row has NaN for a metric; of all others nothing as long as the rows is read.
        self._check("head", head, self.heads)
        if "entropy" in self.metrics and not np.isnan(self.metrics["entropy"][head]):
            return np.zeros(self.queries, dtype=np.bool_)
        return np.isnan(self.entropy(head))

    @cached_property
    def metrics(self) -> Mapping[str, Floats]:
        """Metrics of the heads, each (heads,), averaged over the rows that attend to some key.

        NaN of a head without such a row, or with one that attends to NaN.

        entropy: mean over rows, in nats. effective_keys: mean exp(entropy). top1: mean largest weight. sink: mean
        weight on the first key that anything attends to. Of self-attention too, in positions: distance, the mean of
        |query - key|; local, the weight within 8 positions; self, previous, next: that on distance 0, 1 and -1.
        """
        kept = self._stored("metrics")[self.sequence]
        return MappingProxyType({name: kept[:, at].numpy() for at, name in enumerate(self.record["metrics"])})

    def entropy(self, head: int) -> Floats:
        """-Σ_j w_ij · ln w_ij of each row, (M,), in nats; NaN of a row that attends to NaN."""
        self._check("head", head, self.heads)
        return self._stored("entropy")[self.sequence, head].numpy()

    def received(self, head: int) -> Floats:
        """Σ_i w_ij of each key, (N,); NaN of a head with a row that attends to NaN."""
        self._check("head", head, self.heads)
        return self._stored("received")[self.sequence, head].numpy()

    def largest(self, head: int) -> Floats:
        """max_j w_ij of each row, (M,); 0 of a row that attends to nothing, NaN of one that attends to NaN.

        Raises:
            AtlasError: there is no such head.
        """
        self._check("head", head, self.heads)
        return self._stored("largest")[self.sequence, head].numpy()

    @property
    def profiles(self) -> tuple[Literal["entropy", "received", "largest"], ...]:
        """Names of the methods that return one number for each query or key."""
        return ("entropy", "received", "largest")

    @property
    def roles(self) -> tuple[tuple[Mapping[str, Any], ...], ...]:
        """Roles of each head, {"name", "score", "n", "rule"}: detected, or set by `Atlas.with_roles`."""
        roles = self.record.get("roles")
        return tuple(tuple(of) for of in roles[self.sequence]) if roles else ((),) * self.heads

    def __repr__(self) -> str:
        at = f", call {self.call}" * bool(self.call) + f", sequence {self.sequence}" * bool(self.sequence)
        return f"<{self.kind} attention {self.name!r}{at}: {self.heads} heads, {self.queries} × {self.keys}>"

    @cached_property
    def _levels(self) -> PyramidLevels:
        return PyramidLevels(self.queries, self.keys, *self.record["cell"])

    def _array(self, name: str) -> Tensor:
        return self.arrays[self.record["arrays"][name]]

    def _stored(self, name: str) -> Tensor:
        return self.arrays[self.record["prefix"] + name]

    def _words(self, side: str, positions: NDArray[np.int64]) -> tuple[str, ...]:
        lists = self.record["tokens"][side]
        if lists is None:
            return tuple(map(str, positions.tolist()))
        name = f"words.{lists[self.sequence]}"
        return read_words(self.arrays[name], self.arrays[f"{name}.ends"])

    def _word_numbers(self, side: str) -> WordNumbers | None:
        lists = self.record["tokens"][side]
        return None if lists is None else read_word_numbers(self.arrays, f"words.{lists[self.sequence]}")

    def _positions(self, side: str, count: int) -> NDArray[np.int64]:
        if f"{side}_positions" not in self.record["arrays"]:
            return np.arange(count, dtype=np.int64)
        return self.recorded_problem.sequence_positions(f"{side}_positions").numpy()

    @cached_property
    def recorded_problem(self) -> RecordedProblem:
        """The stored queries and keys as `Problem`s; not available for `Atlas.from_weights`."""
        return RecordedProblem(self.record, self.arrays, self.sequence)

    def _ranges(self, head: int, rows: slice, columns: slice) -> tuple[slice, slice]:
        self._check("head", head, self.heads)
        return _plain_slice("rows", rows, self.queries), _plain_slice("columns", columns, self.keys)

    def _check(self, what: str, number: int, count: int) -> None:
        if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < count:
            raise AtlasError(f"the map {self.name!r} has the {what}s 0 to {count - 1}; there is no {what} {number!r}")

    def _faults(self) -> RecordErrors:
        return RecordErrors(self.name)


def _plain_slice(name: str, stretch: slice, count: int) -> slice:
    """Validate a slice without a step within 0..count, and return it with both ends."""
    if not isinstance(stretch, slice) or stretch.step not in (None, 1):
        raise AtlasError(f"weights need {name} as a slice without a step, such as slice(0, 256); they are {stretch!r}")
    ends = [0 if stretch.start is None else stretch.start, count if stretch.stop is None else stretch.stop]
    if (
        not all(isinstance(end, int) and not isinstance(end, bool) for end in ends)
        or not 0 <= ends[0] <= ends[1] <= count
    ):
        raise AtlasError(f"there are {count:,} {name}; they were asked for from {stretch.start} to {stretch.stop}")
    return slice(*ends)
