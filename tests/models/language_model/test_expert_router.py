"""Routers of experts: token by token as their formulas, and what they refuse."""

import pytest
import torch

from regard.errors import ConfigurationError
from regard.models.language_model import RouterConfig, SigmoidRouter, SoftmaxRouter

TOKENS, DIM, EXPERTS = 53, 6, 12


def close(found, expected):
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


def dense(router, tokens):
    """The share of every expert, 0 where it is not chosen."""
    shares, experts = router(tokens)
    assert shares.shape == experts.shape == (len(tokens), router.chosen)
    assert all(len(set(row)) == router.chosen for row in experts.tolist())
    return torch.zeros(len(tokens), EXPERTS).scatter(-1, experts, shares)


def open_experts(scores, groups, chosen_groups, counted):
    """The numbers of the experts in the best groups."""
    size = EXPERTS // groups
    strength = [sum(sorted(scores[size * group : size * group + size])[-counted:]) for group in range(groups)]
    best = sorted(range(groups), key=lambda group: strength[group])[-chosen_groups:]
    return [expert for expert in range(EXPERTS) if expert // size in best]


GROUPS = [(1, 1), (4, 2), (3, 1), (6, 6)]


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("groups", "chosen_groups"), GROUPS)
def test_sigmoid_router(normalized, groups, chosen_groups):
    router = SigmoidRouter(
        DIM, EXPERTS, 3, normalized=normalized, groups=groups, chosen_groups=chosen_groups, scale=1.7
    )
    router.correction.normal_()
    tokens, expected = torch.randn(TOKENS, DIM), torch.zeros(TOKENS, EXPERTS)
    for row, token in enumerate(tokens):
        scores = (router.weight.double() @ token.double()).sigmoid()
        corrected = (scores + router.correction).tolist()
        allowed = open_experts(corrected, groups, chosen_groups, 2)
        best = sorted(allowed, key=lambda expert: corrected[expert])[-3:]
        total = sum(scores[expert] for expert in best) if normalized else 1.0
        for expert in best:
            expected[row, expert] = 1.7 * scores[expert] / total
    close(dense(router, tokens), expected)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("groups", "chosen_groups"), GROUPS)
def test_softmax_router(normalized, groups, chosen_groups):
    router = SoftmaxRouter(
        DIM, EXPERTS, 3, normalized=normalized, groups=groups, chosen_groups=chosen_groups, scale=0.6
    )
    tokens, expected = 3 * torch.randn(TOKENS, DIM), torch.zeros(TOKENS, EXPERTS)
    for row, token in enumerate(tokens):
        scores = (router.weight.double() @ token.double()).softmax(-1)
        allowed = open_experts(scores.tolist(), groups, chosen_groups, 1)
        best = sorted(allowed, key=lambda expert: scores[expert].item())[-3:]
        total = sum(scores[expert] for expert in best) if normalized else 1.0
        for expert in best:
            expected[row, expert] = 0.6 * scores[expert] / total
    close(dense(router, tokens), expected)


def test_the_correction_chooses_and_weighs_nothing():
    router, tokens = SigmoidRouter(DIM, EXPERTS, 2), torch.randn(TOKENS, DIM)
    router.correction[5] = 10.0
    shares, experts = router(tokens)
    assert (experts == 5).any(-1).all()
    scores = torch.nn.functional.linear(tokens, router.weight).sigmoid()
    close(shares / shares.sum(-1, keepdim=True), shares)
    ratio = scores.gather(-1, experts)
    close(shares, ratio / ratio.sum(-1, keepdim=True))
    assert "correction" in router.state_dict()
    assert [name for name, _ in router.named_parameters()] == ["weight"]


def test_shares_have_gradients():
    for kind in (SigmoidRouter, SoftmaxRouter):
        router = kind(3, 6, 2, groups=3, chosen_groups=2).double()
        tokens = torch.randn(4, 3).double().requires_grad_()
        assert torch.autograd.gradcheck(lambda tokens, router=router: router(tokens)[0], tokens)


def test_in_half_precision_scores_are_of_float32():
    router, tokens = SigmoidRouter(DIM, EXPERTS, 2).bfloat16(), torch.randn(TOKENS, DIM).bfloat16()
    shares, experts = router(tokens)
    assert shares.dtype == torch.float32
    wide, same = router.float()(tokens.float())
    assert torch.equal(experts, same)
    close(shares, wide)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("num_experts is 0", {"num_experts": 0}),
        ("chosen is 0", {"chosen": 0}),
        ("groups is 0", {"groups": 0}),
        ("chosen_groups is 0", {"chosen_groups": 0}),
        ("chosen is 13 of num_experts=12: it needs that many or fewer", {"chosen": 13}),
        ("in groups=5, of which chosen_groups=1 are open: groups need to divide the experts", {"groups": 5}),
        ("in groups=4, of which chosen_groups=5 are open", {"groups": 4, "chosen_groups": 5}),
        ("chosen is 4 of num_experts=12 in groups=4, of which chosen_groups=1", {"groups": 4, "chosen": 4}),
        ("scale is 0; a router needs a finite number above 0", {"scale": 0}),
        ("scale is inf", {"scale": float("inf")}),
    ],
)
@pytest.mark.parametrize("kind", [SigmoidRouter, SoftmaxRouter])
def test_what_cannot_be(kind, message, options):
    with pytest.raises(ConfigurationError, match=message):
        kind(**{"dim": DIM, "num_experts": EXPERTS, "chosen": 3} | options)


def test_an_unknown_router():
    with pytest.raises(ConfigurationError, match="there is no router 'tanh'; .*Known: 'sigmoid', 'softmax'"):
        RouterConfig("tanh").make(DIM, EXPERTS, 2, True)
