"""Language models that keep the keys with most weight: generation, padding, and what is refused."""

import pytest
import torch

from regard import masks
from regard.errors import ConfigurationError
from regard.models import language_model as lm
from regard.nn import H2O, TOVA, KVCache, LinearCache, SnapKV, WeighedCache
from regard.positions import Rotary

VOCABULARY = 31
POLICIES = [H2O(5, 4), SnapKV(9, window=3, kernel=3), TOVA(9)]
FAR, NEAR, LINEAR = (
    lm.LayerConfig(rotary=Rotary(8)),
    lm.LayerConfig(before=4, rotary=Rotary(8)),
    lm.LayerConfig(linear=lm.LinearAttentionConfig()),
)

policies = pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)


def model_of(*layers, **attention):
    torch.manual_seed(0)
    heads = lm.AttentionConfig(4, 2, softcap=20.0, **attention)
    return lm.LanguageModel(lm.LanguageModelConfig(VOCABULARY, 32, layers, heads, lm.GatedFeedForwardConfig(40))).eval()


def text(model, tokens, count, **options):
    return torch.stack(list(model.generate(tokens, count, **options)), 1)


@policies
@torch.no_grad()
def test_generation_takes_steps_over_the_cache(policy):
    model, tokens = model_of(FAR, NEAR, FAR, LINEAR), torch.randint(VOCABULARY, (2, 27))
    cache = model.make_cache(eviction=policy)
    assert [type(layer.attention) for layer in cache.layers] == [WeighedCache, KVCache, WeighedCache, LinearCache]
    found, chosen = text(model, tokens, 20, cache=cache), []
    logits, cache = model.step(tokens, cache)
    for _ in range(20):
        chosen.append(logits[:, -1].argmax(-1))
        logits, cache = model.step(chosen[-1][:, None], cache)
    assert torch.equal(found, torch.stack(chosen, 1))
    sizes = [len(layer.attention) for layer in cache.layers if isinstance(layer.attention, WeighedCache)]
    assert sizes == [29 if isinstance(policy, SnapKV) else 9] * 2


@policies
@torch.no_grad()
def test_room_for_all_generates_the_same(policy):
    model, tokens = model_of(FAR, FAR), torch.randint(VOCABULARY, (2, 11))
    large = {H2O: H2O(40, 40), SnapKV: SnapKV(80, 3), TOVA: TOVA(80)}[type(policy)]
    assert torch.equal(text(model, tokens, 20, cache=model.make_cache(eviction=large)), text(model, tokens, 20))


@policies
@torch.no_grad()
def test_padded_prompts_continue_as_each_alone(policy):
    model = model_of(FAR, NEAR, FAR)
    tokens, lengths = torch.randint(VOCABULARY, (3, 19)), [19, 12, 6]
    together = text(model, tokens, 15, lengths=lengths, cache=model.make_cache(eviction=policy))
    for row, length in enumerate(lengths):
        alone = text(model, tokens[row : row + 1, 19 - length :], 15, cache=model.make_cache(eviction=policy))
        assert torch.equal(together[row], alone[0])


@torch.no_grad()
def test_a_text_goes_on_from_its_cache():
    model, tokens = model_of(FAR, NEAR), torch.randint(VOCABULARY, (2, 13))
    _, cache = model.step(tokens[:, :9], model.make_cache())
    before = cache.nbytes
    assert torch.equal(text(model, tokens[:, 9:], 8, cache=cache), text(model, tokens, 8))
    assert torch.equal(text(model, tokens[:, 9:], 8, cache=cache, captured=True), text(model, tokens, 8))
    assert cache.nbytes == before
    with pytest.raises(ConfigurationError, match="the cache holds a text that the tokens continue: pass sequences of"):
        model.generate(tokens[:, 9:], 2, cache=cache, lengths=[4, 2])
    with pytest.raises(ConfigurationError, match="step needs a LanguageModelCache of 2 layers.*given a int"):
        model.generate(tokens, 2, cache=3)  # type: ignore[arg-type]


@torch.no_grad()
def test_a_padded_text_goes_on_from_its_cache_without_its_padding():
    model, tokens = model_of(FAR, NEAR), torch.randint(VOCABULARY, (2, 13))
    positions = torch.arange(9) - torch.tensor([[0], [5]])
    _, cache = model.step(tokens[:, :9], model.make_cache(), mask=~masks.prefix(0), positions=positions)
    found = text(model, tokens[:, 9:], 8, cache=cache)
    assert torch.equal(found[1:], text(model, tokens[1:, 5:], 8))


def test_what_cannot_be_evicted_by_weight_is_refused():
    tokens = torch.randint(VOCABULARY, (1, 20))
    shared = model_of(NEAR, FAR, lm.LayerConfig(rotary=Rotary(8), keys_from=1))
    with pytest.raises(ConfigurationError, match="other layers read the keys of layer 1, which cannot be evicted by"):
        shared.make_cache(eviction=TOVA(3))
    with pytest.raises(ConfigurationError, match="no layer of this model attends to all tokens before"):
        model_of(NEAR, LINEAR).make_cache(eviction=TOVA(3))
    model = model_of(FAR)
    with pytest.raises(ConfigurationError, match="a layer has a WeighedCache, and captured steps need a KVCache"):
        list(model.generate(tokens, 3, cache=model.make_cache(eviction=TOVA(3)), captured=True))
    sinks = model_of(FAR, sinks=True)
    with pytest.raises(ConfigurationError, match="has sinks, but each head of this cache keeps keys of its own"):
        list(sinks.generate(tokens, 3, cache=sinks.make_cache(eviction=H2O(3, 3))))
    assert len(list(sinks.generate(tokens, 3, cache=sinks.make_cache(eviction=TOVA(6))))) == 3
