"""Nested tensors of layout=torch.jagged: each sequence as by itself; others are refused with what helps."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.errors import ConfigurationError, MaskError, ShapeError

QUERIES, KEYS = (3, 5, 0, 7), (4, 2, 1, 11)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.causal() & masks.window(before=2)},
    "alibi": {"bias": biases.alibi(4), "mask": masks.window(2, 2)},
    "sinks and softcap": {"sinks": torch.randn(4).double(), "softcap": 2.0, "scale": 0.3},
}


def sequences(lengths: tuple[int, ...], heads: int, dim: int) -> list[Tensor]:
    return [torch.randn(length, heads, dim, dtype=torch.float64, requires_grad=True) for length in lengths]


def jagged(parts: list[Tensor]) -> Tensor:
    """(batch, heads, length, dim), as torch's documentation makes it."""
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [(QUERIES, QUERIES), (QUERIES, KEYS), (KEYS, QUERIES)], ids=str)
def test_each_sequence_by_itself(name, lengths):
    """Grouped heads, values of another dim, lengths of queries and keys alike or not, empty sequences; gradients."""
    parts = [
        sequences(of, *size) for of, size in zip((lengths[0], *lengths[1:] * 2), ((4, 5), (2, 5), (2, 3)), strict=True)
    ]
    output = regard.attention(*map(jagged, parts), **OPTIONS[name])
    assert output.is_nested
    each = [
        regard.attention(*(t.transpose(0, 1)[None] for t in one), kernel="reference", **OPTIONS[name])[0]
        for one in zip(*parts, strict=True)
    ]
    found = output.transpose(1, 2).values()
    expected = torch.cat([one.transpose(0, 1) for one in each])
    assert torch.allclose(found, expected, atol=1e-12)
    above = torch.randn_like(expected)
    leaves = [tensor for part in parts for tensor in part]
    for mine, truth in zip(
        torch.autograd.grad(found, leaves, above), torch.autograd.grad(expected, leaves, above), strict=True
    ):
        assert torch.allclose(mine, truth, atol=1e-12)


def test_a_result_has_the_lengths_of_the_queries():
    query = jagged(sequences(QUERIES, 4, 5))
    assert (regard.attention(query, query, query) + query).shape == query.shape


def test_without_heads():
    x = torch.nested.as_nested_tensor([torch.randn(n, 5) for n in QUERIES], layout=torch.jagged)
    output = regard.attention(x, x, x, mask=masks.causal())
    for found, one in zip(output.unbind(), x.unbind(), strict=True):
        assert torch.allclose(found, regard.attention(one, one, one, mask=masks.causal()), atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("keys", [QUERIES, KEYS], ids=str)
def test_torch_s_function(is_causal, keys):
    """Causal from the start of each sequence, as torch's function of each."""
    parts = sequences(QUERIES, 4, 8), sequences(keys, 4, 8), sequences(keys, 4, 8)
    query, key, value = map(jagged, parts)
    ours = regard.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    for mine, *one in zip(ours.unbind(), *parts, strict=True):
        q, k, v = (tensor.transpose(0, 1) for tensor in one)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        assert torch.allclose(mine, theirs, atol=1e-12)


def test_what_is_refused():
    x = jagged(sequences(QUERIES, 4, 5))
    other = jagged(sequences(KEYS, 4, 5))
    dense = torch.randn(4, 4, 3, 5, dtype=torch.float64)
    with pytest.raises(MaskError, match=r"a mask is by distance.*padding.*to_padded_tensor\(query, 0.0\)"):
        regard.attention(x, x, x, mask=masks.padding([1, 2, 0, 3]))
    with pytest.raises(MaskError, match=r"a bias is by distance.*to_padded_tensor"):
        regard.attention(x, x, x, bias=torch.zeros(3, 3))
    with pytest.raises(ConfigurationError, match="have the positions from 0 on"):
        regard.attention(x, x, x, query_positions=torch.arange(3))
    with pytest.raises(ShapeError, match=r"key those of the lengths \[3, 5, 0, 7\], value \[4, 2, 1, 11\]"):
        regard.attention(x, x, other)
    with pytest.raises(ShapeError, match="key is no nested tensor of layout=torch.jagged"):
        regard.attention(x, dense, dense)
    with pytest.raises(ShapeError, match="whose ragged axis is 1"):
        regard.attention(*(x.transpose(1, 2) for _ in range(3)))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_elsewhere(layout):
    """Of torch's older layout everywhere, and jagged ones where no function but `attention` takes them."""
    x = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5)], layout=layout)
    functions = [regard.attention_with_lse, regard.explain, regard.observe, regard.linear_attention]
    if layout is torch.strided:
        functions += [regard.attention, regard.scaled_dot_product_attention]
    for function in functions:
        with pytest.raises(ShapeError, match=r"nested tensor of the layout .*to_padded_tensor\(query, 0.0\).*jagged$"):
            function(x, x, x)
    with pytest.raises(ShapeError, match=r"key is a nested tensor"):
        regard.attention(torch.randn(2, 5, 8), x, x)
