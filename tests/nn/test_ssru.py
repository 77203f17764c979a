"""The SSRU against its formula written out as a sum over earlier tokens, whole and in steps."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import regard
from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.lenses import Entropy, Weights
from regard.nn import SSRU, Attention, FeedForward, PostNorm, PreNorm, Projections, SSRUCache, TransformerBlock
from regard.testing import Expected, assert_close

BATCH, LENGTH, DIM = 3, 37, 53


def layer(dtype=torch.float32):
    torch.manual_seed(1)
    made = SSRU(DIM).to(dtype)
    nn.init.normal_(made.forget.bias)
    return made


def tokens(dtype=torch.float32):
    return torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(2)).to(dtype)


def formula(made, x, dtype=torch.float64):
    """ReLU(Σ_s (1 - f_s) W x_s Π_{r>s} f_r), each term by itself."""
    weights = [one.to(dtype) for one in (made.value.weight, made.forget.weight, made.forget.bias)]
    x = x.to(dtype)
    written = x @ weights[0].T
    forget = 1 / (1 + torch.exp(-(x @ weights[1].T + weights[2])))
    outputs = []
    for now in range(x.shape[1]):
        terms = [(1 - forget[:, s]) * written[:, s] * forget[:, s + 1 : now + 1].prod(1) for s in range(now + 1)]
        outputs.append(torch.stack(terms).sum(0).clamp(min=0))
    return torch.stack(outputs, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_it_is_the_sum_over_earlier_tokens(dtype):
    made, x = layer(dtype), tokens(dtype)
    with torch.no_grad():
        working = torch.float32 if dtype == torch.float64 else dtype
        expected = Expected(formula(made, x), dtype, [formula(made, x, working)])
        assert_close(made(x), expected)


def test_under_autocast_the_state_keeps_single_precision():
    made, x = layer(), tokens()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        output, cache = made.step(x, SSRUCache())
    assert output.dtype == torch.bfloat16
    assert cache.state is not None
    assert cache.state.dtype == torch.float32
    with torch.no_grad():
        low = formula(made.to(torch.bfloat16), x.bfloat16(), torch.bfloat16)
        assert_close(output, Expected(formula(layer(), x), torch.bfloat16, [low]))


def test_gradients_are_those_of_the_sum():
    made, x = layer(torch.float64), tokens(torch.float64).requires_grad_()
    weights = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)
    inputs = (x, *made.parameters())
    found = torch.autograd.grad((made(x) * weights).sum(), inputs)
    expected = torch.autograd.grad((formula(made, x) * weights).sum(), inputs)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [5, 0, 31, 1], [LENGTH]])
def test_steps_equal_the_whole(sizes):
    made, x, cache, outputs = layer(torch.float64), tokens(torch.float64), SSRUCache(), []
    with torch.no_grad():
        for part in x.split(sizes, dim=1):
            output, cache = made.step(part, cache)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, 1), made(x), rtol=1e-13, atol=1e-13)
    assert cache.next_position == LENGTH
    assert cache.state is not None
    assert cache.nbytes == BATCH * DIM * 8


def test_a_cache_is_a_value_whose_rows_move():
    made, x = layer(), tokens()
    with torch.no_grad():
        _, cache = made.step(x[:, :9], made.make_cache())
        moved = cache.reorder(torch.tensor([2, 0, 2, 1]))
        output, _ = made.step(x[[2, 0, 2, 1], 9:], moved)
        torch.testing.assert_close(output, made(x)[[2, 0, 2, 1], 9:])
        again, _ = made.step(x[:, 9:], cache)
        torch.testing.assert_close(again, made(x)[:, 9:])
    assert made.make_cache().reorder(torch.tensor([0, 0])).nbytes == 0
    assert cache.evict() is cache
    with pytest.raises(ShapeError, match=r"rows are in 0..3, but the batch has the size 3"):
        cache.reorder(torch.tensor([0, 3]))
    with pytest.raises(ShapeError, match="the cache has 3 rows, and the tokens are of 2: reorder the cache"):
        made.step(x[:2], cache)


def test_append_is_a_step_of_the_state():
    made, x = layer(), tokens()
    with torch.no_grad():
        forget, written = made.forget(x).sigmoid(), made.value(x)
        appended = SSRUCache().append(forget.unsqueeze(1), written.unsqueeze(1))
        _, stepped = made.step(x, SSRUCache())
    assert appended.next_position == stepped.next_position == LENGTH
    torch.testing.assert_close(appended.state, stepped.state, rtol=0, atol=0)


def test_what_comes_later_changes_nothing_before():
    made, x = layer(), tokens()
    other = x.clone()
    other[:, 20:] = torch.inf
    other[0, 21:] = torch.nan
    with torch.no_grad():
        torch.testing.assert_close(made(other)[:, :20], made(x)[:, :20], rtol=0, atol=0)


def test_empty_sequences_and_batches():
    made = layer()
    assert made(torch.zeros(2, 0, DIM)).shape == (2, 0, DIM)
    assert made(torch.zeros(0, 4, DIM)).shape == (0, 4, DIM)


@pytest.mark.parametrize("residual", [PostNorm, PreNorm])
def test_a_block_decodes_with_it_and_shows_no_heads(residual):
    torch.manual_seed(3)
    block = TransformerBlock(
        SSRU(12), FeedForward(12, 17), lambda: residual(nn.LayerNorm(12)), cross_attention=Attention(Projections(12, 3))
    ).double()
    x, memory = torch.randn(2, 7, 12).double(), torch.randn(2, 5, 12).double()
    with torch.no_grad():
        whole = block(x, memory)
        seen = block.observe(x, Weights(), Entropy(), memory=memory)
        first, cache = block.observe_step(x[:, :4], block.make_cache(memory), Weights())
        last, _ = block.observe_step(x[:, 4:], cache, Weights())
    torch.testing.assert_close(torch.cat([first.output, last.output], 1), whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(seen.output, whole, rtol=0, atol=0)
    assert seen.attention[Weights()].shape == (2, 0, 7, 7)
    assert seen.attention[Entropy()].shape == (2, 0, 7)
    assert last.attention[Weights()].shape == (2, 0, 3, 7)
    assert last.cross_attention is not None
    assert last.cross_attention[Weights()].shape == (2, 3, 3, 5)


def test_what_is_of_attention_is_refused():
    made, x = layer(), tokens()
    for call in (
        {"mask": regard.masks.causal()},
        {"bias": torch.zeros(1)},
        {"positions": torch.arange(LENGTH)},
        {"rotation": object()},
    ):
        with pytest.raises(ConfigurationError, match=rf"has no use for {next(iter(call))}=: leave it out, or use"):
            made(x, **call)
    with pytest.raises(ConfigurationError, match="step needs an SSRUCache, as make_cache.. returns; it got a NoneType"):
        made.step(x, None)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"query has the shape \(3, 37, 5\); it needs \(batch, length, 53\)"):
        made(x[..., :5])
    with pytest.raises(DtypeError, match=r"query is torch.float64, but the layer's parameters are torch.float32"):
        made(x.double())
    with pytest.raises(ConfigurationError, match="dim is 0; it needs at least 1"):
        SSRU(0)
    with pytest.raises(ConfigurationError, match="torch.jit.script cannot compile regard.nn.SSRU"):
        made.__prepare_scriptable__()
