"""LARA step by step: samples near segments of queries and keys, what each reads, and its share for each query."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..approximations import lara_attention
from ..approximations.nystrom import segment_means
from .hand_arithmetic import feature_names, matrix_example, named_cell, quotient_example, sum_example, telling_cell
from .landmark_steps import mean_example
from .step_table import StepTable, Walkthrough, exact_table, make_table
from .table_formats import factor_text, number_text
from .walkthrough import TITLE, walkthrough


def lara_walkthrough(query: Tensor, key: Tensor, value: Tensor, landmarks: int) -> Walkthrough:
    """LARA without noise as tables: samples, what each reads of the keys, its share for each query; and softmax.

    Context and weights are those of `regard.approximations.lara_attention`, in float64.

    Shapes: query (M, 1), key (N, 1), value (N, Dv): with one feature the scale is 1.
    """
    query, key, value = (rows.double() for rows in (query, key, value))
    exact = walkthrough(query, key, value)
    names, others, features = exact["query"].rows, exact["key"].rows, feature_names(value)
    means = segment_means(query, landmarks), segment_means(key, landmarks)
    drawn = means[0] + means[1]
    features_of_keys = (drawn @ key.mT - key.square().mT / 2).exp()
    totals = features_of_keys.sum(-1)
    weights = features_of_keys / totals.unsqueeze(-1)
    read = weights @ value
    tables = [
        *exact.tables[:3],
        *_sample_tables(query, key, means, features_of_keys, others),
        make_table(
            "sample_contexts",
            read,
            _names(drawn),
            example=matrix_example(weights, value, read, _names(drawn), features),
        ),
        *_share_tables(query, means[0], drawn, totals, names),
    ]
    shares = tables[-1].numbers
    context = lara_attention(query, key, value, landmarks=landmarks)
    mixed = lara_attention(query, key, torch.eye(len(key)).double(), landmarks=landmarks)
    tables += [
        make_table(
            *("context", context, names),
            wording="sample_mixture",
            example=matrix_example(shares, read, context, names, features),
        ),
        make_table(
            *("weights", mixed, names, others),
            wording="sample_mixture_weights",
            sums="rows",
            example=matrix_example(shares, weights, mixed, names, others),
        ),
        *(exact_table(exact[name]) for name in ("exponentials", "weights", "context")),
    ]
    return Walkthrough(TITLE, tuple(tables))


def _sample_tables(
    query: Tensor, key: Tensor, means: tuple[Tensor, Tensor], features: Tensor, keys: Sequence[str]
) -> list[StepTable]:
    """The means of queries and keys, the samples, and their features and weights of the keys."""
    centres, near = means
    drawn = centres + near
    samples = _names(drawn)
    weights = features / features.sum(-1, keepdim=True)
    half = key.square() / 2
    sample, column = cell = telling_cell(torch.stack([drawn @ key.mT, half.mT.expand_as(features)], -1))
    exponent = f"{factor_text(float(drawn[sample]))} · {factor_text(float(key[column]))} - {_text(half[column])}"
    return [
        make_table("query_means", centres, samples, example=mean_example(query, centres, samples)),
        make_table("key_means", near, samples, example=mean_example(key, near, samples)),
        make_table("samples", drawn, samples, example=sum_example(drawn, samples, ["1"], (centres,), (near,))),
        make_table(
            *("sample_exponentials", features, samples, keys),
            sums="rows",
            example=named_cell(f"exp({exponent}) = {_text(features[cell])}", cell, samples, keys),
        ),
        make_table(
            *("sample_weights", weights, samples, keys),
            sums="rows",
            example=quotient_example(features, weights, samples, keys),
        ),
    ]


def _share_tables(
    query: Tensor, centres: Tensor, drawn: Tensor, totals: Tensor, names: Sequence[str]
) -> list[StepTable]:
    """Nearness, densities, factors, parts and shares of the samples; totals: the sums of their exponentials, (C,)."""
    samples = _names(drawn)
    products = query @ centres.mT
    nearness = products.softmax(-1)
    densities = (-(drawn - drawn.mT).square() / 2).exp()
    own = 1 / densities.sum(-1)
    factors = own + nearness - nearness.mean(-1, keepdim=True)
    parts = factors * (query @ drawn.mT - drawn.square().mT / 2).exp() * totals
    shares = parts / parts.sum(-1, keepdim=True)
    others = " + ".join(_text(density) for density in densities[0])
    last = -1, -1
    alpha = f"{_text(own[-1])} + {_text(nearness[last])} - {_text(nearness[-1].mean())} = {_text(factors[last])}"
    exponent = f"{factor_text(float(drawn[-1]))} · {factor_text(float(query[-1]))} - {_text(drawn[-1].square() / 2)}"
    part = f"{_text(factors[last])} · exp({exponent}) · {_text(totals[-1])} = {_text(parts[last])}"
    cell = len(names) - 1, len(samples) - 1
    return [
        make_table(
            *("nearness", nearness, names, samples),
            sums="rows",
            example=quotient_example(products.exp(), nearness, names, samples),
        ),
        make_table("sample_densities", own, ["b"], samples, example=f"1 / ({others}) = {_text(own[0])}"),
        make_table("sample_factors", factors, names, samples, example=named_cell(alpha, cell, names, samples)),
        make_table("sample_parts", parts, names, samples, sums="rows", example=named_cell(part, cell, names, samples)),
        make_table(
            *("shares", shares, names, samples),
            wording="sample_shares",
            sums="rows",
            example=quotient_example(parts, shares, names, samples),
        ),
    ]


def _names(samples: Tensor) -> list[str]:
    return [f"ω{at + 1}" for at in range(len(samples))]


def _text(number: Tensor) -> str:
    return number_text(float(number), 3)
