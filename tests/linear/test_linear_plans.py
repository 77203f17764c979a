"""Which plan computes a problem; every problem of a faster plan is also computed by the plan of all features."""

from typing import Any

import pytest
import torch

from regard import masks, native
from regard.linear import Elu, FavorPlus, Identity, LinearState, Relu, UnitNorm
from regard.linear.linear_plans import (
    EluRecurrence,
    FavorBlocks,
    FeatureRecurrence,
    FeatureSums,
    choose_plan,
    feature_plan,
)
from regard.linear.linear_problem import make_linear_problem

LENGTH, DIM = 13, 5
DOCUMENTS = masks.documents(torch.arange(LENGTH)[None] // 4)
native_only = pytest.mark.skipif(not native.available(), reason="a plan of native code")

CHOICES = [
    pytest.param({"causal": True}, EluRecurrence, id="elu, causal", marks=native_only),
    pytest.param({"mask": masks.causal() & DOCUMENTS}, EluRecurrence, id="elu, causal by its mask", marks=native_only),
    pytest.param({}, FeatureSums, id="elu"),
    pytest.param({"mask": masks.padding([LENGTH, 7])}, FeatureSums, id="elu, padding"),
    pytest.param({"causal": True, "normalize": False}, FeatureRecurrence, id="elu, not normalised"),
    pytest.param({"causal": True, "feature_map": Relu()}, FeatureRecurrence, id="relu, causal"),
    pytest.param(
        {
            "causal": True,
            "normalize": False,
            "feature_map": UnitNorm(Identity()),
            "beta": torch.full((2, 2, LENGTH), 0.5),
        },
        FeatureRecurrence,
        id="delta rule",
    ),
    pytest.param({"feature_map": FavorPlus(DIM, 7, seed=0)}, FavorBlocks, id="favor"),
    pytest.param({"feature_map": FavorPlus(DIM, 7, seed=0), "causal": True}, FeatureRecurrence, id="favor, causal"),
    pytest.param({"feature_map": FavorPlus(DIM, 7, seed=0), "normalize": False}, FeatureSums, id="favor, sums"),
    pytest.param({"feature_map": FavorPlus(DIM, 7, seed=0), "mask": DOCUMENTS}, FeatureSums, id="favor, documents"),
    pytest.param({"feature_map": FavorPlus(DIM, 7, seed=0, kernel="relu")}, FeatureSums, id="relu of random features"),
]


def problem(dtype=torch.float32, **options: Any):
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, LENGTH, DIM), torch.randn(2, 2, LENGTH, DIM), torch.randn(2, 2, LENGTH, 3)
    return make_linear_problem(query.to(dtype), key.to(dtype), value.to(dtype), **options)


@pytest.mark.parametrize(("options", "plan"), CHOICES)
def test_the_plan_of_a_problem(options, plan):
    assert type(choose_plan(problem(**options))) is plan


@native_only
def test_what_no_backend_takes_has_features(monkeypatch):
    assert type(choose_plan(problem(torch.float64, causal=True))) is FeatureRecurrence
    assert type(choose_plan(problem(torch.bfloat16, causal=True))) is EluRecurrence
    assert type(choose_plan(problem(torch.bfloat16, causal=True, scale=0.5))) is FeatureRecurrence, "would be rounded"
    monkeypatch.setattr("regard.linear.linear_plans.runs_in_one_pass", lambda *_: False)
    assert type(choose_plan(problem(causal=True))) is FeatureRecurrence


def check_same(options: dict[str, Any], state: LinearState | None = None) -> LinearState | None:
    """Compare the plan of a problem with that of features in float64; the state after it."""
    found = choose_plan(problem(**options, state=state)).run()
    exact = {name: each.double() if isinstance(each, torch.Tensor) else each for name, each in options.items()}
    truth = feature_plan(problem(torch.float64, **exact, state=state)).run()
    torch.testing.assert_close(found.output.double(), truth.output, rtol=1e-5, atol=1e-5)
    assert (found.state is None) == (truth.state is None)
    if found.state is not None and truth.state is not None:
        torch.testing.assert_close(found.state.sums.double(), truth.state.sums, rtol=1e-5, atol=1e-5)
    return found.state


@pytest.mark.parametrize(("options", "plan"), CHOICES)
def test_every_problem_has_a_plan_of_features_with_the_same_result(options, plan):
    state = check_same(options)
    assert (state is not None) == bool(options.get("causal")), "keys without an order, and documents, have no state"
    if state is not None:
        check_same(options, state)


def test_a_hidden_key_adds_nothing_and_gets_no_gradient():
    exists = torch.ones(2, 2, LENGTH, dtype=torch.bool)
    exists[..., 3:9] = False
    every: list[dict[str, Any]] = [{}, {"feature_map": Identity(), "normalize": False}]
    for given in every:
        options = {"causal": True, **given}
        plan = choose_plan(problem(**options))
        key = plan.sequences.key.detach().requires_grad_()
        rows, _ = plan.rows(plan.sequences._replace(key=plan.hide_keys(key, exists)), None)
        (gradient,) = torch.autograd.grad(rows.square().sum(), key)
        assert not gradient[~exists].any()
        kept = problem(**options, mask=masks.where(keep=exists[:, :1, None].expand(2, 1, 1, LENGTH)))
        torch.testing.assert_close(plan.finish(rows)[0], choose_plan(kept).run().output)


def test_elu_of_a_hidden_key_is_0():
    assert not Elu()(torch.tensor(EluRecurrence.absent_key)).any()
