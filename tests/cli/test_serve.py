"""`regard serve`: from a folder to answers, until a signal; and folders that have no model."""

import json
import signal
import subprocess
import sys
import urllib.request

import pytest

from regard.translation.run_folder import ENGLISH_FRENCH

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")


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
        ([ENGLISH_FRENCH, "--host", "198.51.100.1"], "of 198.51.100.1 cannot be used"),
    ):
        result = regard("serve", *arguments)
        assert result.exit_code == 2
        assert message in result.stderr
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    result = regard("serve", tmp_path)
    assert result.exit_code == 2
    assert "gpt2" in result.stderr
