"""Log-linear attention, against its weights in float64, of which the levels come from blocks by hand."""

import pytest
import torch

from regard.errors import ConfigurationError, ShapeError
from regard.linear import Identity, linear_attention, log_linear_attention


def inputs(length, heads=4, key_heads=2):
    def drawn(*shape):
        return torch.randn(2, *shape, dtype=torch.float64)

    levels = drawn(heads, length, max(length - 1, 0).bit_length() + 1)
    rows = drawn(heads, length, 7), drawn(key_heads, length, 7), drawn(key_heads, length, 3)
    return *rows, levels, -drawn(key_heads, length).exp() / 8


def written_out(query, key, value, levels, decay):
    """Blocks before each position, the last one first: each as long as the lowest bit of where it ends."""
    length, group = query.shape[2], query.shape[1] // key.shape[1]
    key, value, ends = (each.repeat_interleave(group, 1) for each in (key, value, decay.cumsum(-1)))
    level = torch.zeros(length, length, dtype=torch.long)
    for t in range(length):
        end = t
        while end:
            size = end & -end
            level[t, end - size : end] = size.bit_length()
            end -= size
    factors = levels.gather(-1, level.expand(*levels.shape[:2], length, length))
    decays = (ends[..., :, None] - ends[..., None, :]).tril().exp()
    return ((query @ key.mT) / query.shape[-1] ** 0.5 * decays * factors).tril() @ value


@pytest.mark.parametrize("length", [1, 2, 3, 37, 64, 65, 131, 192, 331])
def test_it_has_a_factor_for_each_block(length):
    tensors = [tensor.requires_grad_() for tensor in inputs(length)]
    query, key, value, levels, decay = tensors
    results = log_linear_attention(query, key, value, levels=levels, decay=decay), written_out(*tensors)
    torch.testing.assert_close(*results)
    upstream = torch.randn_like(results[0])
    for one, other in zip(*(torch.autograd.grad(each, tensors, upstream) for each in results), strict=True):
        torch.testing.assert_close(one, other)


def test_levels_of_one_are_linear_attention():
    query, key, value, levels, _ = inputs(257)
    found = log_linear_attention(query, key, value, levels=torch.ones_like(levels[..., :1]).expand_as(levels))
    expected = linear_attention(query, key, value, feature_map=Identity(), normalize=False, causal=True)
    torch.testing.assert_close(found, expected)


def test_strong_decays_in_float32():
    query, key, value, levels, decay = (tensor.float() for tensor in inputs(331))
    decay = 400 * decay
    decay[:, :, 100] = -torch.inf
    found = log_linear_attention(query, key, value, levels=levels, decay=decay)
    exact = written_out(*(each.double() for each in (query, key, value, levels, decay.clamp(min=-1e6))))
    assert (found - exact).abs().max() < 64 * torch.finfo(torch.float32).eps * exact.abs().max()


def test_one_head_no_tokens_and_half_precision_of_levels():
    query, key, value, levels, decay = inputs(37, heads=2)
    whole = log_linear_attention(query, key, value, levels=levels, decay=decay)
    alone = log_linear_attention(query[1, 1], key[1, 1], value[1, 1], levels=levels[1, 1], decay=decay[1, 1])
    torch.testing.assert_close(alone, whole[1, 1])
    low = [tensor.bfloat16() for tensor in (query, key, value, levels)]
    found = log_linear_attention(*low[:3], levels=low[3], decay=decay)
    exact = log_linear_attention(*(each.double() for each in low[:3]), levels=low[3].double(), decay=decay)
    assert found.dtype is torch.bfloat16
    assert (found - exact).abs().max() < 2 * torch.finfo(torch.bfloat16).eps * exact.abs().max()
    query, key, value, levels, decay = inputs(0)
    assert log_linear_attention(query, key, value, levels=levels, decay=decay).shape == (2, 4, 0, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"levels": torch.ones(2, 4, 37, 6)}, ShapeError, "6 numbers for each query; 37 positions need 7"),
        ({"levels": torch.ones(2, 4, 36, 7)}, ShapeError, r"levels has the shape .* needs \(2, 4, 37, levels\)"),
        ({"decay": -torch.ones(2, 2, 37, 7)}, ShapeError, "log-linear attention takes one for each token"),
        ({"decay": torch.ones(2, 2, 37)}, ConfigurationError, "decay has values up to 1"),
        ({"scale": float("nan")}, ConfigurationError, "scale is nan"),
    ],
)
def test_bad_levels_are_named(change, error, message):
    query, key, value, levels, decay = inputs(37)
    with pytest.raises(error, match=message):
        log_linear_attention(query, key, value, **{"levels": levels, "decay": decay, **change})


def test_queries_and_keys_are_as_many():
    query, key, value, levels, _ = inputs(37)
    with pytest.raises(ShapeError, match="query has 9 positions and key 37"):
        log_linear_attention(query[:, :, :9], key, value, levels=levels[:, :, :9])
