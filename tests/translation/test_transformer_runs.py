"""A Transformer is trained, resumed, searched and aligned as any other translator."""

from pathlib import Path

import pytest
import torch
from small_runs import experiment, write_text

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.build_model import build_model
from regard.translation.checkpoint import load_weights, restore
from regard.translation.experiment import Experiment
from regard.translation.settings import SearchSettings, TransformerSettings
from regard.translation.training import train
from regard.translation.translator import Translator

MODEL = {
    "kind": "transformer",
    "dim": 12,
    "hidden_dim": 20,
    "num_heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 3,
    "dropout": 0.3,
    "attention_dropout": 0.1,
    "shared_embeddings": "all",
}


def settings(folder: Path, model: dict | None = None, **training) -> Experiment:
    told = experiment(folder, **training).model_dump(mode="json")
    vocabulary = {"kind": "characters", "shared": True}
    return Experiment.from_mapping({**told, "vocabulary": vocabulary, "model": {**MODEL, **(model or {})}})


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("transformer")
    write_text(folder)
    train(settings(folder), folder / "run")
    return folder


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_run_that_is_resumed_comes_to_the_same_weights_bit_for_bit(home: Path, tmp_path: Path, precision: str):
    told = {"precision": precision, "betas": [0.9, 0.98], "decay": "inverse-sqrt", "validate_every": 4}
    whole = train(settings(home, **told), tmp_path / "whole")
    part = train(settings(home, **told, max_updates=7), tmp_path / "parts")
    assert part.updates == 7 < whole.updates
    assert train(settings(home, **told), tmp_path / "parts", resume="must").updates == whole.updates
    for name in ("last", "best"):
        (ours, one), (theirs, other) = (
            load_weights(tmp_path / run / f"{name}.safetensors") for run in ("parts", "whole")
        )
        assert one == other
        assert all(torch.equal(ours[key], theirs[key]) for key in ours | theirs)


def test_it_is_loaded_with_its_one_table(home: Path):
    translator = Translator.load(home / "run", "last")
    model = translator.model
    assert model.source_embedding.tokens.weight is model.output.weight  # type: ignore[attr-defined]
    tensors, header = load_weights(home / "run" / "last.safetensors")
    assert header["model"]["kind"] == "transformer"
    assert torch.equal(tensors["output.tokens.weight"], model.output.weight)  # type: ignore[attr-defined]


def test_a_line_is_translated_with_or_without_being_observed(home: Path):
    translator = Translator.load(home / "run", "last")
    lines, search = ["abc", "", "fade"], SearchSettings(beam=3, n_best=2, max_length_ratio=0.5)
    seen = translator.translate(lines, search=search)
    blind = translator.translate(lines, search=search, observe=False)
    assert [one.text for one in seen] == [one.text for one in blind]
    best, other = seen[2].candidates[0], blind[2].candidates[0]
    count = len(best.tokens)
    assert best.weights.shape == (count, 3, 2, len(seen[2].source_tokens))
    assert best.self_weights.shape == (count, 3, 2, count)
    torch.testing.assert_close(best.weights.sum(-1), torch.ones(count, 3, 2))
    torch.testing.assert_close(best.self_weights.sum(-1), torch.ones(count, 3, 2))
    assert not best.self_weights.permute(1, 2, 0, 3).triu(1).any()
    assert other.weights.numel() == other.self_weights.numel() == 0
    with pytest.raises(ConfigurationError, match="made with observe=False"):
        blind[2].heatmap()


def test_maps_are_of_a_head_or_their_mean(home: Path):
    pytest.importorskip("matplotlib")
    (translation,) = Translator.load(home / "run", "last").translate(["abc"])
    weights = translation.candidates[0].weights

    def drawn(**choice):
        array = translation.heatmap(**choice).axes[0].images[0].get_array()
        assert array is not None
        return torch.tensor(array.tolist())

    torch.testing.assert_close(drawn(), weights.mean((1, 2)))
    torch.testing.assert_close(drawn(layer=2, head=1), weights[:, 2, 1])
    torch.testing.assert_close(drawn(head=0), weights[:, :, 0].mean(1))
    with pytest.raises(ConfigurationError, match="there is no head 2: the model has 2 heads, 0 to 1"):
        translation.heatmap(head=2)


def test_words_are_linked_by_a_head_or_by_the_mean(home: Path):
    translator = Translator.load(home / "run", "last")
    pairs = ["abc", "fa", ""], ["cba", "af", "x"]
    (whole, *_), (one, *_) = translator.align(*pairs), translator.align(*pairs, layer=1, head=0)
    vocabulary = translator.source_vocabulary
    source, target = torch.tensor([vocabulary.encode("abc")]), torch.tensor([[2, *vocabulary.encode("cba")]])
    weights = translator.model.attention_weights(source, torch.tensor([source.shape[1]]), target)[0, :-1]
    torch.testing.assert_close(whole.weights, weights.mean((1, 2)))
    torch.testing.assert_close(one.weights, weights[:, 1, 0])
    with pytest.raises(ConfigurationError, match="there is no layer 3: the model has 3 layers, 0 to 2"):
        translator.align(*pairs, layer=3)


def test_a_recurrent_translator_has_no_layers_to_choose_from(tmp_path: Path):
    write_text(tmp_path)
    train(experiment(tmp_path, max_updates=1), tmp_path / "run")
    translator = Translator.load(tmp_path / "run", "last")
    with pytest.raises(ConfigurationError, match="there is no layer 0: the model has one map of weights and no layers"):
        translator.align(["abc"], ["cba"], layer=0)


def test_weights_of_another_architecture_are_refused_with_what_differs(home: Path, tmp_path: Path):
    write_text(tmp_path)
    train(experiment(tmp_path, max_updates=1), tmp_path / "run")
    model = build_model(TransformerSettings.model_validate(MODEL), 10, 10)
    with pytest.raises(CheckpointError, match=r"is of another model than this one, .* missing \(.*extra \(decod"):
        restore(model, tmp_path / "run" / "last.safetensors")
    other = build_model(TransformerSettings.model_validate({**MODEL, "hidden_dim": 21}), 10, 10)
    with pytest.raises(CheckpointError, match=r"of another shape .*encoder.blocks.0.feed_forward.up.weight: .*21, 12"):
        restore(other, home / "run" / "last.safetensors")


def test_long_lines_are_left_out_where_positions_end(tmp_path: Path):
    write_text(tmp_path)
    learned = {"positions": {"kind": "learned", "length": 7}}
    train(settings(tmp_path, learned, max_epochs=1), tmp_path / "run")
    translator = Translator.load(tmp_path / "run", "last")
    assert translator.model.max_source_length == 6
    assert len(translator.translate(["abcdef"[:5]])[0].candidates[0].tokens) <= 7


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"dim": 13}, "model.num_heads 2 does not divide model.dim 13"),
        ({"dim": 13, "num_heads": 1}, "model.dim is 13; sinusoidal positions need it to be even"),
        ({"dim": 14, "positions": "rotary"}, r"heads of an even size; model.dim 14 over model.num_heads 2 gives 7"),
        (
            {"positions": {"kind": "rotary", "length": 9}},
            "model.positions.length: unknown key; only the kind 'learned'",
        ),
    ],
)
def test_sizes_that_cannot_meet_are_refused(tmp_path: Path, model: dict, message: str):
    with pytest.raises(ConfigurationError, match=message):
        settings(tmp_path, model)


def test_one_table_needs_one_vocabulary(tmp_path: Path):
    told = settings(tmp_path).model_dump(mode="json")
    for vocabulary in ("characters", {"source": {"kind": "words"}, "target": {"kind": "words"}}):
        with pytest.raises(ConfigurationError, match="needs a vocabulary of both: set vocabulary.shared, or write"):
            Experiment.from_mapping({**told, "vocabulary": vocabulary})


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_decoder_with_an_ssru_is_trained_and_decodes_as_it_was_trained(home: Path, tmp_path: Path, precision: str):
    run = train(settings(home, {"decoder_attention": "ssru"}, precision=precision), tmp_path / "run")
    assert run.updates
    translator = Translator.load(tmp_path / "run", "last")
    search = SearchSettings(beam=3, n_best=3, max_length_ratio=0.5)
    source = translator.source_vocabulary.encode("fade")
    special = translator.target_vocabulary.special
    for observe in (True, False):
        [found] = translator.translate(["fade"], search=search, observe=observe)
        assert not any(one.self_weights.numel() for one in found.candidates)
        for one in found.candidates:
            said = [
                translator.target_vocabulary.tokens(range(len(translator.target_vocabulary))).index(token)
                for token in one.tokens
            ]
            given = torch.tensor([[special.begin, *said[:-1]]])
            with torch.no_grad():
                logits = translator.model(torch.tensor([source]), torch.tensor([len(source)]), given)  # type: ignore[operator]
            probabilities = logits[0].log_softmax(-1)[torch.arange(len(said)), said]
            assert one.log_probability == pytest.approx(float(probabilities.sum()), rel=1e-5)
