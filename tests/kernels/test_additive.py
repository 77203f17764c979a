"""The additive kernel: what `tiled` computes, by native code."""

from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import regard
from regard import biases, masks, native, scores
from regard.kernels.additive import AdditiveKernel
from regard.kernels.tiled import TiledKernel
from regard.kernels.validation import make_problem

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=f"there is no native code: {native.why_not()}")

SCORES = [scores.Additive(5, 7, 11), scores.Concat(5, 7, 11)]


def run(kernel: AdditiveKernel | TiledKernel, score: scores.Score, **options) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((2, 4, 70, 5), (2, 2, 90, 7), (2, 2, 90, 6))
    )
    torch.manual_seed(1)
    problem = regard.explain(query, key, value, score=score, **options).problem
    assert not kernel.why_not(problem)
    output = kernel.run(problem).output
    leaves = [query, key, value, *score.parameters()]
    if problem.bias is not None:
        leaves += [held for held in problem.bias.parameters() if held.requires_grad]
    return [output.detach(), *torch.autograd.grad(output.sin().sum(), leaves)]


def largest_allocation(work: Callable[[], object]) -> int:
    """Bytes of the largest tensor that is made by a function."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        work()
    return max(event.self_cpu_memory_usage for event in made.events() or ())


@pytest.mark.parametrize("score", SCORES, ids=lambda score: type(score).__name__)
@pytest.mark.parametrize("tile", [2**12, 2**15, 2**18])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": masks.causal()},
        {"mask": masks.window(before=9) & masks.padding(lengths=[80, 33])},
        {"mask": masks.causal(), "bias": biases.alibi(4), "softcap": 1.5},
        {"bias": biases.relative(torch.randn(4, 8).requires_grad_(), max_distance=20), "dropout_p": 0.2},
        {"mask": masks.padding(lengths=[80, 0]), "softcap": 2.0, "dropout_p": 0.3},
        {"sinks": torch.zeros(4)},
        {"sinks": torch.zeros(4), "mask": masks.padding(lengths=[0, 5])},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_same_as_tiled(score, tile, options):
    expected = run(TiledKernel(), score, **options)
    torch.testing.assert_close(run(AdditiveKernel(tile), score, **options), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.padding(lengths=[61, 0, 3])], ids=repr)
def test_batches_by_themselves_and_together(mask):
    """Each batch alone fills a tile of this size; the results are those of all batches at once."""
    query, key, value = (torch.randn(3, 2, 61, width) for width in (5, 7, 6))
    score = scores.Additive(5, 7, 11).requires_grad_(False)
    problem = make_problem(query, key, value, score=score, mask=mask, wants_lse=True)
    few, all_at_once = (AdditiveKernel(tile).run(problem) for tile in (2**12, 2**22))
    torch.testing.assert_close((few.output, few.lse), (all_at_once.output, all_at_once.lse))
    expected = TiledKernel().run(problem)
    torch.testing.assert_close((few.output, few.lse), (expected.output, expected.lse), atol=1e-5, rtol=1e-5)


def test_memory_is_linear_in_the_lengths():
    """Scores of all pairs would be 64 MiB; what is allocated at once is far less."""
    query, key, value = torch.randn(3, 1, 4096, 4).unbind()
    score = scores.Additive(4, 4, 4).requires_grad_(False)
    most = largest_allocation(lambda: regard.attention(query, key, value, score=score, kernel="additive"))
    assert 4 * 4 * 4096 <= most < 2**20


def test_it_is_chosen_where_it_can():
    query = torch.randn(2, 4, 70, 5)
    score = scores.Additive(5, 5, 11)
    assert regard.explain(query, query, query, score=score).kernel.name == "additive"
    for dtype in (torch.bfloat16, torch.float16):
        half = query.to(dtype)
        assert regard.explain(half, half, half, score=score.to(dtype)).kernel.name == "additive"
    wide = query.double()
    text = str(regard.explain(wide, wide, wide, score=score.double()))
    assert "its code reads float32, bfloat16 or float16; this is float64" in text


def test_large_projections_saturate():
    """e^2x has no place in float32 from x = 45 on: there the code has another way."""
    query = torch.tensor([[-60.0, 60.0], [0.0, 1e4], [44.5, -44.5]])
    key = torch.tensor([[60.0, 60.0], [-1e4, 0.0], [44.5, 44.5], [0.5, -0.5]])
    score = scores.Additive(2, 2, 2)
    with torch.no_grad():
        for parameter in (score.query_weight, score.key_weight):
            parameter.copy_(torch.eye(2))
        score.weight.copy_(torch.tensor([1.0, -2.0]))
    value = torch.eye(4)
    exact = torch.tanh(query.double()[:, None] + key.double()[None]) @ score.weight.detach().double()
    output = regard.attention(query, key, value, score=score, kernel="additive")
    torch.testing.assert_close(output, exact.softmax(-1).float(), atol=1e-6, rtol=1e-5)
