import functools
import re
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard.backends.cpu import build, recurrence_struct
from regard.backends.cpu.cpu_backend import CPU
from regard.backends.cpu.token_step import one_token
from regard.core.recurrence_problem import RecurrenceProblem
from regard.errors import ConfigurationError, DtypeError, ShapeError

pytestmark = pytest.mark.usefixtures("built")

NAMES = ("query", "key", "value", "decay", "beta", "state", "total", "removal")
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

HALVES = (torch.bfloat16, torch.float16)
KINDS = ("plain", "per head", "per feature", "delta", "delta per head", "delta per feature")
REMOVALS = ("delta removal", "delta removal per head", "delta removal per feature")


def step_recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    total: Tensor | None = None,
    removal: Tensor | None = None,
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
            read = (key if removal is None else removal)[:, :, t, :, None]
            written = beta[:, :, t, None] * (written - (read * matrix).sum(-2))
        matrix, keys = matrix + key[:, :, t, :, None] * written[..., None, :], keys + key[:, :, t]
        row = query[:, :, t, :, None]
        output = (row * matrix.repeat_interleave(group, 1)).sum(-2)
        outputs.append(output / (row[..., 0] * keys.repeat_interleave(group, 1)).sum(-1, True) if normalize else output)
    output = torch.stack(outputs, 2) if outputs else value.new_zeros(*query.shape[:3], value.shape[3])
    return (output, matrix, keys) if normalize else (output, matrix)


def make_inputs(shape: tuple[int, ...], kind: str, *, normalize: bool = False) -> dict[str, Any]:
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
    if "removal" in kind:
        inputs["removal"] = torch.nn.functional.normalize(torch.randn(batch, key_heads, tokens, dim), dim=-1)
    if normalize:
        inputs["total"] = torch.rand(batch, key_heads, dim) * 5
    return inputs


def native_results(inputs: dict[str, Any], seeds: list[Tensor], **options: Any) -> dict[str, Tensor]:
    """Outputs, final states and gradients by native code; seeds: gradients of the former two."""
    problem = RecurrenceProblem(**inputs, **options)
    result = CPU.recurrences.forward(problem, stores_borders=True)
    found = {"output": result.output, "final state": result.state}
    if result.total is not None:
        found["final total"] = result.total
    stored = {name: getattr(result, name) for name in ("output", "row_total", "border_total")}
    grad_total = seeds[2] if len(seeds) > 2 else None
    assert result.border_state is not None
    gradients = CPU.recurrences.backward(problem, result.border_state, *seeds[:2], grad_total=grad_total, **stored)
    return found | {f"gradient of {name}": getattr(gradients, name) for name in NAMES if name in inputs}


def formula_results(
    inputs: dict[str, Any], seeds: list[Tensor], dtype: torch.dtype, **options: Any
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
    monkeypatch.setattr(recurrence_struct, "SEGMENT_ENTRIES", 1)


@pytest.mark.parametrize("kind", KINDS + REMOVALS)
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_step_recurrence(variant, short_segments, shape, kind):
    inputs, seeds, expected = truth_and_budget(shape, kind)
    assert_near(native_results(inputs, seeds), expected)


@pytest.mark.parametrize("kind", KINDS[:3])
@pytest.mark.parametrize("shape", SHAPES)
def test_normalised_with_a_feature_map(variant, short_segments, shape, kind):
    inputs, seeds, expected = truth_and_budget(shape, kind, normalize=True)
    assert_near(native_results(inputs, seeds, feature_map="elu", normalize=True), expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize(
    ("normalize", "kind"),
    [(False, kind) for kind in KINDS + REMOVALS] + [(True, kind) for kind in KINDS if "delta" not in kind],
)
def test_halves_are_rounded_once(variant, short_segments, normalize, kind, dtype):
    """Beside what float32 loses, a result loses its rounding, and a gradient that of the output it is made from."""
    options: dict[str, Any] = {"feature_map": "elu", "normalize": True} if normalize else {}
    inputs = make_inputs(SHAPES["grouped"], kind, normalize=normalize)
    rounded = {name: inputs[name].to(dtype) for name in ("query", "key", "value", "removal") if name in inputs}
    seeds = seeds_for(inputs, normalize=normalize)
    seeds[0] = seeds[0].to(dtype)
    found = native_results(inputs | rounded, seeds, **options)
    wide = inputs | {name: tensor.float() for name, tensor in rounded.items()}
    single, truth = (formula_results(wide, seeds, each, **options) for each in (torch.float32, torch.float64))
    assert found.keys() == truth.keys()
    for name, exact in truth.items():
        is_half = name.removeprefix("gradient of ") in ("query", "key", "value", "removal", "output")
        assert found[name].dtype == (dtype if is_half else torch.float32), name
        lost = (single[name].double() - exact).abs().amax().item()
        rounding = 4 * torch.finfo(torch.float32).eps + torch.finfo(dtype).eps * (
            is_half / 2 + ("gradient" in name and normalize)
        )
        allowed = BUDGET * lost + rounding * exact.abs().amax().item() * 1.01
        assert (found[name].double() - exact).abs().amax().item() <= allowed, name


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("kind", KINDS + REMOVALS)
def test_a_step_of_halves(variant, kind, dtype):
    inputs = make_inputs((2, 6, 2, 1, 24, 40), kind)
    halves = {name: tensor if name == "state" else tensor.to(dtype) for name, tensor in inputs.items()}
    truth = step_recurrence(**{name: tensor.double() for name, tensor in halves.items()})
    output, state = cast("Any", one_token(RecurrenceProblem(**halves)))
    assert (output.dtype, state.dtype) == (dtype, torch.float32)
    torch.testing.assert_close(state.double(), truth[1], rtol=1e-5, atol=1e-5)
    within = torch.finfo(dtype).eps / 2 * 1.01
    torch.testing.assert_close(output.double(), truth[0], rtol=within, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS + REMOVALS)
@pytest.mark.parametrize("shape", [(2, 6, 2, 1, 24, 40), (1, 3, 3, 1, 17, 65), (1, 2, 1, 1, 64, 193)])
def test_one_token_is_a_step(variant, shape, kind):
    inputs = make_inputs(shape, kind)
    truth = step_recurrence(**{name: tensor.double() for name, tensor in inputs.items()})
    found = cast("Any", one_token(RecurrenceProblem(**inputs)))
    for ours, exact in zip(found, truth, strict=True):
        assert ours.shape == exact.shape
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS + REMOVALS)
def test_any_strides(kind):
    inputs = make_inputs(SHAPES["grouped"], kind)
    seeds = seeds_for(inputs)
    expected = native_results(inputs, seeds)
    turned = {name: tensor.transpose(-1, -2).contiguous().transpose(-1, -2) for name, tensor in inputs.items()}
    apart = {name: torch.stack([tensor, tensor], 1).transpose(0, 1)[1] for name, tensor in inputs.items()}
    for other in (turned, apart):
        found = native_results(other, [seed.mT.contiguous().mT for seed in seeds])
        for name, tensor in expected.items():
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("kind", KINDS + REMOVALS)
@pytest.mark.parametrize("heads", [1, 3])
def test_threads_change_the_rounding_of_shared_gradients_alone(monkeypatch, kind, heads):
    monkeypatch.setattr(recurrence_struct, "LEAST_WORK", 1)
    inputs = make_inputs((1, heads, heads, 131, 17, 70), kind)
    seeds, found = seeds_for(inputs), []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found.append(native_results(inputs, seeds))
    finally:
        torch.set_num_threads(before)
    names = ("query", "key", "decay", "beta", "removal")
    shared = [f"gradient of {name}" for name in names] if heads == 1 else []
    for name, tensor in found[0].items():
        if name in shared:  # sums over the parts of the value columns
            torch.testing.assert_close(found[1][name], tensor, rtol=1e-4, atol=1e-4)
        else:
            assert torch.equal(found[1][name], tensor), name


@pytest.mark.parametrize("shape", [(1, 2, 2, 0, 4, 5), (0, 2, 2, 7, 4, 5), (1, 2, 2, 7, 4, 0), (1, 2, 2, 7, 0, 5)])
@pytest.mark.parametrize("kind", KINDS + REMOVALS)
def test_nothing_to_do(shape, kind):
    inputs = make_inputs(shape, kind)
    seeds = seeds_for(inputs)
    found = native_results(inputs, seeds)
    assert found["output"].shape == (*shape[:2], shape[3], shape[5])
    for name, tensor in found.items():
        assert tensor.isfinite().all(), name
    if not shape[3]:
        assert torch.equal(found["final state"], inputs["state"])
        assert torch.equal(found["gradient of state"], seeds[1])


@pytest.mark.parametrize("kind", ["per head", "per feature", "delta per head", "delta per feature"])
def test_a_decay_of_minus_infinity_forgets(variant, kind):
    inputs = make_inputs((1, 2, 2, 200, 16, 16), kind)
    inputs["decay"][:, :, [0, 70, 128]] = -torch.inf
    seeds = seeds_for(inputs)
    found = native_results(inputs, seeds)
    tail = {name: tensor if name == "state" else tensor[:, :, 128:] for name, tensor in inputs.items()}
    expected = step_recurrence(**tail)
    torch.testing.assert_close(found["output"][:, :, 128:], expected[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found["final state"], expected[1], rtol=1e-4, atol=1e-4)
    for name, tensor in found.items():
        assert tensor.isfinite().all(), name
    assert not found["gradient of decay"][:, :, [0, 70, 128]].any()
    assert not found["gradient of state"].any()


@pytest.mark.parametrize("strength", [50.0, 5000.0])
@pytest.mark.parametrize("kind", ["per head", "delta per feature"])
def test_strong_decays_overflow_nothing(variant, kind, strength):
    inputs = make_inputs((1, 2, 2, 131, 16, 16), kind)
    inputs["decay"] = inputs["decay"] * strength
    expected = formula_results(inputs, seeds := seeds_for(inputs), torch.float64)
    for name, tensor in native_results(inputs, seeds).items():
        torch.testing.assert_close(tensor.double(), expected[name].detach(), rtol=1e-4, atol=1e-4, msg=name)


def test_small_features_are_not_rounded_to_zero(variant):
    query, key = (
        torch.full((1, 1, 3, 4), -1.0),
        torch.tensor([-30.0, -50.0, -200.0]).view(1, 1, 3, 1).expand(1, 1, 3, 4),
    )
    value = torch.tensor([2.0, 3.0, 5.0]).view(1, 1, 3, 1)
    forward = CPU.recurrences.forward
    result = forward(RecurrenceProblem(query, key, value, feature_map="elu", normalize=True))
    torch.testing.assert_close(result.output.flatten(), torch.full((3,), 2.0))
    alone = RecurrenceProblem(query[:, :, :1], key[:, :, 2:], value[:, :, :1], feature_map="elu", normalize=True)
    assert forward(alone).output.item() == 0.0  # no weight: not 0 / 0


def test_what_does_not_fit_is_said():
    query, key, value = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 3)
    forward = CPU.recurrences.forward
    with pytest.raises(
        DtypeError, match=r"value torch.float64; native code takes float32, bfloat16 or float16, the same"
    ):
        forward(RecurrenceProblem(query, key, value.double()))
    with pytest.raises(DtypeError, match=r"state is torch.float16; native code takes torch.float32"):
        forward(RecurrenceProblem(query, key, value, state=torch.zeros(1, 2, 8, 3, dtype=torch.float16)))
    with pytest.raises(ShapeError, match=r"each needs the four axes \(batch, heads, tokens, dim\)"):
        forward(RecurrenceProblem(query, key, value[0]))
    with pytest.raises(ShapeError, match=r"decay has the shape \(1, 4, 5\); .* needs \(1, 2, 5\) or \(1, 2, 5, 8\)"):
        forward(RecurrenceProblem(query, key, value, decay=torch.zeros(1, 4, 5)))
    with pytest.raises(ShapeError, match=r"query has 3 heads and key 2"):
        forward(RecurrenceProblem(query[:, :3], key, value))
    with pytest.raises(ConfigurationError, match=r"feature_map is 'relu'; native code has \('identity', 'elu'\)"):
        forward(RecurrenceProblem(query, key, value, feature_map=cast("Any", "relu")))
    with pytest.raises(ConfigurationError, match=r"the delta rule has no total of weights"):
        forward(RecurrenceProblem(query, key, value, beta=torch.zeros(1, 2, 5), normalize=True))
    with pytest.raises(ConfigurationError, match="removal is of the delta rule .* pass a beta, ones for instance"):
        forward(RecurrenceProblem(query, key, value, removal=key))
    with pytest.raises(DtypeError, match=r"removal is torch.bfloat16 and key torch.float32"):
        forward(RecurrenceProblem(query, key, value, beta=torch.zeros(1, 2, 5), removal=key.bfloat16()))
    with pytest.raises(ShapeError, match=r"removal has the shape \(1, 2, 5, 2\)"):
        forward(RecurrenceProblem(query, key, value, beta=torch.zeros(1, 2, 5), removal=key[..., :2]))
    one = RecurrenceProblem(query[:, :, :1], key[:, :, :1], value[:, :, :1], state=torch.zeros(1, 2, 3, 8))
    with pytest.raises(ShapeError, match=r"state has the shape \(1, 2, 3, 8\)"):
        forward(one)


def test_reasons_against_a_problem():
    query, key, value = torch.zeros(1, 4, 5, 8), torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 3)
    why_not, gate = CPU.recurrences.why_not, torch.zeros(1, 2, 5)
    assert why_not(RecurrenceProblem(query, key, value, gate, gate, torch.zeros(1, 2, 8, 3))) == []
    (reason,) = why_not(RecurrenceProblem(query, key, value, gate.double()))
    assert reason == "its code reads the decay as float32 on the CPU; this is torch.float64 on cpu"
    (reason,) = why_not(RecurrenceProblem(query, key, value, state=torch.zeros(1, 2, 8, 3, device="meta")))
    assert reason == "its code reads the state as float32 on the CPU; this is torch.float32 on meta"
    assert why_not(RecurrenceProblem(query, key, value, gate, gate, removal=key)) == []
    (reason,) = why_not(RecurrenceProblem(query, key, value, beta=gate, removal=key, feature_map="elu"))
    assert reason == "its code removes the values of keys without a feature map"
    (reason,) = why_not(RecurrenceProblem(query, key, value, feature_map="unit_norm"))
    assert reason == "its code has the feature maps ('identity', 'elu'); this is 'unit_norm'"
    (reason,) = why_not(RecurrenceProblem(query, key, value, beta=gate, normalize=True))
    assert reason == "its code has no total of weights for the delta rule"


def test_a_step_is_of_one_token_on_the_cpu_in_a_known_dtype():
    query, key, value = torch.zeros(1, 4, 1, 8), torch.zeros(1, 2, 1, 8), torch.zeros(1, 2, 1, 3)
    options: dict[str, Any] = {"feature_map": "identity", "normalize": False, "scale": 1.0, "recent_share": 0.0}
    prepare = CPU.recurrences.prepare_step
    step = prepare(query, key, value, None, None, **options)
    assert step is not None
    assert step.takes(query, key, value, None, None)
    assert not step.takes(query, key, value.to("meta"), None, None)
    two = [torch.cat([tensor, tensor], 2) for tensor in (query, key, value)]
    exact = [tensor.double() for tensor in (query, key, value)]
    for q, k, v in (two, exact, [tensor.to("meta") for tensor in (query, key, value)]):
        assert prepare(q, k, v, None, None, **options) is None


def test_the_order_of_feature_maps_is_that_of_the_header():
    header = (build.SOURCES / "recurrence.h").read_text("utf-8")
    (names,) = re.findall(r"enum \{ (IDENTITY, \w+) \}", header)
    assert tuple(names.lower().split(", ")) == recurrence_struct.FEATURE_MAPS
