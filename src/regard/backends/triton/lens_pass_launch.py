"""Lenses over dot products in Triton: the launches of one pass, and the weights of single tiles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton
from torch import Tensor

from ...biases import RelativeBias
from ...biases.base import TensorBias
from ...core.batched_problem import BatchedProblem
from ...core.problem import Problem
from ...core.score_forms import DotPairs
from ...errors import DeviceError, ShapeError
from ...lenses.forms import CellReduction, ColumnSums, LargestWeights, RowSums, WeightForm, check_form
from ...lenses.weights import infinite_where_empty
from ...tiles.row_spans import has_spans
from ...tiles.tile_bits import masked_pairs
from ...tiles.tile_size import reused_buffer
from ..base import TileWriter
from . import jit_runtime
from .flash_launches import FlashLaunches
from .fused_attention import MAX_BITS, MAX_DIM
from .kernel_arguments import BiasArgument, MaskArgument, StridedRows, pair_strides
from .launch_settings import INTERPRETED, LaunchSettings
from .lens_arguments import KeepArgument, MatrixArgument, TermSums, WantedSums
from .lens_requests import LensRequests
from .lens_sums import reduce_rows

MOST_LARGEST = 64
"""The largest k of the largest weights of a row: a program keeps k numbers of each of its rows in registers."""


class WeightsInTriton:
    """Lenses over dot products: in one pass that stores no weights, or tile by tile."""

    def reduces(self, problem: Problem) -> bool:
        """Whether Triton goes over the tiles of a problem: with a bias by distance, from a tensor, or none."""
        bias, mask = problem.bias, problem.mask
        by_distance = isinstance(bias, RelativeBias) and problem.shift is not None
        if not _computes(problem) or not (bias is None or by_distance or isinstance(bias, TensorBias)):
            return False
        return mask is None or has_spans(mask, problem) or masked_pairs(problem) <= MAX_BITS

    def takes(self, form: WeightForm) -> bool:
        """All forms of known terms, but of the largest weights of a row no more than registers hold."""
        if isinstance(form, RowSums | ColumnSums | CellReduction):
            return form.term in TermSums._fields
        return not isinstance(form, LargestWeights) or form.weights.shape[-1] <= MOST_LARGEST

    def reduce(self, batched: BatchedProblem, lse: Tensor, forms: Sequence[WeightForm]) -> None:
        """Add up what lenses ask for; lse (B, H, M): rows where it is not finite have weights 0.

        Raises:
            ShapeError, DtypeError, DeviceError: a tensor is not as its form says.
        """
        sizes, device = batched.shape, batched.value.device
        if tuple(lse.shape) != sizes[:3]:
            raise ShapeError(f"lse has shape {tuple(lse.shape)}; it needs {sizes[:3]}")
        for form in forms:
            check_form(form, sizes)
            for name in form.written:
                if (tensor := getattr(form, name)).device != device:
                    raise DeviceError(
                        f"{name} of {type(form).__name__} is on {tensor.device}; the problem is on {device}"
                    )
        if 0 in sizes:
            for form in forms:
                if isinstance(form, LargestWeights):
                    form.weights.zero_()
            return
        launches = FlashLaunches(batched)
        for requests in LensRequests.of(forms):
            setting = settings(launches, heavy=requests.is_heavy or batched.problem.bias is not None)
            wanted = requests.arguments(device, setting.rows, setting.columns)
            mask = launches.tiles.of_rows(setting.rows, setting.columns)
            _launch(
                *(launches, launches.query, launches.key, lse),
                *(mask, launches.bias.argument, KeepArgument(), wanted, setting),
            )
            requests.finish()

    def writer(self, batched: BatchedProblem, lse: Tensor) -> TileWriter | None:
        """What writes the tiles of a problem, with any bias; lse (B, H, M, 1)."""
        return TileWriterInTriton(batched, lse.squeeze(-1)) if _computes(batched.problem) else None


def _computes(problem: Problem) -> bool:
    """Whether scores are products of queries and keys that a kernel reads."""
    pairs = problem.pairs
    return (
        problem.normalizer is None
        and isinstance(pairs, DotPairs)
        and jit_runtime.runs(pairs.query, pairs.key)
        and pairs.query.dtype == pairs.key.dtype
        and pairs.query.shape[-1] <= MAX_DIM
    )


class TileWriterInTriton:
    """Weights of tiles: product, exponential, bias and mask in one launch."""

    def __init__(self, batched: BatchedProblem, lse: Tensor) -> None:
        self.launches, self.lse = FlashLaunches(batched), lse
        self.buffer: Tensor | None = None

    def tile(self, rows: slice, columns: slice, *, masked: bool, terms: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (b, H, m, n) and the terms."""
        lse = self.lse[:, :, rows]
        sizes = torch.Size((*lse.shape, columns.stop - columns.start))
        self.buffer = reused_buffer(self.buffer, self.lse, 2 * sizes.numel())
        weights, logs = self.buffer[: 2 * sizes.numel()].view(2, *sizes).unbind()
        _write(
            self.launches,
            lse,
            rows,
            columns,
            MatrixArgument(StridedRows.of(weights), logs if terms else None),
            masked=masked,
        )
        return weights, logs if terms else None


def write_rows(problem: Problem, lse: Tensor, rows: slice, columns: slice, into: Tensor) -> bool:
    """Write the weights of some rows and columns, without a tensor of their scores; False if there is no code."""
    if not _computes(problem):
        return False
    launches = FlashLaunches(BatchedProblem.from_problem(problem))
    leading = launches.batch, launches.heads
    matrix = MatrixArgument(StridedRows.of(into.view(*leading, *into.shape[-2:])))
    lse = infinite_where_empty(lse).reshape(*leading, lse.shape[-1])
    _write(launches, lse, rows, columns, matrix, masked=True)
    return True


def _write(
    launches: FlashLaunches, lse: Tensor, rows: slice, columns: slice, matrix: MatrixArgument, *, masked: bool
) -> None:
    """Write the weights of a rectangle of (B, H, m, n); lse (B, H, m)."""
    batched = launches.batched
    keep, pairs = batched.keep(rows, columns) if masked else None, batched.bias(rows, columns)
    bias, exists = BiasArgument(), KeepArgument()
    if pairs is not None:
        pairs = pairs.detach().float()
        bias = BiasArgument(pairs=pairs, pairs_strides=pair_strides(pairs))
    if keep is not None:
        exists = KeepArgument(keep.view(torch.uint8), pair_strides(keep))
    _launch(
        *(launches, launches.query[:, :, rows], launches.key[:, :, columns], lse),
        *(MaskArgument(), bias, exists, WantedSums(matrix=matrix), settings(launches, heavy=True)),
    )


def _launch(
    launches: FlashLaunches,
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    mask: MaskArgument,
    bias: BiasArgument,
    keep: KeepArgument,
    wanted: WantedSums,
    setting: LaunchSettings,
) -> None:
    """Go over the tiles of query (B, H, M, D) and key (B, Hk, N, D), with lse (B, H, M)."""
    queries, keys = query.shape[2], key.shape[2]
    programs = triton.cdiv(queries, setting.rows) * launches.batch * launches.heads
    if not programs * keys:
        return
    group, kernel = launches.heads // key.shape[1], cast(Any, reduce_rows)
    largest = 0 if wanted.largest.weights is None else wanted.largest.weights.shape[-1]
    kernel[(programs,)](
        *(StridedRows.of(query), StridedRows.of(key), lse.float().contiguous()),
        *(launches.score, mask, bias, keep, wanted, launches.heads, group, queries, keys),
        D=launches.dims["D"],
        BD=launches.dims["BD"],
        BM=setting.rows,
        BN=setting.columns,
        K=largest,
        SLOTS=triton.next_power_of_2(max(largest, 1)),
        BINS=triton.next_power_of_2(max(wanted.histogram.bins, 1)),
        PRECISION=jit_runtime.exact_products(),
        num_warps=setting.warps,
        num_stages=setting.stages,
    )


def settings(launches: FlashLaunches, *, heavy: bool) -> LaunchSettings:
    """Tile, warps and stages: such that registers are not spilled where no card has been measured.

    heavy: whether each pair has a number of its own, of a bias, a mask or a distance, or a program keeps many numbers.
    """
    if jit_runtime.INTERPRETED:
        return INTERPRETED
    if launches.query.dtype == torch.float32:
        return LaunchSettings(32, 32, 8, 1)
    if heavy:
        return LaunchSettings(64, 32, 8, 2)
    return LaunchSettings(64, 64, 4 if launches.dims["BD"] <= 64 else 8, 2)
