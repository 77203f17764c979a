"""Additive attention in Triton, by its interpreter: through the kernel that calls it and by itself."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard import biases, masks
from regard.backends.triton.triton_backend import TRITON
from regard.core.batched_problem import BatchedProblem, Saved
from regard.core.dropout import Dropout
from regard.core.problem import Problem
from regard.core.score_forms import AdditivePairs
from regard.kernels.additive import AdditiveKernel
from regard.testing import Case, Expected, assert_agrees, assert_close

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of log2(0) and of NaN, where a device has none
]

INF, NAN = math.inf, math.nan

CASES = (
    Case(score="additive", mask="causal", bias="relative", variant="softcap", layout="2d", lengths="67x71"),
    Case(score="additive", mask="keep", layout="2d", lengths="5x71", memory="strided", dropout="dropout"),
    Case(score="additive", bias="pairs", layout="2d", lengths="67x37", poison="query"),
    Case(score="additive", mask="causal", layout="3d", lengths="3x5", poison="masked"),
    Case(score="concat", bias="pairs", layout="2d", lengths="7x5", dtype="float16", poison="key"),
    Case(score="additive", mask="documents", variant="softcap", layout="2d", dtype="bfloat16", poison="value"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_kernel_that_calls_it(case):
    assert_agrees(AdditiveKernel(), case)


def pairs_of(problem: Problem) -> AdditivePairs:
    assert isinstance(problem.pairs, AdditivePairs)
    return problem.pairs


def problem_of(
    queries=23, keys=71, *, heads=2, shared=1, batch=1, features=7, dim=13, size=1.0, dtype=torch.float32, **terms
) -> Problem:
    query, key = (size * torch.randn(batch, n, length, features) for n, length in ((heads, queries), (shared, keys)))
    pairs = AdditivePairs(query.to(dtype), key.to(dtype), torch.randn(features).to(dtype))
    return Problem(pairs, torch.randn(batch, shared, keys, dim).to(dtype), wants_lse=True, **terms)


def formula(problem: Problem, above: Tensor, above_lse: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output, log-sum-exp and gradients of query, key, value, weight and the parameters of a bias, by the formula."""
    tensors = problem.pairs.query, problem.pairs.key, problem.value, pairs_of(problem).weight
    query, key, value, weight = leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    scores = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) * weight.view(-1, 1, 1, weight.shape[-1])
    scores, parameters = scores.sum(-1), []
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if problem.bias is not None:
        parameters = [held.detach().to(dtype).requires_grad_() for held in problem.bias.parameters()]
        scores = scores + problem.bias.with_parameters(parameters).evaluate(problem.grid())
    if (keep := problem.keep()) is not None:
        scores = scores.masked_fill(~keep, -INF)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -INF, 0.0).unsqueeze(-1))
    if problem.dropout is not None:
        kept = problem.dropout.dropout_mask(*problem.dropout_indices(problem.grid()))
        weights = weights * kept / (1 - problem.dropout.probability)
    output, some = weights @ value, lse != -INF
    total = (output * above.to(dtype)).sum() + (lse[some] * above_lse.to(dtype)[some]).sum()
    gradients = torch.autograd.grad(total, [*leaves, *parameters])
    return [output.detach(), lse.detach(), *(gradient.nan_to_num(0.0) for gradient in gradients)]


def computed(problem: Problem, above: Tensor, above_lse: Tensor) -> list[Tensor]:
    """The same by the backend, without what kernels add."""
    additive, batched = TRITON.additive, BatchedProblem.from_problem(problem)
    assert additive is not None
    with torch.no_grad():
        output, lse = additive.forward(batched, 2**10)
        saved = Saved(output, lse, above, above_lse.masked_fill(lse == -INF, 0.0), problem.bias is not None)
        found = additive.backward(batched, saved, 2**10)
    assert found.weight is not None
    return [output, lse, found.query, found.key, found.value, found.weight, *found.bias]


def upstream(problem: Problem) -> tuple[Tensor, Tensor]:
    rows = problem.weights_shape[:-1]
    return torch.randn(*rows, problem.value.shape[-1]).to(problem.value.dtype), torch.randn(rows)


def assert_found(found: list[Tensor], problem: Problem, above: tuple[Tensor, Tensor]) -> None:
    """Compare with float64, within what the formula in float32 is off, at the inputs and at roundings of them."""
    true = formula(problem, *above, torch.float64)
    off = [formula(each, *above, torch.float32) for each in (problem, *map(rounded, [problem] * 4))]
    size = max(float(gradient.abs().mean()) for gradient in true[2:])
    names = "output", "lse", "query", "key", "value", "weight", "bias"
    for name, has, wanted, *others in zip(names, found, true, *off, strict=False):
        dtype = torch.float32 if name == "lse" else problem.value.dtype
        magnitude = 0.0 if name == "output" else 1.0 if name == "lse" else size
        assert_close(has.to(dtype), Expected(wanted, dtype, others, magnitude), name)


def rounded(problem: Problem) -> Problem:
    """A problem as near to another one as its dtype tells apart."""
    eps = torch.finfo(problem.value.dtype).eps

    def near(tensor: Tensor) -> Tensor:
        return tensor.float() * (1 + eps * (torch.randint(2, tensor.shape) - 0.5))

    query, key, weight = map(near, (problem.pairs.query, problem.pairs.key, pairs_of(problem).weight))
    return replace(problem, pairs=AdditivePairs(query, key, weight), value=near(problem.value))


def assert_near(problem: Problem) -> None:
    """Compute a problem, and compare."""
    above = upstream(problem)
    assert_found(computed(problem, *above), problem, above)


TABLE = torch.linspace(-1, 1, 16).view(2, 8)


@pytest.mark.parametrize(
    "terms",
    [
        {"mask": masks.window(before=9, after=3), "dropout": Dropout(0.3, torch.tensor(7))},
        {"mask": masks.padding(lengths=[40, 0]), "bias": biases.relative(TABLE, max_distance=20)},
        {"bias": biases.tensor(torch.linspace(-2, 2, 142).view(2, 1, 71).requires_grad_()), "softcap": 1.5},
    ],
    ids=lambda terms: "-".join(terms),
)
def test_masks_biases_dropout(terms):
    assert_near(problem_of(batch=2 if isinstance(terms.get("mask"), type(masks.padding(lengths=[1]))) else 1, **terms))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits(dtype):
    assert_near(problem_of(dtype=dtype, dim=24, mask=masks.causal()))


@pytest.mark.parametrize("size", [0.01, 5.0, 40.0])
def test_sizes_of_tokens(size):
    """Small ones, whose digits count; large ones, whose exponentials have no place in float32; and both in a tile."""
    problem = problem_of(size=size)
    problem.pairs.key[:, :, 64:] *= 0.1 / size
    if size > 10:
        problem.pairs.query[:, :, 3], problem.pairs.key[:, :, 5] = 60.0, -60.0
    assert_near(problem)


def test_large_weights():
    """Products of exponentials and weights stay in range: without the bound of weights they would not."""
    problem = problem_of(size=3.0)
    pairs_of(problem).weight[0] = 1e6
    assert_near(problem)


def test_a_weight_of_each_head():
    problem = problem_of()
    assert_near(replace(problem, pairs=replace(pairs_of(problem), weight=torch.randn(2, 7))))


def test_log_sum_exps_that_float32_rounds():
    """Beside a bias of 10⁶ the weights of a row sum to 1: what float32 takes away from its log-sum-exp is found."""
    above = torch.full((2, 23, 71), 1e6)
    above[1] = 0.0
    assert_near(problem_of(bias=biases.tensor(above), mask=masks.causal()))


def poisoned(problem: Problem, *, attended: bool) -> Problem:
    """NaN and infinity in key 8 and its value, query 5 and a number of value 20; few rows attend to any of them."""
    keep = torch.ones(23, 71, dtype=torch.bool)
    keep[:, [8, 20]] = False
    keep[5] = False
    if attended:
        keep[12, 8] = keep[14, 20] = keep[5, 3] = True
    pairs = replace(problem.pairs, query=problem.pairs.query.clone(), key=problem.pairs.key.clone())
    value = problem.value.clone()
    pairs.query[:, :, 5, 2], pairs.key[:, :, 8, 1], value[:, :, 8], value[:, :, 20, 4] = NAN, INF, NAN, -INF
    return replace(problem, pairs=pairs, value=value, mask=masks.where(keep=keep))


def test_masked_nan_reaches_nothing():
    problem = problem_of(bias=biases.tensor(torch.randn(23, 71)))
    above = upstream(problem)
    bad = poisoned(problem, attended=False)
    assert_found(computed(bad, *above), replace(problem, mask=bad.mask), above)


def test_nan_reaches_the_rows_that_attend_to_it():
    """Its rows have no part in gradients, of the output number by number."""
    problem = problem_of()
    above = upstream(problem)
    bad = poisoned(problem, attended=True)
    output, lse, *gradients = computed(bad, *above)
    of_rows = torch.zeros(1, 2, 23, dtype=torch.bool)
    of_rows[:, :, [5, 12]] = True
    assert lse.isnan().equal(of_rows)
    numbers = of_rows[..., None].repeat(1, 1, 1, 13)
    numbers[:, :, 14, 4] = True
    assert output.isfinite().logical_not().equal(numbers)
    clean = replace(problem, mask=bad.mask)
    pairs = replace(clean.pairs, query=clean.pairs.query.clone(), key=clean.pairs.key.clone())
    pairs.query[:, :, 5, 2], pairs.key[:, :, 8, 1] = 0.0, 0.0
    value = clean.value.clone()
    value[:, :, 8], value[:, :, 20, 4] = 0.0, 0.0
    clean = replace(clean, pairs=pairs, value=value)
    above = above[0].masked_fill(numbers, 0.0), above[1].masked_fill(of_rows, 0.0)
    found = output.where(~numbers, formula(clean, *above, torch.float32)[0])
    assert_found([found, lse.where(~of_rows, formula(clean, *above, torch.float32)[1]), *gradients], clean, above)


@pytest.mark.parametrize("sizes", [(0, 7, 3), (5, 0, 3), (5, 7, 0)], ids=str)
def test_nothing(sizes):
    queries, keys, dim = sizes
    problem = problem_of(queries, keys, dim=dim)
    output, lse, *gradients = computed(problem, *upstream(problem))
    assert output.shape == (1, 2, queries, dim)
    assert (lse == -INF).all() or keys
    assert all((gradient == 0).all() for gradient in gradients) or (queries and keys)
