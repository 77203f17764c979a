"""The tests of pages in explorer/test, which npm runs: what they need of a machine, and a call of them."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "explorer"


def missing(*, browser: bool) -> str:
    """What the tests of the pages lack on this machine, in words; "" if nothing."""
    if shutil.which("npm") is None:
        return "npm is not installed: the pages' tests need Node 20 or newer"
    if not (SOURCES / "node_modules").is_dir():
        return "explorer/node_modules does not exist: run `npm ci` in explorer/"
    if browser and not Path(os.environ.get("CHROMIUM") or shutil.which("chromium") or "").is_file():
        return "Chromium is not installed: install it, or set CHROMIUM to its path"
    return ""


def run_npm(*command: str, **environment: str) -> str:
    """Run a script of explorer/package.json, and return what it printed; the end of it is in the failure."""
    done = subprocess.run(
        ["npm", "run", "--silent", *command],
        cwd=SOURCES,
        env={"CHROMIUM": shutil.which("chromium") or "", **os.environ, **environment},
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return done.stdout


needs_npm = pytest.mark.skipif(bool(missing(browser=False)), reason=missing(browser=False))
needs_browser = pytest.mark.skipif(bool(missing(browser=True)), reason=missing(browser=True))
