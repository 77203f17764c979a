"""What is kept of a call of attention while a model runs.

Which module of a model a call of attention comes from, and whether it looks at the module's own input.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..biases import Bias
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, DotPairs, PairForm
from ..lenses.base import WeightsLayout
from ..masks import Mask
from ..utils.pytree import tree_flatten, tree_unflatten
from .atlas.records import looks_back


@dataclass(eq=False)
class Call:
    """One call, or several that are rows of one: all axes before the heads are one, the sequences.

    query (B, H, M, ·) and key (B, Hk, N, ·) as they are to be kept, lse (B, H, M); errors: what rounding did to query
    and key, (4, H) as `_errors` has it, None where they are as they were;
    leading: the axes (*batch, heads), or (*batch,) where there are no heads, that masks and biases broadcast to;
    positions (B or 1, M) and (B or 1, N); guessed: whether the kind is.
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
    guessed: bool
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
        tensors, form = tree_flatten(value)
        return tree_unflatten(form, [self._copy(tensor) for tensor in tensors]) if tensors else value

    def _copy(self, tensor: Tensor) -> Tensor:
        version = -1 if tensor.is_inference() else tensor._version
        kept = self._known.get((id(tensor), version))
        if kept is None:  # the tensor is kept too: its id is its own for as long as it is alive
            kept = self._known[id(tensor), version] = tensor, tensor.detach().cpu().clone()
        return kept[1]


def kept(
    problem: Problem, lse: Tensor, *, name: str, number: int, kind: tuple[str, bool], snapshots: Snapshots, half: bool
) -> Call:
    """What is kept of a problem: its own copies, on the CPU; q and k in half precision if `half` and if they fit."""
    layout = WeightsLayout.from_problem(problem)
    heads = problem.pairs.key.shape[-3] if problem.heads else 1
    query = _four(problem.pairs.query, problem, layout.heads)
    key = _four(problem.pairs.key, problem, heads)
    dtype = torch.float16 if half and _fit(query, key) else query.dtype
    queries, keys = layout.positions(problem)
    mine, theirs = _copied(query, dtype), _copied(key, dtype)
    weight = problem.pairs.weight if isinstance(problem.pairs, AdditivePairs) else None
    return Call(
        name=name,
        number=number,
        kind=kind[0],
        query=mine,
        key=theirs,
        lse=_copied(lse.reshape(layout.batch, layout.heads, -1), torch.promote_types(lse.dtype, torch.float32)),
        scale=problem.pairs.scale if isinstance(problem.pairs, DotPairs) else 1.0,
        weight=None if weight is None else _copied(weight, weight.dtype),
        softcap=problem.softcap,
        sinks=None if problem.sinks is None else _copied(problem.sinks, torch.float32),
        mask=snapshots.of(problem.mask),
        bias=snapshots.of(problem.bias),
        leading=tuple(layout.leading),
        has_heads=problem.heads,
        positions=(queries.detach().cpu().clone(), keys.detach().cpu().clone()),
        errors=None if dtype == query.dtype else _errors(query, mine, key, theirs),
        guessed=kind[1],
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


ELSEWHERE = ("memory", "key_value_states", "encoder_hidden_states")
"""What attention modules call another sequence that they look at: ours, and those of transformers."""
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""What they call the keys of the steps before."""
_CALLING = nn.modules.module.__file__


@dataclass(frozen=True, slots=True)
class Work:
    """A module at work: its name, the local variables of its innermost method, and what its outermost one was given.

    with_cache: whether one of its methods has a cache.
    """

    name: str
    variables: Mapping[str, Any]
    arguments: tuple[Any, ...] = ()
    with_cache: bool = False


NOBODY = Work("", {})


def caller(names: Mapping[nn.Module, str]) -> Work:
    """The innermost module that is at work, as far as its call goes.

    It is read off Python's stack: a module's hooks tell of `forward` alone, and a decoder's steps, or what is looked at
    through lenses, come from other methods.
    """
    found: nn.Module | None = None
    methods: list[FrameType] = []
    for frame, module, below in _methods(sys._getframe(1)):
        if found is None and module in names:
            found = module
        if found is None:
            continue
        if module is not found:
            break
        if frame.f_code.co_filename == _CALLING:
            methods = methods or [below]  # a method may call its module something else than self
            break
        methods.append(frame)
    if found is None:
        return NOBODY
    return Work(
        names[found] or type(found).__name__,
        {**methods[0].f_locals, "self": found},
        _arguments(methods[-1]),
        any(of.f_locals.get(name) is not None for of in methods for name in CACHES),
    )


def variables_of(kind: type[nn.Module]) -> Mapping[str, Any]:
    """The local variables of the innermost method at work of a module of some class; none where there is none."""
    for frame, module, _ in _methods(sys._getframe(1)):
        if isinstance(module, kind) and frame.f_code.co_filename != _CALLING:
            return frame.f_locals
    return {}


def kind_of(problem: Problem, work: Work) -> tuple[str, bool]:
    """Whether attention is "cross", to another sequence, or "self"; and whether that is guessed.

    A module's method says so by the names of its arguments. Where it does not, more queries than keys are "cross", and
    so are fewer without a cache, but for a single one and for rows that look back: these may go on from keys that were
    kept. All else is "self", a guess where the method was given two sequences.
    """
    variables = work.variables
    if any(variables.get(name) is not None for name in ELSEWHERE):
        return "cross", False
    module = variables.get("self")
    if isinstance(module, nn.MultiheadAttention):
        return ("self" if variables.get("key") is variables.get("query") else "cross"), False
    if variables.get("is_cross_attention") or getattr(module, "is_cross_attention", False):
        return "cross", False
    if problem.queries > problem.keys:
        return "cross", False
    if work.with_cache or any(name in variables for name in ELSEWHERE):
        return "self", False
    if problem.queries < problem.keys and not looks_back(problem):
        return "cross", False
    return "self", _are_two(work.arguments, problem)


def _methods(frame: FrameType) -> Iterator[tuple[FrameType, nn.Module, FrameType]]:
    """The methods of modules that are at work, the innermost first, their modules, and what each of them called."""
    at: FrameType | None = frame
    below = frame
    while at is not None:
        code = at.f_code
        if "self" in code.co_varnames or "self" in code.co_freevars:
            module = at.f_locals.get("self")
            if isinstance(module, nn.Module):
                yield at, module, below
        below, at = at, at.f_back


def _arguments(frame: FrameType) -> tuple[Any, ...]:
    """What a method was given."""
    names, more, keywords, values = inspect.getargvalues(frame)
    given = [values[name] for name in names if name in values]
    if more is not None:
        given += values.get(more, ())
    if keywords is not None:
        given += values.get(keywords, {}).values()
    return tuple(given)


def _are_two(arguments: tuple[Any, ...], problem: Problem) -> bool:
    """Whether there are two different sequences among some arguments: (..., M or N, dim), with axes alike."""
    lengths = problem.queries, problem.keys
    given = [of for of in arguments if isinstance(of, Tensor) and of.is_floating_point() and of.ndim > 1]
    given = [of for of in given if of.ndim == given[0].ndim and of.shape[-2] in lengths]
    return any(of is not given[0] and not _equal(of, given[0]) for of in given[1:])


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.device == right.device and torch.equal(left, right)
