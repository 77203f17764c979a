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

    Shapes: stored (B, Hk, D, Dv), S', with the total as one more column where normalised.
    """

    def __init__(self, stored: Tensor, recent: RecentTokens, count: int, normalized: bool) -> None:
        vars(self).update(stored=stored, recent=recent, count=count, normalized=normalized, log_scale=None)

    stored: Tensor
    recent: RecentTokens
    count: int

    @cached_property
    def sums(self) -> Tensor:  # type: ignore[override]  # a field of the class above
        """S, and z beside it: (B, Hk, D, Dv or Dv + 1)."""
        dim, value_dim = self.stored.shape[2], self.stored.shape[3] - self.normalized
        tokens = self.recent.rows[:, :, : self.count]
        keys, written, factors = tokens.split([dim, value_dim, tokens.shape[-1] - dim - value_dim], -1)
        if self.normalized:
            written = torch.cat([written, torch.ones_like(written[..., :1])], -1)
        stored = self.stored
        if factors.shape[-1]:
            stored = stored * factors.prod(2).unsqueeze(-1)
            later = torch.cat([factors[:, :, 1:], torch.ones_like(factors[:, :, :1])], 2)
            keys = keys * later.flip(2).cumprod(2).flip(2)
        return stored + keys.mT @ written

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and of the memory for recent tokens."""
        return self.stored.nbytes + self.recent.rows.nbytes

    def reorder(self, rows: Tensor) -> LinearState:
        """The state for these rows of the first axis, in this order."""
        recent = RecentTokens(self.recent.rows[rows], self.count)
        return DeferredState(self.stored[rows], recent, self.count, self.normalized)


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
    feature_map = _native_map(options.get("feature_map"))
    mask, decay, beta, scale = (options.get(name) for name in ("mask", "decay", "beta", "scale"))
    if feature_map is None or not (options.get("causal") if mask is None else type(mask) is Causal):
        return None
    if normalize and beta is not None:
        return None
    deferred = state if isinstance(state, DeferredState) and "sums" not in vars(state) else None
    stored = state.sums if deferred is None else deferred.stored
    if not _runs_natively(query, key, value, stored, decay, beta) or not key.ndim == value.ndim == 4:
        return None
    dim, value_dim = query.shape[3], value.shape[3]
    if decay is not None and decay.shape[:1] == (1,):
        decay = decay.expand(key.shape[0], *decay.shape[1:])
    if scale is None:
        scale = dim**-0.5 if feature_map == "identity" and not normalize and dim else 1.0
    elif not -math.inf < scale < math.inf:
        return None
    width = native.recent_width(dim, value_dim, decay)
    capacity, recent, count = int(RECENT_SHARE * dim * value_dim / max(width, 1)), None, 0
    if deferred is not None and deferred.recent.rows.shape[-1] == width:
        recent, count = deferred.recent, deferred.count
    elif deferred is not None:  # this token has another kind of decay
        stored = deferred.sums
    writes = count >= capacity
    if not writes and recent is None:
        recent = RecentTokens(stored.new_empty(*stored.shape[:2], capacity, width), 0)
    elif not writes and recent is not None:
        recent = recent.ready_after(count)
    try:
        output, sums = native.recurrence_step(
            *(query, key, value, decay, beta, stored),
            recent=None if recent is None else recent.rows,
            recent_count=count,
            writes=writes,
            feature_map=feature_map,
            normalize=normalize,
            scale=scale,
        )
    except RegardError:
        return None  # `make_linear_problem` knows the argument that is wrong
    if writes or recent is None:
        return output, LinearState(sums, normalize)
    recent.filled = count + 1
    return output, DeferredState(sums, recent, count + 1, normalize)


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
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) is not Tensor or tensor.dtype is not torch.float32 or not tensor.is_cpu:
            return False
        if tensor.requires_grad and torch.is_grad_enabled():
            return False
    if under_transform() or under_forward_mode() or under_dispatch_mode() or torch.is_autocast_enabled("cpu"):
        return False
    return native.available()
