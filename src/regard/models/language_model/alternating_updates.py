"""Alternating updates (AltUp): several vectors for each token, of which each block computes one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...core.score_forms import at_least_float32
from ...errors import ConfigurationError
from ...nn import Linear
from ...nn.projections import init_xavier
from ...utils.numbers import whole_number
from .layer_inputs import LayerInputs
from .residual_stream import ResidualStream

SMALLEST_SQUARE = 1e-5
"""The mean square of a vector that is taken where it is smaller, when vectors are scaled to one size."""


class AlternatingUpdates(ResidualStream):
    """K vectors x_1..x_K for each token; block l computes the active one, and a learned map corrects all K.

        x̂_i = x_i + Σ_j P_ij x_j                     predicted, P from the active x
        x_i = x̂_i + (1 + c_i) · (y - x̂_a)            corrected, y = block(x̂_a), c from y
        x_i += gate_l(s ⊗ x_a, p_l) for i ≥ 2         the layer's inputs, s with `scaled` alone

    At first x_1 is the embedding and x_i = V_i x_1, scaled to its size; at the end U_i x_i, scaled to the size of x_1,
    are averaged with x_1. P = tanh(W_r norm(x_a) / dim) W_P, c likewise of y with W_c.

    Shapes: (copies, batch, length, dim).

    Args:
        dim: of the model.
        inputs: those of all layers.
        layers: their number.
        copies: K.
        active: a, counted from 0.
        limit: of W_P and W_c in absolute value, in training; None for none.
        scaled: whether s exists in the equation above; its parameter does in any case.
        norm: called with a dim, returns a norm.

    Raises:
        ConfigurationError: numbers below 1; an active copy that there is not.

    Source: Baykal et al. 2023, "Alternating Updates for Efficient Transformers" (arXiv 2301.13310); P and c
    that depend on the token, and the inputs of layers, are of the code released with Gemma 3n.
    """

    def __init__(
        self,
        dim: int,
        inputs: LayerInputs,
        *,
        layers: int,
        copies: int,
        active: int,
        limit: float | None,
        scaled: bool,
        norm: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.copies, self.active = whole_number("copies", copies), whole_number("active", active, least=0)
        if active >= copies:
            raise ConfigurationError(f"active is {active} of copies={copies}; it needs a number in 0..{copies - 1}")
        self.scaled = scaled
        self.inputs = inputs
        self.enter = nn.ModuleList(Linear(dim, dim, bias=False) for _ in range(copies - 1))
        self.leave = nn.ModuleList(Linear(dim, dim, bias=False) for _ in range(copies - 1))
        for linear in (*self.enter, *self.leave):
            init_xavier(linear)  # type: ignore[arg-type]
        self.updates = nn.ModuleList(LayerUpdate(dim, copies, limit, norm(dim)) for _ in range(layers))

    def begin(self, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor | None]:
        others = [_sized_as(embedded, linear(embedded)) for linear in self.enter]
        return torch.stack([embedded, *others]), self.inputs(tokens, embedded)

    def around(self, number: int, x: Tensor, inputs: Tensor | None, block: Callable[[Tensor], Tensor]) -> Tensor:
        update: LayerUpdate = self.updates[number]  # type: ignore[assignment]
        predicted = update.predict(x, self.active)
        corrected = update.correct(predicted, block(predicted[self.active]), self.active)
        if inputs is None:
            return corrected
        active = corrected[self.active]
        added = self.inputs.gate(number, active * update.scale if self.scaled else active, inputs)
        return torch.cat([corrected[:1], corrected[1:] + added])

    def end(self, x: Tensor) -> Tensor:
        others = [_sized_as(x[0], linear(copy)) for linear, copy in zip(self.leave, x[1:], strict=True)]
        return torch.stack([x[0], *others]).mean(0)

    def extra_repr(self) -> str:
        return f"copies={self.copies}, active={self.active}"


class LayerUpdate(nn.Module):
    """The prediction and the correction of one layer; see `AlternatingUpdates`."""

    def __init__(self, dim: int, copies: int, limit: float | None, norm: nn.Module) -> None:
        super().__init__()
        self.dim, self.copies, self.limit = dim, copies, limit
        self.router = Linear(dim, copies, bias=False)
        self.norm = norm
        self.predictions = Linear(copies, copies**2, bias=False)
        self.corrections = Linear(copies, copies, bias=False)
        self.scale = nn.Parameter(torch.zeros(dim))
        for linear in (self.router, self.predictions, self.corrections):
            init_xavier(linear)

    def predict(self, x: Tensor, active: int) -> Tensor:
        """The predicted x̂, from x: both (copies, batch, length, dim)."""
        mixed = self._coefficients(self.predictions, x[active]).unflatten(-1, (self.copies, self.copies))
        return x + torch.einsum("btij,jbtd->ibtd", mixed, x)

    def correct(self, predicted: Tensor, output: Tensor, active: int) -> Tensor:
        """The corrected x, from x̂ (copies, batch, length, dim) and the block's output (batch, length, dim)."""
        shares = 1 + self._coefficients(self.corrections, output)  # [batch, length, copies]
        return predicted + shares.movedim(-1, 0).unsqueeze(-1) * (output - predicted[active])

    def _coefficients(self, linear: Linear, x: Tensor) -> Tensor:
        """(batch, length, ·) of vectors (batch, length, dim)."""
        routed = torch.tanh(at_least_float32(self.router(self.norm(x) / self.dim))).to(x.dtype)
        weight = linear.weight
        if self.training and self.limit is not None:
            weight = weight.clamp(-self.limit, self.limit)
        return nn.functional.linear(routed, weight)


def _sized_as(like: Tensor, x: Tensor) -> Tensor:
    """x, (..., dim), scaled to the root mean square of `like`."""
    size = like.square().mean(-1, keepdim=True).sqrt()
    return x * size / x.square().mean(-1, keepdim=True).clamp(min=SMALLEST_SQUARE).sqrt()
