"""The additive kernel: what `tiled` computes, by native code."""

import pytest
import torch

import regard
from regard import biases, masks, native, scores
from regard.kernels.additive import Additive
from regard.kernels.tiled import Tiled

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=f"there is no native code: {native.why_not()}")

SCORES = [scores.Additive(5, 7, 11), scores.Concat(5, 7, 11)]


def run(kernel: Additive | Tiled, score: scores.Score, **options) -> list[torch.Tensor]:
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
        {"sinks": torch.zeros(4)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_the_same_as_tiled(score, tile, options):
    expected = run(Tiled(), score, **options)
    torch.testing.assert_close(run(Additive(tile), score, **options), expected, atol=2e-4, rtol=2e-4)


def test_it_is_chosen_where_it_can():
    query = torch.randn(2, 4, 70, 5)
    score = scores.Additive(5, 5, 11)
    assert regard.explain(query, query, query, score=score).kernel.name == "additive"
    half = query.bfloat16()
    text = str(regard.explain(half, half, half, score=score.bfloat16()))
    assert "its code computes float32; this is bfloat16" in text


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
