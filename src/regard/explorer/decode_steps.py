"""Decode steps of a module merged into one attention map: steps on a cache, or over one source."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..biases import Bias, RelativeBias
from ..biases.base import Sum, TensorBias
from ..biases.gaussian import Gaussian
from ..masks import Mask
from ..masks.base import And, Not, Or
from ..masks.causal import Causal
from ..masks.padding import Padding
from ..masks.prefix import Prefix, PrefixPerBatch
from ..masks.tensor_mask import TensorMask
from ..masks.window import Window
from ..utils.pytree import tree_flatten
from .atlas.captured_call import CapturedCall, conjunction

_BY_KEY = Padding | Prefix | PrefixPerBatch


class _NoCommonRule(Exception):
    """Raised where no single mask or bias describes two calls."""


def merge_rules(before: CapturedCall, call: CapturedCall, rows: tuple[int, int]) -> tuple[Any, Any]:
    """Concatenate mask and bias of two calls along rows; (False, False) if no single rule covers both."""
    try:
        return _merged_rule(before.mask, call.mask, rows), _merged_rule(before.bias, call.bias, rows)
    except _NoCommonRule:
        return False, False


def _merged_rule(old: Any, new: Any, rows: tuple[int, int]) -> Any:
    if old is new:
        if _is_by_key(old):
            return old
    elif type(old) is not type(new):
        raise _NoCommonRule
    match old:
        case And() | Or() | Not() | Sum():
            parts = {
                field.name: _merged_rule(getattr(old, field.name), getattr(new, field.name), rows)
                for field in fields(old)
            }
            return replace(old, **parts)
        case TensorMask() | TensorBias():
            return type(old)(_rows(old.pairs, new.pairs, rows, -2))
        case Gaussian():
            return Gaussian(*(_rows(getattr(old, of), getattr(new, of), rows, -1) for of in ("center", "sigma")))
        case Padding() | PrefixPerBatch() if torch.equal(old.lengths, new.lengths):
            return old
        case Prefix() if old == new:
            return old
        case _:
            raise _NoCommonRule


def _is_by_key(value: Mask | Bias | None) -> bool:
    return value is None or isinstance(value, _BY_KEY)


def _rows(old: Tensor, new: Tensor, rows: tuple[int, int], axis: int) -> Tensor:
    """Concatenate two tensors along the row axis; equal entries that broadcast are stored once."""
    if not old.ndim and not new.ndim and bool(old == new):
        return old
    around = [(of.shape[:axis], of.shape[of.ndim + axis + 1 :]) for of in (old, new)]
    if old.ndim != new.ndim or around[0] != around[1]:
        raise _NoCommonRule
    if old.shape[axis] == new.shape[axis] == 1 and torch.equal(old, new):
        return old
    sizes = [list(of.shape) for of in (old, new)]
    for size, count in zip(sizes, rows, strict=True):
        size[axis] = count
    return torch.cat([old.expand(sizes[0]), new.expand(sizes[1])], axis)


EVERYTHING = Window(None, None)


@dataclass(slots=True)
class ForwardPasses:
    """Distinguishes decode steps of one forward pass from those of another over the same source, by the order of calls.

    A new pass begins where self-attention to nothing but its own queries, without a cache, is called once more. Within
    one, steps are calls of cross-attention with self-attention between them, with a cache, or within one call of the
    whole model.
    """

    number: int = 0
    ended: int = 0
    selves: int = 0
    started: set[str] = field(default_factory=set)
    last: dict[str, tuple[int, int, int]] = field(default_factory=dict)

    def continues(self, call: CapturedCall, *, with_cache: bool) -> bool:
        """Register a call, and return whether it may continue the pass of its module's last call."""
        if call.kind == "self":
            self.selves += 1
            if call.key.shape[2] <= call.query.shape[2]:
                if call.name in self.started:
                    self.number += 1
                    self.started.clear()
                self.started.add(call.name)
            return True
        before = self.last.get(call.name)
        self.last[call.name] = now = (self.number, self.selves, self.ended)
        if before is None or before[0] != now[0]:
            return False
        return with_cache or before[1] < now[1] or before[2] == now[2]


def merge_steps(before: CapturedCall, call: CapturedCall) -> CapturedCall | None:
    """Merge two calls of a module if they are rows of one map; None if they are not.

    They are where the keys of the next begin with those of the one before, and are as many more as there are new
    queries (a cache), or as many, for one query more (cross-attention, step by step); and where one mask and one bias
    say which pairs exist.
    """
    new, old = call.key.shape[2] - before.key.shape[2], before.key.shape[2]
    grows = new == call.query.shape[2] and call.kind == "self"
    is_step = new == 0 and call.kind == "cross" and call.query.shape[2] == 1
    if not (grows or is_step) or not _equal_except_rows(before, call):
        return None
    keys = call.positions[1][..., :old]
    if not torch.equal(call.key[:, :, :old], before.key) or not torch.equal(keys, before.positions[1]):
        return None
    rows = before.query.shape[2], call.query.shape[2]
    mask, bias = _of_cache(before, call) if grows else merge_rules(before, call, rows)
    if mask is False or bias is False:
        return None
    return replace(
        before,
        query=torch.cat([before.query, call.query], 2),
        key=call.key,
        lse=torch.cat([before.lse, call.lse], 2),
        mask=mask,
        bias=bias,
        positions=(torch.cat([before.positions[0], call.positions[0]], -1), call.positions[1]),
        errors=None if before.errors is None or call.errors is None else torch.maximum(before.errors, call.errors),
        steps=before.steps + call.steps,
        norms=call.norms,
    )


def _equal_except_rows(before: CapturedCall, call: CapturedCall) -> bool:
    """Whether two calls are equal in everything but their rows, keys and masks."""
    return (
        (before.leading, before.has_heads, before.kind, before.scale, before.softcap, before.normalizer)
        == (call.leading, call.has_heads, call.kind, call.scale, call.softcap, call.normalizer)
        and (before.query.shape[-1], before.key.shape[:2]) == (call.query.shape[-1], call.key.shape[:2])
        and before.key.dtype == call.key.dtype
        and (before.errors is None) == (call.errors is None)
        and len(before.positions[0]) == len(call.positions[0])
        and _same(before.weight, call.weight)
        and _same(before.sinks, call.sinks)
    )


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))


def _of_cache(before: CapturedCall, call: CapturedCall) -> tuple[Any, Any]:
    """Mask and bias of two steps on a growing cache; False if no single rule covers both.

    Each row sees no key beyond its own: `causal()` says so of all of them, where positions grow with the keys.
    """
    if not bool((call.positions[1].diff() > 0).all()):
        return False, False
    parts = [_without_causal(of) for of in (before, call)]
    if any(of is None for of in parts):
        return False, False
    rest = _one_rule(*parts)  # type: ignore[arg-type]
    bias = _bias_of_cache(before, call)
    return (False, False) if rest is None or bias is False else (reduce(and_, rest, Causal()), bias)


def _without_causal(call: CapturedCall) -> list[Mask] | None:
    """The conjunction of a mask other than causal(); None if a row may attend to a later key."""
    parts = conjunction(call.mask)
    if call.query.shape[2] > 1 and not any(isinstance(part, Causal) for part in parts):
        return None
    own = call.positions[1][..., -call.query.shape[2] :]
    if not torch.equal(own.expand_as(call.positions[0]) if len(own) == 1 else own, call.positions[0]):
        return None
    return [part for part in parts if not isinstance(part, Causal) and part != EVERYTHING]


def _one_rule(before: list[Mask], call: list[Mask]) -> list[Mask] | None:
    """The later of two lists of masks, if they agree pairwise on the keys that both cover."""
    if len(before) != len(call):
        return None
    return call if all(_agree(old, new) for old, new in zip(before, call, strict=True)) else None


def _agree(old: Mask, new: Mask) -> bool:
    if type(old) is not type(new):
        return False
    match old, new:
        case TensorMask(pairs=left), TensorMask(pairs=right):
            rows = left.shape[-2] == right.shape[-2] == 1 and left.shape[:-1] == right.shape[:-1]
            return rows and torch.equal(left, right[..., : left.shape[-1]])
        case (Padding(lengths=left), Padding(lengths=right)) | (
            PrefixPerBatch(lengths=left),
            PrefixPerBatch(lengths=right),
        ):
            return torch.equal(left, right)
        case Prefix(), Prefix():
            return old == new
        case _:
            return not tree_flatten(new)[0] and old == new


def _bias_of_cache(before: CapturedCall, call: CapturedCall) -> Any:
    """The bias of all rows: one function of distance, or concatenated tensors; False if it is neither."""
    old, new = before.bias, call.bias
    if old is new and not isinstance(new, TensorBias):
        return new
    if isinstance(old, TensorBias) and isinstance(new, TensorBias):
        # Of the keys that came later no row before has a pair, so that any number will do.
        by_key = all(b.pairs.shape[-1:] == of.key.shape[2:3] for b, of in ((old, before), (new, call)))
        more = call.key.shape[2] - before.key.shape[2] if by_key else 0
        earlier = TensorBias(pad(old.pairs, (0, more)))
        rows = before.query.shape[2], call.query.shape[2]
        return merge_rules(replace(before, mask=None, bias=earlier), replace(call, mask=None), rows)[1]
    return new if _same_bias(old, new) else False


def _same_bias(left: Bias | None, right: Bias | None) -> bool:
    """Whether two biases are equal functions of distance."""
    if not isinstance(left, RelativeBias) or type(left) is not type(right):
        return False
    ours, theirs = tree_flatten(left), tree_flatten(right)
    return ours[1] == theirs[1] and all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
