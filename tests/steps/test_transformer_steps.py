import math
from typing import Any

import pytest
import torch
from torch import nn

from regard import masks
from regard.errors import ConfigurationError, ShapeError
from regard.nn import Attention, BranchNorm, FeedForward, PostNorm, PreNorm, Projections, TransformerBlock
from regard.steps import WhatIf, transformer_walkthrough, worked_example
from regard.steps.wording import STEPS

DIM, LENGTH, MEMORY = 6, 5, 3


def _block(residual: Any = PostNorm, *, cross=False, bias=True, activation=nn.functional.relu):
    torch.manual_seed(1)
    block = TransformerBlock(
        Attention(Projections(DIM, 2), mask=masks.causal()),
        FeedForward(DIM, 7, bias=bias, activation=activation),
        lambda: residual(nn.LayerNorm(DIM)),
        cross_attention=Attention(Projections(DIM, 2)) if cross else None,
    )
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    return block.eval()


def _norm(rows, norm=None):
    centred = rows - rows.mean(-1, keepdim=True)
    scaled = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return scaled if norm is None else scaled * norm.weight.double() + norm.bias.double()


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize("residual", [PostNorm, PreNorm])
def test_the_last_table_is_the_output_of_the_block(residual, cross):
    block, x = _block(residual, cross=cross), torch.randn(1, LENGTH, DIM)
    memory = torch.randn(1, MEMORY, DIM) if cross else None
    steps = transformer_walkthrough(block, x, memory)
    last = f"{'normalized' if residual is PostNorm else 'residual'}.{3 if cross else 2}"
    assert steps.keys[-1] == last
    with torch.no_grad():
        assert torch.equal(steps[last].numbers, block(x, memory)[0].double())
    assert ("cross.head1.weights" in steps.keys) is cross
    assert steps["head1.weights"].numbers.triu(1).eq(0).all()  # causal


@pytest.mark.parametrize("residual", [PostNorm, PreNorm])
def test_each_table_follows_from_those_before_it(residual):
    block, x = _block(residual), torch.randn(1, LENGTH, DIM)
    steps = transformer_walkthrough(block, x)
    table = lambda key: steps[key].numbers  # noqa: E731
    norms = block.attention_residual.norm, block.feed_forward_residual.norm
    before = x[0].double()
    for number, (branch, norm) in enumerate(zip(("output", "feed_forward"), norms, strict=True), start=1):
        torch.testing.assert_close(table(f"residual.{number}"), before + table(branch), rtol=1e-5, atol=1e-5)
        source = table(f"residual.{number}") if residual is PostNorm else before
        torch.testing.assert_close(table(f"normalized.{number}"), _norm(source, norm), rtol=1e-5, atol=1e-5)
        before = table(f"{'normalized' if residual is PostNorm else 'residual'}.{number}")
    inner = table("normalized.1") if residual is PostNorm else table("normalized.2")
    hidden = (inner @ table("up_projection") + table("up_bias")).clamp(min=0)
    torch.testing.assert_close(table("hidden"), hidden, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(
        table("feed_forward"), hidden @ table("down_projection") + table("down_bias"), rtol=1e-5, atol=1e-5
    )


def test_the_worked_example_by_the_formulas_of_the_paper():
    steps = worked_example("transformer-block")
    x = torch.tensor([[1.0, 0, 0, 1], [0, 1, 1, 0], [0, 0, 1, 0]], dtype=torch.float64)
    assert torch.equal(steps["input"].numbers, x)
    matrices = {name: steps[f"{name}_projection"].numbers for name in ("query", "key", "value", "output", "up", "down")}
    scores = (x @ matrices["query"]) @ (x @ matrices["key"]).T / 2
    assert scores.tolist() == [[0, 2, 0], [3, 3, 1], [1, 2, 0]]
    attended = _norm(x + scores.softmax(-1) @ x @ matrices["value"] @ matrices["output"])
    output = _norm(attended + (attended @ matrices["up"]).clamp(min=0) @ matrices["down"])
    torch.testing.assert_close(steps["normalized.1"].numbers, attended, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(steps["normalized.2"].numbers, output, rtol=1e-5, atol=1e-5)
    assert (steps["hidden"].numbers == 0).any()  # ReLU has something to do in each row
    assert (steps["hidden"].numbers > 0).any(-1).all()


def test_what_is_written_out_below_a_table_is_its_first_number():
    steps = worked_example("transformer-block")
    for key in ("residual.1", "normalized.1", "hidden", "feed_forward", "residual.2", "normalized.2"):
        assert math.isclose(float(steps[key].example.split("= ")[-1]), steps[key].numbers[0, 0], abs_tol=6e-4), key


def test_a_change_of_the_attention_is_carried_through_the_block():
    before, after = worked_example("transformer-block"), worked_example("transformer-block", WhatIf(scale=1.0))
    x = before["input"].numbers
    matrices = {name: before[f"{name}_projection"].numbers for name in ("value", "output", "up", "down")}
    scores = before["scores"].numbers  # not divided by 2
    attended = _norm(x + scores.softmax(-1) @ x @ matrices["value"] @ matrices["output"])
    output = _norm(attended + (attended @ matrices["up"]).clamp(min=0) @ matrices["down"])
    torch.testing.assert_close(after["normalized.2"].numbers, output, rtol=1e-5, atol=1e-5)
    marked = after.compared(before)["normalized.2"].marked
    assert marked is not None
    assert marked.all()


def test_every_step_has_its_wording_in_both_languages():
    for key in ("residual", "normalized", "up_projection", "up_bias", "hidden", "down_projection", "feed_forward"):
        assert STEPS[key].title.ko


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (lambda: _block(BranchNorm), "block has a BranchNorm; its steps are known of PostNorm and PreNorm"),
        (lambda: _block(activation=nn.functional.gelu), "another feed-forward network than regard.nn.FeedForward"),
    ],
)
def test_other_parts_of_a_block_are_refused(block, message):
    with pytest.raises(ConfigurationError, match=message):
        transformer_walkthrough(block(), torch.randn(1, LENGTH, DIM))


def test_a_missing_memory_and_a_batch_are_refused():
    with pytest.raises(ShapeError, match="the block has cross-attention, and got no memory"):
        transformer_walkthrough(_block(cross=True), torch.randn(1, LENGTH, DIM))
    with pytest.raises(ShapeError, match="steps are those of one sequence"):
        transformer_walkthrough(_block(), torch.randn(2, LENGTH, DIM))
