"""The figure of what-heads-learn.md: a line `::: gains` becomes a drawing of the page's own tables.

A panel for each language of the texts, a row for each relation, and in it for each model the points of its best head
above the best rule by position, with their interval.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from svg_canvas import Canvas

PLACE = re.compile(r"^::: gains$", flags=re.MULTILINE)
ROW = re.compile(
    r"^\| (?P<relation>[^|]+?) \| (?P<corpus>[^|]+?) \| [^|]+ \| [^|]+ \| [^|]+ "
    r"\| \**(?P<gain>[-+][\d.]+) \[(?P<low>[-\d.]+), (?P<high>[-\d.]+)\]\** \|",
    flags=re.MULTILINE,
)
MARKS = (("circle", "query"), ("square", "value"), ("diamond", "key"))
LEAST, MOST = -90.0, 100.0
"""Points at the ends of the axis."""
LEFT, RIGHT, TOP, STEP = 14.0, 336.0, 84.0, 34.0
TITLES = {
    "en": ("{}: points above the best rule by position", "the rule"),
    "ko": ("{}: 위치만 쓰는 가장 좋은 규칙과의 차이(%p)", "규칙"),
}


@dataclass(frozen=True)
class Gain:
    """The points of a model's best head of a relation, with the ends of their interval."""

    gain: float
    low: float
    high: float


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the line of the figure by its panels."""
    language = "ko" if page.file.src_uri.endswith(".ko.md") else "en"
    return PLACE.sub(lambda _: drawing(markdown, language), markdown)


def drawing(markdown: str, language: str) -> str:
    """The panels of a page, as an element."""
    panels = [panel(title, models, language) for title, models in gains(markdown).items()]
    return f'<div class="drawing">{"".join(drawn.svg() for drawn in panels)}</div>'


def gains(markdown: str) -> dict[str, dict[str, dict[str, Gain]]]:
    """Sections of a page, their models, and of each the gains by relation."""
    found: dict[str, dict[str, dict[str, Gain]]] = {}
    for section in re.split(r"^## ", markdown, flags=re.MULTILINE)[1:]:
        for part in re.split(r"^### ", section, flags=re.MULTILINE)[1:]:
            rows = [match.groupdict() for match in ROW.finditer(part)]
            if rows:
                name, model = section.split("\n", 1)[0], part.split("\n", 1)[0]
                found.setdefault(name, {})[model] = _by_relation(rows)
    return found


def panel(title: str, models: dict[str, dict[str, Gain]], language: str) -> Canvas:
    """The panel of one language: names of models, then a line for each relation with the mark of each model."""
    says, rule = TITLES[language]
    relations = list(dict.fromkeys(name for found in models.values() for name in found))
    drawn = Canvas(350, TOP + STEP * len(relations) + 20, says.format(title))
    drawn.text(175, 12, drawn.title, "title")
    for number, (model, (mark, kind)) in enumerate(zip(models, MARKS, strict=False)):
        drawn.mark(LEFT + 6, 32 + 16 * number, mark, kind)
        drawn.text(LEFT + 18, 32 + 16 * number, model, "small", "start")
    bottom = TOP + STEP * len(relations) - 4
    for points in (-50, 0, 50, 100):
        drawn.text(_place(points), bottom + 12, f"{points:+d}".replace("-", "−") if points else rule, "small")
    for row, relation in enumerate(relations):
        top = TOP + STEP * row
        drawn.text(LEFT, top + 6, relation, "small", "start")
        drawn.line((_place(0), top + 12), (_place(0), top + 30))
        for number, (found, (mark, kind)) in enumerate(zip(models.values(), MARKS, strict=False)):
            if relation in found:
                one, at = found[relation], top + 16 + 5 * number
                drawn.line((_place(one.low), at), (_place(one.high), at))
                drawn.mark(_place(one.gain), at, mark, kind)
    return drawn


def _by_relation(rows: list[dict[str, str]]) -> dict[str, Gain]:
    """Gains by relation, which has its corpus behind it where several have one of its name."""
    names = [row["relation"] for row in rows]
    return {
        f"{row['relation']} ({row['corpus']})" if names.count(row["relation"]) > 1 else row["relation"]: Gain(
            float(row["gain"]), float(row["low"]), float(row["high"])
        )
        for row in rows
    }


def _place(points: float) -> float:
    return LEFT + (max(points, LEAST) - LEAST) / (MOST - LEAST) * (RIGHT - LEFT)
