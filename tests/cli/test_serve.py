"""`regard serve`: from a folder to answers, until a signal; and folders that have no model."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from regard import serving
from regard.core.packing import Packing
from regard.models.language_model import (
    AttentionConfig,
    FeedForwardConfig,
    LanguageModel,
    LanguageModelConfig,
    LayerConfig,
)
from regard.nn import CacheFormat
from regard.translation.run_folder import ENGLISH_FRENCH

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
CODES = ("int8", "int4", "float8_e4m3fn", "float8_e5m2")


def test_a_translator_is_served_until_a_signal():
    start = "from regard_command import main; main()"
    command = [sys.executable, "-c", start, "serve", str(ENGLISH_FRENCH), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        assert address.startswith("http://127.0.0.1:")
        body = json.dumps({"q": "A dog runs.", "source": "en", "target": "fr"}).encode()
        request = urllib.request.Request(f"{address}/translate", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["translatedText"]
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert errors == "Ctrl-C ends it.\n"
    assert process.returncode in (0, -signal.SIGTERM)


def test_folders_and_options_that_are_wrong(regard, tmp_path):
    for arguments, message in (
        ([tmp_path / "none"], "there is no folder"),
        ([tmp_path], "it needs to be the folder of a run of `regard train`"),
        ([ENGLISH_FRENCH, "--languages", "en"], "--languages is 'en'; it needs two codes with a hyphen"),
        ([ENGLISH_FRENCH, "--cache-format", "int8"], "cache_format is how the pages of a language model store keys"),
        ([ENGLISH_FRENCH, "--cache-format", "int2"], "'int2' is not one of 'int8', 'int4', 'float8_e4m3fn'"),
        ([ENGLISH_FRENCH, "--host", "198.51.100.1"], "of 198.51.100.1 cannot be used"),
    ):
        result = regard("serve", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    result = regard("serve", tmp_path)
    assert result.exit_code == 2
    assert "gpt2" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "format_"),
    [([], None), *((["--cache-format", code], CacheFormat(Packing(code), Packing(code))) for code in CODES)],
)
def test_the_option_says_which_codes(regard, tmp_path, monkeypatch, arguments, format_):
    given = []

    class Recorded:
        address = "http://127.0.0.1:1"

        def __init__(self, *_, cache_format, **__):
            given.append(cache_format)

        def run(self, ready):
            ready()

    monkeypatch.setattr(serving, "ModelServer", Recorded)
    _saved(tmp_path, dim=8)
    result = regard("serve", tmp_path, *arguments)
    assert result.exit_code == 0, result.stderr
    assert given == [format_]


def test_heads_that_cannot_be_stored_so(regard, tmp_path):
    _saved(tmp_path, dim=12)
    result = regard("serve", tmp_path, "--port", "0", "--cache-format", "int4")
    assert result.exit_code == 2
    assert "int4" in result.stderr


def _saved(folder, dim):
    """A model of bytes with two heads of half as many dims."""
    layers = (LayerConfig(),)
    LanguageModel(LanguageModelConfig(256, dim, layers, AttentionConfig(2), FeedForwardConfig(16))).save(folder)
