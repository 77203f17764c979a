import json
import subprocess
import sys

import pytest

import regard as package
from regard.errors import CheckpointError, MissingExtra
from regard_command.missing_extra import EXTRAS, naming_the_extra

COMMANDS = ("demo", "train", "test", "translate", "align", "average", "bench", "explore", "export")


def test_help_names_every_command(regard):
    result = regard("--help")
    assert result.exit_code == 0
    assert all(f"  {command} " in result.stdout for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(regard, command):
    result = regard(command, "--help")
    assert result.exit_code == 0
    assert f"{command} [OPTIONS]" in result.stdout


def test_the_version_is_printed(regard):
    result = regard("--version")
    assert (result.exit_code, result.stdout) == (0, f"regard {package.__version__}\n")


def test_help_loads_none_of_what_the_commands_need(warm_python):
    program = (
        "import json, sys; from regard_command import main\n"
        "sys.argv = ['regard', 'train', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([*warm_python, "-c", program], capture_output=True, text=True, check=True)
    loaded = {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert "typer" in loaded
    assert not loaded & (EXTRAS.keys() - {"typer", "rich", "pydantic"})  # which Typer itself may load


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["fly"], "No such command 'fly'"),
        (["test"], "Missing option '--checkpoint'"),
        (["translate", "--checkpoint", "x", "--speed", "9"], "No such option: --speed"),
        (["translate", "--checkpoint", "x", "--beam", "0"], "Invalid value for '--beam'"),
        (["translate", "--checkpoint", "x", "--length-penalty", "-1"], "Invalid value for '--length-penalty'"),
        (["test", "--checkpoint", "x", "--which", "worst"], "'worst' is not one of"),
        (["train"], "Missing argument 'EXPERIMENT.yaml'"),
    ],
)
def test_misuse_is_explained_with_exit_code_2(regard, arguments, message):
    result = regard(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("command", "arguments"),
    [("translate", ["hello"]), ("test", []), ("align", ["--source", "a", "--target", "b"])],
)
def test_a_mistake_is_one_message_with_exit_code_2(regard, tmp_path, command, arguments):
    missing = tmp_path / "nowhere"
    result = regard(command, "--checkpoint", missing, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr == (
        f"regard: there is no folder {missing}; it needs to be the folder of a run of `regard train`, or of a "
        "translator that transformers or Marian saved, or the name of one that regard comes with, and nothing is "
        "downloaded; Known: 'english_french', 'english_french_longer', 'korean_english/bahdanau', "
        "'korean_english/luong'\n"
    )


def test_debug_lets_the_error_through(regard, tmp_path):
    result = regard("--debug", "translate", "--checkpoint", tmp_path, "hello")
    assert isinstance(result.exception, CheckpointError)


def test_a_process_prints_the_message_alone(warm_shell, tmp_path):
    code, stdout, stderr = warm_shell("translate", "--checkpoint", tmp_path, "x").end()
    assert (code, stdout) == (2, b"")
    assert stderr.startswith(b"regard: the folder ")
    assert stderr.count(b"\n") == 1


def test_a_missing_package_of_an_extra_is_named(regard, run, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.delitem(sys.modules, "regard.translation.checkpoint", raising=False)
    monkeypatch.delitem(sys.modules, "regard.translation.translator", raising=False)
    result = regard("translate", "--checkpoint", run, "1")
    assert result.exit_code == 2
    assert result.stderr == (
        "regard: this needs the package 'safetensors', which is not installed; "
        "pip install 'regard[translation]' brings it\n"
    )


def test_the_extras_are_those_of_the_metadata():
    from importlib.metadata import requires

    listed = {line.split(";")[0].split(">")[0] for line in requires("regard") or [] if "extra ==" in line}
    imported_as = {"pyyaml": "yaml"}
    assert EXTRAS.keys() <= {imported_as.get(name, name) for name in listed}


def test_a_package_that_is_there_but_broken_shows_its_own_error():
    with pytest.raises(ModuleNotFoundError, match="part_of_it") as caught, naming_the_extra():
        raise ModuleNotFoundError("No module named 'part_of_it'", name="part_of_it")
    assert not isinstance(caught.value, MissingExtra)


def test_a_reader_that_goes_away_ends_it_quietly(warm_shell, run):
    writing = warm_shell("translate", "--checkpoint", run, "--beam", 1)
    writing.stop_listening()
    writing.say(b"1 2 3\n" * 200)
    assert writing.end() == (1, b"", b"")
