import json
import os
import subprocess
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import regard
from regard.errors import CheckpointError
from regard.translation.checkpoint import load_state, load_weights, read_header, restore, save_state, save_weights
from regard.translation.lightning_module import SafetensorsIO


def model(width: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def in_order(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(sorted(tensors.items()))


def same(one: Any, other: Any) -> bool:
    """Equal values of equal types; tensors bit for bit, NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(bits(one), bits(other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or (one != one and other != other)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone(memory_format=torch.contiguous_format).flatten().view(torch.uint8)


def test_weights_come_back_with_their_header(tmp_path: Path):
    trained = model()
    save_weights(trained, tmp_path / "best.safetensors", {"update": 7, "scores": {"validation_loss": 0.5}})
    tensors, header = load_weights(tmp_path / "best.safetensors")
    assert header == {"regard": regard.__version__, "update": 7, "scores": {"validation_loss": 0.5}}
    assert read_header(tmp_path / "best.safetensors") == header
    assert same(in_order(tensors), in_order(trained.state_dict()))
    fresh = model()
    assert restore(fresh, tmp_path / "best.safetensors") == header
    assert same(in_order(fresh.state_dict()), in_order(tensors))


def test_tied_weights_are_saved_under_both_names(tmp_path: Path):
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    save_weights(tied, tmp_path / "tied.safetensors", {})
    tensors, _ = load_weights(tmp_path / "tied.safetensors")
    assert torch.equal(tensors["0.weight"], tensors["1.weight"])


def test_a_tensor_of_several_names_is_written_once(tmp_path: Path):
    table, output = nn.Embedding(1000, 8), nn.Linear(8, 1000, bias=False)
    output.weight = table.weight
    tied = nn.Sequential(table, output)
    save_weights(tied, tmp_path / "tied.safetensors", {"update": 7})
    assert (tmp_path / "tied.safetensors").stat().st_size < 1.1 * table.weight.nbytes
    tensors, header = load_weights(tmp_path / "tied.safetensors")
    assert header == read_header(tmp_path / "tied.safetensors") == {"regard": regard.__version__, "update": 7}
    assert tensors["0.weight"] is tensors["1.weight"]
    other, apart = nn.Embedding(1000, 8), nn.Linear(8, 1000, bias=False)
    restore(nn.Sequential(other, apart), tmp_path / "tied.safetensors")
    assert torch.equal(other.weight, table.weight)
    assert torch.equal(apart.weight, table.weight)


def test_loaded_tensors_do_not_change_with_the_file(tmp_path: Path):
    path = tmp_path / "best.safetensors"
    save_weights(model(), path, {})
    tensors, _ = load_weights(path)
    before = tensors["0.weight"].clone()
    with path.open("r+b") as file:
        file.write(b"\0" * path.stat().st_size)
    assert torch.equal(tensors["0.weight"], before)


@pytest.mark.parametrize("kept", [0, 1, 7, 8, 9, 100, -1])
def test_a_truncated_checkpoint_is_refused(tmp_path: Path, kept: int):
    path = tmp_path / "best.safetensors"
    save_weights(model(), path, {})
    path.write_bytes(path.read_bytes()[:kept])
    for load in (load_weights, read_header, load_state):
        with pytest.raises(CheckpointError, match=r"best\.safetensors is not a whole safetensors file .*truncated"):
            load(path)


def test_what_is_no_checkpoint_of_ours_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"none\.safetensors cannot be read \(No such file"):
        load_weights(tmp_path / "none.safetensors")
    with pytest.raises(CheckpointError, match=r"cannot be read|not a whole"):
        load_weights(tmp_path)
    torch.save({"weight": torch.ones(3)}, tmp_path / "pickle.safetensors")
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        load_weights(tmp_path / "pickle.safetensors")
    save_file({"weight": torch.ones(3)}, tmp_path / "other.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        CheckpointError, match=r"other\.safetensors is a safetensors file, but not a checkpoint of regard"
    ):
        load_weights(tmp_path / "other.safetensors")
    save_file({"weight": torch.ones(3)}, tmp_path / "new.safetensors", metadata={"regard": json.dumps({"format": 99})})
    with pytest.raises(CheckpointError, match=r"new\.safetensors was written by a newer regard"):
        load_weights(tmp_path / "new.safetensors")
    save_weights(model(), tmp_path / "weights.safetensors", {})
    with pytest.raises(CheckpointError, match="holds weights alone, not the state of a training run"):
        load_state(tmp_path / "weights.safetensors")


def test_a_checkpoint_of_another_model_tells_what_differs(tmp_path: Path):
    save_weights(model(), tmp_path / "a.safetensors", {})
    with pytest.raises(CheckpointError, match="of another model") as caught:
        restore(model(width=7), tmp_path / "a.safetensors")
    message = str(caught.value)
    assert "of its 9 tensors 7 of another shape (" in message
    assert "0.weight: the file has [5, 3], the model needs [7, 3], " in message
    assert message.count("the file has") == 3
    other = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"5 extra \(1\.num_batches_tracked, 1\.running_mean, 1\.running_var, \.\.\.\)"
    ):
        restore(other, tmp_path / "a.safetensors")
    assert same(dict(other.state_dict()), before), "a refused checkpoint changes nothing"
    with pytest.raises(CheckpointError, match=r"2 missing \(3\.weight, 3\.bias\)"):
        restore(nn.Sequential(*model(), nn.Linear(2, 2)), tmp_path / "a.safetensors")


def test_weights_that_are_not_tensors_and_headers_that_are_not_plain_are_refused(tmp_path: Path):
    class Extra(nn.Linear):
        def get_extra_state(self) -> str:
            return "more"

    with pytest.raises(CheckpointError, match="the model's state '_extra_state' is str; weights need to be tensors"):
        save_weights(Extra(2, 2), tmp_path / "a.safetensors", {})
    with pytest.raises(CheckpointError, match=r"the header of a\.safetensors is not plain values"):
        save_weights(model(), tmp_path / "a.safetensors", {"folder": tmp_path})
    assert list(tmp_path.iterdir()) == []


dtypes = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]
shapes = st.lists(st.integers(0, 4), max_size=3)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    tensor = torch.randn(draw(shapes)).mul(100).to(draw(st.sampled_from(dtypes)))
    match draw(st.sampled_from(["as it is", "transposed", "strided", "expanded"])):
        case "transposed":
            return tensor.movedim(0, -1) if tensor.dim() else tensor
        case "strided":
            return tensor[..., ::2] if tensor.dim() else tensor
        case "expanded":
            return tensor.expand(3, *tensor.shape)
        case _:
            return tensor


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.integers() | st.text()
states = st.recursive(
    plain | tensors(),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.tuples(inner).map(lambda one: one * 2)
    ),
    max_leaves=9,
)


@given(st.dictionaries(keys, states))
@settings(deadline=None)  # the disk of a busy machine
def test_every_state_survives_its_file(tmp_path_factory: pytest.TempPathFactory, state: dict):
    path = tmp_path_factory.mktemp("state") / "last.safetensors"
    save_state(state, path)
    assert same(load_state(path), state)


def test_tensors_in_the_same_memory_come_back_equal_and_apart(tmp_path: Path):
    base = torch.arange(6.0)
    state = {
        "a": base,
        "b": base,
        "view": base[2:4],
        "matrix": base.view(2, 3).T,
        "scalar": torch.tensor(3, dtype=torch.bfloat16),
    }
    save_state(state, tmp_path / "last.safetensors")
    loaded = load_state(tmp_path / "last.safetensors")
    assert same(loaded, state)
    loaded["a"].zero_()
    assert same(loaded["b"], base)


class Colour(StrEnum):
    RED = "red"


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"a": [1, {2: torch.float32}]}, r"state\['a'\]\[1\]\[2\] is dtype"),
        ({"a": numpy.float64(3.0)}, r"state\['a'\] is float64"),
        ({"a": Colour.RED}, r"state\['a'\] is Colour"),
        ({"a": {1, 2}}, r"state\['a'\] is set"),
        ({"a": {(1, 2): 3}}, r"state\['a'\] has the key \(1, 2\)"),
        ({"a": torch.ones(2, 2).to_sparse()}, "is a tensor of layout torch.sparse_coo"),
    ],
)
def test_any_other_value_is_refused_and_nothing_is_written(tmp_path: Path, value: dict, place: str):
    with pytest.raises(CheckpointError, match=place):
        save_state(value, tmp_path / "last.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_lightning_saves_and_resumes_without_pickle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("pickle was used")

    for name in ("save", "load"):
        monkeypatch.setattr(torch, name, refuse)
    io = SafetensorsIO()
    path = tmp_path / "state" / "training.safetensors"
    io.save_checkpoint({"epoch": 3}, path)
    assert io.load_checkpoint(path) == {"epoch": 3}
    with pytest.raises(CheckpointError, match="no storage_options"):
        io.save_checkpoint({}, path, storage_options={})
    io.remove_checkpoint(path)
    io.remove_checkpoint(path)
    assert not path.exists()


def test_a_full_disk_leaves_the_earlier_checkpoint_whole(tmp_path: Path, warm_python: list[str]):
    path = tmp_path / "last.safetensors"
    save_state({"step": 1}, path)
    save_more = (
        "import resource, signal, torch\n"
        "from regard.errors import CheckpointError\n"
        "from regard.translation.checkpoint import save_state\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "try:\n"
        f"    save_state({{'step': 2, 'more': torch.ones(10_000)}}, {str(path)!r})\n"
        "except CheckpointError as error:\n"
        "    print('refused', error)\n"
    )
    run = subprocess.run([*warm_python, "-c", save_more], capture_output=True, text=True, env=os.environ, check=True)
    assert run.stdout.startswith(f"refused cannot write {path}")
    assert load_state(path) == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["last.safetensors"]


@pytest.mark.parametrize(
    "header",
    [
        "{",
        "[]",
        "3",
        "{}",
        "null",
        '{"format": "two"}',
        '{"format": true}',
        '{"format": 2, "longest_source": "x"}',
        '{"format": 2, "longest_source": [1]}',
        '{"format": 2, "shared": {"a": "gone"}}',
        '{"format": 2, "shared": ["weight"]}',
        '{"format": 2, "shared": {"a": ["weight"]}}',
        '{"format": 2, "shared": {"a": {}}}',
        '{"format": ' + "9" * 5000 + "}",
        "[" * 100_000,
    ],
)
def test_weights_with_a_hostile_header_are_refused(tmp_path: Path, header: str):
    path = tmp_path / "weights.safetensors"
    save_file({"weight": torch.ones(3)}, path, metadata={"regard": header})
    with pytest.raises(CheckpointError, match=r"weights\.safetensors is damaged, or was not written by .+; take"):
        load_weights(path)


@pytest.mark.parametrize(
    "state",
    [
        "[]",
        "5",
        '{"tensor": "gone"}',
        '{"tensor": []}',
        '{"dict": 5}',
        '{"dict": [[1]]}',
        '{"dict": [[[], 1]]}',
        '{"dict": [[{}, 1]]}',
        '{"tuple": 5}',
        '{"dict": [["a", ' + '{"tuple": [' * 2000 + "]}" * 2000 + "]]}",
    ],
)
def test_a_hostile_state_is_refused(tmp_path: Path, state: str):
    path = tmp_path / "last.safetensors"
    save_file({"weight": torch.ones(3)}, path, metadata={"regard": f'{{"format": 2, "state": {state}}}'})
    with pytest.raises(CheckpointError, match=r"last\.safetensors is damaged, or was not written by regard: .+; take"):
        load_state(path)
