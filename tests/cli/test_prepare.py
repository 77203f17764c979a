"""`regard prepare`: the files that it writes, what it says, and mistakes."""

import gzip

import pytest

from regard.translation.preparation import Preparation

YAML = """\
name: mixed
task: preparation
folder: {folder}
texts:
  - {{text: {{source: train.digits, target: train.words}}, split: {{validation: 30, test: 20}}, joined: 0.2}}
"""


@pytest.fixture
def settings(corpus, tmp_path):
    path = tmp_path / "text.yaml"
    path.write_text(YAML.format(folder=corpus), encoding="utf-8")
    return path


def test_a_text_is_prepared_and_the_settings_in_effect_are_kept(regard, settings, tmp_path):
    folder = tmp_path / "text"
    result = regard("prepare", settings, "--folder", folder, "--set", "longest=6")
    assert result.exit_code == 0
    assert result.stdout == f"{folder}\n"
    for step in ("       550 pairs read\n", "        30 pairs to validate on\n", "        20 pairs to test on\n"):
        assert step in result.stderr
    lines = gzip.decompress((folder / "train.tsv.gz").read_bytes()).decode().splitlines()
    assert f"{len(lines):>10,} pairs mixed\n" in result.stderr
    assert max(len(line.split("\t")[0].split()) for line in lines) == 6
    assert Preparation.load(folder / "preparation.yaml").longest == 6
    assert {path.name for path in folder.iterdir()} == {
        "train.tsv.gz", "validation.tsv.gz", "test.tsv.gz", "placeholders.json", "preparation.yaml",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("joined", "join"), "text.yaml: texts.0.join: unknown key; did you mean 'joined'?"),
        (("task: preparation", "task: translation"), "task: has 'translation', needs to be 'preparation'"),
        (("joined: 0.2", "joined: 2"), "text.yaml: texts.0.joined: has 2, needs to be less than 1"),
        (("train.words", "test.words"), "the sides do not line up"),
        (("validation: 30", "validation: 3000"), "holds out 3,020 pairs"),
        (("task: preparation", "task: preparation\nnumbers: [1]"), "text.yaml: numbers: "),
    ],
)
def test_mistakes_end_with_a_message(regard, settings, tmp_path, change, message):
    settings.write_text(settings.read_text("utf-8").replace(*change), encoding="utf-8")
    result = regard("prepare", settings, "--folder", tmp_path / "text")
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "text").exists()


def test_a_preparation_is_no_experiment(regard, settings):
    result = regard("train", settings)
    assert result.exit_code == 2
    assert "text.yaml: task: 'preparation' is for `regard prepare`, which makes a text to train on" in result.stderr
