"""Drawings of the pages: texts fit, numbers are those of the formulas, and each stands in both languages."""

import math
import re
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"
sys.path.insert(0, str(DOCS / "hooks"))

import gain_drawing  # noqa: E402
import mechanism_drawings  # noqa: E402
from mechanism_drawings import DRAWINGS, Say  # noqa: E402
from svg_canvas import Canvas  # noqa: E402

from regard.plots.figures import text_width  # noqa: E402

LANGUAGES = {"en": lambda english, _: english, "ko": lambda _, korean: korean}
LETTER = 13.0
"""Height of a letter of a box; its width is 0.62 of it, or all of it in Hangul, as `text_width` counts."""
WIDEST_PANEL = 360


def texts(name: str, say: Say = LANGUAGES["en"]) -> list[str]:
    """The texts of a drawing, without what is only for their looks."""
    found = re.findall(r"<text[^>]*>(.*?)</text>", "".join(panel.svg() for panel in DRAWINGS[name](say)))
    return [re.sub(r"<[^>]+>|&#8203;", "", text) for text in found]


@pytest.mark.parametrize("language", LANGUAGES)
@pytest.mark.parametrize("name", DRAWINGS)
def test_texts_fit_into_their_boxes_and_panels_onto_a_telephone(name, language, monkeypatch):
    draw, seen = Canvas.box, []

    def box(self, x, y, width, height, lines, kind=""):
        for line in [lines] if isinstance(lines, str) else lines:
            plain = re.sub(r"_\{?([^}]*?)\}?", r"\1", line)
            seen.append((text_width(plain) * LETTER, width, line))
            assert 0 <= x <= x + width <= self.width
            assert 0 <= y <= y + height <= self.height
        draw(self, x, y, width, height, lines, kind)

    monkeypatch.setattr(Canvas, "box", box)
    panels = DRAWINGS[name](LANGUAGES[language])
    assert all(panel.width <= WIDEST_PANEL and panel.title for panel in panels)
    assert [line for needed, room, line in seen if needed > room] == []
    assert 'role="img"' in panels[0].svg()


def test_every_text_is_in_both_languages():
    for name in DRAWINGS:
        assert not any(re.search("[가-힣]", text) for text in texts(name))
        assert len(texts(name)) == len(texts(name, LANGUAGES["ko"]))


@pytest.mark.parametrize("name", DRAWINGS)
def test_a_drawing_stands_in_a_page_of_each_language(name):
    for suffix in (".md", ".ko.md"):
        pages = [
            page for page in (DOCS / "mechanisms").glob("*.md") if page.name.endswith(".ko.md") == (suffix == ".ko.md")
        ]
        assert any(f"\n::: drawing {name}\n" in page.read_text("utf-8") for page in pages)


def test_flash_has_the_running_maximum_and_total_of_each_tile():
    scores = [[1, 0, 2, 1], [2, 0, 0, 1]]
    shown = texts("flash-tiles")
    for row in scores:
        for tile in (2, 4):
            peak = max(row[:tile])
            total = sum(math.exp(score - peak) for score in row[:tile])
            assert f"m = {peak}" in " ".join(shown)
            assert f"l = {total:.3f}" in shown
        assert f"× {math.exp(max(row[:2]) - max(row)):.3f}".replace("1.000", "1") in shown


def test_a_process_of_the_ring_has_each_block_once_and_computes_those_that_are_not_later():
    drawn = mechanism_drawings.ring_hops(LANGUAGES["en"])[0].svg()
    assert drawn.count('class="unused"') == 3 + 2 + 1
    assert drawn.count('class="key"') == 4 + 3 + 2 + 1
    blocks = [text for text in texts("ring-hops") if re.fullmatch(r"K\d V\d", text)]
    for process in range(4):
        assert sorted(blocks[4 * process : 4 * process + 4]) == [f"K{block} V{block}" for block in range(4)]


def test_heads_that_share_keys_cache_fewer_numbers():
    assert [text for text in texts("grouped-heads") if "cached" in text] == [
        f"cached for each token: {2 * groups * 512 // 8} numbers" for groups in (8, 2, 1)
    ]


def test_weights_and_context_are_those_of_the_formula():
    shown = texts("attention-shapes")
    scores = [[1, 0, 1], [1, 1, 2], [1, 2, 1]]
    for row in scores:
        parts = [math.exp(score) for score in row]
        weights = [part / sum(parts) for part in parts]
        assert {f"{weight:.3f}" for weight in weights} <= {*shown}
        context = weights[0] * 1 + weights[2] * 3, weights[1] * 2 + weights[2] * 1
        assert {f"{number:.3f}".replace("1.000", "1") for number in context} <= {*shown}
    assert {"Q (3, 4)", "Kᵀ (4, 3)", "A (3, 3)", "V (3, 2)", "C (3, 2)"} <= {*shown}


@pytest.mark.parametrize("name", ["what-heads-learn.md", "what-heads-learn.ko.md"])
def test_every_row_of_the_tables_has_its_mark_at_its_gain(name):
    text = (DOCS / name).read_text("utf-8")
    language = "ko" if name.endswith(".ko.md") else "en"
    found = gain_drawing.gains(text)
    rows = [line for line in text.splitlines() if re.search(r"^\|.*\| \**[-+]\d+\.\d \[", line)]
    assert sum(len(gains) for models in found.values() for gains in models.values()) == len(rows)
    assert [len(models) for models in found.values()] == [3, 2]
    drawn = gain_drawing.drawing(text, language)
    assert drawn.count('class="mark') == len(rows) + 3 + 2
    assert "::: gains" in text
    assert all(
        one.low <= one.gain <= one.high
        for models in found.values()
        for gains in models.values()
        for one in gains.values()
    )
    widest = max(text_width(relation) for models in found.values() for gains in models.values() for relation in gains)
    assert 12.0 * widest < gain_drawing.RIGHT - gain_drawing.LEFT
    first = next(iter(next(iter(found.values())).values()))
    assert next(iter(first.values())) == gain_drawing.Gain(92.3, 91.9, 92.6)


def test_both_languages_draw_the_same_gains():
    english, korean = (
        gain_drawing.gains((DOCS / f"what-heads-learn{end}.md").read_text("utf-8")) for end in ("", ".ko")
    )
    assert [[[*gains.values()] for gains in models.values()] for models in english.values()] == [
        [[*gains.values()] for gains in models.values()] for models in korean.values()
    ]
