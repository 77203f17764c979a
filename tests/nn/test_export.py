"""Programs of torch.export whose batch and lengths may vary, of attention and of layers of torch's after `nn.swap`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import regard
from regard import masks
from regard.nn import MultiheadAttention, swap

DIM, HEADS = 16, 4
SIZES = [(3, 9, 9), (2, 100, 5)]
"""Batches, queries and keys of the calls of an exported program, on both sides of torch's limits for short ones."""


class Called(nn.Module):
    """A function of queries and keys as a module."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.function(query, key)


class Swapped(nn.Module):
    """One of torch's layers with regard's attention, over itself or over another sequence."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = nn.Sequential(layer), call
        swap(self.layer)

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        return self.call(self.layer[0], query, key)


def attend(query: Tensor, key: Tensor, **options: Any) -> Tensor:
    query, key = (tensor.unflatten(-1, (HEADS, -1)).transpose(1, 2) for tensor in (query, key))
    return regard.attention(query, key, key, **options)


def multihead() -> nn.Module:
    return nn.MultiheadAttention(DIM, HEADS, batch_first=True)


LAYER = {"nhead": HEADS, "dim_feedforward": 23, "batch_first": True, "dropout": 0.0}
MODULES: dict[str, Callable[[], nn.Module]] = {
    "attention": lambda: Called(lambda q, k: attend(q, q)),
    "no heads": lambda: Called(lambda q, k: regard.attention(q, q, q)),
    "cross": lambda: Called(lambda q, k: attend(q, k)),
    "causal": lambda: Called(lambda q, k: attend(q, k, mask=masks.causal())),
    "torch's function": lambda: Called(lambda q, k: regard.scaled_dot_product_attention(q, k, k)),
    "multihead": lambda: Swapped(multihead(), lambda layer, q, k: layer(q, k, k, need_weights=False)[0]),
    "weights": lambda: Swapped(multihead(), lambda layer, q, k: layer(q, k, k)[1]),
    "encoder layer": lambda: Swapped(nn.TransformerEncoderLayer(DIM, **LAYER), lambda layer, q, k: layer(q)),
    "decoder layer": lambda: Swapped(nn.TransformerDecoderLayer(DIM, **LAYER), lambda layer, q, k: layer(q, k)),
}


@pytest.mark.parametrize(
    ("name", "training"), [*((name, False) for name in MODULES), ("multihead", True), ("encoder layer", True)]
)
def test_batch_and_lengths_may_vary(name, training):
    module = MODULES[name]().train(training)
    assert not isinstance(module, Swapped) or any(isinstance(each, MultiheadAttention) for each in module.modules())
    vary = {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    exported = torch.export.export(
        module, (torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)), dynamic_shapes=(vary, vary), strict=False
    ).module()
    for batch, queries, keys in SIZES:
        query, key = torch.randn(batch, queries, DIM), torch.randn(batch, keys, DIM)
        assert torch.allclose(exported(query, key), module(query, key), atol=1e-6)


@pytest.mark.parametrize("keys", [9, 100])
def test_an_exported_program_keeps_nan(keys):
    """Of few keys torch's kernel may lose it; the program is for any number of them."""
    exported = torch.export.export(
        Called(lambda q, k: attend(q, k)),
        (torch.randn(2, 5, DIM), torch.randn(2, 7, DIM)),
        dynamic_shapes=({1: Dim.DYNAMIC}, {1: Dim.DYNAMIC}),
    ).module()
    query, key = torch.randn(2, 3, DIM), torch.randn(2, keys, DIM)
    key[0, 4, DIM // HEADS + 1] = float("nan")
    output = exported(query, key)
    assert output[0, 1].isnan().all()
    assert output[0, [0, 2, 3]].isfinite().all()
    assert output[1].isfinite().all()
