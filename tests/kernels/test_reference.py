"""The reference has every derivative, first and second, by finite differences in float64."""

import pytest
import torch

import regard
from regard import biases, masks, scores
from regard.core.score_forms import PairForm


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


KEEP = torch.tensor([[True, False, True, True], [False] * 4, [False, True, False, False]])
CALLS = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "empty row": {"mask": KEEP},
    "softcap": {"softcap": 1.3, "mask": KEEP},
    "general": {"score": scores.General(2, 2).double()},
    "additive": {"score": scores.Additive(2, 2, 3).double(), "mask": KEEP},
    "concat": {"score": scores.Concat(2, 2, 3).double()},
    "location": {"score": scores.Location(2, 5).double(), "mask": masks.causal()},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_query_key_value(call, check):
    tensors = rand(1, 2, 3, 2), rand(1, 1, 4, 2), rand(1, 1, 4, 2)

    def attend(*given: torch.Tensor) -> torch.Tensor:
        return regard.attention(*given, kernel="reference", **CALLS[call])

    assert check(attend, tensors)


@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_bias_sinks_center_and_sigma(check):
    tensors = rand(1, 2, 3, 2), rand(1, 2, 4, 2), rand(1, 2, 4, 2)
    center, sigma = rand(3), rand(1).detach().abs().add(1).requires_grad_()

    def attend(bias: torch.Tensor, sinks: torch.Tensor, center: torch.Tensor, sigma: torch.Tensor):
        both = biases.tensor(bias) + biases.gaussian(center, sigma)
        return regard.attention_with_lse(*tensors, bias=both, sinks=sinks, mask=KEEP)

    assert check(attend, (rand(2, 1, 4), rand(2), center, sigma))


@pytest.mark.parametrize("call", ["general", "additive", "concat", "location"])
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_parameters_of_scores(call, check):
    score = CALLS[call]["score"]
    names = [name for name, _ in score.named_parameters()]
    query, key, value = rand(3, 2), rand(4, 2), rand(4, 2)

    def attend(*parameters: torch.Tensor) -> torch.Tensor:
        with_parameters = WithParameters(score, dict(zip(names, parameters, strict=True)))
        return regard.attention(query, key, value, score=with_parameters, mask=KEEP, kernel="reference")

    assert check(attend, tuple(parameter.detach().clone().requires_grad_() for parameter in score.parameters()))


class WithParameters(torch.nn.Module):
    """A score with other tensors for its parameters."""

    def __init__(self, score: scores.Score, parameters: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.score = score
        self.given = {f"score.{name}": parameter for name, parameter in parameters.items()}

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> PairForm:
        return self.score.pairs(query, key)

    def pairs(self, query: torch.Tensor, key: torch.Tensor) -> PairForm:
        return torch.func.functional_call(self, self.given, (query, key))


def test_scores_of_any_size():
    query, key, value = (
        torch.full((1, 1), 1e4),
        torch.tensor([[1e4], [-1e4], [1e4]]),
        torch.tensor([[1.0], [5.0], [3.0]]),
    )
    output, lse = regard.attention_with_lse(query, key, value)
    assert output.item() == 2.0
    assert lse.item() == pytest.approx(1e8)


def test_half_precision_sums_in_float32():
    """Scores near 70,000 have no place in float16; their softmax does (after equinox, whose test has the idea)."""
    query = torch.full((1, 4), 132.0, dtype=torch.float16)
    key = torch.stack([torch.full((4,), 133.0), torch.full((4,), 132.0)]).half()
    output = regard.attention(query, key, torch.tensor([[1.0], [0.0]]).half(), scale=1.0)
    assert output.item() == 1.0
