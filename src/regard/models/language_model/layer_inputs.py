"""Inputs of layers: a vector of each token for each layer, from a table and from its embedding, and their gates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...nn import Linear
from ...nn.projections import init_xavier
from ...utils.numbers import whole_number
from .residual_stream import ResidualStream


class LayerInputs(nn.Module):
    """p_l = (norm(W_l e / √dim) + √d · T_l[token]) / √2 for each layer l, with e the embedding of the token.

    Shapes: tokens (batch, length), e (batch, length, dim), the result (batch, length, layers, d). `table` has the T_l
    of all layers side by side, `projection` the W_l. Tokens beyond the table have the rows of token 0.

    Args:
        dim: of the model.
        input_dim: d.
        layers: their number.
        vocabulary_size: rows of the table.
        activation: a of the gates.
        norm: called with a dim, returns a norm.

    Source: the "per-layer embeddings" of Gemma 3n and Gemma 4, by the code released with them.
    """

    def __init__(
        self,
        dim: int,
        input_dim: int,
        *,
        layers: int,
        vocabulary_size: int,
        activation: Callable[[Tensor], Tensor],
        norm: Callable[[int], nn.Module],
    ) -> None:
        super().__init__()
        self.dim, self.input_dim, self.layers = dim, whole_number("dim", input_dim), layers
        self.table = nn.Embedding(whole_number("vocabulary_size", vocabulary_size), layers * input_dim)
        nn.init.normal_(self.table.weight, std=input_dim**-0.5)
        self.projection = Linear(dim, layers * input_dim, bias=False)
        init_xavier(self.projection)
        self.norm = norm(input_dim)
        self.gates = nn.ModuleList(LayerInputGate(dim, input_dim, activation, norm(dim)) for _ in range(layers))

    def forward(self, tokens: Tensor, embedded: Tensor) -> Tensor:
        """The inputs of all layers: (batch, length, layers, input_dim)."""
        known = torch.where(tokens < self.table.num_embeddings, tokens, 0)
        # √d is rounded to the dtype of the weights before it multiplies, as the embedding's scale is.
        rows = self.table(known) * self.table.weight.new_tensor(self.input_dim**0.5)
        projected = self.projection(embedded) * self.dim**-0.5
        shape = -1, (self.layers, self.input_dim)
        return (self.norm(projected.unflatten(*shape)) + rows.unflatten(*shape)) * 2**-0.5

    def gate(self, number: int, x: Tensor, inputs: Tensor) -> Tensor:
        """What layer `number` adds for its inputs: (batch, length, dim)."""
        return self.gates[number](x, inputs[:, :, number])


class LayerInputGate(nn.Module):
    """norm(W_p (a(W_g x) ⊗ p)): x (batch, length, dim) and p (batch, length, d) to (batch, length, dim)."""

    def __init__(self, dim: int, input_dim: int, activation: Callable[[Tensor], Tensor], norm: nn.Module) -> None:
        super().__init__()
        self.gate = Linear(dim, input_dim, bias=False)
        self.projection = Linear(input_dim, dim, bias=False)
        self.norm = norm
        self.activation = activation
        for linear in (self.gate, self.projection):
            init_xavier(linear)

    def forward(self, x: Tensor, inputs: Tensor) -> Tensor:
        """(batch, length, dim) and (batch, length, d) to (batch, length, dim)."""
        return self.norm(self.projection(self.activation(self.gate(x)) * inputs))


class GatedInputStream(ResidualStream):
    """s_l · (y + gate_l(y, p_l)), with y the output of block l: Gemma 4. Without inputs s_l · y.

    `scales` are the s_l, a buffer of (1,) for each layer, 1 at first.

    Source: the code released with Gemma 4.
    """

    def __init__(self, layers: int, inputs: LayerInputs | None) -> None:
        super().__init__()
        self.inputs = inputs
        self.scales = nn.ModuleList(LayerScale() for _ in range(layers))

    def begin(self, tokens: Tensor, embedded: Tensor) -> tuple[Tensor, Tensor | None]:
        return embedded, None if self.inputs is None else self.inputs(tokens, embedded)

    def around(self, number: int, x: Tensor, inputs: Tensor | None, block: Callable[[Tensor], Tensor]) -> Tensor:
        x = block(x)
        if self.inputs is not None and inputs is not None:
            x = x + self.inputs.gate(number, x, inputs)
        return self.scales[number](x)

    def end(self, x: Tensor) -> Tensor:
        return x


class LayerScale(nn.Module):
    """s · x, with one number s for a layer, which is not trained."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) to (..., dim)."""
        return x * self.scale
