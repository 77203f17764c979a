"""Translators that regard comes with are named in place of their folder, by every command that takes a translator."""

import pytest
from safetensors import safe_open

from regard.errors import CheckpointError
from regard.translation.run_folder import ENGLISH_FRENCH, ENGLISH_FRENCH_LONGER, INSTALLED, MODELS, RunFolder
from regard.translation.translator import Translator


@pytest.fixture
def pair(tmp_path):
    """One sentence and its translation, as options of a command."""
    (tmp_path / "source.txt").write_text("The cat sleeps.\n", encoding="utf-8")
    (tmp_path / "target.txt").write_text("Le chat dort.\n", encoding="utf-8")
    return ["--source", tmp_path / "source.txt", "--target", tmp_path / "target.txt"]


def test_all_translators_of_the_distribution_have_a_name():
    folders = {file.parent for file in MODELS.rglob("best.safetensors")}
    assert set(INSTALLED.values()) == folders
    assert all(MODELS / name == folder for name, folder in INSTALLED.items())


def test_a_name_is_its_folder_in_python_and_in_the_commands(regard, tmp_path, pair):
    assert len(Translator.load("english_french").source_vocabulary) == len(RunFolder(ENGLISH_FRENCH).vocabularies()[0])
    for arguments in (
        ["translate", "The cat sleeps."],
        ["steps", "I am tired."],
        ["align", *pair],
        ["test", *pair, "--output", tmp_path / "hypotheses.txt"],
    ):
        named, path = (regard(*arguments, "--checkpoint", one) for one in ("english_french", ENGLISH_FRENCH))
        assert named.exit_code == 0, named.stderr
        assert named.stdout == path.stdout
    made = regard("export", "--checkpoint", "korean_english/luong", "--to", tmp_path / "copy")
    assert made.exit_code == 0, made.stderr
    assert RunFolder(tmp_path / "copy").weights("best").is_file()


def test_explore_shows_the_named_translator(regard, tmp_path):
    def page(*options):
        result = regard(
            "explore", "--translate", "A dog.", "--save", tmp_path / "a", "--html", tmp_path / "b", *options
        )
        assert result.exit_code == 0, result.stderr
        with safe_open(tmp_path / "a", "numpy") as file:  # whose metadata come in any order
            return file.metadata()

    longer = page("--checkpoint", "english_french_longer")
    assert longer == page("--checkpoint", ENGLISH_FRENCH_LONGER)
    assert longer != page()


def test_a_folder_of_that_name_comes_first(regard, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "english_french").mkdir()
    result = regard("translate", "--checkpoint", "english_french", "Hello.")
    assert "the folder english_french has no experiment.yaml" in result.stderr


def test_a_name_that_does_not_exist_has_the_nearest_one(regard):
    result = regard("steps", "Hello.", "--checkpoint", "english_frensh")
    assert result.exit_code == 2
    assert "there is no folder english_frensh; it needs to be the folder of a run" in result.stderr
    assert "did you mean 'english_french'?" in result.stderr
    with pytest.raises(CheckpointError, match="did you mean 'korean_english/luong'"):
        Translator.load("korean_english/loung")


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        (["test"], "translations without --output FILE"),
        (["test", "--calibrate", "--output", "x"], "what --calibrate learns"),
        (["align", "--choose"], "the choice"),
    ],
)
def test_nothing_is_written_into_what_is_installed(regard, pair, arguments, written):
    before = {path: path.stat().st_mtime_ns for path in MODELS.rglob("*")}
    result = regard(*arguments, *pair, "--checkpoint", "english_french")
    assert result.exit_code == 2
    assert result.stderr == (
        f"regard: english_french comes with regard, and {written} would go into its folder: copy it first, with "
        "regard export --checkpoint english_french --to FOLDER\n"
    )
    assert {path: path.stat().st_mtime_ns for path in MODELS.rglob("*")} == before
