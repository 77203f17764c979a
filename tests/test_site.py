"""The site that `make docs` builds, in Chromium; the tests are those of explorer/test/site.browser.ts."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from explorer_npm import needs_browser, run_npm

ROOT = Path(__file__).parents[1]
PAGES = ("index", "ko/index", "mechanisms/scaled-dot-product", "ko/mechanisms/scaled-dot-product", "benchmarks", "zoo")
PAGES += ("api/regard", "extending/kernel", "architecture")
PAGES += ("ko/mechanisms/luong", "ko/what-heads-learn", "figures/scaled-dot-product")
NEXT = re.compile(r'<a href="([^"]+)" class="md-footer__link md-footer__link--next" aria-label="(?:Next|다음): [^"]+')


@needs_browser
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install 'regard[docs]'")
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_in_chromium(tmp_path):
    # Not --quiet: warnings that are not said are not counted, so that --strict would let them through.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr[-6000:]
    every_page_names_its_next(tmp_path)
    pages = ",".join(f"{page}.html" for page in PAGES)
    assert "skipped 0" in run_npm("browser", "--", "site", SITE=str(tmp_path), SITE_PAGES=pages)


def every_page_names_its_next(site: Path) -> None:
    """From the start page of each language, "next" leads through all pages of the navigation, in its order."""
    navigation = re.findall(r"^ +- (?:[\w ]+: )?([\w/-]+)\.md$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    for start in (site, site / "ko"):
        page, passed = (start / "index.html").resolve(), []
        while page not in passed:
            passed.append(page)
            following = NEXT.findall(page.read_text("utf-8"))
            assert len(following) <= 1
            page = (page.parent / following[0]).resolve() if following else page
        assert [one.relative_to(start.resolve()).with_suffix("").as_posix() for one in passed] == navigation
