"""Approximations of attention step by step: the state of linear attention, random features, mixtures of keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack

import torch
from torch import Tensor

from ..linear import FavorPlus, Relu, linear_attention_with_state
from ..linear.linear_arguments import LinearOptions, checked_map
from ..nn import LengthProjection
from .hand_arithmetic import feature_names, matrix_example, named_cell, product_example, sum_example, telling_cell
from .layer_steps import linear_walkthrough
from .step_table import StepTable, Walkthrough, exact_table, make_table
from .table_formats import factor_text, number_text
from .walkthrough import TITLE, walkthrough
from .what_if import WhatIf

PAIRS = ("scores", "scaled_scores", "bias", "mask", "masked_scores", "exponentials")
"""Tables of queries and mixtures before their weights."""


def state_tables(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[LinearOptions]) -> list[StepTable]:
    """S_t of causal linear attention after each position, and the context that the query of that position reads.

    Shapes: query and key (N, D), value (N, Dv); decay and beta (N,).
    """
    tables, contexts, state = [], [], None
    feature_map = checked_map(options.get("feature_map"))
    columns = [f"v{feature}" for feature in range(1, value.shape[-1] + 1)]
    normalized = options.get("normalize", True)
    columns += ["z"] if normalized else []
    update = "delta_state" if "beta" in options else "decayed_state" if "decay" in options else "linear_state"
    for at in range(len(query)):
        step: Any = {**options, "causal": True, "state": state}
        step |= {name: options[name][at : at + 1] for name in ("decay", "beta") if options.get(name) is not None}  # type: ignore[literal-required]
        here = slice(at, at + 1)
        before = None if state is None else state.sums.flatten(0, -2)
        context, state = linear_attention_with_state(query[here], key[here], value[here], **step)
        contexts.append(context)
        sums = state.sums.flatten(0, -2)
        rows = [f"φ{feature}" for feature in range(1, len(sums) + 1)]
        phi = feature_map(key[here])
        written = torch.cat([value[here], value.new_ones(1, sums.shape[-1] - value.shape[-1])], -1)
        old = torch.zeros_like(sums) if before is None else before
        example = _state_example(old, sums, (phi.mT, written), step, (rows, columns))
        tables.append(
            make_table(f"state.{at + 1}", sums, rows, columns, wording=update, fill=str(at + 1), example=example)
        )
    names = [f"q{at + 1}" for at in range(len(query))]
    wording = "normalized_reading" if normalized else "state_reading"
    context = torch.cat(contexts)
    example = _reading_example(feature_map(query[-1:])[0], sums, context[-1])
    example = named_cell(example, (len(query) - 1, 0), names, feature_names(context))
    return [*tables, make_table("readings", context, names, wording=wording, example=example)]


def _state_example(
    before: Tensor,
    after: Tensor,
    added: tuple[Tensor, Tensor],
    step: Mapping[str, Any],
    names: tuple[Sequence[str], Sequence[str]],
) -> str:
    """One number of a state written out; added: φ(k) as a column and v as a row. "" where nothing is added."""
    phi, written = added
    if not bool(phi.any()):
        return ""
    if (decay := step.get("decay")) is not None:
        return sum_example(after, *names, (decay.exp(), before), added)
    if (beta := step.get("beta")) is None:
        return sum_example(after, *names, (before,), added)
    read = phi.mT @ before
    update = phi * (written - read)
    row, column = cell = telling_cell(torch.stack([before, update, update], -1))
    difference = f"({_text(written[0, column])} - {factor_text(float(read[0, column]))})"
    product = f"{factor_text(float(beta))} · {factor_text(float(phi[row]))} · {difference}"
    return named_cell(f"{_text(before[cell])} + {product} = {_text(after[cell])}", cell, *names)


def _reading_example(phi: Tensor, state: Tensor, context: Tensor) -> str:
    """The first number that a query reads written out; divided by the total where the state has one more column."""
    sums = [product_example(phi, column, phi @ column) for column in (state[:, 0], state[:, -1])]
    terms = [one.split(" = ")[0] for one in sums]
    if state.shape[-1] == len(context) or not all(terms):
        return sums[0]
    return f"({terms[0]}) / ({terms[1]}) = {_text(context[0])}"


def state_walkthrough(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[LinearOptions]) -> Walkthrough:
    """Causal linear attention as a recurrence: inputs, the state after each position, and what each query reads.

    Shapes: as `state_tables`.
    """
    names, others = (tuple(f"{letter}{at + 1}" for at in range(len(query))) for letter in "qk")
    inputs = [make_table("query", query, names), make_table("key", key, others), make_table("value", value, others)]
    return Walkthrough(TITLE, (*inputs, *state_tables(query, key, value, **options)))


def favor_walkthrough(
    query: Tensor, key: Tensor, value: Tensor, features: FavorPlus, what_if: WhatIf | None = None
) -> Walkthrough:
    """Attention by FAVOR+ features as tables, beside the exact weights of the same queries and keys.

    what_if: keys that are masked for all queries, in both.

    Shapes: query (M, D), key (N, D), value (N, Dv).
    """
    exact = walkthrough(query, key, value, what_if=what_if)
    query_features, key_features = features(query), features(key)
    above_0 = Relu()  # leaves the features as they are
    mapped = linear_walkthrough(query_features, key_features, value, feature_map=above_0, what_if=what_if)
    rows = [f"w{row}" for row in range(1, features.num_features + 1)]
    last = query[-1] * features.dim**-0.25
    exponent = f"{_text(features.matrix[0] @ last)} - {_text(last @ last / 2)}"
    example = f"exp({exponent}) / √{features.num_features} = {_text(query_features[-1, 0])}"
    names, others = exact["query"].rows, exact["key"].rows
    tables = (
        *exact.tables[:3],
        make_table("random_rows", features.matrix, rows),
        make_table("query_features", query_features, names, rows, wording="favor_query", example=example),
        make_table("key_features", key_features, others, rows, wording="favor_key"),
        *(table for table in mapped.tables if table.key in ("scores", "mask", "masked_scores")),
        exact_table(exact["exponentials"]),
        mapped["weights"],
        exact_table(exact["weights"]),
        mapped["context"],
        exact_table(exact["context"]),
    )
    return Walkthrough(TITLE, tables)


def mixture_walkthrough(
    query: Tensor, key: Tensor, value: Tensor, projection: LengthProjection, what_if: WhatIf | None = None
) -> Walkthrough:
    """softmax( Q (E K)ᵀ / √D ) (E V) of one head as tables, and the weight of each value beside the exact one.

    what_if: a change to the pairs of queries and mixtures.

    Shapes: query (M, D), key (N, D), value (N, Dv), projection of one head to `rank` mixtures.
    """
    with torch.no_grad():
        matrix = projection.weight[0, :, : len(key)]
        mixtures = [f"m{row}" for row in range(1, len(matrix) + 1)]
        keys, values = (projection(rows[None, None])[0, 0] for rows in (key, value))
        steps = walkthrough(query, keys, values, keys=mixtures, what_if=what_if)
        exact = walkthrough(query, key, value)
        weights = steps["weights"].numbers @ matrix.double()
    names, others = exact["query"].rows, exact["key"].rows
    example = matrix_example(steps["weights"].numbers, matrix.double(), weights, names, others)
    tables = (
        *exact.tables[:3],
        make_table("mixing_matrix", matrix, mixtures, others),
        make_table("mixed_key", keys, mixtures),
        make_table("mixed_value", values, mixtures),
        *(table for table in steps.tables if table.key in PAIRS),
        replace(steps["weights"], key="shares"),
        steps["context"],
        make_table("weights", weights, names, others, wording="mixture_weights", sums="rows", example=example),
        exact_table(exact["weights"]),
        exact_table(exact["context"]),
    )
    return Walkthrough(TITLE, tables)


def _text(number: Tensor) -> str:
    return number_text(float(number), 3)
