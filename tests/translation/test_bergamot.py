"""Students of Bergamot: Marian's binary file of eight bits, a decoder with SSRU, and the settings beside it."""

from __future__ import annotations

import gzip
import struct

import numpy as np
import pytest
import torch
from bergamot_folders import (
    CONFIG,
    FLOAT32,
    INTGEMM8,
    LAYERS,
    MODEL,
    SIZE,
    Item,
    float_items,
    formula,
    items,
    lexicon,
    listed,
    rounded,
    student_tensors,
    write_bin,
    write_short_list,
    write_student,
)
from marian_folders import SENTENCES
from test_native_marian import marian_tensors, transformers_model, write_npz

from regard import native
from regard.errors import CheckpointError, ConfigurationError
from regard.models.transformer.marian_binary import read_binary
from regard.models.transformer.native_decoder import NativeState
from regard.models.transformer.transformer_state import TransformerState
from regard.nn import SSRU
from regard.testing import Expected, assert_close
from regard.translation.taught_head import taught_model
from regard.translation.terminology import Terminology
from regard.translation.translator import Translator

MODEL_FILE = "model.intgemm.alphas.bin"
TENSORS = student_tensors()


@pytest.fixture
def folder(tmp_path):
    write_student(tmp_path)
    return tmp_path


def logits(translator, source, target):
    """Logits of every token of the target and of what follows, as `formula` has them."""
    given = torch.tensor([[translator.target_vocabulary.special.begin, *target]])
    with torch.no_grad():
        return translator.model(torch.tensor([source]), torch.tensor([len(source)]), given)[0, :, :SIZE]


def in_single_precision(weights):
    return {name: one.astype(np.float32) for name, one in weights.items()}


def assert_computes(translator, weights):
    """In both precisions the translator's logits are those of the formula of these weights, on several sentences."""
    sources = [translator.source_vocabulary.encode(line) for line in SENTENCES[:5]]
    pairs = [(source, source[::-1][1:]) for source in sources]
    low = torch.cat([formula(weights, *pair, torch.float32) for pair in pairs])
    truth = torch.cat([formula(in_single_precision(weights), *pair, torch.float64) for pair in pairs])
    for dtype in (torch.float32, torch.float64):
        translator.model.to(dtype)
        found = torch.cat([logits(translator, *pair) for pair in pairs])
        assert_close(found, Expected(truth, dtype, [low]))


@pytest.mark.parametrize("bits", [8, 16])
@pytest.mark.parametrize("numbers", [(0x4101, 0x4102), (0x10001, 0x10002)], ids=["bergamot", "marian"])
def test_a_file_of_few_bits_has_whole_numbers_over_a_scale(tmp_path, bits, numbers):
    write_bin(tmp_path / "model.bin", items(TENSORS, bits, numbers))
    read = read_binary(tmp_path / "model.bin")
    for name, values in rounded(TENSORS, bits).items():
        assert read[name].dtype == np.float32
        np.testing.assert_array_equal(read[name], values.astype(np.float32), err_msg=name)
        assert read[name].shape == TENSORS[name].shape


@pytest.mark.parametrize("aligned", [True, False])
def test_a_file_of_single_precision_is_read_as_it_is(tmp_path, aligned):
    write_bin(tmp_path / "model.bin", float_items(TENSORS), aligned=aligned)
    read = read_binary(tmp_path / "model.bin")
    for name, values in TENSORS.items():
        np.testing.assert_array_equal(read[name], values, err_msg=name)


def test_a_student_computes_the_formula(folder):
    assert_computes(Translator.load(folder), rounded(TENSORS))


def test_an_npz_and_a_binary_file_of_single_precision_are_the_same_student(folder):
    write_bin(folder / MODEL_FILE, float_items(TENSORS))
    assert_computes(Translator.load(folder), TENSORS)
    text = np.frombuffer(MODEL.encode() + b"\0", dtype=np.int8)
    np.savez(folder / "model.npz", allow_pickle=False, **{**TENSORS, "special:model.yml": text})
    (folder / "decoder.yml").write_text("models: [model.npz]\nvocabs: [vocab.spm, vocab.spm]\n")
    assert_computes(Translator.load(folder), TENSORS)


def test_a_decoder_may_have_another_hidden_width_and_an_output_of_its_own(folder):
    narrow = {name: one for name, one in TENSORS.items() if not name.startswith("decoder") or "_ffn_" not in name}
    narrow |= {name: one for name, one in TENSORS.items() if "ln" in name}
    for layer in range(1, LAYERS + 1):
        for part, width in (("W1", (slice(None), slice(29))), ("b1", (slice(None), slice(29))), ("W2", slice(29))):
            narrow[f"decoder_l{layer}_ffn_{part}"] = np.ascontiguousarray(
                TENSORS[f"decoder_l{layer}_ffn_{part}"][width]
            )
        narrow[f"decoder_l{layer}_ffn_b2"] = TENSORS[f"decoder_l{layer}_ffn_b2"]
    text = MODEL + "transformer-decoder-dim-ffn: 29\n"
    write_bin(folder / MODEL_FILE, items(narrow), text)
    assert_computes(Translator.load(folder), rounded(narrow))

    tables = {"encoder_Wemb": narrow["Wemb"], "decoder_Wemb": narrow["Wemb"]}
    untied = {**narrow, **tables, "decoder_ff_logit_out_Wt": narrow["Wemb"]}
    del untied["Wemb"]
    write_bin(folder / MODEL_FILE, items(untied), text.replace("tied-embeddings-all: true\n", ""))
    assert_computes(Translator.load(folder), rounded(narrow))


def test_it_translates_and_shows_what_it_attends_to(folder):
    translator = Translator.load(folder)
    search = translator.search
    assert (search.beam, search.length_penalty, search.penalty_form, search.max_length_ratio) == (1, 1, "length", 2)
    [found] = translator.translate([SENTENCES[0]])
    [best] = found.candidates
    source = translator.source_vocabulary.encode(SENTENCES[0])
    steps = len(best.tokens)
    assert best.weights.shape == (steps, LAYERS, 2, len(source))
    torch.testing.assert_close(best.weights.sum(-1), torch.ones(steps, LAYERS, 2))
    assert best.self_weights.numel() == 0
    assert translator.align([SENTENCES[0]], [SENTENCES[1]])[0].links


def ids_of(translator, tokens):
    names = translator.target_vocabulary.tokens(range(SIZE))
    return [names.index(token) for token in tokens]


def restricted(row_logits, words):
    """Logits of these words, and -inf of all others."""
    kept = torch.full_like(row_logits, -torch.inf)
    kept[:, words] = row_logits[:, words]
    return kept


@pytest.mark.parametrize("short", [True, False], ids=["listed", "all"])
def test_a_beam_says_what_the_formula_does(folder, short):
    """Scores are those of the formula, token by token, whatever beam a token came from, of listed words alone."""
    if not short:
        config = folder / "config.intgemm8bitalpha.yml"
        config.write_text(CONFIG.replace("shortlist: [lex.s2t.bin, false]\n", ""))
    translator = Translator.load(folder)
    weights = in_single_precision(rounded(TENSORS))
    search = translator.search.model_copy(update={"beam": 4, "n_best": 4})
    for observe in (True, False):
        for found in translator.translate(SENTENCES[:3], search=search, observe=observe):
            source = translator.source_vocabulary.encode(found.source)
            words = listed(source) if short else list(range(SIZE))
            assert len(words) < SIZE or not short
            for one in found.candidates:
                ids = ids_of(translator, one.tokens)
                assert {*ids} <= {*words}
                said = restricted(formula(weights, source, ids[:-1], torch.float64), words).log_softmax(-1)
                expected = said[torch.arange(len(ids)), ids].sum() / len(ids)
                assert one.score == pytest.approx(float(expected), rel=1e-5)


def test_greedy_search_says_the_best_listed_word_in_whatever_batch(folder):
    translator = Translator.load(folder)
    weights = in_single_precision(rounded(TENSORS))
    together = translator.translate(SENTENCES[:5], observe=False)
    for line, found in zip(SENTENCES[:5], together, strict=True):
        source = translator.source_vocabulary.encode(line)
        ids = ids_of(translator, found.candidates[0].tokens)
        best = restricted(
            formula(weights, source, ids[:-1], torch.float64), [word for word in listed(source) if word != 1]
        )
        assert best.argmax(-1).tolist() == ids
        [alone] = translator.translate([line])
        assert alone.text == found.text


def test_a_text_is_the_same_short_list(folder):
    said = [one.text for one in Translator.load(folder).translate(SENTENCES[:3])]
    names = Translator.load(folder).source_vocabulary.tokens(range(SIZE))
    lines = [
        f"{names[word]} {names[token]} {0.9 - 0.01 * word:.3f}" for token, own in enumerate(lexicon()) for word in own
    ]
    unlikely = [f"{names[word]} {names[token]} 0.0001" for token in range(SIZE) for word in range(10, 20)]
    text = "\n".join([*unlikely, *lines, f"NULL {names[3]} 0.9", f"{names[7]} NULL 0.9", ""])
    config = folder / "config.intgemm8bitalpha.yml"
    for path, opened in ((folder / "lex.s2t", open), (folder / "lex.s2t.gz", gzip.open)):
        with opened(path, "wt", encoding="utf-8") as file:
            file.write(text)
        for numbers in ("3, 2", "'3', '2', '0'", "3, 70, 0.001"):
            config.write_text(CONFIG.replace("lex.s2t.bin, false", f"{path.name}, {numbers}"))
            assert [one.text for one in Translator.load(folder).translate(SENTENCES[:3])] == said
    config.write_text(CONFIG.replace("lex.s2t.bin, false", "lex.s2t, 3, 70"))
    model = taught_model(Translator.load(folder).model)
    assert model.short_list is not None
    assert len(model.short_list.words) > SIZE * 10


def test_terms_and_known_translations_are_of_all_words(folder):
    translator = Translator.load(folder)
    source = translator.source_vocabulary.encode(SENTENCES[0])
    word = next(
        word
        for word in ("house", "station", "tired")
        if not {*translator.target_vocabulary.encode(word)[:-1]} <= {*listed(source)}
    )
    [found] = translator.translate([SENTENCES[0]], terms=Terminology(always=[word]))
    assert word in found.text.split()


@pytest.mark.parametrize("beam", [1, 3])
def test_a_decoder_in_native_steps_has_the_same_short_list(folder, beam):
    """Self-attention in the decoder is computed by native code; its modules say the same."""
    write_npz(folder / "model.npz", marian_tensors(transformers_model()))
    list_line = "\nshortlist: [lex.s2t.bin, false]\n"
    (folder / "decoder.yml").write_text(
        f"models: [model.npz]\nvocabs: [vocab.spm, vocab.spm]\nbeam-size: {beam}{list_line}"
    )
    translator = Translator.load(folder)
    native = translator.translate(SENTENCES[:5])
    for line, found in zip(SENTENCES[:5], native, strict=True):
        words = {*listed(translator.source_vocabulary.encode(line))}
        assert {*ids_of(translator, found.candidates[0].tokens)} <= words
    taught_model(translator.model).output.register_forward_hook(lambda *_: None)  # watched modules are run
    assert [one.text for one in translator.translate(SENTENCES[:5])] == [one.text for one in native]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            lambda whole: whole[:30],
            r"lex.s2t.bin is damaged: it has 30 bytes, and a short list of 0 starts and 0 words",
        ),
        (lambda whole: whole[:-4], r"lex.s2t.bin is damaged: it has [\d,]+ bytes, and a short list of \d+ starts and"),
        (
            lambda whole: whole[:-4] + b"\xff\xff\0\0",
            r"or of another vocabulary: a short list has ids \d+ to 65535, and",
        ),
        (
            lambda whole: whole[:48] + struct.pack("<Q", 3) + whole[56:],
            "lex.s2t.bin is damaged, .*: the starts of a short list need to rise from 0 to its number of words",
        ),
        (
            lambda _: b"a b\n",
            r"lex.s2t.bin, line 1: 'a b' is no entry of a short list; it needs a target word, a source",
        ),
        (lambda _: b"a b much\n", "line 1: 'a b much' is no entry of a short list"),
        (lambda _: None, r"cannot read .*lex.s2t.bin: No such file or directory"),
    ],
)
def test_a_short_list_that_is_none_is_named(folder, content, message):
    path = folder / "lex.s2t.bin"
    damaged = content(path.read_bytes())
    path.unlink()
    if damaged is not None:
        path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=message):
        Translator.load(folder)


def test_what_the_settings_say_of_a_short_list(folder):
    write_short_list(folder / "other.bin", lexicon()[:-2])
    (folder / "text").write_text("</s> </s> 1\n")
    for told, message in (
        ("[other.bin]", rf"other.bin is a short list of {SIZE - 2} source words, and the vocabulary has {SIZE}"),
        ("lex.s2t.bin", r"says shortlist: 'lex.s2t.bin'; it needs a list that begins with a file"),
        ("[text, many]", r"the settings say \['many'\] of the short list .*text: they need to be how many first words"),
        ("[text, -1]", r"the settings say \[-1\] of the short list"),
    ):
        (folder / "config.intgemm8bitalpha.yml").write_text(CONFIG.replace("[lex.s2t.bin, false]", told))
        with pytest.raises(CheckpointError, match=message):
            Translator.load(folder)


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.parametrize("beam", [1, 4])
@pytest.mark.parametrize("has_list", [True, False], ids=["short list", "all words"])
def test_native_steps_say_what_modules_say(folder, beam, has_list, monkeypatch):
    translator = Translator.load(folder)
    if not has_list:
        taught_model(translator.model).short_list = None
    search = translator.search.model_copy(update={"beam": beam, "n_best": beam})
    start, states = translator.model.start, []
    monkeypatch.setattr(translator.model, "start", lambda memory: states.append(start(memory)) or states[-1])
    natively = translator.translate(SENTENCES, search=search)
    monkeypatch.setattr(native, "available", lambda: False)
    by_modules = translator.translate(SENTENCES, search=search)
    assert [type(state) for state in states] == [NativeState, TransformerState]
    for mine, theirs in zip(natively, by_modules, strict=True):
        assert [one.tokens for one in mine.candidates] == [one.tokens for one in theirs.candidates]
        for one, other in zip(mine.candidates, theirs.candidates, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)
            torch.testing.assert_close(one.weights, other.weights, rtol=1e-4, atol=1e-4)


def test_what_a_student_has_not(folder, tmp_path):
    translator = Translator.load(folder)
    assert sum(isinstance(module, SSRU) for module in taught_model(translator.model).modules()) == LAYERS
    with pytest.raises(ConfigurationError, match="this translator came from transformers or Marian: copy its folder"):
        translator.to_huggingface(tmp_path / "new")
    assert not (tmp_path / "new").exists()


def changed(name, **changes):
    """The entries of a file with one of them changed."""
    entries = items(TENSORS)
    one = entries[name]
    return {**entries, name: Item(**{"kind": one.kind, "shape": one.shape, "content": one.content, **changes})}


def without(name):
    return {other: one for other, one in items(TENSORS).items() if other != name}


TABLE = items(TENSORS)["Wemb"]
TILES = {
    0x802: "packed16",
    0x1801: "packed8avx2",
    0x2801: "packed8avx512",
    0x18001: "intgemm8ssse3",
    0x11001: "intgemm8avx2",
    0x12001: "intgemm8avx512",
    0x13001: "intgemm8avx512vnni",
}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        *(
            (
                changed("decoder_l1_rnn_W", kind=kind),
                rf"decoder_l1_rnn_W in .*bin is stored as {name}, in an order that",
            )
            for kind, name in TILES.items()
        ),
        (changed("Wemb", kind=0x7), "Wemb in .* is stored as type 0x7; read are float32, float16, intgemm8 and"),
        (
            changed("Wemb", shape=(SIZE * 10, 38)),
            r"Wemb in .* has the shape \(\d+, 38\) and [\d,]+ bytes of data: the f",
        ),
        (changed("Wemb", shape=(-1, 38)), r"Wemb in .* has the shape \(-1, 38\) and .* the file is damaged"),
        (changed("Wemb", content=TABLE.content[:-4] + struct.pack("<f", 0)), "Wemb in .* has the scale 0.0: the file"),
        (changed("Wemb", content=TABLE.content[:-4] + struct.pack("<f", np.nan)), "Wemb in .* has the scale nan"),
        (without("decoder_l2_rnn_Wf"), "has no decoder_l2_rnn_Wf, which a model of its settings has"),
        (without("Wemb"), "has no Wemb, which a model of its settings has"),
        (
            {**items(TENSORS), "decoder_l1_rnn_gamma": Item(FLOAT32, (1, 38), bytes(4 * 38))},
            "has decoder_l1_rnn_gamma, which a model of its settings has not",
        ),
        (
            changed("decoder_l1_rnn_bf", shape=(1, 37)),
            r"decoder_l1_rnn_bf in .* has the shape \(1, 37\), and a model of its settings another one",
        ),
    ],
)
def test_entries_that_are_not_read_are_named(folder, entries, message):
    write_bin(folder / MODEL_FILE, entries)
    with pytest.raises(CheckpointError, match=message):
        Translator.load(folder)


def test_a_file_that_is_damaged_is_named(folder):
    whole = (folder / MODEL_FILE).read_bytes()
    for length in (0, 9, 40, 3_000, len(whole) - 1):
        (folder / MODEL_FILE).write_bytes(whole[:length])
        with pytest.raises(
            CheckpointError, match=rf"is truncated or no binary file of Marian: it has {length:,} bytes"
        ):
            Translator.load(folder)
    write_bin(folder / MODEL_FILE, items(TENSORS), version=2)
    with pytest.raises(CheckpointError, match="is encrypted: convert the model that it was made of with marian-conv"):
        Translator.load(folder)
    (folder / MODEL_FILE).write_bytes(b"PK\3\4 a pickle of another program")
    with pytest.raises(
        CheckpointError, match=r"is no binary file of Marian that is read here: it begins with the vers"
    ):
        Translator.load(folder)
    entries = {name: one for name, one in items(TENSORS).items() if one.kind == INTGEMM8}
    write_bin(folder / MODEL_FILE, entries, "a: [")
    with pytest.raises(CheckpointError, match="its settings are not YAML"):
        Translator.load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MODEL.replace("ssru", "gru"), "says dec-cell: 'gru', a recurrent layer that is not read here; read is 'ssru'"),
        (MODEL.replace("dec-cell: ssru\n", ""), "says dec-cell: None, a recurrent layer that is not read here"),
        (
            MODEL.replace("rnn", "average-attention"),
            "says transformer-decoder-autoreg: 'average-attention', which .* read is 'self-attention' and 'rnn'",
        ),
        (MODEL + "transformer-decoder-ffn-depth: 3\n", "says transformer-decoder-ffn-depth: 3, which changes"),
        (MODEL.replace("rnn", "self-attention"), "has no decoder_l1_self_Wq, which a model of its settings has"),
    ],
)
def test_settings_that_are_not_read_are_named(folder, text, message):
    write_bin(folder / MODEL_FILE, items(TENSORS), text)
    with pytest.raises(CheckpointError, match=message):
        Translator.load(folder)


def test_the_settings_of_a_folder_are_named_by_their_file(folder):
    config = folder / "config.intgemm8bitalpha.yml"
    config.write_text(CONFIG.replace("word-penalty: 0", "word-penalty: 0.5"))
    with pytest.raises(
        CheckpointError, match=r"config.intgemm8bitalpha.yml says word-penalty: 0.5, which changes a tr"
    ):
        Translator.load(folder)
    config.write_text(CONFIG.replace(MODEL_FILE, "model.pt"))
    with pytest.raises(CheckpointError, match=r"model.pt is neither an .npz nor a .bin, as Marian writes its models"):
        Translator.load(folder)
