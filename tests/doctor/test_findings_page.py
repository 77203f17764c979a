"""The pages of findings: their data, their text as text, files that cannot be written, and what stands beside what."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

from regard.doctor import diagnose, diagnosis_page, examination_page, examine
from regard.doctor.code_excerpt import (
    MOST_CHARACTERS,
    CodeRange,
    changed_blocks,
    diff,
    escaped,
    excerpt,
    source_lines,
)
from regard.doctor.examination_report import KINDS, Examination, finding
from regard.doctor.findings_page import linked
from regard.doctor.zoo_page import zoo_page
from regard.doctor.zoo_report import ZooEntry, ZooReport
from regard.explorer.static_page import content_policy
from regard_command.app import app
from regard_doctor.run_explanations import run_text

PLANTED = Path(__file__).parent / "planted"
WRONG = "def f(q, k, v):\n    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-2) @ v\n"
FORMULA = """
def attend(q, k, v):
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5
    # weights of each query
    weights = scores.softmax(-1)
    return weights @ v
"""


def text_of(markup: str) -> list[str]:
    """The lines of a `<pre>`, with numbers or signs before them, without other markup."""
    lines = re.findall(r'<i(?: class="gap")?(?: data-(?:n|sign)="([^"]*)")?(?: class="of")?>(.*?)</i>', markup)
    return [f"{number}|{re.sub(r'</?mark>', '', line)}" for number, line in lines]


def articles(page: str) -> list[str]:
    return re.findall(r'<article class="finding".*?</article>', page, re.DOTALL)


def test_the_lines_around_a_range():
    lines = [f"line {number}" for number in range(1, 31)]
    markup = excerpt(lines, CodeRange(10, 6, 11, 3))
    assert [line.split("|")[0] for line in text_of(markup)] == [str(number) for number in range(6, 16)]
    assert re.findall("<mark>(.*?)</mark>", markup) == ["10", "li"]
    assert excerpt(lines, CodeRange.of_line(31)) == ""
    assert re.findall("<mark>(.*?)</mark>", excerpt(["", "  a = 1  "], CodeRange.of_line(2))) == ["a = 1"]


def test_a_long_range_has_its_beginning_and_its_end():
    shown = text_of(excerpt([f"x{number}" for number in range(100)], CodeRange(10, 1, 90, 3)))
    assert [line for line in shown if "more lines" in line] == ["|67 more lines"]
    assert shown[0] == "6|x5"
    assert shown[-1] == "94|x93"
    assert len(shown) < 30


def test_a_long_line_is_cut_around_the_range():
    line = "a" * 5000 + "softmax" + "b" * 5000
    markup = excerpt([line], CodeRange(1, 5001, 1, 5008))
    assert re.findall("<mark>(.*?)</mark>", markup) == ["softmax"]
    (shown,) = text_of(markup)
    assert shown.startswith("1|…")
    assert shown.endswith("…")
    assert len(shown) < MOST_CHARACTERS + 10


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("</script><b>", "&lt;/script&gt;&lt;b&gt;"),
        ("\"a\" & 'b'", "&quot;a&quot; &amp; &#x27;b&#x27;"),
        ("a\0\x1b\x7f\tb", "a␀␛␡\tb"),
        ("\u202e\u2066\u200b\ufeff", "⟨U+202E⟩⟨U+2066⟩⟨U+200B⟩⟨U+FEFF⟩"),
        ("\ud800\udcff", "⟨U+D800⟩⟨U+DCFF⟩"),
    ],
)
def test_text_stays_text(text, expected):
    assert escaped(text) == expected
    escaped(text).encode()


def test_lines_are_those_of_the_parser():
    source = "a = 1\x0c\r\nb = '\u2028'\rc = 2\n"
    assert source_lines(source) == ["a = 1\x0c", "b = '\u2028'", "c = 2", ""]
    assert "⟨U+2028⟩" in excerpt(source_lines(source), CodeRange.of_line(2))


def test_a_diff_has_a_line_around_each_change():
    before, after = [f"x{number}" for number in range(40)], [f"x{number}" for number in range(40)]
    after[10:12] = ["y"]
    after.insert(30, "z")
    shown = text_of(diff(before, after, changed_blocks(before, after)))
    assert shown == [
        *("|line 10", " |x9", "-|x10", "-|x11", "+|y", " |x12"),
        *("|line 31", " |x30", "+|z", " |x31"),
    ]


def test_only_addresses_are_links():
    assert linked("Press 2021, https://arxiv.org/abs/1; <b>") == (
        'Press 2021, <a href="https://arxiv.org/abs/1" rel="noreferrer noopener">https://arxiv.org/abs/1</a>; &lt;b&gt;'
    )
    assert "<a" not in linked("javascript:alert(1)")


def test_a_finding_has_its_code_and_its_rule():
    page = diagnosis_page(diagnose(WRONG, path="a/wrong.py"), sources={"a/wrong.py": WRONG})
    (article,) = articles(page.text)
    assert page.contents == "1 error in 1 file"
    assert 'data-severity="error"' in article
    assert "line 2, column 12" in article
    assert "<mark>(q @ k.mT / q.shape[-1] ** 0.5).softmax(-2)</mark> @ v" in article
    rule = re.search(r'<article class="rule" id="ATT111".*?</article>', page.text, re.DOTALL)
    assert rule is not None
    assert all(part in rule[0] for part in ("<h4>Wrong</h4>", "<h4>Right</h4>", "<h4>Source</h4>", "https://"))
    assert page.text.count("<h4>Wrong</h4>") == 1


def test_a_fix_stands_beside_its_finding_alone():
    source = FORMULA + FORMULA.replace("attend", "other").replace("weights", "probabilities")
    page = diagnosis_page(diagnose(source), sources={"<source>": source})
    first, second = (text_of(article.split("regard doctor --fix writes")[1]) for article in articles(page.text))
    for shown, name in ((first, "weights"), (second, "probabilities")):
        assert f"-|    {name} = scores.softmax(-1)" in shown
        assert f"-|    return {name} @ v" in shown
        assert "+|    return torch.nn.functional.scaled_dot_product_attention(q, k, v)" in shown
        assert "+|import torch" in shown
        assert sum(line.startswith("+") and line != "+|" for line in shown) == 2
    to_regard = diagnosis_page(diagnose(source), sources={"<source>": source}, to="regard").text
    assert "regard.attention(q, k, v)" in to_regard


def test_all_planted_files_are_in_a_page_as_text():
    files = sorted(PLANTED.glob("*.py"))[:8]
    findings = [one for path in files for one in diagnose(path.read_text(), path=str(path))]
    page = diagnosis_page(findings, scope="8 files").text
    assert len(articles(page)) == len(findings) > 15
    names = re.findall(r'id="([^"]+)"', page)
    assert len(names) == len(set(names))
    assert set(re.findall(r'href="#([^"]+)"', page.split("<script")[0])) <= set(names)
    assert set(re.findall(r'data-rule="([^"]+)"', page)) <= set(names)


def test_the_page_loads_nothing_and_runs_its_script_alone():
    page = diagnosis_page(diagnose(WRONG), sources={"<source>": WRONG}).text
    (script,) = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    (styles,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    assert f'content="{content_policy([script], [styles])}"' in page
    assert page.count("<script") == 1
    assert not re.findall(r'(?:src|href)="(?!#|data:|https://[\w./#-]+" rel=)[^"]', page)
    assert 'style="' not in page


def test_files_that_cannot_be_read_are_said(tmp_path):
    (tmp_path / "broken.py").write_bytes(b"def softmax(:\n")
    (tmp_path / "latin.py").write_bytes(b"softmax = '\xff'\n")
    done = CliRunner().invoke(app, ["doctor", str(tmp_path), "--html", str(tmp_path / "out.html")])
    assert done.exit_code == 2
    page = (tmp_path / "out.html").read_text()
    assert page.count('data-rule="ATT000"') == 2
    assert "The other files were read." in page


def test_nothing_found_is_a_page_too():
    page = diagnosis_page([], scope="3 files")
    assert page.contents == "nothing found in 3 files"
    assert "Nothing was found" in page.text


def test_without_libcst_the_page_says_how_to_see_fixes(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "libcst", None)
    page = diagnosis_page(diagnose(FORMULA), sources={"<source>": FORMULA}).text
    assert "pip install libcst" in page


@pytest.fixture
def doctor(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pyproject.toml").write_text("")
    (tmp_path / "wrong.py").write_text(WRONG)
    return lambda *arguments: CliRunner().invoke(app, ["doctor", "wrong.py", *arguments])


def test_the_command_writes_a_page_beside_its_format(doctor, tmp_path):
    done = doctor("--html", "out.html", "--format", "github")
    assert done.exit_code == 1
    assert done.stdout.startswith("::error file=wrong.py,line=2")
    assert done.stderr.startswith("page of 0.0 MB: out.html\n")
    assert "ATT111" in (tmp_path / "out.html").read_text()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone/out.html", "--html gone/out.html: the folder gone does not exist; make it first"),
        ("wrong.py", "would write the page over source code"),
        (".", "--html . is a folder: name a file in it, such as report.html"),
        ("a" * 300, "File name too long"),
    ],
)
def test_a_page_that_cannot_be_written(doctor, tmp_path, name, message):
    before = sorted(path.name for path in tmp_path.iterdir())
    done = doctor("--html", name)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert message in done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert (tmp_path / "wrong.py").read_text() == WRONG


# The page of a running model.


def test_every_code_is_explained():
    for code in KINDS:
        explained = run_text(code)
        assert "https://" in explained.source, code
        assert bool(explained.wrong) == bool(explained.right), code
        assert explained.wrong != explained.right or not explained.wrong, code


@pytest.fixture(scope="module")
def examined():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return examine(layer, torch.randn(2, 20, 8), causal=True, maps=True)


def test_a_leak_has_its_maps_and_opens_them_at_its_pair(examined):
    page = examination_page(examined).text
    (leak,) = [one for one in examined.findings if one.code == "RUN101"]
    (article,) = [one for one in articles(page) if 'data-rule="RUN101"' in one]
    place = f"at={leak.evidence.moved},{leak.evidence.changed}"
    assert f'data-state="view=head&amp;{place}"' in article
    assert article.count("<figure>") == article.count("<svg") == 2
    assert f"<dt>token changed</dt><dd>{leak.evidence.changed}</dd>" in article
    assert page.count('id="regard-atlas"') == 1
    assert "regard-explorer" in page


def test_findings_without_maps_need_no_explorer(examined):
    bare = Examination(examined.model, (finding("RUN131", "it is"),), ("eager",), {"future": "no <b>"}, {})
    page = examination_page(bare)
    assert page.contents == "1 hint in TransformerEncoderLayer, 1 check"
    assert page.text.count("<script") == 1
    assert "no &lt;b&gt;" in page.text
    assert page.size < 40_000


def test_a_file_that_is_gone_leaves_its_evidence(tmp_path):
    gone = finding("RUN101", "moved", moved=1, changed=2, module="a", file=str(tmp_path / "gone.py"), line=3)
    page = examination_page(Examination("Model", (gone,), (), {}, {})).text
    assert "gone.py" in page
    assert '<pre class="code"' not in articles(page)[0]


def test_outputs_that_are_not_numbers_have_a_map():
    class Broken(nn.Module):
        def forward(self, x):
            return torch.where(x.sum(1, keepdim=True) > 0, x, x / 0)

    x = torch.randn(2, 20, 4, generator=torch.Generator().manual_seed(1))
    page = examination_page(examine(Broken(), x, causal=True, maps=True, checks=["future"]))
    assert "RUN101" in page.text


MODEL = """
from torch import nn


class Leaky(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.layer = nn.Embedding(30, 8), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids):
        return self.layer(self.embedding(ids))
"""


def test_the_command_examines_into_a_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(MODEL)
    words = ["examine", "model.py:Leaky", "--tokens", "20", "--causal", "--checks", "future", "--html"]
    done = CliRunner().invoke(app, [*words, "out.html", "--format", "json"])
    assert done.exit_code == 1
    assert '"codes"' not in done.stdout
    assert done.stdout.startswith("{")
    page = (tmp_path / "out.html").read_text()
    assert page.count("<figure>") == 2
    for wrong, message in (("gone/out.html", "does not exist; make it first"), ("model.py", "over source code")):
        done = CliRunner().invoke(app, [*words, wrong])
        assert (done.exit_code, done.stdout) == (2, "")
        assert message in done.stderr
    assert (tmp_path / "model.py").read_text() == MODEL
    done = CliRunner().invoke(app, ["examine", "--zoo", "--html", "gone/out.html"])
    assert done.exit_code == 2
    assert "does not exist; make it first" in done.stderr


def test_the_page_of_the_zoo_has_the_table_and_the_findings_of_each_class():
    evidence = {"changed": 3, "moved": 1, "by": 0.5, "tolerance": 1e-6, "module": "a", "file": __file__, "line": 3}
    found = {"code": "RUN104", "message": "moves", "evidence": evidence, "severity": "error", "name": "left"}
    leak = {**found, "code": "RUN101", "mended_by_swap": True}
    page = zoo_page(
        ZooReport(
            (
                ZooEntry("BadForCausalLM", {"findings": [leak], "checked": ["future"]}, None, 1.0),
                ZooEntry("GoodForCausalLM", {"findings": [], "checked": ["future", "padding"]}, None, 1.0),
                ZooEntry(
                    "LeftForCausalLM",
                    {"findings": [{**found, "mended_by_swap": False}], "checked": ["padding"]},
                    None,
                    1.0,
                ),
                ZooEntry("LostForCausalLM", None, "<no> configuration", 1.0),
            ),
            "5.0",
            4.0,
        )
    )
    assert page.contents == "2 errors in 3 of 4 classes of transformers 5.0"
    assert '<th scope="row">BadForCausalLM</th><td><a href="#file-0">swap mends</a></td><td>–</td>' in page.text
    assert '<th scope="row">GoodForCausalLM</th><td></td><td>–</td><td>–</td><td></td>' in page.text
    assert '<a href="#file-1">✗</a>' in page.text
    assert '<section class="file" id="file-1">\n<h2>LeftForCausalLM</h2>' in page.text
    assert "<dt>LostForCausalLM</dt><dd>&lt;no&gt; configuration</dd>" in page.text
    assert '<article class="rule" id="RUN104"' in page.text
    assert len(articles(page.text)) == 2
    assert all("import re" in article for article in articles(page.text))
