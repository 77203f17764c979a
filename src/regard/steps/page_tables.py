"""Tables of steps as the live page shows them: texts of numbers, with those that they were before a change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .step_table import StepTable, Walkthrough
from .table_formats import left_out_counts, number_text, shown_columns
from .wording import STEPS, Wording

DIGITS = 3
GIVEN = {
    *("query", "key", "value", "input", "memory", "mask", "bias", "score", "score_vector", "centre_vector"),
    *("projected_query", "projected_key", "unrotated_query", "unrotated_key", "cached_key", "cached_value"),
    *("embeddings", "positions", "source_embedding", "target_embedding", "annotations"),
    *("decoder_state", "previous_state", "random_rows", "mixing_matrix", "initial_model", "channel_parameters"),
}
"""Tables that a class computes from, besides projections; all others are covered when it predicts."""
NO_KEY = Wording(
    "No key is left: every weight is 0, and so is the context.",
    "볼 수 있는 키가 없습니다: 가중치가 모두 0이고, 문맥 벡터도 0입니다.",
)
SHIFTED = Wording(
    "The largest score of the row was subtracted first, so that no exponential is too large or too small: the softmax "
    "is the same without it.",
    "지수 함수값이 너무 크거나 작아지지 않도록 행의 가장 큰 점수를 먼저 뺐습니다. "
    "소프트맥스의 결과는 빼지 않아도 같습니다.",
)
EXPONENTIALS = "exponentials"

Cell = str | list[str]
"""The text of a number; where it changed, that and the text before."""


def page_tables(shown: Walkthrough, before: Walkthrough | None = None) -> list[dict[str, Any]]:
    """The tables of a walkthrough as plain values of texts.

    A table has key, title, formula, columns, rows of a name and cells, `given`, and as it needs them sums and totals,
    example and note. A cell is a text, or, where another text stood before, a list of both. A column is a name, or how
    many features are left out there: then its cells are None.

    before: the walkthrough that numbers are compared with.

    >>> from regard.steps import worked_example
    >>> page_tables(worked_example("luong-dot"))[3]["rows"]
    [{'name': 's1', 'cells': ['1', '0', '2']}]
    """
    if before is None:
        return [_page_table(table, None) for table in shown.tables]
    tables = []
    for table in shown.tables:
        other = before.counterpart(table)
        if other is not None and base_key(table) == EXPONENTIALS and table.formula != other.formula:
            other = table  # with and without the largest score they are not comparable
        tables.append(_page_table(table.compared(other), other))
    return tables


def left_out(shown: Walkthrough, before: Walkthrough) -> list[dict[str, str]]:
    """The titles of the steps that were there before and are no more."""
    return [table.title._asdict() for table in before.tables if table.key not in shown.keys]


def _page_table(table: StepTable, before: StepTable | None) -> dict[str, Any]:
    shown = shown_columns(table)
    counts = iter(left_out_counts(table, shown))
    known = {} if before is None else _texts_by_name(before)
    marked = None if table.marked is None else table.marked.tolist()
    rows = []
    for at, (name, numbers) in enumerate(zip(table.rows, table.numbers.tolist(), strict=True)):
        cells: list[Cell | None] = []
        for column in shown:
            if column is None:
                cells.append(None)
                continue
            text = number_text(numbers[column], DIGITS)
            was = known.get((name, table.columns[column]), "")
            cells.append([text, was] if marked is not None and marked[at][column] and text != was else text)
        rows.append({"name": name, "cells": cells})
    base = base_key(table)
    values: dict[str, Any] = {
        "key": table.key,
        "title": {"en": table.title.en, "ko": table.title.text("ko")},
        "formula": table.formula,
        "columns": [next(counts) if column is None else table.columns[column] for column in shown],
        "rows": rows,
        "given": base in GIVEN or base.endswith("_projection"),
    }
    if table.sums is not None:
        totals = _totals(table, before)
        values["sums"] = table.sums
        values["totals"] = (
            [None if column is None else totals[column] for column in shown] if table.sums == "columns" else totals
        )
    if table.example:
        values["example"] = table.example
    if base == "weights" and not bool(table.numbers.any(-1).all()):
        values["note"] = NO_KEY._asdict()
    if base == EXPONENTIALS and table.formula != STEPS[EXPONENTIALS].formula:
        values["note"] = SHIFTED._asdict()
    return values


def base_key(table: StepTable) -> str:
    """The name of a table's step, without that of its head, hop or query: "weights" of "head2.weights"."""
    parts = table.key.split(".")
    return parts[1] if parts[0].startswith(("head", "hop")) and len(parts) > 1 else parts[0]


def _totals(table: StepTable, before: StepTable | None) -> list[Cell]:
    """The sums, with those of before where they differ; without those of a table that had others."""
    totals = [] if table.totals is None else table.totals.tolist()
    texts: list[Cell] = [number_text(total, DIGITS) for total in totals]
    if before is None or before.totals is None or len(before.totals) != len(totals):
        return texts
    return [
        text if text == was else [str(text), was]
        for text, was in zip(texts, (number_text(was, DIGITS) for was in before.totals.tolist()), strict=True)
    ]


def _texts_by_name(table: StepTable) -> dict[tuple[str, str], str]:
    rows: Sequence[Sequence[float]] = table.numbers.tolist()
    return {
        (row, column): number_text(number, DIGITS)
        for row, numbers in zip(table.rows, rows, strict=True)
        for column, number in zip(table.columns, numbers, strict=True)
    }
