"""Atlas files whose bytes changed after they were written are refused, small ones at once, large ones where read."""

import pytest
import torch
from torch import nn

import regard
from regard.errors import AtlasError
from regard.explorer import Atlas, record
from regard.explorer.atlas import atlas_file


class Attending(nn.Module):
    def forward(self, *tensors, **options):
        return regard.attention(*tensors, **options)


@pytest.fixture
def path(tmp_path):
    query = torch.randn(1, 2, 40, 8)
    with record(Attending()) as recording:
        recording.model(query, query, query, mask=regard.masks.causal())
    recording.atlas(tokens=[str(n) for n in range(40)]).save(tmp_path / "a.atlas")
    return tmp_path / "a.atlas"


def overwrite(path, start, count):
    data = bytearray(path.read_bytes())
    data[start : start + count] = bytes(byte ^ 0x55 for byte in data[start : start + count])
    path.write_bytes(data)


@pytest.mark.parametrize("part", [0.3, 0.5, 0.8])
def test_a_small_file_with_overwritten_bytes_does_not_open(path, part):
    size = path.stat().st_size
    overwrite(path, int(part * size), min(5000, size // 10))
    with pytest.raises(AtlasError, match=r"a\.atlas is damaged: the array .* does not have the checksum that was st"):
        Atlas.open(path)


def test_a_large_file_opens_at_once_and_refuses_the_array_that_is_damaged(path, monkeypatch):
    monkeypatch.setattr(atlas_file, "CHECKED_AT_ONCE", 0)
    (whole,) = Atlas.open(path).maps
    raw = whole.arrays["0.query"].contiguous().view(torch.uint8).numpy().tobytes()
    at = path.read_bytes().index(raw)
    overwrite(path, at + 100, 8)
    read = []
    monkeypatch.setattr(atlas_file, "checksum", lambda tensor, real=atlas_file.checksum: read.append(1) or real(tensor))
    (found,) = Atlas.open(path).maps
    assert not read  # nothing is read as a whole
    assert found.largest(0).shape == (40,)
    assert len(read) == 1
    with pytest.raises(AtlasError, match=r"is damaged: the array '0.(query|key)'"):
        found.weights(0, slice(0, 4), slice(0, 4))
    with pytest.raises(AtlasError, match=r"is damaged: the array '0.(query|key)'"):
        Atlas.open(path).save(path.with_name("copy.atlas"))


def test_the_text_has_a_checksum_too(path):
    data = path.read_bytes()
    assert data.count(b'\\"scale\\": 0.35') == 1
    path.write_bytes(data.replace(b'\\"scale\\": 0.35', b'\\"scale\\": 0.36'))
    with pytest.raises(AtlasError, match=r"is damaged: its entry 'atlas' does not have the checksum"):
        Atlas.open(path)


def test_an_array_without_a_checksum_is_inconsistent(path, monkeypatch):
    atlas = Atlas.open(path)
    with monkeypatch.context() as patched:
        patched.setattr(atlas_file, "checksum", lambda tensor: None)
        atlas.save(path)
    with pytest.raises(AtlasError, match="is inconsistent: it needs a checksum, a whole number, of each of its arrays"):
        Atlas.open(path)
