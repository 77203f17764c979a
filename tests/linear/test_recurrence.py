"""The recurrence in chunks against single steps: lengths around chunks, groups, decays, the delta rule, states."""

import itertools
from typing import Any

import pytest
import torch

import regard
from regard.core.recurrence_problem import RecurrenceGradients, RecurrenceResult
from regard.linear import naive
from regard.linear import recurrence as recurrence_module
from regard.linear.recurrence import recurrence

LENGTHS = (0, 1, 2, 3, 61, 64, 67, 131)
RULES = (False, True, "removal")
"""The sum, the delta rule, and the delta rule that removes the value of another key."""


def arguments(
    length,
    heads=(4, 2),
    dims=(5, 3),
    axes=0,
    delta: bool | str = False,
    initial=False,
    dtype=torch.float64,
    strength=1.0,
) -> tuple[Any, ...]:
    """query, key, value, decay, beta, state and removal for a recurrence."""
    (heads, key_heads), (dim, value_dim), batch = heads, dims, 2
    query, key, value = (
        torch.randn(batch, count, length, size, dtype=dtype)
        for count, size in ((heads, dim), (key_heads, dim), (key_heads, value_dim))
    )
    key = key / (key.norm(dim=-1, keepdim=True) + 1e-9)
    decay = -strength * torch.rand(key.shape[:axes], dtype=dtype) if axes else None
    beta = torch.rand(batch, key_heads, length, dtype=dtype) * 2 if delta else None
    state = torch.randn(batch, key_heads, dim, value_dim, dtype=dtype) if initial else None
    removal = torch.randn_like(key) / dim**0.5 if delta == "removal" else None
    return query, key, value, decay, beta, state, removal


def by_steps(query, key, value, decay, beta, state, removal=None):
    return naive.step_recurrence(query, key, value, decay=decay, beta=beta, state=state, removal=removal)


@pytest.mark.parametrize(("axes", "delta", "initial"), [*itertools.product((0, 3, 4), RULES, (False, True))])
@pytest.mark.parametrize("length", LENGTHS)
def test_chunks_are_steps(length, axes, delta, initial):
    given = arguments(length, axes=axes, delta=delta, initial=initial)
    for ours, expected in zip(recurrence(*given), by_steps(*given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


class SingleSteps:
    """Recurrences of a backend that computes float64 step by step, without feature maps and states to start from."""

    name = "steps"

    def __init__(self):
        self.recurrences, self.calls = self, []

    def runs(self, *tensors):
        return all(tensor.dtype == torch.float64 for tensor in tensors)

    def why_not(self, problem):
        return [] if problem.beta is None else ["it has no delta rule"]

    def forward(self, problem, *, stores_borders=False):
        self.calls.append("forward")
        output, state = by_steps(problem.query, problem.key, problem.value, problem.decay, problem.beta, problem.state)
        border = problem.state.unsqueeze(2) if stores_borders else None
        return RecurrenceResult(output, None, state, None, border, None)

    def backward(self, problem, border_state, grad_output, grad_state=None, **_):
        self.calls.append("backward")
        named: dict[str, Any] = {name: getattr(problem, name) for name in ("query", "key", "value", "decay", "beta")}
        named["state"] = border_state.squeeze(2)
        leaves = {name: x.detach().requires_grad_() for name, x in named.items() if x is not None}
        with torch.enable_grad():
            results = naive.step_recurrence(**leaves)
        found = torch.autograd.grad(results, [*leaves.values()], [grad_output, grad_state])
        gradients: dict[str, Any] = dict.fromkeys([*named, "total"])
        return RecurrenceGradients(**(gradients | dict(zip(leaves, found, strict=True))))


@pytest.mark.parametrize(("delta", "calls"), [(False, ["forward", "backward"]), (True, [])])
def test_a_backend_is_asked(monkeypatch, delta, calls):
    backend = SingleSteps()
    given = arguments(67, axes=3, delta=delta, initial=True)
    leaves = [x for x in given if x is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    results = recurrence(*given)
    seeds = [torch.randn_like(result) for result in results]
    expected = [*results, *torch.autograd.grad(results, leaves, seeds)]
    monkeypatch.setattr(recurrence_module, "BACKENDS", (*recurrence_module.BACKENDS, backend))
    results = recurrence(*given)
    found = [*results, *torch.autograd.grad(results, leaves, seeds)]
    assert backend.calls == calls
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("heads", [(1, 1), (6, 1), (6, 3), (5, 5)])
@pytest.mark.parametrize("dims", [(1, 1), (2, 7), (8, 8)])
def test_heads_and_dims(heads, dims):
    given = arguments(71, heads, dims, axes=4, delta=True, initial=True)
    for ours, expected in zip(recurrence(*given), by_steps(*given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("delta", RULES)
@pytest.mark.parametrize("strength", [50.0, 5000.0])
def test_strong_decays_overflow_nothing(axes, delta, strength):
    given = arguments(131, axes=axes, delta=delta, initial=True, strength=strength)
    for ours, expected in zip(recurrence(*given), by_steps(*given), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("axes", [3, 4])
def test_a_decay_of_minus_infinity_forgets(axes):
    query, key, value, decay, _, state, _ = arguments(131, axes=axes, initial=True)
    decay[:, :, 70] = -torch.inf
    output, final = recurrence(query, key, value, decay, None, state)
    tail = [tensor[:, :, 70:] for tensor in (query, key, value, decay)]
    expected = recurrence(*tail)
    torch.testing.assert_close(output[:, :, 70:], expected[0], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(final, expected[1], rtol=1e-10, atol=1e-10)


def gradients(compute, inputs, weights):
    """The gradients of a weighted sum of both results, with respect to all inputs that are there."""
    leaves = [None if tensor is None else tensor.detach().clone().requires_grad_() for tensor in inputs]
    results = compute(*leaves)
    loss = torch.stack([(weight * result).sum() for weight, result in zip(weights, results, strict=True)]).sum()
    return torch.autograd.grad(loss, [leaf for leaf in leaves if leaf is not None], materialize_grads=True)


@pytest.mark.parametrize(("axes", "delta", "initial"), [*itertools.product((0, 3, 4), RULES, (False, True))])
@pytest.mark.parametrize("length", [1, 3, 131])
def test_gradients_are_those_of_steps(length, axes, delta, initial):
    given = arguments(length, axes=axes, delta=delta, initial=initial)
    weights = [torch.randn_like(result) for result in by_steps(*given)]
    for ours, expected in zip(gradients(recurrence, given, weights), gradients(by_steps, given, weights), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("delta", RULES)
def test_gradients_over_several_segments(delta, monkeypatch):
    monkeypatch.setattr(recurrence_module, "SEGMENT", 1)
    monkeypatch.setattr(recurrence_module, "SMALLEST_SEGMENT", 32)
    test_gradients_are_those_of_steps(131, 4, delta, True)
    test_gradients_are_those_of_steps(131, 3, delta, False)


@pytest.mark.parametrize("axes", [3, 4])
@pytest.mark.parametrize("delta", RULES)
def test_gradients_with_strong_decays(axes, delta):
    given = arguments(67, axes=axes, delta=delta, initial=True, strength=5000.0)
    weights = [torch.randn_like(result) for result in by_steps(*given)]
    for ours, expected in zip(gradients(recurrence, given, weights), gradients(by_steps, given, weights), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("needed", range(7))
def test_the_gradient_of_one_argument_alone(needed):
    given = arguments(67, axes=4, delta="removal", initial=True)
    alone = [tensor.clone().requires_grad_(index == needed) for index, tensor in enumerate(given)]
    output, final = recurrence(*alone)
    (output.sum() + final.square().sum()).backward()
    together = [tensor.clone().requires_grad_() for tensor in given]
    output, final = recurrence(*together)
    (output.sum() + final.square().sum()).backward()
    torch.testing.assert_close(alone[needed].grad, together[needed].grad)
    assert [tensor.grad is None for tensor in alone] == [index != needed for index in range(7)]


@pytest.mark.parametrize("axes", [0, 3, 4])
@pytest.mark.parametrize("delta", RULES)
def test_first_and_second_derivatives(axes, delta):
    given = arguments(3, (2, 1), (2, 2), axes=axes, delta=delta, initial=True)
    leaves = [tensor.requires_grad_() for tensor in given if tensor is not None]

    def compute(*tensors):
        left = iter(tensors)
        inputs: list[Any] = [None if tensor is None else next(left) for tensor in given]
        return recurrence(*inputs)

    assert torch.autograd.gradcheck(compute, leaves)
    assert torch.autograd.gradgradcheck(compute, leaves)


def test_second_derivatives_where_one_argument_is_a_function_of_another():
    def loss(compute, x):
        output, final = compute(x, x.sin(), x * x)
        first = torch.autograd.grad(output.square().sum() + final.sum(), x, create_graph=True)[0]
        return torch.autograd.grad(first.square().sum(), x)[0]

    x = torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(loss(recurrence, x), loss(naive.step_recurrence, x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # torch's own, when it loads
@pytest.mark.parametrize(("axes", "delta"), [(0, False), (3, True), (4, False), (4, "removal")])
def test_vmap_and_derivatives_of_torch_func(axes, delta):
    given = arguments(67, axes=axes, delta=delta, initial=True)
    stacked = [None if tensor is None else torch.stack([tensor, tensor]) for tensor in given]
    present = [index for index, tensor in enumerate(given) if tensor is not None]

    def compute(*tensors):
        left = dict(zip(present, tensors, strict=True))
        inputs: list[Any] = [left.get(index) for index in range(7)]
        return recurrence(*inputs)

    mapped = torch.func.vmap(compute)(*(stacked[index] for index in present))
    torch.testing.assert_close(mapped[0][1], recurrence(*given)[0])
    tangents = tuple(torch.randn_like(given[index]) for index in present)
    primals = tuple(given[index] for index in present)
    forward = torch.func.jvp(compute, primals, tangents)[1]
    weights = [torch.randn_like(result) for result in forward]
    pull = torch.func.vjp(compute, *primals)[1]
    left = sum((weight * tangent).sum() for weight, tangent in zip(weights, forward, strict=True))
    right = sum((one * tangent).sum() for one, tangent in zip(pull(tuple(weights)), tangents, strict=True))
    torch.testing.assert_close(left, right)


@pytest.mark.parametrize(("axes", "delta"), [(0, False), (4, True), (3, "removal")])
def test_compiled_in_one_graph(axes, delta):
    given = arguments(67, axes=axes, delta=delta, initial=True)
    weights = [torch.randn_like(result) for result in by_steps(*given)]
    compiled = torch.compile(recurrence, fullgraph=True, backend="aot_eager")
    for ours, expected in zip(gradients(compiled, given, weights), gradients(by_steps, given, weights), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("shape", [(0, 2, 2, 5, 3, 2), (2, 2, 2, 0, 3, 2), (2, 2, 2, 5, 0, 2), (2, 2, 2, 5, 3, 0)])
def test_axes_of_size_0(shape):
    batch, heads, key_heads, length, dim, value_dim = shape
    given = (
        torch.randn(batch, heads, length, dim),
        torch.randn(batch, key_heads, length, dim),
        torch.randn(batch, key_heads, length, value_dim),
        -torch.rand(batch, key_heads, length),
        torch.rand(batch, key_heads, length),
        torch.randn(batch, key_heads, dim, value_dim),
    )
    weights = [torch.randn_like(result) for result in by_steps(*given)]
    for ours, expected in zip(recurrence(*given), by_steps(*given), strict=True):
        torch.testing.assert_close(ours, expected)
    for gradient, tensor in zip(gradients(recurrence, (*given[:5], None), weights), given[:5], strict=True):
        assert gradient.shape == tensor.shape
    for ours, expected in zip(gradients(recurrence, given, weights), gradients(by_steps, given, weights), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"decay": -0.1 * torch.ones(2, 2, 13)},
        {"decay": -0.1 * torch.ones(2, 2, 13, 4), "normalize": False},
        {"beta": 0.5 * torch.ones(2, 2, 13), "normalize": False},
    ],
    ids=["plain", "every key", "decay", "decay of features", "delta rule"],
)
def test_many_gradients_at_once(options, create_graph):
    """torch.autograd.grad(..., is_grads_batched=True), by which functional.jacobian(vectorize=True) computes."""
    q, k, v = (0.3 * torch.randn(2, 2, 13, 4) for _ in range(3))  # of keys below 1 the delta rule forgets
    inputs = tuple(tensor.requires_grad_() for tensor in (q, k, v))
    output = regard.linear_attention(q, k, v, **({"causal": True} | options))
    above = torch.randn(3, *output.shape)
    given = {"retain_graph": True, "create_graph": create_graph}
    together = torch.autograd.grad(output, inputs, above, is_grads_batched=True, **given)
    for number, one in enumerate(above):
        for many, alone in zip(together, torch.autograd.grad(output, inputs, one, **given), strict=True):
            bound = 64 * 2.0**-24 * max(alone.abs().max().item(), 1.0)
            torch.testing.assert_close(many[number], alone, atol=bound, rtol=0.0)
