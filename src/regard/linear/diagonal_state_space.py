"""S4D: state spaces with a diagonal of complex rates, a causal convolution of each channel."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..core.score_forms import at_least_float32
from ..core.torch_modes import without_autocast
from ..errors import ConfigurationError, DtypeError, ShapeError
from ..kernels.validation import check_device
from ..utils.other_types import needs_tensor
from .chunks import CHUNK, in_chunks
from .linear_arguments import has_values

Discretization = Literal["zero-order hold", "bilinear"]

SMALL = 1e-3
"""Below it (e^z - 1) / z is its Taylor series to z³, in float64 to the last digit."""
LEAST = 1e-150
"""Added to a quotient before its logarithm: without effect in float64, unless the quotient is 0."""


def diagonal_state_space(
    value: Tensor,
    *,
    step: Tensor,
    rates: Tensor,
    weights: Tensor,
    skip: Tensor | None = None,
    discretization: Discretization = "zero-order hold",
    state: Tensor | None = None,
) -> Tensor:
    """y_t = 2 Re Σ_n C_n h_tn + D x_t with h_t = Ā h_{t-1} + B̄ x_t, for each channel: S4 with a diagonal matrix.

        zero-order hold: Ā = e^{ΔA}, B̄ = (Ā - 1) / A        bilinear: Ā = (1 + ΔA/2) / (1 - ΔA/2), B̄ = Δ / (1 - ΔA/2)

    A is complex, and each of its numbers stands for itself and its conjugate. Δ, A and C are those of a channel at all
    positions, so that y is a convolution with K_l = 2 Re Σ_n C_n B̄_n Ā_n^l, which is computed in chunks: a product with
    the matrix K_{i-j} in each, and h between them. Time and memory are linear in N. Where Δ, B and C depend on the
    token it is `selective_scan`.

    Shapes: value and the output (..., N, channels).

    Args:
        value: x, (..., N, channels).
        step: Δ, at least 0, (channels,).
        rates: A, complex, with real parts of at most 0, (channels, states); S4D-Lin begins with A_n = -1/2 + iπn.
        weights: C times B, complex, (channels, states); only their product matters.
        skip: D, (channels,), a factor of the value itself; None for 0.
        discretization: the rule for Ā and B̄.
        state: h before the first position, complex, (..., channels, states), as `diagonal_state_space_with_state`
            returns it; None for 0.

    Raises:
        ShapeError: tensors that do not fit; the message has their shapes.
        ConfigurationError: a step below 0, a rate whose real part is above 0, another discretization.
        DtypeError, DeviceError: rates or weights that are not complex, what is no tensor, or tensors on other devices.

    Source: Gu et al. 2022, On the Parameterization and Initialization of Diagonal State Space Models (arXiv
    2206.11893), section 3; S4 itself (arXiv 2111.00396) adds a matrix of rank one to the diagonal.

    >>> import torch, regard
    >>> one, turning = torch.ones(4, 1), torch.tensor([[0.5j * torch.pi]])    # a quarter of a turn for each step
    >>> half = turning / (torch.tensor(1j) - 1) / 2                         # 2 C B̄ = 1
    >>> regard.linear.diagonal_state_space(one, step=torch.ones(1), rates=turning, weights=half).mT.round().long()
    tensor([[1, 1, 0, 0]])
    """
    told = {"step": step, "rates": rates, "weights": weights, "skip": skip}
    return diagonal_state_space_with_state(value, **told, discretization=discretization, state=state)[0]  # type: ignore[arg-type]


def diagonal_state_space_with_state(
    value: Tensor,
    *,
    step: Tensor,
    rates: Tensor,
    weights: Tensor,
    skip: Tensor | None = None,
    discretization: Discretization = "zero-order hold",
    state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`diagonal_state_space`, and the state after the last position, (..., channels, states), in complex64 at least.

    Raises:
        RegardError: as of `diagonal_state_space`.

    >>> import torch, regard
    >>> told = {"step": torch.rand(3), "rates": -torch.rand(3, 2) + 1j, "weights": torch.randn(3, 2) + 1j}
    >>> x = torch.randn(7, 3)
    >>> first, state = regard.linear.diagonal_state_space_with_state(x[:5], **told)
    >>> rest = regard.linear.diagonal_state_space(x[5:], **told, state=state)
    >>> torch.allclose(torch.cat([first, rest]), regard.linear.diagonal_state_space(x, **told), atol=1e-5)
    True
    """
    _check(value, step, rates, weights, skip, state)
    x = at_least_float32(value)
    batch, (length, channels) = x.shape[:-2], x.shape[-2:]
    flat = x.reshape(batch.numel(), length, channels)
    kind = x.dtype.to_complex()
    before = rates.new_zeros(len(flat), *rates.shape) if state is None else state.reshape(len(flat), *rates.shape)
    before = before.to(kind).movedim(0, -1)  # (channels, states, B)
    with without_autocast(value.device.type):
        factor, written = _discrete(step.double(), rates.to(torch.complex128), discretization)
        if flat.numel() and rates.numel():
            size = min(CHUNK, length)
            matrices = _Matrices.of(factor, written, weights.to(torch.complex128), size, x.dtype)
            rows, last = matrices.run(flat, before)
        else:
            rows, last = torch.zeros_like(flat), before
        if skip is not None:
            rows = rows + skip.to(rows.dtype) * flat
    return rows.view(x.shape).to(value.dtype), last.movedim(-1, 0).reshape(*batch, *rates.shape)


def _discrete(step: Tensor, rates: Tensor, discretization: Discretization) -> tuple[Tensor, Tensor]:
    """The logarithm of Ā, and B̄, (channels, states).

    Raises:
        ConfigurationError: there is no such rule.
    """
    step = step.unsqueeze(-1)
    z = step * rates
    if discretization == "bilinear":
        # Ā may be 0, which has no logarithm.
        return ((1 + z / 2) / (1 - z / 2) + LEAST).log(), step / (1 - z / 2)
    if discretization != "zero-order hold":
        raise ConfigurationError(f"discretization is {discretization!r}; it needs 'zero-order hold' or 'bilinear'")
    small = z.detach().abs() < SMALL
    series = 1 + z * (1 / 2 + z * (1 / 6 + z / 24))
    other = z.masked_fill(small, 1.0)
    real, imaginary = other.real, other.imag
    less_one = torch.complex(
        real.expm1() * imaginary.cos() - 2 * (imaginary / 2).sin().square(), real.exp() * imaginary.sin()
    )
    return z, step * torch.where(small, series, less_one / other)


class _Matrices(NamedTuple):
    """What a chunk of C positions does to a channel, complex numbers as two real ones, of n states 2 n.

    Shapes: within (channels, C, C), from x to y; reads (channels, C, 2 n), from h before the chunk to y; writes
    (channels, 2 n, C), from x to h behind it; log_factor of one step, (channels, n).
    """

    within: Tensor
    reads: Tensor
    writes: Tensor
    log_factor: Tensor

    @classmethod
    def of(cls, log_factor: Tensor, written: Tensor, weights: Tensor, size: int, dtype: torch.dtype) -> _Matrices:
        """By powers of the factor in complex128: angles of many turns lose digits in complex64."""
        at = torch.arange(size, device=written.device)
        powers = (log_factor.unsqueeze(-1) * at).exp()  # (channels, n, C)
        kernel = 2 * (weights * written).unsqueeze(-2).matmul(powers).real.squeeze(-2)  # (channels, C)
        distance = at[:, None] - at
        within = kernel[:, distance.clamp(min=0)] * (distance >= 0)
        reads = 2 * weights.unsqueeze(-1) * powers * log_factor.exp().unsqueeze(-1)
        writes = written.unsqueeze(-1) * powers.flip(-1)
        return cls(
            within.to(dtype),
            torch.cat([reads.real, -reads.imag], -2).mT.to(dtype),
            torch.cat([writes.real, writes.imag], -2).to(dtype),
            log_factor,
        )

    def run(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """The rows y (B, N, channels), and the state (channels, n, B) behind them."""
        batch, length, size = len(x), x.shape[1], self.within.shape[-1]
        columns = in_chunks(x, size).permute(3, 2, 1, 0)  # (channels, C, m, B)
        added = (self.writes @ columns[:, :, :-1].flatten(2)).unflatten(-1, (-1, batch))
        factor = self._power(size, state)
        states = [state]
        for each in torch.complex(*added.chunk(2, 1)).unbind(2):
            state = factor * state + each
            states.append(state)
        before = torch.stack(states, 2)  # (channels, n, m, B)
        reals = torch.cat([before.real, before.imag], 1).flatten(2)
        rows = (self.within @ columns.flatten(2) + self.reads @ reals).unflatten(-1, (-1, batch))
        rest = length - size * (columns.shape[2] - 1)  # positions of the last chunk
        last = torch.complex(*(self.writes[..., size - rest :] @ columns[:, :rest, -1]).chunk(2, 1))
        rows = rows.permute(3, 2, 1, 0).flatten(1, 2)[:, :length]
        return rows, self._power(rest, state) * state + last

    def _power(self, count: int, state: Tensor) -> Tensor:
        return (self.log_factor * count).exp().to(state.dtype).unsqueeze(-1)


def _check(
    value: Tensor, step: Tensor, rates: Tensor, weights: Tensor, skip: Tensor | None, state: Tensor | None
) -> None:
    """Check everything but the discretization.

    Raises:
        RegardError: as of `diagonal_state_space`.
    """
    told = {"value": value, "step": step, "rates": rates, "weights": weights, "skip": skip, "state": state}
    for name, tensor in told.items():
        optional = name in ("skip", "state") and tensor is None
        if not optional and (refused := needs_tensor(name, tensor)):
            raise DtypeError(refused)
    if value.ndim < 2 or not value.is_floating_point():
        raise ShapeError(
            f"value has the shape {tuple(value.shape)} and {value.dtype}; it needs (..., N, channels) of a "
            "floating-point type"
        )
    channels = value.shape[-1]
    if rates.ndim != 2 or len(rates) != channels:
        raise ShapeError(f"rates has the shape {tuple(rates.shape)}; it needs ({channels}, states)")
    for name, tensor, needs in (
        ("rates", rates, tuple(rates.shape)),
        ("weights", weights, tuple(rates.shape)),
        ("state", state, (*value.shape[:-2], *rates.shape)),
        ("step", step, (channels,)),
        ("skip", skip, (channels,)),
    ):
        if tensor is None:
            continue
        check_device(name, tensor, value.device)
        if tuple(tensor.shape) != needs:
            raise ShapeError(f"{name} has the shape {tuple(tensor.shape)}; it needs {needs}")
        if tensor.is_complex() != (name in ("rates", "weights", "state")):
            raise DtypeError(
                f"{name} is {tensor.dtype}; it needs {'real' if tensor.is_complex() else 'complex'} numbers"
                + ("" if tensor.is_complex() else f": {name}.to(torch.complex64), or torch.view_as_complex of pairs")
            )
    if step.numel() and has_values(step) and float(step.detach().min()) < 0:
        raise ConfigurationError(
            f"step has values down to {float(step.detach().min()):.4g}; it needs values of at least 0: pass it after "
            "its exponential or softplus"
        )
    if rates.numel() and has_values(rates) and float(rates.detach().real.max()) > 0:
        raise ConfigurationError(
            f"rates has real parts up to {float(rates.detach().real.max()):.4g}; they need to be at most 0, or the "
            "state grows: pass -exp of a parameter as the real part"
        )
