"""Translators of our own as folders of `MarianMTModel`: transformers computes the same logits and says the same."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import MarianMTModel
from typer.testing import CliRunner

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.build_model import build_model
from regard.translation.run_folder import ENGLISH_FRENCH, KOREAN_ENGLISH
from regard.translation.settings import SearchSettings, TransformerSettings
from regard.translation.translator import Translator
from regard.translation.vocabulary import Vocabulary, VocabularySettings
from regard_command.app import app

LINES = ["I am tired.", "Where is the station?"]
SENTENCES = [
    *LINES,
    "Hello!",
    "We have two dogs and a cat, and they sleep in the garden.",
    "She did not know what to say when her mother asked her where she had been.",
    "Would you like some coffee?",
    "A man in a blue shirt is standing on a ladder cleaning a window.",
]


def translator_of(**changes) -> Translator:
    words = VocabularySettings(kind="words")
    source = Vocabulary.train(["one two three four five"], words)
    target = source if changes.get("shared_embeddings") == "all" else Vocabulary.train(["eins zwei drei"], words)
    told = {"dim": 24, "hidden_dim": 40, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 1, **changes}
    torch.manual_seed(5)
    model = build_model(TransformerSettings(kind="transformer", **told), len(source), len(target))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return Translator(model, source, target, SearchSettings(beam=2))


def logits_of(folder, translator, source, lengths, target):
    mask = (torch.arange(source.shape[1]) < lengths[:, None]).long()
    theirs = MarianMTModel.from_pretrained(folder).eval()
    with torch.no_grad():
        expected = translator.model(source, lengths, target)
        return theirs(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits, expected


@pytest.mark.parametrize("shared", ["all", "target", "none"])
def test_logits_in_transformers_are_the_same(tmp_path, shared):
    translator = translator_of(shared_embeddings=shared)
    translator.to_huggingface(tmp_path, max_positions=19)
    source, target = torch.randint(4, 7, (3, 11)), torch.randint(4, 7, (3, 19))
    found, expected = logits_of(tmp_path, translator, source, torch.tensor([11, 5, 2]), target)
    assert expected.std() > 0.1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    again = Translator.from_huggingface(tmp_path)
    assert (again.search.beam, again.model.max_source_length) == (2, 19)
    ours = again.model(source, torch.tensor([11, 5, 2]), target)  # type: ignore[operator]
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_the_installed_translator_says_the_same_in_transformers(tmp_path):
    translator = Translator.load(ENGLISH_FRENCH)
    result = CliRunner().invoke(
        app, ["export", "--checkpoint", str(ENGLISH_FRENCH), "--to", str(tmp_path / "fr"), "--layout", "marian"]
    )
    assert result.exit_code == 0, result.stderr
    ids = [torch.tensor(translator.source_vocabulary.encode(line)) for line in LINES]
    source = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    lengths = torch.tensor([len(one) for one in ids])
    found, expected = logits_of(tmp_path / "fr", translator, source, lengths, torch.randint(4, 6000, (2, 37)))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)  # of up to 20
    model = MarianMTModel.from_pretrained(tmp_path / "fr").eval()
    mask = (torch.arange(source.shape[1]) < lengths[:, None]).long()
    said = model.generate(input_ids=source, attention_mask=mask, num_beams=1)  # type: ignore[attr-defined]
    greedy = [one.text for one in translator.translate(LINES, search=SearchSettings(beam=1))]
    assert [translator.target_vocabulary.decode(one[one != 3].tolist()) for one in said] == greedy
    again = Translator.from_huggingface(tmp_path / "fr")
    assert [one.text for one in again.translate(LINES, search=SearchSettings(beam=1))] == greedy


def test_beams_of_a_trained_model_say_the_tokens_of_transformers(tmp_path):
    """Sentences that end at different steps, in one batch of transformers and one of ours."""
    folder = tmp_path / "fr"
    Translator.load(ENGLISH_FRENCH).to_huggingface(folder, max_positions=64)
    translator, model = Translator.from_huggingface(folder), MarianMTModel.from_pretrained(folder).eval()
    ids = [torch.tensor(translator.source_vocabulary.encode(line)) for line in SENTENCES]
    source = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    mask = (torch.arange(source.shape[1]) < torch.tensor([[len(one)] for one in ids])).long()
    said = model.generate(input_ids=source, attention_mask=mask, num_return_sequences=5)  # type: ignore[attr-defined]
    search = translator.search.model_copy(update={"n_best": 5})
    for row, translation in enumerate(translator.translate(SENTENCES, search=search)):
        expected = [[i for i in one.tolist() if i not in (0, 2, 3)] for one in said[5 * row : 5 * row + 5]]
        assert [candidate.text for candidate in translation.candidates] == [
            translator.target_vocabulary.decode(one) for one in expected
        ]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"norm": "pre"}, "a norm behind the last layer"),
        ({"positions": {"kind": "learned", "length": 30}}, "positions are Learned"),
        ({"positions": {"kind": "alibi"}}, "positions are None"),
        ({"score": "dot"}, "it computes other logits"),
        ({"normalizer": {"kind": "sparsemax"}}, "it computes other logits"),
        ({"decoder_attention": "ssru"}, "a layer of the decoder has an SSRU, a recurrent layer"),
    ],
)
def test_what_marian_does_not_compute_is_named(tmp_path, changes, message):
    with pytest.raises(ConfigurationError, match=f"this model is no MarianMTModel: .*{message}"):
        translator_of(**changes).to_huggingface(tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_recurrent_translator_and_a_full_folder_are_refused(tmp_path):
    with pytest.raises(ConfigurationError, match="RecurrentTranslator is no Transformer"):
        Translator.load(KOREAN_ENGLISH["dot"]).to_huggingface(tmp_path / "to")
    (tmp_path / "mine").write_text("kept", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not empty"):
        translator_of().to_huggingface(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_vocabularies_of_another_model_are_refused(tmp_path):
    translator_of().to_huggingface(tmp_path)
    config = json.loads((tmp_path / "generation_config.json").read_text("utf-8"))
    (tmp_path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": 2}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="vocabularies .* are not those of its model"):
        Translator.from_huggingface(tmp_path)
