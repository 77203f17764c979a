"""The formula of each step over the tables before it, in float64.

They are written out from the tables alone, so that a sheet is marked by what stands on it; the tests compare them with
what the kernels compute. A table has the formula of its wording: both have the same text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .exercise import step_of
from .recurrence_formulas import RECURRENCE_FORMULAS
from .segment_formulas import SEGMENT_FORMULAS
from .step_table import StepTable
from .wording import STEPS
from .written_tables import Formula as Formula
from .written_tables import WrittenTables


def formula_name(table: StepTable) -> str:
    """The name in `FORMULAS` of a table's formula, "" of one that has none there."""
    prefix, step = step_of(table.key)
    if prefix == "exact." or step == "scaled_scores":  # whose text has the scale in it
        return prefix + step if prefix == "exact." else step
    return _BY_TEXT.get(table.formula, "")


def projected(step: str, *, head: Callable[[WrittenTables], int] = lambda tables: tables.head) -> Formula:
    """X W of the columns of a head: its own of queries, those of its group of keys and values."""

    def formula(tables: WrittenTables) -> Tensor:
        rows = tables["memory"] if step != "query" and "memory" in tables else tables["input"]
        return rows @ tables[f"{step}_projection"][:, columns(step, tables, head(tables))]

    return formula


def columns(step: str, tables: WrittenTables, head: int) -> slice:
    """The columns of W that a head has."""
    width, dim = tables[f"{step}_projection"].shape[-1], tables.at.numbers.shape[-1]
    group = tables.heads // (width // dim)
    return slice(head // group * dim, (head // group + 1) * dim)


def turned(step: str, direction: int = 1, first: int = 0) -> Formula:
    """Rows (N, 2), each turned by a quarter for each position."""

    def formula(tables: WrittenTables) -> Tensor:
        rows = tables[f"unrotated_{step}"]
        angles = direction * math.pi / 2 * torch.arange(first, first + len(rows), dtype=rows.dtype)
        cos, sin = angles.cos().round(), angles.sin().round()
        return torch.stack([rows[:, 0] * cos - rows[:, 1] * sin, rows[:, 0] * sin + rows[:, 1] * cos], -1)

    return formula


def score_projection(tables: WrittenTables, step: str) -> Tensor:
    """W q and U k of a score."""
    rows = tables[step]
    if "score.weight" in tables:
        return rows @ tables["score.weight"].T
    if "score.matrix" in tables:
        matrix = tables["score.matrix"]
        return rows @ (matrix[:, : rows.shape[-1]] if step == "query" else matrix[:, -rows.shape[-1] :]).T
    return rows @ tables[f"score.{step}_weight"].T


def tanh_tables(tables: WrittenTables) -> Tensor:
    """The tanh of all queries, (M, N, units)."""
    return torch.stack([tables[key] for key in tables.steps.keys if key.startswith("tanh.")])


def with_bias_and_mask(tables: WrittenTables) -> Tensor:
    """Scores e + B where M, else -∞."""
    scores = tables.last_scores(masked=False)
    scores = scores + tables["bias"] if "bias" in tables else scores
    hidden = tables["mask"] == 0 if "mask" in tables else tables.at.numbers.isinf()
    return scores.masked_fill(hidden, -math.inf)


def with_sink(tables: WrittenTables, scores: Tensor) -> Tensor:
    """Exponentials exp(e), beside them the exponential of a sink where the table has one."""
    return torch.cat([scores.exp(), tables.steps[tables.at.key].numbers[:, scores.shape[-1] :]], -1)


def shares(parts: Tensor, count: int | None = None) -> Tensor:
    """Parts over the sum of their row; 0 in a row without any."""
    total = parts.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, parts[:, :count] / total)


def _softmax_weights(tables: WrittenTables) -> Tensor:
    return shares(tables["exponentials"], tables.at.numbers.shape[-1])


def _context(tables: WrittenTables) -> Tensor:
    if tables.at.key.startswith("hop"):
        exponentials = tables.steps[tables.at.key.replace("context", "exponentials")]
        return shares(tables["exponentials"]) @ tables.of_rows("value", exponentials.columns)
    return tables.attended("weights") @ tables.attended("value")


def _dot(tables: WrittenTables) -> Tensor:
    return tables.of_rows("query", tables.at.rows) @ tables.of_rows("key", tables.at.columns).T


def _joined(tables: WrittenTables) -> Tensor:
    heads = [key for key in tables.steps.keys if key.split(".")[-1] == "context"]
    return torch.cat([tables.numbers[key] for key in heads], -1)


def _standardized(rows: Tensor) -> Tensor:
    """Rows less their mean, over their standard deviation, with the ε of `torch.nn.LayerNorm`."""
    return (rows - rows.mean(-1, keepdim=True)) / (rows.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()


def _sparsemax(tables: WrittenTables) -> Tensor:
    """max(e - τ, 0), τ = (the sum of the k largest - 1) / k for the largest k whose k-th score is above it."""
    scores = tables.last_scores()
    ordered = scores.sort(-1, descending=True).values
    taus = (ordered.cumsum(-1) - 1) / torch.arange(1, scores.shape[-1] + 1)
    count = (ordered > taus).sum(-1, keepdim=True)
    return (scores - taus.gather(-1, count - 1)).clamp(min=0.0)


def _top_two(tables: WrittenTables) -> Tensor:
    scores = tables.last_scores()
    first = scores.argsort(dim=-1, descending=True, stable=True)[:, :2]  # of equal scores the earlier key's
    kept = torch.full_like(scores, -math.inf).scatter(-1, first, scores.gather(-1, first))
    return kept.softmax(-1)


def _stick_breaking(tables: WrittenTables) -> Tensor:
    taken = tables.last_scores().sigmoid()
    left = torch.ones_like(taken)
    for key in reversed(range(taken.shape[-1] - 1)):
        left[:, key] = left[:, key + 1] * (1 - taken[:, key + 1])
    return taken * left


def _linear_chain(tables: WrittenTables) -> Tensor:
    """The share of all choices z with z_j = 1; equal neighbours have a factor e."""
    scores = tables.last_scores()
    choices = torch.cartesian_prod(*[torch.tensor([0.0, 1.0])] * scores.shape[-1]).reshape(-1, scores.shape[-1])
    together = (choices[:, 1:] == choices[:, :-1]).sum(-1)
    masses = (scores.masked_fill(scores == -math.inf, -1e4) @ choices.T.to(scores.dtype) + together).softmax(-1)
    return masses @ choices.to(scores.dtype)  # regard: ignore[ATT901] of choices, and no values


def _dependency_trees(tables: WrittenTables, *, crossing: bool = True) -> Tensor:
    """The share of all trees in which i has the parent j, of the parents that lead from each word to a root.

    crossing: whether arcs may; that of a root begins before the first word.
    """
    scores = tables.last_scores()
    size = len(scores)
    parents = torch.cartesian_prod(*[torch.arange(size)] * size).reshape(-1, size)
    ends = parents
    for _ in range(size):
        ends = parents.gather(-1, ends)
    trees = parents[(parents.gather(-1, ends) == ends).all(-1)]
    if not crossing:
        trees = trees[~_cross(trees)]
    masses = scores[torch.arange(size), trees].sum(-1).softmax(0)
    return torch.einsum("t,tij->ij", masses, torch.nn.functional.one_hot(trees, size).to(masses.dtype))


def _cross(trees: Tensor) -> Tensor:
    """Whether any two arcs of trees (count, N) begin within each other, and end without."""
    words = torch.arange(trees.shape[-1]).expand_as(trees)
    parents = trees.masked_fill(trees == words, -1)
    first, last = torch.minimum(words, parents), torch.maximum(words, parents)
    within = (first.unsqueeze(-1) < first.unsqueeze(-2)) & (first.unsqueeze(-2) < last.unsqueeze(-1))
    return (within & (last.unsqueeze(-1) < last.unsqueeze(-2))).flatten(-2).any(-1)


def state_update(decay: float = 1.0, *, replaces: bool = False) -> Formula:
    """S_t of S_{t-1}, key and value; the last column is the sum of the keys where there is one."""

    def formula(tables: WrittenTables) -> Tensor:
        at = tables.index - 1
        key = (tables["key_features"] if "key_features" in tables else tables["key"])[at]
        value = tables["value"][at]
        written = torch.cat([value, value.new_ones(tables.at.numbers.shape[-1] - len(value))])
        if at == 0:
            return key.outer(written)
        before = tables[f"state.{at}"]
        written = written - before.T @ key if replaces else written
        return decay * before + key.outer(written)

    return formula


def _readings(tables: WrittenTables) -> Tensor:
    queries = tables["query_features"] if "query_features" in tables else tables["query"]
    dim = tables["value"].shape[-1]
    rows = []
    for at, query in enumerate(queries, start=1):
        read = tables[f"state.{at}"].T @ query
        rows.append(read[:dim] if len(read) == dim else torch.where(read[dim] == 0, 0.0, read[:dim] / read[dim]))
    return torch.stack(rows)


def _random_features(step: str) -> Formula:
    def formula(tables: WrittenTables) -> Tensor:
        rows, matrix = tables[step], tables["random_rows"]
        rows = rows * rows.shape[-1] ** -0.25
        return (rows @ matrix.T - rows.square().sum(-1, keepdim=True) / 2).exp() / math.sqrt(len(matrix))

    return formula


def _exact_exponentials(tables: WrittenTables) -> Tensor:
    return (tables["query"] @ tables["key"].T / math.sqrt(tables["query"].shape[-1])).exp()


def _tile(tables: WrittenTables) -> slice:
    """The columns of a tile of keys."""
    width = tables.steps["exponentials.1"].numbers.shape[-1]
    return slice((tables.index - 1) * width, tables.index * width)


def _maximum(tables: WrittenTables) -> Tensor:
    return tables["scores"][:, : _tile(tables).stop].amax(-1, keepdim=True)


def _running(tables: WrittenTables) -> Tensor:
    parts = tables[f"exponentials.{tables.index}"]
    added = torch.cat([parts.sum(-1, keepdim=True), parts @ tables["value"][_tile(tables)]], -1)
    if tables.index > 1:
        added = added + tables[f"shrink.{tables.index}"] * tables[f"running.{tables.index - 1}"][:, 1:]
    return torch.cat([_maximum(tables), added], -1)


def _last_running(tables: WrittenTables) -> Tensor:
    return tables[[key for key in tables.steps.keys if key.startswith("running.")][-1]]


def _hops(tables: WrittenTables, step: str) -> Tensor:
    """A table of all hops, (hops, rows, ·)."""
    keys = [key for key in tables.steps.keys if key.startswith("hop") and key.endswith(f".{step}")]
    return torch.stack([tables.numbers[key] for key in keys])


FORMULAS: Mapping[str, Formula] = {
    # Inputs of a head
    "query": lambda tables: projected("query")(tables),
    "key": lambda tables: projected("key")(tables),
    "value": lambda tables: projected("value")(tables),
    "positioned": lambda tables: tables["embeddings"] + tables["positions"],
    "rotated_query": turned("query"),
    "rotated_key": turned("key"),
    "plain_weights": lambda tables: (tables["embeddings"] @ tables["embeddings"].T).softmax(-1),
    # Scores
    "projected_query": lambda tables: score_projection(tables, "query"),
    "projected_key": lambda tables: score_projection(tables, "key"),
    "general_query": lambda tables: tables["query"] @ tables["score.weight"],
    "sum": lambda tables: tables["projected_query"][tables.index - 1] + tables["projected_key"],
    "tanh": lambda tables: tables[f"sum.{tables.index}"].tanh(),
    "additive_scores": lambda tables: tanh_tables(tables) @ tables["score_vector"][0],
    "scores": _dot,
    "general_scores": lambda tables: tables["projected_query"] @ tables["key"].T,
    "location_scores": lambda tables: (tables["query"] @ tables["score.weight"].T)[:, : len(tables["key"])],
    "scaled_scores": lambda tables: tables["scores"] / math.sqrt(tables["query"].shape[-1]),
    "masked_scores": with_bias_and_mask,
    "biased_scores": with_bias_and_mask,
    "biased_and_masked_scores": with_bias_and_mask,
    "centre": lambda tables: (
        tables["key"].shape[0]
        * ((tables["query"] @ tables["centre_projection"].T).tanh() @ tables["centre_vector"].T).sigmoid()
    ),
    # Weights and context
    "exponentials": lambda tables: with_sink(tables, tables.last_scores()),
    "weights": _softmax_weights,
    "weights.sparsemax": _sparsemax,
    "weights.top scores": _top_two,
    "weights.sigmoid": lambda tables: (tables.last_scores() - 1).sigmoid(),
    "weights.stick-breaking": _stick_breaking,
    "weights.linear-chain": _linear_chain,
    "weights.dependency-trees": _dependency_trees,
    "weights.projective-trees": lambda tables: _dependency_trees(tables, crossing=False),
    "weights.hash-collisions": lambda tables: (1 - tables.last_scores().clamp(-1, 1).arccos() / math.pi) ** 2,
    "context": _context,
    "concatenation": _joined,
    "output": lambda tables: tables["concatenation"] @ tables["output_projection"],
    # The rest of a Transformer block
    "residual": lambda tables: (
        tables["input"] + tables["output"]
        if tables.index == 1
        else tables[f"normalized.{tables.index - 1}"] + tables["feed_forward"]
    ),
    "normalized": lambda tables: _standardized(tables[f"residual.{tables.index}"]),
    "hidden": lambda tables: (tables["normalized.1"] @ tables["up_projection"]).clamp(min=0.0),
    "feed_forward": lambda tables: tables["hidden"] @ tables["down_projection"],
    # Decoders
    "concatenated": lambda tables: torch.cat([tables["context"], tables["query"]], -1),
    "attentional": lambda tables: (tables["concatenated"] @ tables["attentional_projection"].T).tanh(),
    "prediction": lambda tables: (tables["attentional"] @ tables["prediction_projection"].T).softmax(-1),
    "cell_input": lambda tables: torch.cat([tables["target_embedding"], tables["context"]], -1),
    "next_state": lambda tables: ((tables["cell_input"] @ tables["cell_projection"].T).tanh() + tables["query"]) / 2,
    # Linear attention, random features, mixtures of keys
    "query_features": lambda tables: tables["query"].clamp(min=0.0),
    "key_features": lambda tables: tables["key"].clamp(min=0.0),
    "favor_query": _random_features("query"),
    "favor_key": _random_features("key"),
    "feature_products": lambda tables: tables["query_features"] @ tables["key_features"].T,
    "linear_weights": lambda tables: shares(
        (tables["masked_scores"] if "masked_scores" in tables else tables["scores"]).clamp(min=0.0)
    ),
    "linear_state": state_update(),
    "decayed_state": state_update(0.5),
    "delta_state": state_update(replaces=True),
    "state_reading": _readings,
    "normalized_reading": _readings,
    "mixed_key": lambda tables: tables["mixing_matrix"] @ tables["key"],
    "mixed_value": lambda tables: tables["mixing_matrix"] @ tables["value"],
    "mixture_weights": lambda tables: tables["shares"] @ tables["mixing_matrix"],
    "exact.exponentials": _exact_exponentials,
    "exact.weights": lambda tables: shares(_exact_exponentials(tables)),
    "exact.context": lambda tables: tables["weights"] @ tables["value"],
    # Blocks of keys
    "online_exponentials": lambda tables: (tables["scores"][:, _tile(tables)] - _maximum(tables)).exp(),
    "online_shrink": lambda tables: (tables[f"running.{tables.index - 1}"][:, :1] - _maximum(tables)).exp(),
    "online_state": _running,
    "online_context": lambda tables: _last_running(tables)[:, 2:] / _last_running(tables)[:, 1:2],
    "online_lse": lambda tables: _last_running(tables)[:, :1] + _last_running(tables)[:, 1:2].log(),
    "weights_again": lambda tables: (tables["scores"] - tables["log_sum_exp"]).exp(),
    "log_sum_exp": lambda tables: tables["exponentials"].sum(-1, keepdim=True).log(),
    "merged_lse": lambda tables: _hops(tables, "log_sum_exp").logsumexp(0),
    "merge_shares": lambda tables: (_hops(tables, "log_sum_exp")[..., 0].T - tables["log_sum_exp"]).exp(),
    "merged_context": lambda tables: torch.einsum("qh,hqd->qd", tables["shares"], _hops(tables, "context")),
    **RECURRENCE_FORMULAS,
    **SEGMENT_FORMULAS,
}
"""By the name of the wording whose formula a table has."""
_BY_TEXT = {STEPS[name].formula: name for name in reversed(FORMULAS) if name in STEPS}
