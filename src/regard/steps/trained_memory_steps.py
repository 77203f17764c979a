"""Memories that are trained as they read, step by step: error, gradient, update and reading of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..linear.momentum_memory import MomentumState, titans_attention, titans_attention_with_state
from ..linear.trained_state import ttt_attention
from .hand_arithmetic import feature_names, matrix_example, named_cell, sum_example, telling_cell
from .step_table import StepTable, Walkthrough, make_table
from .table_formats import factor_text, number_text
from .walkthrough import TITLE

EPSILON = 1e-30
"""Added to the variance of a layer norm: too small for any digit, so that whole numbers stay whole."""


@dataclass(frozen=True)
class MemoryRates:
    """Of Titans at all tokens: θ of a step, η of its momentum, and e^g, what the memory keeps."""

    rate: float
    momentum: float
    kept: float

    def of(self, count: int) -> dict[str, Any]:
        """The numbers of `count` tokens, as `regard.linear.titans_attention` takes them."""
        numbers = {"rate": self.rate, "momentum": self.momentum, "decay": math.log(self.kept)}
        return {name: torch.full((count,), number, dtype=torch.float64) for name, number in numbers.items()}


def titans_walkthrough(query: Tensor, key: Tensor, value: Tensor, rates: MemoryRates) -> Walkthrough:
    """Titans with a linear memory: of each token the error, the step Z with momentum and the memory W; then W q.

    Z and W are those of `regard.linear.titans_attention_with_state`, token by token, in float64.

    Shapes: query and key (N, D), value (N, Dv).
    """
    query, key, value = (rows.double() for rows in (query, key, value))
    empty = key.new_zeros(key.shape[-1], value.shape[-1])
    state, tables = MomentumState(empty, empty), _inputs(query, key, value)
    for at in range(len(key)):
        here, before = slice(at, at + 1), state
        _, state = titans_attention_with_state(query[here], key[here], value[here], **rates.of(1), state=before)
        tables += _titans_tables(key[here], value[here], before, state, rates, str(at + 1))
    context = titans_attention(query, key, value, **rates.of(len(key)))
    example = matrix_example(query[-1:], state.memory, context[-1:], [f"q{len(query)}"], feature_names(context))
    return Walkthrough(TITLE, (*tables, _readings("memory_reading", context, example)))


def _titans_tables(
    key: Tensor, value: Tensor, before: MomentumState, after: MomentumState, rates: MemoryRates, fill: str
) -> list[StepTable]:
    """Error, step and memory of one token, (1, D) and (1, Dv)."""
    names, rows, columns = [f"k{fill}"], feature_names(key), _value_names(value)
    read = key @ before.memory
    error = read - value
    rate, momentum, kept = (key.new_tensor(number) for number in (rates.rate, rates.momentum, rates.kept))
    less = sum_example(error, names, columns, (read,), less=(value,))
    step = sum_example(*(after.last_step, rows, columns, (momentum, before.last_step)), less=(rate, key.mT, error))
    sum_of_both = sum_example(after.memory, rows, columns, (kept, before.memory), (after.last_step,))
    return [
        make_table(f"error.{fill}", error, names, columns, wording="memory_error", fill=fill, example=less),
        make_table(f"step.{fill}", after.last_step, rows, columns, wording="memory_step", fill=fill, example=step),
        make_table(
            f"state.{fill}", after.memory, rows, columns, wording="memory_state", fill=fill, example=sum_of_both
        ),
    ]


def ttt_walkthrough(query: Tensor, key: Tensor, value: Tensor, initial: Tensor) -> Walkthrough:
    """TTT-Linear with the rate 1 and mini-batches of one token: prediction, error, gradient and weights of each; f(q).

    What queries read is that of `regard.linear.ttt_attention`, in float64.

    Shapes: query, key and value (N, D), initial (D, D).
    """
    query, key, value, weights = (rows.double() for rows in (query, key, value, initial))
    rows = feature_names(key)
    tables = [*_inputs(query, key, value), make_table("initial_model", weights, rows)]
    reads = []
    for at in range(len(key)):
        found = _ttt_tables(key[at : at + 1], value[at : at + 1], weights, str(at + 1))
        weights = found[-1].numbers
        tables += found
        reads.append(query[at] @ weights)
    products, norm = torch.stack(reads), {"norm_weight": key.new_ones(len(rows)), "norm_bias": key.new_zeros(len(rows))}
    rates = key.new_ones(len(key))
    context = ttt_attention(
        query, key, value, rate=rates, initial=initial.double(), **norm, mini_batch=1, epsilon=EPSILON
    )
    names = [f"q{at + 1}" for at in range(len(query))]
    example = sum_example(context, names, rows, (query,), (context - query,))
    tables += [
        make_table("model_products", products, names),
        _readings("model_reading", context, example),
    ]
    return Walkthrough(TITLE, tuple(tables))


def _ttt_tables(key: Tensor, value: Tensor, weights: Tensor, fill: str) -> list[StepTable]:
    """Product with the weights, its norm, error, gradient, and the weights after one token, all of shape (1, D)."""
    names, features = [f"k{fill}"], feature_names(key)
    product = key @ weights
    normed, deviation = standardized(product)
    error = key + normed - value
    slope = norm_gradient(error, normed, deviation)
    after = weights - key.mT @ slope
    said = {
        "product": (product, matrix_example(key, weights, product, names, features)),
        "normed": (normed, _normed_example(product, normed, deviation, names, features)),
        "error": (error, sum_example(error, names, features, (key,), (normed,), less=(value,))),
        "gradient": (slope, _gradient_example(error, normed, deviation, slope, names, features)),
    }
    tables = [
        make_table(f"{name}.{fill}", numbers, names, wording=f"model_{name}", fill=fill, example=example)
        for name, (numbers, example) in said.items()
    ]
    update = sum_example(after, features, features, (weights,), less=(key.mT, slope))
    return [*tables, make_table(f"model.{fill}", after, features, wording="model", fill=fill, example=update)]


def standardized(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows less their mean over their deviation, and that deviation, √(variance + ε), (..., 1)."""
    variance, mean = torch.var_mean(rows, -1, keepdim=True, correction=0)
    deviation = (variance + EPSILON).sqrt()
    return (rows - mean) / deviation, deviation


def norm_gradient(error: Tensor, normed: Tensor, deviation: Tensor) -> Tensor:
    """The gradient of ½ ‖k + LN(z) - v‖² in z, of the error k + LN(z) - v."""
    along = (error * normed).mean(-1, keepdim=True)
    return (error - error.mean(-1, keepdim=True) - along * normed) / deviation


def _normed_example(
    product: Tensor, normed: Tensor, deviation: Tensor, names: Sequence[str], columns: Sequence[str]
) -> str:
    cell = telling_cell(normed.unsqueeze(-1))
    example = (
        f"({_text(product[cell])} - {factor_text(float(product.mean()))}) / {_text(deviation)} = {_text(normed[cell])}"
    )
    return named_cell(example, cell, names, columns)


def _gradient_example(
    error: Tensor, normed: Tensor, deviation: Tensor, slope: Tensor, names: Sequence[str], columns: Sequence[str]
) -> str:
    cell = telling_cell(torch.stack([slope, error], -1))
    along = factor_text(float((error * normed).mean()))
    parts = f"{_text(error[cell])} - {factor_text(float(error.mean()))} - {along} · {factor_text(float(normed[cell]))}"
    return named_cell(f"({parts}) / {_text(deviation)} = {_text(slope[cell])}", cell, names, columns)


def _inputs(query: Tensor, key: Tensor, value: Tensor) -> list[StepTable]:
    return [
        make_table(name, rows, [f"{letter}{at + 1}" for at in range(len(rows))])
        for name, letter, rows in (("query", "q", query), ("key", "k", key), ("value", "k", value))
    ]


def _readings(wording: str, context: Tensor, example: str) -> StepTable:
    names = [f"q{at + 1}" for at in range(len(context))]
    return make_table("readings", context, names, wording=wording, example=example)


def _value_names(value: Tensor) -> list[str]:
    return [f"v{feature}" for feature in feature_names(value)]


def _text(number: Tensor) -> str:
    return number_text(float(number), 3)
