"""Attention over blocks of keys step by step: the online softmax over tiles, and merging by log-sum-exp."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Unpack

import torch
from torch import Tensor

from ..attention import merge, run_problem
from ..backends.torch.tile_loop import OnlineSoftmax
from ..core.score_forms import at_least_float32
from ..kernels.validation import AttentionOptions, make_problem
from ..masks import Mask
from ..scores import Dot
from .hand_arithmetic import product_example
from .step_table import StepTable, Walkthrough, make_table
from .table_formats import number_text
from .walkthrough import TITLE, HeadView, score_tables, walkthrough
from .what_if import WhatIf
from .wording import Wording


def online_walkthrough(
    query: Tensor, key: Tensor, value: Tensor, width: int, what_if: WhatIf | None = None
) -> Walkthrough:
    """softmax( Q Kᵀ ) V by the online softmax over tiles of `width` keys: maximum m, total l and sum o after each tile.

    The numbers are those of `OnlineSoftmax`, by which the kernel `tiled` runs; the weights are computed again from the
    log-sum-exp, as the backward pass does.

    what_if: a change before the softmax.

    Shapes: query (M, D), key (N, D), value (N, Dv).
    """
    problem = make_problem(query, key, value, score=Dot())
    problem = problem if what_if is None else what_if.apply(problem)
    view = HeadView.of(problem)
    names, scores = view.query_names, problem.scores()
    output, lse = value.new_empty(len(query), value.shape[-1]), value.new_empty(len(query))
    softmax = OnlineSoftmax(output, lse)
    tables = [
        make_table("query", query, names),
        make_table("key", key, view.keys),
        make_table("value", value, view.keys),
        *score_tables(view, Dot()),
    ]
    for number, (start, stop) in enumerate(_bounds(len(key), width), start=1):
        tables += _tile_tables(softmax, scores, value, slice(start, stop), number, view)
    softmax.write(1.0)
    first, total = softmax.sum[0, 0], softmax.total[0, 0]
    quotient = f"{_text(first)} / {_text(total)} = {_text(output[0, 0])}"
    peak = f"{_text(softmax.peak[0, 0])} + log {_text(total)} = {_text(lse[0])}"
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(nan=0.0)  # of a row that has seen no key
    again = f"exp({_text(scores[0, 0])} - {_text(lse[0])}) = {_text(weights[0, 0])}"
    tables += [
        make_table("context", output, names, wording="online_context", example=quotient),
        make_table("log_sum_exp", lse.unsqueeze(-1), names, ["lse"], wording="online_lse", example=peak),
        make_table("weights", weights, names, view.keys, wording="weights_again", sums="rows", example=again),
    ]
    return Walkthrough(TITLE, tuple(tables))


def _tile_tables(
    softmax: OnlineSoftmax, scores: Tensor, value: Tensor, columns: slice, number: int, view: HeadView
) -> Iterator[StepTable]:
    """The factor by which older sums shrink, the tile's exponentials, and m, l and o after the tile."""
    names, fill = view.query_names, str(number)
    before = softmax.peak.clone()
    exponentials = softmax.weights(scores[:, columns].clone())
    softmax.add(exponentials @ at_least_float32(value[columns]))
    if number > 1:
        factor = (before - softmax.peak).exp().nan_to_num(nan=0.0)  # of a row that has seen no key
        example = f"exp({_text(before[0, 0])} - {_text(softmax.peak[0, 0])}) = {_text(factor[0, 0])}"
        yield make_table(
            f"shrink.{fill}", factor, names, ["factor"], wording="online_shrink", fill=fill, example=example
        )
    yield make_table(
        f"exponentials.{fill}", exponentials, names, view.keys[columns], wording="online_exponentials", fill=fill
    )
    state = torch.cat([softmax.peak, softmax.total, softmax.sum], -1)
    sums = [f"o{feature}" for feature in range(1, value.shape[-1] + 1)]
    yield make_table(f"running.{fill}", state, names, ["m", "l", *sums], wording="online_state", fill=fill)


def merge_walkthrough(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: Mapping[str, tuple[range, range]],
    *,
    mask: Mask | None = None,
    labels: Mapping[str, Wording] | None = None,
    what_if: WhatIf | None = None,
) -> Walkthrough:
    """softmax( Q Kᵀ, where M ) V merged from blocks of keys: scores, context and log-sum-exp of each, and their shares.

    Shapes: query (M, D), key (N, D), value (N, Dv); all blocks have the same rows.

    Args:
        query: (M, D).
        key: (N, D).
        value: (N, Dv).
        blocks: for each name the positions of its queries and of its keys, consecutive ones.
        mask: M.
        labels: what precedes the titles of a block's tables.
        what_if: a change before the softmax; its queries are counted from the first of the blocks.
    """
    tables = [make_table("query", query, _named("q", range(len(query))))]
    tables += [make_table(kind, rows, _named("k", range(len(key)))) for kind, rows in (("key", key), ("value", value))]
    parts = []
    for name, (rows, columns) in blocks.items():
        change = None if what_if is None else what_if.within(range(len(rows)), columns)
        own = query[rows.start : rows.stop], key[columns.start : columns.stop], value[columns.start : columns.stop]
        steps = walkthrough(
            *own,
            score=Dot(),
            mask=mask,
            query_positions=rows,
            key_positions=columns,
            queries=_named("q", rows),
            keys=_named("k", columns),
            what_if=change,
        )
        part = _part(change, *own, score=Dot(), mask=mask, query_positions=rows, key_positions=columns)
        parts.append(part)
        sums = make_table("log_sum_exp", part[1].unsqueeze(-1), _named("q", rows), ["lse"])
        chosen = ("scores", "masked_scores", "exponentials", "context")
        for table in (*(table for table in steps.tables if table.key in chosen), sums):
            label = Wording(name, name) if labels is None else labels[name]
            title = Wording(f"{label.en}: {table.title.en}", f"{label.ko}: {table.title.text('ko')}")
            tables.append(replace(table, key=f"{name}.{table.key}", title=title))
    output, lse = merge(parts)
    shares = torch.stack([(part - lse).exp() for _, part in parts], -1).nan_to_num(nan=0.0)  # of a row without a key
    own = _named("q", next(iter(blocks.values()))[0])
    example = product_example(shares[-1], torch.stack([part[-1, 0] for part, _ in parts]), output[-1, 0])
    share = f"exp({_text(parts[0][1][-1])} - {_text(lse[-1])}) = {_text(shares[-1, 0])}"
    tables += [
        make_table("log_sum_exp", lse.unsqueeze(-1), own, ["lse"], wording="merged_lse"),
        make_table("shares", shares, own, list(blocks), wording="merge_shares", sums="rows", example=share),
        make_table("context", output, own, wording="merged_context", example=example),
    ]
    return Walkthrough(TITLE, tuple(tables))


def _part(change: WhatIf | None, *own: Tensor, **options: Unpack[AttentionOptions]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one block, with a change."""
    problem = replace(make_problem(*own, **options), wants_lse=True)
    result = run_problem(problem if change is None else change.apply(problem))
    return result.output, result.lse  # type: ignore[return-value]


def _bounds(length: int, width: int) -> Iterator[tuple[int, int]]:
    return pairwise([*range(0, length, width), length])


def _named(letter: str, positions: range) -> list[str]:
    return [f"{letter}{position + 1}" for position in positions]


def _text(number: Tensor) -> str:
    return number_text(float(number), 3)
