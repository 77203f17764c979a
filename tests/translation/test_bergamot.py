"""Students of Bergamot: Marian's binary file of eight bits, a decoder with SSRU, and the settings beside it."""

from __future__ import annotations

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
    rounded,
    student_tensors,
    write_bin,
    write_student,
)
from marian_folders import SENTENCES

from regard.errors import CheckpointError, ConfigurationError
from regard.models.transformer.marian_binary import read_binary
from regard.nn import SSRU
from regard.testing import Expected, assert_close
from regard.translation.taught_head import taught_model
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
    for line in SENTENCES[:4]:
        source = translator.source_vocabulary.encode(line)
        target = source[::-1][1:]
        low = formula(weights, source, target, torch.float32)
        truth = formula(in_single_precision(weights), source, target, torch.float64)
        assert_close(logits(translator, source, target), Expected(truth, torch.float32, [low]))
        translator.model.double()
        assert_close(logits(translator, source, target), Expected(truth, torch.float64, [low]))
        translator.model.float()


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


def test_a_beam_keeps_the_state_of_each_hypothesis(folder):
    """Log-probabilities of a beam search are those of the formula, token by token, whatever beam a token came from."""
    translator = Translator.load(folder)
    weights = in_single_precision(rounded(TENSORS))
    search = translator.search.model_copy(update={"beam": 4, "n_best": 4})
    for observe in (True, False):
        for found in translator.translate(SENTENCES[:3], search=search, observe=observe):
            source = translator.source_vocabulary.encode(found.source)
            for one in found.candidates:
                ids = [translator.target_vocabulary.tokens(range(SIZE)).index(token) for token in one.tokens]
                said = formula(weights, source, ids[:-1], torch.float64).log_softmax(-1)
                expected = said[torch.arange(len(ids)), ids].sum() / len(ids)
                assert one.score == pytest.approx(float(expected), rel=1e-5)


def test_what_a_student_has_not(folder, tmp_path):
    translator = Translator.load(folder)
    assert sum(isinstance(module, SSRU) for module in taught_model(translator.model).modules()) == LAYERS
    with pytest.raises(ConfigurationError, match="the decoder has an SSRU, a recurrent layer, of which there are no"):
        translator.quantize()
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
