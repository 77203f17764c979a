import gzip
from pathlib import Path

import pytest

from regard.errors import ConfigurationError, CorpusError
from regard.language.language_experiment import LongTextSettings
from regard.language.long_text import LongText, read_bytes


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "2.txt").write_bytes(b"second ")
    (tmp_path / "part" / "1.txt.gz").write_bytes(gzip.compress(b"first "))
    (tmp_path / "last.txt").write_text("drïtt", encoding="utf-8")
    return tmp_path


def test_files_and_folders_in_order(folder):
    text = read_bytes(LongTextSettings(folder=folder, files=(Path("part"), Path("last.txt"))))
    assert bytes(text.tolist()).decode() == "first second drïtt"


def test_sequences_lie_in_what_is_trained_on(folder):
    text = LongText.read(LongTextSettings(folder=folder, files=(Path("part"), Path("last.txt")), length=4, held_out=9))
    assert bytes(text.train.tolist()) == b"first seco"
    drawn = {bytes(text.sequence(1, update, 0).tolist()) for update in range(100)}
    assert drawn == {b"first seco"[start : start + 5] for start in range(6)}
    assert text.sequence(1, 7, 0).equal(text.sequence(1, 7, 0))


def test_held_out_sequences_overlap_in_the_byte_that_is_predicted_and_then_read(folder):
    text = LongText.read(LongTextSettings(folder=folder, files=(Path("part"), Path("last.txt")), length=3, held_out=9))
    assert [bytes(each.tolist()) for each in text.validation()] == [b"nd d", "drï".encode()]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"files": ("missing.txt",)}, CorpusError, "data.files: .*missing.txt cannot be read"),
        ({"files": ("broken.gz",)}, CorpusError, "data.files: .*broken.gz cannot be read"),
        ({"files": ("empty",)}, CorpusError, "data.files: the folder .*empty has no files"),
        ({"length": 19}, ConfigurationError, "the text has 19 bytes, of which 19 are left .* need 20"),
        ({"length": 4, "held_out": 15}, ConfigurationError, "of which 4 are left to train on"),
        ({"length": 4, "held_out": 4}, ConfigurationError, "data.held_out: has 4 bytes; .* need 5, or 0 holds nothing"),
    ],
)
def test_what_cannot_be_read(folder, settings, error, message):
    (folder / "empty").mkdir()
    (folder / "broken.gz").write_bytes(b"no gzip")
    with pytest.raises(error, match=message):
        LongText.read(LongTextSettings(**{"folder": folder, "files": ("part", "last.txt"), **settings}))
