"""Masks and biases as JSON: names from one table, plain numbers, and references to arrays; nothing else is read.

A mask without a name in the table is stored by tiles of 128 × 128: EMPTY, FULL, or PARTIAL with one bit for each pair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...biases import Bias
from ...biases.alibi import Alibi
from ...biases.base import Sum, TensorBias
from ...biases.gaussian import Gaussian
from ...biases.relative import Bucketed, Clipped
from ...biases.score_mod import ScoreModBias
from ...core.grid import Blocks, Grid
from ...core.intervals import EMPTY, FULL, PARTIAL, Ternary
from ...errors import AtlasError
from ...masks import Mask
from ...masks.base import And, Kept, Not, Or, Pairs
from ...masks.causal import Causal
from ...masks.convert.block_mask import BlockLayout
from ...masks.documents import CrossDocuments, Documents
from ...masks.padding import Padding
from ...masks.prefix import Prefix, PrefixPerBatch
from ...masks.sparse_patterns import Dilated, Fixed, GlobalTokens, RandomBlocks, Strided
from ...masks.tensor_mask import TensorMask
from ...masks.window import Window
from ...utils.dataclass_json import DataclassJSON

SIDE = 128
"""Rows and columns of a tile."""
AT_ONCE = 1024
"""Tiles whose bits are unpacked together: 16 MB."""
MOST_BITS = 2**26
"""The most bytes that the bits of one mask may take."""


@dataclass(frozen=True, eq=False, repr=False)
class BitmapMask(Mask):
    """A mask as verdicts and bits of tiles over row and column indices; it does not depend on positions.

    marks: uint8 (..., ⌈M/128⌉, ⌈N/128⌉), as of `Mask.tiles`. bits: uint8 (P, 128, 16), those of the PARTIAL tiles in
    their order; beyond the last row or column they are 0. Leading axes broadcast to those of the weights.
    """

    marks: Tensor
    bits: Tensor

    @cached_property
    def numbers(self) -> Tensor:
        """Index into `bits` of each PARTIAL tile, in the shape of `marks`."""
        partial = self.marks == PARTIAL
        return (partial.flatten().cumsum(0) - 1).view(partial.shape)

    @property
    def by_position(self) -> bool:
        return False

    def keep(self, grid: Pairs) -> Kept:
        if isinstance(grid, Blocks):
            return self._block_verdicts(grid)
        rows, columns = _ranges(grid)
        shown = self._any_and_every(rows, columns, (1, 1))[0]
        above, left = rows.start % SIDE, columns.start % SIDE
        return shown[..., above : above + len(rows), left : left + len(columns)]

    def _block_verdicts(self, blocks: Blocks) -> Ternary:
        """Verdicts on blocks; PARTIAL where blocks and tiles do not nest."""
        rows, columns = _ranges(blocks.grid)
        sizes = blocks.rows, blocks.columns
        within = min(sizes[0], SIDE), min(sizes[1], SIDE)
        fit = all(SIDE % part == size % part == 0 for size, part in zip(sizes, within, strict=True))
        if not fit or rows.start % SIDE or columns.start % SIDE:
            return Ternary(torch.full((*self.marks.shape[:-2], *blocks.shape), PARTIAL, dtype=torch.int8))
        some, every = self._any_and_every(rows, columns, within)
        # Beyond the last row or column there is nothing: no block exists as a whole because of it, nor less than whole.
        for axis, length, size, part in zip((-2, -1), (len(rows), len(columns)), sizes, within, strict=True):
            some, every = (of.narrow(axis, 0, -(-length // part)) for of in (some, every))
            some = _joined(some, axis, size // part, False).any(axis)
            every = _joined(every, axis, size // part, True).all(axis)
        return Ternary.between(every, some)

    def _any_and_every(self, rows: range, columns: range, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Whether any pair, and whether every pair, exists in each part of `size` rows and columns of the tiles.

        Bits beyond the last row or column do not exist: a part that reaches there does not exist as a whole.
        """
        down, across = _tiles(rows), _tiles(columns)
        verdicts, numbers = (of[..., down, across] for of in (self.marks, self.numbers))
        parts = SIDE // size[0], SIDE // size[1]
        some, every = (
            of[..., None, None].repeat(*[1] * verdicts.ndim, *parts) for of in (verdicts != EMPTY, verdicts == FULL)
        )
        partial = (verdicts == PARTIAL).nonzero()
        for few in partial.split(AT_ONCE):
            at = tuple(few.T)
            bits = torch.from_numpy(np.unpackbits(self.bits[numbers[at]].numpy(), axis=-1)).bool()
            bits = bits.view(-1, parts[0], size[0], parts[1], size[1])
            some[at], every[at] = bits.any(-1).any(2), bits.all(-1).all(2)
        return tuple(of.transpose(-3, -2).flatten(-4, -3).flatten(-2) for of in (some, every))  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"tiles(<{tuple(self.marks.shape)} of {SIDE} × {SIDE}>)"


def tiled(mask: Mask, grid: Grid) -> BitmapMask:
    """Convert any mask on a grid to a `BitmapMask`.

    Raises:
        AtlasError: the bits of its mixed tiles would take more than MOST_BITS.
    """
    blocks = Blocks.from_grid(grid, SIDE)
    verdicts = mask.verdicts(blocks)
    count = int((verdicts == PARTIAL).sum())
    if count * SIDE * SIDE // 8 > MOST_BITS:
        raise AtlasError(
            f"the mask {mask!r} is none that an atlas stores as a formula, and has {count:,} mixed tiles of {SIDE} × "
            f"{SIDE}, {count * SIDE * SIDE // 8 / 1e6:,.0f} MB of bits; at most {MOST_BITS / 1e6:,.0f} MB are stored: "
            "express it by masks such as causal(), window() and documents(), or record fewer sequences at a time"
        )
    bits = torch.zeros(count, SIDE, SIDE, dtype=torch.bool)
    leading = verdicts.shape[:-2]
    order = (verdicts == PARTIAL).cpu()
    numbers = (order.flatten().cumsum(0) - 1).view(order.shape)
    for row, column in order.reshape(-1, *verdicts.shape[-2:]).any(0).nonzero().tolist():
        tile = blocks.tile(row, column)
        kept = mask.evaluate(tile)
        height, width = tile.shape
        mixed = order[..., row, column]
        bits[numbers[..., row, column][mixed], :height, :width] = kept.expand(*leading, height, width).cpu()[mixed]
    packed = np.packbits(bits.numpy(), axis=-1) if count else np.zeros((0, SIDE, SIDE // 8), dtype=np.uint8)
    return BitmapMask(verdicts.to(torch.uint8).cpu().contiguous(), torch.from_numpy(packed))


def _joined(parts: Tensor, axis: int, count: int, filling: bool) -> Tensor:
    """Group the entries along an axis by `count`, padding the last group with `filling`."""
    short = -parts.shape[axis] % count
    parts = pad(parts, (0, short) if axis == -1 else (0, 0, 0, short), value=filling)
    return parts.unflatten(axis, (-1, count))


def _ranges(grid: Grid) -> tuple[range, range]:
    queries, keys = grid.query_positions.shape[-1], grid.key_positions.shape[-1]
    return range(queries)[grid.rows], range(keys)[grid.columns]


def _tiles(stretch: range) -> slice:
    return slice(stretch.start // SIDE, -(-stretch.stop // SIDE))


MASKS: dict[str, type[Mask]] = {
    "and": And,
    "or": Or,
    "not": Not,
    "causal": Causal,
    "window": Window,
    "dilated": Dilated,
    "strided": Strided,
    "fixed": Fixed,
    "prefix": Prefix,
    "prefix_per_batch": PrefixPerBatch,
    "padding": Padding,
    "documents": Documents,
    "cross_documents": CrossDocuments,
    "global_tokens": GlobalTokens,
    "random_blocks": RandomBlocks,
    "block_layout": BlockLayout,
    "where": TensorMask,
    "tiles": BitmapMask,
}
BIASES: dict[str, type[Bias]] = {
    "sum": Sum,
    "alibi": Alibi,
    "clipped": Clipped,
    "relative": Bucketed,
    "gaussian": Gaussian,
    "tensor": TensorBias,
}
MASK_JSON = DataclassJSON(MASKS, tag="is", subject="the atlas", error=AtlasError)
BIAS_JSON = DataclassJSON(BIASES, tag="is", subject="the atlas", error=AtlasError)
_BY_ROWS = TensorMask | Padding | Prefix | PrefixPerBatch | BitmapMask | TensorBias | Gaussian
MAX_STORED_PAIRS = 2**12
"""The most numbers of a bool tensor over pairs that is stored as it is."""
MOST_NUMBERS = 2**26
"""The most bytes that a bias over single pairs may take."""
MOST_DRAWN = 2**22
"""The most random blocks that are drawn again for a file."""

Store = Callable[[Tensor], str]


def written(value: Mask | Bias, grid: Grid, store: Store) -> dict[str, Any]:
    """A mask or a bias on the pairs of a grid, as JSON; `store` stores each of its tensors and returns its name.

    Raises:
        AtlasError: a bias that is a function, a class of one's own, or more numbers than an atlas takes.
    """
    form = MASK_JSON if isinstance(value, Mask) else BIAS_JSON
    return form.encode(value, store, lambda part: _storable(part, grid))


def _storable(value: Mask | Bias, grid: Grid) -> Mask | Bias:
    """A mask or bias, or an equal one that an atlas can store on the pairs of this grid.

    Raises:
        AtlasError: there is none.
    """
    if isinstance(value, Mask):
        return tiled(value, grid) if type(value) not in MASKS.values() or _is_large(value) else value
    if type(value) not in BIASES.values():
        what = "a function" if isinstance(value, ScoreModBias) else f"a {type(value).__name__}"
        raise AtlasError(
            f"the bias {value!r} is {what}, which an atlas cannot hold: give the attention its values, by "
            "biases.tensor(...), or a bias of distances such as biases.alibi or biases.relative"
        )
    if isinstance(value, TensorBias) and isinstance(value := by_distance(value, grid), TensorBias):
        _check_size(value)
    return value


def by_rows(value: Mask | Bias | None) -> bool:
    """Whether a mask or a bias asks for no position of a query: only for its row, or for nothing but keys."""
    match value:
        case And() | Or() | Sum():
            return by_rows(value.left) and by_rows(value.right)
        case Not():
            return by_rows(value.mask)
        case _:
            return value is None or isinstance(value, _BY_ROWS)


def by_distance(bias: TensorBias, grid: Grid) -> TensorBias | Clipped:
    """A bias whose numbers are alike along diagonals, as T5's, as one number for each of them; others as they are."""
    pairs, (queries, keys) = bias.pairs, grid.shape
    leading = pairs.shape[:-3]
    positions = grid.query_positions, grid.key_positions
    if (
        tuple(pairs.shape[-2:]) != (queries, keys)
        or min(queries, keys) < 2
        or leading.numel() != 1
        or not all(of.ndim == 1 and bool((of.diff() == 1).all()) for of in positions)
        or not torch.equal(pairs[..., 1:, 1:], pairs[..., :-1, :-1])
    ):
        return bias
    pairs = pairs.reshape(-1, queries, keys)
    lowest = int(positions[1][0] - positions[0][-1])
    table = torch.cat([pairs[:, 1:, 0].flip(-1), pairs[:, 0]], -1)
    return Clipped(table, -lowest, lowest + queries + keys - 2)


def _is_large(mask: Mask) -> bool:
    """Whether a mask has a number for each of many pairs."""
    return isinstance(mask, TensorMask) and min(mask.pairs.shape[-2:]) > 1 and mask.pairs.numel() > MAX_STORED_PAIRS


def _check_size(bias: TensorBias) -> None:
    size = bias.pairs.numel() * bias.pairs.element_size()
    if size > MOST_NUMBERS:
        raise AtlasError(
            f"the bias {bias!r} takes {size / 1e6:,.0f} MB, more than the {MOST_NUMBERS / 1e6:,.0f} MB of numbers for "
            "single pairs that an atlas holds: say it by distances, as biases.relative or biases.clipped, say which "
            "pairs exist by a mask, or record fewer sequences at a time"
        )


def read_mask(tree: Any, arrays: Mapping[str, Tensor]) -> Mask:
    """The mask of which `written` returned the JSON.

    Raises:
        AtlasError: it is none.
    """
    return _read(tree, MASK_JSON, arrays)


def read_bias(tree: Any, arrays: Mapping[str, Tensor]) -> Bias:
    """The bias of which `written` returned the JSON.

    Raises:
        AtlasError: it is none.
    """
    return _read(tree, BIAS_JSON, arrays)


def _read(tree: Any, form: DataclassJSON, arrays: Mapping[str, Tensor]) -> Any:
    value = form.decode(tree, arrays, _check)
    if not isinstance(value, Mask | Bias):
        raise AtlasError(f"a mask or bias in the atlas is {str(tree)[:80]!r}; it needs to be an object with a name")
    return value


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_storable(value: Any) -> bool:
    """Whether a field of a mask or a bias can have this value."""
    if isinstance(value, tuple):
        return all(_is_whole(item) for item in value)
    return value is None or isinstance(value, bool | Tensor | Mask | Bias) or _is_whole(value)


_TENSORS = {
    "padding": "lengths",
    "prefix_per_batch": "lengths",
    "documents": "ids",
    "cross_documents": "query_ids",
    "where": "pairs",
    "block_layout": "blocks",
    "tiles": "marks",
    "alibi": "slopes",
    "clipped": "table",
    "relative": "table",
    "gaussian": "center",
    "tensor": "pairs",
}
_SECOND_TENSORS = {"cross_documents": "key_ids", "tiles": "bits", "gaussian": "sigma"}
_POSITIVE = {"stride", "block", "step", "number"}
_PARTS = {"left": (Mask, Bias), "right": (Mask, Bias), "mask": (Mask,)}


def _check(name: str, values: Mapping[str, Any]) -> None:
    """Check the fields of a mask or a bias from a file as `regard.masks` and `regard.biases` check their arguments."""

    def need(condition: bool, what: str) -> None:
        if not condition:
            raise AtlasError(f"{name!r} in the atlas needs {what}; it has {str(values)[:200]}")

    need(all(_is_storable(value) for value in values.values()), "whole numbers, arrays or masks")
    for part, kinds in _PARTS.items():
        if part in values:
            need(isinstance(values[part], kinds), f"a mask or bias as {part!r}")
    held = {part for part, value in values.items() if isinstance(value, Tensor)}
    expected = {_TENSORS[name]} if name in _TENSORS else set()
    expected |= {_SECOND_TENSORS[name]} if name in _SECOND_TENSORS else set()
    need(held == expected, f"arrays as {sorted(expected)} and nowhere else")
    for part in _POSITIVE & values.keys():
        need(_is_whole(values[part]) and values[part] >= 1, f"{part!r} of at least 1")
    if name == "random_blocks":
        need(all(_is_whole(values[part]) for part in ("length", "seed")), "whole numbers")
        need(values["heads"] is None or (_is_whole(values["heads"]) and values["heads"] > 0), "heads of at least 1")
        drawn = (abs(values["length"]) // values["block"] + 1) ** 2 * (values["heads"] or 1)
        need(values["length"] >= 1 and drawn <= MOST_DRAWN, f"at most {MOST_DRAWN:,} blocks")
    if name == "tiles":
        _check_tiles(values, need)
    if name in ("where", "block_layout"):
        need(values[_TENSORS[name]].dtype == torch.bool, "booleans")
    if name in BIASES and name != "sum":
        need(all(values[part].is_floating_point() for part in held), "floating-point numbers")


def _check_tiles(values: Mapping[str, Any], need: Callable[[bool, str], None]) -> None:
    verdicts, bits = values["marks"], values["bits"]
    need(verdicts.dtype == bits.dtype == torch.uint8 and verdicts.ndim >= 2, "bytes")
    partial = int((verdicts == 1).sum())
    need(tuple(bits.shape) == (partial, 128, 16), f"the bits of {partial} tiles")
