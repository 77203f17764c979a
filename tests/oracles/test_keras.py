"""Keras 3 (Apache-2.0): the tests of its Attention, AdditiveAttention and MultiHeadAttention layers."""

import math

import pytest
import torch

import regard
from regard import lenses, masks, scores

QUERY = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
KEY = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
VALUE = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
WEIGHTS = lenses.Weights()


def summed_tanh(kind: type[scores.Additive] | type[scores.Concat]) -> scores.Score:
    """Σ tanh(q + k), which is Keras's additive score with a scale of ones and no projections."""
    score = kind(2, 2, 2)
    identity = torch.eye(2)
    with torch.no_grad():
        score.weight.fill_(1.0)
        if isinstance(score, scores.Additive):
            score.query_weight.copy_(identity)
            score.key_weight.copy_(identity)
        else:
            score.matrix.copy_(torch.cat([identity, identity], dim=1))
    return score


@pytest.mark.parametrize(
    ("score", "weights", "output"),
    [
        (scores.Dot(), [[0.269, 0.731], [0.731, 0.269]], [[2.462, 3.462], [1.538, 2.538]]),
        (summed_tanh(scores.Additive), [[0.636, 0.363], [0.363, 0.636]], [[1.727, 2.727], [2.272, 3.272]]),
        (summed_tanh(scores.Concat), [[0.636, 0.363], [0.363, 0.636]], [[1.727, 2.727], [2.272, 3.272]]),
    ],
    ids=["dot", "additive", "concat"],
)
def test_the_two_by_two_toy(score, weights, output):
    seen = regard.observe(QUERY, KEY, VALUE, WEIGHTS, score=score)
    torch.testing.assert_close(seen[WEIGHTS], torch.tensor(weights), atol=1e-3, rtol=0)
    torch.testing.assert_close(seen.output, torch.tensor(output), atol=1e-3, rtol=0)


def test_a_mask_over_keys_and_one_over_queries():
    keys, queries = torch.tensor([True, False]), torch.tensor([[True], [False]])
    seen = regard.observe(QUERY, KEY, VALUE, WEIGHTS, score=scores.Dot(), mask=masks.where(keep=keys))
    assert seen[WEIGHTS].tolist() == [[1.0, 0.0], [1.0, 0.0]]
    both = masks.where(keep=keys) & masks.where(keep=queries)
    assert regard.attention(QUERY, KEY, VALUE, score=scores.Dot(), mask=both).tolist() == [[1.0, 2.0], [0.0, 0.0]]


@pytest.mark.parametrize("key_heads", [8, 4, 2, 1])
def test_heads_of_identity_weights(key_heads):
    query, key = torch.eye(8).expand(1, 8, 8, 8), torch.eye(8).expand(1, key_heads, 8, 8)
    value = (torch.arange(64.0) / 100).view(8, 8).expand(1, key_heads, 8, 8)
    seen = regard.observe(query, key, value, WEIGHTS)
    expected = torch.full((8, 8), 0.1187).fill_diagonal_(0.1691)
    torch.testing.assert_close(seen[WEIGHTS], expected.expand(1, 8, 8, 8), atol=1e-4, rtol=0)
    rows = seen.output.sum(-1)  # the identity of Keras's output projection sums over the dims of a head
    torch.testing.assert_close(rows[..., 0], torch.full((1, 8), 2.406), atol=1e-2, rtol=0)
    torch.testing.assert_close(rows[..., 7], torch.full((1, 8), 2.633), atol=1e-2, rtol=0)
    assert math.isclose(seen[WEIGHTS][0, 0, 0].sum(), 1.0, rel_tol=1e-6)
