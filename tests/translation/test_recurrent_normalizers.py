"""Recurrent translators with another normalizer than softmax in the attention to the source."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from small_runs import experiment, write_text
from torch import Tensor

from regard.translation.build_model import build_model
from regard.translation.experiment import Experiment
from regard.translation.settings import RecurrentSettings
from regard.translation.training import train
from regard.translation.translator import Translator

SIZE = 11
DECODERS: dict[str, Any] = {
    "bahdanau": {"kind": "bahdanau", "score": "general"},
    "covered": {"kind": "bahdanau", "coverage": "sum"},
    "luong": {"kind": "luong"},
    "luong at once": {"kind": "luong", "score": "concat", "input_feeding": False},
    "local": {"kind": "luong", "window": {"kind": "local-p", "radius": 2}},
}
KINDS: list[Any] = [
    "sparsemax",
    "softpick",
    {"kind": "entmax", "number": 1.25},
    {"kind": "sigmoid", "number": -2.0},
    {"kind": "top_scores", "number": 2},
]


def build(decoder: str, normalizer: Any, **settings: Any) -> Any:
    torch.manual_seed(1)
    told = {"embedding_dim": 6, "hidden_dim": 8, "dropout": 0.0, "decoder": DECODERS[decoder], "normalizer": normalizer}
    return build_model(RecurrentSettings.model_validate({**told, **settings}), SIZE, SIZE).eval()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(2)
    return torch.randint(4, 10, (2, 7)), torch.tensor([7, 4]), torch.randint(4, 10, (2, 5))


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("normalizer", KINDS, ids=str)
def test_steps_equal_the_whole_and_padding_changes_nothing(decoder: str, normalizer: Any):
    model = build(decoder, normalizer)
    source, lengths, target = batch()
    other = source.clone()
    other[1, 4:] = 10
    with torch.no_grad():
        whole, memory = model(source, lengths, target), model.encode(other, lengths)
        state, outputs = model.start(memory), []
        for token in target.T:
            step = model.step(token, state, memory)
            state = step.state
            outputs.append(step.logits)
    torch.testing.assert_close(torch.stack(outputs, 1), whole, atol=1e-5, rtol=1e-5)


def sparsemax(scores: Tensor) -> Tensor:
    """Martins and Astudillo 2016, Algorithm 1."""
    ordered = scores.sort(-1, descending=True).values
    sums, counts = ordered.cumsum(-1) - 1.0, torch.arange(1, scores.shape[-1] + 1)
    count = (counts * ordered > sums).sum(-1, keepdim=True)
    return (scores - sums.gather(-1, count - 1) / count).clamp(min=0.0)


@pytest.mark.parametrize("decoder", ["bahdanau", "luong"])
def test_weights_are_those_of_the_formula_with_and_without_gradients(decoder: str):
    model, (source, lengths, target) = build(decoder, "sparsemax"), batch()
    matrix = model.decoder.attend.score.weight
    matrix.data.mul_(50.0)
    for learns in (False, True):  # without a gradient softmax has steps in native code
        with torch.set_grad_enabled(learns):
            memory = model.decoder.project_memory(model.encode(source, lengths).encoded)
            seen = model.decoder.unroll(model.target_embedding(target), memory)
            for row, length in enumerate(lengths.tolist()):
                scores = seen.queries[row] @ matrix @ memory.values[row, :length].mT
                weights = sparsemax(scores)
                assert (weights == 0).any()
                torch.testing.assert_close(
                    seen.contexts[row], weights @ memory.values[row, :length], rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize("decoder", ["covered", "luong"])
@pytest.mark.parametrize("normalizer", ["softpick", {"kind": "entmax", "number": 1.5}], ids=str)
def test_gradients_are_the_numerical_ones(decoder: str, normalizer: Any):
    model, given = build(decoder, normalizer).double(), batch()
    weight = model.encoder.cell.weight_ih_l0 if hasattr(model.encoder, "cell") else next(model.encoder.parameters())

    def loss() -> Tensor:
        return model(*given).log_softmax(-1)[..., 4].sum()

    (found,) = torch.autograd.grad(loss(), weight)
    place = divmod(int(found.abs().argmax()), weight.shape[1])
    with torch.no_grad():
        weight[place] += 1e-6
        above = loss()
        weight[place] -= 2e-6
        below = loss()
    assert float(found[place]) == pytest.approx(float(above - below) / 2e-6, rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"normalizer": "top_scores"}, "'top_scores' needs a number: how many keys have weight, such as 16"),
        (
            {"normalizer": "softpick", "pointer": True},
            "model.pointer copies source tokens by weights that sum to 1, and",
        ),
        ({"normalizer": {"kind": "relu"}, "pointer": True}, "choose softmax, sparsemax, entmax, top_scores, or leave"),
        ({"normalizer": "softermax"}, "'softermax'"),
    ],
)
def test_what_has_no_meaning_is_refused(settings: dict[str, Any], message: str):
    with pytest.raises(ValidationError, match=re.escape(message)):
        RecurrentSettings.model_validate(settings)


def test_a_pointer_copies_by_sparse_weights():
    model, (source, lengths, target) = build("luong", "sparsemax", pointer=True), batch()
    with torch.no_grad():
        torch.testing.assert_close(model(source, lengths, target).exp().sum(-1), torch.ones(2, 5))


def test_a_run_is_trained_and_loaded_with_its_normalizer(tmp_path: Path):
    write_text(tmp_path)
    told = experiment(tmp_path, max_updates=4).model_dump(mode="json")
    model = {"embedding_dim": 6, "hidden_dim": 8, "normalizer": {"kind": "entmax", "number": 1.25}}
    assert train(Experiment.from_mapping({**told, "model": model}), tmp_path / "run").updates == 4
    translator: Any = Translator.load(tmp_path / "run", "last")
    assert repr(translator.model.decoder.attend.normalizer()) == "Entmax(alpha=1.25)"
    assert len(translator.translate(["a b c"])) == 1
