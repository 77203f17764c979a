"""Layers that read the keys and values of an earlier layer: against the formula, in steps, and what they store."""

from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from regard import masks
from regard.errors import ConfigurationError
from regard.lenses import Received, Weights
from regard.models import language_model as lm
from regard.nn import (
    Attention,
    FeedForward,
    LatentAttention,
    LatentProjections,
    PreNorm,
    Projections,
    QueryProjections,
    RMSNorm,
    TransformerBlock,
)
from regard.positions import Rotary

VOCABULARY, DIM, HEADS, KEY_HEADS, HEAD_DIM = 29, 24, 6, 2, 6
NEAR, FAR = Rotary(6), Rotary(4, base=500.0)

near, far = lm.LayerConfig(before=4, rotary=NEAR), lm.LayerConfig(rotary=FAR)
LAYERS = {
    "pairs": (near, lm.LayerConfig(before=4, rotary=NEAR, keys_from=0), far, lm.LayerConfig(rotary=FAR, keys_from=2)),
    "a narrower reader": (far, near, lm.LayerConfig(before=7, prefix=1, rotary=FAR, keys_from=0)),
    "one cache for half of the layers": (near, near, far, *[lm.LayerConfig(rotary=FAR, keys_from=2)] * 3),
    "the last of each kind": (
        *(near, far, near, far),
        *(lm.LayerConfig(before=4, rotary=NEAR, keys_from=2), lm.LayerConfig(rotary=FAR, keys_from=3)),
    ),
}


def model_of(name, **attention):
    settings = {"num_heads": HEADS, "num_kv_heads": KEY_HEADS, "head_dim": HEAD_DIM, "norm": lm.RMSNormConfig()}
    config = lm.LanguageModelConfig(
        *(VOCABULARY, DIM, LAYERS[name]), lm.AttentionConfig(**settings | attention), lm.GatedFeedForwardConfig(31)
    )
    return lm.LanguageModel(config).eval()


@pytest.fixture(params=LAYERS)
def model(request):
    return model_of(request.param)


def heads(x, linear, norm=None):
    split = functional.linear(x, linear.weight).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
    return split if norm is None else norm(split)


def formula(model, tokens):
    """The logits, written out layer by layer, in the dtype of the weights."""
    x, stored = model.embedding(tokens), {}
    at = torch.arange(tokens.shape[1])
    back = at[:, None] - at
    for number, (block, layer) in enumerate(zip(model.blocks, model.config.layers, strict=True)):
        own, h = block.attention.projections, block.attention_residual.norm(x)
        q = layer.rotary.rotate(heads(h, own.query, own.query_norm), at)
        if layer.keys_from is None:
            keys = layer.rotary.rotate(heads(h, own.key, own.key_norm), at)
            stored[number] = keys, heads(h, own.value)
        k, v = (
            tensor.repeat_interleave(HEADS // KEY_HEADS, 1)
            for tensor in stored[number if layer.keys_from is None else layer.keys_from]
        )
        seen = back >= 0
        if layer.before is not None:
            seen &= (back <= layer.before) | (at < layer.prefix)
        weights = (q @ k.mT / HEAD_DIM**0.5).masked_fill(~seen, float("-inf")).softmax(-1)
        x = x + functional.linear((weights @ v).transpose(1, 2).flatten(-2), own.output.weight)
        h, feed = block.feed_forward_residual.norm(x), block.feed_forward
        x = x + feed.down(functional.silu(feed.gate(h)) * feed.up(h))
    return model.output(model.norm(x))


def close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


def test_logits_and_gradients_are_those_of_the_formula(model):
    model.double()
    tokens, weight = torch.randint(VOCABULARY, (2, 13)), torch.randn(2, 13, VOCABULARY, dtype=torch.float64)
    parameters = list(model.parameters())
    ours, theirs = model(tokens), formula(model, tokens)
    close(ours, theirs, 1e-10)
    gradients = (torch.autograd.grad((logits * weight).sum(), parameters) for logits in (ours, theirs))
    for mine, other in zip(*gradients, strict=True):
        close(mine, other, 1e-9)


def test_activations_computed_again_give_the_same_gradients(model):
    tokens, parameters = torch.randint(VOCABULARY, (2, 11)), list(model.parameters())

    def again(block, x, **call):
        return checkpoint(block, x, use_reentrant=False, **call)

    plain = torch.autograd.grad(model(tokens).square().sum(), parameters)
    features = model.features(tokens, call_block=again)
    for mine, other in zip(torch.autograd.grad(model.logits(features).square().sum(), parameters), plain, strict=True):
        close(mine, other, 1e-4)


@torch.no_grad()
def test_steps_of_any_size_are_the_whole(model):
    tokens = torch.randint(VOCABULARY, (2, 131))  # long enough that the windows' caches evict
    logits, cache = [], model.make_cache()
    for part in tokens.split([67, 1, 1, 37, *[1] * 25], dim=1):
        output, cache = model.step(part, cache)
        logits.append(output)
    close(torch.cat(logits, 1), model(tokens))
    rows = torch.tensor([1, 1, 0])
    close(model.step(tokens[rows, :1], cache.reorder(rows))[0], model.step(tokens[:, :1], cache)[0][rows])


@torch.no_grad()
def test_a_branch_of_a_search_leaves_the_cache_as_it_was(model):
    tokens = torch.randint(VOCABULARY, (2, 12))
    _, cache = model.step(tokens[:, :9], model.make_cache())
    first, _ = model.step(tokens[:, 9:], cache)
    again, _ = model.step(tokens[:, 9:], cache)
    assert torch.equal(first, again)


@torch.no_grad()
def test_a_layer_that_reads_stores_nothing(model):
    tokens = torch.randint(VOCABULARY, (1, 5))
    _, cache = model.step(tokens, model.make_cache())
    own = [layer for layer in model.config.layers if layer.keys_from is None]
    assert len(cache.layers) == len(own) < len(model.blocks)
    assert cache.nbytes == sum(layer.attention.nbytes for layer in cache.layers)
    readers = [block for block, layer in zip(model.blocks, model.config.layers, strict=True) if layer not in own]
    assert all(type(block.attention.projections) is QueryProjections for block in readers)
    assert not [name for block in readers for name, _ in block.named_parameters() if "key" in name or "value" in name]


@torch.no_grad()
def test_the_cache_of_windows_stays_as_it_is(model):
    cache, sizes = model.make_cache(), []
    for _ in range(150):
        _, cache = model.step(torch.randint(VOCABULARY, (1, 1)), cache)
        sizes.append([len(layer.attention) for layer in cache.layers])
    windows = [layer.before is not None for layer in model.config.layers if layer.keys_from is None]
    for window, before, after in zip(windows, sizes[75], sizes[-1], strict=True):
        assert after <= 5 * 1.5 + 33 if window else after == before + 74


@pytest.mark.parametrize("captured", [False, True])
@torch.no_grad()
def test_padded_prompts_continue_as_each_alone(model, captured):
    tokens, lengths = torch.randint(VOCABULARY, (3, 17)), [17, 6, 1]
    together = torch.stack(list(model.generate(tokens, 9, lengths=lengths, chunk=5, captured=captured)), 1)
    for row, length in enumerate(lengths):
        alone = torch.stack(list(model.generate(tokens[row : row + 1, 17 - length :], 9)), 1)
        assert torch.equal(together[row], alone[0])


@torch.no_grad()
def test_packed_documents_are_read_as_if_alone(model):
    tokens, ids = torch.randint(VOCABULARY, (1, 9)), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    packed = model(tokens, mask=masks.documents(ids))
    close(packed, torch.cat([model(tokens[:, ids == document]) for document in range(3)], 1))


@torch.no_grad()
def test_lenses_see_each_layer(model):
    tokens, weights, received = torch.randint(VOCABULARY, (2, 8)), Weights(), Received()
    seen = model.observe(tokens, weights, received)
    assert torch.equal(seen.logits, model(tokens))
    assert [layer.shape for layer in seen[weights]] == [(2, HEADS, 8, 8)] * len(model.blocks)
    cache = model.make_cache()
    for token in tokens.split(1, dim=1):
        step, cache = model.observe_step(token, cache, weights)
    assert len(step[weights]) == len(model.blocks)
    for whole, last in zip(seen[weights], step[weights], strict=True):
        close(last[:, :, 0], whole[:, :, -1, -last.shape[-1] :])


def test_saved_and_loaded(model, tmp_path):
    tokens = torch.randint(VOCABULARY, (2, 7))
    model.save(tmp_path)
    loaded = lm.LanguageModel.load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


def test_own_values_of_layers():
    """Values with a norm, values that are the keys, and other heads in some layers: against the formula."""
    wide = lm.AttentionConfig(4, 1, 10, norm=lm.RMSNormConfig(), tied_values=True)
    layers = (lm.LayerConfig(), lm.LayerConfig(attention=wide), lm.LayerConfig(attention=wide, keys_from=1))
    attention = lm.AttentionConfig(HEADS, 3, HEAD_DIM, value_norm=lm.RMSNormConfig(1e-3, gain=False))
    model = lm.LanguageModel(lm.LanguageModelConfig(VOCABULARY, DIM, layers, attention, lm.FeedForwardConfig(31)))
    model.double()
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    blocks: list[Any] = list(model.blocks)
    first, second = (block.attention for block in blocks[:2])
    _, values = first.projections.keys_and_values(x)
    plain = functional.linear(x, first.projections.value.weight).view(2, 7, 3, HEAD_DIM).transpose(1, 2)
    close(values, plain / (plain.square().mean(-1, keepdim=True) + 1e-3).sqrt(), 1e-12)
    keys, values = second.projections.keys_and_values(x)
    close(values, functional.linear(x, second.projections.key.weight)[:, None], 1e-12)
    close(keys, second.projections.key_norm(values), 1e-12)
    assert "value.weight" not in dict(second.projections.named_parameters())
    assert model(torch.randint(VOCABULARY, (2, 7))).shape == (2, 7, VOCABULARY)


PLAIN = lm.AttentionConfig(4, 2)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([lm.LayerConfig(keys_from=0)], r"layer 0 has keys_from=0; it needs .* an earlier layer, and there is none$"),
        ([far, lm.LayerConfig(keys_from=2), far], r"layer 1 has keys_from=2; it needs .*, in 0\.\.0$"),
        ([far, far, lm.LayerConfig(keys_from=-1)], r"layer 2 has keys_from=-1; it needs .*, in 0\.\.1$"),
        ([far, lm.LayerConfig(keys_from=True)], r"layer 1 has keys_from=True"),
        (
            [far, lm.LayerConfig(rotary=FAR, keys_from=0), lm.LayerConfig(rotary=FAR, keys_from=1)],
            "layer 2 has keys_from=1, but layer 1 has no keys of its own: it reads those of layer 0",
        ),
        (
            [lm.LayerConfig(linear=lm.LinearAttentionConfig()), lm.LayerConfig(keys_from=0)],
            "layer 1 has keys_from=0, but layer 0 is of linear attention, which has a state and no keys",
        ),
        (
            [far, lm.LayerConfig(rotary=FAR, keys_from=0, attention=lm.AttentionConfig(4, 4))],
            "layer 1 reads the keys of layer 0, which has 2 key heads of 8, but asks for 4 of 8: give both the same",
        ),
        (
            [far, lm.LayerConfig(rotary=FAR, keys_from=0, attention=lm.AttentionConfig(4, 2, 12))],
            "which has 2 key heads of 8, but asks for 2 of 12",
        ),
        (
            [far, lm.LayerConfig(keys_from=0)],
            r"layer 1 reads the keys of layer 0, which are rotated by Rotary\(dim=4.*but its queries by None",
        ),
        (
            [near, lm.LayerConfig(rotary=NEAR, keys_from=0)],
            r"which keeps those of before=4 and prefix=0, but attends to before=None and prefix=0: a layer attends",
        ),
        ([near, lm.LayerConfig(before=5, rotary=NEAR, keys_from=0)], "attends to before=5 and prefix=0"),
        ([near, lm.LayerConfig(before=4, prefix=1, rotary=NEAR, keys_from=0)], "attends to before=4 and prefix=1"),
    ],
)
def test_layers_that_cannot_share_are_refused(layers, message):
    with pytest.raises(ConfigurationError, match=message):
        lm.LanguageModelConfig(VOCABULARY, 32, tuple(layers), PLAIN, lm.FeedForwardConfig(8))


def test_linear_attention_reads_no_keys():
    with pytest.raises(ConfigurationError, match="has a state and no keys, but has keys_from=0: leave one"):
        lm.LayerConfig(linear=lm.LinearAttentionConfig(), keys_from=0)


def test_caches_of_other_models_are_refused():
    model = model_of("pairs")
    with pytest.raises(ConfigurationError, match="step needs a LanguageModelCache of 2 layers.*of 3 layers"):
        model.step(torch.zeros(1, 1, dtype=torch.int64), model_of("one cache for half of the layers").make_cache())


def test_keys_of_another_kind_are_refused():
    x = torch.randn(1, 5, 16)
    reader, other = Attention(QueryProjections(16, 4)), Attention(Projections(16, 2))
    with pytest.raises(ConfigurationError, match="has 2 key heads, with keys of dim 8 and values of 8, but this layer"):
        reader(x, keys=other.project_memory(x))
    with pytest.raises(ConfigurationError, match="no keys and values of its own: pass keys="):
        reader(x)
    with pytest.raises(ConfigurationError, match="no keys and values of its own: pass keys="):
        reader.step(x, reader.make_cache())
    own = Attention(Projections(16, 4))
    with pytest.raises(ConfigurationError, match="keys= are of self-attention, and a memory of cross-attention"):
        own(x, x, keys=own.project_memory(x))
    latent = LatentAttention(LatentProjections(16, 4, latent_dim=6, rotary_dim=2), Rotary(2))
    block = TransformerBlock(latent, FeedForward(16, 8), lambda: PreNorm(RMSNorm(16)))
    for call in (block, block.observe):
        with pytest.raises(ConfigurationError, match="is a LatentAttention, which has no keys and values that layers"):
            call(x, keys=own.project_memory(x))
    with pytest.raises(ConfigurationError, match="is a LatentAttention, which has no keys and values that layers"):
        block.project_keys(x)


def test_values_that_are_keys_have_their_dim():
    with pytest.raises(ConfigurationError, match="values that are the keys have head_dim=4, but value_dim is 3"):
        Projections(16, 4, value_dim=3, tied_values=True)
    with pytest.raises(ConfigurationError, match="offset is 1.0, which is added to a gain, but gain is False"):
        RMSNorm(4, offset=1.0, gain=False)


def test_a_layer_reads_the_last_tokens_by_default():
    """Without positions the queries are the last M of the given keys, as in a step."""
    x = torch.randn(2, 9, 24)
    own = Attention(Projections(24, 4), mask=masks.causal(), rotary=Rotary(6))
    keys = own.project_memory(x)
    close(own(x[:, 6:], keys=keys), own(x)[:, 6:])
    at = torch.arange(100, 109)
    later = own.project_memory(x, at)
    close(own(x[:, 6:], keys=later), own(x, positions=at)[:, 6:])
    weights = Weights()
    close(own.observe(x[:, 6:], weights, keys=keys)[weights], own.observe(x, weights)[weights][:, :, 6:])
