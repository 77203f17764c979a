"""The biases of cases: their tensors, the library's bias, and its values in plain index arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import biases
from ..biases import Bias
from .case_generator import CaseGenerator

Tensors = Mapping[str, Tensor]
BUCKETS, MAX_DISTANCE, BEFORE, AFTER, PERIOD = 8, 7, 2, 3, 3


@dataclass(frozen=True)
class PairPositions:
    """Positions of queries (*batch, 1, M, 1) and keys (*batch, 1, 1, N); `headless` if there is no head axis."""

    row_positions: Tensor
    column_positions: Tensor
    headless: bool

    @property
    def distance(self) -> Tensor:
        """Key position - query position, (*batch, 1, M, N)."""
        return self.column_positions - self.row_positions


@dataclass(frozen=True)
class BiasCase:
    """One kind of bias: draws its tensors, builds the library's bias, computes its values without the library.

    `values` broadcast to (*batch, heads, M, N). The second argument of `build` says that there is no head axis.
    """

    draw: Callable[[CaseGenerator], dict[str, Tensor]]
    build: Callable[[Tensors, bool], Bias | Tensor]
    values: Callable[[Tensors, PairPositions], Tensor]


def _pair_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    bias = tensors["bias"]
    return bias.unsqueeze(-3) if positions.headless and bias.ndim > 2 else bias


def _build_tensor(tensors: Tensors, headless: bool) -> Tensor:
    return tensors["bias"]


def _draw_blocked(draw: CaseGenerator) -> dict[str, Tensor]:
    blocked = ~draw.booleans(*draw.weights_shape)
    blocked[..., :1, :] = True
    return {"bias": draw.normal(*draw.weights_shape).masked_fill(blocked, -math.inf)}


def _gaussian_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    center = tensors["center"].unsqueeze(-2) if positions.headless else tensors["center"]
    return -((positions.column_positions - center.unsqueeze(-1)) ** 2) / (2 * tensors["sigma"] ** 2)


def _alibi_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    return -tensors["slopes"][:, None, None] * positions.distance.abs()


def _relative_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    """T5's buckets (Raffel et al. 2020): half for keys before, half for keys after; half of each exact distances."""
    side = BUCKETS // 2
    exact, distance = side // 2, positions.distance.abs()
    # Bucket exact + k begins where (distance/exact)^(side - exact) reaches (max_distance/exact)^k: in whole numbers.
    far = torch.zeros_like(distance)
    for k in range(1, side - exact):
        far += distance ** (side - exact) >= MAX_DISTANCE**k * exact ** (side - exact - k)
    bucket = torch.where(distance < exact, distance, exact + far) + side * (positions.distance > 0)
    return _gather_columns(tensors["table"], bucket)


def _clipped_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    return _gather_columns(tensors["table"], positions.distance.clamp(-BEFORE, AFTER) + BEFORE)


def _periodic_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    return _gather_columns(tensors["table"], positions.column_positions.remainder(PERIOD))


def _gather_columns(table: Tensor, column: Tensor) -> Tensor:
    """table[head, column], for columns (*batch, 1, M, N) or (M, N)."""
    head = torch.arange(len(table))[:, None, None]
    return table[head, column]


def _build_relative(tensors: Tensors, headless: bool) -> Bias:
    return biases.relative(tensors["table"], max_distance=MAX_DISTANCE)


def _build_mod(tensors: Tensors, headless: bool) -> Bias:
    table = tensors["table"]
    if headless:
        return biases.from_mod(lambda score, b, h, q, k: score + table[0, k % PERIOD])
    return biases.from_mod(lambda score, b, h, q, k: score + table[h, k % PERIOD], heads=len(table))


def _draw_pairs(draw: CaseGenerator) -> dict[str, Tensor]:
    return {"bias": draw.normal(draw.queries, draw.keys)}


def _draw_slopes(draw: CaseGenerator) -> dict[str, Tensor]:
    return {"slopes": draw.normal(draw.heads).abs() * 2 / draw.near_distance}


def _draw_table(columns: int) -> Callable[[CaseGenerator], dict[str, Tensor]]:
    return lambda draw: {"table": draw.normal(draw.heads, columns)}


def _build_alibi(tensors: Tensors, headless: bool) -> Bias:
    return biases.alibi(tensors["slopes"])


def _build_clipped(tensors: Tensors, headless: bool) -> Bias:
    return biases.clipped(tensors["table"], before=BEFORE, after=AFTER)


BIAS_CASES: dict[str, BiasCase] = {
    "pairs": BiasCase(_draw_pairs, _build_tensor, _pair_values),
    "heads": BiasCase(
        lambda draw: {"bias": draw.normal(*draw.weights_shape[-3:-2][: draw.layout.heads], 1, draw.keys)},
        _build_tensor,
        _pair_values,
    ),
    "blocked": BiasCase(_draw_blocked, _build_tensor, _pair_values),
    "gaussian": BiasCase(
        lambda draw: {
            "center": draw.normal(*draw.weights_shape[:-1]) + draw.keys / 2,
            "sigma": (draw.normal().abs() + 1) * draw.near_distance / 2,
        },
        lambda tensors, headless: biases.gaussian(tensors["center"], tensors["sigma"]),
        _gaussian_values,
    ),
    "slopes": BiasCase(_draw_slopes, _build_alibi, _alibi_values),
    "relative": BiasCase(_draw_table(BUCKETS), _build_relative, _relative_values),
    "clipped": BiasCase(_draw_table(BEFORE + 1 + AFTER), _build_clipped, _clipped_values),
    "mod": BiasCase(_draw_table(PERIOD), _build_mod, _periodic_values),
    "pairs+relative": BiasCase(
        lambda draw: _draw_pairs(draw) | _draw_table(BUCKETS)(draw),
        lambda tensors, headless: biases.tensor(tensors["bias"]) + _build_relative(tensors, headless),
        lambda tensors, positions: _pair_values(tensors, positions) + _relative_values(tensors, positions),
    ),
    "given": BiasCase(lambda draw: {"bias": draw.normal(*draw.weights_shape)}, _build_tensor, _pair_values),
    "given-table": BiasCase(_draw_table(BUCKETS), _build_relative, _relative_values),
    "alibi": BiasCase(_draw_slopes, _build_alibi, _alibi_values),
}
