"""The page: its bundle is small, self-contained and built from the sources; its own tests run where npm is."""

import gzip
import hashlib
import re
from pathlib import Path

import explorer_npm
import pytest
from explorer_npm import SOURCES, missing, needs_browser, needs_npm, run_npm

import regard

WEB = Path(regard.__file__).parent / "explorer" / "web"
NAMES = ("explorer.js", "explorer.css", "index.html")
STEPS = ("steps.js", "steps.css", "steps.html")


def test_it_is_made_of_the_sources():
    digest = hashlib.sha256()
    files = sorted((path for path in (SOURCES / "src").rglob("*") if path.is_file()), key=lambda path: path.as_posix())
    for path in files:
        digest.update(path.relative_to(SOURCES / "src").as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    first = (WEB / "explorer.js").read_text("utf-8").splitlines()[0]
    assert digest.hexdigest() in first, "run `npm ci && npm run build` in explorer/"


def test_it_is_small():
    assert sum(len(gzip.compress((WEB / name).read_bytes())) for name in NAMES) < 100_000
    assert sum(len(gzip.compress((WEB / name).read_bytes())) for name in STEPS) < 20_000


def test_it_asks_nothing_of_other_machines():
    for name in (*NAMES, *STEPS):
        addresses = set(re.findall(r"https?://[\w.]+", (WEB / name).read_text("utf-8")))
        assert addresses <= {"http://www.w3.org"}, name  # the name of a vocabulary, which is never fetched


@needs_npm
def test_types():
    run_npm("check")


@needs_npm
def test_the_bundle_is_that_of_the_sources():
    run_npm("stale")


@needs_npm
def test_units():
    run_npm("unit")


@needs_browser
@pytest.mark.timeout(600)
def test_in_chromium():
    run_npm("browser", "--", "explorer")


@needs_browser
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "part",
    [
        *("kept", "contributions", "effects", "meaning", "means", "text"),
        *("embedding", "layout", "safety", "collection", "translation"),
    ],
)
def test_the_rest_in_chromium(part):
    run_npm("browser", "--", part)


def test_what_is_missing_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "npm is not installed" in missing(browser=True)
    (tmp_path / "npm").touch(mode=0o755)
    monkeypatch.setattr(explorer_npm, "SOURCES", tmp_path)
    assert missing(browser=False) == "explorer/node_modules does not exist: run `npm ci` in explorer/"
    (tmp_path / "node_modules").mkdir()
    monkeypatch.delenv("CHROMIUM", raising=False)
    assert "set CHROMIUM to its path" in missing(browser=True)
    assert missing(browser=False) == ""
