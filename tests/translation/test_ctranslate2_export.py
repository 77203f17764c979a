"""Translators of our own as folders of CTranslate2, which says what they say."""

from __future__ import annotations

import json
import sys

import pytest
import torch
from typer.testing import CliRunner

from regard.errors import CheckpointError, ConfigurationError, MissingExtra
from regard.translation.build_model import build_model
from regard.translation.run_folder import ENGLISH_FRENCH, KOREAN_ENGLISH
from regard.translation.settings import SearchSettings, TransformerSettings
from regard.translation.translator import Translator
from regard.translation.vocabulary import Vocabulary, VocabularySettings
from regard_command.app import app

LINES = [
    "I am tired.",
    "Where is the station?",
    "Hello!",
    "We have two dogs and a cat, and they sleep in the garden.",
    "Would you like some coffee?",
    "A man in a blue shirt is standing on a ladder.",
]
GREEDY = {"beam": 1}
BEAM = {"beam": 5, "method": "refilled", "stop_early": True, "penalty_form": "length", "length_penalty": 0.6}


def random_translator(**changes) -> Translator:
    words = VocabularySettings(kind="words")
    source = Vocabulary.train(["one two three four five six"], words)
    shares = changes.get("shared_embeddings") == "all"
    target = source if shares else Vocabulary.train(["eins zwei drei vier acht"], words)
    told = {"dim": 24, "hidden_dim": 40, "num_heads": 4, "encoder_layers": 2, "decoder_layers": 1, **changes}
    torch.manual_seed(5)
    model = build_model(TransformerSettings(kind="transformer", **told), len(source), len(target))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return Translator(model, source, target, SearchSettings())


def check_translations(translator: Translator, folder, lines, settings, longest: int) -> None:
    ctranslate2 = pytest.importorskip("ctranslate2")
    theirs = ctranslate2.Translator(str(folder), compute_type="float32", intra_threads=1)
    vocabulary = translator.source_vocabulary
    found = theirs.translate_batch(
        [vocabulary.tokens(vocabulary.encode(line)) for line in lines],
        beam_size=settings["beam"],
        length_penalty=settings.get("length_penalty", 1.0),
        max_decoding_length=longest,
        suppress_sequences=[["<pad>"], ["<s>"]],
        return_scores=True,
    )
    translator.model._max_target_length = longest  # type: ignore[attr-defined]
    search = translator.search.model_copy(update={**settings, "max_length_ratio": 100.0})
    for ours, other in zip(translator.translate(lines, search=search), found, strict=True):
        best = ours.candidates[0]
        assert [token for token in best.tokens if token != "</s>"] == other.hypotheses[0]
        if settings["beam"] > 1 and best.finished:
            assert other.scores[0] == pytest.approx(best.score, abs=1e-4)


@pytest.mark.parametrize("shared", ["all", "target", "none"])
def test_a_random_translator_says_the_same(tmp_path, shared):
    pytest.importorskip("ctranslate2")
    translator = random_translator(shared_embeddings=shared)
    translator.to_ctranslate2(tmp_path / "ct2", max_positions=30)
    lines = ["one two three", "six", "five four three two one", "four four six"]
    check_translations(translator, tmp_path / "ct2", lines, GREEDY, 12)


@pytest.mark.parametrize("settings", [GREEDY, BEAM], ids=["greedy", "beam"])
def test_the_installed_translator_says_the_same(tmp_path, settings):
    pytest.importorskip("ctranslate2")
    to = tmp_path / "fr"
    told = ["export", "--checkpoint", str(ENGLISH_FRENCH), "--to", str(to), "--layout", "ctranslate2"]
    result = CliRunner().invoke(app, told)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{to}\n"
    check_translations(Translator.load(ENGLISH_FRENCH), to, LINES, settings, 60)
    kept = Vocabulary.load(to / "source.vocabulary.json")
    assert kept.tokens(range(len(kept))) == json.loads((to / "shared_vocabulary.json").read_text("utf-8"))


def test_what_ctranslate2_cannot_compute_is_named_and_nothing_written(tmp_path):
    pytest.importorskip("ctranslate2")
    with pytest.raises(ConfigurationError, match="this model is no MarianMTModel: .*a norm behind the last layer"):
        random_translator(norm="pre").to_ctranslate2(tmp_path / "pre")
    with pytest.raises(ConfigurationError, match="is no Transformer, which CTranslate2 computes"):
        Translator.load(KOREAN_ENGLISH["additive"]).to_ctranslate2(tmp_path / "recurrent")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").write_text("own", encoding="utf-8")
    with pytest.raises(CheckpointError, match="is not empty, and what it holds would be mixed up"):
        random_translator().to_ctranslate2(tmp_path / "full")
    assert [path.name for path in tmp_path.iterdir()] == ["full"]


@pytest.mark.parametrize("layout", ["to_ctranslate2", "to_huggingface"])
def test_an_export_that_fails_leaves_nothing(tmp_path, layout, monkeypatch):
    if layout == "to_ctranslate2":
        pytest.importorskip("ctranslate2")

    def full(self, path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Vocabulary, "save", full)
    with pytest.raises(CheckpointError, match="cannot write the folder .*out .No space left on device"):
        getattr(random_translator(), layout)(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_it_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    with pytest.raises(
        MissingExtra, match=r"'ctranslate2', which is not installed; pip install 'regard\[ctranslate2\]'"
    ):
        random_translator().to_ctranslate2(tmp_path / "out")
