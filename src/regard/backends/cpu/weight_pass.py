"""The weights of tiles in C, recomputed from the log-sum-exp of their rows, and what lenses add up over them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem
from ...core.problem import Problem
from ...core.score_forms import DotPairs
from ...lenses.forms import WeightForm
from ...lenses.weights import infinite_where_empty, register_writer
from ...tiles.tile_size import reused_buffer
from ..base import TileWriter
from . import library
from .flash_tiles import FlashInC, has_call_bias, tile_problems
from .reduce_tiles import reduce_weights
from .write_weights import write_weights


class WeightsInC:
    """Lenses over dot products: in one pass that stores no weights, or tile by tile."""

    def reduces(self, problem: Problem) -> bool:
        """Whether C goes over the tiles of a problem."""
        dots = problem.normalizer is None and isinstance(problem.pairs, DotPairs)
        dots = dots and not has_call_bias(problem)
        return dots and library.supports(problem.value) and not FlashInC().why_not(problem)

    def takes(self, form: WeightForm) -> bool:
        """All forms."""
        return True

    def reduce(self, batched: BatchedProblem, lse: Tensor, forms: Sequence[WeightForm]) -> None:
        """Add up what lenses ask for, slice by slice of batches with the same tiles; lse (B, H, M)."""
        for batch, part in tile_problems(batched):
            reduce_weights(part, lse[batch], [form.part(batch) for form in forms])

    def writer(self, batched: BatchedProblem, lse: Tensor) -> TileWriter | None:
        """What writes the tiles of a problem without a bias; lse (B, H, M, 1)."""
        if not _writes(batched.problem):
            return None
        return TileWriterInC(batched, cast(DotPairs, batched.pairs), lse)


def _writes(problem: Problem) -> bool:
    """Whether C computes the weights of a tile: dot products without a bias."""
    pairs = problem.pairs
    plain = problem.normalizer is None and isinstance(pairs, DotPairs) and problem.bias is None
    return plain and library.supports(pairs.query, pairs.key)


class TileWriterInC:
    """Weights by native code: product, exponential and mask in one pass."""

    def __init__(self, batched: BatchedProblem, pairs: DotPairs, lse: Tensor) -> None:
        self.batched, self.pairs, self.lse = batched, pairs, lse.squeeze(-1)
        self.buffer: Tensor | None = None

    def tile(self, rows: slice, columns: slice, *, masked: bool, terms: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (b, H, m, n) and the terms."""
        query, key = self.pairs.query[:, :, rows], self.pairs.key[:, :, columns]
        sizes = torch.Size((*query.shape[:3], key.shape[2]))
        self.buffer = reused_buffer(self.buffer, self.lse, 2 * sizes.numel())
        weights, logs = self.buffer[: 2 * sizes.numel()].view(2, *sizes).unbind()
        write_weights(
            query,
            key,
            self.pairs.scale,
            self.lse[:, :, rows],
            weights,
            entropy_terms=logs if terms else None,
            keep=self.batched.keep(rows, columns) if masked else None,
            softcap=self.batched.problem.softcap,
        )
        return weights, logs if terms else None


def write_rows(problem: Problem, lse: Tensor, rows: slice, columns: slice, into: Tensor) -> bool:
    """Write the weights of some rows and columns, without a tensor of their scores; False if the code cannot."""
    if not _writes(problem):
        return False
    batch, pairs = problem.batch, problem.pairs
    keep = problem.keep(problem.grid().tile(rows, columns))

    def batch_and_heads(tensor: Tensor) -> Tensor:
        """The leading axes, if any, as (B or 1, H or 1) before the last two."""
        tensor = tensor if problem.heads or tensor.ndim <= 2 else tensor.unsqueeze(-3)
        if tensor.ndim <= 3:
            return tensor[(None,) * (4 - tensor.ndim)]
        return tensor.expand(*batch, *tensor.shape[-3:]).reshape(batch.numel(), *tensor.shape[-3:])

    def all_batches(tensor: Tensor) -> Tensor:
        tensor = batch_and_heads(tensor)
        return tensor.expand(batch.numel(), *tensor.shape[1:])

    leading = batch.numel(), problem.weights_shape[-3] if problem.heads else 1
    write_weights(
        all_batches(pairs.query[..., rows, :]),
        all_batches(pairs.key[..., columns, :]),
        pairs.scale,  # type: ignore[union-attr]  # `_writes` lets dot products alone through
        infinite_where_empty(lse).reshape(*leading, lse.shape[-1]),
        into.view(*leading, *into.shape[-2:]),
        keep=None if keep is None else batch_and_heads(keep),
        softcap=problem.softcap,
    )
    return True


register_writer(write_rows)
