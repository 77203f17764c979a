"""The site that `make docs` builds, in Chromium; the tests are those of explorer/test/site.browser.ts."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from explorer_npm import needs_browser, run_npm

ROOT = Path(__file__).parents[1]
PAGES = ("index", "ko/index", "mechanisms/scaled-dot-product", "ko/mechanisms/scaled-dot-product", "benchmarks", "zoo")
PAGES += ("api/regard", "extending/kernel", "architecture")


@needs_browser
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install 'regard[docs]'")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_chromium(tmp_path):
    built = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(built, cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, check=True)
    pages = ",".join(f"{page}.html" for page in PAGES)
    assert "skipped 0" in run_npm("browser", "--", "site", SITE=str(tmp_path), SITE_PAGES=pages)
