"""The page of a comparison: question, table, figure and settings in one HTML file that opens offline."""

from __future__ import annotations

import html
from base64 import b64encode
from typing import TYPE_CHECKING

from regard.steps.table_formats import html_page
from regard.translation import yaml12

if TYPE_CHECKING:
    from regard.comparison.comparison_report import ComparisonReport

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, "Noto Sans KR", "Apple SD Gothic Neo", "Malgun Gothic", sans-serif; margin: 2rem auto;
       max-width: 72rem; padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0 }
th, td { border: 1px solid #8888; padding: .25rem .6rem; text-align: right; white-space: nowrap }
th { font-weight: 600 } th:first-child { text-align: left }
img { max-width: 100%; background: #fff; padding: .5rem; box-sizing: border-box }
.notes { max-width: 46rem } pre { overflow-x: auto; padding: .6rem; border: 1px solid #8888 }
@media print { body { margin: 0; max-width: none } section { break-inside: avoid } }
"""


def comparison_page(report: ComparisonReport, figure: bytes) -> str:
    """The page as HTML, with the figure, an SVG file, inside it; it loads nothing and runs no script."""
    heading, *rows = report.cells()
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in heading)
    body = "".join(
        f'<tr><th scope="row">{html.escape(row[0])}</th>'
        f"{''.join(f'<td>{html.escape(cell)}</td>' for cell in row[1:])}</tr>"
        for row in rows
    )
    question = report.recipe.compare.question
    described = f"{report.recipe.name}: {heading[1]} of {', '.join(row[0] for row in rows)}; the table has the numbers"
    settings = yaml12.dump({**report.recipe.experiment, "compare": report.recipe.compare.model_dump(mode="json")})
    parts = [
        f"<p>{html.escape(question)}</p>" if question else "",
        f'<section class="scroll" tabindex="0" aria-label="Table"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></section>",
        f'<section class="notes">{"".join(f"<p>{html.escape(note)}</p>" for note in report.notes())}</section>',
        f'<section><h2>Figure</h2><img alt="{html.escape(described)}" '
        f'src="data:image/svg+xml;base64,{b64encode(figure).decode("ascii")}"></section>',
        f"<section><h2>Recipe</h2><pre>{html.escape(settings)}</pre></section>",
    ]
    return html_page(f"regard compare {report.recipe.name}", "\n".join(parts), "en", STYLE)
