"""One token of causal linear attention in one call of native code: feature map, recurrence and division by the total.

A step is a few microseconds of arithmetic: whatever else a call does takes longer. So the checks are those that tell
whether native code takes the call, and all others are left to `make_linear_problem`.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor

from .. import native
from ..core.torch_modes import under_dispatch_mode, under_forward_mode, under_transform
from ..errors import RegardError
from ..masks.causal import Causal
from .feature_maps import Elu, FeatureMap, Identity, UnitNorm
from .linear_problem import LinearOptions
from .linear_state import LinearState

FLOAT32 = torch.float32

RECENT_SHARE = 0.25
"""The most that the recent tokens of a state may take, as a share of its sums."""


class RecentTokens:
    """The tokens since a state was written, with memory for more: (B, Hk, capacity, width), the first `filled` are set.

    An entry is φ(k), u and the factor of the token's decay: none, one number, or one for each feature. What is set is
    never written again. So a state that ends at `filled` appends in place; one that ends earlier, because another state
    has appended since, gets a copy.
    """

    def __init__(self, rows: Tensor, filled: int) -> None:
        self.rows, self.filled = rows, filled

    def ready_after(self, count: int) -> RecentTokens:
        """These tokens where the next may be written after the first `count`, else a copy."""
        writable = not self.rows.is_inference() or torch.is_inference_mode_enabled()
        return self if self.filled == count and writable else RecentTokens(self.rows.clone(), count)


class DeferredState(LinearState):
    """A state whose last tokens are beside its sums: S = diag(f) S' + Σ_j φ(k_j) u_jᵀ over the tokens since S'.

    Writing a state takes longer than reading it, so this one is written once for many tokens. It is as immutable as any
    other: `sums` is computed where it is read.

    Shapes: stored (B, Hk, D · Dv), S', with the total after it, (B, Hk, D · Dv + D), where normalised. The tokens are
    the first `count` of recent, which is None where there are none; step is that of the last token.
    """

    def __init__(self, stored: Tensor, recent: RecentTokens | None, count: int, step: native.TokenStep) -> None:
        vars(self).update(
            stored=stored, recent=recent, count=count, step=step, normalized=step.normalize, log_scale=None
        )

    stored: Tensor
    recent: RecentTokens | None
    count: int
    step: native.TokenStep

    @cached_property
    def sums(self) -> Tensor:  # type: ignore[override]  # a field of the class above
        """S, and z beside it: (B, Hk, D, Dv or Dv + 1)."""
        dim, value_dim = self.step.dim, self.step.value_dim
        matrix = self.stored[..., : dim * value_dim].unflatten(-1, (dim, value_dim))
        total = self.stored[..., dim * value_dim :].unsqueeze(-1)  # without columns where there is no total
        stored = torch.cat([matrix, total], -1) if self.normalized else matrix
        if self.recent is None:
            return stored
        tokens = self.recent.rows[:, :, : self.count]
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
        return self.stored.nbytes + (0 if self.recent is None else self.recent.rows.nbytes)

    def reorder(self, rows: Tensor) -> LinearState:
        """The state for these rows of the first axis, in this order."""
        recent = None if self.recent is None else RecentTokens(self.recent.rows[rows], self.count)
        return DeferredState(self.stored[rows], recent, self.count, self.step)


def single_token(
    query: Tensor, key: Tensor, value: Tensor, options: LinearOptions
) -> tuple[Tensor, LinearState] | None:
    """The output and the state after one token, as `linear_attention_with_state` defines them; None where another path
    has to compute it, or to say what is wrong.

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
            step = native.prepare_step(
                *(query, key, value, decay, beta),
                feature_map=feature_map,
                normalize=normalize,
                scale=scale,
                recent_share=RECENT_SHARE,
            )
        except RegardError:
            return None  # `make_linear_problem` knows the argument that is wrong
    return _step(step, query, key, value, decay, beta, state)


def _step(
    step: native.TokenStep,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    state: LinearState,
) -> tuple[Tensor, LinearState] | None:
    """`single_token` of tensors that the step takes."""
    stored, recent, count = _stored(state, step)
    if stored.shape != step.state_shape:
        return None
    writes = count >= step.recent_capacity
    if recent is not None and not writes:
        recent = recent.ready_after(count)
    elif recent is None and not writes:
        recent = RecentTokens(stored.new_empty(*stored.shape[:2], step.recent_capacity, step.recent_width), 0)
    try:
        output, stored = step.run(
            *(query, key, value, decay, beta, stored, None if recent is None else recent.rows, count), writes=writes
        )
    except RegardError:
        return None  # as above
    if writes or recent is None:
        return output, DeferredState(stored, None, 0, step)
    recent.filled = count + 1
    return output, DeferredState(stored, recent, count + 1, step)


def _stored(state: LinearState, step: native.TokenStep) -> tuple[Tensor, RecentTokens | None, int]:
    """The sums of a state as the step reads them, its recent tokens, and how many of these there are."""
    if type(state) is DeferredState and (state.recent is None or state.step.decay_dim == step.decay_dim):
        return state.stored, state.recent, state.count
    if not state.normalized:
        return state.sums.flatten(2).contiguous(), None, 0
    return torch.cat([state.sums[..., :-1].flatten(2), state.sums[..., -1]], -1), None, 0


def _native_map(feature_map: FeatureMap | None) -> str | None:
    """The name that native code has for a feature map; None where it has none."""
    kind = type(feature_map)
    if feature_map is None or kind is Elu:
        return "elu"
    if kind is Identity:
        return "identity"
    return "unit_norm" if kind is UnitNorm and type(feature_map.feature_map) is Identity else None  # type: ignore[union-attr]


def _runs_natively(*tensors: Tensor | None) -> bool:
    """Whether these are plain float32 tensors on the CPU, without gradients, transforms and modes."""
    with_gradients = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor is not None and (
            type(tensor) is not Tensor
            or tensor.dtype is not FLOAT32
            or not tensor.is_cpu
            or (with_gradients and tensor.requires_grad)
        ):
            return False
    if under_transform() or under_forward_mode() or under_dispatch_mode() or torch.is_autocast_enabled("cpu"):
        return False
    return native.available()
