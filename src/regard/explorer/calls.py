"""What is kept of a call of attention while a model runs, and calls that are rows of one map."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from ..biases import Bias, RelativeBias
from ..lenses.base import Frame
from ..masks import Mask
from ..masks.base import And
from ..masks.causal import Causal
from ..masks.padding import Padding
from ..masks.prefix import Prefix, PrefixPerBatch
from ..masks.where import Where
from ..masks.window import Window
from ..pairs import AdditivePairs, DotPairs, PairForm
from ..problem import Problem
from ..structure import put_together, take_apart
from .rows import stacked

EVERYTHING = Window(None, None)


@dataclass(eq=False)
class Call:
    """One call, or several that are rows of one: all axes before the heads are one, the sequences.

    query (B, H, M, ·) and key (B, Hk, N, ·) as they are to be kept, lse (B, H, M); errors: what rounding did to query
    and key, (4, H) as `_errors` has it, None where they are as they were;
    leading: the axes (*batch, heads), or (*batch,) where there are no heads, that masks and biases broadcast to;
    positions (B or 1, M) and (B or 1, N).
    """

    name: str
    number: int
    kind: str
    query: Tensor
    key: Tensor
    lse: Tensor
    scale: float
    weight: Tensor | None
    softcap: float | None
    sinks: Tensor | None
    mask: Mask | None
    bias: Bias | None
    leading: tuple[int, ...]
    has_heads: bool
    positions: tuple[Tensor, Tensor]
    errors: Tensor | None
    steps: int = 1

    @property
    def rounding(self) -> float:
        """By how much a weight may differ from what it was, for its size: exp(2 · the most that a score differs) - 1.

        The log-sum-exp of a row differs by no more than its scores do. tanh and a softcap make differences smaller.
        """
        if self.errors is None:
            return 0.0
        query, query_error, key, key_error = self.errors.double()
        if self.weight is not None:
            most = (query_error + key_error) * self.weight.double().norm()
        else:
            most = abs(self.scale) * (query_error * key + query * key_error)
        return min(math.expm1(min(2 * float(most.max()), 100.0)), 1e30)

    @property
    def form(self) -> PairForm:
        """The pair form, in the axes that mask and bias know."""
        query = self.query.view(*self.leading, *self.query.shape[2:])
        heads = (*self.leading[:-1], self.key.shape[1]) if self.has_heads else self.leading
        key = self.key.view(*heads, *self.key.shape[2:])
        return DotPairs(query, key, self.scale) if self.weight is None else AdditivePairs(query, key, self.weight)

    def problem(self) -> Problem:
        """The call as a problem without values."""
        form = self.form
        batch = self.leading[:-1] if self.has_heads else self.leading
        placed = [
            of[0] if len(of) == 1 else of.view(*batch, of.shape[-1]) for of in self.positions
        ]  # what differs between sequences has the axes of the batch
        return Problem(
            pairs=form,
            value=form.key.new_empty(*form.key.shape[:-1], 0),
            mask=self.mask,
            bias=self.bias,
            softcap=self.softcap,
            query_positions=placed[0],
            key_positions=placed[1],
        )


class Snapshots:
    """Tensors as they are now, copied once however many calls share them."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def of(self, value: Any) -> Any:
        """A mask or a bias over copies of its tensors."""
        if value is None:
            return None
        tensors, form = take_apart(value)
        return put_together(form, [self._copy(tensor) for tensor in tensors]) if tensors else value

    def _copy(self, tensor: Tensor) -> Tensor:
        version = -1 if tensor.is_inference() else tensor._version
        kept = self._known.get((id(tensor), version))
        if kept is None:  # the tensor is kept too: its id is its own for as long as it is alive
            kept = self._known[id(tensor), version] = tensor, tensor.detach().cpu().clone()
        return kept[1]


def kept(problem: Problem, lse: Tensor, *, name: str, number: int, kind: str, snapshots: Snapshots, half: bool) -> Call:
    """What is kept of a problem: its own copies, on the CPU; q and k in half precision if `half` and if they fit."""
    frame = Frame.of(problem)
    heads = problem.pairs.key.shape[-3] if problem.heads else 1
    query = _four(problem.pairs.query, problem, frame.heads)
    key = _four(problem.pairs.key, problem, heads)
    dtype = torch.float16 if half and _fit(query, key) else query.dtype
    queries, keys = frame.positions(problem)
    mine, theirs = _copied(query, dtype), _copied(key, dtype)
    weight = problem.pairs.weight if isinstance(problem.pairs, AdditivePairs) else None
    return Call(
        name=name,
        number=number,
        kind=kind,
        query=mine,
        key=theirs,
        lse=_copied(lse.reshape(frame.batch, frame.heads, -1), torch.promote_types(lse.dtype, torch.float32)),
        scale=problem.pairs.scale if isinstance(problem.pairs, DotPairs) else 1.0,
        weight=None if weight is None else _copied(weight, weight.dtype),
        softcap=problem.softcap,
        sinks=None if problem.sinks is None else _copied(problem.sinks, torch.float32),
        mask=snapshots.of(problem.mask),
        bias=snapshots.of(problem.bias),
        leading=tuple(frame.leading),
        has_heads=problem.heads,
        positions=(queries.detach().cpu().clone(), keys.detach().cpu().clone()),
        errors=None if dtype == query.dtype else _errors(query, mine, key, theirs),
    )


def _four(tensor: Tensor, problem: Problem, heads: int) -> Tensor:
    """(*batch, heads, length, ·) as (B, heads, length, ·), where the batch may have been broadcast."""
    own = tensor.shape[-3:] if problem.heads else tensor.shape[-2:]
    tensor = tensor.expand(*problem.batch, *own)
    return tensor.reshape(problem.batch.numel(), heads, *tensor.shape[-2:])


def _copied(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of one's own, without the history."""
    return torch.empty(tensor.shape, dtype=dtype).copy_(tensor.detach())


def _errors(query: Tensor, kept_query: Tensor, key: Tensor, kept_key: Tensor) -> Tensor:
    """The largest norms of each head's vectors, and of what rounding changed in them: (4, H), queries first."""

    def of(tensor: Tensor, rounded: Tensor) -> Tensor:
        tensor, rounded = tensor.detach().float(), rounded.to(tensor.device).float()
        norms = torch.stack([torch.maximum(tensor.norm(dim=-1), rounded.norm(dim=-1)), (tensor - rounded).norm(dim=-1)])
        return norms.amax((1, -1)).cpu()  # over sequences and positions

    return torch.cat([of(query, kept_query), of(key, kept_key).repeat_interleave(query.shape[1] // key.shape[1], -1)])


def _fit(*tensors: Tensor) -> bool:
    """Whether numbers are within the reach of half precision."""
    most = torch.finfo(torch.float16).max
    return all(float(of.detach().abs().amax()) <= most if of.numel() else True for of in tensors)


def continued(before: Call, call: Call) -> Call | None:
    """Two calls of one module as one, if they are rows of one map; None if they are not.

    They are where the keys of the next begin with those of the one before, and are as many more as there are new
    queries (a cache), or as many, for one query more (cross-attention, step by step); and where one mask and one bias
    say which pairs exist.
    """
    new, old = call.key.shape[2] - before.key.shape[2], before.key.shape[2]
    grows = new == call.query.shape[2] and call.kind == "self"
    is_step = new == 0 and call.kind == "cross" and call.query.shape[2] == 1
    if not (grows or is_step) or not _alike(before, call):
        return None
    keys = call.positions[1][..., :old]
    if not torch.equal(call.key[:, :, :old], before.key) or not torch.equal(keys, before.positions[1]):
        return None
    rows = before.query.shape[2], call.query.shape[2]
    mask, bias = _of_cache(before, call) if grows else stacked(before, call, rows)
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
    )


def _alike(before: Call, call: Call) -> bool:
    """Whether two calls differ in nothing but their rows, their keys and which pairs exist."""
    return (
        (before.leading, before.has_heads, before.kind, before.scale, before.softcap)
        == (call.leading, call.has_heads, call.kind, call.scale, call.softcap)
        and (before.query.shape[-1], before.key.shape[:2]) == (call.query.shape[-1], call.key.shape[:2])
        and before.key.dtype == call.key.dtype
        and (before.errors is None) == (call.errors is None)
        and len(before.positions[0]) == len(call.positions[0])
        and _same(before.weight, call.weight)
        and _same(before.sinks, call.sinks)
    )


def _same(left: Tensor | None, right: Tensor | None) -> bool:
    return left is right or (left is not None and right is not None and torch.equal(left, right))


def _of_cache(before: Call, call: Call) -> tuple[Any, Any]:
    """Mask and bias of a sequence that grew; False where two calls do not follow one rule.

    Each row sees no key beyond its own: `causal()` says so of all of them, where positions grow with the keys.
    """
    if not bool((call.positions[1].diff() > 0).all()):
        return False, False
    parts = [_without_causal(of) for of in (before, call)]
    if any(of is None for of in parts):
        return False, False
    rest = _one_rule(*parts)  # type: ignore[arg-type]
    if rest is None or not (before.bias is call.bias or _same_bias(before.bias, call.bias)):
        return False, False
    return reduce(and_, rest, Causal()), call.bias


def _without_causal(call: Call) -> list[Mask] | None:
    """What a mask asks beside causal(); None where a row may see a later key."""
    parts = _conjuncts(call.mask)
    if call.query.shape[2] > 1 and not any(isinstance(part, Causal) for part in parts):
        return None
    own = call.positions[1][..., -call.query.shape[2] :]
    if not torch.equal(own.expand_as(call.positions[0]) if len(own) == 1 else own, call.positions[0]):
        return None
    return [part for part in parts if not isinstance(part, Causal) and part != EVERYTHING]


def _conjuncts(mask: Mask | None) -> list[Mask]:
    if mask is None:
        return []
    return [*_conjuncts(mask.left), *_conjuncts(mask.right)] if isinstance(mask, And) else [mask]


def _one_rule(before: list[Mask], call: list[Mask]) -> list[Mask] | None:
    """The later of two lists of masks, if each says the same as its neighbour of the keys that both know."""
    if len(before) != len(call):
        return None
    return call if all(_agree(old, new) for old, new in zip(before, call, strict=True)) else None


def _agree(old: Mask, new: Mask) -> bool:
    if type(old) is not type(new):
        return False
    match old, new:
        case Where(pairs=left), Where(pairs=right):
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
            return not take_apart(new)[0] and old == new


def _same_bias(left: Bias | None, right: Bias | None) -> bool:
    """Whether two biases are one rule of distances."""
    if not isinstance(left, RelativeBias) or type(left) is not type(right):
        return False
    ours, theirs = take_apart(left), take_apart(right)
    return ours[1] == theirs[1] and all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
