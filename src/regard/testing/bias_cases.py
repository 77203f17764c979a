"""The biases of cases: what each is made of, how the library says it, and what it means in plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import biases
from ..biases import Bias
from .random_tensors import Draw

Held = Mapping[str, Tensor]
BUCKETS, MAX_DISTANCE, BEFORE, AFTER, PERIOD = 8, 7, 2, 3, 3


@dataclass(frozen=True)
class Places:
    """Where queries and keys sit, (*batch, 1, M, 1) and (*batch, 1, 1, N), and whether there is a head axis."""

    query_at: Tensor
    key_at: Tensor
    headless: bool

    @property
    def distance(self) -> Tensor:
        """Key position - query position, (*batch, 1, M, N)."""
        return self.key_at - self.query_at


@dataclass(frozen=True)
class Adding:
    """One kind of bias: the tensors that it holds, the library's word for it, and the numbers that it means.

    The numbers broadcast to (*batch, heads, M, N).
    """

    hold: Callable[[Draw], dict[str, Tensor]]
    say: Callable[[Held, bool], Bias | Tensor]
    mean: Callable[[Held, Places], Tensor]


def _of_pairs(held: Held, places: Places) -> Tensor:
    bias = held["bias"]
    return bias.unsqueeze(-3) if places.headless and bias.ndim > 2 else bias


def _as_tensor(held: Held, headless: bool) -> Tensor:
    return held["bias"]


def _blocked(draw: Draw) -> dict[str, Tensor]:
    blocked = ~draw.coins(*draw.weights_shape)
    blocked[..., :1, :] = True
    return {"bias": draw.tensor(*draw.weights_shape).masked_fill(blocked, -math.inf)}


def _bell(held: Held, places: Places) -> Tensor:
    center = held["center"].unsqueeze(-2) if places.headless else held["center"]
    return -((places.key_at - center.unsqueeze(-1)) ** 2) / (2 * held["sigma"] ** 2)


def _sloped(held: Held, places: Places) -> Tensor:
    return -held["slopes"][:, None, None] * places.distance.abs()


def _bucketed(held: Held, places: Places) -> Tensor:
    """T5's rule, as Raffel et al. 2020 released it: half of the buckets for each side, half of these exact."""
    side = BUCKETS // 2
    exact, distance = side // 2, places.distance.abs()
    # Bucket exact + k begins where (distance/exact)^(side - exact) reaches (max_distance/exact)^k: in whole numbers.
    far = torch.zeros_like(distance)
    for k in range(1, side - exact):
        far += distance ** (side - exact) >= MAX_DISTANCE**k * exact ** (side - exact - k)
    bucket = torch.where(distance < exact, distance, exact + far) + side * (places.distance > 0)
    return _looked_up(held["table"], bucket)


def _clipped(held: Held, places: Places) -> Tensor:
    return _looked_up(held["table"], places.distance.clamp(-BEFORE, AFTER) + BEFORE)


def _periodic(held: Held, places: Places) -> Tensor:
    return _looked_up(held["table"], places.key_at.remainder(PERIOD))


def _looked_up(table: Tensor, column: Tensor) -> Tensor:
    """table[head, column], for columns (*batch, 1, M, N) or (M, N)."""
    head = torch.arange(len(table))[:, None, None]
    return table[head, column]


def _relative(held: Held, headless: bool) -> Bias:
    return biases.relative(held["table"], max_distance=MAX_DISTANCE)


def _mod(held: Held, headless: bool) -> Bias:
    table = held["table"]
    if headless:
        return biases.from_mod(lambda score, b, h, q, k: score + table[0, k % PERIOD])
    return biases.from_mod(lambda score, b, h, q, k: score + table[h, k % PERIOD], heads=len(table))


def _pairs(draw: Draw) -> dict[str, Tensor]:
    return {"bias": draw.tensor(draw.queries, draw.keys)}


def _slopes(draw: Draw) -> dict[str, Tensor]:
    return {"slopes": draw.tensor(draw.heads).abs() * 2 / draw.reach}


def _table(columns: int) -> Callable[[Draw], dict[str, Tensor]]:
    return lambda draw: {"table": draw.tensor(draw.heads, columns)}


def _say_alibi(held: Held, headless: bool) -> Bias:
    return biases.alibi(held["slopes"])


def _say_clipped(held: Held, headless: bool) -> Bias:
    return biases.clipped(held["table"], before=BEFORE, after=AFTER)


ADDING: dict[str, Adding] = {
    "pairs": Adding(_pairs, _as_tensor, _of_pairs),
    "heads": Adding(
        lambda draw: {"bias": draw.tensor(*draw.weights_shape[-3:-2][: draw.layout.heads], 1, draw.keys)},
        _as_tensor,
        _of_pairs,
    ),
    "blocked": Adding(_blocked, _as_tensor, _of_pairs),
    "gaussian": Adding(
        lambda draw: {
            "center": draw.tensor(*draw.weights_shape[:-1]) + draw.keys / 2,
            "sigma": (draw.tensor().abs() + 1) * draw.reach / 2,
        },
        lambda held, headless: biases.gaussian(held["center"], held["sigma"]),
        _bell,
    ),
    "slopes": Adding(_slopes, _say_alibi, _sloped),
    "relative": Adding(_table(BUCKETS), _relative, _bucketed),
    "clipped": Adding(_table(BEFORE + 1 + AFTER), _say_clipped, _clipped),
    "mod": Adding(_table(PERIOD), _mod, _periodic),
    "pairs+relative": Adding(
        lambda draw: _pairs(draw) | _table(BUCKETS)(draw),
        lambda held, headless: biases.tensor(held["bias"]) + _relative(held, headless),
        lambda held, places: _of_pairs(held, places) + _bucketed(held, places),
    ),
    "given": Adding(lambda draw: {"bias": draw.tensor(*draw.weights_shape)}, _as_tensor, _of_pairs),
    "given-table": Adding(_table(BUCKETS), _relative, _bucketed),
    "alibi": Adding(_slopes, _say_alibi, _sloped),
}
