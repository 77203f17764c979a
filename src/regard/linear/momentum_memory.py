"""Titans' linear memory: gradient steps with momentum and forgetting that learn the values of keys as they come."""

from __future__ import annotations

import math
from typing import NamedTuple, cast

import torch
from torch import Tensor

from ..core.score_forms import at_least_float32
from ..core.torch_modes import without_autocast
from ..errors import DtypeError, ShapeError
from ..kernels.validation import check_device, check_same_kind, check_shapes
from ..utils.numbers import whole_number
from ..utils.other_types import needs_tensor
from .chunks import CHUNK, in_chunks
from .linear_arguments import BatchAxes, check_logarithms
from .token_numbers import check_token_numbers


class MomentumState(NamedTuple):
    """The memory W after a token, and the last step Z with its momentum, each (..., key heads, D, Dv)."""

    memory: Tensor
    last_step: Tensor


def titans_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rate: Tensor,
    momentum: Tensor | None = None,
    decay: Tensor | None = None,
    mini_batch: int = 1,
    state: MomentumState | None = None,
) -> Tensor:
    """o_t = W_tᵀ q_t of a memory W that is trained at each token by gradient descent with momentum and forgetting.

        W_t = e^{g_t} W_{t-1} + Z_t,    Z_t = η_t Z_{t-1} - θ_t k_t (W_sᵀ k_t - v_t)ᵀ

    The gradient is that of ½ ‖Wᵀ k_t - v_t‖² at W_s, the memory before the token, s = t - 1, or before its mini-batch.
    Without momentum and decay it is the delta rule with β = θ.

    Both recurrences are exact: within a chunk the errors W_sᵀ k_t - v_t are a triangular system, and what is between
    chunks is W and Z. Time and memory are linear in N.

    Shapes:
        query (..., heads, N, D), key (..., key heads, N, D), value (..., key heads, N, Dv); the output is
        (..., heads, N, Dv).

    Args:
        query: (..., heads, N, D), without a scale.
        key: (..., key heads, N, D); steps are stable for θ ‖k‖² below 2.
        value: (..., key heads, N, Dv).
        rate: θ, at least 0, (..., key heads, N), twice that of the paper, whose loss has no ½; it broadcasts, as the
            next two do.
        momentum: η in 0..1, (..., key heads, N); None for 0.
        decay: g = log (1 - α), at most 0, (..., key heads, N), of what is forgotten; None for 0.
        mini_batch: how many tokens, from the first on, have their gradients at one memory.
        state: W and Z before the first token, as `titans_attention_with_state` returns them; None for 0.

    Raises:
        ShapeError: rate, momentum or decay that do not broadcast, a state of another shape, not as many keys as
            queries.
        ConfigurationError: a rate below 0, momentum out of 0..1, a decay above 0, a mini_batch below 1.
        DtypeError, DeviceError: of other kinds of numbers or on other devices.

    Source: Behrouz et al. 2024, Titans (arXiv 2501.00663), Eq. 9 to 14, with a matrix as the memory.

    >>> import torch, regard
    >>> one, half = torch.ones(3, 1), torch.full((3,), 0.5)
    >>> regard.linear.titans_attention(one, one, one, rate=half, momentum=half).mT   # Z = 1/2, 1/2, 1/4
    tensor([[0.5000, 1.0000, 1.2500]])
    """
    numbers = {"rate": rate, "momentum": momentum, "decay": decay}
    return _titans(query, key, value, numbers, mini_batch, state)[0]


def titans_attention_with_state(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rate: Tensor,
    momentum: Tensor | None = None,
    decay: Tensor | None = None,
    mini_batch: int = 1,
    state: MomentumState | None = None,
) -> tuple[Tensor, MomentumState]:
    """`titans_attention`, and its state after the last token, in float32 at least; a mini-batch begins there.

    Raises:
        RegardError: as of `titans_attention`.

    >>> import torch, regard
    >>> q, k, v, rate = torch.randn(7, 3), torch.randn(7, 3) / 2, torch.randn(7, 2), torch.rand(7)
    >>> first, state = regard.linear.titans_attention_with_state(q[:5], k[:5], v[:5], rate=rate[:5])
    >>> rest = regard.linear.titans_attention(q[5:], k[5:], v[5:], rate=rate[5:], state=state)
    >>> whole = regard.linear.titans_attention(q, k, v, rate=rate)
    >>> torch.allclose(torch.cat([first, rest]), whole, atol=1e-5)
    True
    """
    numbers = {"rate": rate, "momentum": momentum, "decay": decay}
    return _titans(query, key, value, numbers, mini_batch, state)


def _titans(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    numbers: dict[str, Tensor | None],
    mini_batch: int,
    state: MomentumState | None,
) -> tuple[Tensor, MomentumState]:
    """The outputs and the last state, of arguments that are not yet checked."""
    query, key, value = check_same_kind(query, key, value)
    check_shapes(query, key, value)
    if query.shape[-2] != key.shape[-2]:
        raise ShapeError(f"query has {query.shape[-2]} positions and key {key.shape[-2]}: Titans needs as many of both")
    mini_batch = whole_number("mini_batch", mini_batch)
    axes = BatchAxes.from_tensors(query, key, value)
    q, k, v = (at_least_float32(axes.as_4d(tensor)) for tensor in (query, key, value))
    rate, momentum, fade = (axes.as_4d(each.unsqueeze(-1)).to(q.dtype) for each in _checked_numbers(numbers, key))
    first = _first_state(state, axes, k, v)
    with without_autocast(query.device.type):
        if q.shape[2] and q.numel() and v.numel():
            rows, last = _Chunks.of(q, k, v, rate, momentum, fade, mini_batch).run(first, q.shape[2])
        else:
            rows, last = v.new_zeros(*q.shape[:3], v.shape[-1]), first
    memory, last_step = (axes.unflatten(each) for each in last.unbind(2))
    return axes.unflatten(rows).to(value.dtype), MomentumState(memory, last_step)


class _Chunks(NamedTuple):
    """What the recurrences of each chunk read of its tokens; m chunks of C tokens, S = [W, Z], (B, Hk, 2 D, Dv).

    The errors times their rates are e = reads S - targets; then W and Z behind the chunk are fade S - written^T e.

    Shapes: queries (B, Hk, r, m, C, 2 D), weights (B, Hk, r, m, C, C), reads (B, Hk, m, C, 2 D), targets
    (B, Hk, m, C, Dv), written (B, Hk, m, C, 2 D), fade (B, Hk, m, 2, 2).
    """

    queries: Tensor
    weights: Tensor
    reads: Tensor
    targets: Tensor
    written: Tensor
    fade: Tensor

    @classmethod
    def of(
        cls, query: Tensor, key: Tensor, value: Tensor, rate: Tensor, momentum: Tensor, fade: Tensor, mini_batch: int
    ) -> _Chunks:
        """Cut (B, heads, N, ·), of numbers (B, Hk, N, 1), into chunks of whole mini-batches."""
        length = query.shape[2]
        size = min(max(CHUNK // mini_batch, 1) * mini_batch, length)
        q = in_chunks(query.unflatten(1, (key.shape[1], -1)), size)
        k, v, rate, momentum, fade = (in_chunks(each, size) for each in (key, value, rate, momentum, fade))
        stepped = _products(momentum)  # (B, Hk, m, C, C): what is left of a step in each later one
        weights = _products(fade) @ stepped  # and of it in each later memory
        from_memory, from_step = fade.cumprod(-2), weights[..., :1] * momentum[..., :1, :]  # of those before the chunk
        start = torch.arange(size, device=k.device) // mini_batch * mini_batch  # 0 is before the first token

        def at_start(tensor: Tensor, before: float) -> Tensor:
            return torch.cat([torch.full_like(tensor[..., :1, :], before), tensor], -2)[..., start, :]

        system = rate * at_start(weights, 0.0) * (k @ k.mT)
        right = torch.cat([at_start(from_memory, 1.0) * k, at_start(from_step, 0.0) * k, v], -1)
        solved = torch.linalg.solve_triangular(system, rate * right, upper=False, unitriangular=True)
        reads, targets = solved.split([2 * k.shape[-1], v.shape[-1]], -1)
        last = torch.full((k.shape[2],), size - 1, device=k.device)
        last[-1] = (length - 1) % size  # of the last chunk, behind which is padding
        every = torch.arange(k.shape[2], device=k.device)
        ends = [each[:, :, every, last] for each in (weights, stepped, from_memory, from_step, momentum.cumprod(-2))]
        written = torch.cat([k * ends[0].unsqueeze(-1), k * ends[1].unsqueeze(-1)], -1)
        fades = torch.stack([torch.cat(ends[2:4], -1), torch.cat([torch.zeros_like(ends[4]), ends[4]], -1)], -2)
        queries = torch.cat([q * from_memory.unsqueeze(2), q * from_step.unsqueeze(2)], -1)
        return cls(queries, weights.unsqueeze(2) * (q @ k.unsqueeze(2).mT), reads, targets, written, fades)

    def run(self, state: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """The outputs (B, heads, N, Dv), and the last state, from W and Z before all chunks (B, Hk, 2, D, Dv)."""
        shape, errors, states = state.shape, [], []
        of_chunks = zip(*(each.unbind(2) for each in (self.reads, self.targets, self.written, self.fade)), strict=True)
        for reads, targets, written, fade in of_chunks:
            flat = state.flatten(2, 3)
            error = reads @ flat - targets
            states.append(flat)
            errors.append(error)
            state = (fade @ state.flatten(3)).view(shape) - (written.mT @ error).view(shape)
        rows = self.queries @ torch.stack(states, 2).unsqueeze(2) - self.weights @ torch.stack(errors, 2).unsqueeze(2)
        return rows.flatten(3, 4).flatten(1, 2)[:, :, :length], state


def _products(factors: Tensor) -> Tensor:
    """Π_{s < u <= t} f_u of each t and s, (..., C, C), of factors (..., C, 1); 0 for s > t."""
    size = factors.shape[-2]
    steps = torch.diag_embed(-factors[..., 1:, 0], offset=-1)  # (..., C, C), below an invisible diagonal of ones
    identity = torch.eye(size, dtype=factors.dtype, device=factors.device).expand(steps.shape)
    return torch.linalg.solve_triangular(steps, identity, upper=False, unitriangular=True)


def _checked_numbers(numbers: dict[str, Tensor | None], key: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """θ, η and e^g of each token, (..., key heads, N).

    Raises:
        RegardError: as of `titans_attention`.
    """
    rate, momentum, decay = numbers["rate"], numbers["momentum"], numbers["decay"]
    zeros = key.new_zeros(key.shape[:-1])
    rate = check_token_numbers("rate", cast(Tensor, rate), key, most=math.inf)
    momentum = zeros if momentum is None else check_token_numbers("momentum", momentum, key, most=1.0)
    if decay is None:
        return rate, momentum, torch.ones_like(zeros)
    decay = check_token_numbers("decay", decay, key)
    check_logarithms(decay)
    return rate, momentum, at_least_float32(decay).exp()


def _first_state(state: MomentumState | None, axes: BatchAxes, key: Tensor, value: Tensor) -> Tensor:
    """W and Z before the first token, (B, Hk, 2, D, Dv).

    Raises:
        ShapeError, DtypeError, DeviceError: they do not fit, or are no two tensors.
    """
    sizes = key.shape[-1], value.shape[-1]
    if state is None:
        return key.new_zeros(*key.shape[:2], 2, *sizes)
    if not isinstance(state, tuple) or len(state) != 2:
        raise DtypeError(f"state needs a MomentumState, of memory and last_step; it is a {type(state).__name__}")
    needs = (*axes.batch, *([key.shape[1]] if axes.has_heads else []), *sizes)
    for name, tensor in zip(("memory", "last_step"), state, strict=True):
        if refused := needs_tensor(f"state.{name}", tensor):
            raise DtypeError(refused)
        check_device(f"state.{name}", tensor, key.device)
        if tuple(tensor.shape) != needs:
            raise ShapeError(f"state.{name} has the shape {tuple(tensor.shape)}; it needs {needs}")
    return torch.stack([axes.as_4d(tensor).to(key.dtype) for tensor in state], 2)
