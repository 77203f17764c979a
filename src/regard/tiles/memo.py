"""What is remembered of a mask: values that follow from it, and small calls; of a bias small calls.

It lives as long as the mask, or an equal one that reads the same, and holds until something has changed that the mask
reads: a tensor, or what a function of the user's reads. Where that cannot be known, it holds while a kernel is chosen.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..biases import Bias
from ..biases.base import bias_parts
from ..biases.distance_tables import CallBias
from ..core.finite import waits
from ..core.problem import Problem
from ..core.state import State, is_constant, state_of_tensors
from ..core.state_search import state_of
from ..core.tensor_memo import memoize_by_tensors
from ..errors import ModifiedError
from ..masks import Mask
from ..utils.pytree import tree_tensors

MAX_MASKS = 128
"""Number of masks that are kept, with what is remembered of them, after they are gone elsewhere."""
MAX_KEPT_BYTES = 2**16
"""The most bytes of tensors that functions of such a mask read; one with tensors of its own is not kept."""
MAX_SIZES = 64
"""Number of sizes memoized for each mask before all are cleared: a growing cache has another with each token."""

MOST_WRITTEN = 16
"""The most calls with one mask that write its pairs: making a memo takes about what it would have saved by then."""

Found = TypeVar("Found")


class Memo:
    """The tables of what is remembered of a mask, for one state of what it reads.

    values: what follows from its pairs, by what it is, sizes and positions. calls: small calls.
    number: of the memo, which no other has; state_number: the same for its present state.
    """

    __slots__ = ("__weakref__", "calls", "number", "state", "state_number", "values")

    def __init__(self, state: State | None) -> None:
        self.number = next(_numbers)
        self.renew(state)

    def renew(self, state: State | None) -> None:
        """Forget what holds for another state; new tables, as a call may still fill the old ones."""
        self.state, self.state_number = state, next(_numbers)
        self.values: dict[tuple, Any] = {}
        self.calls: dict[tuple, Any] = {}


_numbers = itertools.count()
_ANCHOR = "_memo"  # the attribute of a mask that holds its memo: a cycle from one to the other is collected with both
_SEEN = "_memo_wanted"  # that of a bias that was given before
_WRITTEN = "_memo_written"  # that of a mask of which calls have written the pairs: how many
_memos: weakref.WeakKeyDictionary[Mask, weakref.ref[Memo]] = weakref.WeakKeyDictionary()
_recent_masks: deque[Mask] = deque(maxlen=MAX_MASKS)
_without_mask = Memo(State())


def memo_of(mask: Mask | None) -> Memo:
    """The memo of a mask, for the state that it is in now; `Memo.state` is None where that cannot be known."""
    if mask is None:
        return _without_mask
    memo: Memo | None = vars(mask).get(_ANCHOR)
    if memo is None:
        memo = vars(mask)[_ANCHOR] = _new_memo(mask)
    elif memo.state is not None and not memo.state.is_current():
        memo.renew(state_of(mask))
    return memo


def comes_again(mask: Mask) -> bool:
    """Whether a mask was asked about in so many calls before that it is worth a memo."""
    known = vars(mask)
    written = known.get(_WRITTEN, 0)
    if written < MOST_WRITTEN:
        known[_WRITTEN] = written + 1
    return written >= MOST_WRITTEN


def _new_memo(mask: Mask) -> Memo:
    """The memo of an equal mask that reads the same, or a new one."""
    state = state_of_tensors(mask)
    own_tensors = state is not None and bool(state.tensors)
    if state is None:
        state, own_tensors = state_of(mask), bool(tree_tensors(mask))
    if type(mask).__eq__ is object.__eq__:  # no other mask is equal
        return Memo(state)
    try:
        known = _memos.get(mask)
    except TypeError:  # a field without a hash: no other mask is known to be equal
        return Memo(state)
    memo = None if known is None else known()
    if memo is not None and state is not None and memo.state is not None and memo.state.equals(state):
        return memo
    memo = Memo(state)
    _memos.pop(mask, None)  # the key of an equal mask would stay
    _memos[mask] = weakref.ref(memo)
    if state is not None and not own_tensors and state.tensor_bytes() <= MAX_KEPT_BYTES:
        _recent_masks.append(mask)
    return memo


def memo_of_bias(bias: Bias | Tensor) -> Memo | None:
    """The memo of a bias that is given again, for the numbers that it reads now, of which none has a gradient.

    None of a bias that content decides, or of which it cannot be known whether it has changed. Nor of one that comes
    for the first time: most that are made for one call never come again.
    """
    known = getattr(bias, "__dict__", None)
    if known is None or not isinstance(bias, Bias):
        return None
    memo: Memo | None = known.get(_ANCHOR)
    if memo is None:
        known[_ANCHOR] = _new_memo_of_bias(bias) if _SEEN in known else None
        known[_SEEN] = True
        return None
    if memo.state is None:
        return None
    if not memo.state.is_current():
        memo.renew(state_of(bias))
        return None
    if torch.is_grad_enabled() and any(each.tensor.requires_grad for each in memo.state.tensors):
        return None
    return memo


def _new_memo_of_bias(bias: Bias) -> Memo:
    by_content = any(type(part).bound is not Bias.bound for part in bias_parts(bias))
    return Memo(None if by_content else state_of(bias))


_in_choice: ContextVar[dict[tuple, Any] | None] = ContextVar("values that are asked for while a kernel is chosen")


def within_choice(mask: Mask | None, choose: Callable[[], Found]) -> Found:
    """The choice of a kernel, for which each one asks for the same tiles.

    Within it values of a mask are memoized, too, of which it cannot be known when they change.
    """
    if mask is None or memo_of(mask).state is not None:
        return choose()
    token = _in_choice.set({})
    try:
        return choose()
    finally:
        _in_choice.reset(token)


class ForwardState:
    """The state of what mask and bias of a problem read in a forward pass, beside the tensors that autograd saves."""

    __slots__ = ("_states",)

    def __init__(self, problem: Problem) -> None:
        mask = problem.mask
        self._states: list[tuple[Mask | Bias, State]] = []
        if mask is not None and not is_constant(mask) and (state := memo_of(mask).state) is not None:
            self._states.append((mask, state))
        # Of the library's biases autograd saves all tensors; those made in the call nobody else has.
        for bias in () if problem.bias is None else bias_parts(problem.bias):
            made = isinstance(bias, CallBias)
            if not made and state_of_tensors(bias) is None and (state := state_of(bias)) is not None:
                self._states.append((bias, state))

    def require_unchanged(self) -> None:
        """Check before a backward pass that evaluates mask and bias again.

        Raises:
            ModifiedError: something that one of them reads has changed.
        """
        for value, state in self._states:
            if not state.is_current():
                raise modified(value)


def modified(value: Mask | Bias | None) -> ModifiedError:
    """The error of a backward pass for which something has changed that a mask or a bias reads."""
    return ModifiedError(
        "one of the variables needed for gradient computation has been modified: "
        f"{'bias' if isinstance(value, Bias) else 'mask'} {value!r} reads something that is not as it was in the "
        "forward pass. Change it after the backward pass, or let each forward pass read a copy of its own, such as "
        "limit.clone()"
    )


def remembered_state(mask: Mask) -> State | None:
    """The state of a mask when its memo was last asked for; None where there is none."""
    memo: Memo | None = vars(mask).get(_ANCHOR)
    return None if memo is None else memo.state


def memoize(
    problem: Problem, what: Hashable, compute: Callable[[], Found], when: Callable[[Found], bool] = lambda _: True
) -> Found:
    """Memoize a value that depends on the problem's mask and sizes alone; `when` decides whether it is stored.

    Where positions are tensors, it is memoized with them if to read them would wait, and otherwise not.
    """
    memo, positions = memo_of(problem.mask), (problem.query_positions, problem.key_positions)
    known, key = memo.values, (what, problem.weights_shape, problem.heads, positions)
    if memo.state is None:
        known, key = _in_choice.get(None), (memo.number, *key)
    if known is not None and any(isinstance(each, Tensor) for each in positions):
        if memo.state is None or not waits(problem.value):
            return compute()
        tensors = tuple(each for each in positions if isinstance(each, Tensor))
        others = tuple("a tensor" if isinstance(each, Tensor) else each for each in positions)
        return memoize_by_tensors(tensors, (memo.state_number, *key[:-1], others), compute, when)
    if known is None:
        return compute()
    if key in known:
        return known[key]
    found = compute()
    if when(found):
        if len(known) >= MAX_SIZES:
            known.clear()
        known[key] = found
    return found
