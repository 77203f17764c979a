"""The examples of docs/ run as they stand, each page from top to bottom, and print what they say.

A page in Korean, `page.ko.md`, has the code and the figures of `page.md`: its examples are not run a second time.
"""

import ast
import doctest
import importlib.util
import json
import math
import os
import re
import shlex
import struct
import subprocess
import sys
import xml.etree.ElementTree
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from regard.doctor import RULES
from regard.models.language_model.huggingface.architectures import ARCHITECTURES
from regard.steps import table_formats
from regard_doctor.code_explanation import explained_codes, explanation

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
KOREAN = sorted(DOCS.rglob("*.ko.md"))
COMMANDS = re.compile(r"^```(python|sh|text)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
GUIDES = [
    # Trainings take half a minute, processes of torchrun load Lightning.
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if "regard train" in page.read_text("utf-8") else [])
    for page in sorted((DOCS / "guides").glob("*.md"))
    if page not in KOREAN and COMMANDS.search(page.read_text("utf-8"))
]
PAGES = [page for page in sorted({*DOCS.rglob("*.md")} - {*KOREAN}) if BLOCK.search(page.read_text("utf-8"))]
PAGES = [page for page in PAGES if page.parent.name != "guides"]
CODE = re.compile(r"^```.*?^```$|^    .*?$", flags=re.MULTILINE | re.DOTALL)
FIGURE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
LINK = re.compile(r"\]\((?!https?:|#)([^)#]+)")


@pytest.fixture(autouse=True)
def registrations_of_one_page():
    """A family of models, or a rule of the doctor, that a page adds is gone after it: others list all of them."""
    with mock.patch.dict(ARCHITECTURES), mock.patch.dict(RULES):
        yield


@pytest.fixture
def steady(monkeypatch):
    """A number of a table whose text one rounding of float32 changes is an error: it differs between machines."""

    def steady_text(number: float, digits: int) -> str:
        text = number_text(number, digits)
        for other in (number * (1 - 2**-23), number * (1 + 2**-23)):
            assert not math.isfinite(number) or number_text(other, digits) == text, f"{number} is printed as {text}"
        return text

    number_text = table_formats.number_text
    modules = [module for name, module in sys.modules.items() if name.startswith("regard.steps.")]
    for module in [module for module in modules if hasattr(module, "number_text")]:
        monkeypatch.setattr(module, "number_text", steady_text)


@pytest.mark.usefixtures("steady")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_examples_of_a_page(page):
    text = "\n".join(match.group(1) for match in BLOCK.finditer(page.read_text("utf-8")))
    assert run_examples(text, {"__name__": "example"}, page)


def run_examples(text: str, names: dict, page: Path) -> int:
    """Run examples, which change `names`, and return how many there were; another text fails the test."""
    example = doctest.DocTestParser().get_doctest(text, names, page.name, str(page), 0)
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    result = runner.run(example, out=report.append, clear_globs=False)
    assert result.failed == 0, "".join(report)
    names.update(example.globs)
    return result.attempted


@pytest.fixture
def command_environment(tmp_path, warm_python) -> dict[str, str]:
    """The environment of a shell in which `regard`, `python` and `torchrun` are those of these tests."""
    folder = tmp_path / "bin"
    folder.mkdir()
    regard = folder / "regard"
    program = "from regard_command import main; main()"
    regard.write_text(f'#!/bin/sh\nexec {shlex.join(warm_python)} -c {shlex.quote(program)} "$@"\n')
    regard.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "100"}


@pytest.mark.parametrize("page", GUIDES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning")  # of its exporters
def test_a_guide_followed_from_top_to_bottom(page, tmp_path, monkeypatch, command_environment):
    """Examples and commands, in one folder; a block of text below a command is what it prints, ... for any text.

    A command ends well, or prints the message of an error, `regard: ...`, that the page has below it.
    """
    folder = tmp_path / "guide"
    folder.mkdir()
    monkeypatch.chdir(folder)
    blocks = COMMANDS.findall(page.read_text("utf-8"))
    names = {"__name__": "example"}
    if any("import onnxruntime" in text for _, text in blocks):
        pytest.importorskip("onnxruntime")
    for (kind, text), (following, expected) in zip(blocks, [*blocks[1:], ("", "")], strict=True):
        if kind == "python":
            run_examples(text, names, page)
        elif kind == "sh":
            done = subprocess.run(
                ["bash", "-ec", text], env=command_environment, capture_output=True, text=True, timeout=300
            )
            printed = done.stdout if done.returncode == 0 else done.stderr[done.stderr.find("regard: ") :]
            may_fail = following == "text" and expected.startswith("regard: ")
            assert (done.returncode != 0) == may_fail, f"{text}\n{done.stdout}\n{done.stderr}"
            if following == "text":
                flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
                assert doctest.OutputChecker().check_output(expected, printed, flags), f"{text}\n{printed}"


def load_hook(name):
    specification = importlib.util.spec_from_file_location(f"{name}_hook", DOCS / "hooks" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    hook = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(hook)
    return hook


def test_a_pipe_in_the_code_of_a_table_is_shown_without_its_backslash():
    hook = load_hook("table_pipes")
    cell = r"<td><code>causal() \| window(1, 1)</code></td>"
    assert hook.on_page_content(cell + r"<p>\|</p>") == cell.replace("\\", "") + r"<p>\|</p>"
    assert "  - docs/hooks/table_pipes.py\n" in (DOCS.parent / "mkdocs.yml").read_text("utf-8")


def pixels(path: Path) -> tuple[int, int]:
    """The width and the height of a PNG."""
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


def shown_on(hook, source: str, address: str) -> str:
    """The figure of an address on the page that a source becomes."""
    where = source.removesuffix(".md").removesuffix(".ko") + ".html"
    url = f"ko/{where}" if source.endswith(".ko.md") else where
    page = SimpleNamespace(file=SimpleNamespace(src_uri=source), url=url)
    return hook.on_page_content(f'<img alt="" src="{address}" />', page)


def test_figures_have_the_size_that_follows_from_their_dots_per_inch():
    hook = load_hook("pictures")
    content = shown_on(hook, "mechanisms/luong.md", "../pictures/mechanisms/luong-dot.png")
    size = r'width="(\d+)" height="(\d+)" alt="" src="../pictures/mechanisms/luong-dot'
    found = re.fullmatch(
        rf'<img class="in-light" loading="lazy" {size}\.png" /><img class="in-dark".*\.dark\.png" />', content
    )
    assert found is not None
    width, height = map(int, found.groups())
    own = pixels(DOCS / "pictures" / "mechanisms" / "luong-dot.png")
    assert (width, height) == tuple(round(number * 1.4 * 96 / 300) for number in own)
    vector = shown_on(hook, "looking.md", "pictures/animal-it.svg")
    assert vector.count("width=") == 0
    assert vector.count("pictures/animal-it.dark.svg") == 1


def test_figures_of_the_dark_theme_have_its_page_and_ink_and_their_own_colours(tmp_path):
    hook = load_hook("pictures")
    colours = {"white": (1, 1, 1), "black": (0, 0, 0), "yellow": (0.99, 0.91, 0.15), "purple": (0.27, 0.0, 0.33)}
    dark = dict(zip(colours, hook.in_the_dark(hook.numpy.array([*colours.values()], float)), strict=True))
    assert hook.numpy.allclose(dark["white"], hook.PAGE)
    assert hook.numpy.allclose(dark["black"], hook.INK)
    assert hook.numpy.allclose(dark["yellow"], colours["yellow"])
    assert hook.numpy.allclose(dark["purple"], colours["purple"])
    shown_on(hook, "mechanisms/luong.md", "../pictures/mechanisms/luong-dot.png")
    shown_on(hook, "looking.md", "pictures/animal-it.svg")
    hook.on_post_build({"site_dir": str(tmp_path)})
    corner = hook.Image.open(tmp_path / "pictures" / "mechanisms" / "luong-dot.dark.png").getpixel((0, 0))
    assert corner == tuple(round(255 * float(channel)) for channel in hook.PAGE)
    vector = (tmp_path / "pictures" / "animal-it.dark.svg").read_text("utf-8")
    assert "#ffffff" not in vector
    assert "<svg fill=" in vector


@pytest.mark.parametrize("name", ["example-vision.png", "example-vision.ko.png"])
def test_pictures_in_a_figure_of_the_dark_theme_are_as_they_were_seen_on_its_page(name, tmp_path):
    hook = load_hook("pictures")
    assert "example-vision.dark.png" in shown_on(hook, "examples.md", "pictures/example-vision.png")
    target = tmp_path / name.replace(".png", ".dark.png")
    hook.write(DOCS / "pictures" / name, target)
    seen, dark = (
        hook.numpy.asarray(hook.Image.open(path).convert("RGB")) for path in (DOCS / "pictures" / name, target)
    )
    inside = hook.photographs(DOCS / "pictures" / name)
    assert 0.8 < inside.mean() < 0.95
    assert (seen == dark)[inside].all()
    assert (dark[~inside].mean(1) < 240).all()  # no white is left around them
    assert (dark[0] == [round(255 * float(channel)) for channel in hook.PAGE]).all()


@pytest.mark.parametrize("picture", sorted((DOCS / "pictures").glob("*.svg")), ids=lambda picture: picture.name)
def test_a_drawn_figure_of_the_dark_theme_is_well_formed_with_light_letters(picture, tmp_path):
    """Else a browser shows its name in place of it."""
    hook = load_hook("pictures")
    for kinds in ("dark", "ko.dark") if picture.name in hook.LABELS else ("dark",):
        target = tmp_path / f"{picture.stem}.{kinds}.svg"
        hook.write(picture, target)
        assert lightness(xml.etree.ElementTree.parse(target).getroot().attrib["fill"]) > 0.7


def lightness(colour: str) -> float:
    """Of #rrggbb, from 0 to 1."""
    return sum(int(colour[at : at + 2], 16) for at in (1, 3, 5)) / (3 * 255)


def test_a_page_in_korean_shows_figures_with_korean_labels(tmp_path):
    """The plugin of languages has written luong-dot.ko.png as ko/pictures/mechanisms/luong-dot.png."""
    hook = load_hook("pictures")
    drawn = shown_on(hook, "mechanisms/luong.ko.md", "../pictures/mechanisms/luong-dot.png")
    vector = shown_on(hook, "transformer.ko.md", "../pictures/transformer.svg")
    assert 'src="../pictures/transformer.ko.svg"' in vector
    assert 'src="../pictures/transformer.ko.dark.svg"' in vector
    hook.on_post_build({"site_dir": str(tmp_path)})
    width, height = pixels(DOCS / "pictures" / "mechanisms" / "luong-dot.ko.png")
    assert f'width="{round(width * 1.4 * 96 / 300)}" height="{round(height * 1.4 * 96 / 300)}"' in drawn
    assert pixels(tmp_path / "ko" / "pictures" / "mechanisms" / "luong-dot.dark.png") == (width, height)
    for name in ("transformer.ko.svg", "transformer.ko.dark.svg"):
        text = (tmp_path / "pictures" / name).read_text("utf-8")
        assert ">셀프 어텐션</text>" in text
        assert ">self-attention</text>" not in text
    assert not (tmp_path / "pictures" / "transformer.svg").exists()


SHOWN = {target for page in KOREAN for target in re.findall(r"pictures/([^)]+)\)", page.read_text("utf-8"))}
OF_THE_TEXT = {"BLEU", "ALiBi", "YaRN", "q · k", "q · k / √d", *(f"d = {d}" for d in (4, 64, 512))}
"""Labels that Korean pages have too: names, formulas, and the tokens of the sentence that is looked at."""
TOKENS = {*re.findall(r"\S+", "the animal didn ' t cross street because it was too tired . [CLS] [SEP]")}


@pytest.mark.parametrize("name", sorted(name for name in SHOWN if name.endswith(".svg")))
def test_every_label_of_a_drawn_figure_is_in_korean(name):
    text = (DOCS / "pictures" / name).read_text("utf-8")
    labels = {label for label in re.findall(r"<text[^>]*>([^<]+)</text>", text) if re.search("[A-Za-z]", label)}
    assert labels
    korean = load_hook("pictures").LABELS.get(name, {})
    of_the_text = OF_THE_TEXT | (TOKENS if name == "animal-it.svg" else set())
    assert {label for label in labels - {*korean} - of_the_text if not re.fullmatch(r"\(?[\d, →]+\)?", label)} == set()
    assert {*korean} <= labels
    assert [label for label in korean.values() if not re.search("[가-힣]", label) and not re.match(r"\d", label)] == []


PROGRAMS = {
    "doctor-page.png",
    "examine-page.png",
    *(f"explorer-{name}.png" for name in ("whole", "band", "exact", "million", "million-exact", "translation")),
}
"""Photographs of pages that a program shows, which are in English."""


@pytest.mark.parametrize("name", sorted({name for name in SHOWN if name.endswith(".png")} - PROGRAMS))
def test_every_figure_of_pixels_is_there_with_korean_labels(name):
    korean = (DOCS / "pictures" / name).with_suffix(".ko.png")
    assert korean.exists()
    labels = load_hook("pictures").LABELS.get(name, {})  # what recipes/example_figures.py puts in their place
    assert [label for label in labels.values() if not re.search("[가-힣]", label)] == []


def test_labels_of_a_figure_are_put_in_korean_wherever_they_stand(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "agg")
    pytest.importorskip("matplotlib")
    from matplotlib.figure import Figure

    specification = importlib.util.spec_from_file_location(
        "example_figures", DOCS.parent / "recipes" / "example_figures.py"
    )
    assert specification is not None
    assert specification.loader is not None
    recipe = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(recipe)
    figure = Figure()
    axes = figure.subplots()
    axes.set(title="weight", xlabel="seconds")
    axes.set_yticks([0, 1], ["1", "end"])
    assert recipe.translate(figure, {"weight": "가중치", "end": "끝", "hertz": "헤르츠"}) == {"weight", "end"}
    figure.canvas.draw()
    assert (axes.get_title(), axes.get_xlabel()) == ("가중치", "seconds")
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["1", "끝"]


def test_every_figure_of_a_mechanism_is_drawn_with_korean_labels():
    folder = DOCS / "pictures" / "mechanisms"
    names = {path.name.removesuffix(".png") for path in folder.glob("*.png")}
    assert {name for name in names if not name.endswith(".ko")} == {name[:-3] for name in names if name.endswith(".ko")}


@pytest.mark.parametrize("name", ["mistakes.md", "mistakes.ko.md"])
def test_the_page_of_mistakes_has_an_entry_for_each_code(name):
    hook = load_hook("mistakes")
    page = SimpleNamespace(file=SimpleNamespace(src_uri=name))
    text = hook.on_page_markdown((DOCS / name).read_text("utf-8"), page)
    assert sorted(re.findall(r"^### .* \{ #(\w+) \}$", text, flags=re.MULTILINE)) == explained_codes()
    for code in explained_codes():
        found = explanation(code, "ko" if name.endswith(".ko.md") else "en")
        assert found.summary.rstrip(".") in text
        assert found.details in text
        assert found.wrong in text
        assert found.right in text


@pytest.mark.parametrize("page", KOREAN, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_in_korean_has_the_code_and_figures_of_the_english_one(page):
    """But for the option of a command that the course has in Korean."""
    korean = page.read_text("utf-8").replace(" --lang ko" if page.parent.name == "course" else "\0", "")
    english = page.with_name(page.name.replace(".ko.md", ".md")).read_text("utf-8")
    for parts in (CODE, FIGURE, re.compile(r"\$\$.*?\$\$", flags=re.DOTALL), re.compile(r"^::: .*$", re.MULTILINE)):
        assert parts.findall(korean) == parts.findall(english)


NUMBER = re.compile(r"(?<![\w.])\d[\d,]*\.\d+(?![\w.]*\d)")
PAGE_LINK = re.compile(r"\]\(([^)#:\s]+\.md)")


@pytest.mark.parametrize("page", KOREAN, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_page_in_korean_has_no_number_and_no_link_of_its_own(page):
    """Measured numbers, with a decimal point, are those of the English page, and both lead to the same pages."""
    korean = page.read_text("utf-8")
    english = page.with_name(page.name.replace(".ko.md", ".md")).read_text("utf-8")
    assert {*NUMBER.findall(korean)} - {*NUMBER.findall(english)} == set()
    assert {*PAGE_LINK.findall(korean)} == {*PAGE_LINK.findall(english)}


LONE_WINDOW = re.compile(r"window\(before=[^,()]*\)")


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_a_window_of_earlier_keys_stands_beside_causal(page):
    """Without `after` a window has no bound ahead: alone it is no decoder's, which sees no later key."""
    lines = page.read_text("utf-8").splitlines()
    assert [line for line in lines if LONE_WINDOW.search(line) and "causal" not in line.lower()] == []


@pytest.mark.parametrize("name", ["sparse.md", "sparse.ko.md"])
def test_the_price_of_a_pair_in_the_text_is_that_of_its_table(name):
    text = (DOCS / "mechanisms" / name).read_text("utf-8")
    said = re.search(r"(\d\.\d)(?: to |배에서 )(\d\.\d)(?: times|배)", text)
    assert said is not None
    measured = [float(price) for price in re.findall(r"^\| .+ \| .+ % \| .+ ms \| (\d\.\d+) \|", text, re.MULTILINE)]
    assert len(measured) == 4
    assert (float(said[1]), float(said[2])) == (round(min(measured), 1), math.ceil(10 * max(measured)) / 10)


SECTIONS = {
    "": (
        "The problem it solved",
        "Formula",
        "By hand",
        "From scratch",
        "In code",
        "Cost",
        "When to use",
        "What its heads learn",
        "Source",
    ),
    ".ko": (
        "어떤 문제를 풀었나",
        "수식",
        "손으로 계산하기",
        "직접 짜 보기",
        "코드",
        "비용",
        "언제",
        "헤드는 무엇을 배우나",
        "출처",
    ),
}


@pytest.mark.parametrize("page", sorted({*(DOCS / "mechanisms").glob("*.md")} - {*KOREAN}), ids=lambda page: page.stem)
def test_a_page_of_a_mechanism_is_in_both_languages_with_all_sections_and_a_figure(page):
    assert f"- mechanisms/{page.name}\n" in (DOCS.parent / "mkdocs.yml").read_text("utf-8")
    for suffix, sections in SECTIONS.items():
        text = page.with_name(f"{page.stem}{suffix}.md").read_text("utf-8")
        headings = iter(re.findall(r"^## (.+)$", text, flags=re.MULTILINE))
        for section in sections:  # in this order, with others between them
            assert any(heading.startswith(section) for heading in headings), section
        assert re.search(r"^::: steps [a-z-]+$", text, flags=re.MULTILINE), "no figure that moves"
        assert "../pictures/mechanisms/" in text


FROM_SCRATCH = re.compile(r"^## From scratch$.*?^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
LEAST_LINES, MOST_LINES = 3, 15


@pytest.mark.parametrize("page", sorted({*(DOCS / "mechanisms").glob("*.md")} - {*KOREAN}), ids=lambda page: page.stem)
def test_code_from_scratch_is_short_and_calls_no_attention_of_regard(page):
    found = FROM_SCRATCH.search(page.read_text("utf-8"))
    assert found is not None
    module = ast.parse("\n".join(load_hook("notebooks").sources(found[1])))
    (own,) = (node for node in module.body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    body = sum(len(ast.unparse(node).splitlines()) for node in own.body)
    assert LEAST_LINES <= body <= MOST_LINES
    assert not any(isinstance(node, ast.Name) and node.id == "regard" for node in ast.walk(own))
    assert "torch.allclose(" in found[1]


@pytest.mark.parametrize("page", sorted((DOCS / "mechanisms").glob("*.md")), ids=lambda page: page.stem)
def test_the_notebook_of_a_page_runs_and_needs_an_installation_alone(page):
    made = load_hook("notebooks").notebook(page.read_text("utf-8"))
    assert (made["nbformat"], made["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in made["cells"]}) == len(made["cells"])
    code = ["".join(cell["source"]) for cell in made["cells"] if cell["cell_type"] == "code"]
    assert code[0] == "%pip install --quiet regard"
    names: dict = {"__name__": "__main__"}
    shown = [last_value(text, names) for text in code[1:]]
    assert shown
    assert {*shown} <= {"True", "(True, 0.0)"}
    markdown = "".join(made["cells"][0]["source"])
    assert markdown.startswith("# ")
    assert ":::" not in markdown


def last_value(source: str, names: dict) -> str:
    """What a notebook shows below a cell."""
    *body, last = ast.parse(source).body
    exec(compile(ast.Module(body, []), "cell", "exec"), names)
    assert isinstance(last, ast.Expr)
    return repr(eval(compile(ast.Expression(last.value), "cell", "eval"), names))


@pytest.mark.parametrize(
    ("repository", "service", "installed"),
    [
        ("", 'href="https://colab.research.google.com/"', "regard"),
        (
            "https://github.com/someone/regard",
            'href="https://colab.research.google.com/github/someone/regard/blob/gh-pages/notebooks/flash.ko.ipynb"',
            "git+https://github.com/someone/regard",
        ),
    ],
)
def test_a_notebook_is_linked_from_its_page(repository, service, installed, tmp_path):
    pytest.importorskip("mkdocs")
    hook = load_hook("notebooks")
    page = SimpleNamespace(file=SimpleNamespace(src_uri="mechanisms/flash.ko.md"), url="ko/mechanisms/flash.html")
    config = {"repo_url": repository, "remote_branch": "gh-pages", "site_dir": str(tmp_path)}
    text = hook.on_page_markdown((DOCS / "mechanisms" / "flash.ko.md").read_text("utf-8"), page, config)
    assert 'href="../../notebooks/flash.ko.ipynb" download' in text
    assert service in text
    assert "::: notebook" not in text
    hook.on_post_build(config)
    made = json.loads((tmp_path / "notebooks" / "flash.ko.ipynb").read_text("utf-8"))
    assert made["cells"][1]["source"] == [f"%pip install --quiet {installed}"]


@pytest.mark.parametrize("repository", ["", "https://github.com/someone/regard"])
def test_the_repository_of_the_notebooks_is_named_by_the_environment(repository, monkeypatch):
    load_config = pytest.importorskip("mkdocs.config").load_config
    pytest.importorskip("material")
    monkeypatch.setenv("REGARD_REPOSITORY", repository)
    assert load_config(str(DOCS.parent / "mkdocs.yml"))["repo_url"] == (repository or None)
    monkeypatch.delenv("REGARD_REPOSITORY")
    assert load_config(str(DOCS.parent / "mkdocs.yml"))["repo_url"] is None


def test_there_is_a_page_for_each_part_that_users_extend():
    names = {page.stem for page in PAGES if page.parent.name == "extending"}
    assert names >= {"mask", "score", "bias", "kernel", "backend", "lens", "normalizer", "model_family", "rule"}
    index = (DOCS / "guides" / "index.md").read_text("utf-8")
    assert [name for name in sorted(names) if f"](../extending/{name}.md)" not in index] == []


def test_every_page_is_in_the_navigation():
    listed = re.findall(
        r"^ +- (?:[\w ]+: )?([\w/-]+\.md)$", (DOCS.parent / "mkdocs.yml").read_text("utf-8"), re.MULTILINE
    )
    pages = {page.relative_to(DOCS).as_posix() for page in {*DOCS.rglob("*.md")} - {*KOREAN}}
    assert pages == {*listed}
    assert len(listed) == len(pages)


def named_file(name: str) -> Path:
    """The file that a page names: of the tests, of the page, of the doctor of sources, else of the library."""
    if name.startswith("tests/") or name.endswith(".ts"):
        return DOCS.parent / name
    return DOCS.parent / "src" / ("" if name.startswith("regard_doctor/") else "regard") / name


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: page.relative_to(DOCS).as_posix())
def test_links_and_names_of_files_are_there(page):
    text = page.read_text("utf-8")
    for target in LINK.findall(text):
        assert (page.parent / target).exists(), target
    if page.stem == "architecture" or page.parent.name == "extending":
        for name in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|c|h|ts))`", text):
            assert named_file(name).exists(), name


CHANGES = re.split(r"^- ", (DOCS.parent / "CHANGELOG.md").read_text("utf-8"), flags=re.MULTILINE)[1:]
MOST_CHANGE_LINES = 5
MEASURED = re.compile(r"\d\s?(times|%|[mµn]?s\b|[KMG]i?B\b|GFLOP|seconds|minutes)")


@pytest.mark.parametrize("entry", CHANGES, ids=lambda entry: re.sub(r"\W+", "-", entry[:40]).strip("-"))
def test_a_feature_of_the_changelog_is_short_and_leaves_figures_to_their_pages(entry):
    text = re.split(r"\n\n|\n#", entry)[0].strip()
    assert len(text.splitlines()) <= MOST_CHANGE_LINES, text
    assert MEASURED.search(text) is None, "a figure stands on the page that owns it, with machine and command"


SOURCES = DOCS.parent / "src" / "regard"
WORDS = {
    word
    for path in (
        *SOURCES.rglob("*.py"),
        *(SOURCES.parent / "regard_doctor").rglob("*.py"),
        *SOURCES.rglob("*.[ch]"),
        *(DOCS.parent / "explorer" / "src").rglob("*.ts"),
        *(DOCS.parent / "tests").rglob("*.py"),
    )
    for word in re.findall(r"\w+", path.read_text("utf-8"))
}


@pytest.mark.parametrize(
    "page", ["architecture.md", *(f"extending/{path.name}" for path in DOCS.glob("extending/*.md"))]
)
def test_names_in_the_text_are_in_the_code(page):
    """Functions, classes and constants that a page names: `name`, `Class.method` or `module.name(...)`."""
    text = BLOCK.sub("", (DOCS / page).read_text("utf-8"))
    named = re.findall(r"`([A-Za-z_][A-Za-z_0-9.]*)(?:\([^`]*\))?`", text)
    examples = "\n".join(BLOCK.findall((DOCS / page).read_text("utf-8")))
    known = WORDS | set(re.findall(r"\w+", examples))
    assert {name for name in named if not known.issuperset(name.split("."))} == set()


ARCHITECTURE = (DOCS / "architecture.md").read_text("utf-8")
ANSWERS = {
    section.split("\n", 1)[0]: re.split(r"^## ", section, flags=re.MULTILINE)[0].split("\n", 1)[1]
    for section in re.split(r"^### ", ARCHITECTURE, flags=re.MULTILINE)[1:]
}
MOST_BULLETS, MOST_WORDS = 3, 110


@pytest.mark.parametrize("question", ANSWERS)
def test_an_answer_of_the_architecture_page_is_short(question):
    bullets = re.findall(r"^- ", ANSWERS[question], flags=re.MULTILINE)
    prose = re.sub(r"^\|.*$", "", ANSWERS[question], flags=re.MULTILINE)  # a table is looked up, not read
    assert len(bullets) <= MOST_BULLETS
    assert len(prose.split()) <= MOST_WORDS


def definitions(path: Path) -> dict[str, ast.AST]:
    """Functions, classes, methods and constants of a module, by their dotted names."""

    def named(body: list[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.AST]]:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield prefix + node.name, node
            if isinstance(node, ast.ClassDef):
                yield from named(node.body, f"{prefix}{node.name}.")
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from ((prefix + target.id, node) for target in targets if isinstance(target, ast.Name))

    return dict(named(ast.parse(path.read_text("utf-8")).body, ""))


def test_the_names_behind_a_file_are_defined_there_and_explained():
    """`- FILE: NAME, NAME and NAME` of the architecture page, as far as one name follows another."""
    bullets = re.findall(r"^- `([a-z_/]+\.py)`:((?: `[\w.]+`(?:,| and|;)?)+)", ARCHITECTURE, flags=re.MULTILINE)
    assert len(bullets) > 50
    faults = []
    for file, names in bullets:
        found = definitions(named_file(file))
        for name in re.findall(r"`([\w.]+)`", names):
            node = found.get(name)
            if node is None:
                faults.append(f"{file} has no {name}")
            elif isinstance(node, ast.FunctionDef | ast.ClassDef) and "." not in name and not ast.get_docstring(node):
                faults.append(f"{name} in {file} has no docstring")
    assert faults == []
