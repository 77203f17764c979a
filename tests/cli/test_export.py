import re

import typer
from typer.testing import CliRunner

from regard.errors import CheckpointError
from regard_command.saved_runs import export

APP = typer.Typer()
APP.command("export")(export)
APP.callback()(lambda: None)


def test_an_export_is_taken_as_a_checkpoint(regard, run, tmp_path):
    folder = tmp_path / "small"
    result = CliRunner().invoke(APP, ["export", "--checkpoint", str(run), "--to", str(folder)])
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{folder}\n"
    assert re.fullmatch(r"\d\.\d MB\n", result.stderr)
    assert regard("translate", "--checkpoint", folder, "7 8").stdout == "sieben acht\n"


def test_the_type_and_the_weights_can_be_chosen(run, tmp_path):
    sizes = {}
    for dtype in ("bfloat16", "float32"):
        told = ["export", "--checkpoint", str(run), "--which", "last", "--dtype", dtype, "--to", str(tmp_path / dtype)]
        assert CliRunner().invoke(APP, told).exit_code == 0
        sizes[dtype] = (tmp_path / dtype / "best.safetensors").stat().st_size
    assert 1.5 < sizes["float32"] / sizes["bfloat16"] < 2.0
    refused = CliRunner().invoke(APP, ["export", "--checkpoint", str(run), "--dtype", "int8", "--to", str(tmp_path)])
    assert refused.exit_code == 2
    assert "'int8' is not one of" in refused.stderr


def test_the_run_itself_is_no_place_for_it(run):
    result = CliRunner().invoke(APP, ["export", "--checkpoint", str(run), "--to", str(run)])
    assert isinstance(result.exception, CheckpointError)
