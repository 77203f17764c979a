import pytest

from regard.steps import installed_mechanisms
from regard.translation import date_demo, run_folder
from regard.translation.run_folder import ENGLISH_FRENCH, MODELS, RunFolder


@pytest.fixture
def without_models(monkeypatch, tmp_path):
    """As where the distribution regard-models is not installed."""
    folder = tmp_path / "regard_models"
    monkeypatch.setattr(run_folder, "MODELS", folder)
    monkeypatch.setattr(run_folder, "ENGLISH_FRENCH", folder / "english_french")
    monkeypatch.setattr(run_folder, "ENGLISH_FRENCH_LONGER", folder / "english_french_longer")
    monkeypatch.setattr(date_demo, "ENGLISH_FRENCH", folder / "english_french")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["demo"], "english_french"),
        (["translate", "Hello."], "english_french_longer"),
        (["explore", "--translate", "Hello."], "english_french"),
    ],
)
def test_a_command_names_the_distribution_of_the_translators(
    without_models, regard, monkeypatch, tmp_path, command, name
):
    monkeypatch.chdir(tmp_path)
    result = regard(*command)
    assert result.exit_code == 2
    assert (
        f"this needs the translator '{name}' of the package 'regard-models', which is not installed; "
        "pip install regard-models brings it"
    ) in result.stderr


@pytest.mark.parametrize(
    "command", [["translate", "Hello."], ["steps", "Hello."], ["explore", "--translate", "Hello."]]
)
def test_a_name_of_a_translator_that_is_not_installed_names_the_distribution(
    without_models, regard, monkeypatch, tmp_path, command
):
    monkeypatch.setitem(run_folder.INSTALLED, "english_french", tmp_path / "regard_models" / "english_french")
    result = regard(*command, "--checkpoint", "english_french")
    assert result.exit_code == 2
    assert "pip install regard-models brings it" in result.stderr


def test_another_folder_that_is_not_there_is_none_of_its_translators(without_models, regard, tmp_path):
    result = regard("translate", "--checkpoint", tmp_path / "run", "Hello.")
    assert "it needs to be the folder of a run of `regard train`" in result.stderr


def test_all_translators_are_in_the_distribution():
    folders = {mechanism.folder for mechanism in installed_mechanisms.MECHANISMS.values()}
    assert ENGLISH_FRENCH in folders
    assert all(MODELS in folder.parents and RunFolder(folder).weights("best").is_file() for folder in folders)
