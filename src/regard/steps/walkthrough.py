"""Attention of one head step by step, from query, key and value to the context, with the numbers of the kernels."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from ..attention import observe_problem, run_problem
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, DotPairs
from ..errors import ConfigurationError, ShapeError
from ..kernels.validation import AttentionOptions, make_problem
from ..lenses import Weights
from ..scores import General, Location, Score
from ..utils.numbers import whole_number
from .hand_arithmetic import feature_names, matrix_example, named_cell, product_example, quotient_example, telling_cell
from .step_table import StepTable, Walkthrough, make_table
from .table_formats import factor_text, number_text
from .what_if import WhatIf
from .wording import STEPS, Wording

MOST_POSITIONS = 24
"""Queries, and keys, that the steps are printed for: a table of more is no longer read."""
LARGEST_EXPONENTS = -5.0, 10.0
"""Bounds of a row's largest score whose exponential is printed as it is; outside of them it is subtracted before."""

TITLE = Wording("Attention, step by step", "어텐션, 한 단계씩")
SCORE_STEPS: dict[type, str] = {General: "general_scores", Location: "location_scores"}


def walkthrough(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    head: int = 0,
    batch: int = 0,
    rows: Sequence[int] | None = None,
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
    what_if: WhatIf | None = None,
    **options: Unpack[AttentionOptions],
) -> Walkthrough:
    """softmax( f(Q, K) + B, where M ) · V of one head as tables: inputs, scores, mask, weights, context.

    The numbers are those of `regard.attention`: scores come from the score, mask and bias from theirs, weights from the
    lens `regard.lenses.Weights`, and the context is what `regard.attention` returns without autograd, bit for bit.

    Shapes: query (..., heads, M, Dq), key (..., key heads, N, Dk), value (..., key heads, N, Dv), as `attention` takes
    them; M and N at most 24. Tables of pairs are (M, N), those of vectors (M, dim) or (N, dim).

    Args:
        query: (..., heads, M, Dq).
        key: (..., key heads, N, Dk).
        value: (..., key heads, N, Dv).
        head: which head, of tensors that have heads.
        batch: which element of the batch, counted over all batch dimensions.
        rows: the queries to print, by their index; all by default.
        queries: names of the M queries, such as words; q1, q2, ... by default.
        keys: names of the N keys; k1, k2, ... by default.
        what_if: a change before the softmax; `after.compared(before)` marks the numbers that differ.
        options: score, mask, bias, scale, softcap, sinks and positions, as `attention` takes them.

    Raises:
        ConfigurationError: a head, an element or a query that is not there, or dropout.
        ShapeError: more queries or keys than can be printed, or names that are not one for each of them; and the errors
            of `attention`.

    >>> import torch, regard
    >>> from regard.steps import walkthrough
    >>> query, key = torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 2.0], [1.0, 1.0]])
    >>> steps = walkthrough(query, key, torch.tensor([[4.0], [2.0]]), score=regard.scores.Dot())
    >>> steps.keys
    ('query', 'key', 'value', 'scores', 'exponentials', 'weights', 'weighted_values.1', 'context')
    >>> print(steps["weights"])
    Attention weights: softmax of each row    a_ij = exp(e_ij) / Σ_k exp(e_ik)
             k1     k2  sum
      q1  0.500  0.500    1
      by hand: 2.718 / (2.718 + 2.718) = 0.500
    >>> steps["context"].numbers
    tensor([[3.]], dtype=torch.float64)
    """
    if options.get("dropout_p"):
        raise ConfigurationError("dropout_p drops weights at random; the steps are those of evaluation: leave it out")
    score = options.get("score")
    with torch.no_grad():
        problem = make_problem(query, key, value, **options)
        if what_if is not None:
            problem = what_if.apply(problem)
            score = score if what_if.score is None else what_if.score
        view = HeadView.of(problem, head=head, batch=batch, rows=rows, queries=queries, keys=keys)
        tables = [
            make_table("query", view.of_queries(query), view.query_names),
            make_table("key", view.of_keys(key), view.keys),
            make_table("value", view.of_keys(value), view.keys),
            *_projections(score, query, key, view),
            *attention_tables(view, score if isinstance(score, Score) else None),
        ]
    return Walkthrough(TITLE, tuple(tables))


@dataclass(frozen=True, eq=False)
class HeadView:
    """One head of one element of a problem: cuts the head's matrices out of tensors of all heads, and names them."""

    problem: Problem
    head: int
    batch: int
    rows: tuple[int, ...]
    queries: tuple[str, ...]
    keys: tuple[str, ...]

    @classmethod
    def of(
        cls,
        problem: Problem,
        *,
        head: int = 0,
        batch: int = 0,
        rows: Sequence[int] | None = None,
        queries: Sequence[str] | None = None,
        keys: Sequence[str] | None = None,
    ) -> HeadView:
        """The view, with default names.

        Raises:
            ConfigurationError, ShapeError: as `walkthrough`.
        """
        _check_index("head", head, problem.weights_shape[-3] if problem.heads else 1)
        _check_index("batch", batch, problem.batch.numel())
        chosen = tuple(range(problem.queries) if rows is None else rows)
        for row in chosen:
            _check_index("row", row, problem.queries)
        for name, count in (("queries", len(chosen)), ("keys", problem.keys)):
            if not 0 < count <= MOST_POSITIONS:
                raise ShapeError(
                    f"there are {count} {name}; the steps are printed for 1 to {MOST_POSITIONS}: take a shorter "
                    f"sequence{', or choose some rows' if name == 'queries' else ''}"
                )
        return cls(
            problem,
            head,
            batch,
            chosen,
            _names("queries", queries, problem.queries),
            _names("keys", keys, problem.keys),
        )

    @property
    def query_names(self) -> tuple[str, ...]:
        """The names of the chosen queries."""
        return tuple(self.queries[row] for row in self.rows)

    def of_queries(self, tensor: Tensor) -> Tensor:
        """The rows of the chosen queries, of (..., heads, M, ·)."""
        return self.of_keys(tensor)[list(self.rows)]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """The matrix of this head, of (..., key heads, N, ·)."""
        problem = self.problem
        if problem.heads:
            group = problem.weights_shape[-3] // tensor.shape[-3]
            tensor = tensor[..., self.head // group, :, :]
        return tensor.expand(*problem.batch, *tensor.shape[-2:]).reshape(-1, *tensor.shape[-2:])[self.batch]

    def values(self, at: int) -> Tensor:
        """The values of a row's head, (N, Dv)."""
        return self.of_keys(self.problem.value)

    def sinks(self, sinks: Tensor) -> Tensor:
        """The sink of this head, of those of all heads."""
        return sinks[self.head]

    def of_pairs(self, tensor: Tensor) -> Tensor:
        """The chosen rows of this head's pairs, of what broadcasts to (..., heads, M, N)."""
        return self.of_queries(tensor.expand(self.problem.weights_shape))


class AllHeadsView(HeadView):
    """One query of all heads of a problem: where the view of a head has a row for each query, it has one for each head.

    Keys and values are those of the first head, but for `values`.
    """

    @classmethod
    def of_row(cls, view: HeadView) -> AllHeadsView:
        """All heads for the first row of the view of one head."""
        names = tuple(f"head{number + 1}" for number in range(view.problem.weights_shape[-3]))
        return cls(view.problem, 0, view.batch, view.rows[:1], names, view.keys)

    @property
    def query_names(self) -> tuple[str, ...]:
        """head1, head2, ..."""
        return self.queries

    def of_queries(self, tensor: Tensor) -> Tensor:
        """The query's row of each head, (heads, ·), of (..., heads, M, ·)."""
        heads = tensor.expand(*self.problem.batch, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])[self.batch]
        return heads[:, self.rows[0]]

    def values(self, at: int) -> Tensor:
        """The values of the head that a row is of."""
        return replace(self, head=at).of_keys(self.problem.value)

    def sinks(self, sinks: Tensor) -> Tensor:
        """The sinks of all heads."""
        return sinks


def attention_tables(view: HeadView, score: Score | None = None) -> list[StepTable]:
    """The tables from the scores to the context, of a problem whose projections are done."""
    problem, names = view.problem, view.query_names
    linear = problem.normalizer_name == "linear"
    tables = score_tables(view, score)
    scores = view.of_pairs(problem.scores())
    parts = scores if linear else None  # whose shares of their sum are the weights
    if problem.normalizer is None:
        tables.append(exponentials := _exponentials(view, scores))
        parts = exponentials.numbers
    weights = view.of_pairs(observe_problem(problem, [Weights()])[Weights()])
    context = view.of_queries(run_problem(problem).output)
    weighted = "linear_weights" if linear else "weights"
    if parts is None:
        weighted = known if (known := f"weights.{problem.normalizer_name}") in STEPS else "normalizer_weights"
    tables.append(
        make_table(
            "weights",
            weights,
            names,
            view.keys,
            wording=weighted,
            sums="rows",
            example="" if parts is None else quotient_example(parts, weights, names, view.keys),
        )
    )
    tables += [
        make_table(
            f"weighted_values.{row + 1}",
            weights[at].unsqueeze(-1) * view.values(at),
            view.keys,
            wording="weighted_values",
            fill=names[at],
            sums="columns",
        )
        for at, row in enumerate(view.rows)
    ]
    products = torch.stack([weights[at].unsqueeze(-1) * view.values(at) for at in range(len(names))])
    row, column = telling_cell(products.transpose(-1, -2))
    example = product_example(weights[row], view.values(row)[:, column], context[row, column])
    example = named_cell(example, (row, column), names, feature_names(context))
    return [*tables, make_table("context", context, names, example=example)]


def score_tables(view: HeadView, score: Score | None = None) -> list[StepTable]:
    """The tables of the scores, before the mask and bias and with them."""
    return [*_scores(view, score), *_mask_and_bias(view)]


def _projections(score: object, query: Tensor, key: Tensor, view: HeadView) -> Iterator[StepTable]:
    """The matrices of a score, and queries and keys multiplied by them."""
    if not isinstance(score, Score):
        return
    for name, matrix in score.named_parameters():
        if matrix.ndim == 2:
            title = Wording(f"Matrix of the score: {name}", f"점수 함수의 행렬: {name}")
            rows = [str(row) for row in range(1, len(matrix) + 1)]
            yield replace(make_table(f"score.{name}", matrix, rows, wording="weight_matrix"), title=title)
    pairs = view.problem.pairs
    if pairs.query is not query:
        wording = "general_query" if isinstance(score, General) else None
        yield make_table("projected_query", view.of_queries(pairs.query), view.query_names, wording=wording)
    if pairs.key is not key and not isinstance(score, Location):  # whose keys are rows of its matrix
        yield make_table("projected_key", view.of_keys(pairs.key), view.keys)


def _scores(view: HeadView, score: Score | None) -> Iterator[StepTable]:
    """The scores, and what they are computed from, before mask and bias."""
    problem, names = view.problem, view.query_names
    pairs = problem.pairs
    if isinstance(pairs, AdditivePairs):
        yield from _additive_scores(view, pairs)
    elif isinstance(pairs, DotPairs):
        scores = view.of_pairs(replace(pairs, scale=1.0).scores())
        example = matrix_example(view.of_queries(pairs.query), view.of_keys(pairs.key).T, scores, names, view.keys)
        wording = SCORE_STEPS.get(type(score), "scores")
        if problem.normalizer_name == "linear":
            wording = "feature_products"
        yield make_table("scores", scores, names, view.keys, wording=wording, example=example)
        if pairs.scale != 1.0:
            scaled = view.of_pairs(pairs.scores())
            scale = factor_text(pairs.scale)
            cell = telling_cell(scaled.unsqueeze(-1))
            example = f"{factor_text(float(scores[cell]))} · {scale} = {number_text(float(scaled[cell]), 3)}"
            example = named_cell(example, cell, names, view.keys)
            yield make_table("scaled_scores", scaled, names, view.keys, fill=scale, example=example)
    else:
        yield make_table("scores", view.of_pairs(pairs.scores()), names, view.keys, wording="feature_products")
    if problem.softcap is not None:
        capped = view.of_pairs(replace(problem, mask=None, bias=None).scores())
        yield make_table("capped_scores", capped, names, view.keys)


def _additive_scores(view: HeadView, pairs: AdditivePairs) -> Iterator[StepTable]:
    """For each query W q + U k_j and its tanh; v, and the scores."""
    units = torch.eye(len(pairs.weight), dtype=pairs.weight.dtype, device=pairs.weight.device)
    queries, keys, names = view.of_queries(pairs.query), view.of_keys(pairs.key), view.query_names
    tanh = torch.stack([view.of_pairs(replace(pairs, weight=unit).scores()) for unit in units], -1)
    for at, row in enumerate(view.rows):
        yield replace(
            make_table(f"sum.{row + 1}", queries[at] + keys, view.keys, wording="sum"),
            title=Wording(f"Sums of {names[at]} and each key", f"{names[at]}: 각 키와의 합"),
        )
        yield make_table(f"tanh.{row + 1}", tanh[at], view.keys, wording="tanh")
    yield make_table("score_vector", pairs.weight, ["v"])
    scores = view.of_pairs(pairs.scores())
    cell = telling_cell(tanh * pairs.weight)
    example = named_cell(product_example(pairs.weight, tanh[cell], scores[cell]), cell, names, view.keys)
    yield make_table("scores", scores, names, view.keys, wording="additive_scores", example=example)


def _mask_and_bias(view: HeadView) -> Iterator[StepTable]:
    """The bias, the mask, and the scores with both."""
    problem, names = view.problem, view.query_names
    bias, keep = problem.bias_values(), problem.keep()
    keep = None if keep is None or bool(view.of_pairs(keep).all()) else keep
    if bias is not None:
        yield make_table("bias", view.of_pairs(bias), names, view.keys)
    if keep is not None:
        yield make_table("mask", view.of_pairs(keep), names, view.keys)
    if bias is not None or keep is not None:
        wording = "masked_scores" if bias is None else "biased_scores" if keep is None else "biased_and_masked_scores"
        yield make_table("masked_scores", view.of_pairs(problem.scores()), names, view.keys, wording=wording)


def _exponentials(view: HeadView, scores: Tensor) -> StepTable:
    """The exponentials of the scores, and of a sink if there is one."""
    columns, problem = view.keys, view.problem
    if problem.sinks is not None:
        sinks = view.sinks(problem.sinks).to(scores.dtype).expand(len(scores)).unsqueeze(-1)
        scores, columns = torch.cat([scores, sinks], -1), (*columns, "sink")
    largest = scores.amax(-1, keepdim=True)
    least, most = LARGEST_EXPONENTS
    shifted = bool((largest.isfinite() & ((largest < least) | (largest > most))).any())
    if shifted:
        scores = scores - largest.masked_fill(largest.isinf(), 0.0)
    wording = "shifted_exponentials" if shifted else "exponentials"
    return make_table("exponentials", scores.exp(), view.query_names, columns, wording=wording, sums="rows")


def _names(argument: str, names: Sequence[str] | None, count: int) -> tuple[str, ...]:
    if names is None:
        return tuple(f"{argument[0]}{number}" for number in range(1, count + 1))
    if isinstance(names, str) or len(names) != count:
        has = f"one text, {names!r}" if isinstance(names, str) else f"{len(names)} names"
        raise ShapeError(f"{argument} has {has}; it needs a list of {count}, one for each of the {argument}")
    return tuple(map(str, names))


def _check_index(name: str, index: int, count: int) -> None:
    whole_number(name, index, least=-sys.maxsize)
    if not 0 <= index < count:
        there = "there is one, 0" if count == 1 else f"there are {count}, 0 to {count - 1}"
        raise ConfigurationError(f"{name} is {index}; {there}")
