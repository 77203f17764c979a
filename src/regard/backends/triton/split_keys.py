"""Few queries over many keys: keys are split over the chip, and a second kernel merges the parts.

Flash decoding (Dao, Haziza, Massa and Sizov 2023). The work is to read keys and values once, so that what counts is how
much of them is on the way from memory. `merged_parts` has the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.finite import CheckedRows
from ...errors import ConfigurationError
from .jit_runtime import Chip, chip, exact_products, launch
from .kernel_arguments import MOST_STRIDE, StridedRows, with_near_rows
from .launch_settings import split_dims

STAGES, PROGRAMS_AT_ONCE = 3, 2
"""Tiles of keys and values in the loop of a program, all but one of them on the way, and programs of a multiprocessor.

Memory answers after some 0.7 µs: a chip that reads 3.4 TB/s (H100) has 2.4 MB on the way, 18 KB for each of its 132
multiprocessors, and one of 8 TB/s (B200) 38 KB. Tiles of 32 KB, of which six fit into the 227 KB of a multiprocessor,
make it 128 KB. So products, barriers and the first tiles of the next program hide behind what is on the way.
"""
MOST_WAVES = 4
"""The most programs that each place of the chip computes one after another, where that fills it better than fewer."""
FULL_ENOUGH = 0.9
"""The share of the chip's places that is worth no further wave of programs: reading is as fast with a few empty."""
FEW_TILES = 4
"""Up to so many tiles of keys are read by one program: a second launch takes longer than reading them in turn."""
MOST_ROWS = 128
"""The most rows of a key head: the query heads of latent attention in the largest models, which share one."""
MERGED_AT_ONCE = 2**13
"""Numbers of a tile of the merging kernel."""
LOG2E = math.log2(math.e)


class Limits(NamedTuple):
    """The keys that rows attend to: row r to those below least + max(r mod queries - ahead, 0)."""

    queries: int
    least: int
    ahead: int

    @classmethod
    def of(cls, limits: Sequence[int]) -> Limits:
        """The limits of queries under a causal mask: each is one more than that before it, but at both ends.

        Raises:
            ConfigurationError: they are not.
        """
        found = cls(len(limits), limits[0], limits.count(limits[0]) - 1)
        if any(limit != min(found.least + max(at - found.ahead, 0), limits[-1]) for at, limit in enumerate(limits)):
            raise ConfigurationError(
                f"limits are {list(limits)}; few queries need limits as a causal mask has them, each one more than the "
                "one before: leave them out, and add -inf where there is no pair"
            )
        return found


@dataclass(frozen=True, slots=True)
class KeySplit:
    """Who computes what of few queries: programs for blocks of rows, their tiles of keys, and the most parts of keys.

    sizes: those of tiles, as `attend_part` names them. options: of the launch.
    """

    units: int
    blocks: int
    rows: int
    most_parts: int
    sizes: dict[str, int]
    options: dict[str, int]

    def parts(self, keys: int) -> int:
        """The parts of so many keys: none without a tile."""
        tiles = -(-keys // self.sizes["BN"])
        return 1 if tiles <= FEW_TILES else min(self.most_parts, tiles)


@lru_cache(maxsize=1024)
def key_split(
    heads: int, rows: int, dim: int, value_dim: int, number_bytes: int, at: Chip, most_columns: int = 128
) -> KeySplit:
    """The split for so many key heads of all batches, with so many rows each; number_bytes: of a key or a query."""
    dims = split_dims(dim, value_dim)
    padded, value_padded = dims["BD"] + dims["REST"], dims["BDV"]
    key_bytes = (padded + value_padded) * number_bytes
    widest = max(dims["BD"], value_padded)
    if number_bytes == 4:  # no tensor cores: each row takes as long as another, and registers
        block, warps = min(_power_of_2(rows), 8), 8
    else:
        most = 64 if widest <= 256 else 32 if widest <= 512 else 16
        block = min(max(_power_of_2(rows), 16), most)
        warps = 4 if block == 16 and widest <= 256 else 8
    fits = at.shared_bytes // (STAGES * PROGRAMS_AT_ONCE + 1) // key_bytes
    columns = min(max(_power_of_2(fits + 1) // 2, 16), 64 if block == 64 else 128, most_columns)
    rest = at.shared_bytes - 2 * block * (padded * number_bytes + columns * 4)
    stages = min(max(rest // (columns * key_bytes), 1), STAGES)
    blocks = -(-rows // block)
    units = heads * blocks
    return KeySplit(
        *(units, blocks, rows, _most_parts(units, PROGRAMS_AT_ONCE * at.processors)),
        dims | {"BR": block, "BN": columns},
        # What is read without stages stands in registers, which for one reading more are enough up to a dim of 128.
        {"num_warps": warps, "STAGES": stages, "REPAIR_STAGES": stages if number_bytes == 4 and widest > 128 else 1},
    )


def _power_of_2(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << max(number - 1, 0).bit_length()


def _most_parts(units: int, places: int) -> int:
    """The parts with which programs fill the places of the chip, in few waves."""

    def fullness(waves: int) -> tuple[float, int]:
        filled = waves * places // units * units / (waves * places)
        return min(filled, FULL_ENOUGH), -waves

    waves = max(range(1, MOST_WAVES + 1), key=fullness)
    return max(waves * places // units, 1)


def _begin_keys(value: Tensor, key: Tensor, sizes: dict[str, int]) -> bool:
    """Whether values are the first numbers of keys, as of latent attention, and the first tile of keys has them all."""
    same_rows = value.data_ptr() == key.data_ptr() and value.stride() == key.stride() and value.dtype == key.dtype
    return same_rows and sizes["DV"] == sizes["BDV"] == sizes["BD"]


@cache
def _kernels() -> tuple[Any, Any]:
    """`attend_part` and `merge_parts`, with Triton, which a process without CUDA need not load."""
    from .merged_parts import attend_part, merge_parts

    return attend_part, merge_parts


def _attend(
    split: KeySplit,
    query: StridedRows,
    key: Tensor,
    value: Tensor,
    scale: float,
    output: Tensor,
    lse: Tensor | None = None,
    added: Tensor | None = None,
    limits: Limits | None = None,
) -> None:
    """Write the output, and the log-sum-exp if there is a tensor for it, of keys and values (B, Hk, N, ·)."""
    values = None if _begin_keys(value, key, split.sizes) else with_near_rows(value)
    key = with_near_rows(key)
    heads, keys = key.shape[1:3]
    parts = split.parts(keys)
    count = split.units // split.blocks * split.rows
    sums = output.new_empty(count * parts * (split.sizes["DV"] + 2), dtype=torch.float32) if parts > 1 else None
    more = StridedRows(None) if added is None else StridedRows.of(added)
    columns = 0 if added is None else added.stride(3)
    masked = added is not None or limits is not None
    attend_part, merge_parts = _kernels()
    with torch.cuda.device_of(output):
        launch(
            attend_part,
            (split.units, parts),
            *(query, StridedRows.of(key), StridedRows.of(values), more, columns, sums, output, lse),
            *(heads, split.blocks, split.rows, keys, parts, *(limits or Limits(1, keys, 0)), scale * LOG2E),
            **split.sizes,
            **split.options,
            MASKED=masked,
            PRECISION=exact_products(),
        )
        if sums is not None:
            width = split.sizes["BDV"]
            together = min(max(MERGED_AT_ONCE // width, 1), _power_of_2(parts))
            launch(merge_parts, (count,), sums, output, lse, parts, DV=split.sizes["DV"], BDV=width, BP=together)


class FewQueriesInTriton:
    """Each key and value is read once for all rows of its head. NaN reaches the rows that attend to it alone."""

    fused = True
    most_rows = MOST_ROWS

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        added: Tensor | None = None,
        limits: Sequence[int] | None = None,
    ) -> CheckedRows:
        """Output (B, Hk, R, Dv), in the dtype of the values, and log-sum-exp (B, Hk, R), float32."""
        batch, heads, rows, dim = query.shape
        value_dim = value.shape[3]
        output = value.new_empty(batch, heads, rows, value_dim)
        lse = value.new_empty(batch, heads, rows, dtype=torch.float32)
        if not lse.numel():
            return CheckedRows((output, lse))
        if query.dtype != key.dtype:
            query = query.float()  # and keys are widened in registers: no number of either is rounded
        query = with_near_rows(query)
        if added is not None:
            added = added.expand(batch, heads, -1, -1)
        steps = None
        if limits is not None:
            key, value = key[:, :, : limits[-1]], value[:, :, : limits[-1]]
            steps = Limits.of(limits) if limits[0] < limits[-1] else None
        split = key_split(batch * heads, rows, dim, value_dim, query.element_size(), chip(key.device))
        _attend(split, StridedRows.of(query), key, value, scale, output, lse, added, steps)
        return CheckedRows((output, lse))

    def prepare_step(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> KeySplitStep | None:
        """A step of one or two launches, for tensors that are contiguous in their last axes."""
        of_batch, of_head = query.stride()[:2]
        in_rows = query.stride(3) == key.stride(3) == value.stride(3) == 1 and of_head < MOST_STRIDE
        if query.dtype != key.dtype or not in_rows:
            return None
        (batch, heads, _, dim), (_, key_heads, _, value_dim) = query.shape, value.shape
        group = heads // key_heads
        split = key_split(batch * key_heads, group, dim, value_dim, key.element_size(), chip(key.device))
        return KeySplitStep(split, (of_batch, group * of_head, of_head), (batch, heads, 1, value_dim), scale)


@dataclass(frozen=True, eq=False, slots=True)
class KeySplitStep:
    """Steps of decoding with queries of one shape and strides, one for each head, whatever number of keys they have.

    strides: of the query as (B, Hk, H / Hk, D). shape: of the output.
    """

    split: KeySplit
    strides: tuple[int, int, int]
    shape: tuple[int, int, int, int]
    scale: float

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Softmax(scale · Q Kᵀ) · V, (B, H, 1, Dv)."""
        output = value.new_empty(self.shape)
        _attend(self.split, StridedRows(query, *self.strides), key, value, self.scale, output)
        return output
