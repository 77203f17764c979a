"""Translators with coverage, pointers and guided alignment: trained, resumed, searched, aligned and recorded."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import copier, experiment, text, write_text

from regard.errors import ConfigurationError, CorpusError
from regard.explorer.record_translation import atlas_of_translation
from regard.models.recurrent import Covered
from regard.steps import translation_steps
from regard.translation.checkpoint import load_weights
from regard.translation.experiment import Experiment
from regard.translation.lightning_module import Training
from regard.translation.search import beam_search
from regard.translation.settings import SearchSettings, TrainingSettings
from regard.translation.training import train
from regard.translation.translator import Translator
from regard.translation.vocabulary import BEGIN, END

DECODERS = {
    "bahdanau": {"kind": "bahdanau", "coverage": "sum"},
    "luong": {"kind": "luong", "score": "concat", "coverage": "fertility"},
    "gru": {"kind": "bahdanau", "coverage": {"kind": "gru", "dim": 4}},
}


def settings(folder: Path, decoder: str = "bahdanau", model: dict | None = None, **training: Any) -> Experiment:
    """Words of letters are turned round; the links say which letter became which."""
    told = experiment(folder, **training).model_dump(mode="json")
    return Experiment.from_mapping(
        {
            **told,
            "data": {**told["data"], "alignments": "train.links"},
            "vocabulary": {"kind": "words", "shared": True},
            "model": {
                "embedding_dim": 8,
                "hidden_dim": 12,
                "decoder": DECODERS[decoder],
                "pointer": True,
                **(model or {}),
            },
            "training": {
                **told["training"],
                "learning_rate": 0.02,
                "coverage_loss": 0.5,
                "guided_alignment": {"weight": 1.0},
            },
        }
    )


def write_words(folder: Path) -> None:
    write_text(folder)
    draw = random.Random(1)
    for name, count in (("train", 60), ("dev", 20)):
        lines = [draw.choices("abcdef", k=draw.randrange(1, 7)) for _ in range(count)]
        (folder / f"{name}.src").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"{name}.trg").write_text("".join(" ".join(line[::-1]) + "\n" for line in lines))
        links = (" ".join(f"{len(line) - 1 - at}-{at}" for at in range(len(line))) for line in lines)
        (folder / f"{name}.links").write_text("".join(f"{line}\n" for line in links))


@pytest.fixture(scope="module", params=DECODERS)
def home(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    write_words(folder)
    train(settings(folder, request.param, max_epochs=25), folder / "run")
    return folder


def test_a_run_that_is_resumed_comes_to_the_same_weights_bit_for_bit(tmp_path: Path):
    write_words(tmp_path)
    whole = train(settings(tmp_path), tmp_path / "whole")
    train(settings(tmp_path, max_updates=5), tmp_path / "parts")
    assert train(settings(tmp_path), tmp_path / "parts", resume="must").updates == whole.updates > 5
    ours, theirs = (load_weights(tmp_path / run / "last.safetensors")[0] for run in ("parts", "whole"))
    assert ours.keys() == theirs.keys() >= {"pointer.gate.weight", "decoder.attend.coverage.weight"}
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_alignments_that_do_not_fit_end_a_run_before_it_begins(tmp_path: Path):
    write_words(tmp_path)
    links = (tmp_path / "train.links").read_text().splitlines()
    (tmp_path / "train.links").write_text("\n".join([*links[:6], "9-0", *links[7:]]))
    with pytest.raises(CorpusError, match=r"train\.links, line 7: 9-0 links source word 9 and target word 0"):
        train(settings(tmp_path), tmp_path / "run")
    assert not (tmp_path / "run" / "experiment.yaml").exists()


def test_a_line_is_translated_and_aligned_by_the_links_that_were_learned(home: Path):
    translator = Translator.load(home / "run", "last")
    lines = ["a c e", "f b", ""]
    seen, blind = translator.translate(lines), translator.translate(lines, observe=False)
    assert [one.text for one in seen] == [one.text for one in blind]
    best = seen[0].candidates[0]
    assert best.weights.shape == (len(best.tokens), 3)
    torch.testing.assert_close(best.weights.sum(-1), torch.ones(len(best.tokens)))
    [pair] = translator.align(["a c e"], ["e c a"])
    assert pair.links == ((0, 2), (1, 1), (2, 0))


def test_beams_have_the_probabilities_of_the_whole_target(home: Path):
    """Each hypothesis' log P is that of forced decoding, whatever beams it came from: coverage follows its beam."""
    translator = Translator.load(home / "run", "last")
    source = torch.tensor([translator.source_vocabulary.encode("a c e b f")])
    lengths = torch.tensor([5])
    [found] = beam_search(translator.model, source, lengths, SearchSettings(beam=5, n_best=5))
    assert len({one.ids for one in found}) == 5
    for one in found:
        target = torch.tensor([[BEGIN, *one.ids]])
        said = torch.tensor([*one.ids, END][: target.shape[1] if one.finished else target.shape[1] - 1])
        model: Any = translator.model
        with torch.no_grad():
            log_p = model(source, lengths, target)[0, : len(said)].log_softmax(-1)
            weights = model.attention_weights(source, lengths, target)[0, : len(said)]
        assert one.log_probability == pytest.approx(float(log_p.gather(1, said[:, None]).sum()), abs=1e-4)
        torch.testing.assert_close(one.weights, weights)


def test_a_record_has_one_map_of_all_steps(home: Path):
    translator = Translator.load(home / "run", "last")
    atlas = atlas_of_translation(translator, "a c e b", n_best=1)
    [shown] = atlas.maps
    best = translator.translate(["a c e b"])[0].candidates[0]
    assert (shown.name, shown.kind, shown.steps) == ("decoder.attend", "cross", len(best.tokens))
    found = torch.as_tensor(shown.weights(0, slice(0, len(best.tokens)), slice(0, 4)))
    torch.testing.assert_close(found.float(), best.weights, rtol=0.0, atol=3e-3)  # queries and keys are kept in float16


def test_steps_of_a_word_are_those_of_its_mixture(home: Path):
    translator = Translator.load(home / "run", "last")
    model: Any = translator.model
    steps = translation_steps(translator, "a c e b", word=2)
    ids = translator.source_vocabulary.encode("a c e b")
    best = translator.target_vocabulary.encode(translator.translate(["a c e b"])[0].text)
    with torch.no_grad():
        inputs = torch.tensor([ids]), torch.tensor([4]), torch.tensor([[BEGIN, *best[:2]]])
        log_p, weights = model(*inputs)[0, -1], model.attention_weights(*inputs)[0, -1]
        before = model.attention_weights(*inputs)[0, :-1].sum(0)
    torch.testing.assert_close(steps["prediction"].numbers[0, 0].float(), log_p.exp().max(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(steps["weights"].numbers[0].float(), weights, rtol=1e-5, atol=1e-6)
    coverage = model.decoder.attend.coverage
    assert ("coverage" in steps.keys) == isinstance(coverage, Covered)
    if isinstance(coverage, Covered):
        torch.testing.assert_close(steps["coverage"].numbers[0].float(), before, rtol=1e-5, atol=1e-6)
    assert ("fertility" in steps.keys) == (getattr(coverage, "fertility", None) is not None)
    assert "said or copied" in steps["prediction"].title.en
    gate = float(steps["generation"].numbers)
    copied = (1 - gate) * torch.zeros(len(log_p)).scatter_add(0, inputs[0][0], weights)
    said = log_p.exp() - copied  # of the words that are said
    assert float(said.sum()) == pytest.approx(gate, abs=1e-5)
    assert bool((said > -1e-6).all())


def test_a_state_that_is_older_than_a_setting_has_its_default():
    def training(**told: Any) -> Training:
        return Training(copier(), text(3), None, TrainingSettings(**told), seed=1)

    state = training().get_extra_state()
    older = {**state, "settings": {k: v for k, v in state["settings"].items() if k != "training.clip_norm"}}
    training().set_extra_state(older)
    with pytest.raises(ConfigurationError, match=r"of a run with other settings: training\.clip_norm; give this one"):
        training(clip_norm=3.0).set_extra_state(older)
