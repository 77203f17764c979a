"""The coding exercises, in the order of the course: how the functions of each file are called, and the right result."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

from ..core.problem import Problem
from ..core.score_forms import AdditivePairs
from ..errors import ConfigurationError, nearest
from ..steps.wording import Wording
from ..testing import Case
from .code_mistakes import CODE_MISTAKES
from .coding_exercise import CodingExercise
from .formula_cases import FormulaCases
from .oracle_cases import Answer, OracleCases


def coding_exercise(name: str) -> CodingExercise:
    """The exercise of that name.

    Raises:
        ConfigurationError: there is none; the message has the nearest names.

    >>> print(coding_exercise("scaled-dot-product").template().splitlines()[-3])
        scores = ...  # 1: the scaled scores of all pairs, (..., M, N)
    """
    if name not in CODING_EXERCISES:
        raise ConfigurationError(f"there is no coding exercise {name!r}; {nearest(name, CODING_EXERCISES)}")
    return CODING_EXERCISES[name]


def _additive(names: Mapping[str, Any], problem: Problem) -> Tensor:
    pairs = cast(AdditivePairs, problem.pairs)
    scores = names["additive_scores"](pairs.query, pairs.key, pairs.weight)
    return scores.softmax(-1) @ problem.value


def _plain(function: str, *more: int) -> Answer:
    """The function of query, key and value."""
    return lambda names, problem: names[function](problem.pairs.query, problem.pairs.key, problem.value, *more)


def _multi_head(names: Mapping[str, Any], problem: Problem) -> Tensor:
    """The heads beside each other go in, and the result is cut into heads again."""
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    heads = query.shape[-3]
    rows = (tensor.transpose(-3, -2).flatten(-2) for tensor in (query, key, value))
    joined = names["multi_head"](*rows, heads)
    return joined.unflatten(-1, (heads, -1)).transpose(-3, -2)


def _cache(names: Mapping[str, Any], problem: Problem) -> Tensor:
    """One step for each word, with the cache of the step before."""
    rows, cache = [], None
    for at in range(problem.queries):
        step = (tensor[..., at : at + 1, :] for tensor in (problem.pairs.query, problem.pairs.key, problem.value))
        context, cache = names["decode_step"](*step, cache)
        rows.append(context)
    return torch.cat(rows, -2)


def _attentional(state: Tensor, annotations: Tensor, matrix: Tensor, combine: Tensor) -> Tensor:
    """tanh(W_c [c; s]) in its two parts, W_c c and W_c s."""
    scores = torch.einsum("...mh, ha, ...na -> ...mn", state, matrix, annotations)
    context = functional.softmax(scores, -1) @ annotations
    width = annotations.shape[-1]
    return torch.tanh(functional.linear(context, combine[:, :width]) + functional.linear(state, combine[:, width:]))


def _with_positions(embeddings: Tensor) -> Tensor:
    """A sine in even features and a cosine in odd ones, of the position over 10000^(2i / D)."""
    length, dim = embeddings.shape[-2:]
    features = torch.arange(dim)
    periods = 10000 ** ((features - features % 2).to(embeddings) / dim)
    angles = torch.arange(length)[:, None] / periods
    return embeddings + torch.where(features % 2 == 0, torch.sin(angles), torch.cos(angles))


def _rotated(rows: Tensor, positions: Tensor) -> Tensor:
    """Pairs as complex numbers, times e^(i · angle)."""
    half = rows.shape[-1] // 2
    frequencies = 10000 ** (-2 * torch.arange(half, dtype=rows.dtype) / rows.shape[-1])
    turns = torch.polar(torch.ones_like(frequencies), positions[:, None] * frequencies)
    turned = torch.complex(rows[..., :half], rows[..., half:]) * turns
    return torch.cat([turned.real, turned.imag], -1)


def _encoder_block(
    x: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """By torch's own attention, norm and network."""
    attended = functional.scaled_dot_product_attention(x @ query, x @ key, x @ value) @ output
    x = functional.layer_norm(x + attended, x.shape[-1:], eps=1e-5)
    return functional.layer_norm(x + functional.relu(x @ up) @ down, x.shape[-1:], eps=1e-5)


EYE = torch.eye(2)
LUONG = FormulaCases(
    "attentional_vector",
    _attentional,
    draws=tuple(
        {"state": (*batch, 5, 11), "annotations": (*batch, 7, 13), "matrix": (11, 13), "combine": (11, 24)}
        for batch in ((), (2, 3))
    ),
    small={
        "state": torch.tensor([[1.0, 0.0]]),
        "annotations": torch.tensor([[1.0, 1.0], [0.0, 1.0], [2.0, 0.0]]),
        "matrix": EYE,
        "combine": torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 1.0, -1.0]]),
    },
)
SINUSOIDAL = FormulaCases(
    "with_positions",
    _with_positions,
    draws=({"embeddings": (53, 22)}, {"embeddings": (2, 3, 17, 6)}, {"embeddings": (1, 2)}),
    small={"embeddings": torch.zeros(3, 4)},
)
ROTARY = FormulaCases(
    "rotate",
    _rotated,
    draws=(
        {"rows": (53, 22), "positions": torch.arange(53)},
        {"rows": (2, 3, 17, 6), "positions": torch.arange(100, 117)},
        {"rows": (3, 2), "positions": torch.tensor([4, 0, 2])},
    ),
    small={"rows": torch.tensor([[1.0, 1.0, 0.0, 0.0]]).repeat(3, 1), "positions": torch.arange(3)},
)
BLOCK = FormulaCases(
    "encoder_block",
    _encoder_block,
    draws=tuple(
        {
            "x": (*batch, 7, 13),
            "query": (13, 5),
            "key": (13, 5),
            "value": (13, 11),
            "output": (11, 13),
            "up": (13, 29),
            "down": (29, 13),
        }
        for batch in ((), (2, 3))
    ),
    small={
        "x": torch.tensor([[1.0, 0.0], [0.0, 2.0]]),
        **dict.fromkeys(("query", "key", "value", "output", "up"), EYE),
        "down": -EYE,
    },
)
SIZES = tuple(Case(layout=layout, lengths=lengths) for layout in ("2d", "4d") for lengths in ("5x7", "7x5", "1x7"))


TITLES: dict[str, dict[str, str]] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""By name and language; in a file of their own, which the command lists without loading torch."""


def _exercise(name: str, cases: OracleCases | FormulaCases) -> CodingExercise:
    return CodingExercise(name, Wording(**TITLES[name]), cases, CODE_MISTAKES[name])


_EXERCISES = (
    _exercise(
        "additive",
        OracleCases(
            tuple(
                Case(score="additive", layout=layout, lengths=size) for layout, size in (("2d", "5x7"), ("4d", "7x5"))
            ),
            _additive,
        ),
    ),
    _exercise("luong", LUONG),
    _exercise(
        "scaled-dot-product",
        OracleCases(SIZES, _plain("attention")),
    ),
    _exercise(
        "multi-head",
        OracleCases(tuple(Case(layout="4d", lengths=lengths) for lengths in ("5x7", "7x5", "5x5")), _multi_head),
    ),
    _exercise(
        "causal-mask",
        OracleCases(
            tuple(
                Case(mask="causal", layout=layout, lengths=size) for layout in ("2d", "4d") for size in ("5x5", "5x7")
            ),
            _plain("causal_attention"),
        ),
    ),
    _exercise("sinusoidal", SINUSOIDAL),
    _exercise("rotary", ROTARY),
    _exercise("transformer-block", BLOCK),
    _exercise(
        "online-softmax",
        OracleCases(
            tuple(Case(layout=layout, lengths=size) for layout in ("2d", "4d") for size in ("5x7", "7x5", "11x29")),
            _plain("tiled_attention", 3),
        ),
    ),
    _exercise(
        "grouped-query",
        OracleCases(
            tuple(Case(layout=layout) for layout in ("grouped", "multiquery", "4d", "5d")), _plain("grouped_attention")
        ),
    ),
    _exercise(
        "cache",
        OracleCases(tuple(Case(mask="causal", layout=layout, lengths="5x5") for layout in ("2d", "4d")), _cache),
    ),
)
CODING_EXERCISES: Mapping[str, CodingExercise] = {exercise.name: exercise for exercise in _EXERCISES}
"""The coding exercises by name, in the order of the course."""
