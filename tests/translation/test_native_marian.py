"""Folders as Marian itself writes them, made here, against the same weights in transformers' MarianMTModel."""

import numpy as np
import pytest
import torch
from marian_folders import SENTENCES, marian_config, random_model, spm, trained_pieces
from torch import nn

from regard.errors import CheckpointError, ConfigurationError, VocabularyError
from regard.nn import FeedForward
from regard.positions import Tensor2TensorSinusoidal
from regard.translation.taught_head import taught_model
from regard.translation.translator import Translator

PIECES = [one for one in trained_pieces() if one[0] != "<unk>"]
SIZE = len(PIECES) + 2
SETTINGS = """\
type: transformer
enc-depth: 2
dec-depth: 2
dim-emb: 32
transformer-heads: 4
transformer-dim-ffn: 56
transformer-ffn-activation: {activation}
transformer-preprocess: ""
transformer-postprocess: dan
transformer-postprocess-emb: d
transformer-decoder-autoreg: self-attention
tied-embeddings-all: true
dim-vocabs: [{size}, {size}]
"""
DECODER = "models: [model.npz]\nvocabs: [vocab.spm, vocab.spm]\nbeam-size: 3\nnormalize: 0.6\nmax-length-factor: 2\n"
_LAYER = {
    "self_attn.{}_proj": "self_{}",
    "encoder_attn.{}_proj": "context_{}",
    "self_attn_layer_norm": "self_Wo_ln_{}",
    "encoder_attn_layer_norm": "context_Wo_ln_{}",
    "final_layer_norm": "ffn_ffn_ln_{}",
    "fc1": "ffn_{}1",
    "fc2": "ffn_{}2",
}


def transformers_model(activation="swish"):
    """A random MarianMTModel that computes as Marian does: its positions, and its eps."""
    model = random_model(marian_config(SIZE + 1, activation_function=activation))
    with torch.no_grad():
        model.state_dict()["model.shared.weight"][SIZE] = 0  # what stands before a translation
        for stack in (model.model.encoder, model.model.decoder):
            positions = stack.embed_positions.weight
            positions.copy_(Tensor2TensorSinusoidal(32)(torch.arange(len(positions))))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.eps = 1e-6
    return model


def marian_tensors(model) -> dict[str, np.ndarray]:
    """Its weights by Marian's names, matrices as (in, out), vectors as (1, out)."""
    found = {"Wemb": model.model.shared.weight[:SIZE], "decoder_ff_logit_out_b": model.final_logits_bias[:, :SIZE]}
    state = model.state_dict()
    for stack in ("encoder", "decoder"):
        for layer in range(2):
            start = f"model.{stack}.layers.{layer}."
            for theirs, ours in _LAYER.items():
                for letter in ("q", "k", "v", "out") if "{}" in theirs else ("",):
                    name = start + theirs.format(letter)
                    if f"{name}.weight" not in state:
                        continue
                    kinds = ("scale", "bias") if "_ln_" in ours else ("W", "b")
                    for part, kind in zip(("weight", "bias"), kinds, strict=True):
                        value = state[f"{name}.{part}"]
                        mark = kind + letter[:1] if "{}" in theirs else kind
                        found[f"{stack}_l{layer + 1}_{ours.format(mark)}"] = value.T if value.ndim == 2 else value[None]
    return {name: value.detach().numpy() for name, value in found.items()}


def write_npz(path, tensors, activation="swish", text=SETTINGS):
    settings = text.format(activation=activation, size=SIZE).encode() + b"\0"
    save(path, {**tensors, "special:model.yml": np.frombuffer(settings, dtype=np.int8)})


def save(path, entries):
    np.savez(path, allow_pickle=False, **entries)


@pytest.fixture(scope="module")
def model():
    return transformers_model()


@pytest.fixture
def folder(tmp_path, model):
    write_npz(tmp_path / "model.npz", marian_tensors(model))
    (tmp_path / "vocab.spm").write_bytes(spm(PIECES))
    (tmp_path / "decoder.yml").write_text(DECODER)
    return tmp_path


def logits(model, translator, lines):
    """Logits of both, of what may be said, for some sentences and targets."""
    vocabulary = translator.source_vocabulary
    for line in lines:
        source = torch.tensor([vocabulary.encode(line)])
        target = torch.tensor([[SIZE, *vocabulary.encode(line)[::-1]]])
        with torch.no_grad():
            expected = model(input_ids=source, decoder_input_ids=target).logits
            found = taught_model(translator.model)(source, torch.tensor([source.shape[1]]), target)
        yield found[..., :SIZE], expected[..., :SIZE]


@pytest.mark.parametrize("activation", ["swish", "relu"])
def test_logits_are_those_of_the_same_weights_in_transformers(folder, activation):
    model = transformers_model(activation)
    write_npz(folder / "model.npz", marian_tensors(model), activation)
    translator = Translator.load(folder)
    for found, expected in logits(model, translator, SENTENCES[:5]):
        scale = expected.abs().max()
        torch.testing.assert_close(found / scale, expected / scale, atol=1e-5, rtol=0)


def test_positions_are_marians_and_not_those_of_transformers(folder):
    """The same weights with the sines of transformers differ by far more than rounding."""
    plain = random_model(marian_config(SIZE + 1))
    with torch.no_grad():
        plain.state_dict()["model.shared.weight"][SIZE] = 0
    translator = Translator.load(folder)
    assert all((found - expected).abs().max() > 1e-2 for found, expected in logits(plain, translator, SENTENCES[:2]))


def test_gelu_is_marians(folder, model):
    write_npz(folder / "model.npz", marian_tensors(model), "gelu")
    layer = taught_model(Translator.load(folder).model).get_submodule("encoder.blocks.0.feed_forward")
    assert isinstance(layer, FeedForward)
    x = torch.linspace(-3, 3, 7)
    torch.testing.assert_close(layer.activation(x), x * torch.sigmoid(1.702 * x))


def test_it_is_searched_as_decoder_yml_says_and_never_says_what_is_unknown(folder):
    translator = Translator.load(folder)
    search = translator.search
    assert (search.beam, search.length_penalty, search.penalty_form, search.max_length_ratio) == (3, 0.6, "length", 2)
    special = translator.target_vocabulary.special
    assert (special.end, special.unknown, special.begin, special.pad, special.never_said) == (
        0,
        1,
        SIZE,
        SIZE,
        (1, SIZE),
    )
    [found] = translator.translate([SENTENCES[0]])
    assert found.source_tokens[-1] == "</s>"
    assert found.candidates[0].weights.shape[1:] == (2, 4, len(found.source_tokens))
    assert "<unk>" not in found.candidates[0].tokens
    assert translator.align([SENTENCES[0]], [SENTENCES[1]])[0].links


def test_tables_of_each_side_and_an_output_of_its_own(folder, model):
    tensors = marian_tensors(model)
    table = tensors.pop("Wemb")
    tensors |= {"encoder_Wemb": table, "decoder_Wemb": table, "decoder_ff_logit_out_W": table.T.copy()}
    for settings, names in (
        ("tied-embeddings-all: false\ntied-embeddings: true", ("encoder_Wemb", "decoder_Wemb")),
        ("tied-embeddings-all: false", ("encoder_Wemb", "decoder_Wemb", "decoder_ff_logit_out_W")),
    ):
        other = {"encoder_Wemb", "decoder_Wemb", "decoder_ff_logit_out_W"} - set(names)
        kept = {name: value for name, value in tensors.items() if name not in other}
        write_npz(folder / "model.npz", kept, text=SETTINGS.replace("tied-embeddings-all: true", settings))
        for found, expected in logits(model, Translator.load(folder), SENTENCES[:2]):
            scale = expected.abs().max()
            torch.testing.assert_close(found / scale, expected / scale, atol=1e-5, rtol=0)


def test_ids_of_a_yaml_file_with_pieces_beside_it(folder):
    names = ["</s>", "<unk>", *(piece for piece, _ in PIECES)]
    text = "".join(f"{piece.__repr__()}: {number}\n" for number, piece in enumerate(names) if "'" not in piece)
    (folder / "vocab.yml").write_text(text, encoding="utf-8")
    (folder / "decoder.yml").write_text(DECODER.replace("vocab.spm", "vocab.yml"))
    for side in ("source", "target"):
        (folder / f"{side}.spm").write_bytes(spm(PIECES))
    ids = Translator.load(folder).source_vocabulary.encode(SENTENCES[1])
    (folder / "decoder.yml").write_text(DECODER)
    assert Translator.load(folder).source_vocabulary.encode(SENTENCES[1]) == ids


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("transformer-decoder-autoreg: rnn", "says dec-cell: None, a recurrent layer that is not read here"),
        ("transformer-preprocess: n", "says transformer-preprocess: 'n', which changes"),
        ("transformer-tied-layers: [1, 1]", r"says transformer-tied-layers: \[1, 1\], which changes"),
        ("transformer-ffn-activation: prelu", "says transformer-ffn-activation: 'prelu'; read are relu, swish, gelu"),
        ("enc-depth: two", "says enc-depth: 'two'; it needs a whole number of at least 1"),
        ("dec-depth: 3", "has no decoder_l3_self_Wq, which a model of its settings has"),
        ("dec-depth: 1", "has decoder_l2_.*, which a model of its settings has not"),
        ("transformer-dim-ffn: 57", r"encoder_l1_ffn_W1 in .* has the shape \(32, 56\), and a model of its settings"),
        ("- a\n- b", "its settings are not YAML"),
    ],
)
def test_settings_that_are_not_read_are_named(folder, model, more, message):
    name = more.split(":")[0]
    lines = [line for line in SETTINGS.splitlines() if line.split(":")[0] != name]
    write_npz(folder / "model.npz", marian_tensors(model), text="\n".join([*lines, more]))
    with pytest.raises(CheckpointError, match=message):
        Translator.load(folder)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (DECODER.replace("[model.npz]", "[model.npz, other.npz]"), r"says models: .*; it needs a list of 1 file"),
        (DECODER.replace("model.npz", "model.bin"), r"cannot read .*model.bin: No such file"),
        (DECODER.replace("model.npz", "none.npz"), r"cannot read .*none.npz: No such file"),
        (DECODER + "word-penalty: 0.2\n", r"says word-penalty: 0.2, which changes a translation and is not read here"),
        (DECODER.replace("0.6", "long"), r"says normalize: 'long'; it needs a number of at least 0"),
        ("- a\n", "its settings are list, and need to be a mapping of names"),
    ],
)
def test_what_decoder_yml_may_not_say(folder, text, message):
    (folder / "decoder.yml").write_text(text)
    with pytest.raises(CheckpointError, match=message):
        Translator.load(folder)


def test_files_that_are_damaged_or_do_not_fit(folder, model):
    with pytest.raises(ConfigurationError, match="this model is told no source language, and 'eng' is named"):
        Translator.load(folder, languages=("eng", None))
    tensors = marian_tensors(model)
    save(folder / "model.npz", tensors)
    with pytest.raises(CheckpointError, match="has no entry 'special:model.yml', where Marian keeps the settings"):
        Translator.load(folder)
    write_npz(folder / "model.npz", {**tensors, "Wemb": tensors["Wemb"].astype(np.int8)})
    with pytest.raises(CheckpointError, match=r"Wemb in .* is int8: weights need floating-point numbers"):
        Translator.load(folder)
    bias = tensors["decoder_ff_logit_out_b"][:, :-3]
    write_npz(folder / "model.npz", {**tensors, "Wemb": tensors["Wemb"][:-3], "decoder_ff_logit_out_b": bias})
    with pytest.raises(VocabularyError, match=rf"vocab.spm has ids up to {SIZE - 1}, and the model {SIZE - 3} of them"):
        Translator.load(folder)
    (folder / "model.npz").write_bytes(b"PK no archive")
    with pytest.raises(CheckpointError, match="is truncated or no .npz of Marian"):
        Translator.load(folder)
