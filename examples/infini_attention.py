"""A memory of constant size: each head also reads a matrix into which all earlier segments were written.

    python examples/infini_attention.py [--picture right.svg]

The task is that of `memorizing_transformer.py`, and so is all but the memory. There it holds every earlier key and
value; here, in each head, a matrix M of 16 x 16 and a vector z of 16 for a document of any length (Munkhdalai et al.
2024, "Leave No Context Behind", arXiv 2404.07143, section 2.1). With φ = elu + 1, segment s first reads what the
segments before have written, and then writes itself:

    c_memory = φ(Q) M / (φ(Q) z)
    M += φ(K)ᵀ (V - φ(K) M / (φ(K) z))        z += Σ_j φ(k_j)

"linear" writes φ(K)ᵀ V instead. The gate of each head is that of the other example, and gradients flow through the
memory.

Printed: as there, of both updates. The matrix has room for few values, and documents of 512 and 1,024 tokens say 64 and
128 of them, where those of the training say 32.
"""

from __future__ import annotations

import argparse

import torch
from memorizing_transformer import DIM, HEADS, Reader, compare, draw_shares, gated, train
from torch import Tensor, nn

import regard
from regard import masks
from regard.linear import Elu
from regard.nn import Projections

Memory = tuple[Tensor, Tensor]
"""M (batch, heads, 16, 16) and z (batch, heads, 16, 1)."""

FEATURES = Elu()


def read(memory: Memory, heads: Tensor) -> Tensor:
    """φ(X) M / (φ(X) z): queries or keys (batch, heads, 32, 16) to values of the same shape."""
    features = FEATURES(heads)
    return features @ memory[0] / (features @ memory[1])


class InfiniAttention(nn.Module):
    """Attention of a segment to itself, and what it reads of a compressive memory."""

    def __init__(self, *, delta: bool) -> None:
        super().__init__()
        self.delta = delta
        self.projections = Projections(DIM, HEADS, bias=False)
        self.gate = nn.Parameter(torch.zeros(HEADS))

    def forward(self, x: Tensor, memory: Memory | None) -> tuple[Tensor, Memory]:
        """The output for a segment (batch, 32, dim), and the memory into which it was written."""
        query, (key, value) = self.projections.queries(x), self.projections.keys_and_values(x)
        context = regard.attention(query, key, value, mask=masks.causal())
        if memory is not None:
            context = gated(self.gate, read(memory, query), context)
        return self.projections.project_output(context), self.written(memory, key, value)

    def written(self, memory: Memory | None, key: Tensor, value: Tensor) -> Memory:
        """The memory with the keys and values of a segment."""
        features = FEATURES(key)
        if memory is not None and self.delta:
            value = value - read(memory, key)
        new = features.mT @ value, features.sum(2).unsqueeze(-1)
        return new if memory is None else (memory[0] + new[0], memory[1] + new[1])


def main(arguments: list[str] | None = None) -> dict[str, float]:
    """Train with both updates, print the figures and return them."""
    parser = argparse.ArgumentParser(description="A compressive memory beside attention.")
    parser.add_argument("--updates", type=int, default=150, help="of the training")
    parser.add_argument("--picture", help="draw right answers by distance here: .png, .svg or .pdf")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    models = {name: Reader(InfiniAttention(delta=name == "delta")) for name in ("delta", "linear")}
    for model in models.values():
        train(model, options.updates)
    figures, longest = compare(models)
    if options.picture:
        draw_shares(list(models), longest, options.picture)
    return figures


if __name__ == "__main__":
    main()
