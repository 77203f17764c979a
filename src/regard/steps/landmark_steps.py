"""SOFT step by step: a Gaussian kernel through landmarks, the means of segments."""

from __future__ import annotations

import torch
from torch import Tensor

from ..approximations import soft_attention
from ..approximations.gaussian_nystrom import gaussian_kernel
from ..approximations.nystrom import pseudo_inverse, segment_means
from .hand_arithmetic import feature_names, matrix_example, named_cell, telling_cell
from .step_table import StepTable, Walkthrough, make_table
from .table_formats import factor_text, number_text
from .walkthrough import TITLE

ITERATIONS = 20
"""Of the inverse, as `soft_attention` has it."""


def soft_walkthrough(query: Tensor, value: Tensor, landmarks: int) -> Walkthrough:
    """P A⁻¹ Pᵀ V as tables: landmarks, kernels P and A, the inverse, its products, and the exact Gaussian kernel.

    Context and weights are those of `regard.approximations.soft_attention`, in float64.

    Shapes: query (N, D), value (N, Dv).
    """
    query, value = query.double(), value.double()
    names, small = [f"q{at + 1}" for at in range(len(query))], [f"l{at + 1}" for at in range(landmarks)]
    features = feature_names(value)
    means = segment_means(query, landmarks)
    near, between = gaussian_kernel(query, means), gaussian_kernel(means, means)
    inverse = pseudo_inverse(between, ITERATIONS)
    gathered = near.mT @ value
    shared = inverse @ gathered
    context = soft_attention(query, value, landmarks=landmarks, iterations=ITERATIONS)
    weights = soft_attention(query, torch.eye(len(query)).double(), landmarks=landmarks, iterations=ITERATIONS)
    tables = [
        make_table("query", query, names),
        make_table("value", value, names),
        make_table("landmarks", means, small, example=mean_example(query, means, small)),
        make_table("landmark_kernel", near, names, small, example=_kernel_example(query, means, near, names, small)),
        *_landmark_tables(means, between, inverse, small),
        make_table(
            "gathered_values", gathered, small, example=matrix_example(near.mT, value, gathered, small, features)
        ),
        make_table("mixed_values", shared, small, example=matrix_example(inverse, gathered, shared, small, features)),
        make_table(
            *("context", context, names),
            wording="landmark_context",
            example=matrix_example(near, shared, context, names, features),
        ),
        make_table("weights", weights, names, names, wording="landmark_weights", sums="rows"),
        *_exact_tables(query, value, names),
    ]
    return Walkthrough(TITLE, tuple(tables))


def _landmark_tables(means: Tensor, between: Tensor, inverse: Tensor, names: list[str]) -> list[StepTable]:
    """The kernel of the landmarks, and its inverse."""
    (first, right), (below, last) = ([_text(number) for number in row] for row in between[:2, :2])
    determinant = f"{last} / ({first} · {last} - {right} · {below}) = {_text(inverse[0, 0])}"
    return [
        make_table(
            *("kernel_of_landmarks", between, names, names),
            example=_kernel_example(means, means, between, names, names),
        ),
        make_table("inverse_kernel", inverse, names, names, example=determinant if len(names) == 2 else ""),
    ]


def _exact_tables(query: Tensor, value: Tensor, names: list[str]) -> list[StepTable]:
    """The kernel of all pairs, and the context by it."""
    exact = gaussian_kernel(query, query)
    context = exact @ value
    return [
        make_table(
            *("gaussian_weights", exact, names, names),
            sums="rows",
            example=_kernel_example(query, query, exact, names, names),
        ),
        make_table(
            *("gaussian_context", context, names),
            example=matrix_example(exact, value, context, names, feature_names(value)),
        ),
    ]


def _kernel_example(rows: Tensor, columns: Tensor, kernel: Tensor, names: list[str], others: list[str]) -> str:
    """The first number of the kernel between rows that differ, of one feature."""
    differ = (rows - columns.mT).abs() * (kernel > 0)
    row, column = cell = telling_cell(differ.unsqueeze(-1))
    difference = f"{_text(rows[row, 0])} - {factor_text(float(columns[column, 0]))}"
    return named_cell(f"exp(-({difference})² / 2) = {_text(kernel[cell])}", cell, names, others)


def mean_example(rows: Tensor, means: Tensor, names: list[str]) -> str:
    """The first mean of the most rows that are not 0, of one feature and segments of equal length; "" for one row."""
    segments = rows[:, 0].unflatten(0, (len(means), -1))
    if segments.shape[1] == 1:
        return ""
    at = telling_cell(segments.unsqueeze(1))[0]
    terms = " + ".join(factor_text(float(number)) for number in segments[at])
    return named_cell(f"({terms}) / {segments.shape[1]} = {_text(means[at, 0])}", (at, 0), names, ["1"])


def _text(number: Tensor) -> str:
    return number_text(float(number), 3)
