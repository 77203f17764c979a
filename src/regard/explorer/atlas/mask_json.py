"""Masks and biases as JSON: names from one table, plain numbers, and references to arrays; nothing else is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ...biases import Bias
from ...biases.alibi import Alibi
from ...biases.base import Sum, TensorBias
from ...biases.gaussian import Gaussian
from ...biases.relative import Bucketed, Clipped
from ...biases.score_mod import ScoreModBias
from ...core.grid import Grid
from ...errors import AtlasError
from ...masks import Mask
from ...masks.base import And, Not, Or
from ...masks.causal import Causal
from ...masks.convert.flex import BlockLayout
from ...masks.documents import Documents
from ...masks.padding import Padding
from ...masks.prefix import Prefix, PrefixPerBatch
from ...masks.sparse_patterns import Dilated, Fixed, GlobalTokens, RandomBlocks, Strided
from ...masks.tensor_mask import TensorMask
from ...masks.window import Window
from ...utils.dataclass_json import DataclassJSON
from .bitmap_mask import BitmapMask, tiled

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
FEW = 2**12
"""A bool tensor over pairs of at most so many numbers is kept as it is."""
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
    return isinstance(mask, TensorMask) and min(mask.pairs.shape[-2:]) > 1 and mask.pairs.numel() > FEW


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
    "where": "pairs",
    "block_layout": "blocks",
    "tiles": "marks",
    "alibi": "slopes",
    "clipped": "table",
    "relative": "table",
    "gaussian": "center",
    "tensor": "pairs",
}
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
    expected |= {"bits"} if name == "tiles" else {"sigma"} if name == "gaussian" else set()
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
