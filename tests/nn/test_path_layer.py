"""The layer of PaTH attention: its formula in loops, steps with every mask, padding, documents, and what it refuses."""

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.nn.functional import logsigmoid, normalize, silu

from regard import lenses, masks
from regard.errors import ConfigurationError, MaskError
from regard.kernels.hooks import AttentionSubstitute, active_substitute
from regard.nn import FeedForward, KVCache, PathAttention, PreNorm, Projections, Reflections, TransformerBlock

DIM, HEADS, KEY_HEADS, HEAD_DIM, LENGTH = 12, 4, 2, 5, 71


def layer_of(dtype=torch.float64, width=3, **options) -> PathAttention:
    torch.manual_seed(0)
    projections = Projections(DIM, num_heads=HEADS, num_kv_heads=KEY_HEADS, head_dim=HEAD_DIM, bias=False)
    return PathAttention(projections, reflections=Reflections(projections, rank=3, width=width), **options).to(dtype)


def tokens(length=LENGTH, batch=2, dtype=torch.float64) -> Tensor:
    return torch.randn(batch, length, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def reflections_of(layer: PathAttention, x: Tensor) -> tuple[Tensor, Tensor]:
    """w (batch, key heads, length, D) and β, one tap of the convolution after the other."""
    parts = layer.reflections
    rows = parts.direction(x)
    if parts.convolution is not None:
        weight, zeros = parts.convolution.weight, torch.zeros_like(rows[:, :2])
        padded = torch.cat([zeros, rows], 1)
        taps = [padded[:, tap : tap + x.shape[1]] * weight[:, tap] for tap in range(3)]
        rows = silu(torch.stack(taps).sum(0))
    vectors = rows.unflatten(-1, (KEY_HEADS, HEAD_DIM)).transpose(1, 2)
    vectors = vectors / (vectors.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    return vectors, 2 * parts.beta(x).sigmoid().mT


def weights_of(layer: PathAttention, x: Tensor) -> Tensor:
    """The weights pair by pair: each key is turned by one token after the other."""
    queries, (keys, _) = layer.projections.queries(x), layer.projections.keys_and_values(x)
    vectors, beta = reflections_of(layer, x)
    scores = torch.full((len(x), HEADS, x.shape[1], x.shape[1]), -torch.inf, dtype=x.dtype)
    group, turned = HEADS // KEY_HEADS, keys[:, :, :0]
    for row in range(x.shape[1]):
        w, b = vectors[:, :, row, None], beta[:, :, row, None, None]
        turned = torch.cat([turned - b * (turned * w).sum(-1, keepdim=True) * w, keys[:, :, row, None]], 2)
        products = turned.repeat_interleave(group, 1) @ queries[:, :, row, :, None]
        scores[:, :, row, : row + 1] = products.squeeze(-1) / HEAD_DIM**0.5
    if layer.forget_gate is not None:
        sums = logsigmoid(layer.forget_gate.projection(x)).mT.cumsum(-1)
        scores = scores + sums[..., :, None] - sums[..., None, :]
    return scores.softmax(-1)


@pytest.mark.parametrize("forget_gate", [False, True])
@pytest.mark.parametrize("width", [1, 3])
def test_it_is_the_formula(forget_gate, width):
    layer, x, weights = layer_of(width=width, forget_gate=forget_gate), tokens(), lenses.Weights()
    expected, seen = weights_of(layer, x), layer.observe(x, weights)
    torch.testing.assert_close(seen[weights], expected)
    values = layer.projections.keys_and_values(x)[1].repeat_interleave(HEADS // KEY_HEADS, 1)
    torch.testing.assert_close(layer(x), layer.projections.project_output(expected @ values))
    torch.testing.assert_close(seen.output, layer(x))
    layer(x).square().sum().backward()
    found = {name: each.grad for name, each in layer.named_parameters()}
    layer.zero_grad(set_to_none=True)
    layer.projections.project_output(weights_of(layer, x) @ values).square().sum().backward()
    for name, parameter in layer.named_parameters():
        if not name.startswith("projections.value"):
            torch.testing.assert_close(found[name], parameter.grad, msg=name)
            assert parameter.grad is not None, name
            assert parameter.grad.any(), name


MASKS = {
    "causal": None,
    "window": masks.window(before=7),
    "first tokens and window": masks.window(before=5) | masks.prefix(3),
}


@pytest.mark.parametrize("forget_gate", [False, True])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-12), (torch.float32, 3e-6), (torch.bfloat16, 4e-2)])
def test_steps_equal_the_whole_sequence_while_keys_are_evicted(forget_gate, mask, dtype, allowed):
    layer = layer_of(dtype, mask=MASKS[mask], forget_gate=forget_gate)
    x, outputs, cache = tokens(239, dtype=dtype), [], layer.make_cache()
    with torch.no_grad():
        for chunk in x.split([3, 1, 1, 67, 1, 1, 1, 5, *[1] * 159], 1):
            output, cache = layer.step(chunk, cache)
            outputs.append(output)
        error = (torch.cat(outputs, 1) - layer(x)).abs().max()
    assert error <= allowed
    assert len(cache) == 239 if mask == "causal" else len(cache) < 60
    assert cache.next_position == 239
    assert cache.nbytes > 0


def test_rows_of_a_cache_are_reordered_and_old_caches_stay_as_they_were():
    layer, x, rows = layer_of(forget_gate=True), tokens(20), torch.tensor([1, 0, 1])
    with torch.no_grad():
        _, cache = layer.step(x[:, :18], layer.make_cache())
        for branch in (cache.reorder(rows), cache.reorder(rows)):
            first, branch = layer.step(x[rows, 18:19], branch)
            last, _ = layer.step(x[rows, 19:], branch)
            torch.testing.assert_close(torch.cat([first, last], 1), layer(x)[rows, 18:])
        assert layer.make_cache().reorder(rows).keys is None


def test_padding_turns_nothing_and_is_not_convolved():
    layer, x, lengths = layer_of(), tokens(23), [23, 14]
    lefts = torch.stack(
        [torch.cat([torch.full((23 - n, DIM), 7.0), row[:n]]) for n, row in zip(lengths, x, strict=True)]
    )
    positions = torch.arange(23) - torch.tensor([[23 - n] for n in lengths])
    not_padding = ~masks.prefix(0)
    expected = [layer(row[None, :n])[0] for n, row in zip(lengths, x, strict=True)]
    whole, right = layer(lefts, mask=not_padding, positions=positions), layer(x, mask=masks.padding(lengths))
    keep = (torch.arange(23) < torch.tensor(lengths)[:, None])[:, None, None]
    as_tensor = layer(x, mask=keep)
    with torch.no_grad():
        _, cache = layer.step(lefts[:, :20], layer.make_cache(), mask=not_padding, positions=positions[:, :20])
        stepped, _ = layer.step(lefts[:, 20:], cache, mask=not_padding, positions=positions[:, 20:])
    for row, n in enumerate(lengths):
        torch.testing.assert_close(whole[row, 23 - n :], expected[row])
        torch.testing.assert_close(right[row, :n], expected[row])
        torch.testing.assert_close(as_tensor[row, :n], expected[row])
        torch.testing.assert_close(stepped[row], expected[row][-3:])


def test_documents_of_one_sequence_are_read_each_by_itself():
    layer, x = layer_of(forget_gate=True), tokens(37)
    ids = torch.tensor([0] * 11 + [1] * 26)
    found = layer(x, mask=masks.documents(ids))
    torch.testing.assert_close(found, torch.cat([layer(x[:, :11]), layer(x[:, 11:])], 1))
    with pytest.raises(ConfigurationError, match="one text for each row of the batch, and the mask has documents"):
        layer.step(x, layer.make_cache(), mask=masks.documents(ids))


def test_a_block_decodes_with_it():
    attention = layer_of()
    block = TransformerBlock(attention, FeedForward(DIM, 24), lambda: PreNorm(nn.LayerNorm(DIM))).double()
    x = tokens(13)
    with torch.no_grad():
        first, cache = block.step(x[:, :9], block.make_cache())
        last, _ = block.step(x[:, 9:], cache)
        torch.testing.assert_close(torch.cat([first, last], 1), block(x))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch's exporter
def test_an_exported_program_is_for_more_tokens_than_a_chunk():
    """The example is shorter than a chunk, which is 64."""
    layer, vary = layer_of(torch.float32).eval(), {0: Dim.DYNAMIC, 1: Dim.DYNAMIC}
    program = torch.export.export(layer, (tokens(7, dtype=torch.float32),), dynamic_shapes=(vary,))
    for length in (5, 64, 131):
        x = tokens(length, batch=3, dtype=torch.float32)
        assert torch.allclose(program.module()(x), layer(x), atol=1e-6)


def test_weights_of_a_step_and_dropout():
    layer, x, weights = layer_of(dropout=0.5).eval(), tokens(11), lenses.Weights()
    whole = layer.observe(x, weights)[weights]
    with torch.no_grad():
        _, cache = layer.step(x[:, :8], layer.make_cache())
        seen, _ = layer.observe_step(x[:, 8:], cache, weights)
    torch.testing.assert_close(seen[weights], whole[:, :, 8:].detach())
    assert not torch.allclose(layer.train()(x), layer.eval()(x))


def test_what_it_refuses():
    with pytest.raises(ConfigurationError, match=r"projections have memory_dim=8: leave it out, or take Attention"):
        PathAttention(Projections(DIM, num_heads=2, memory_dim=8))
    layer = layer_of()
    with pytest.raises(ConfigurationError, match="step needs a PathCache, as layer.make_cache"):
        layer.step(tokens(3), KVCache())  # type: ignore[reportArgumentType]
    with pytest.raises(MaskError, match="is no mask for linear attention"):
        layer(tokens(5), mask=masks.window(before=2))
    with pytest.raises(ConfigurationError, match="width"):
        Reflections(layer.projections, width=0)
    with pytest.raises(ConfigurationError, match="rank"):
        Reflections(layer.projections, rank=0)


def test_reflections_are_of_length_one_and_at_most_two():
    of_tokens = layer_of().reflections(tokens())
    torch.testing.assert_close(of_tokens.vectors, normalize(of_tokens.vectors, dim=-1), atol=1e-4, rtol=0)
    assert 0 < of_tokens.beta.min() < of_tokens.beta.max() < 2


def test_a_part_of_the_positions_is_refused():
    layer, substitute = layer_of(), AttentionSubstitute(lambda problem: None, no_convolutions="some positions")
    with active_substitute(substitute), pytest.raises(ConfigurationError, match="the tokens of this process alone"):
        layer(tokens(5))
