"""The page's bundle: made of the sources that are there, small, and free of what the page's policy would refuse."""

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


def chromium() -> str | None:
    return os.environ.get("CHROMIUM") or shutil.which("chromium")


@pytest.mark.timeout(600)
@pytest.mark.skipif(not (SOURCES / "node_modules").is_dir(), reason="explorer/node_modules is not there: npm ci")
@pytest.mark.skipif(chromium() is None, reason="there is no Chromium; $CHROMIUM says where it is")
def test_the_page_in_a_browser():
    done = subprocess.run(
        ["node", "test/run.mjs", "browser"], cwd=SOURCES, capture_output=True, text=True, errors="replace", check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
