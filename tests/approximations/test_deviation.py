"""Errors of outputs and weights, against their formulas with all weights in memory."""

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.approximations import Method
from regard.approximations.deviation import head_errors, row_errors
from regard.errors import ConfigurationError
from regard.lenses import Distance, Entropy, Pooled, Received, TopK, Weights
from regard.linear import Elu

B, H, M = 2, 3, 41


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(3, B, H, M, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return query, key, value


def elu_weights(query, key, keep):
    products = (Elu()(query) @ Elu()(key).mT) * keep
    return products / products.sum(-1, keepdim=True)


def test_errors_of_rows_and_heads():
    exact, other = torch.randn(2, B, H, M, 8, dtype=torch.float64)
    rows = row_errors(exact, other)
    assert rows.shape == (B, H, M)
    expected = (exact - other).flatten(2).norm(dim=-1) / exact.flatten(2).norm(dim=-1)
    torch.testing.assert_close(head_errors(rows), expected)
    torch.testing.assert_close(
        rows[1, 2, 7], (exact - other)[1, 2, 7].norm() / exact[1, 2].square().sum(-1).mean().sqrt()
    )
    assert bool((row_errors(torch.zeros(3, 2), torch.zeros(3, 2)) == 0).all())
    assert bool(row_errors(torch.zeros(3, 2), torch.ones(3, 2)).isinf().all())


@pytest.mark.parametrize("causal", [False, True])
def test_differences_of_the_weights_are_those_of_whole_weights(causal):
    query, key, value = tensors()
    keep = torch.ones(M, M).tril() if causal else torch.ones(M, M)
    exact = ((query @ key.mT) / 8**0.5).masked_fill(keep == 0, -torch.inf).softmax(-1)
    other = elu_weights(query, key, keep)
    cells, received, spread = Pooled((5, 6), reduce="sum"), Received(), Entropy()
    found = regard.approximation(
        query, key, value, Elu(), causal=causal, lenses=[cells, received, spread, Distance(), TopK(3)], lengths=()
    )
    assert found.weights is not None
    torch.testing.assert_close(found.weights.total_variation, (exact - other).abs().sum(-1) / 2)
    torch.testing.assert_close(found.total_variation.item(), float((exact - other).abs().sum(-1).mean() / 2))
    for lens, compute in {
        received: lambda weights: weights.sum(-2),
        spread: lambda weights: -torch.special.xlogy(weights, weights).sum(-1),
    }.items():
        torch.testing.assert_close(found[lens].exact, compute(exact))
        torch.testing.assert_close(found[lens].approximate, compute(other))
        expected = float((compute(other) - compute(exact)).abs().mean())
        assert found[lens].difference == pytest.approx(expected)
    assert found[cells].approximate.shape == (B, H, 5, 6)
    torch.testing.assert_close(found[cells].approximate.sum((-2, -1)), torch.full((B, H), float(M)).double())
    torch.testing.assert_close(found[TopK(3)].approximate.weights, other.topk(3).values)
    assert found[TopK(3)].difference is None


def test_weights_of_an_approximation_that_is_exact_do_not_differ():
    query, key, value = tensors()
    found = regard.approximation(query, key, value, masks.causal(), causal=True, lengths=())
    assert found.error < 1e-12
    assert found.weights is not None
    assert float(found.weights.total_variation.max()) < 1e-12
    assert found[Entropy()].difference == pytest.approx(0, abs=1e-12)


def test_an_approximation_that_keeps_one_key_of_n_has_a_known_total_variation():
    value = torch.randn(10, 4)
    query = key = torch.zeros(10, 4)  # all weights are 1/10, and those of the approximation 1
    found = regard.approximation(query, key, value, masks.window(before=0, after=0), lengths=())
    assert found.weights is not None
    torch.testing.assert_close(found.weights.total_variation, torch.full((1, 1, 10), 0.9))


def test_the_weights_themselves():
    query, key, value = tensors()
    found = regard.approximation(query.requires_grad_(), key, value, Elu(), lenses=[Weights()], lengths=())
    torch.testing.assert_close(found[Weights()].approximate, elu_weights(query, key, 1.0).detach())
    torch.testing.assert_close(found[Weights()].exact, ((query @ key.mT) / 8**0.5).softmax(-1).detach())


def test_a_lens_that_reads_no_tiles_is_refused():
    with pytest.raises(ConfigurationError, match=r"Weights\(.*cannot show those of an approximation: use a lens"):
        regard.approximation(*tensors(), Elu(), lenses=[Weights(rows=slice(2, 7))], lengths=())
    with pytest.raises(ConfigurationError, match="lenses from regard.lenses"):
        regard.approximation(*tensors(), Elu(), lenses=[Entropy], lengths=())  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match="was not measured, but Entropy"):
        regard.approximation(*tensors(), Elu(), lenses=[Entropy()], lengths=())[Received()]


class Doubled(Method):
    """A method of a user's, without weights."""

    def why_not(self, problem):
        return "" if problem.queries > 3 else "there are too few queries"

    def run(self, problem):
        return 2 * regard.attention(problem.pairs.query, problem.pairs.key, problem.value)


def test_a_method_of_ones_own():
    query, key, value = tensors()
    found = regard.approximation(query, key, value, Doubled(), lengths=())
    assert found.error == pytest.approx(1.0)
    assert found.weights is None
    torch.testing.assert_close(found.heads, torch.ones(B, H, dtype=torch.float64))
    with pytest.raises(ConfigurationError, match="cannot compute this attention: there are too few queries"):
        regard.approximation(query[..., :2, :], key, value, Doubled(), lengths=())
