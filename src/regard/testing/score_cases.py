"""The scores of cases: softcap(f(q, k)) as in the papers, and additive scores as fast kernels compute them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .case_inputs import SCALE, SOFTCAP, Inputs

Leaves = Mapping[str, Tensor]


def widen(tensor: Tensor) -> Tensor:
    """Convert half precision to float32."""
    return tensor.float() if tensor.dtype.itemsize == 2 else tensor


def compute_scores(
    inputs: Inputs,
    leaves: Leaves,
    query: Tensor,
    key: Tensor,
    columns: Tensor | None = None,
    *,
    widened: bool = False,
    reordered: bool = False,
) -> Tensor:
    """softcap(f(q, k)) of queries (..., M, Dq) and of keys (..., A, Dk) at the indices `columns`: (..., M, A).

    widened: projections are computed in the dtype of the inputs, all else in float32 at least. reordered: computed in
    another order, with other rounding errors: sums run backwards, and additive scores are
    Σ w - 2 Σ w / (1 + e^2x · e^2y), from tanh(x + y) = 1 - 2 / (1 + e^2x · e^2y).
    """
    cast = widen if widened else lambda tensor: tensor

    def product(query: Tensor, key: Tensor) -> Tensor:
        query, key = cast(query), cast(key)
        return query.flip(-1) @ key.flip(-1).mT if reordered else query @ key.mT

    match inputs.case.score:
        case "dot":
            scores = product(query, key)
        case "default" | "scaled":
            has_scale = inputs.case.score == "scaled" or inputs.case.variant == "scale"
            scores = product(query, key) * (SCALE if has_scale else 1 / math.sqrt(query.shape[-1]))
        case "general":
            scores = product(query @ leaves["score.weight"], key)
        case "additive" | "concat":
            scores = (_by_exponentials if reordered else _by_tanh)(inputs, leaves, query, key, cast)
        case "location":
            scores = cast(query @ leaves["score.weight"].T)
            scores = scores[..., : key.shape[-2]] if columns is None else scores[..., columns]
        case other:
            raise ValueError(f"the oracle has no score {other!r}")
    return SOFTCAP * torch.tanh(scores / SOFTCAP) if "softcap" in inputs.case.variant else scores


def _by_tanh(inputs: Inputs, leaves: Leaves, query: Tensor, key: Tensor, cast: Callable) -> Tensor:
    """Σ w · tanh(W · query + U · key), or Σ w · tanh(W · [query; key]): (..., M, A)."""
    if inputs.case.score == "additive":
        query, key = cast(query @ leaves["score.query_weight"].T), cast(key @ leaves["score.key_weight"].T)
        return torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ cast(leaves["score.weight"])
    size = (*query.shape[:-1], key.shape[-2], -1)
    joined = torch.cat([query.unsqueeze(-2).expand(size), key.unsqueeze(-3).expand(size)], dim=-1)
    return torch.tanh(cast(joined @ leaves["score.matrix"].T)) @ cast(leaves["score.weight"])


def _by_exponentials(inputs: Inputs, leaves: Leaves, query: Tensor, key: Tensor, cast: Callable) -> Tensor:
    """The same scores from one exponential per query feature and one per key feature."""
    if inputs.case.score == "additive":
        query_matrix, key_matrix = leaves["score.query_weight"], leaves["score.key_weight"]
    else:
        query_matrix, key_matrix = leaves["score.matrix"].split([query.shape[-1], key.shape[-1]], dim=-1)
    query, key = (2 * cast(query @ query_matrix.T)).exp(), (2 * cast(key @ key_matrix.T)).exp()
    weight = cast(leaves["score.weight"])
    return weight.sum() - 2 * ((1 + query.unsqueeze(-2) * key.unsqueeze(-3)).reciprocal() @ weight)
