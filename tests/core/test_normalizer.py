"""A normalizer of one's own gets what softmax attention has: shown by a sibling, normalised ReLU attention.

w_ij = relu(s_ij) / Σ_k relu(s_ik), a row without positive scores has output 0. Up to `RELU` is all that it is; nothing
else in the package knows of it.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks, scores
from regard.attention import observe_problem, run_problem
from regard.backends.torch.tile_loop import ScoredTiles, TiledAttention
from regard.core.batched_problem import BatchedProblem, ProblemGradients, Saved
from regard.core.normalizer import RatioNormalizer, normalizer_named, register_normalizer
from regard.core.problem import Problem
from regard.core.score_forms import at_least_float32, per_head, per_key_head
from regard.errors import ConfigurationError, KernelError
from regard.kernels import Cost, Plan, Result, choose
from regard.kernels.base import EVERY_GRADIENT
from regard.kernels.custom_op import apply_kernel, register
from regard.kernels.hooks import attention_hook
from regard.kernels.planning.unit_costs import tilewise_cost
from regard.kernels.validation import make_problem
from regard.testing import Case, assert_agrees, suite
from regard.testing.oracle import Oracle
from regard.tiles.tile_size import SCORES_PER_TILE, block_rows


def log_relu(scores: Tensor) -> Tensor:
    """log relu(s); the inner `where` keeps the gradient of what is not taken finite."""
    positive = scores > 0
    return torch.where(positive, torch.where(positive, scores, 1.0).log(), -math.inf)


def relu_formula(problem: Problem) -> Result:
    """Output and lse with all weights in memory."""
    numerators = problem.scores().relu()  # [..., H, M, N]; relu(-inf) = 0
    total = numerators.sum(-1, keepdim=True)
    weights = numerators / total.masked_fill(total == 0, 1.0)
    if problem.dropout is not None:
        kept = problem.dropout.dropout_mask(*problem.dropout_indices(problem.grid())).view(weights.shape)
        weights = weights * kept / (1 - problem.dropout.probability)
    value = at_least_float32(problem.value).to(weights.dtype)
    output = per_head(lambda folded: folded @ value, weights, value)  # [..., H, M, Dv]
    lse = torch.where(total > 0, torch.where(total > 0, total, 1.0).log(), -math.inf).squeeze(-1)
    return Result(output.to(problem.value.dtype), lse)


class ReluTiled:
    """Tile by tile in memory linear in the lengths, with a gradient of its own."""

    name = "relu_tiled"

    def __init__(self) -> None:
        self.tiled = TiledAttention(SCORES_PER_TILE)
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        return ["it has no sinks"] if problem.sinks is not None else []

    def cost(self, problem: Problem) -> Cost:
        return tilewise_cost(problem, SCORES_PER_TILE)

    def gradients(self, problem: Problem) -> frozenset[str]:
        return EVERY_GRADIENT

    def run(self, problem: Problem) -> Result:
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        output, lse = batched.empty_results()
        output.zero_()
        lse.fill_(-math.inf)
        for batch, rows in block_rows(batched.problem, SCORES_PER_TILE):
            tiles, value = (
                ScoredTiles(batched.part(batch), SCORES_PER_TILE),
                at_least_float32(batched.value[batch]),
            )
            for row in rows:
                sums: Tensor | float = 0.0
                total = lse.new_zeros(*lse[batch].shape[:2], row.rows.stop - row.rows.start, 1)
                for columns, masked in tiles.in_row(row):
                    numerators = tiles.scores(row.rows, columns, masked)[0].relu()
                    total += numerators.sum(-1, keepdim=True)
                    if (dropout_mask := tiles.dropout_mask(row.rows, columns)) is not None:
                        numerators = numerators * dropout_mask
                    part = value[:, :, columns]
                    sums = sums + per_head(lambda folded, part=part: folded @ part, numerators, part)
                output[batch][:, :, row.rows] = sums / total.masked_fill(total == 0, 1.0) / tiles.keep_probability
                lse[batch][:, :, row.rows] = total.log().squeeze(-1)
        return output, lse

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """dS = [s > 0] / total · (dP - delta), where softmax has dS = P · (dP - delta)."""
        gradients = batched.zero_gradients(bias=saved.needs_bias_grad)
        for batch, rows in block_rows(batched.problem, SCORES_PER_TILE, together=saved.needs_bias_grad):
            tiles, value = (
                ScoredTiles(batched.part(batch), SCORES_PER_TILE),
                at_least_float32(batched.value[batch]),
            )
            into = gradients.part(batch)
            for row in rows:
                here = saved.part(batch).part(rows=row.rows)
                inverse, delta = here.lse.neg().exp().unsqueeze(-1), here.delta().unsqueeze(-1)
                upstream = at_least_float32(here.grad_output) / tiles.keep_probability
                for columns, masked in tiles.in_row(row):
                    part = value[:, :, columns]
                    scores, slope = tiles.scores(row.rows, columns, masked)
                    weights, inner = scores.relu() * inverse, per_head(lambda g, part=part: g @ part.mT, upstream, part)
                    used = weights
                    if (dropout_mask := tiles.dropout_mask(row.rows, columns)) is not None:
                        inner, used = inner * dropout_mask, weights * dropout_mask
                    into.value[:, :, columns] += per_key_head(used, upstream, part)
                    tiles.add_gradients(row.rows, columns, (inner - delta) * (scores > 0) * inverse, slope, into)
            tiles.finish(into)
        return gradients


TILED = ReluTiled()


class Relu(RatioNormalizer):
    """relu(s) / Σ relu(s)."""

    name = "own relu"
    kernels = (TILED,)

    def log_numerator(self, scores: Tensor) -> Tensor:
        return log_relu(scores)


RELU = register_normalizer(Relu())


def relu_attention(query: Tensor, key: Tensor, value: Tensor, *, kernel: str | None = None, **options) -> Tensor:
    return run_problem(replace(make_problem(query, key, value, **options), normalizer=RELU), kernel).output


# What it gets.


def inputs(dtype: torch.dtype = torch.float64, heads: int = 4, key_heads: int = 2) -> list[Tensor]:
    shapes = (2, heads, 37, 8), (2, key_heads, 53, 8), (2, key_heads, 53, 5)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def by_rows(*tensors: Tensor, keep: Tensor | None, bias: Tensor | None) -> Tensor:
    """The definition, one row of one head at a time."""
    query, key, value = tensors
    output = torch.zeros(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    group = query.shape[1] // key.shape[1]
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            for row in range(query.shape[2]):
                score = key[batch, head // group] @ query[batch, head, row] / query.shape[-1] ** 0.5
                score = score if bias is None else score + bias[head, row]
                weight = score.clamp(min=0) if keep is None else score.clamp(min=0) * keep[row]
                if weight.sum() > 0:
                    output[batch, head, row] = (weight / weight.sum()) @ value[batch, head // group]
    return output


MASKS = [None, masks.causal(), masks.causal() & masks.window(before=5), masks.strided(3)]


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_it_is_the_definition_forward_and_backward(mask):
    tensors, bias = inputs(), biases.alibi(4)
    keep = None if mask is None else mask.dense(37, 53)
    added = bias.values(regard.explain(*tensors, bias=bias).problem.grid())
    expected = by_rows(*tensors, keep=keep, bias=added)
    found = relu_attention(*tensors, mask=mask, bias=bias)
    torch.testing.assert_close(found, expected)
    above = torch.randn_like(found)
    gradients = [torch.autograd.grad(of, tensors, above) for of in (found, expected)]
    for has, needs in zip(*gradients, strict=True):
        torch.testing.assert_close(has, needs)


def test_learned_biases_softcap_dropout_and_additive_scores_as_the_formula_has_them():
    query, key, value = inputs()
    table = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    score = scores.Additive(8, 8, 6).double()
    cases: tuple[dict[str, Any], ...] = ({"softcap": 2.0}, {"dropout_p": 0.3}, {"score": score})
    for options in cases:
        problem = replace(make_problem(query, key, value, bias=biases.relative(table), **options), normalizer=RELU)
        leaves = [query, key, value, table, *(score.parameters() if "score" in options else ())]
        found, expected = run_problem(problem), relu_formula(problem)
        torch.testing.assert_close(found.output, expected.output)
        above = torch.randn_like(found.output)
        for has, needs in zip(
            *(torch.autograd.grad(of.output, leaves, above, retain_graph=True) for of in (found, expected)), strict=True
        ):
            torch.testing.assert_close(has, needs)


def test_second_derivatives():
    tensors = [torch.randn(1, 2, 5, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    assert torch.autograd.gradgradcheck(lambda *of: relu_attention(*of, mask=masks.causal()), tensors)


def test_compile():
    tensors = inputs(torch.float32)
    compiled = torch.compile(
        lambda q, k, v: relu_attention(q, k, v, mask=masks.causal()), fullgraph=True, backend="aot_eager"
    )
    found, expected = compiled(*tensors), relu_attention(*tensors, mask=masks.causal())
    torch.testing.assert_close(found, expected)
    above = torch.randn_like(found)
    gradients = [torch.autograd.grad(of, tensors, above) for of in (found, expected)]
    for has, needs in zip(*gradients, strict=True):
        torch.testing.assert_close(has, needs)


def test_vmap_and_per_sample_gradients():
    query, key, value = (tensor.detach() for tensor in inputs())
    each = torch.func.vmap(lambda q, k, v: relu_attention(q, k, v, mask=masks.causal()))
    torch.testing.assert_close(
        each(query[:, None], key[:, None], value[:, None])[:, 0], relu_attention(query, key, value, mask=masks.causal())
    )

    def total(query, key, value):
        return relu_attention(query[None], key[None], value[None]).square().sum()

    found = torch.func.vmap(torch.func.grad(total))(query, key, value)
    query = query.clone().requires_grad_()
    torch.testing.assert_close(found, torch.autograd.grad(relu_attention(query, key, value).square().sum(), query)[0])


@pytest.mark.parametrize("which", [1, 2])
def test_nan_behind_the_mask_reaches_nothing(which):
    tensors = inputs()
    expected = relu_attention(*tensors, mask=masks.causal(), query_positions=range(37))
    with torch.no_grad():
        tensors[which][0, 0, 40] = float("nan")
    found = relu_attention(*tensors, mask=masks.causal(), query_positions=range(37))
    torch.testing.assert_close(found, expected)
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(found.sum(), tensors))
    seen = relu_attention(*tensors, query_positions=range(37))
    assert seen[0, 0].isnan().any()
    assert seen[1].isfinite().all()


def test_hooks_and_lenses():
    tensors, heard = inputs(), []
    with attention_hook(lambda problem, lse: heard.append((problem, lse))):
        output = relu_attention(*tensors, mask=masks.causal())
    ((problem, lse),) = heard
    assert problem.normalizer is RELU
    weights, entropy, received, top = lenses.Weights(), lenses.Entropy(), lenses.Received(), lenses.TopK(2)
    seen = observe_problem(problem, (weights, entropy, received, top))
    true = relu_formula(replace(problem, value=torch.eye(53, dtype=torch.float64).expand(2, 2, 53, 53))).output
    torch.testing.assert_close(seen[weights], true)
    torch.testing.assert_close(seen[entropy], -torch.special.xlogy(true, true).sum(-1))
    torch.testing.assert_close(seen[received], true.sum(-2))
    torch.testing.assert_close(seen[top].weights, true.topk(2).values)
    torch.testing.assert_close(seen.output, output)
    torch.testing.assert_close(seen.lse, lse)


def test_parts_of_a_row_are_merged():
    query, key, value = inputs()
    whole = run_problem(replace(make_problem(query, key, value, wants_lse=True), normalizer=RELU))
    parts = []
    for columns in (slice(0, 20), slice(20, 53)):
        problem = make_problem(query, key[:, :, columns], value[:, :, columns], wants_lse=True)
        part = run_problem(replace(problem, normalizer=RELU))
        parts.append((part.output, part.lse))
    output, lse = regard.merge(parts)
    torch.testing.assert_close(output, whole.output)
    torch.testing.assert_close(lse, whole.lse)


class Layer(torch.nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return relu_attention(query, key, value, mask=masks.causal())


def test_records(tmp_path):
    from regard.explorer import Atlas, record

    tensors = inputs(torch.float32)
    model = Layer()
    with record(model, dtype="keep") as recording, torch.no_grad():
        model(*tensors)
    recording.atlas().save(tmp_path / "relu.atlas")
    recorded = Atlas.open(tmp_path / "relu.atlas").maps[0]
    problem = replace(make_problem(*tensors, mask=masks.causal()), normalizer=RELU)
    true = relu_formula(replace(problem, value=torch.eye(53).expand(2, 2, 53, 53))).output
    found = torch.from_numpy(recorded.weights(1, slice(0, 37), slice(0, 53)))
    torch.testing.assert_close(found, true[0, 1], atol=1e-5, rtol=1e-4)


def test_a_normalizer_that_is_not_there_is_named():
    with pytest.raises(ConfigurationError, match="there is no normalizer 'own rleu'; did you mean 'own relu'"):
        normalizer_named("own rleu")
    with pytest.raises(
        ConfigurationError, match="there is another normalizer 'own relu': each needs a name of its own"
    ):
        register_normalizer(Relu())
    with pytest.raises(KernelError, match="there is no kernel 'cpu_flash'; .*'relu_tiled'"):
        relu_attention(*inputs(), kernel="cpu_flash")


def test_the_name_of_another_kernel_is_refused():
    class Tiled(ReluTiled):
        name = "tiled"

    with pytest.raises(ConfigurationError, match="there is another kernel 'tiled', a TiledKernel: Tiled needs a name"):
        Tiled()


def test_the_plan_says_which_normalizer_it_is():
    problem = replace(make_problem(*inputs(), mask=masks.causal()), normalizer=RELU)
    plan = Plan(problem, choose(problem))
    assert "own relu attention of 37 queries over 53 keys" in str(plan)
    assert "relu_tiled" in str(plan)
    assert "cpu_flash" not in str(plan)


class ReluOracle(Oracle):
    """relu(S) / Σ relu(S), from the masked scores."""

    normalizer = RELU

    def weights(self, scores: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        positive = scores.relu()
        total = positive.sum(-1, keepdim=True)
        lse = torch.where(total > 0, torch.where(total > 0, total, 1.0).log(), -math.inf)
        return positive / total.masked_fill(total == 0, 1.0), lse.squeeze(-1)


class Sibling:
    """The tile kernel, on the cases of the agreement suite."""

    name = "relu_tiled"
    exponential = 2.0**-20  # sums are stored as logarithms of some units, which float32 rounds by 2⁻²²

    def why_not(self, problem: Problem) -> list[str]:
        return TILED.why_not(problem)

    def run(self, problem: Problem) -> Result:
        return run_problem(problem)


GROUPS = 10
"""Tests that share the cases."""


@pytest.fixture(scope="module")
def pairs() -> list[tuple[Sibling, Case]]:
    # A score of -infinity has the weight 0 here, and may make a softmax's row NaN: attended infinity is left out.
    return [(sibling, case) for sibling, case in suite([Sibling()], strength=2) if case.poison not in ("query", "key")]


@pytest.mark.parametrize("group", range(GROUPS))
def test_it_passes_the_agreement_suite(group: int, pairs, assert_all):
    assert_all(partial(assert_agrees, oracle=ReluOracle()), pairs[group::GROUPS])
