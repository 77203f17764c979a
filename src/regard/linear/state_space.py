"""The selective scan of Mamba-1: linear attention with a state of its own for each channel of the values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ..core.score_forms import at_least_float32
from ..core.torch_modes import functorch_active, under_dispatch_mode, under_forward_mode, without_autocast
from ..errors import ShapeError
from ..kernels.validation import check_device, check_same_kind
from .feature_maps import Identity
from .linear_arguments import check_logarithms
from .linear_attention import linear_attention_with_state
from .linear_state import LinearState
from .token_numbers import check_token_numbers

ENTRIES, ENTRIES_WITH_GRADIENT = 2**17, 2**18
"""Entries of the states of the positions that are computed at once: they stay in the cache; with a gradient more, since
each such segment is computed anew in the backward pass."""
FEWEST = 4
"""Positions of a segment at least."""


def selective_scan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    step: Tensor,
    rates: Tensor,
    skip: Tensor | None = None,
    state: Tensor | None = None,
) -> Tensor:
    """y_t = h_t · C_t + D x_t with h_t = e^{Δ_t A} ⊙ h_{t-1} + Δ_t x_t B_t, for each channel: Mamba-1's state space.

    Queries are C, keys B, and values x of the paper. It is linear attention with as many heads as values have channels:
    head c has the keys B, the queries C, the values Δ_t,c x_t,c of one dim, and the decay Δ_t,c A_c of each feature.
    Memory is linear in N: the states of some positions at a time, which the backward pass computes anew.

    Shapes:
        query and key (..., N, states), value (..., N, channels); the output is (..., N, channels). Leading axes
        broadcast; there is no axis of heads.

    Args:
        query: C, (..., N, states).
        key: B, (..., N, states).
        value: x, (..., N, channels).
        step: Δ, at least 0, (..., N, channels), such as softplus of a projection; axes of size 1 broadcast.
        rates: A, at most 0, (channels, states).
        skip: D, (channels,), a factor of the value itself; None for 0.
        state: h before the first position, (..., channels, states), as `selective_scan_with_state` returns it; None
            for 0.

    Raises:
        ShapeError: tensors that do not fit; the message has their shapes.
        ConfigurationError: a step below 0, or a rate above 0: the state would grow.
        DtypeError, DeviceError: of other kinds of numbers or on other devices.

    Source: Gu and Dao 2023, Mamba (arXiv 2312.00752), Algorithm 2 and section 3.3.2, with B̄ = Δ B as in the authors'
    code.

    >>> import torch, regard
    >>> one = torch.ones(3, 1)
    >>> half = torch.tensor([[0.5]]).log()
    >>> regard.linear.selective_scan(one, one, one, step=one, rates=half).mT
    tensor([[1.0000, 1.5000, 1.7500]])
    """
    return selective_scan_with_state(query, key, value, step=step, rates=rates, skip=skip, state=state)[0]


def selective_scan_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    step: Tensor,
    rates: Tensor,
    skip: Tensor | None = None,
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`selective_scan`, and the state after the last position, (..., channels, states), in float32 at least.

    Raises:
        RegardError: as of `selective_scan`.

    >>> import torch, regard
    >>> x, delta, rates = torch.randn(7, 3), torch.rand(7, 3), -torch.rand(3, 2)
    >>> both = torch.randn(2, 7, 2)
    >>> first, state = regard.linear.selective_scan_with_state(*both[:, :5], x[:5], step=delta[:5], rates=rates)
    >>> rest = regard.linear.selective_scan(*both[:, 5:], x[5:], step=delta[5:], rates=rates, state=state)
    >>> whole = regard.linear.selective_scan(*both, x, step=delta, rates=rates)
    >>> torch.allclose(torch.cat([first, rest]), whole, atol=1e-6)
    True
    """
    query, key, value = check_same_kind(query, key, value)
    batch = _checked_batch(query, key, value)
    step = check_token_numbers("step", step, value, each=f"{value.shape[-1]}", most=math.inf)
    step = step.expand(*step.shape[:-1], value.shape[-1]) if step.shape[-1] == 1 else step
    for name, tensor, needs in (
        ("step", step, tuple(value.shape)),
        ("rates", rates, (value.shape[-1], key.shape[-1])),
        ("skip", skip, (value.shape[-1],)),
        ("state", state, (*batch, value.shape[-1], key.shape[-1])),
    ):
        _check_shape(name, tensor, needs, value)
    check_logarithms(rates, "rates")
    query, key, x, step = (
        at_least_float32(each.expand(*batch, *each.shape[-2:])) for each in (query, key, value, step)
    )
    rates = rates.to(x.dtype)
    first = rates.new_zeros(*batch, *rates.shape) if state is None else state.to(rates.dtype)
    with without_autocast(value.device.type):
        if torch.compiler.is_compiling() or functorch_active() or under_forward_mode() or under_dispatch_mode():
            rows, final = _as_linear_attention(query, key, x, step, rates, first)
        else:
            rows, final = _in_segments(query, key, x, step, rates, first)
        if skip is not None:
            rows = rows + skip.to(rows.dtype) * x
    return rows.to(value.dtype), final


def _in_segments(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, rates: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows and final state of (..., N, ·), some positions at a time."""
    inputs = [tensor.movedim(-2, 0) for tensor in (query, key, value, step)]  # (N, ..., ·)
    length, differentiated = (
        len(inputs[0]),
        torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value, step, rates, state)),
    )
    size = max((ENTRIES_WITH_GRADIENT if differentiated else ENTRIES) // max(state.numel(), 1), FEWEST)
    if not length or not state.numel():
        return value.new_zeros(value.shape), state
    parts = []
    for start in range(0, length, size):
        query, key, value, step = (tensor[start : start + size] for tensor in inputs)
        if differentiated and length > size:
            segment = (query, key, value, step, rates, state)
            rows, state = checkpoint(_segment, *segment, use_reentrant=False, preserve_rng_state=False)  # type: ignore[misc]
        else:
            rows, state = _segment(query, key, value, step, rates, state)
        parts.append(rows)
    return torch.cat(parts).movedim(0, -2), state


def _segment(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, rates: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rows and the last state of some positions, which come first: query and key (n, ..., states)."""
    factors = (step.unsqueeze(-1) * rates).exp()  # (n, ..., channels, states)
    added = (step * value).unsqueeze(-1) * key.unsqueeze(-2)
    states = _Scan.apply(factors, added, state, False)
    return (states @ query.unsqueeze(-1)).squeeze(-1), states[-1]  # type: ignore[index]


class _Scan(torch.autograd.Function):
    """h_t = f_t ⊙ h_{t-1} + a_t of the first axis; from the last position to the first where it is backward."""

    @staticmethod
    def forward(ctx: Any, factors: Tensor, added: Tensor, state: Tensor, backward: bool) -> Tensor:
        states = torch.empty_like(added)
        rows = [*zip(added.unbind(), factors.unbind(), states.unbind(), strict=True)]
        before = state
        for row, factor, after in reversed(rows) if backward else rows:
            torch.addcmul(row, factor, before, out=after)
            before = after
        ctx.save_for_backward(factors, state, states)
        ctx.is_backward = backward
        return states

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:  # type: ignore[override]
        factors, state, states = ctx.saved_tensors
        zeros, first = torch.zeros_like(factors[:1]), state.unsqueeze(0)
        if ctx.is_backward:
            after, before = torch.cat([zeros, factors[:-1]]), torch.cat([states[1:], first])
        else:
            after, before = torch.cat([factors[1:], zeros]), torch.cat([first, states[:-1]])
        of_added: Any = _Scan.apply(after, upstream, torch.zeros_like(state), not ctx.is_backward)
        at_first = -1 if ctx.is_backward else 0
        return of_added * before, of_added, factors[at_first] * of_added[at_first], None


def _as_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, step: Tensor, rates: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The same by linear attention of as many heads as channels, whose states are all of one dim of values."""
    heads = value.shape[-1]
    query, key = (each.unsqueeze(-3).expand(*each.shape[:-2], heads, *each.shape[-2:]) for each in (query, key))
    rows, final = linear_attention_with_state(
        *(query, key, (step * value).mT.unsqueeze(-1)),
        feature_map=Identity(),
        normalize=False,
        causal=True,
        decay=step.mT.unsqueeze(-1) * rates.unsqueeze(-2),
        scale=1.0,
        state=LinearState(state.unsqueeze(-1)),
    )
    return rows.squeeze(-1).mT, final.matrix.squeeze(-1)


def _checked_batch(query: Tensor, key: Tensor, value: Tensor) -> torch.Size:
    """The leading axes of all.

    Raises:
        ShapeError: they do not fit, or not the axes of positions and states.
    """
    try:
        batch = torch.broadcast_shapes(*(each.shape[:-2] for each in (query, key, value)))
        fits = min(query.ndim, key.ndim, value.ndim) > 1
        fits = fits and query.shape[-2:] == key.shape[-2:] and key.shape[-2] == value.shape[-2]
    except RuntimeError:
        fits = False
    if not fits:
        raise ShapeError(
            f"query has the shape {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}; they "
            "need (..., N, states) twice and (..., N, channels), with leading axes that broadcast"
        )
    return batch


def _check_shape(name: str, tensor: Tensor | None, needs: tuple[int, ...], value: Tensor) -> None:
    if tensor is None:
        return
    check_device(name, tensor, value.device)
    if tuple(tensor.shape) != needs:
        raise ShapeError(f"{name} has the shape {tuple(tensor.shape)}; it needs {needs}")
