from pathlib import Path

import pytest
import torch
from small_runs import experiment, write_text

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.checkpoint import load_weights, save_tensors
from regard.translation.experiment import Experiment
from regard.translation.run_folder import RunFolder, export
from regard.translation.training import train
from regard.translation.translator import Translator

TRANSFORMER = {
    "kind": "transformer",
    "dim": 8,
    "hidden_dim": 16,
    "num_heads": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "shared_embeddings": "all",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a small Transformer, whose tables are shared."""
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    told = experiment(folder, max_epochs=1).model_dump(mode="json")
    told |= {"model": TRANSFORMER, "vocabulary": {"kind": "characters", "shared": True}}
    train(Experiment.from_mapping(told), folder / "run")
    return folder / "run"


def test_an_export_has_what_translating_needs_and_no_more(run: Path, tmp_path: Path):
    folder = export(run, tmp_path / "new" / "small")
    assert folder == tmp_path / "new" / "small"
    assert sorted(path.name for path in folder.iterdir()) == [
        "best.safetensors", "experiment.yaml", "source.vocabulary.json", "target.vocabulary.json",
    ]  # fmt: skip
    exported, original = (Experiment.load(RunFolder(path).experiment) for path in (folder, run))
    assert original.differences(exported) == ["data.folder"]
    assert exported.data.folder == Path()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_weights_are_rounded_once_and_load_as_any(run: Path, tmp_path: Path, dtype):
    export(run, tmp_path, dtype=dtype)
    before, _ = load_weights(run / "best.safetensors")
    after, header = load_weights(tmp_path / "best.safetensors")
    assert header["exported"] == {"weights": "best", "dtype": dtype}
    assert header["model"] == load_weights(run / "best.safetensors")[1]["model"]
    assert after.keys() == before.keys()
    for name, weights in before.items():
        assert torch.equal(after[name], weights.to(getattr(torch, dtype)))
    loaded = Translator.load(tmp_path).model.state_dict()  # pyright: ignore[reportAttributeAccessIssue]
    assert {value.dtype for value in loaded.values()} == {torch.float32}
    for name, weights in after.items():
        assert torch.equal(loaded[name], weights.float())


def test_a_table_of_several_names_is_written_once(run: Path, tmp_path: Path):
    export(run, tmp_path)
    tensors, _ = load_weights(tmp_path / "best.safetensors")
    assert len({id(tensor) for tensor in tensors.values()}) < len(tensors)
    size = (tmp_path / "best.safetensors").stat().st_size
    bare = sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors.values()}.values())
    assert bare < size < bare + 20_000
    halves = (run / "best.safetensors").stat().st_size - size
    assert halves == pytest.approx(bare, abs=500)


def test_an_export_translates_nearly_as_the_run(run: Path, tmp_path: Path):
    export(run, tmp_path, dtype="float32")
    lines = ["abc", "fed", "aabb"]
    there, here = (Translator.load(folder).translate(lines) for folder in (run, tmp_path))
    assert [one.text for one in there] == [one.text for one in here]


def test_which_weights_is_told(run: Path, tmp_path: Path):
    export(run, tmp_path, which="last", dtype="float32")
    exported, header = load_weights(tmp_path / "best.safetensors")
    assert header["exported"]["weights"] == "last"
    last, _ = load_weights(run / "last.safetensors")
    assert all(torch.equal(exported[name], last[name]) for name in last)


def test_an_export_may_be_made_again_and_leaves_what_else_is_there(run: Path, tmp_path: Path):
    (tmp_path / "README.md").write_text("a card", encoding="utf-8")
    export(run, tmp_path)
    export(run, tmp_path, dtype="float32")
    assert (tmp_path / "README.md").read_text(encoding="utf-8") == "a card"
    assert load_weights(tmp_path / "best.safetensors")[1]["exported"]["dtype"] == "float32"


def test_a_training_run_is_not_written_over(run: Path, tmp_path: Path):
    before = (run / "best.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="holds a training run, which an export would damage; name another"):
        export(run, run)
    assert (run / "best.safetensors").read_bytes() == before


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"dtype": "bfloat"}, ConfigurationError, "dtype is 'bfloat'; did you mean 'bfloat16'"),
        ({"which": "worst"}, ConfigurationError, "which is 'worst', but a run keeps no such weights; .*'best', 'last'"),
        ({"which": "average"}, CheckpointError, "has no average.safetensors; choose 'best', which it has"),
    ],
)
def test_what_there_is_none_of_is_told(run: Path, tmp_path: Path, options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        export(run, tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told(run: Path, tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot make the folder .*file.* \(File exists\)"):
        export(run, tmp_path / "file")


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (1e5, "float16", r"weights as large as 1e\+05 in \S+, and float16 goes to 6.55e\+04: choose another dtype"),
        (float("nan"), "bfloat16", r"weights that are no finite numbers in \S+, and bfloat16 goes to"),
    ],
)
def test_weights_beyond_a_type_are_refused(run: Path, tmp_path: Path, value: float, dtype, message: str):
    tensors, header = load_weights(run / "best.safetensors")
    first = next(iter(tensors.values()))
    first.view(-1)[0] = value
    copy = RunFolder(tmp_path / "run")
    copy.path.mkdir()
    for path in (copy.experiment, copy.source_vocabulary, copy.target_vocabulary):
        path.write_bytes((run / path.name).read_bytes())
    save_tensors(tensors, copy.best, header)
    with pytest.raises(CheckpointError, match=message):
        export(copy.path, tmp_path / "small", dtype=dtype)
    assert not (tmp_path / "small").exists()
