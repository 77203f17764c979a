"""Translators that transformers saved: logits, tokens and searches equal to its own, and everything else refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from marian_folders import SENTENCES, write_folder
from safetensors.torch import load_file, save_file

from regard.errors import CheckpointError, ConfigurationError, CorpusError, VocabularyError
from regard.translation.translator import Translator


@pytest.fixture(scope="module")
def marian(tmp_path_factory):
    folder = tmp_path_factory.mktemp("marian")
    return folder, write_folder(folder)


def padded(translator: Translator, lines):
    ids = translator.source_vocabulary.encode_batch(lines)
    lengths = torch.tensor([len(one) for one in ids])
    source = torch.nn.utils.rnn.pad_sequence([torch.tensor(one) for one in ids], batch_first=True)
    return source, lengths, (torch.arange(source.shape[1]) < lengths[:, None]).long()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"activation_function": "relu", "scale_embedding": False},
        {"activation_function": "gelu", "encoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 40},
        {"tie_word_embeddings": False},
        {"share_encoder_decoder_embeddings": False},
    ],
)
def test_logits_are_those_of_transformers(tmp_path, changes):
    model = write_folder(tmp_path, **changes)
    translator = Translator.from_huggingface(tmp_path)
    source, lengths, mask = padded(translator, SENTENCES[:3])
    size = model.config.vocab_size
    target = torch.cat([torch.full((3, 1), size - 1), torch.randint(2, size - 1, (3, 13))], dim=1)
    with torch.no_grad():
        expected = model(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
        found = translator.model(source, lengths, target)  # type: ignore[operator]
        memory = translator.model.encode(source, lengths)
        state, steps = translator.model.start(memory), []
        for tokens in target.unbind(1):
            step = translator.model.step(tokens, state, memory)
            state = step.state
            steps.append(step.logits)
        precise = model.double()(input_ids=source, attention_mask=mask, decoder_input_ids=target).logits
        ours = translator.model.double()(source, lengths, target)  # type: ignore[attr-defined]
    assert expected.abs().max() > 1
    torch.testing.assert_close(ours, precise, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.stack(steps, 1), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "generation",
    [
        {"num_beams": 1},
        {"num_beams": 4},
        {"num_beams": 3, "length_penalty": 0.6, "max_length": 40, "renormalize_logits": True},
        {"num_beams": 2, "length_penalty": 0.0, "bad_words_ids": None},
        {"num_beams": 6, "num_return_sequences": 5, "max_length": 9, "forced_eos_token_id": None},
    ],
)
@pytest.mark.parametrize("end_bias", [-20.0, 4.0, 8.0])  # never ends, ends at times, ends early
def test_searches_say_the_tokens_of_transformers(tmp_path, generation, end_bias):
    model = write_folder(tmp_path, generation=generation)
    model.final_logits_bias[0, 0] = end_bias
    model.save_pretrained(tmp_path)
    translator = Translator.from_huggingface(tmp_path)
    source, _, mask = padded(translator, SENTENCES[:5])
    count = generation.get("num_return_sequences", 1)
    with torch.no_grad():
        expected = model.generate(input_ids=source, attention_mask=mask)  # type: ignore[attr-defined]
    for row, translation in enumerate(translator.translate(SENTENCES[:5])):
        for rank, candidate in enumerate(translation.candidates):
            ids = expected[count * row + rank, 1:].tolist()
            ids = ids[: ids.index(0)] if 0 in ids else ids
            tokens = translator.target_vocabulary.tokens(ids)
            assert [token for token in candidate.tokens if token != "</s>"] == tokens
        assert len(translation.candidates) == count


def test_a_generation_beyond_the_positions_is_cut(marian):
    folder, _ = marian
    translator = Translator.from_huggingface(folder)
    assert (translator.model.max_source_length, translator.model.max_target_length) == (48, 22)
    with pytest.raises(CorpusError, match="line 1 has .* tokens and this model allows 48"):
        translator.translate(["the dog " * 40])
    assert translator.translate(["the dog " * 40], split_above=20)[0].text
    longer = Translator.from_huggingface(folder, ignore=())
    longer.model._max_target_length = 48  # type: ignore[attr-defined]
    translation = longer.translate(["The dog."])[0]
    assert len(translation.candidates[0].tokens) <= 48


def test_pieces_join_to_words(marian):
    translator = Translator.from_huggingface(marian[0])
    vocabulary = translator.source_vocabulary
    line = "  The   quick brown fox,  I am tired. "
    ids = vocabulary.encode(line)
    words = vocabulary.words(ids)
    assert (vocabulary.tokens(ids)[-1], words[-1]) == ("</s>", -1)
    joined = ["" for _ in line.split()]
    for word, piece in zip(words[:-1], vocabulary.tokens(ids), strict=False):
        joined[word] += piece
    assert joined == ["▁" + word for word in line.split()]
    assert vocabulary.decode(ids) == "The quick brown fox, I am tired."
    pair = translator.align([SENTENCES[0]], [SENTENCES[1]])[0]
    assert pair.weights.shape == (len(pair.target_tokens), len(pair.source_tokens))
    assert pair.target_tokens[-1] != "</s>"
    assert {target for _, target in pair.links} == set(range(len(SENTENCES[1].split())))
    assert all(source < len(SENTENCES[0].split()) for source, _ in pair.links)


def test_languages_and_special_tokens_in_text(marian):
    vocabulary = Translator.from_huggingface(marian[0]).source_vocabulary
    ids = vocabulary.encode(">>fra<< The dog.")
    assert vocabulary.tokens(ids)[0] == ">>fra<<"
    assert ids[1:] == vocabulary.encode("The dog.")
    assert vocabulary.words(ids)[0] == -1
    assert vocabulary.decode(ids) == "The dog."
    assert set(vocabulary.encode("</s> <pad>")[:-1]).isdisjoint({0, len(vocabulary) - 1})
    assert len(vocabulary.encode("</s> <pad>")) > 2
    assert vocabulary.encode(" \t ") == []
    with pytest.raises(VocabularyError, match=">>fre<<, which is no language .* did you mean '>>fra<<'"):
        vocabulary.encode(">>fre<< The dog.")


def test_every_part_of_a_line_has_its_language(marian):
    translator = Translator.from_huggingface(marian[0])
    line = " >>deu<< The dog is quick. You are tired."
    parts = translator.translate([">>deu<< The dog is quick.", ">>deu<< You are tired."])
    [whole] = translator.translate([line], split_above=8)
    assert whole.text == " ".join(part.text for part in parts)
    assert whole.source_tokens == (*parts[0].source_tokens, *parts[1].source_tokens)
    assert whole.source_tokens.count(">>deu<<") == 2


def test_signs_without_pieces_are_kept_and_named(marian):
    translator = Translator.from_huggingface(marian[0])
    odd, plain = translator.translate(["The dog ❤ is “quick” \ud83d.", "The dog is quick."])
    assert odd.warnings[:2] == (
        "line 1: the source vocabulary does not know '❤', '“', '”', which it keeps as it is",
        "line 1: the source vocabulary does not know '\ufffd', which it leaves out",
    )
    assert odd.source_tokens == plain.source_tokens
    assert odd.text.replace("❤", "").replace("“", "").replace("”", "").split() == plain.text.split()
    [empty] = translator.translate([" "])
    assert (empty.text, empty.candidates) == ("", ())


def changed(marian, tmp_path: Path, file: str, **values) -> Path:
    folder = tmp_path / "changed"
    shutil.copytree(marian[0], folder)
    path = folder / file
    given = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps({**given, **values}), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"model_type": "t6"}, "model_type='t6', which is no translator that is read here"),
        ("config.json", {"activation_function": "gelu_new"}, "activation_function='gelu_new'"),
        ("config.json", {"normalize_before": True}, "normalize_before=True"),
        ("config.json", {"d_model": 33}, "d_model=33"),
        ("config.json", {"encoder_layers": 3}, "encoder.layers.2"),
        ("config.json", {"new_scores": 2}, "new_scores=2"),
        ("config.json", {"vocab_size": 20, "decoder_vocab_size": 20}, "ids up to"),
        ("generation_config.json", {"no_repeat_ngram_size": 3}, "no_repeat_ngram_size=3"),
        ("generation_config.json", {"early_stopping": "never"}, "early_stopping='never'"),
        ("generation_config.json", {"guidance_scale": 2.0}, "guidance_scale=2.0"),
        ("generation_config.json", {"bad_words_ids": [[3, 4]]}, "words of one id each"),
        ("tokenizer_config.json", {"sp_model_kwargs": {"enable_sampling": True}}, "sp_model_kwargs"),
        ("vocab.json", {"twice": 0}, "an id twice"),
    ],
)
def test_what_is_not_read_is_named(marian, tmp_path, file, values, message):
    with pytest.raises((CheckpointError, VocabularyError), match=message):
        Translator.from_huggingface(changed(marian, tmp_path, file, **values))


def test_an_older_configuration_has_its_search_in_config_json(marian, tmp_path):
    """Keys as the converters of OPUS-MT wrote them."""
    older = {
        "_num_labels": 3,
        "add_bias_logits": False,
        "add_final_layer_norm": False,
        "classif_dropout": 0.0,
        "extra_pos_embeddings": 20,
        "id2label": {"0": "LABEL_0"},
        "max_length": 16,
        "normalize_before": False,
        "normalize_embedding": False,
        "num_beams": 6,
        "num_hidden_layers": 2,
        "static_position_embeddings": True,
        "bad_words_ids": [[3]],
    }
    folder = changed(marian, tmp_path, "config.json", **older)
    assert Translator.from_huggingface(folder).search.beam == 1  # generation_config.json comes first
    (folder / "generation_config.json").unlink()
    translator = Translator.from_huggingface(folder)
    assert (translator.search.beam, translator.model.max_target_length) == (6, 14)
    assert translator.target_vocabulary.special.never_said == (3,)


def test_a_folder_of_transformers_has_one_set_of_weights(marian):
    with pytest.raises(ConfigurationError, match="one set of weights, that of transformers: leave 'last' out"):
        Translator.load(marian[0], "last")


def test_settings_that_change_nothing_can_be_ignored(marian, tmp_path):
    folder = changed(marian, tmp_path, "generation_config.json", no_repeat_ngram_size=3)
    assert Translator.from_huggingface(folder, ignore=["no_repeat_ngram_size"]).search.beam == 1


def test_folders_that_are_not_whole(marian, tmp_path):
    with pytest.raises(CheckpointError, match="downloads nothing"):
        Translator.from_huggingface(tmp_path / "Helsinki-NLP/opus-mt-en-fr")
    folder = changed(marian, tmp_path, "config.json")
    (folder / "source.spm").write_bytes((folder / "source.spm").read_bytes()[:-9])
    with pytest.raises(VocabularyError, match="source.spm is truncated or not a SentencePiece model"):
        Translator.from_huggingface(folder)
    (folder / "source.spm").unlink()
    with pytest.raises(
        VocabularyError, match="cannot read the SentencePiece model .*source.spm, which .*; copy it from"
    ):
        Translator.from_huggingface(folder)
    shutil.copy(folder / "target.spm", folder / "source.spm")
    (folder / "vocab.json").rename(folder / "words.json")
    with pytest.raises(
        CheckpointError, match="there is no vocab.json in .*: copy it from where the rest of the folder"
    ):
        Translator.from_huggingface(folder)
    (folder / "words.json").rename(folder / "vocab.json")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="AutoModelForSeq2SeqLM.from_pretrained"):
        Translator.from_huggingface(folder)


def test_stored_copies_and_halves(marian, tmp_path):
    folder = changed(marian, tmp_path, "config.json")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.shared.weight"].clone()
    tensors["model.encoder.embed_positions.weight"] = marian[1].model.encoder.embed_positions.weight.detach()
    half = {name: tensor.half() for name, tensor in tensors.items()}
    save_file(half, folder / "model.safetensors")
    loaded = Translator.from_huggingface(folder).model.source_embedding.tokens.weight  # type: ignore[attr-defined]
    assert torch.equal(loaded, half["model.shared.weight"].float())
    tensors["lm_head.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="lm_head.weight .* differs .* set tie_word_embeddings to false"):
        Translator.from_huggingface(folder)
    tensors["lm_head.weight"] -= 1
    tensors["model.encoder.embed_positions.weight"] = torch.rand(48, 32)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match="is not the table of sines and cosines"):
        Translator.from_huggingface(folder)
