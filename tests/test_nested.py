"""Nested tensors, jagged and strided: each sequence as by itself; what cannot be is refused with what helps."""

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


def strided(parts: list[Tensor]) -> Tensor:
    """(batch, heads, length, dim) with contiguous sequences, which torch's own function needs."""
    return torch.nested.as_nested_tensor([part.transpose(0, 1).contiguous() for part in parts], layout=torch.strided)


LAYOUTS = pytest.mark.parametrize("nested", [jagged, strided])
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


@LAYOUTS
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("lengths", [(QUERIES, QUERIES), (QUERIES, KEYS), (KEYS, QUERIES)], ids=str)
def test_each_sequence_by_itself(name, lengths, nested):
    """Grouped heads, values of another dim, lengths of queries and keys alike or not, empty sequences; gradients."""
    parts = [
        sequences(of, *size) for of, size in zip((lengths[0], *lengths[1:] * 2), ((4, 5), (2, 5), (2, 3)), strict=True)
    ]
    query, key, value = map(nested, parts)
    output = regard.attention(query, key, value, **OPTIONS[name])
    assert output.is_nested
    assert output.layout is query.layout
    each = [
        regard.attention(*(t.transpose(0, 1)[None] for t in one), kernel="reference", **OPTIONS[name])[0]
        for one in zip(*parts, strict=True)
    ]
    found = torch.cat([one.transpose(0, 1) for one in output.unbind()])
    expected = torch.cat([one.transpose(0, 1) for one in each])
    assert torch.allclose(found, expected, atol=1e-12)
    above = torch.randn_like(expected)
    leaves = [tensor for part in parts for tensor in part]
    for mine, truth in zip(
        torch.autograd.grad(found, leaves, above), torch.autograd.grad(expected, leaves, above), strict=True
    ):
        assert torch.allclose(mine, truth, atol=1e-12)


@LAYOUTS
def test_a_result_has_the_lengths_of_the_queries(nested):
    query = nested(sequences(QUERIES, 4, 5))
    sum_of_both = regard.attention(query, query, query) + query
    assert [part.shape for part in sum_of_both.unbind()] == [part.shape for part in query.unbind()]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided], ids=str)
def test_without_heads(layout):
    x = torch.nested.as_nested_tensor([torch.randn(n, 5) for n in QUERIES], layout=layout)
    output = regard.attention(x, x, x, mask=masks.causal())
    for found, one in zip(output.unbind(), x.unbind(), strict=True):
        assert torch.allclose(found, regard.attention(one, one, one, mask=masks.causal()), atol=1e-6)


@LAYOUTS
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("keys", [QUERIES, KEYS], ids=str)
def test_torch_s_function(is_causal, keys, nested):
    """Causal from the start of each sequence, as torch's function of each."""
    parts = sequences(QUERIES, 4, 8), sequences(keys, 4, 8), sequences(keys, 4, 8)
    query, key, value = map(nested, parts)
    ours = regard.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    for mine, *one in zip(ours.unbind(), *parts, strict=True):
        q, k, v = (tensor.transpose(0, 1) for tensor in one)
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        assert torch.allclose(mine, theirs, atol=1e-12)


def test_torch_s_function_of_nested_tensors():
    """Where torch's computes them on this device: strided, neither causal nor of other lengths of keys."""
    parts = [part.detach().requires_grad_() for part in sequences((3, 5, 7), 4, 8)]
    above = [torch.randn(4, n, 8, dtype=torch.float64) for n in (3, 5, 7)]
    both = []
    for function in (regard.scaled_dot_product_attention, torch.nn.functional.scaled_dot_product_attention):
        query, key, value = (strided(parts) for _ in range(3))
        output = function(query, key, value).unbind()
        both.append([*output, *torch.autograd.grad(output, parts, above)])
    assert all(torch.allclose(mine, theirs, atol=1e-12) for mine, theirs in zip(*both, strict=True))


def test_groups_of_heads_are_asked_for_as_torch_does():
    query, key = jagged(sequences(QUERIES, 4, 5)), jagged(sequences(QUERIES, 2, 5))
    with pytest.raises(ShapeError, match="query has 4 heads and key 2, value 2: pass enable_gqa=True"):
        regard.scaled_dot_product_attention(query, key, key)
    found = regard.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    for one, q, k in zip(found.unbind(), query.unbind(), key.unbind(), strict=True):
        assert torch.allclose(one[None], regard.attention(q[None], k[None], k[None]), atol=1e-12)


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
    for key in (dense, strided(sequences(QUERIES, 4, 5))):
        with pytest.raises(ShapeError, match="key is no nested tensor of layout=torch.jagged, but the query is"):
            regard.attention(x, key, key)
    with pytest.raises(
        MaskError, match=r"a mask is by distance.*this is a torch.bool tensor \(3, 3\): pass .*to_padded_tensor"
    ):
        regard.scaled_dot_product_attention(x, x, x, torch.ones(3, 3).bool())
    lengths_first = torch.nested.as_nested_tensor(sequences(QUERIES, 4, 5), layout=torch.strided)
    with pytest.raises(ShapeError, match=r"query has sequences of the shapes \[\(3, 4, 5\), \(5, 4.*transpose\(1, 2\)"):
        regard.attention(lengths_first, lengths_first, lengths_first)
    with pytest.raises(ShapeError, match="whose ragged axis is 1"):
        regard.attention(*(x.transpose(1, 2) for _ in range(3)))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_elsewhere(layout):
    """Where no function but `attention` and torch's takes them."""
    x = torch.nested.nested_tensor([torch.randn(n, 8) for n in (3, 5)], layout=layout)
    for function in (regard.attention_with_lse, regard.explain, regard.observe, regard.linear_attention):
        with pytest.raises(
            ShapeError, match=r"nested tensor of the layout .*to_padded_tensor\(query, 0.0\).*alone take"
        ):
            function(x, x, x)
    with pytest.raises(ShapeError, match=r"key is a nested tensor"):
        regard.attention(torch.randn(2, 5, 8), x, x)
