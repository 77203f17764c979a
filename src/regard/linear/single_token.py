"""One token of causal linear attention in one call of a backend: feature map, recurrence and division by the total.

A step is a few microseconds of arithmetic: whatever else a call does takes longer. So the checks are those that tell
whether a backend takes the call, and all others are left to `make_linear_problem`.
"""

from __future__ import annotations

import math
import sys
from typing import TypeAlias

import torch
from torch import Tensor

from ..backends.base import TokenStep
from ..backends.registry import BACKENDS
from ..core.recurrence_problem import FeatureMapName
from ..core.torch_modes import no_mode_active
from ..errors import RegardError
from ..masks.causal import Causal
from .deferred_state import DeferredState, StateMemory, cloned, writable
from .feature_maps import Elu, FeatureMap, Identity, UnitNorm
from .linear_arguments import LARGEST_BETA, LinearOptions
from .linear_state import LinearState

Token: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
"""Query, key and value of a token, and its decay and beta."""

RECENT_SHARE = 0.25
"""The most that the recent tokens of a state may take, as a share of its sums."""

ONE_STATE = 4
"""References to the memory of one state in `_step`: the state's, two local names, and the argument of `getrefcount`."""


def single_token(
    query: Tensor, key: Tensor, value: Tensor, options: LinearOptions
) -> tuple[Tensor, LinearState] | None:
    """The output and the state after one token, by one call of a backend; None where another path has to compute it.

    They are those of `linear_attention_with_state`, which also says what is wrong with arguments that are refused here.

    Shapes: query (B, H, 1, D), key (B, Hk, 1, D), value (B, Hk, 1, Dv).
    """
    if type(query) is not Tensor or query.ndim != 4 or query.shape[2] != 1:
        return None
    state, normalize = options.get("state"), options.get("normalize", True)
    if not isinstance(state, LinearState) or state.normalized is not normalize or state.log_scale is not None:
        return None
    feature_map, mask = _map_name(options.get("feature_map")), options.get("mask")
    if feature_map is None or not (options.get("causal") if mask is None else type(mask) is Causal):
        return None
    decay = options.get("decay")
    delta = _delta_tensors(key, feature_map, options)
    if delta is None:
        return None
    key, beta, removal = delta
    deferred = state if type(state) is DeferredState else None
    if not _plain(query, key, value, decay, beta, removal, None if deferred is not None else state.sums):
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
        or not step.takes(query, key, value, decay, beta, removal)
    ):
        groups = [each.recurrences for each in BACKENDS if each.runs(query, key, value) and each.recurrences]
        maker = next(iter(groups), None)
        if maker is None or (normalize and beta is not None) or not -math.inf < scale < math.inf:
            return None
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        decay = None if decay is None else decay.contiguous()
        step = maker.prepare_step(
            *(query, key, value, decay, beta, removal),
            feature_map=feature_map,
            normalize=normalize,
            scale=scale,
            recent_share=RECENT_SHARE,
        )
        sums = state.sums if deferred is None else deferred.memory.sums
        if step is None or sums.device != query.device:
            return None
    if deferred is None or deferred.step.decay_dim != step.decay_dim:
        deferred = _deferred(state, step)
    if deferred.memory.sums.shape != step.state_shape:
        return None
    try:
        return _step(step, (query, key, value, decay, beta), removal, deferred)
    except RegardError:
        return None  # `make_linear_problem` knows the argument that is wrong


def _delta_tensors(
    key: Tensor, feature_map: FeatureMapName, options: LinearOptions
) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
    """The written key, and beta and removal as a step takes them; None where they or a bonus need another path."""
    beta, removal = options.get("beta"), options.get("removal")
    if options.get("bonus") is not None:
        return None
    if removal is None and (beta is None or beta.ndim == 3):
        return key, beta, None
    if removal is not None and (removal.shape != key.shape or removal.dtype is not key.dtype):
        return None
    if beta is None:
        return key, key.new_ones(key.shape[:3]), removal
    if beta.ndim == 3:
        return key, beta, removal
    if feature_map != "identity" or key.dtype is not torch.float32 or beta.shape != key.shape:
        return None  # a written key is rounded once, as other results
    if not no_mode_active() or not _in_range(beta):
        return None
    return beta.to(key.dtype) * key, key.new_ones(key.shape[:3]), key if removal is None else removal


def _in_range(beta: Tensor) -> bool:
    """Whether a beta that a step does not check is within its range, where its values may be read."""
    return not beta.is_cpu or bool(((beta >= 0) & (beta <= LARGEST_BETA)).all())


def _deferred(state: LinearState, step: TokenStep) -> DeferredState:
    """A state without recent tokens, as the step reads and continues it."""
    if state.normalized:
        sums = torch.cat([state.sums[..., :-1].flatten(2), state.sums[..., -1]], -1)
    else:
        sums = state.sums.flatten(2).contiguous()
    capacity = step.recent_capacity
    recent = sums.new_empty(*sums.shape[:2], capacity, step.recent_width) if capacity else None
    return DeferredState(StateMemory(sums, recent, shared=not state.normalized), 0, step)


def _step(step: TokenStep, token: Token, removal: Tensor | None, state: DeferredState) -> tuple[Tensor, LinearState]:
    """`single_token` of tensors that the step takes, after a state of its shape.

    The tokens of a full memory are added to its sums before, in place where no other state reads them: new memory would
    have to be mapped by the system, which takes ten times as long as writing into it.
    """
    memory = state.memory
    with memory.lock:
        count = state.count
        full = count == step.recent_capacity
        added = memory if full else memory.append_after(count)
        in_place = full and not memory.shared and writable(memory.recent) and writable(memory.sums)
        if in_place and step.in_one_call() and sys.getrefcount(state.memory) == ONE_STATE:
            return _fold(step, token, removal, state, memory)
    if not full:
        output = step.run(*token, memory.sums, added.recent, count, removal=removal)
        return output, DeferredState(added, count + 1, step)
    recent = cloned(memory.recent)
    written = StateMemory(torch.empty_like(memory.sums), recent, 0 if recent is None else 1)
    output = step.run(*token, memory.sums, recent, count, written.sums, removal)
    return output, DeferredState(written, written.filled, step)


def _fold(
    step: TokenStep, token: Token, removal: Tensor | None, state: DeferredState, memory: StateMemory
) -> tuple[Tensor, LinearState]:
    """The step after the tokens of the memory were added to its sums in place; the state then has none of its own."""
    try:
        output = step.run(*token, memory.sums, memory.recent, state.count, memory.sums, removal)
    except MemoryError:
        raise  # nothing was written
    except RegardError:
        vars(state)["count"] = memory.filled = 0
        raise
    vars(state)["count"], memory.filled = 0, 1
    return output, DeferredState(memory, 1, step)


def _map_name(feature_map: FeatureMap | None) -> FeatureMapName | None:
    """The name that backends know a feature map by; None where they do not."""
    kind = type(feature_map)
    if feature_map is None or kind is Elu:
        return "elu"
    if kind is Identity:
        return "identity"
    return "unit_norm" if kind is UnitNorm and type(feature_map.feature_map) is Identity else None  # type: ignore[union-attr]


def _plain(*tensors: Tensor | None) -> bool:
    """Whether these are plain tensors, without gradients, transforms and modes."""
    with_gradients = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (type(tensor) is not Tensor or (with_gradients and tensor.requires_grad)):
            return False
    return no_mode_active()
