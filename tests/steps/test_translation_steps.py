from typing import Any, Literal

import pytest
import torch

from regard.errors import ConfigurationError, CorpusError
from regard.steps import StepTable, WhatIf, translation_steps
from regard.translation.build_model import build_model
from regard.translation.run_folder import ENGLISH_FRENCH, KOREAN_ENGLISH
from regard.translation.settings import RecurrentSettings, SearchSettings
from regard.translation.translator import Translator
from regard.translation.vocabulary import BEGIN, END, Vocabulary, VocabularySettings

SENTENCE = "나는 학생 이다 ."
DECODERS = {
    "bahdanau": {"kind": "bahdanau"},
    "bahdanau-dot": {"kind": "bahdanau", "score": "dot"},
    "luong-dot": {"kind": "luong", "score": "dot", "input_feeding": False},
    "luong-general": {"kind": "luong", "score": "general", "input_feeding": False},
    "luong-concat": {"kind": "luong", "score": "concat", "input_feeding": True},
    "luong-linear": {"kind": "luong", "score": "scaled_dot", "readout": "linear", "layers": 2},
    "luong-local": {"kind": "luong", "score": "dot", "window": {"kind": "local-p", "radius": 2}},
}


def marks(table: StepTable) -> torch.Tensor:
    """Which numbers of a compared table differ."""
    assert table.marked is not None
    return table.marked


def translator(decoder: str, cell: Literal["gru", "lstm"] = "gru") -> Any:
    torch.manual_seed(5)
    decoding: Any = DECODERS[decoder]
    settings = RecurrentSettings(embedding_dim=5, hidden_dim=6, dropout=0.0, cell=cell, decoder=decoding)
    words = VocabularySettings(kind="words")
    source = Vocabulary.train([SENTENCE], words)
    target = Vocabulary.train(["I am a student and you are not ."], words)
    model: Any = build_model(settings, len(source), len(target))
    with torch.no_grad():
        model.output.bias[END] = -9.0  # an untrained model may end at once
    return Translator(model, source, target, SearchSettings(beam=2))


@pytest.fixture(scope="module")
def english_french():
    return Translator.load(ENGLISH_FRENCH)


def best_ids(one, sentence):
    [found] = one.translate([sentence])
    return one.target_vocabulary.encode(found.text)


@torch.no_grad()
def probabilities(one, sentence, prefix):
    """Of the next word, by the model's forward pass over the whole prefix."""
    source = torch.tensor([one.source_vocabulary.encode(sentence)])
    target = torch.tensor([[BEGIN, *prefix]])
    return one.model(source, torch.tensor([source.shape[1]]), target)[0, -1].double().softmax(-1)


def assert_predicts(one, steps, expected):
    """The printed probabilities are the largest, and the first is of the word that it is said to be."""
    torch.testing.assert_close(steps["prediction"].numbers[0], expected.topk(5).values, rtol=1e-4, atol=1e-6)
    [token] = one.target_vocabulary.tokens([int(expected.argmax())])
    assert steps["prediction"].columns[0] == token.removeprefix("▁")


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("word", [0, 2])
def test_the_prediction_is_that_of_the_forward_pass(decoder, word):
    one = translator(decoder)
    steps = translation_steps(one, SENTENCE, word=word)
    expected = probabilities(one, SENTENCE, best_ids(one, SENTENCE)[:word])
    assert_predicts(one, steps, expected)
    by_hand = steps["weights"].numbers @ steps["annotations"].numbers
    torch.testing.assert_close(steps["context"].numbers, by_hand, rtol=1e-5, atol=1e-6)


def test_lstm_states():
    one = translator("luong-dot", cell="lstm")
    steps = translation_steps(one, SENTENCE)
    by_hand = steps["decoder_state"].numbers @ steps["annotations"].numbers.T
    torch.testing.assert_close(steps["scores"].numbers, by_hand, rtol=1e-5, atol=1e-6)


def test_the_six_steps_of_luong_are_numbered_and_follow_from_one_another():
    one = translator("luong-dot")
    steps = translation_steps(one, SENTENCE, word=1)
    titles = [table.title.ko for table in steps.tables if table.title.ko[0].isdigit()]
    assert [title.split(".")[0] for title in titles] == list("123456")
    assert titles[0] == "1. 어텐션 점수(스코어)"
    assert titles[3] == "4. 연결"
    context, state = steps["context"].numbers, steps["decoder_state"].numbers
    assert torch.equal(steps["concatenated"].numbers, torch.cat([context, state], -1))
    weight = one.model.decoder.readout.project.weight.detach().double()
    attentional = (steps["concatenated"].numbers @ weight.T).tanh()
    torch.testing.assert_close(steps["attentional"].numbers, attentional, rtol=1e-5, atol=1e-6)
    logits = attentional @ one.model.output.weight.detach().double().T + one.model.output.bias.detach().double()
    assert_predicts(one, steps, logits[0].softmax(-1))


def test_the_steps_of_bahdanau_follow_from_one_another():
    one = translator("bahdanau")
    steps = translation_steps(one, SENTENCE, word=1)
    score = one.model.decoder.attend.score
    query = steps["previous_state"].numbers @ score.query_weight.detach().double().T
    torch.testing.assert_close(steps["projected_query"].numbers, query, rtol=1e-5, atol=1e-6)
    tanh = (query + steps["projected_key"].numbers).tanh()
    torch.testing.assert_close(steps["tanh.1"].numbers, tanh, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(steps["scores"].numbers[0], tanh @ score.weight.detach().double(), rtol=1e-5, atol=1e-6)
    joined = torch.cat([steps["target_embedding"].numbers, steps["context"].numbers], -1)
    assert torch.equal(steps["cell_input"].numbers, joined)
    titles = [table.title.en[:2] for table in steps.tables if table.title.en[0].isdigit()]
    assert titles == ["1.", "2.", "3.", "4.", "5.", "6."]


def test_a_flipped_key_has_no_weight_and_everything_after_it_follows():
    one = translator("luong-dot")
    before = translation_steps(one, SENTENCE, word=1)
    after = translation_steps(one, SENTENCE, word=1, what_if=WhatIf(flip=[(1, 2)]))
    scores = before["scores"].numbers[0].clone()
    scores[2] = -torch.inf
    torch.testing.assert_close(after["weights"].numbers[0], scores.softmax(-1), rtol=1e-5, atol=1e-6)
    context = after["weights"].numbers @ after["annotations"].numbers
    torch.testing.assert_close(after["context"].numbers, context, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after["concatenated"].numbers[:, :6], after["context"].numbers, rtol=1e-5, atol=1e-6)
    changed = {table.key: bool(marks(table).any()) for table in after.compared(before).tables}
    assert not changed["decoder_state"]
    assert changed["weights"]
    assert changed["attentional"]
    assert changed["prediction"]


@pytest.mark.parametrize("kind", ["cross", "self", "encoder"])
def test_a_head_of_a_transformer(english_french, kind):
    sentence, word = "I am tired.", 2
    steps = translation_steps(english_french, sentence, word=word, kind=kind, layer=1, head=3, source_word=1)
    context = steps["context"].numbers
    torch.testing.assert_close(steps["concatenation"].numbers[:, 96:128], context, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(steps["weights"].numbers @ steps["value"].numbers, context, rtol=1e-5, atol=1e-6)
    expected = probabilities(english_french, sentence, best_ids(english_french, sentence)[:word])
    assert_predicts(english_french, steps, expected)


def test_a_what_if_of_a_head_changes_that_head_alone(english_french):
    place: dict[str, Any] = {"word": 2, "layer": 2, "head": 1}
    before = translation_steps(english_french, "I am tired.", **place)
    after = translation_steps(english_french, "I am tired.", **place, what_if=WhatIf(add={(2, 0): 9.0}))
    changed = after.compared(before)["concatenation"]
    changed = marks(changed)[0]
    assert changed[32:64].all()
    assert not changed[:32].any()
    assert not changed[64:].any()
    assert after["weights"].numbers[0, 0] > 0.9
    assert after["prediction"].numbers[0, 0] != before["prediction"].numbers[0, 0]


def test_a_what_if_that_changes_nothing_leaves_the_prediction(english_french):
    before = translation_steps(english_french, "I am tired.", word=1)
    after = translation_steps(english_french, "I am tired.", word=1, what_if=WhatIf(add={(1, 0): 0.0}))
    assert not marks(after.compared(before)["prediction"]).any()


def test_bad_input_says_what_there_is(english_french):
    with pytest.raises(ConfigurationError, match="layer is 3; there are 3, 0 to 2"):
        translation_steps(english_french, "I am tired.", layer=3)
    with pytest.raises(ConfigurationError, match="head is 6; there are 6, 0 to 5"):
        translation_steps(english_french, "I am tired.", head=6)
    with pytest.raises(ConfigurationError, match="no such word: the translation has 5 tokens, Je suis fatigué"):
        translation_steps(english_french, "I am tired.", word=9)
    with pytest.raises(ConfigurationError, match="kind is 'crosss'; did you mean 'cross'"):
        translation_steps(english_french, "I am tired.", kind="crosss")  # pyright: ignore[reportArgumentType]
    with pytest.raises(CorpusError, match="the sentence has 32 tokens, and steps are printed for at most 24"):
        translation_steps(english_french, "very " * 30 + ".")
    with pytest.raises(CorpusError, match="the sentence is empty"):
        translation_steps(english_french, " ")
    with pytest.raises(ConfigurationError, match="leave kind, layer and head out"):
        translation_steps(translator("luong-dot"), SENTENCE, head=1)
    model = translator("luong-dot")
    model.model = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="not a translator whose steps are known"):
        translation_steps(model, SENTENCE)


@pytest.mark.parametrize("score", KOREAN_ENGLISH)
def test_the_installed_translators_say_the_sentence_of_the_textbook(score):
    steps = translation_steps(Translator.load(KOREAN_ENGLISH[score]), "나는 학생이다.", word=3)
    assert steps.title.en.startswith("나는 학생이다. → I am a student.")
    assert steps["prediction"].columns[0] == "student"
    weights = steps["weights"]
    assert "학생" in weights.columns[int(weights.numbers[0].argmax())]
