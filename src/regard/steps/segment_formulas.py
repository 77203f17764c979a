"""The formulas of the steps of SOFT and LARA, which read means of segments, over the tables before them, in float64."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .written_tables import Formula, WrittenTables


def _means(step: str) -> Formula:
    """The means of as many segments of equal length as the table has rows."""
    return lambda tables: tables[step].unflatten(0, (len(tables.at.rows), -1)).mean(1)


def _gaussian(left: Tensor, right: Tensor) -> Tensor:
    squares = (left.unsqueeze(1) - right).square().sum(-1)
    return (-squares / (2 * left.shape[-1] ** 0.5)).exp()


def _features(tables: WrittenTables) -> Tensor:
    key = tables["key"]
    return (tables["samples"] @ key.T - key.square().sum(-1) / 2).exp()


def _own_shares(tables: WrittenTables) -> Tensor:
    samples = tables["samples"]
    return 1 / (-(samples.unsqueeze(1) - samples).square().sum(-1) / 2).exp().sum(-1).unsqueeze(0)


def _factors(tables: WrittenTables) -> Tensor:
    near = tables["nearness"]
    return tables["sample_densities"] + near - near.mean(-1, keepdim=True)


def _parts(tables: WrittenTables) -> Tensor:
    samples, totals = tables["samples"], tables["sample_exponentials"].sum(-1)
    return tables["sample_factors"] * (tables["query"] @ samples.T - samples.square().sum(-1) / 2).exp() * totals


def _over_sum(rows: Tensor) -> Tensor:
    return rows / rows.sum(-1, keepdim=True)


SEGMENT_FORMULAS: Mapping[str, Formula] = {
    "landmarks": _means("query"),
    "landmark_kernel": lambda tables: _gaussian(tables["query"], tables["landmarks"]),
    "kernel_of_landmarks": lambda tables: _gaussian(tables["landmarks"], tables["landmarks"]),
    "inverse_kernel": lambda tables: torch.linalg.inv(tables["kernel_of_landmarks"]),
    "gathered_values": lambda tables: tables["landmark_kernel"].T @ tables["value"],
    "mixed_values": lambda tables: tables["inverse_kernel"] @ tables["gathered_values"],
    "landmark_context": lambda tables: tables["landmark_kernel"] @ tables["mixed_values"],
    "landmark_weights": lambda tables: (
        tables["landmark_kernel"] @ tables["inverse_kernel"] @ tables["landmark_kernel"].T
    ),
    "gaussian_weights": lambda tables: _gaussian(tables["query"], tables["query"]),
    "gaussian_context": lambda tables: tables["gaussian_weights"] @ tables["value"],
    "query_means": _means("query"),
    "key_means": _means("key"),
    "samples": lambda tables: tables["query_means"] + tables["key_means"],
    "sample_exponentials": _features,
    "sample_weights": lambda tables: _over_sum(tables["sample_exponentials"]),
    "sample_contexts": lambda tables: tables["sample_weights"] @ tables["value"],
    "nearness": lambda tables: (tables["query"] @ tables["query_means"].T).softmax(-1),
    "sample_densities": _own_shares,
    "sample_factors": _factors,
    "sample_parts": _parts,
    "sample_shares": lambda tables: _over_sum(tables["sample_parts"]),
    "sample_mixture": lambda tables: tables["shares"] @ tables["sample_contexts"],
    "sample_mixture_weights": lambda tables: tables["shares"] @ tables["sample_weights"],
}
"""By the name of the wording whose formula a table has."""
