"""What the demo ends with: pages for a browser, where it says that they are."""

import json
import re
import shutil

import pytest

from regard.translation import date_demo
from regard.translation.date_demo import examples

pytest.importorskip("babel")


@pytest.fixture
def done(regard, run, tmp_path, monkeypatch):
    """The demo without its first part, whose translator of dates is one of digits here, and what it said."""

    def made_before(folder):
        shutil.copytree(run, folder / date_demo.SHOWN)

    monkeypatch.setattr(date_demo, "run", made_before)
    result = regard("demo", "--folder", tmp_path / "demo")
    assert result.exit_code == 0, result.output
    return tmp_path / "demo", result.stdout


def test_it_ends_by_writing_pages_and_says_where(done):
    folder, said = done
    told = re.findall(r"^  (\S+)  (\d+\.\d) MB: (.*)$", said, re.MULTILINE)
    assert [path for path, _, _ in told] == [
        str(folder / date_demo.SHOWN / "attention.html"),
        str(folder / "english-french.html"),
    ]
    assert [sentence for _, _, sentence in told] == [examples().sources[1], date_demo.SENTENCES[2]]
    for path, size, _ in told:
        text = (folder / path).read_text(encoding="utf-8")
        assert f"{len(text.encode()) / 1e6:.1f}" == size
        assert '<script type="application/json" id="regard-data">' in text
        assert '"kind":"cross"' in text
    assert said.endswith('Yours: regard explore --translate "Where is the station?"\n')


def test_the_page_is_of_the_translation(done):
    folder, _ = done
    text = (folder / "english-french.html").read_text(encoding="utf-8")
    title = re.findall(r"<title>(.*?)</title>", text.split("<style>")[0])
    assert title == ["She doesn&#x27;t like to cook. → Elle n&#x27;aime pas cuisiner."]
    held = re.findall(r'<script type="application/json" id="regard-data">(.*?)</script>', text)
    maps = json.loads(held[0])["meta"]["maps"]
    assert {of["kind"] for of in maps} == {"self", "cross"}
    assert all(of["roles"] for of in maps)
