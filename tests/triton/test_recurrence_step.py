"""Tokens of linear attention one at a time by one kernel, in Triton's interpreter: the whole sequence's results."""

import pickle
import sys
from typing import Any

import pytest
import torch

from regard.linear import Elu, Identity, LinearState, UnitNorm, linear_attention_with_state

pytestmark = pytest.mark.interpreted
pytest.importorskip("triton")

from regard.backends.triton.recurrence_step import TokenStepInTriton, prepare_step  # noqa: E402  # where there is Triton

LENGTH, PREFILL = 7, 3
CASES = {
    "elu": (Elu(), True, None, False),
    "elu, decay per head": (Elu(), True, "head", False),
    "elu, decay per feature, not normalised": (Elu(), False, "feature", False),
    "identity": (Identity(), False, None, False),
    "gated delta rule": (UnitNorm(Identity()), False, "head", True),
    "delta rule, decay per feature": (UnitNorm(Identity()), False, "feature", True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_the_whole_sequence(monkeypatch, case, dtype):
    feature_map, normalize, decay, delta = CASES[case]
    gates = 2, 2, LENGTH, 17
    tensors = {
        "query": torch.randn(2, 4, LENGTH, 17),
        "key": torch.randn(*gates),
        "value": torch.randn(2, 2, LENGTH, 67),
    }
    if decay is not None:
        tensors["decay"] = -torch.rand(gates[: 3 if decay == "head" else 4])
        tensors["decay"][:, :, 4] = -torch.inf  # forgets everything
    if delta:
        tensors["beta"] = 2 * torch.rand(gates[:3])
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    options: dict[str, Any] = {"feature_map": feature_map, "normalize": normalize, "causal": True}
    exact = {name: tensor.double() for name, tensor in tensors.items()}
    truth, final = linear_attention_with_state(**exact, **options)
    _, state = linear_attention_with_state(**{name: x[:, :, :PREFILL] for name, x in exact.items()}, **options)
    state = LinearState(state.sums.float(), normalize)
    monkeypatch.setattr(sys.modules["regard.linear.linear_attention"], "make_linear_problem", None)  # one launch
    outputs = []
    for token in range(PREFILL, LENGTH):
        before, kept = state, state.sums.clone()
        token = {name: tensor[:, :, token : token + 1] for name, tensor in tensors.items()}
        output, state = linear_attention_with_state(**token, **options, state=state)
        assert before.sums.equal(kept), "a state stays as it is"
        outputs.append(output)
    assert outputs[0].dtype == dtype
    scale = float(final.sums.abs().max())
    torch.testing.assert_close(state.sums.double(), final.sums, atol=2e-6 * scale, rtol=0)
    truth, rounding = truth[:, :, PREFILL:], torch.finfo(dtype).eps / 2 * 1.01
    within = 2e-6 * float(truth.abs().max())
    torch.testing.assert_close(torch.cat(outputs, 2).double(), truth, atol=within, rtol=rounding)


def step_arguments(**changes: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "query": torch.randn(1, 2, 1, 5),
        "key": torch.randn(1, 1, 1, 5),
        "value": torch.randn(1, 1, 1, 3),
    }
    given |= {"decay": -torch.rand(1, 1, 1), "beta": None}
    return given | changes


def test_a_state_is_written_in_place():
    given = step_arguments()
    step = prepare_step(**given, normalize=True, feature_map="elu")
    assert step is not None
    assert step.takes(**given)
    state = torch.rand(step.state_shape)
    target = torch.empty_like(state)
    output = step.run(**given, state=state.clone(), target=target)
    assert step.run(**given, state=state, target=state).equal(output)
    assert state.equal(target)
    copied = pickle.loads(pickle.dumps(step))
    assert copied.takes(**given)


@pytest.mark.parametrize(
    "changes",
    [
        {"query": torch.zeros(1, 2, 2, 5)},
        {"query": torch.zeros(1, 2, 1, 5, dtype=torch.bfloat16)},
        {"value": torch.zeros(1, 1, 1, 0)},
        {"beta": torch.zeros(1, 1, 2)},
        {"decay": torch.zeros(1, 1, 1, dtype=torch.float64)},
    ],
    ids=["two tokens", "two dtypes", "no values", "beta of two tokens", "float64"],
)
def test_there_is_no_step_for_other_tensors(changes):
    assert prepare_step(**step_arguments(**changes)) is None
    assert isinstance(prepare_step(**step_arguments()), TokenStepInTriton)
