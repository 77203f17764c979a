"""A layer of attention step by step: projections, each head, concatenation and output; and linear attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from torch import Tensor

from ..errors import ConfigurationError, DtypeError, ShapeError
from ..kernels.hooks import AttentionSubstitute, active_substitute
from ..linear.linear_arguments import LinearOptions
from ..linear.linear_weights import make_weights_problem
from ..nn import Attention
from ..utils.other_types import needs_tensor
from .captured_attention import CapturedAttention, captured_calls
from .step_table import StepTable, Walkthrough, make_table, relabelled
from .walkthrough import TITLE, HeadView, attention_tables
from .what_if import WhatIf


def layer_walkthrough(
    layer: Attention,
    query: Tensor,
    memory: Tensor | None = None,
    *,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    what_if: WhatIf | None = None,
) -> Walkthrough:
    """concat_h( softmax( Q_h K_hᵀ / √d ) V_h ) W_o of a layer as tables: input, projections, each head, output.

    The layer runs once, as it always does; queries, keys and values of each head are those that it computed. Keys of
    tables of head h have a prefix: `steps["head1.weights"]`; of a layer of one head they have none.

    Shapes: query (1, M, dim), memory (1, N, memory dim) of cross-attention; M and N at most 24.

    Args:
        layer: a `regard.nn.Attention`.
        query: (1, M, dim).
        memory: (1, N, memory dim), where keys and values come from another sequence.
        queries: names of the M queries.
        keys: names of the N keys.
        what_if: a change before the softmax, in all heads.

    Raises:
        ConfigurationError: another kind of layer; a layer with an output gate.
        DtypeError: a query that is no tensor.
        ShapeError: a batch of several sequences, or lengths that are too long to print.

    >>> import torch, regard
    >>> from regard.steps import layer_walkthrough
    >>> layer = regard.nn.Attention(regard.nn.Projections(4, num_heads=2, bias=False)).eval()
    >>> steps = layer_walkthrough(layer, torch.ones(1, 2, 4))
    >>> steps["head2.weights"].title.en
    'Head 2: Attention weights: softmax of each row'
    >>> steps["head2.weights"].numbers
    tensor([[0.5000, 0.5000],
            [0.5000, 0.5000]], dtype=torch.float64)
    """
    if not isinstance(layer, Attention):
        raise ConfigurationError(f"layer is a {type(layer).__name__}; its steps are known of regard.nn.Attention")
    if layer.gate is not None:
        raise ConfigurationError(
            "layer has an output gate, which the tables of its heads do not show: its steps are known without gate"
        )
    if refused := needs_tensor("query", query):
        raise DtypeError(refused)
    if query.ndim != 3 or len(query) != 1:
        raise ShapeError(f"query has the shape {tuple(query.shape)}; steps are those of one sequence, (1, length, dim)")
    captured = CapturedAttention({layer: "the layer"}, None, None, what_if)
    projections = layer.projections
    with (
        torch.no_grad(),
        captured_calls(output=projections.output) as calls,
        active_substitute(AttentionSubstitute(captured)),
    ):
        layer(query) if memory is None else layer(query, memory)
    heads, joined = projections.num_heads, calls["output"][0][0][0]
    views = [HeadView.of(captured.problem, head=head, queries=queries, keys=keys) for head in range(heads)]
    own, other = views[0].query_names, views[0].keys
    tables = [make_table("input", query[0], own)]
    if memory is not None:
        tables.append(make_table("memory", memory[0], other))
    tables += [_matrix(name, getattr(projections, name).weight) for name in ("query", "key", "value")]
    with torch.no_grad():
        for view in views:
            tables += _head_tables(layer, view, heads)
    tables += [
        make_table("concatenation", joined, own, parts=(joined.shape[-1] // heads,) * heads),
        _matrix("output", projections.output.weight),
        make_table("output", calls["output"][1][0], own),
    ]
    return Walkthrough(TITLE, tuple(tables))


def linear_walkthrough(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    head: int = 0,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    what_if: WhatIf | None = None,
    **options: Unpack[LinearOptions],
) -> Walkthrough:
    """Σ_j φ(q_i)·φ(k_j) v_j / Σ_j φ(q_i)·φ(k_j) of one head as tables: features, their products, weights, context.

    The features and weights are those of `regard.observe_linear_attention`, the context that of linear attention.

    Shapes: as `walkthrough`.

    Args:
        query: (..., heads, M, D).
        key: (..., key heads, N, D).
        value: (..., key heads, N, Dv).
        head: which head, of tensors that have heads.
        queries: names of the M queries.
        keys: names of the N keys.
        what_if: keys that are masked for all queries.
        options: as `regard.linear_attention` takes them.

    Raises:
        ConfigurationError, ShapeError: as `walkthrough` and `regard.observe_linear_attention`.

    >>> import torch, regard
    >>> from regard.steps import linear_walkthrough
    >>> steps = linear_walkthrough(torch.ones(1, 2), torch.eye(2), torch.eye(2), feature_map=regard.linear.Relu())
    >>> steps["weights"].numbers
    tensor([[0.5000, 0.5000]], dtype=torch.float64)
    """
    with torch.no_grad():
        problem = make_weights_problem(query, key, value, **options)
        problem = problem if what_if is None else what_if.apply(problem)
        view = HeadView.of(problem, head=head, queries=queries, keys=keys)
        tables = [
            make_table("query", view.of_queries(query), view.query_names),
            make_table("key", view.of_keys(key), view.keys),
            make_table("value", view.of_keys(value), view.keys),
            make_table("query_features", view.of_queries(problem.pairs.query), view.query_names),
            make_table("key_features", view.of_keys(problem.pairs.key), view.keys),
            *attention_tables(view),
        ]
    return Walkthrough(TITLE, tuple(tables))


def _head_tables(layer: Attention, view: HeadView, heads: int) -> list[StepTable]:
    """Query, key and value of one head, and its attention."""
    pairs = view.problem.pairs
    tables = [
        make_table("query", view.of_queries(pairs.query), view.query_names),
        make_table("key", view.of_keys(pairs.key), view.keys),
        make_table("value", view.of_keys(view.problem.value), view.keys),
        *attention_tables(view, layer.score),
    ]
    if heads == 1:
        return tables
    number, label = view.head + 1, {"en": f"Head {view.head + 1}", "ko": f"헤드 {view.head + 1}"}
    return [relabelled(table, f"head{number}.", label) for table in tables]


def _matrix(name: str, weight: Tensor) -> StepTable:
    """The matrix that rows are multiplied by from the right, dim × heads · head dim."""
    return make_table(f"{name}_projection", weight.T, [str(row) for row in range(1, weight.shape[1] + 1)])
