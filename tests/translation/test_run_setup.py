"""A run that starts from the weights of another has its vocabularies too, and is refused what does not fit them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import experiment, write_text

from regard.errors import CheckpointError, ConfigurationError, CorpusError
from regard.translation.checkpoint import LONGEST_SOURCE, load_weights, save_tensors
from regard.translation.experiment import Experiment
from regard.translation.run_folder import export
from regard.translation.training import train
from regard.translation.vocabulary import VocabularySettings


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("starting")
    write_text(home)
    train(experiment(home, max_epochs=1), home / "first")
    return home


def again(home: Path, weights: Path, **changes: dict[str, Any]) -> Experiment:
    """The experiment, starting from weights, with these changes to its sections."""
    told = experiment(home, max_epochs=1).model_dump(mode="json")
    told["training"]["start_from"] = str(weights)
    return Experiment.from_mapping(
        {key: value | changes[key] if key in changes else value for key, value in told.items()}
    )


def small_steps(home: Path, weights: Path) -> Experiment:
    return again(home, weights, training={"learning_rate": 1e-12})


@pytest.mark.parametrize("exported", [False, True])
def test_it_has_the_weights_and_the_vocabularies(home: Path, tmp_path: Path, exported: bool):
    weights = export(home / "first", tmp_path / "small", dtype="float32") / "best.safetensors" if exported else None
    train(small_steps(home, weights or home / "first" / "best.safetensors"), tmp_path / "second")
    before, after = (load_weights(folder / "best.safetensors")[0] for folder in (home / "first", tmp_path / "second"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-9)
    for side in ("source", "target"):
        kept = (home / "first" / f"{side}.vocabulary.json").read_bytes()
        assert (tmp_path / "second" / f"{side}.vocabulary.json").read_bytes() == kept


def test_it_is_resumed_where_the_first_run_is_gone(home: Path, tmp_path: Path):
    first = export(home / "first", tmp_path / "first", dtype="float32")
    settings = again(home, first / "best.safetensors", training={"max_epochs": 2})
    unbroken = train(settings, tmp_path / "unbroken")
    train(again(home, first / "best.safetensors"), tmp_path / "run")
    for file in first.iterdir():
        file.unlink()
    assert train(settings, tmp_path / "run").updates == unbroken.updates
    ours, theirs = (load_weights(tmp_path / run / "last.safetensors") for run in ("run", "unbroken"))
    assert ours[1] == theirs[1]
    assert all(torch.equal(ours[0][name], theirs[0][name]) for name in ours[0])


def test_it_knows_of_the_longest_sentence_that_either_run_saw(home: Path, tmp_path: Path):
    longest = load_weights(home / "first" / "best.safetensors")[1][LONGEST_SOURCE]
    short = tmp_path / "short"
    short.mkdir()
    for name in ("train.src", "train.trg", "dev.src", "dev.trg"):
        (short / name).write_text("ab\nba\nabc\n")
    train(again(short, home / "first" / "best.safetensors"), tmp_path / "second")
    assert longest > 3
    assert load_weights(tmp_path / "second" / "last.safetensors")[1][LONGEST_SOURCE] == longest


def test_nobody_knows_the_longest_sentence_of_weights_that_do_not_tell(home: Path, tmp_path: Path):
    first = export(home / "first", tmp_path / "first", dtype="float32")
    weights, header = load_weights(first / "best.safetensors")
    del header[LONGEST_SOURCE]
    save_tensors(weights, first / "best.safetensors", header)
    train(again(home, first / "best.safetensors"), tmp_path / "second")
    assert LONGEST_SOURCE not in load_weights(tmp_path / "second" / "last.safetensors")[1]


def test_what_is_not_told_of_vocabulary_and_model_is_as_before(home: Path, tmp_path: Path):
    told = experiment(home, max_epochs=1).model_dump(mode="json")
    told["training"] |= {"start_from": str(home / "first" / "best.safetensors"), "learning_rate": 1e-12}
    del told["vocabulary"], told["model"]
    tuned = Experiment.from_mapping(told)
    before = Experiment.load(home / "first" / "experiment.yaml")
    assert (tuned.vocabulary, tuned.model) == (before.vocabulary, before.model)
    assert before.model.hidden_dim == 8
    train(tuned, tmp_path / "second")
    path = tmp_path / "tuned.yaml"
    path.write_text(json.dumps(told))
    assert Experiment.load(path, ["training.max_epochs=2"]).model == before.model
    assert Experiment.load(path, ["model.dropout=0.0"]).model == before.model.model_copy(update={"dropout": 0.0})
    assert Experiment.load(path, ["model.kind=transformer"]).model.kind == "transformer"
    assert Experiment.load(path, ["vocabulary=words"]).vocabulary == VocabularySettings(kind="words")
    told["training"]["start_from"] = home / "first" / "best.safetensors"
    assert Experiment.from_mapping(told).model == before.model
    told["training"]["start_from"] = None
    assert Experiment.from_mapping(told).model.hidden_dim != 8


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("", "file.yaml: training.start_from: there is no experiment.yaml, from which the incomplete vocabulary"),
        (
            "nowhere/best.safetensors",
            "there is no nowhere/experiment.yaml, from which the incomplete vocabulary and model would be read: name "
            "weights in the folder of their run, or write these sections whole",
        ),
        (3, "training.start_from: has 3"),
    ],
)
def test_what_is_not_told_and_not_there_is_told(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: object, message: str
):
    monkeypatch.chdir(tmp_path)
    told = experiment(home).model_dump(mode="json")
    told["training"]["start_from"] = start
    del told["vocabulary"], told["model"]
    with pytest.raises(ConfigurationError, match=message):
        Experiment.from_mapping(told, origin="file.yaml")


def test_a_file_that_leaves_out_the_model_cannot_be_resumed_without_the_first_run(home: Path, tmp_path: Path):
    first = export(home / "first", tmp_path / "first", dtype="float32")
    told = again(home, first / "best.safetensors").model_dump(mode="json")
    told["model"] = {"dropout": 0.0}
    path = tmp_path / "tuned.yaml"
    path.write_text(json.dumps(told))
    train(Experiment.load(path), tmp_path / "run")
    (first / "experiment.yaml").unlink()
    with pytest.raises(
        ConfigurationError,
        match="from which the incomplete model would be read: .* in the experiment.yaml of a run that",
    ):
        Experiment.load(path)
    train(Experiment.load(tmp_path / "run" / "experiment.yaml"), tmp_path / "run", resume="must")


@pytest.mark.parametrize(
    ("section", "kind"), [("transformer", "transformer"), ({"kind": "transformer"}, "transformer"), ([], "recurrent")]
)
def test_the_other_run_may_tell_its_kind_alone(home: Path, tmp_path: Path, section: object, kind: str):
    (tmp_path / "experiment.yaml").write_text(json.dumps({"model": section}))
    told = experiment(home).model_dump(mode="json")
    told["training"]["start_from"] = str(tmp_path / "best.safetensors")
    del told["model"]
    assert Experiment.from_mapping(told).model.kind == kind


def test_what_tells_all_reads_no_other_run(home: Path, tmp_path: Path):
    first = export(home / "first", tmp_path / "first", dtype="float32")
    whole = again(home, first / "best.safetensors")
    (first / "experiment.yaml").write_text("{")
    whole.save(tmp_path / "whole.yaml")
    assert Experiment.load(tmp_path / "whole.yaml") == whole
    sides = {"source": {"kind": "words"}, "target": {"kind": "words"}}
    told = whole.model_dump(mode="json") | {"vocabulary": sides}
    assert Experiment.from_mapping(told).vocabulary != whole.vocabulary


def test_another_dropout_is_no_other_model(home: Path, tmp_path: Path):
    train(again(home, home / "first" / "best.safetensors", model={"dropout": 0.0}), tmp_path / "second")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model": {"hidden_dim": 10}}, "model.hidden_dim"),
        ({"vocabulary": {"kind": "words"}}, "vocabulary.kind"),
        ({"model": {"cell": "lstm"}, "vocabulary": {"lowercase": True}}, "vocabulary.lowercase, model.cell"),
    ],
)
def test_a_run_of_another_model_is_refused_before_anything_is_written(
    home: Path, tmp_path: Path, changes: dict[str, Any], named: str
):
    weights = home / "first" / "best.safetensors"
    message = f"best.safetensors is of a run with other settings: {named}; write these as they are in .*experiment.yaml"
    with pytest.raises(ConfigurationError, match=message):
        train(again(home, weights, **changes), tmp_path / "second")
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(("name", "message"), [("first", "first is a folder"), ("none.safetensors", "is not there")])
def test_weights_that_are_not_there_are_named(home: Path, tmp_path: Path, name: str, message: str):
    with pytest.raises(CheckpointError, match=f"{message}; it needs to be a file of weights in the folder of a run"):
        train(again(home, home / name), tmp_path / "second")
    assert not (tmp_path / "second").exists()


def test_weights_without_their_run_are_refused(home: Path, tmp_path: Path):
    alone = tmp_path / "best.safetensors"
    alone.write_bytes((home / "first" / "best.safetensors").read_bytes())
    message = "has no experiment.yaml, source.vocabulary.json, target.vocabulary.json; weights need to lie beside what"
    with pytest.raises(CheckpointError, match=message):
        train(again(home, alone), tmp_path / "second")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"start_from": "source.vocabulary.json"}}, "source.vocabulary.json is not a whole safetensors"),
        ({"data": {"extra": {"tsv": "nowhere.tsv"}}}, "there is no file .*nowhere.tsv"),
    ],
)
def test_what_cannot_be_read_leaves_nothing_behind(home: Path, tmp_path: Path, changes: dict[str, Any], message: str):
    start = changes.get("training", {}).get("start_from", "best.safetensors")
    settings = again(home, home / "first" / start, data=changes.get("data", {}))
    with pytest.raises((CheckpointError, CorpusError), match=message):
        train(settings, tmp_path / "second")
    assert not (tmp_path / "second").exists()
