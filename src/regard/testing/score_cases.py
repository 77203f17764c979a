"""The scores of cases: softcap(f(q, k)) as their papers write it, and additive ones as fast code computes them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .case_inputs import SCALE, SOFTCAP, Inputs

Leaves = Mapping[str, Tensor]


def wide(tensor: Tensor) -> Tensor:
    """Half precision as float32."""
    return tensor.float() if tensor.dtype.itemsize == 2 else tensor


def scores_of(
    inputs: Inputs,
    leaves: Leaves,
    query: Tensor,
    key: Tensor,
    columns: Tensor | None = None,
    *,
    widened: bool = False,
    again: bool = False,
) -> Tensor:
    """softcap(f(q, k)) of queries (..., M, Dq) and keys (..., A, Dk), which stand at the indices `columns`.

    widened: what is projected is in the dtype at hand, and all else in float32 at least. again: in another way, which
    rounds anew: sums go backwards, and additive scores are Σ w - 2 Σ w / (1 + e^2x · e^2y), for
    tanh(x + y) = 1 - 2 / (1 + e^2x · e^2y).
    """
    to = wide if widened else lambda tensor: tensor

    def product(query: Tensor, key: Tensor) -> Tensor:
        query, key = to(query), to(key)
        return query.flip(-1) @ key.flip(-1).mT if again else query @ key.mT

    match inputs.case.score:
        case "dot":
            scores = product(query, key)
        case "default" | "scaled":
            given = inputs.case.score == "scaled" or inputs.case.variant == "scale"
            scores = product(query, key) * (SCALE if given else 1 / math.sqrt(query.shape[-1]))
        case "general":
            scores = product(query @ leaves["score.weight"], key)
        case "additive" | "concat":
            scores = (_by_exponentials if again else _by_tanh)(inputs, leaves, query, key, to)
        case "location":
            scores = to(query @ leaves["score.weight"].T)
            scores = scores[..., : key.shape[-2]] if columns is None else scores[..., columns]
        case other:
            raise ValueError(f"the formula has no score {other!r}")
    return SOFTCAP * torch.tanh(scores / SOFTCAP) if "softcap" in inputs.case.variant else scores


def _by_tanh(inputs: Inputs, leaves: Leaves, query: Tensor, key: Tensor, to: Callable) -> Tensor:
    """Σ w · tanh(W · query + U · key), or Σ w · tanh(W · [query; key]): (..., M, A)."""
    if inputs.case.score == "additive":
        asked, asking = to(query @ leaves["score.query_weight"].T), to(key @ leaves["score.key_weight"].T)
        return torch.tanh(asked.unsqueeze(-2) + asking.unsqueeze(-3)) @ to(leaves["score.weight"])
    size = (*query.shape[:-1], key.shape[-2], -1)
    joined = torch.cat([query.unsqueeze(-2).expand(size), key.unsqueeze(-3).expand(size)], dim=-1)
    return torch.tanh(to(joined @ leaves["score.matrix"].T)) @ to(leaves["score.weight"])


def _by_exponentials(inputs: Inputs, leaves: Leaves, query: Tensor, key: Tensor, to: Callable) -> Tensor:
    """The same from one exponential for each query and one for each key."""
    if inputs.case.score == "additive":
        of_query, of_key = leaves["score.query_weight"], leaves["score.key_weight"]
    else:
        of_query, of_key = leaves["score.matrix"].split([query.shape[-1], key.shape[-1]], dim=-1)
    asked, asking = (2 * to(query @ of_query.T)).exp(), (2 * to(key @ of_key.T)).exp()
    weight = to(leaves["score.weight"])
    return weight.sum() - 2 * ((1 + asked.unsqueeze(-2) * asking.unsqueeze(-3)).reciprocal() @ weight)
