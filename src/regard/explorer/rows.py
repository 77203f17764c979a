"""Masks and biases of queries that came one after another, as those of all of them over the same keys."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..biases import Bias
from ..biases.base import Sum, TensorBias
from ..biases.gaussian import Gaussian
from ..masks import Mask
from ..masks.base import And, Not, Or
from ..masks.padding import Padding
from ..masks.prefix import Prefix, PrefixPerBatch
from ..masks.where import Where

if TYPE_CHECKING:
    from .calls import Call

_BY_KEY = Padding | Prefix | PrefixPerBatch


class _Differ(Exception):
    """There is no one rule for both."""


def stacked(before: Call, call: Call, rows: tuple[int, int]) -> tuple[Any, Any]:
    """Mask and bias of both calls' rows; False where there is no one rule for both."""
    try:
        return _both(before.mask, call.mask, rows), _both(before.bias, call.bias, rows)
    except _Differ:
        return False, False


def _both(old: Any, new: Any, rows: tuple[int, int]) -> Any:
    if old is new:
        if _is_by_key(old):
            return old
    elif type(old) is not type(new):
        raise _Differ
    match old:
        case And() | Or() | Not() | Sum():
            parts = {
                field.name: _both(getattr(old, field.name), getattr(new, field.name), rows) for field in fields(old)
            }
            return replace(old, **parts)
        case Where() | TensorBias():
            return type(old)(_rows(old.pairs, new.pairs, rows, -2))
        case Gaussian():
            return Gaussian(*(_rows(getattr(old, of), getattr(new, of), rows, -1) for of in ("center", "sigma")))
        case Padding() | PrefixPerBatch() if torch.equal(old.lengths, new.lengths):
            return old
        case Prefix() if old == new:
            return old
        case _:
            raise _Differ


def _is_by_key(value: Mask | Bias | None) -> bool:
    return value is None or isinstance(value, _BY_KEY)


def _rows(old: Tensor, new: Tensor, rows: tuple[int, int], axis: int) -> Tensor:
    """The numbers of both calls' rows along an axis; one for all rows where they are alike."""
    if not old.ndim and not new.ndim and bool(old == new):
        return old
    around = [(of.shape[:axis], of.shape[of.ndim + axis + 1 :]) for of in (old, new)]
    if old.ndim != new.ndim or around[0] != around[1]:
        raise _Differ
    if old.shape[axis] == new.shape[axis] == 1 and torch.equal(old, new):
        return old
    sizes = [list(of.shape) for of in (old, new)]
    for size, count in zip(sizes, rows, strict=True):
        size[axis] = count
    return torch.cat([old.expand(sizes[0]), new.expand(sizes[1])], axis)
