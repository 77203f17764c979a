"""LARA against its estimate written out from densities in float64, with gradients; and against softmax attention."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks, normalizers
from regard.approximations import Lara, lara_attention, segment_means
from regard.errors import ConfigurationError, ShapeError


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def log_density(points: Tensor, mean: Tensor) -> Tensor:
    """Log N(x; μ, I)."""
    return -((points - mean).square() + math.log(2 * math.pi)).sum(-1) / 2


def features(samples: Tensor, rows: Tensor) -> Tensor:
    """ξ(x, ω) = e^(ω · x - ‖x‖² / 2), (samples, rows)."""
    return (samples @ rows.mT - rows.square().sum(-1) / 2).exp()


def sums(query: Tensor, key: Tensor, value: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Those over samples whose quotient is the output, of one head."""
    centres = segment_means(query, len(noise))
    means = centres + segment_means(key, len(noise))
    samples, nearness = means + noise, (query @ centres.mT).softmax(-1)
    density = log_density(samples.unsqueeze(1), means).exp()  # [c, c'] of sample c by distribution c'
    balanced = density.diagonal() / density.sum(-1)
    chosen = (balanced + nearness - nearness.mean(-1, keepdim=True)).clamp(min=1e-8)
    importance = log_density(samples, torch.zeros_like(means)).exp() / density.diagonal()
    pairs = (chosen * importance * features(samples, query).mT) @ features(samples, key)
    return pairs @ value, pairs.sum(-1, keepdim=True)


def by_densities(tensors: list[Tensor], landmarks: int, seed: int | None, scale: float) -> Tensor:
    """The same of all heads, with noise for each."""
    query, key, value = tensors
    batch, heads = query.shape[:2]
    count = min(landmarks, query.shape[2], key.shape[2])
    noise = torch.zeros(batch, heads, count, query.shape[3], dtype=torch.float64)
    if seed is not None:
        noise = torch.randn(noise.shape, generator=torch.Generator().manual_seed(seed)).double()
    key, value = (each.repeat_interleave(heads // each.shape[1], 1) for each in (key, value))
    query, key = query * scale**0.5, key * scale**0.5
    found = []
    for of in zip(*(each.flatten(0, 1) for each in (query, key, value, noise)), strict=True):
        above, below = sums(*of)
        found.append(above / below)
    return torch.stack(found).view(*query.shape[:3], value.shape[-1])


@pytest.mark.parametrize(("queries", "keys", "landmarks"), [(11, 13, 5), (13, 13, 4), (5, 13, 7), (7, 7, 1)])
@pytest.mark.parametrize(("seed", "scale"), [(None, None), (3, None), (3, 0.2)])
def test_it_is_the_estimate_with_all_gradients(queries, keys, landmarks, seed, scale):
    leaves = [drawn(2, 4, queries, 8), drawn(2, 2, keys, 8), drawn(2, 2, keys, 5)]
    found = lara_attention(*leaves, landmarks=landmarks, seed=seed, scale=scale)
    expected = by_densities(leaves, landmarks, seed, 8**-0.5 if scale is None else scale)
    torch.testing.assert_close(found, expected)
    above = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, leaves, above) for each in (found, expected)))


def test_float32_and_bfloat16():
    leaves = [drawn(1, 2, 67, 16).detach() for _ in range(3)]
    for dtype, roundings in ((torch.float32, 64), (torch.bfloat16, 1)):
        low = [tensor.to(dtype) for tensor in leaves]
        expected = by_densities([tensor.double() for tensor in low], 7, 3, 0.25)
        found = lara_attention(*low, landmarks=7, seed=3)
        assert found.dtype == dtype
        assert (found.double() - expected).abs().max() < roundings * torch.finfo(dtype).eps * expected.abs().max()


def test_large_queries_and_keys_neither_overflow_nor_vanish():
    leaves = [drawn(1, 2, 67, 16).detach() for _ in range(3)]
    query, key = 20 * leaves[0], 20 * leaves[1]
    found = lara_attention(query.float(), key.float(), leaves[2].float(), landmarks=7, seed=3)
    exact = lara_attention(query, key, leaves[2], landmarks=7, seed=3)
    # Logarithms of shares are sums of products of some thousands, whose roundings shares have as well.
    largest = (query.norm(dim=-1).max() + key.norm(dim=-1).max()) ** 2
    assert (found - exact).abs().max() < 4 * largest * torch.finfo(torch.float32).eps * exact.abs().max()


def test_both_sums_are_unbiased():
    """The mean of their draws is that of softmax attention, of e^(q · k), within five standard errors."""
    query, key, value = drawn(2, 4).detach() / 2, drawn(5, 4).detach() / 2, drawn(5, 3).detach()
    draws = [torch.cat(sums(query, key, value, torch.randn(2, 4, dtype=torch.float64)), -1) for _ in range(500)]
    exact = (query @ key.mT).exp() @ torch.cat([value, torch.ones(5, 1, dtype=torch.float64)], -1)
    deviation, mean = torch.std_mean(torch.stack(draws), 0)
    assert ((mean - exact).abs() < 5 * deviation / 500**0.5).all()


@pytest.mark.parametrize(("queries", "keys"), [(0, 7), (7, 0)])
def test_empty_sequences(queries, keys):
    found = lara_attention(drawn(1, 2, queries, 8), drawn(1, 2, keys, 8), drawn(1, 2, keys, 3), landmarks=4)
    assert found.shape == (1, 2, queries, 3)
    assert not found.any()


def test_it_is_compared_with_softmax_attention_and_its_weights_are_those_of_the_output():
    query, key, value = torch.randn(3, 1, 2, 67, 16).unbind()
    columns = torch.eye(67).expand(1, 2, 67, 67)
    told: dict[str, Any] = {"lenses": [lenses.Weights()], "lengths": ()}
    found = regard.approximation(query / 2, key / 2, value, Lara(7, seed=3), redraws=3, **told)
    weights = found[told["lenses"][0]].approximate
    torch.testing.assert_close(weights, lara_attention(query / 2, key / 2, columns, landmarks=7, seed=3))
    assert found.error < 1.5
    assert found.spread
    with pytest.raises(ConfigurationError, match="redraws is 3, but LARA by 7 samples is not random"):
        regard.approximation(query, key, value, Lara(7), redraws=3, lengths=())


def test_what_it_cannot_compute_is_said():
    query = torch.randn(1, 2, 37, 8)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"causal": True}, "no mask for LARA, whose samples are drawn near means of all positions: leave the mask out"),
        ({"mask": masks.padding([20])}, "pass each sequence without padding"),
        ({"bias": biases.alibi(2)}, "no scores of single pairs, so it cannot have a bias"),
        ({"normalizer": normalizers.Sparsemax()}, "LARA approximates softmax attention, and this is sparsemax"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            regard.approximation(query, query, query, Lara(4), lengths=(), **options)
    with pytest.raises(ConfigurationError, match="landmarks is 0; it needs at least 1"):
        lara_attention(query, query, query, landmarks=0)
    with pytest.raises(ConfigurationError, match="seed is 0.5; it needs a whole number, or None for no noise"):
        lara_attention(query, query, query, landmarks=4, seed=0.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"scale is -1.0; LARA multiplies queries and keys by its root"):
        lara_attention(query, query, query, landmarks=4, scale=-1.0)
    with pytest.raises(ShapeError, match="key"):
        lara_attention(query, query[..., :3], query, landmarks=4)
