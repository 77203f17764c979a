"""How the weights of a row follow from the products of its query with the keys."""

from __future__ import annotations

from dataclasses import dataclass

from .normalizer import Normalizer


@dataclass(frozen=True, eq=False, slots=True)
class RowWeights:
    """softmax( softcap(scale · q_i · k_j) + b_ij ), or the weights of another normalizer.

    softcap: c · tanh(score / c) of each score before the bias; None for none. normalizer: None for softmax.
    """

    scale: float
    softcap: float | None = None
    normalizer: Normalizer | None = None
