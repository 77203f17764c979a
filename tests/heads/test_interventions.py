"""Effects of interventions, against runs of models whose weights are set to 0."""

import copy

import pytest
import torch
from torch import nn

import regard
from regard import heads
from regard.errors import ConfigurationError, CorpusError, ShapeError
from regard.heads import HeadTerms, StateEffect, effect_table, ranked_effects, state_effects
from regard.nn import Attention, Projections


@pytest.fixture
def model():
    torch.manual_seed(1)
    layers = [Attention(Projections(12, num_heads=4), mask=regard.masks.causal()) for _ in range(2)]
    return nn.Sequential(*layers, nn.Linear(12, 31)).eval()


@pytest.fixture
def text():
    return torch.randn(1, 7, 12)


def without(model, layer, head):
    """The model with the columns of a head's output projection at 0."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter(f"{layer}.projections.output.weight")[:, 3 * head : 3 * head + 3] = 0
    return other


def test_states_move_as_without_the_head(model, text):
    effects = state_effects(model, lambda: model(text)[0, 4])
    found = list(effects)
    assert len(effects) == len(found) == 8
    assert [(effect.terms.module, effect.terms.heads) for effect in found][5] == ("1", (1,))
    with torch.no_grad():
        before = model(text)[0, 4].double()
        for effect in found:
            after = without(model, effect.terms.module, next(iter(effect.terms.heads or ())))(text)[0, 4].double()
            assert effect.relative_distance == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-4)
            cosine = torch.cosine_similarity(after, before, dim=0)
            assert effect.value == pytest.approx(1 - float(cosine), rel=1e-3, abs=1e-7)


def test_the_next_token_as_without_the_head(model, text):
    effects = heads.next_token_effects(model, lambda: model(text)[0, -1], likeliest=3)
    with torch.no_grad():
        before = model(text)[0, -1].double()
        for effect in effects:
            after = without(model, effect.terms.module, next(iter(effect.terms.heads or ())))(text)[0, -1].double()
            token = int(before.argmax())
            assert effect.token == token
            expected = (after - after.mean())[token] - (before - before.mean())[token]
            assert effect.value == pytest.approx(float(expected), rel=1e-3, abs=1e-5)
            assert effect.probability == pytest.approx(float(after.softmax(-1)[token]), rel=1e-4)
            assert [token for token, _ in effect.likeliest] == after.topk(3).indices.tolist()
    with pytest.raises(ShapeError, match=r"logits of the shape \(7, 31\); it needs those of one position"):
        heads.next_token_effects(model, lambda: model(text)[0])


def test_terms_are_replaced_one_after_another(model, text):
    chosen = [HeadTerms("0", queries=[4], keys=[2]), HeadTerms(keys=[6]), HeadTerms("1")]
    effects = state_effects(model, lambda: model(text)[0, 4], chosen, replace="mask")
    values = [effect.value for effect in effects]
    assert values[0] > 0
    assert abs(values[1]) < 1e-12  # a later token is not seen
    assert values[2] > values[0]
    patched = heads.capture_patch(model, lambda: model(text.flip(1)))
    own = heads.capture_patch(model, lambda: model(text))
    assert state_effects(model, lambda: model(text)[0, 4], replace=own).effect(HeadTerms("0")).value < 1e-6
    assert state_effects(model, lambda: model(text)[0, 4], replace=patched).effect(HeadTerms("0")).value > 1e-4


def test_effects_come_one_by_one(model, text):
    runs = []

    def run():
        runs.append(1)
        return model(text)[0, 0]

    effects = iter(state_effects(model, run))
    assert len(runs) == 1
    next(effects)
    assert len(runs) == 2


def test_tables_are_ranked_by_size():
    effects = [
        StateEffect(HeadTerms("a.b", heads=[n]), value, 0.0) for n, value in enumerate([0.1, -0.3, float("nan"), 0.2])
    ]
    assert [effect.terms.heads for effect in ranked_effects(effects)] == [(1,), (3,), (0,), (2,)]
    assert effect_table(effects, top=2).splitlines() == [
        "rank  terms        effect",
        "   1  a.b head 1  -0.3000",
        "   2  a.b head 3  +0.2000",
    ]
    assert effect_table([]) == "rank  terms  effect"
    with pytest.raises(ConfigurationError, match="top is 0; it needs to be a whole number of at least 1"):
        effect_table(effects, top=0)


def test_a_model_that_attends_by_other_code_is_refused():
    with pytest.raises(ConfigurationError, match="no attention of this Linear was called"):
        state_effects(nn.Linear(2, 2), lambda: torch.ones(2))


def test_the_effects_of_a_translator():
    from regard.translation.run_folder import ENGLISH_FRENCH
    from regard.translation.translation_effects import translation_effects
    from regard.translation.translator import Translator

    translator = Translator.load(ENGLISH_FRENCH)
    sentence = "The cat is on the table."
    cross = [HeadTerms(f"decoder.blocks.{layer}.cross_attention") for layer in range(3)]
    effects = translation_effects(translator, sentence, [*cross, HeadTerms("encoder.blocks.0", heads=[0])])
    plain = translator.translate([sentence], observe=False)[0].candidates[0]
    assert (effects.before.text, effects.before.score) == (plain.text, pytest.approx(plain.score, rel=1e-5))
    assert effects.before.log_probability == pytest.approx(plain.log_probability, rel=1e-4)
    found = list(effects)
    assert any(effect.changed for effect in found)
    assert not found[-1].changed
    assert found[-1].value != 0.0
    assert [effect.changed for effect in found] == [effect.text != plain.text for effect in found]
    with pytest.raises(CorpusError, match="the sentence is empty"):
        translation_effects(translator, "  ")
