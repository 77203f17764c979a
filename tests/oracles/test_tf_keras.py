"""tf-keras (Apache-2.0): the tests of its dense attention layers, ten digits each."""

import pytest
import torch

import regard
from regard import lenses, masks, scores
from regard.scores import Score

QUERY = torch.tensor([[1.0, 1.1, 1.2, 1.3], [2.0, 2.1, 2.2, 2.3]])
KEY = torch.tensor([[1.5, 1.6, 1.7, 1.8], [2.5, 2.6, 2.7, 2.8], [3.5, 3.6, 3.7, 3.8]])
WEIGHTS = lenses.Weights()


def additive(weight: list[float], inner: float = 1.0) -> Score:
    """Σ w · tanh(inner · (q + k)) over as many dims as there are weights."""
    dim = len(weight)
    score = scores.Additive(dim, dim, dim)
    with torch.no_grad():
        score.query_weight.copy_(inner * torch.eye(dim))
        score.key_weight.copy_(inner * torch.eye(dim))
        score.weight.copy_(torch.tensor(weight))
    return score


def column(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)[:, None]


@pytest.mark.parametrize(
    ("score", "expected"),
    [
        (scores.Dot(), [[7.64, 12.24, 16.84], [14.24, 22.84, 31.44]]),
        (
            additive([1.0] * 4),
            [[3.96753427840, 3.99558784825, 3.99940254147], [3.99558784825, 3.99940254147, 3.99991913657]],
        ),
        (
            additive([0.5, 0.6, 0.7, 0.8]),
            [[2.58044532581, 2.59734317449, 2.59964024652], [2.59734317449, 2.59964024652, 2.59995130916]],
        ),
    ],
    ids=["dot", "concat", "additive"],
)
def test_scores_of_four_dims(score, expected):
    torch.testing.assert_close(score.pairs(QUERY, KEY).scores(), torch.tensor(expected))


@pytest.mark.parametrize(
    ("score", "query", "key", "expected"),
    [
        (scores.Dot(), 1.1, 1.6, 1.76),
        (scores.ScaledDot(-2.0), 1.1, 1.6, -3.52),
        (additive([1.0], inner=2.0), 1.1, 1.6, 0.999959202),
        (additive([0.5]), 1.1, 1.6, 0.49550372683),
        (additive([0.5]), 2.1, 2.6, 0.49991728277),
    ],
)
def test_scores_of_one_dim(score, query, key, expected):
    torch.testing.assert_close(score.pairs(column(query), column(key)).scores(), torch.tensor([[expected]]))


@pytest.mark.parametrize(
    ("score", "value", "weights", "output"),
    [
        (scores.Dot(), (1.6, 0.7, -0.8), (0.72908792234, 0.27091207765), 1.3561791301),
        (scores.Dot(), (0.5, 0.8, -0.3), (0.72908792234, 0.27091207765), 0.58127362329),
        (additive([0.5]), (1.6, 0.7, -0.8), (0.50552495521, 0.49447504478), 1.15497245968),
        (additive([0.5]), (0.5, 0.8, -0.3), (0.50552495521, 0.49447504478), 0.64834251342),
    ],
)
def test_the_last_key_masked(score, value, weights, output):
    mask = masks.where(keep=torch.tensor([True, True, False]))
    seen = regard.observe(column(1.1), column(1.6, 0.7, -0.8), column(*value), WEIGHTS, score=score, mask=mask)
    torch.testing.assert_close(seen[WEIGHTS], torch.tensor([[*weights, 0.0]]))
    torch.testing.assert_close(seen.output, column(output))


@pytest.mark.parametrize(
    ("score", "weights"),
    [(scores.Dot(), (0.38936076605, 0.61063923394)), (additive([0.5]), (0.57482427975, 0.42517572025))],
)
def test_a_second_query(score, weights):
    mask = masks.padding(lengths=torch.tensor(2))
    seen = regard.observe(
        column(1.1, -0.5), column(1.6, 0.7, -0.8), column(1.6, 0.7, -0.8), WEIGHTS, score=score, mask=mask
    )
    torch.testing.assert_close(seen[WEIGHTS][1], torch.tensor([*weights, 0.0]))


def test_causal_self_attention():
    query = column(0.5, 0.8, -0.3)
    seen = regard.observe(query, query, query, WEIGHTS, score=scores.Dot(), mask=masks.causal())
    torch.testing.assert_close(seen.output, column(0.5, 0.66791409477, 0.26678872577))
    torch.testing.assert_close(seen[WEIGHTS][1], torch.tensor([0.44028635073, 0.55971364926, 0.0]))


@pytest.mark.parametrize(
    ("length", "weights", "output"),
    [
        (2, (0.73105857863, 0.26894142137, 0.0), 1.35795272077),
        (3, (0.42231879825, 0.15536240349, 0.42231879825), 0.44660872104),
    ],
)
def test_given_scores(length, weights, output):
    seen = regard.observe(
        torch.zeros(1, 1),
        torch.zeros(3, 1),
        column(1.6, 0.7, -0.8),
        WEIGHTS,
        bias=torch.tensor([1.0, 0.0, 1.0]),
        mask=masks.padding(lengths=torch.tensor(length)),
    )
    torch.testing.assert_close(seen[WEIGHTS], torch.tensor([weights]))
    torch.testing.assert_close(seen.output, column(output))
