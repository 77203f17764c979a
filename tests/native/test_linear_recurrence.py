import functools

import pytest
import torch
from torch import Tensor

from regard.native import linear_recurrence
from regard.native.linear_recurrence import RecurrenceProblem

pytestmark = pytest.mark.usefixtures("built")

NAMES = ("query", "key", "value", "decay", "beta", "state", "total")
BUDGET = 4.0
"""What we may lose against float64, as a multiple of what the step recurrence loses in float32 and of rounding."""

SHAPES = {
    "whole": (1, 2, 2, 128, 32, 32),
    "prime": (2, 3, 3, 131, 17, 19),
    "grouped": (2, 6, 2, 67, 24, 40),
    "one token": (1, 1, 1, 1, 8, 8),
    "wide": (1, 2, 1, 200, 70, 100),
    "several segments": (1, 1, 1, 523, 33, 65),
}
"""Batch, query heads, key heads, tokens, features and value columns."""

KINDS = ("plain", "per head", "per feature", "delta", "delta per head", "delta per feature")


def step_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    total: Tensor | None = None,
    *,
    feature_map: str = "identity",
    normalize: bool = False,
) -> tuple[Tensor, ...]:
    """The formula, token by token: the output, the final state, and the final total where normalised."""
    if feature_map == "elu":
        query, key = (torch.nn.functional.elu(tensor) + 1 for tensor in (query, key))
    group = query.shape[1] // key.shape[1]
    matrix = key.new_zeros(*key.shape[:2], key.shape[3], value.shape[3]) if state is None else state
    keys = key.new_zeros(*key.shape[:2], key.shape[3]) if total is None else total
    outputs = []
    for t in range(key.shape[2]):
        if decay is not None:
            factor = decay[:, :, t].exp() if decay.ndim == 4 else decay[:, :, t, None].exp()
            matrix, keys = factor[..., None] * matrix, factor * keys
        written = value[:, :, t]
        if beta is not None:
            written = beta[:, :, t, None] * (written - (key[:, :, t, :, None] * matrix).sum(-2))
        matrix, keys = matrix + key[:, :, t, :, None] * written[..., None, :], keys + key[:, :, t]
        row = query[:, :, t, :, None]
        output = (row * matrix.repeat_interleave(group, 1)).sum(-2)
        outputs.append(output / (row[..., 0] * keys.repeat_interleave(group, 1)).sum(-1, True) if normalize else output)
    output = torch.stack(outputs, 2) if outputs else value.new_zeros(*query.shape[:3], value.shape[3])
    return (output, matrix, keys) if normalize else (output, matrix)


def make_inputs(shape: tuple[int, ...], kind: str, *, normalize: bool = False) -> dict[str, Tensor]:
    batch, heads, key_heads, tokens, dim, value_dim = shape
    torch.manual_seed(tokens)
    inputs = {
        "query": torch.randn(batch, heads, tokens, dim),
        "key": torch.randn(batch, key_heads, tokens, dim),
        "value": torch.randn(batch, key_heads, tokens, value_dim),
        "state": torch.randn(batch, key_heads, dim, value_dim),
    }
    if "head" in kind:
        inputs["decay"] = torch.nn.functional.logsigmoid(torch.randn(batch, key_heads, tokens) + 2)
    if "feature" in kind:
        inputs["decay"] = torch.nn.functional.logsigmoid(torch.randn(batch, key_heads, tokens, dim) + 2)
    if "delta" in kind:
        inputs["key"] = torch.nn.functional.normalize(inputs["key"], dim=-1)
        inputs["beta"] = torch.rand(batch, key_heads, tokens)
    if normalize:
        inputs["total"] = torch.rand(batch, key_heads, dim) * 5
    return inputs


def native_results(inputs: dict[str, Tensor], seeds: list[Tensor], **options: object) -> dict[str, Tensor]:
    """Outputs, final states and gradients by native code; seeds: gradients of the former two."""
    problem = RecurrenceProblem(**inputs, **options)
    result = problem.forward(stores_borders=True)
    found = {"output": result.output, "final state": result.state}
    if result.total is not None:
        found["final total"] = result.total
    stored = {name: getattr(result, name) for name in ("output", "row_total", "border_total")}
    grad_total = seeds[2] if len(seeds) > 2 else None
    gradients = problem.backward(result.border_state, *seeds[:2], grad_total=grad_total, **stored)
    return found | {f"gradient of {name}": getattr(gradients, name) for name in NAMES if name in inputs}


def formula_results(
    inputs: dict[str, Tensor], seeds: list[Tensor], dtype: torch.dtype, **options: object
) -> dict[str, Tensor]:
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in inputs.items()}
    outputs = step_recurrence(**leaves, **options)
    gradients = torch.autograd.grad(outputs, list(leaves.values()), [seed.to(dtype) for seed in seeds])
    names = (f"gradient of {name}" for name in leaves)
    return dict(zip(("output", "final state", "final total"), outputs, strict=False)) | dict(
        zip(names, gradients, strict=True)
    )


def seeds_for(inputs: dict[str, Tensor], *, normalize: bool = False) -> list[Tensor]:
    query, value = inputs["query"], inputs["value"]
    shapes = [(*query.shape[:3], value.shape[3]), inputs["state"].shape]
    return [torch.randn(shape) for shape in [*shapes, *([inputs["total"].shape] if normalize else [])]]


@functools.cache
def truth_and_budget(
    shape: str, kind: str, *, normalize: bool = False
) -> tuple[dict[str, Tensor], list[Tensor], dict[str, tuple[Tensor, float]]]:
    """Inputs, gradients of the outputs, and each result of the formula in float64 with the error that is allowed."""
    inputs = make_inputs(SHAPES[shape], kind, normalize=normalize)
    seeds = seeds_for(inputs, normalize=normalize)
    options = {"feature_map": "elu", "normalize": True} if normalize else {}
    single = formula_results(inputs, seeds, torch.float32, **options)
    expected = {}
    for name, tensor in formula_results(inputs, seeds, torch.float64, **options).items():
        exact = tensor.detach()
        lost = (single[name].double() - exact).abs().amax().item()
        rounding = 4 * exact.abs().amax().item() * torch.finfo(torch.float32).eps
        expected[name] = exact, BUDGET * (lost + rounding)
    return inputs, seeds, expected


def assert_near(found: dict[str, Tensor], expected: dict[str, tuple[Tensor, float]]) -> None:
    assert found.keys() == expected.keys()
    for name, (exact, allowed) in expected.items():
        assert found[name].shape == exact.shape, name
        assert (found[name].double() - exact).abs().amax().item() <= allowed, name


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass starts from a stored state every four chunks."""
    monkeypatch.setattr(linear_recurrence, "SEGMENT_ENTRIES", 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_step_recurrence(variant, short_segments, shape, kind):
    inputs, seeds, expected = truth_and_budget(shape, kind)
    assert_near(native_results(inputs, seeds), expected)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("shape", SHAPES)
def test_normalised_with_a_feature_map(variant, short_segments, shape, kind):
    inputs, seeds, expected = truth_and_budget(shape, kind, normalize=True)
    assert_near(native_results(inputs, seeds, feature_map="elu", normalize=True), expected)
