"""Sheets of attention to be done by hand: small whole numbers, blank tables, and the answers on a second page."""

from __future__ import annotations

import csv
import html
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..masks import Mask, causal
from ..scores import Dot, ScaledDot
from ..utils.atomic_files import atomic_write
from .step_table import StepTable, Walkthrough
from .table_formats import cells_of, html_page
from .walkthrough import walkthrough
from .wording import Wording, check_language

GIVEN = ("query", "key", "value", "mask")
ASKED = ("scores", "scaled_scores", "masked_scores", "exponentials", "weights", "context")
"""Tables that the sheet leaves blank."""
LARGEST = 2
"""The largest number of a query, key or value."""
LARGEST_SCORE = 4
"""The largest score: the exponentials up to it are printed on the sheet."""

TITLE = Wording("Attention by hand", "손으로 계산하는 어텐션")
ANSWERS = Wording("Answers", "정답")
INSTRUCTION = Wording(
    "Fill in the tables, three digits after the point. Each row of weights sums to 1; the context is the sum of the "
    "values times their weights.",
    "표의 빈칸을 소수점 아래 셋째 자리까지 채우시오. 가중치는 행마다 합이 1이고, 문맥 벡터는 값에 가중치를 곱해 더한 "
    "것이다.",
)
NAME = Wording("Name: ____________________", "이름: ____________________")

STYLE = """
@page { size: A4; margin: 10mm 12mm }
:root { color-scheme: light }
body { font: 10pt/1.3 system-ui, "Noto Sans KR", "Apple SD Gothic Neo", "Malgun Gothic", sans-serif; color: #000;
       background: #fff; margin: 0 auto; max-width: 186mm; padding: 4mm }
h1 { font-size: 16pt; margin: 0 } h2 { font-size: 11.5pt; margin: 3mm 0 1mm } p { margin: 1mm 0 }
.answers { break-before: page; border-top: 1px dashed #888; margin-top: 10mm; padding-top: 4mm }
.exercise { break-inside: avoid } .tables { display: flex; flex-wrap: wrap; gap: 2mm 3mm; align-items: flex-start }
figure { margin: 0; max-width: 100%; overflow-x: auto } figcaption { font-size: 8.5pt } .formula { font-style: italic }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border: 1px solid #777; padding: .3mm 1.5mm; text-align: right; height: 5mm; min-width: 4mm;
         white-space: nowrap }
th { font-weight: 600; background: #eee } td.blank { min-width: 7mm; height: 6.5mm }
@media print { body { padding: 0; max-width: none } .answers { border: 0; margin: 0; padding: 0 } }
"""


@dataclass(frozen=True, eq=False)
class Worksheet:
    """Exercises as walkthroughs, whose later tables the sheet leaves blank; `save` writes HTML or CSV."""

    seed: int
    exercises: tuple[Walkthrough, ...]

    def html(self, language: str = "en") -> str:
        """A page of HTML for printing on A4: the exercises, and from a new page the answers."""
        check_language(language)
        exponentials = " · ".join(f"e^{power} = {math.exp(power):.3f}" for power in range(LARGEST_SCORE + 1))
        parts = [
            f"<p>{NAME.text(language)}</p><p>{html.escape(INSTRUCTION.text(language))}</p><p>{exponentials}</p>",
            *self._sections(language, blank=True),
            f'<div class="answers"><h1>{ANSWERS.text(language)}</h1>',
            *self._sections(language, blank=False),
            "</div>",
        ]
        return html_page(f"{TITLE.text(language)} ({self.seed})", "\n".join(parts), language, STYLE)

    def csv(self, language: str = "en") -> str:
        """Comma-separated values: a block for each table, blank where it is asked; after all of them the answers."""
        check_language(language)
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([f"{TITLE.text(language)} ({self.seed})"])
        for blank in (True, False):
            if not blank:
                writer.writerow([ANSWERS.text(language)])
            for number, exercise in enumerate(self.exercises, start=1):
                writer.writerow([f"{number}. {exercise.title.text(language)}"])
                for table in _tables(exercise):
                    writer.writerow([table.title.text(language), table.formula])
                    writer.writerows(_cells(table, language, blank))
                    writer.writerow([])
        return file.getvalue()

    def save(self, path: str | Path, language: str = "en") -> None:
        """Write the sheet: FILE.html or FILE.csv.

        Raises:
            ConfigurationError: another ending.
            CheckpointError: the file cannot be written.
        """
        path = Path(path)
        writers: dict[str, Callable[[str], str]] = {".html": self.html, ".csv": self.csv}
        if path.suffix not in writers:
            raise ConfigurationError(f"a sheet is written as .html or .csv; {path.name} ends in {path.suffix!r}")
        # Spreadsheets read UTF-8 by its byte order mark.
        encoding = "utf-8-sig" if path.suffix == ".csv" else "utf-8"
        with atomic_write(path) as partial:
            partial.write_text(writers[path.suffix](language), encoding=encoding)

    def _sections(self, language: str, *, blank: bool) -> list[str]:
        return [
            f'<section class="exercise"><h2>{number}. {html.escape(exercise.title.text(language))}</h2>'
            f'<div class="tables">{"".join(_figure(table, language, blank) for table in _tables(exercise))}</div>'
            "</section>"
            for number, exercise in enumerate(self.exercises, start=1)
        ]


def make_worksheet(seed: int = 1) -> Worksheet:
    """Three exercises of a seed: dot products, scaled dot products, and a causal mask.

    Queries, keys and values are whole numbers from 0 to 2, scores whole numbers from 0 to 4.

    >>> from regard.steps import make_worksheet
    >>> sheet = make_worksheet(seed=7)
    >>> [exercise.title.en for exercise in sheet.exercises]
    ['Dot-product attention', 'Scaled dot-product attention, √4 = 2', 'Self-attention with a causal mask']
    """
    generator = torch.Generator().manual_seed(seed)
    return Worksheet(
        seed,
        (
            _exercise(generator, (1, 3, 2), Wording("Dot-product attention", "내적 어텐션")),
            _exercise(
                generator,
                (2, 3, 4),
                Wording("Scaled dot-product attention, √4 = 2", "스케일드 닷 프로덕트 어텐션, √4 = 2"),
                scaled=True,
            ),
            _exercise(
                generator,
                (3, 3, 2),
                Wording("Self-attention with a causal mask", "인과(causal) 마스크가 있는 셀프 어텐션"),
                mask=causal(),
            ),
        ),
    )


def _exercise(
    generator: torch.Generator,
    sizes: tuple[int, int, int],
    title: Wording,
    *,
    scaled: bool = False,
    mask: Mask | None = None,
) -> Walkthrough:
    """A walkthrough of queries, keys and features of these sizes, drawn until the scores suit."""
    queries, keys, dim = sizes
    score = ScaledDot() if scaled else Dot()
    while True:
        query, key, value = (_draw(generator, shape) for shape in ((queries, dim), (keys, dim), (keys, 2)))
        differ = len(query.unique(dim=0)) == queries and len(key.unique(dim=0)) == keys
        if differ and bool(value.any(-1).all()) and _suits(score(query, key)):
            break
    steps = walkthrough(query, key, value, score=score, mask=mask)
    return Walkthrough(title, steps.tables)


def _suits(scores: Tensor) -> bool:
    """Whether scores are small whole numbers that differ in every row."""
    whole = bool((scores == scores.round()).all()) and float(scores.max()) <= LARGEST_SCORE
    return whole and bool((scores.amax(-1) > scores.amin(-1)).all())


def _draw(generator: torch.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.randint(LARGEST + 1, shape, generator=generator).float()


def _tables(exercise: Walkthrough) -> list[StepTable]:
    """The tables of an exercise that are printed: what is given, then what is asked."""
    return [table for keys in (GIVEN, ASKED) for table in exercise.tables if table.key in keys]


def _cells(table: StepTable, language: str, blank: bool) -> Sequence[Sequence[str]]:
    """Heading and rows of a table, without its numbers where they are asked."""
    heading, *rows = cells_of(table, language, 3)
    if blank and table.key in ASKED:
        rows = [[row[0], *[""] * (len(row) - 1)] for row in rows]
    return [heading, *rows]


def _figure(table: StepTable, language: str, blank: bool) -> str:
    heading, *rows = _cells(table, language, blank)
    tag = "td class=blank" if blank and table.key in ASKED else "td"
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heading[1:])
    lines = (
        f"<tr><th>{html.escape(row[0])}</th>{''.join(f'<{tag}>{html.escape(text)}</td>' for text in row[1:])}</tr>"
        for row in rows
    )
    caption = f'{html.escape(table.title.text(language))}<br><span class="formula">{html.escape(table.formula)}</span>'
    return f"<figure><figcaption>{caption}</figcaption><table><tr><td></td>{head}</tr>{''.join(lines)}</table></figure>"
