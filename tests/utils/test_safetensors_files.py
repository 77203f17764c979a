"""One layer over safetensors: damaged and hostile files end in a clear error, and differences of models are counted."""

import subprocess

import pytest
import torch

from regard.errors import CheckpointError
from regard.utils.safetensors_files import TensorFile, state_differences, write_tensors

pytest.importorskip("safetensors")


def test_what_is_written_is_read(tmp_path):
    table = torch.arange(6.0).view(2, 3)
    path = tmp_path / "a.safetensors"
    write_tensors(path, {"table": table, "transposed": table.T, "empty": torch.zeros(0)}, {"note": "a"}, "translation")
    file = TensorFile(path, extra="translation")
    assert file.metadata == {"note": "a"}
    assert file.shapes == {"table": (2, 3), "transposed": (3, 2), "empty": (0,)}
    assert set(file.dtypes.values()) == {"F32"}
    assert torch.equal(file.read("transposed"), table.T)
    assert torch.equal(file.mapped("table"), table)
    assert file.nbytes == path.stat().st_size


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a whole safetensors file .*it has 0 bytes"),
        (b"\xff" * 8, "its header alone says 18,446,744,073,709,551,615"),
        ((2).to_bytes(8, "little") + b"[]", "is not a whole safetensors file"),
        ((4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc", "is not a whole safetensors file"),
        ((99).to_bytes(8, "little") + b"{" * 99, "is not a whole safetensors file"),
    ],
    ids=["empty", "no length", "a list", "no text", "nested"],
)
def test_other_bytes_are_refused(content, message, tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        TensorFile(path, extra="translation")


def test_a_header_longer_than_the_limit_is_not_parsed(tmp_path):
    path = tmp_path / "a.safetensors"
    path.write_bytes((99).to_bytes(8, "little") + b" " * 99)
    with pytest.raises(CheckpointError, match="has a header of 99 bytes; an atlas has at most 98"):
        TensorFile(path, extra="explorer", kind="an atlas", longest_header=98)


def test_tensors_that_are_not_dense_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="layout torch.sparse_coo"):
        write_tensors(tmp_path / "a", {"a": torch.ones(2, 2).to_sparse()}, {}, "translation")


def test_the_first_differences_are_named():
    shapes = dict.fromkeys("abcde", (1,))
    assert state_differences(shapes, shapes) == ""
    assert state_differences({}, shapes) == "5 missing (a, b, c, ...)"


def test_importing_the_readers_does_not_import_safetensors(warm_python):
    program = (
        "import sys, regard.models.language_model, regard.explorer, regard.translation.checkpoint; "
        "print('safetensors' in sys.modules)"
    )
    done = subprocess.run([*warm_python, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "False", done.stderr
