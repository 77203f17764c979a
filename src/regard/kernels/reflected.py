"""The reflected kernel: PaTH attention as plain attention between the halves of blocks, halves of halves, and chunks.

Score (i, j) is k_j H_j+1 … H_i q_i. Where key and query are in different halves of a block, the product is cut at its
middle: keys are carried forward to it, queries back to it, and all pairs of the two halves are dot products without
bias or mask. Both come from what they were at the halves of these, by one D × D product of a half each.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..biases.base import Bias, TensorBias, bias_parts
from ..biases.forget_gates import GateSums
from ..biases.householder_products import CHUNK, ChunkedPath, ReflectedScores
from ..core.log_sum_exp import merge_softmax
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from .base import Cost, Kernel, Result
from .nan_safety import run_nan_safe
from .planning.rates import predicted_seconds
from .planning.signature import exact_signature, memoize_choice
from .planning.unit_costs import RESULT
from .reflected_mask import ReflectedMask

CALLS_OF_CHUNKS, CALLS_OF_LEVEL = 60.0, 60.0


def has_reflections(problem: Problem) -> bool:
    """Whether a bias of a problem, or a part of it, is that of PaTH."""
    return any(isinstance(each, ReflectedScores) for each in bias_parts(problem.bias))


class ReflectedKernel:
    """Scores with reflections of the tokens in between, under causal masks, windows and padding; O(n log n) memory."""

    name = "reflected"

    def __init__(self, kernels: tuple[Kernel, ...]) -> None:
        self.kernels = kernels

    def why_not(self, problem: Problem) -> list[str]:
        """All but reflections and forget gates of whole sequences under a causal mask, windows and masks of keys."""
        reasons = []
        others = [bias for bias in bias_parts(problem.bias) if not isinstance(bias, ReflectedScores)]
        gates = [bias for bias in others if isinstance(bias, GateSums) and bias.side != "after"]
        if len(bias_parts(problem.bias)) != 1 + len(others) or others != gates or len(gates) > 1:
            reasons.append("its biases are path, once, and forget_gates of the tokens before")
        if not ReflectedMask.fits(problem.mask):
            reasons.append("its mask is causal, alone or joined by & to windows and masks of keys")
        square = problem.queries == problem.keys and problem.shift == 0
        if not square or problem.queries <= CHUNK or not problem.heads or len(problem.batch) != 1:
            reasons.append(f"it is for more than {CHUNK} tokens that attend to themselves, (batch, heads, length, dim)")
        for name, feature in (("softcap", problem.softcap), ("dropout", problem.dropout)):
            if feature is not None:
                reasons.append(f"it has no {name}")
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """That of the pairs without bias, and the products that move queries and keys."""
        plain = replace(problem, bias=None, sinks=None, wants_lse=True)
        own = self._kernel(plain).cost(plain)
        rows, dim = problem.weights_shape[:-1].numel(), problem.pairs.query.shape[-1]
        levels = max(problem.queries // CHUNK, 1).bit_length()
        return replace(
            own,
            flops=own.flops + rows * dim * (8.0 * CHUNK + 4.0 * levels * dim),
            passes=own.passes + RESULT * rows * (levels + 1) * (2 * dim + problem.value.shape[-1]),
            calls=own.calls + CALLS_OF_CHUNKS + CALLS_OF_LEVEL * levels,
        )

    def run(self, problem: Problem) -> Result:
        """The output, and the log-sum-exp if it was requested."""
        return run_nan_safe(problem, self._compute)

    def _compute(self, problem: Problem) -> Result:
        reflections = next((bias for bias in bias_parts(problem.bias) if isinstance(bias, ReflectedScores)), None)
        if reflections is None:  # where what rows attend to is asked for
            return self._kernel(problem).run(problem)
        parts = _parts(problem, reflections)
        merged = self._part(next(parts))
        for part in parts:
            merged = _merged(merged, self._part(part))
        if problem.sinks is not None:
            output, lse = merged
            of_sinks = problem.sinks.to(lse.dtype).unsqueeze(-1).expand_as(lse)
            merged = _merged(merged, (torch.zeros_like(output), of_sinks))
        output, lse = merged
        return Result(output.to(problem.value.dtype), lse if problem.wants_lse else None)

    def _part(self, part: _ReflectedPart) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of all rows over the keys of a part."""
        result = self._kernel(part.problem).run(part.problem)
        if result.lse is None:
            raise AssertionError("a kernel for a problem that wants the log-sum-exp gave none")
        return part.in_place(result.output, 0.0), part.in_place(result.lse.unsqueeze(-1), -torch.inf).squeeze(-1)

    def _kernel(self, problem: Problem) -> Kernel:
        """The kernel of the lowest predicted time for a part."""

        def compute() -> Kernel:
            able = [kernel for kernel in self.kernels if not kernel.why_not(problem)]
            return min(able, key=lambda kernel: predicted_seconds(kernel.cost(problem), problem))

        return memoize_choice(problem, exact_signature, "part of reflections", compute)


def _merged(first: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over the keys of both."""
    (output, lse), (other_output, other_lse) = first, other
    return merge_softmax(torch.stack([output, other_output]), torch.stack([lse, other_lse]), dim=0)


@dataclass(frozen=True, eq=False)
class _ReflectedPart:
    """The problem of some blocks in the order of their rows, (batch · blocks, heads, rows, ·).

    before: how many rows are before those of each block, which are no rows of it. length: of the sequence.
    """

    problem: Problem
    blocks: int
    before: int
    length: int

    def in_place(self, result: Tensor, otherwise: float) -> Tensor:
        """The result of the blocks as that of all rows, (batch, heads, length, ·)."""
        blocks = result.unflatten(0, (-1, self.blocks)).transpose(1, 2)  # [B, H, blocks, rows, ·]
        rows = pad(blocks, (0, 0, self.before, 0), value=otherwise).flatten(2, 3)[:, :, : self.length]
        return pad(rows, (0, 0, 0, self.length - rows.shape[2]), value=otherwise)


@dataclass(frozen=True, eq=False)
class _CarriedBlocks:
    """Blocks of `size` tokens: queries carried back to their first, keys behind their last, and their products.

    Shapes: queries, keys and values (batch, heads, T, ·), products (batch, heads, T // size, D, D). The last block may
    be shorter; its keys are of no use, as no token is behind them.
    """

    size: int
    queries: Tensor
    keys: Tensor
    products: Tensor

    @property
    def pairs(self) -> int:
        """How many pairs of whole neighbours there are."""
        return self.queries.shape[2] // (2 * self.size)

    @property
    def rest(self) -> slice:
        """The rows behind the pairs that have a whole block before them, which is in no pair."""
        return slice((2 * self.pairs + 1) * self.size, self.queries.shape[2])

    def joined(self) -> _CarriedBlocks:
        """Blocks of two neighbours each."""
        pairs, size, rest = self.pairs, self.size, self.rest
        left, right = self.products[:, :, 0 : 2 * pairs : 2], self.products[:, :, 1 : 2 * pairs : 2]
        queries, keys = (
            each[:, :, : 2 * pairs * size].unflatten(2, (pairs, 2, size)) for each in (self.queries, self.keys)
        )
        queries = torch.stack([queries[:, :, :, 0], queries[:, :, :, 1] @ left.mT], 3).flatten(2, 4)
        keys = torch.stack([keys[:, :, :, 0] @ right, keys[:, :, :, 1]], 3).flatten(2, 4)
        between, behind = self.queries[:, :, 2 * pairs * size : rest.start], self.queries[:, :, rest]
        if behind.shape[2]:
            behind = behind @ self.products[:, :, 2 * pairs].mT
        keys = torch.cat([keys, self.keys[:, :, 2 * pairs * size :]], 2)
        return _CarriedBlocks(2 * size, torch.cat([queries, between, behind], 2), keys, left @ right)


def _parts(problem: Problem, reflections: ReflectedScores) -> Iterator[_ReflectedPart]:
    """The pairs of the mask: those within chunks, and of blocks of 1, 2, 4, ... chunks those of two neighbours."""
    pairs: DotPairs = problem.pairs  # type: ignore[assignment]  # `path` refuses other forms
    gates = next((bias for bias in bias_parts(problem.bias) if isinstance(bias, GateSums)), None)
    heads, length, dtype = pairs.query.shape[1], problem.queries, reflections.vectors.dtype
    every = (problem.batch[0], heads, length)
    query, key, value = (_of_heads(each, heads).to(dtype) for each in (pairs.query, pairs.key, problem.value))
    vectors, beta = (each.expand(*every, -1) for each in (reflections.vectors, reflections.beta))
    path = ChunkedPath.of_tokens(query, key, vectors, beta)
    filled = path.queries.shape[2] * CHUNK - length
    query, key, value = (pad(each, (0, 0, 0, filled)) for each in (query, key, value))
    mask, sums = ReflectedMask.of_problem(problem).filled(problem.batch[0], filled), None
    if gates is not None:
        sums = tuple(pad(each.expand(*every, 1), (0, 0, 0, filled)) for each in (gates.rows, gates.columns))

    def part(
        own: tuple[Tensor, Tensor, Tensor], rows: _RowBlocks, columns: _RowBlocks, before: int, bias: Bias | None
    ) -> _ReflectedPart:
        if sums is not None and gates is not None:
            of_gates = GateSums(rows.select(sums[0]), columns.select(sums[1]), gates.exact)
            bias = of_gates if bias is None else bias + of_gates
        kept = None if mask.keys is None else columns.select(mask.keys)
        own_mask = mask.of_part(rows.start - columns.start, (rows.size, columns.size), kept)
        own_pairs = DotPairs(own[0], own[1], pairs.scale)
        return _ReflectedPart(Problem(own_pairs, own[2], own_mask, bias, wants_lse=True), rows.blocks, before, length)

    chunks = _RowBlocks(0, CHUNK, CHUNK, path.queries.shape[2])
    near = TensorBias(path.near.transpose(1, 2).flatten(0, 1) * pairs.scale)
    yield part((chunks.select(query), chunks.select(key), chunks.select(value)), chunks, chunks, 0, near)
    blocks = _CarriedBlocks(CHUNK, path.queries.flatten(2, 3), path.keys.flatten(2, 3), path.products)
    while blocks.size < query.shape[2]:
        size, whole = blocks.size, blocks.pairs
        halves = (
            [(_RowBlocks(size, size, 2 * size, whole), _RowBlocks(0, size, 2 * size, whole), size)] if whole else []
        )
        if (behind := blocks.rest).start < behind.stop:
            last = _RowBlocks(behind.start - size, size, size, 1)
            halves.append((_RowBlocks(behind.start, behind.stop - behind.start, size, 1), last, behind.start))
        for rows, columns, before in halves:
            own = rows.select(blocks.queries), columns.select(blocks.keys), columns.select(value)
            yield part(own, rows, columns, before, None)
        blocks = blocks.joined()


@dataclass(frozen=True)
class _RowBlocks:
    """Blocks of `size` rows, the first from `start` on, each `step` after the one before."""

    start: int
    size: int
    step: int
    blocks: int

    def select(self, tensor: Tensor) -> Tensor:
        """Those rows of a tensor (batch, heads, T, ·), as (batch · blocks, heads, size, ·)."""
        rows = tensor[:, :, self.start : self.start + (self.blocks - 1) * self.step + self.size]
        return rows.unfold(2, self.size, self.step).transpose(-2, -1).transpose(1, 2).flatten(0, 1)


def _of_heads(tensor: Tensor, heads: int) -> Tensor:
    """Keys or values for each head of the queries."""
    return tensor.repeat_interleave(heads // tensor.shape[1], 1) if tensor.shape[1] < heads else tensor
