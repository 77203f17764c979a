"""The page: its bundle is small, self-contained and built from the sources; its own tests run where npm is."""

import gzip
import hashlib
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

import regard

WEB = Path(regard.__file__).parent / "explorer" / "web"
SOURCES = Path(__file__).parents[2] / "explorer"
NAMES = ("explorer.js", "explorer.css", "index.html")


def test_it_is_made_of_the_sources():
    digest = hashlib.sha256()
    files = sorted((path for path in (SOURCES / "src").rglob("*") if path.is_file()), key=lambda path: path.as_posix())
    for path in files:
        digest.update(path.relative_to(SOURCES / "src").as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    first = (WEB / "explorer.js").read_text("utf-8").splitlines()[0]
    assert digest.hexdigest() in first, "run `npm ci && npm run build` in explorer/"


def test_it_is_small():
    assert sum(len(gzip.compress((WEB / name).read_bytes())) for name in NAMES) < 100_000


def test_it_asks_nothing_of_other_machines():
    for name in NAMES:
        addresses = set(re.findall(r"https?://[\w.]+", (WEB / name).read_text("utf-8")))
        assert addresses <= {"http://www.w3.org"}, name  # the name of a vocabulary, which is never fetched


def missing(*, browser: bool) -> str:
    """What the tests of the page lack on this machine, in words; "" if nothing."""
    if shutil.which("npm") is None:
        return "npm is not installed: the page's tests need Node 20 or newer"
    if not (SOURCES / "node_modules").is_dir():
        return "explorer/node_modules does not exist: run `npm ci` in explorer/"
    if browser and not Path(os.environ.get("CHROMIUM") or shutil.which("chromium") or "").is_file():
        return "Chromium is not installed: install it, or set CHROMIUM to its path"
    return ""


def run(*command: str) -> None:
    """Run npm in explorer/; the end of what it printed is in the failure."""
    environment = {"CHROMIUM": shutil.which("chromium") or "", **os.environ}
    done = subprocess.run(
        ["npm", "run", "--silent", *command],
        cwd=SOURCES,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


needs_npm = pytest.mark.skipif(bool(missing(browser=False)), reason=missing(browser=False))
needs_browser = pytest.mark.skipif(bool(missing(browser=True)), reason=missing(browser=True))


@needs_npm
def test_types():
    run("check")


@needs_npm
def test_the_bundle_is_that_of_the_sources():
    run("stale")


@needs_npm
def test_units():
    run("unit")


@needs_browser
@pytest.mark.timeout(600)
def test_in_chromium():
    run("browser", "--", "explorer")


@needs_browser
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", ["embedding", "layout", "safety", "collection", "translation"])
def test_the_rest_in_chromium(part):
    run("browser", "--", part)


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "npm is not installed" in missing(browser=True)
    (tmp_path / "npm").touch(mode=0o755)
    monkeypatch.setitem(globals(), "SOURCES", tmp_path)
    assert missing(browser=False) == "explorer/node_modules does not exist: run `npm ci` in explorer/"
    (tmp_path / "node_modules").mkdir()
    monkeypatch.delenv("CHROMIUM", raising=False)
    assert "set CHROMIUM to its path" in missing(browser=True)
    assert missing(browser=False) == ""
