"""Attention over slots: a memory of a bounded number of keys and values, which every token writes a share of."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.score_forms import at_least_float32
from ..core.torch_modes import without_autocast
from ..errors import ConfigurationError, ShapeError
from ..kernels.validation import check_same_kind, check_shapes
from .feature_maps import Identity
from .linear_arguments import BatchAxes, checked_scale
from .linear_attention import linear_attention
from .token_numbers import check_token_numbers
from .value_decay import read_decaying_values


def slot_attention(
    query: Tensor, key: Tensor, value: Tensor, slots: Tensor, decay: Tensor, *, scale: float | None = None
) -> Tensor:
    """o_t = Ṽ_tᵀ softmax(K̃_t q_t), with the keys and values of M slots that fade and are written at each token.

        K̃_t = diag(e^{g_t}) K̃_{t-1} + s_t k_tᵀ,    Ṽ_t = diag(e^{g_t}) Ṽ_{t-1} + s_t v_tᵀ

    Gated slot attention has a gate α_t for each slot, g = log α and s = 1 - α; attention with bounded memory control
    has `running_softmax(logits)` for both. Two passes of linear attention: the scores of the slots decay along
    the slots, which are then the values, and the second has them as features. Time and memory are linear in N.

    Shapes:
        query (..., heads, N, D), key (..., key heads, N, D), value (..., key heads, N, Dv); the output is
        (..., heads, N, Dv).

    Args:
        query: (..., heads, N, D).
        key: (..., key heads, N, D).
        value: (..., key heads, N, Dv).
        slots: s, what each token writes to each slot, (..., key heads, N, M).
        decay: g, a logarithm, at most 0, (..., key heads, N, M).
        scale: of the scores of the slots, 1/√D by default.

    Raises:
        ShapeError: slots or decay of other shapes, or not as many keys as queries; others as of
            `regard.linear_attention`.
        ConfigurationError: a decay above 0.

    Source: Zhang et al. 2024, gated slot attention (arXiv 2409.07146), section 3; Peng et al. 2022, attention with
    bounded-memory control (arXiv 2110.02488), section 3.

    >>> import torch, regard
    >>> keep = torch.tensor([[0.5, 0.0], [0.5, 1.0]])                # the second slot holds the first token
    >>> key, value = torch.zeros(2, 1), torch.tensor([[8.0], [4.0]])
    >>> regard.linear.slot_attention(key, key, value, 1 - keep, keep.log())
    tensor([[6.],
            [6.]])
    """
    query, key, value = check_same_kind(query, key, value)
    check_shapes(query, key, value)
    if query.shape[-2] != key.shape[-2]:
        raise ShapeError(f"query has {query.shape[-2]} positions and key {key.shape[-2]}: slots need as many of both")
    slots, decay = (
        check_token_numbers(name, each, key, "slots") for name, each in (("slots", slots), ("decay", decay))
    )
    if slots.shape != decay.shape:
        raise ShapeError(
            f"slots has the shape {tuple(slots.shape)} and decay {tuple(decay.shape)}; they need the same slots: the "
            "share that a token writes to each, and what is left of what was there"
        )
    scale = checked_scale(scale, Identity(), False, query.shape[-1])
    axes = BatchAxes.from_tensors(query, key, value)
    with without_autocast(query.device.type):
        q, k = (at_least_float32(axes.as_4d(tensor)) for tensor in (query, key))
        s, g = (axes.as_4d(tensor).to(q.dtype) for tensor in (slots, decay))
        weights = axes.unflatten(read_decaying_values(scale * q, k, s, g).softmax(-1))
    rows = linear_attention(
        *(weights, slots.to(weights.dtype), value.to(weights.dtype)),
        feature_map=Identity(),
        normalize=False,
        causal=True,
        decay=decay,
        scale=1.0,
    )
    return rows.to(value.dtype)


def running_softmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the positions so far, for each t, as what t writes and how the shares before it fade.

        slots_t = e^{l_t - z_t},    decay_t = z_{t-1} - z_t,    z_t = log Σ_{j <= t} e^{l_j}

    With these as the slots and the decay of `slot_attention`, each slot is a mean of the tokens so far, weighed by e^l.

    Shapes: logits (..., N, M); both results as logits, in float32 at least.

    >>> import torch, regard
    >>> slots, decay = regard.linear.running_softmax(torch.zeros(4, 1))
    >>> slots.mT, decay.exp().mT
    (tensor([[1.0000, 0.5000, 0.3333, 0.2500]]), tensor([[1.0000, 0.5000, 0.6667, 0.7500]]))
    """
    if logits.ndim < 2 or not logits.is_floating_point():
        raise ConfigurationError(
            f"logits has the shape {tuple(logits.shape)} and {logits.dtype}; it needs (..., N, slots) of a "
            "floating-point type"
        )
    logits = at_least_float32(logits)
    totals = logits.logcumsumexp(-2)
    # The first decay acts on empty slots: any will do.
    return (logits - totals).exp(), torch.cat([totals[..., :1, :], totals[..., :-1, :]], -2) - totals
