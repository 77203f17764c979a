"""Linear attention by the kernels of the recurrence, in Triton's interpreter, against steps in float64."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import regard
from regard import masks
from regard.backends.triton import jit_runtime
from regard.core.recurrence_problem import RecurrenceProblem
from regard.linear import Elu, Identity, LinearState, naive
from regard.testing.tolerance import Expected, assert_close

pytestmark = pytest.mark.interpreted
pytest.importorskip("triton")

from regard.backends.triton.recurrence_launch import RecurrencesInTriton  # noqa: E402  # where there is Triton


def tensors(length, heads=(2, 1), dims=(17, 16), *, batch=1, decay=0, delta=False, state=True, normalize=False):
    """Query, key and value, and the gates and the state of a problem, by name; `decay`: its axes."""
    (heads, key_heads), (dim, value_dim) = heads, dims
    query, key = torch.randn(batch, heads, length, dim), torch.randn(batch, key_heads, length, dim)
    found = {"query": query, "key": key / key.norm(dim=-1, keepdim=True)}
    found["value"] = torch.randn(batch, key_heads, length, value_dim)
    if decay:
        found["decay"] = -torch.rand((batch, key_heads, length, dim)[:decay])
        found["decay"][:, :, 3:4] = -300.0  # a large sum before small differences
    if delta:
        found["beta"] = 2 * torch.rand(batch, key_heads, length)
    if state:
        found["state"] = torch.randn(batch, key_heads, dim, value_dim + normalize)
        if normalize:
            found["state"][..., -1] = 2 + torch.rand(batch, key_heads, dim)
    return found


def by_steps(query, key, value, decay=None, beta=None, state=None, *, feature_map, normalize):
    """The output and the sums after all tokens, by the definition."""
    query, key = feature_map(query), feature_map(key)
    if normalize:
        value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
    rows, sums = naive.step_recurrence(query, key, value, decay=decay, beta=beta, state=state)
    return (rows[..., :-1] / rows[..., -1:] if normalize else rows), sums


def by_kernels(query, key, value, decay=None, beta=None, state=None, *, feature_map, normalize):
    """The same, by the public function."""
    if state is not None:
        state = LinearState(state, normalize)
    output, state = regard.linear.linear_attention_with_state(
        *(query, key, value), causal=True, decay=decay, beta=beta, state=state,
        feature_map=feature_map, normalize=normalize, scale=1.0,
    )  # fmt: skip
    return output, state.sums


def with_gradients(compute, given, upstream, **options):
    """Both results, and the gradient of each input."""
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in given.items()}
    results = compute(**leaves, **options)
    upstream = [seed.to(result.dtype) for seed, result in zip(upstream, results, strict=True)]
    return [*(result.detach() for result in results), *torch.autograd.grad(results, [*leaves.values()], upstream)]


@pytest.fixture
def launched(monkeypatch):
    """What the kernels of recurrences were called for."""
    calls = []
    for name in ("forward", "backward"):
        method = getattr(RecurrencesInTriton, name)

        def called(self, *args, method=method, name=name, **kwargs):
            calls.append(name)
            return method(self, *args, **kwargs)

        monkeypatch.setattr(RecurrencesInTriton, name, called)
    return calls


def check(given, launched, dtype=torch.float32, **options):
    """Compare results and gradients with those of steps in float64.

    Steps in float32, of inputs that are off by less than a rounding, are as good, and show which errors are usual.
    """
    halves = {name: tensor.to(dtype) if name in ("query", "key", "value") else tensor for name, tensor in given.items()}
    exact = {name: tensor.double() for name, tensor in halves.items()}
    upstream = [torch.randn_like(result).to(dtype).double() for result in by_steps(**exact, **options)]
    truth = with_gradients(by_steps, exact, upstream, **options)
    near = []
    for _ in range(3):
        rounding = {name: torch.finfo(dtype).eps * (torch.rand(x.shape) - 0.5) for name, x in exact.items()}
        inputs = {name: (x * (1 + rounding[name])).float() for name, x in exact.items()}
        near.append(with_gradients(by_steps, inputs, upstream, **options))
    found = with_gradients(by_kernels, halves, upstream, **options)
    assert launched == ["forward", "backward"]
    for ours, right, *usual in zip(found, truth, *near, strict=True):
        assert_close(ours, Expected(right, ours.dtype, usual))


@pytest.mark.parametrize("delta", [False, True], ids=["sum", "delta rule"])
@pytest.mark.parametrize("axes", [0, 3, 4], ids=["no decay", "decay", "decay of features"])
def test_sums_and_the_delta_rule(axes, delta, launched):
    check(tensors(37, decay=axes, delta=delta), launched, feature_map=Identity(), normalize=False)


@pytest.mark.parametrize("axes", [0, 3, 4], ids=["no decay", "decay", "decay of features"])
def test_outputs_divided_by_totals(axes, launched):
    check(tensors(37, decay=axes, normalize=True), launched, feature_map=Elu(), normalize=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("axes", [0, 3], ids=["no decay", "decay"])
def test_halves(axes, dtype, launched):
    check(tensors(67, decay=axes, normalize=True), launched, dtype, feature_map=Elu(), normalize=True)


def test_several_chunks_heads_and_blocks(launched):
    given = tensors(131, (4, 2), (19, 35), decay=3, state=False, normalize=True)
    check(given, launched, feature_map=Elu(), normalize=True)


@pytest.mark.parametrize("axes", [3, 4], ids=["decay", "decay of features"])
def test_a_decay_of_minus_infinity_forgets(axes, launched):
    given = tensors(37, decay=axes, delta=True)
    given["decay"][:, :, 20] = -torch.inf
    options: dict[str, Any] = {"feature_map": Identity(), "normalize": False}
    output, state = by_kernels(**given, **options)
    tail = {name: tensor[:, :, 20:] for name, tensor in given.items() if name != "state"}
    expected, final = by_kernels(**tail, **options)
    torch.testing.assert_close(output[:, :, 20:], expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(state, final, atol=1e-6, rtol=1e-5)
    assert launched == ["forward", "forward"]


def test_padding_documents_and_what_is_not_finite(launched):
    query, key, value = torch.randn(2, 2, 37, 5), torch.randn(2, 1, 37, 5), torch.randn(2, 1, 37, 3)
    key[0, 0, 31] = torch.nan  # row 31 and those after it attend to it
    value[1, 0, 13:] = torch.inf  # masked
    mask = masks.padding([37, 13]) & masks.documents([[0] * 17 + [1] * 20, [0] * 37])
    found = regard.linear_attention(query, key, value, mask=mask, causal=True)
    exact = [tensor.double().nan_to_num(0, 0) for tensor in (query, key, value)]
    keep = (mask & masks.causal()).dense(37, 37)
    truth = naive.quadratic(Elu()(exact[0]), Elu()(exact[1]), exact[2], keep=keep, normalize=True)
    truth[0, :, 31:] = torch.nan
    assert_close(found, Expected(truth, torch.float32, [truth.float() * (1 + 2**-22)]))
    assert set(launched) == {"forward"}


def test_inputs_with_any_strides_and_gradients_of_some(launched):
    query, value = torch.randn(1, 37, 2, 16).transpose(1, 2), torch.randn(1, 1, 16, 37).mT
    key = torch.randn(1, 1, 16).expand(1, 37, 16).unsqueeze(1).requires_grad_()
    output = regard.linear_attention(query, key, value, causal=True)
    output.sum().backward()
    exact = key.detach().double().requires_grad_()
    keep = masks.causal().dense(37, 37)
    truth = naive.quadratic(Elu()(query.double()), Elu()(exact), value.double(), keep=keep, normalize=True)
    torch.testing.assert_close(output.double(), truth, atol=1e-6, rtol=1e-5)
    (expected,) = torch.autograd.grad(truth.sum(), exact)
    assert key.grad is not None
    torch.testing.assert_close(key.grad.double(), expected, atol=1e-5, rtol=1e-4)
    assert launched == ["forward", "backward"]


def test_no_tokens():
    given = tensors(0, decay=3)
    output, state = by_kernels(**given, feature_map=Identity(), normalize=False)
    assert output.shape == (1, 2, 0, 16)
    assert state.equal(given["state"])


def problem(**changes):
    return replace(
        RecurrenceProblem(torch.zeros(1, 1, 3, 5), torch.zeros(1, 1, 3, 5), torch.zeros(1, 1, 3, 2)), **changes
    )


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (problem(), None),
        (problem(decay=torch.zeros(1, 1, 3).double()), r"reads the decay as float32 on cpu; this is float64 on cpu"),
        (problem(feature_map="unit_norm"), r"feature maps \('identity', 'elu'\); this is 'unit_norm'"),
        (problem(beta=torch.zeros(1, 1, 3), normalize=True), r"no total of weights for the delta rule"),
        (
            problem(beta=torch.zeros(1, 1, 3), removal=torch.zeros(1, 1, 3, 5)),
            r"removes the value of the written key, and this problem has another key",
        ),
        (problem(value=torch.zeros(1, 1, 3, 0)), r"at least one feature and one value"),
        (problem(key=torch.zeros(1, 1, 3, 257), beta=torch.zeros(1, 1, 3)), r"up to 256 features; these are 257"),
    ],
    ids=["none", "dtype", "feature map", "total", "removal", "empty", "features"],
)
def test_reasons_against_a_problem(given, reason):
    reasons = RecurrencesInTriton().why_not(given)
    assert bool(reasons) is (reason is not None)
    if reason is not None:
        assert re.search(reason, reasons[0])


def test_the_precision_of_float32_is_that_of_torch():
    assert jit_runtime.float32_products() == "tf32x3"
    torch.set_float32_matmul_precision("high")
    try:
        assert jit_runtime.float32_products() == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
