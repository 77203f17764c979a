"""One token of causal linear attention in one call of native code: feature map, recurrence and division by the total.

A step is a few microseconds of arithmetic: whatever else a call does takes longer. So the checks are those that tell
whether native code takes the call, and all others are left to `make_linear_problem`.
"""

from __future__ import annotations

import math
import sys
from functools import cached_property
from threading import Lock

import torch
from torch import Tensor

from .. import native
from ..backends.cpu.token_step import TokenStep, prepare_step
from ..core.torch_modes import no_mode_active
from ..errors import RegardError
from ..masks.causal import Causal
from .feature_maps import Elu, FeatureMap, Identity, UnitNorm
from .linear_arguments import LinearOptions
from .linear_state import LinearState

RECENT_SHARE = 0.25
"""The most that the recent tokens of a state may take, as a share of its sums."""

ONE_STATE = 4
"""References to the memory of one state in `_step`: the state's, two local names, and the argument of `getrefcount`."""


class StateMemory:
    """Sums (B, Hk, D · Dv), with the total after them where normalised, and the tokens since they were written.

    recent is (B, Hk, capacity, width), or None for a capacity of 0, and its first `filled` tokens are set. A token is
    φ(k), u and the factor of its decay: none, one number, or one for each feature. What is set is not written again, as
    several states may read it: each appends behind its own last token, or, where another has done so before, in a copy,
    and then both are `shared`, as the sums are the same tensor. The tokens of a state that alone reads a memory may be
    added to its sums in place.

    A state is read by several threads at once. Whoever refers to the memory, and then has had the lock, can read it as
    long as the reference lasts.
    """

    def __init__(self, sums: Tensor, recent: Tensor | None, filled: int = 0, *, shared: bool = False) -> None:
        self.sums, self.recent, self.filled, self.shared = sums, recent, filled, shared
        self.lock = Lock()

    def __getstate__(self) -> tuple[Tensor, Tensor | None, int]:
        return self.sums, self.recent, self.filled

    def __setstate__(self, content: tuple[Tensor, Tensor | None, int]) -> None:
        self.__init__(*content, shared=True)

    def append_after(self, count: int) -> StateMemory:
        """This memory where its next token follows the first `count`, else a copy of these; the token counts as set."""
        if self.filled != count or not _writable(self.recent):
            self.shared = True
            return StateMemory(self.sums, _cloned(self.recent), count + 1, shared=True)
        self.filled += 1
        return self


class DeferredState(LinearState):
    """A state whose last tokens are beside its sums: S = diag(f) S' + Σ_j φ(k_j) u_jᵀ over the tokens since S'.

    Writing a state takes longer than reading it, so this one is written once for many tokens. It is as immutable as any
    other: `sums` is computed where it is read.

    The tokens are the first `count` of the memory; step is that of the last token.
    """

    def __init__(self, memory: StateMemory, count: int, step: TokenStep) -> None:
        vars(self).update(memory=memory, count=count, step=step, normalized=step.normalize, log_scale=None)

    memory: StateMemory
    count: int
    step: TokenStep

    def readable(self) -> tuple[StateMemory, int]:
        """The memory and the number of tokens in it that belong to the state, as long as the former is referred to."""
        memory = self.memory
        with memory.lock:
            return memory, self.count

    @cached_property
    def sums(self) -> Tensor:  # type: ignore[override]  # a field of the class above
        """S, and z beside it: (B, Hk, D, Dv or Dv + 1)."""
        memory, count = self.readable()
        dim, value_dim = self.step.dim, self.step.value_dim
        matrix = memory.sums[..., : dim * value_dim].unflatten(-1, (dim, value_dim))
        total = memory.sums[..., dim * value_dim :].unsqueeze(-1)  # without columns where there is no total
        stored = torch.cat([matrix, total], -1) if self.normalized else matrix.clone()
        if memory.recent is None or not count:
            return stored
        tokens = memory.recent[:, :, :count]
        keys, written, factors = tokens.split([dim, value_dim, self.step.decay_dim], -1)
        if self.normalized:
            written = torch.cat([written, torch.ones_like(written[..., :1])], -1)
        if factors.shape[-1]:
            stored = stored * factors.prod(2).unsqueeze(-1)
            later = torch.cat([factors[:, :, 1:], torch.ones_like(factors[:, :, :1])], 2)
            keys = keys * later.flip(2).cumprod(2).flip(2)
        return stored + keys.mT @ written

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and of the memory for recent tokens."""
        memory = self.memory
        return memory.sums.nbytes + (0 if memory.recent is None else memory.recent.nbytes)

    def reorder(self, rows: Tensor) -> LinearState:
        """The state for these rows of the first axis, in this order."""
        memory, count = self.readable()
        recent = None if memory.recent is None else memory.recent[rows]
        return DeferredState(StateMemory(memory.sums[rows], recent, count), count, self.step)


def single_token(
    query: Tensor, key: Tensor, value: Tensor, options: LinearOptions
) -> tuple[Tensor, LinearState] | None:
    """The output and the state after one token, by one call of native code; None where another path has to compute it.

    They are those of `linear_attention_with_state`, which also says what is wrong with arguments that are refused here.

    Shapes: query (B, H, 1, D), key (B, Hk, 1, D), value (B, Hk, 1, Dv).
    """
    state, normalize = options.get("state"), options.get("normalize", True)
    if not isinstance(state, LinearState) or state.normalized is not normalize or state.log_scale is not None:
        return None
    feature_map, mask = _native_map(options.get("feature_map")), options.get("mask")
    if feature_map is None or not (options.get("causal") if mask is None else type(mask) is Causal):
        return None
    decay, beta = options.get("decay"), options.get("beta")
    deferred = state if type(state) is DeferredState else None
    if not _runs_natively(query, key, value, decay, beta, None if deferred is not None else state.sums):
        return None
    if deferred is None and state.sums.dtype is not torch.float32:
        return None
    step = None if deferred is None else deferred.step
    scale = options.get("scale")
    if scale is None:
        scale = query.shape[3] ** -0.5 if feature_map == "identity" and not normalize and query.shape[3] else 1.0
    if (
        step is None
        or step.feature_map != feature_map
        or step.scale != scale
        or not step.takes(query, key, value, decay, beta)
    ):
        if (normalize and beta is not None) or not -math.inf < scale < math.inf:
            return None
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        decay = None if decay is None else decay.contiguous()
        try:
            step = prepare_step(
                *(query, key, value, decay, beta),
                feature_map=feature_map,
                normalize=normalize,
                scale=scale,
                recent_share=RECENT_SHARE,
            )
        except RegardError:
            return None  # `make_linear_problem` knows the argument that is wrong
    if deferred is None or deferred.step.decay_dim != step.decay_dim:
        deferred = _deferred(state, step)
    if deferred.memory.sums.shape != step.state_shape:
        return None
    try:
        return _step(step, (query, key, value, decay, beta), deferred)
    except RegardError:
        return None  # as above


def _deferred(state: LinearState, step: TokenStep) -> DeferredState:
    """A state without recent tokens, as the step reads and continues it."""
    if state.normalized:
        sums = torch.cat([state.sums[..., :-1].flatten(2), state.sums[..., -1]], -1)
    else:
        sums = state.sums.flatten(2).contiguous()
    capacity = step.recent_capacity
    recent = sums.new_empty(*sums.shape[:2], capacity, step.recent_width) if capacity else None
    return DeferredState(StateMemory(sums, recent, shared=not state.normalized), 0, step)


def _step(
    step: TokenStep, tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], state: DeferredState
) -> tuple[Tensor, LinearState]:
    """`single_token` of tensors that the step takes, after a state of its shape.

    The tokens of a full memory are added to its sums before, in place where no other state reads them: new memory would
    have to be mapped by the system, which takes ten times as long as writing into it.
    """
    memory = state.memory
    with memory.lock:
        count = state.count
        full = count == step.recent_capacity
        added = memory if full else memory.append_after(count)
        in_place = full and not memory.shared and _writable(memory.recent) and _writable(memory.sums)
        if in_place and step.in_one_call() and sys.getrefcount(state.memory) == ONE_STATE:
            return _fold(step, tensors, state, memory)
    if not full:
        output = step.run(*tensors, memory.sums, added.recent, count)
        return output, DeferredState(added, count + 1, step)
    recent = _cloned(memory.recent)
    written = StateMemory(torch.empty_like(memory.sums), recent, 0 if recent is None else 1)
    output = step.run(*tensors, memory.sums, recent, count, written.sums)
    return output, DeferredState(written, written.filled, step)


def _fold(
    step: TokenStep,
    tensors: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    state: DeferredState,
    memory: StateMemory,
) -> tuple[Tensor, LinearState]:
    """The step after the tokens of the memory were added to its sums in place; the state then has none of its own."""
    try:
        output = step.run(*tensors, memory.sums, memory.recent, state.count, memory.sums)
    except MemoryError:
        raise  # nothing was written
    except RegardError:
        vars(state)["count"] = memory.filled = 0
        raise
    vars(state)["count"], memory.filled = 0, 1
    return output, DeferredState(memory, 1, step)


def _writable(tensor: Tensor | None) -> bool:
    """Whether there is a tensor, and the mode of torch allows that it is written."""
    return tensor is not None and (not tensor.is_inference() or torch.is_inference_mode_enabled())


def _cloned(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.clone()


def _native_map(feature_map: FeatureMap | None) -> str | None:
    """The name that native code has for a feature map; None where it has none."""
    kind = type(feature_map)
    if feature_map is None or kind is Elu:
        return "elu"
    if kind is Identity:
        return "identity"
    return "unit_norm" if kind is UnitNorm and type(feature_map.feature_map) is Identity else None  # type: ignore[union-attr]


def _runs_natively(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors on the CPU, without gradients, transforms and modes."""
    with_gradients = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) is not Tensor or not tensor.is_cpu or (with_gradients and tensor.requires_grad)
        ):
            return False
    return no_mode_active() and native.available()
