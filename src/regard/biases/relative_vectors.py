"""Vectors by distance that queries or keys are multiplied with: Shaw et al., Transformer-XL and DeBERTa."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..core.finite import all_finite, waits
from ..core.grid import Grid
from ..core.large_product import large_product
from ..core.problem import Problem
from ..core.score_forms import DotPairs, at_least_float32, zero_nonfinite
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, DtypeError, ShapeError
from .all_pairs import MAX_TABLES, AllPairs, pair_columns, scaled_product, score_scale, wide_key, wide_query
from .base import Bias, describe_tensor, is_floating
from .distance_index import ClippedDistances, DistanceIndex, EachDistance, LogBuckets, ReachedColumns
from .distance_products import DistanceProduct, sum_of_pairs
from .distance_tables import ContentBias, KeyTable, QueryTable, QueryVectors

MOST_COLUMNS, FEW_QUERIES = 1024, 64
"""The most distances of which each query has a number in memory, unless queries are few."""


@dataclass(frozen=True, eq=False, repr=False)
class RelativeKeys(ContentBias, AllPairs):
    """scale · query · vectors[head, clip(distance)]; see `shaw`."""

    vectors: Tensor
    index: ClippedDistances

    def bound(self, problem: Problem) -> Bias:
        query, scale = heads_side(self, problem, "query")
        return _by_query(problem, query, per_head_vectors(self, "vectors", self.vectors, problem) * scale, self.index)

    def of_pairs(self, problem: Problem, keep: Tensor | None) -> Tensor:
        return sum_of_pairs(problem, [DistanceProduct(wide_query(problem), self.vectors.float(), self.index)])

    def __repr__(self) -> str:
        return f"shaw({describe_tensor(self.vectors)}, before={self.index.before}, after={self.index.after})"


def shaw(vectors: Tensor, *, before: int, after: int) -> Bias:
    """Scale · q_i · a[clip(j - i, -before, after)]: a learned vector for each distance, added to the keys.

    The scale is that of the scores, 1/√D by default. Distances are *key position - query position*, in positions; row 0
    of the vectors is for keys `before` or more positions before the query, the last row for keys `after` or more after
    it, both ends included.

    Shapes: vectors (heads, before + 1 + after, D), or (1, ...) for all heads; gradients flow into them and into the
    queries. A query has before + 1 + after numbers in memory, not one for each key.

    Raises:
        DtypeError: the vectors are not floating point.
        ShapeError: the vectors are not (heads or 1, before + 1 + after, D), of the heads and the D of the queries.
        ConfigurationError: before or after is negative; an additive score.

    Source: Shaw et al. 2018 (arXiv 1803.02155), Eq. 4 and section 3.2 with before = after = k; the vectors are shared
    by the heads there. The vectors that Eq. 3 adds to the values are not part of a bias.

    >>> import torch, regard
    >>> q, k = torch.ones(1, 1, 3, 2), torch.zeros(1, 1, 3, 2)
    >>> vectors = torch.arange(3.0)[None, :, None].expand(1, 3, 2)
    >>> logits = regard.lenses.MaxLogit()
    >>> bias = regard.biases.shaw(vectors, before=1, after=1)
    >>> regard.observe(q, k, k, logits, bias=bias, scale=1.0)[logits].item()  # the key after the query: 1·2 + 1·2
    4.0
    """
    if before < 0 or after < 0:
        raise ConfigurationError(f"shaw needs distances of at least 0; before is {before} and after is {after}")
    index = ClippedDistances(before, after)
    _check_vectors("shaw", vectors, index.count, "before + 1 + after")
    return RelativeKeys(vectors, index)


@dataclass(frozen=True, eq=False, repr=False)
class Disentangled(ContentBias, AllPairs):
    """Content with position: scale · (q_i · keys[bucket] + k_j · queries[bucket]); see `deberta`."""

    keys: Tensor | None
    queries: Tensor | None
    index: LogBuckets

    def bound(self, problem: Problem) -> Bias:
        terms: list[Bias] = []
        if self.keys is not None:
            query, scale = heads_side(self, problem, "query")
            terms.append(
                _by_query(problem, query, per_head_vectors(self, "keys", self.keys, problem) * scale, self.index)
            )
        if self.queries is not None:
            key, scale = heads_side(self, problem, "key")
            vectors = per_head_vectors(self, "queries", self.queries, problem)
            vectors, index = _reached(problem, vectors, self.index)
            terms.append(KeyTable(large_product(key, vectors * scale), index))
        return terms[0] if len(terms) == 1 else terms[0] + terms[1]

    def of_pairs(self, problem: Problem, keep: Tensor | None) -> Tensor:
        products = []
        if self.keys is not None:
            products.append(DistanceProduct(wide_query(problem), self.keys.float(), self.index))
        if self.queries is not None:
            products.append(DistanceProduct(wide_key(problem), self.queries.float(), self.index, by_key=True))
        return sum_of_pairs(problem, products)

    def __repr__(self) -> str:
        given = {"keys": self.keys, "queries": self.queries}
        named = ", ".join(f"{name}={describe_tensor(each)}" for name, each in given.items() if each is not None)
        return f"deberta({named}, buckets={self.index.buckets}, max_distance={self.index.max_distance})"


def deberta(keys: Tensor | None, queries: Tensor | None, *, buckets: int = 256, max_distance: int = 512) -> Bias:
    """Scale · (q_i · K[δ(i, j)] + k_j · Q[δ(i, j)]): DeBERTa's content-to-position and position-to-content terms.

    K and Q are projections of the relative embeddings, by the layer's own maps of keys and queries where it shares
    them. δ is b + the bucket of *query position - key position*, from 0 to 2b - 1, for b buckets on each side:
    distances up to b/2 have a bucket each, those up to `max_distance` are divided by their logarithm, and the outer
    ones have all beyond. buckets=0: one for each distance, with b = max_distance.

    All scores of the paper have the scale 1/√(3D), or 1/√(2D) with one term: pass it as `scale` of the call.

    Shapes: keys and queries (heads or 1, 2b, D), either may be None; gradients flow into them, and into the content.

    Raises:
        DtypeError, ShapeError: tensors that are not as above.
        ConfigurationError: neither is given; buckets that are odd, or 2; a max_distance not above buckets / 2 + 1; an
            additive score.

    Source: He et al. 2021 (arXiv 2006.03654), Eq. 4; the buckets are those of the code released for DeBERTa-v2 and v3
    (config `position_buckets` and `max_relative_positions`), computed in whole numbers.

    >>> import torch, regard
    >>> table = torch.randn(2, 8, 16)
    >>> regard.biases.deberta(table, table, buckets=4, max_distance=16)
    deberta(keys=<float32 (2, 8, 16)>, queries=<float32 (2, 8, 16)>, buckets=4, max_distance=16)
    """
    if keys is None and queries is None:
        raise ConfigurationError("deberta needs keys=, queries= or both: without them there is nothing to add")
    if (
        max_distance < 1
        or buckets < 0
        or (buckets and (buckets % 2 or buckets < 4 or max_distance <= buckets // 2 + 1))
    ):
        raise ConfigurationError(
            f"deberta needs buckets of an even number from 4 on, or 0, and a max_distance above buckets / 2 + 1; it "
            f"has buckets={buckets} and max_distance={max_distance}"
        )
    index = LogBuckets(buckets, max_distance)
    for name, tensor in (("keys", keys), ("queries", queries)):
        if tensor is not None:
            _check_vectors(f"deberta({name}=)", tensor, index.count, "2 · buckets")
    return Disentangled(keys, queries, index)


@dataclass(frozen=True, eq=False, repr=False)
class ProjectedSinusoids(ContentBias, AllPairs):
    """scale · ((q_i + position_bias) · weight · sinusoid(i - j) + content_bias · k_j); see `transformer_xl`."""

    weight: Tensor
    content_bias: Tensor
    position_bias: Tensor

    def bound(self, problem: Problem) -> Bias:
        query, scale = heads_side(self, problem, "query")
        key, _ = heads_side(self, problem, "key")
        weight = per_head_vectors(self, "weight", self.weight, problem, of_last=False)
        content, position = (
            per_head_vectors(self, name, tensor.unsqueeze(-2), problem)
            for name, tensor in (("content_bias", self.content_bias), ("position_bias", self.position_bias))
        )
        low, high = _distance_range(problem)
        index = EachDistance(low, high - low + 1)
        vectors = sinusoids(-torch.arange(low, high + 1, device=query.device), weight.shape[-1]).to(weight.dtype)
        by_query = _by_query(problem, query + position, vectors @ (weight.mT * scale), index)
        return by_query + KeyTable(key @ (content.mT * scale), ClippedDistances(0, 0))

    def of_pairs(self, problem: Problem, keep: Tensor | None) -> Tensor:
        weight, content, position = self.weight.float(), self.content_bias.float(), self.position_bias.float()
        queries, keys, scale = problem.queries, problem.keys, score_scale(problem)
        projected = scaled_product(wide_query(problem) + position.unsqueeze(-2), weight)  # [..., H, M, E]
        by_distance = projected @ _scaled_waves(queries, keys, weight.shape[-1], scale)
        index = EachDistance(1 - keys, queries + keys - 1)
        columns = pair_columns(index, queries, keys, projected.shape[:-2], by_key=False)
        by_key = scaled_product(wide_key(problem), content.unsqueeze(-1), scale)
        return by_distance.gather(-1, columns.of_pairs) + by_key.mT

    def __repr__(self) -> str:
        return f"transformer_xl({describe_tensor(self.weight)})"


def transformer_xl(weight: Tensor, content_bias: Tensor, position_bias: Tensor) -> Bias:
    """Scale · (q_i · W r_{i-j} + u · k_j + w · W r_{i-j}): Transformer-XL's terms beside q_i · k_j.

    r_n = [sin(n f_0), sin(n f_1), ..., cos(n f_0), cos(n f_1), ...] with f_k = 10000^(-2k/E), n = *query position - key
    position*; u is content_bias, w position_bias. The scale is that of the scores, 1/√D by default. W r is computed
    once for each of the M + N - 1 distances, and multiplied with the queries tile by tile.

    Shapes: weight (heads, D, E), which projects the sinusoids to each head, E even; content_bias and position_bias
    (heads, D). Gradients flow into all, and into queries and keys.

    Raises:
        DtypeError, ShapeError: tensors that are not as above, or do not fit the queries.
        ConfigurationError: an additive score.

    Source: Dai et al. 2019 (arXiv 1901.02860), section 3.3, the terms (b), (c) and (d), whose R_{i-j} is r here;
    XLNet's are the same.

    >>> import torch, regard
    >>> regard.biases.transformer_xl(torch.zeros(2, 4, 8), torch.zeros(2, 4), torch.zeros(2, 4))
    transformer_xl(<float32 (2, 4, 8)>)
    """
    named = {"weight": (weight, 3), "content_bias": (content_bias, 2), "position_bias": (position_bias, 2)}
    for name, (tensor, axes) in named.items():
        if not is_floating(tensor):
            raise DtypeError(f"transformer_xl needs a floating-point {name}; it is {_kind(tensor)}")
        if tensor.ndim != axes:
            wanted = "(heads, D, E)" if axes == 3 else "(heads, D)"
            raise ShapeError(f"transformer_xl needs a {name} {wanted}; it has the shape {tuple(tensor.shape)}")
    if weight.shape[-1] % 2:
        raise ShapeError(f"transformer_xl needs an even E, sines and cosines; the weight is {tuple(weight.shape)}")
    return ProjectedSinusoids(weight, content_bias, position_bias)


def sinusoids(distances: Tensor, width: int) -> Tensor:
    """[sin(n f_k), ..., cos(n f_k), ...] with f_k = 10000^(-2k/width), from angles in float64: (L,) to (L, width)."""
    frequencies = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64, device=distances.device) / width)
    angles = distances.double()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)


@lru_cache(MAX_TABLES)
def _scaled_waves(queries: int, keys: int, width: int, scale: float) -> Tensor:
    """Sinusoids of all distances at default positions, from that of the last key to the first query on, as columns."""
    with torch.inference_mode(False):
        return (sinusoids(-torch.arange(1 - keys, queries), width) * scale).float().T.contiguous()


def _by_query(problem: Problem, query: Tensor, vectors: Tensor, index: DistanceIndex) -> Bias:
    """Query · vectors[index(distance)]: a table for each query where distances, or queries, are few."""
    vectors, index = _reached(problem, vectors, index)
    if index.count <= MOST_COLUMNS or problem.queries <= FEW_QUERIES:
        return QueryTable(large_product(query, vectors), index)
    return QueryVectors(query, vectors, index)


def _reached(problem: Problem, vectors: Tensor, index: DistanceIndex) -> tuple[Tensor, DistanceIndex]:
    """The vectors of the distances that a mask by distance leaves, and their index: half of them, if it is causal."""
    mask = problem.mask
    if mask is None or not mask.by_distance or problem.shift is None or under_transform() or waits(vectors):
        return vectors, index
    low, high = _distance_range(problem)
    away = torch.arange(low, high + 1, device=vectors.device)
    left = mask.evaluate(Grid(torch.zeros(1, dtype=torch.int64, device=vectors.device), away, heads=False))
    columns = index(away[left.reshape(-1, len(away)).any(0)])
    if not columns.numel():
        return vectors, index
    first, last = int(columns.min()), int(columns.max())
    if last - first + 1 == index.count:
        return vectors, index
    return vectors[..., first : last + 1, :], ReachedColumns(index, first, last - first + 1)


def heads_side(bias: Bias, problem: Problem, side: str) -> tuple[Tensor, float]:
    """Queries (..., heads, M, D), or keys repeated to as many heads, with 0 for what is not finite, and the scale.

    What is not finite comes into the scores by the product of query and key, where no mask hides it.
    """
    pairs = problem.pairs
    if not isinstance(pairs, DotPairs):
        raise ConfigurationError(
            f"{bias!r} multiplies the queries and keys of a dot product, and the score of this call is no such "
            "product: leave score out, or use scores.Dot, ScaledDot or General"
        )
    tensor = pairs.query if side == "query" else pairs.key
    if side == "key" and problem.heads and pairs.query.shape[-3] != tensor.shape[-3]:
        tensor = tensor.repeat_interleave(pairs.query.shape[-3] // max(tensor.shape[-3], 1), -3)
    readable = not (under_transform() or waits(tensor))
    if problem.mask is not None and not (readable and all_finite(tensor)):
        tensor = zero_nonfinite(tensor)
    return at_least_float32(tensor), pairs.scale


def per_head_vectors(bias: Bias, name: str, tensor: Tensor, problem: Problem, *, of_last: bool = True) -> Tensor:
    """A learned tensor (heads or 1, ·, D), or (heads or 1, D, ·), that fits the heads and the D of the queries."""
    query = problem.pairs.query
    heads, dim = query.shape[-3] if problem.heads else 1, query.shape[-1]
    own = tensor.shape[-1 if of_last else -2]
    if own != dim or tensor.shape[0] not in (1, heads):
        raise ShapeError(
            f"{name} of {bias!r} does not fit queries {tuple(query.shape)}: they have {heads} heads of {dim} features, "
            f"it is for {tensor.shape[0]} of {own}"
        )
    wide = at_least_float32(tensor).to(torch.promote_types(query.dtype, torch.float32))
    return wide if problem.heads else wide.squeeze(0)


def _distance_range(problem: Problem) -> tuple[int, int]:
    """The least and the largest distance of key and query."""
    if problem.shift is not None:
        low, high = 1 - problem.keys + problem.shift, problem.queries - 1 + problem.shift
        return low * problem.step, high * problem.step
    grid = problem.grid()
    query, key = grid.query_positions.long(), grid.key_positions.long()
    if not query.numel() or not key.numel():
        return 0, 0
    extremes = torch.stack([key.min() - query.max(), key.max() - query.min()]).tolist()
    return extremes[0], extremes[1]


def _check_vectors(maker: str, vectors: object, count: int, meaning: str) -> None:
    if not is_floating(vectors):
        raise DtypeError(f"{maker} needs floating-point vectors (heads, {meaning}, D); this is {_kind(vectors)}")
    if vectors.ndim != 3 or vectors.shape[1] != count or not vectors.shape[0]:
        raise ShapeError(
            f"{maker} needs vectors (heads, {count}, D), one for each of the {meaning} distances, or 1 in place of "
            f"the heads; these have the shape {tuple(vectors.shape)}"
        )


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else f"a {type(value).__name__}"
