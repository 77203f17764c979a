"""FlexAttention over the blocks that a mask leaves: its block lists, bias tables and compiled code."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...biases import Bias, RelativeBias
from ...biases.base import TensorBias, bias_parts
from ...biases.gaussian import Gaussian
from ...biases.score_mod import ScoreModBias
from ...core.batched_problem import BatchedProblem
from ...core.grid import Blocks
from ...core.problem import Problem
from ...core.score_forms import DotPairs, at_least_float32
from ...masks.convert.block_mask import BlockLists, IndexedTable, Indices, mask_mod_of_tables, record_tables
from ...tiles.diagonals import distances
from ...tiles.memo import memoize
from ...utils.pytree import tree_flatten

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


BLOCK = 128
"""Rows and columns of a block: FlexAttention's own default, which its tiles divide."""
LEAST_DIM = 16
"""The fewest features that FlexAttention's kernels take; fewer are padded with zeros, which change no score."""


MOST_NUMBERS = 2**30
"""The most numbers of a tensor that a mask or bias reads: FlexAttention's kernels index by 32 bits."""
MOST_COMPILED = 128
"""The number of structures of mask and bias whose compiled code is stored; the least recently used is dropped."""


MOST_VARIANTS = 64
"""How often one structure is compiled, for lengths, batches and strides that torch tells apart."""
PairValue: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""A number or a bool for one pair, by its indices: batch, head, row and column."""


ScoreMod: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def compute_by_flex(
    inputs: tuple[Tensor, Tensor, Tensor], tables: BiasTables, bias: Bias | None, backend: str | None
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of FlexAttention for some query, key and value, and a bias with other parameters.

    backend: of torch.compile; None for the unfused formula.
    """
    query, key, value = inputs
    arguments = (
        widened(query),
        widened(key),
        widened(value),
        tables.score_mod(bias),
        block_mask(tables.batched),
        float(cast(DotPairs, tables.batched.pairs).scale),
        query.shape[1] != key.shape[1],
    )
    if backend is None:
        output, lse = attend_by_flex(*arguments)
    else:
        compiled = compiled_flex(structure_of(tables.batched, inputs), backend)
        with torch._dynamo.config.patch(recompile_limit=MOST_VARIANTS):
            output, lse = compiled(*arguments)
    return output[..., : value.shape[-1]], lse


def attend_by_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None,
    block_mask: BlockMask | None,
    scale: float,
    grouped: bool,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of FlexAttention."""
    from torch.nn.attention.flex_attention import AuxRequest, flex_attention

    output, auxiliary = flex_attention(
        query, key, value, score_mod, block_mask, scale, grouped, return_aux=AuxRequest(lse=True)
    )
    return output, cast(Tensor, auxiliary.lse)


@lru_cache(maxsize=MOST_COMPILED)
def compiled_flex(structure: tuple, backend: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """`attend_by_flex`, compiled for one structure: a function of its own, as torch counts by function."""
    own = types.FunctionType(attend_by_flex.__code__.replace(), attend_by_flex.__globals__, attend_by_flex.__name__)
    return torch.compile(own, fullgraph=True, backend=backend)


def structure_of(batched: BatchedProblem, inputs: tuple[Tensor, Tensor, Tensor]) -> tuple:
    """What compiled code depends on: the mask and bias without their tensors, options, dtype, heads and dims."""
    problem, (query, key, value) = batched.problem, inputs
    shapes = query.shape[1], query.shape[-1], key.shape[1], value.shape[-1]
    gradient = torch.is_grad_enabled() and query.requires_grad
    return (tree_flatten((problem.mask, problem.bias))[1], problem.softcap, query.dtype, shapes, query.device, gradient)


def block_mask(batched: BatchedProblem) -> BlockMask | None:
    """The BlockMask of a batched problem, from the verdicts on the mask's tiles; None without a mask.

    Its tensors are memoized, not the BlockMask, whose mask_mod refers to the mask.
    """
    problem = batched.problem
    if (mask := problem.mask) is None:
        return None
    problem.keep(batched.grid.tile(slice(0, 1), slice(0, 1)))  # says so if the mask does not fit

    def of_heads(pairs: Tensor) -> Tensor:
        """In four axes; what key heads have, the query heads of their groups have."""
        pairs, heads = batched.as_4d(pairs), batched.shape[1]
        return pairs if pairs.shape[1] in (1, heads) else pairs.repeat_interleave(heads // pairs.shape[1], 1)

    def computed() -> tuple[BlockLists, list[IndexedTable]]:
        blocks = Blocks.from_grid(batched.grid, BLOCK)
        lists = BlockLists.from_verdicts(of_heads(mask.verdicts(blocks)), blocks)
        return lists, record_tables(mask, batched.grid, of_heads)

    lists, tables = memoize(problem, ("flex", problem.value.device), computed)
    return lists.block_mask(mask_mod_of_tables(mask, batched.grid, tables))


def bias_reasons(bias: Bias, problem: Problem) -> list[str]:
    """Biases that have no form as a score_mod of FlexAttention."""
    reasons = []
    for part in bias_parts(bias):
        if isinstance(part, RelativeBias):
            if problem.shift is None:
                reasons.append("a bias by distance is a table of diagonals here, which needs consecutive positions")
        elif isinstance(part, ScoreModBias):
            if not part.function.elementwise:
                reasons.append(f"{part!r} is mapped over pairs, and FlexAttention's kernels compute operators alone")
            if replace(problem, bias=part).bias_requires_grad():
                reasons.append("FlexAttention has no gradient for a tensor that a function may index twice")
        elif not isinstance(part, TensorBias | Gaussian):
            reasons.append(
                f"{type(part).__name__} has no form as a score_mod: biases by distance, gaussian, tensors, from_mod "
                "and their sums have"
            )
    return list(dict.fromkeys(reasons))


def differentiates(bias: Bias | None) -> bool:
    """Whether the kernel has the gradient of a bias: not of one from a function, which may index a tensor twice.

    One that is by distance is a table.
    """
    return all(isinstance(part, RelativeBias) or not isinstance(part, ScoreModBias) for part in bias_parts(bias))


class BiasTables:
    """Softcap and bias of a batched problem as functions of a pair's indices that read tables.

    leaves: the tables that have a gradient, cut off from their sources, as torch.compile wants no other.
    """

    def __init__(self, batched: BatchedProblem) -> None:
        self.batched = batched
        self.leaves: list[Tensor] = []
        self._sources: list[Tensor] = []

    def score_mod(self, bias: Bias | None) -> ScoreMod | None:
        """Softcap and bias as a score_mod; None for neither."""
        softcap = self.batched.problem.softcap
        if softcap is None and bias is None:
            return None
        added = [self._pair_value(part) for part in bias_parts(bias)]

        def modified(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            if softcap is not None:
                score = softcap * torch.tanh(score / softcap)
            for value in added:
                score = score + value(b, h, q_idx, kv_idx).to(score.dtype)
            return score

        return modified

    def gradients(self, into_tables: Sequence[Tensor], parameters: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The gradients of the parameters from those of `leaves`."""
        if not parameters or not self._sources:
            return tuple(torch.zeros_like(parameter) for parameter in parameters)
        return torch.autograd.grad(self._sources, parameters, into_tables, allow_unused=True, materialize_grads=True)

    def _pair_value(self, bias: Bias) -> PairValue:
        """One bias as a function of a pair's indices."""
        if isinstance(bias, RelativeBias):
            return self._by_diagonal(bias)
        _check_corners(bias, self.batched)
        if isinstance(bias, ScoreModBias):
            return self._by_function(bias)
        if isinstance(bias, Gaussian):
            return self._by_center(bias)
        table = self._table(cast(TensorBias, bias).pairs)
        return lambda *indices: table.lookup(cast(Indices, indices))

    def _by_diagonal(self, bias: RelativeBias) -> PairValue:
        """A bias by distance as a table (heads, M + N - 1): pair (i, j) is on diagonal j - i + M - 1."""
        heads, device = self.batched.shape[1], self.batched.value.device
        line = bias.values_at(distances(self.batched.problem))
        if len(line) not in (1, heads) or line.device != device:
            _check_corners(bias, self.batched)
        line, many = self._leaf(line), len(line) > 1
        last = torch.full((), self.batched.shape[2] - 1, device=device)  # a tensor: a number would be compiled in

        def value(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return line[h if many else 0 * h, kv_idx - q_idx + last]

        return value

    def _by_function(self, bias: ScoreModBias) -> PairValue:
        """A bias from a score_mod: the function itself, of a score of 0 and the positions of the pair."""
        tables = [self._table(index) for index in bias.indices(self.batched.grid)]
        zero = torch.zeros((), device=self.batched.value.device)

        def value(*indices: Tensor) -> Tensor:
            read = (table.lookup(cast(Indices, indices)) for table in tables)
            return bias.function.call_with(bias.tensors, zero, *read)

        return value

    def _by_center(self, bias: Gaussian) -> PairValue:
        """-(key position - center)² / (2 sigma²), from tables of all three."""
        center, sigma = (
            self._table(at_least_float32(each).unsqueeze(-1) if each.ndim else each.reshape(1, 1))
            for each in (bias.center, bias.sigma)
        )
        position = self._table(self.batched.grid.key)

        def value(*indices: Tensor) -> Tensor:
            at = cast(Indices, indices)
            distance, width = position.lookup(at) - center.lookup(at), sigma.lookup(at)
            return -(distance * distance) / (2 * width * width)

        return value

    def _table(self, pairs: Tensor) -> IndexedTable:
        """A tensor over pairs as a table; of one number that has a gradient a number for each row.

        FlexAttention's kernels add the gradient of a table where it is indexed.
        """
        table = IndexedTable.from_4d(self.batched.as_4d(pairs))
        if table.axes or not table.values.requires_grad:
            return IndexedTable(self._leaf(table.values), table.axes)
        return IndexedTable(self._leaf(table.values.expand(self.batched.shape[2])), (2,))

    def _leaf(self, table: Tensor) -> Tensor:
        """The table, or a leaf in its place where it has a gradient."""
        if not table.requires_grad or not torch.is_grad_enabled():
            return table.detach()
        self._sources.append(table)
        self.leaves.append(table.detach().contiguous().requires_grad_())
        return self.leaves[-1]


def _check_corners(bias: Bias, batched: BatchedProblem) -> None:
    """Evaluate a bias at the corners of the problem; it raises its error if it does not fit, or does more than add."""
    queries, keys = (slice(0, size, max(size - 1, 1)) for size in batched.shape[2:])
    replace(batched.problem, bias=bias).bias_values(batched.grid.tile(queries, keys))


def widened(tensor: Tensor) -> Tensor:
    """A tensor with zeros as further features, up to the fewest that the kernels take."""
    missing = LEAST_DIM - tensor.shape[-1]
    return pad(tensor, (0, missing)) if missing > 0 else tensor


@cache
def has_triton() -> bool:
    """Whether Triton is installed, which compiles FlexAttention for a GPU."""
    return find_spec("triton") is not None
