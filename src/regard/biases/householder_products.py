"""PaTH: positions by products of reflections, one of each token between key and query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.broadcasting import broadcast_shapes
from ..core.finite import waits
from ..core.grid import Grid
from ..core.problem import Problem
from ..core.score_forms import at_least_float32
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, DtypeError, ShapeError
from .all_pairs import AllPairs, scaled_product, score_scale, wide_key, wide_query
from .base import Bias, describe_tensor, is_floating
from .distance_tables import ContentBias
from .relative_vectors import heads_side
from .row_bias import RowBias

if TYPE_CHECKING:
    from ..masks import Mask

CHUNK = 64
"""The keys whose product of reflections is computed once; products of whole chunks are D × D numbers each."""


@dataclass(frozen=True, eq=False, repr=False)
class ReflectedScores(RowBias):
    """scale · (k_j · H_j+1 … H_i q_i - k_j · q_i) with H_l = I - β_l w_l w_lᵀ; see `path`.

    Shapes, with C chunks of `CHUNK` keys: query (..., heads, M, D), key and vectors (..., heads, N, D), beta (...,
    heads, N, 1); end_keys (..., heads, C · CHUNK, D), the keys k H_j+1 … H_e up to the end of their chunk, and products
    (..., heads, C · D, D), H_s … H_e of each chunk.
    """

    query: Tensor
    key: Tensor
    vectors: Tensor
    beta: Tensor
    end_keys: Tensor
    products: Tensor
    scale: float
    mask: Mask | None

    def of_rows(self, grid: Grid, keep: Tensor | None) -> Tensor:
        query, places = self.query[..., grid.rows, :] * self.scale, _places(grid)
        first, end = _extremes(grid, places, self.key.shape[-2])
        coefficients, vectors = self._coefficients(query, places, slice(first, end))
        near = -coefficients @ _after(vectors @ self.key[..., first:end, :].mT)
        far = self._far(query, query - coefficients @ vectors, first)
        bias, columns = torch.cat([far, near], -1), grid.shape[1]
        return pad(bias, (0, columns - end)) if columns >= end else bias[..., :columns]

    def _coefficients(self, query: Tensor, places: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
        """C with q H_i … H_s = q - c W for keys s.. up to each query's own, and their vectors W.

        c_t = β_t w_t · (q - Σ_u>t c_u w_u): c (I + T) = β (q · w) for T_ut = β_t w_u · w_t, u > t.
        """
        vectors, beta = self.vectors[..., keys, :], self.beta[..., keys, :].mT  # [..., H, 1, n]
        reached = torch.arange(keys.start, keys.stop, device=query.device) <= places
        products = (query @ vectors.mT * beta).masked_fill(~reached, 0.0)
        system = (vectors @ vectors.mT * beta).tril(-1)
        return _solved(system, products, upper=False), vectors

    def _far(self, query: Tensor, moved: Tensor, end: int) -> Tensor:
        """The numbers for the keys 0..end-1, whole chunks, of queries that are moved to the key at `end`."""
        if not end:
            return query.new_zeros(*query.shape[:-1], 0)
        dim, chunks = query.shape[-1], []
        for number in range(end // CHUNK - 1, -1, -1):
            chunks.append(moved)
            moved = moved @ self.products[..., number * dim : (number + 1) * dim, :].mT
        stacked = torch.stack(chunks[::-1], -3)  # [..., H, chunks, m, D]
        scores = stacked @ self.end_keys[..., :end, :].unflatten(-2, (-1, CHUNK)).mT
        scores = scores.transpose(-2, -3).flatten(-2)  # [..., H, m, end]
        return scores - query @ self.key[..., :end, :].mT

    def __repr__(self) -> str:
        return f"products of reflections {describe_tensor(self.vectors)}"


@dataclass(frozen=True, eq=False, repr=False)
class Path(ContentBias, AllPairs):
    """Reflections of the tokens between key and query; see `path`."""

    vectors: Tensor
    beta: Tensor

    def bound(self, problem: Problem) -> Bias:
        keys = problem.grid().key_positions
        if not (under_transform() or waits(keys)) and bool((keys.diff() <= 0).any()):
            raise ConfigurationError(
                "path multiplies the reflections of the tokens between key and query in the order of the columns, and "
                "key_positions are not in ascending order: sort keys, values, vectors and positions"
            )
        (query, scale), (key, _) = (heads_side(self, problem, side) for side in ("query", "key"))
        vectors, beta = (_per_key(self, name, each, problem) for name, each in self._named())
        return ReflectedScores(query, key, vectors, beta, *_chunks(key, vectors, beta), scale, problem.mask)

    def of_pairs(self, problem: Problem, keep: Tensor | None) -> Tensor:
        heads, scale = problem.pairs.query.shape[1], score_scale(problem)
        vectors, beta = self.vectors.float(), self.beta.float().unsqueeze(-1)
        if not vectors.ndim == beta.ndim == 4 or not vectors.shape[1] == beta.shape[1] == heads:
            vectors, beta = (_per_key(self, name, each, problem) for name, each in self._named())
        weighted = (vectors * beta).mT
        products = scaled_product(wide_query(problem), weighted, -scale).tril_(problem.keys - problem.queries)
        between = scaled_product(vectors, wide_key(problem).mT).tril_(-1)
        # c (I + T) = β (q · w), as in `ReflectedScores`, of all tokens as one chunk.
        return _solved(scaled_product(vectors, weighted), products, upper=False) @ between

    def _named(self) -> list[tuple[str, Tensor]]:
        return [("vectors", self.vectors), ("beta", self.beta.unsqueeze(-1))]

    def __repr__(self) -> str:
        return f"path({describe_tensor(self.vectors)})"


def path(vectors: Tensor, beta: Tensor) -> Bias:
    """k_j · H_j+1 … H_i q_i in place of k_j · q_i, with H_l = I - β_l w_l w_lᵀ: positions of PaTH attention.

    Each token between the key and the query, the query's own too, turns the query by a reflection of its own: β = 2
    mirrors it at the plane across w, β = 1 takes the direction w out, β = 0 leaves it. As a bias it is what this adds
    to the scores, 0 for keys at or after the query, so that a causal mask is the caller's. Forget gates are added to
    it: `biases.path(w, beta) + biases.forget_gates(log_gates)` is PaTH-FoX.

    In the paper w is a projection of the token, convolved over the last tokens and divided by its norm, and β is twice
    the sigmoid of another one. Products of reflections are taken for chunks of 64 keys, by a triangular system. Under a
    causal mask, alone or with windows and masks of keys, the kernel `reflected` makes plain attention of the rest. With
    other masks the products are
    applied to a few rows of queries at a time from their own chunk backwards: memory is linear in the lengths, and the
    work is that of the scores plus D² numbers for each query and chunk.

    Shapes: vectors w (..., key heads, N, D) and beta (..., key heads, N), one for each key; heads, or 1, in place of
    the key heads. Gradients flow into both, and into queries and keys.

    Raises:
        DtypeError: not floating point.
        ShapeError: not one for each key, or of another D than the queries.
        ConfigurationError: keys in another order than their positions; an additive score.

    Source: Yang et al. 2025, PaTH Attention (arXiv 2505.16381), sections 3.1 and 3.2; chunks by the WY form of section
    3.3.

    >>> import torch, regard
    >>> k = torch.eye(2)[[0, 0, 0]][None, None]
    >>> w, beta = torch.eye(2)[[0, 0, 1]][None, None], torch.full((1, 1, 3), 2.0)
    >>> weights = regard.lenses.Weights()
    >>> options = {"mask": regard.masks.causal(), "bias": regard.biases.path(w, beta), "scale": 1.0}
    >>> regard.observe(k, k, k, weights, **options)[weights][0, 0]  # token 1 mirrors what came before it
    tensor([[1.0000, 0.0000, 0.0000],
            [0.1192, 0.8808, 0.0000],
            [0.0634, 0.4683, 0.4683]])
    """
    for name, each, axes in (("vectors", vectors, "keys, D"), ("beta", beta, "keys")):
        if not is_floating(each) or each.ndim < 2 - (name == "beta"):
            has = f"{each.dtype} {tuple(each.shape)}" if isinstance(each, Tensor) else f"a {type(each).__name__}"
            raise DtypeError(f"path needs floating-point {name} (..., heads, {axes}); it is {has}")
    return Path(vectors, beta)


def _per_key(bias: Path, name: str, tensor: Tensor, problem: Problem) -> Tensor:
    """Numbers of each key, (..., heads, N, ·), for the heads of the queries."""
    query = problem.pairs.query
    heads = query.shape[-3] if problem.heads else 1
    last = query.shape[-1] if name == "vectors" else 1
    own = tensor.shape[-3] if problem.heads and tensor.ndim > 2 else 1
    fits_batch = all(
        size in (1, of)
        for size, of in zip(
            reversed(tensor.shape[: -3 if problem.heads else -2]), reversed(problem.batch), strict=False
        )
    )
    most = len(problem.batch) + (3 if problem.heads else 2)
    if tensor.shape[-2:] != (problem.keys, last) or heads % max(own, 1) or not fits_batch or tensor.ndim > most:
        wanted = (*problem.batch, *([heads] if problem.heads else []), problem.keys, *([last] if last > 1 else []))
        has = tensor.shape if name == "vectors" else tensor.shape[:-1]
        raise ShapeError(
            f"{name} of {bias!r} has the shape {tuple(has)}; it needs {wanted}, one for each key, or the key heads, or "
            "1, in place of the heads"
        )
    wide = at_least_float32(tensor).to(torch.promote_types(query.dtype, torch.float32))
    if not problem.heads:
        return wide
    wide = wide.unsqueeze(0) if wide.ndim == 2 else wide
    return wide.repeat_interleave(heads // own, -3) if own > 1 else wide.expand(*wide.shape[:-3], heads, -1, -1)


def _chunks(key: Tensor, vectors: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The keys at the end of their chunk, (..., heads, C · CHUNK, D), and the product of each chunk, (..., C · D, D).

    A row x becomes x H_s … H_e = x - g W with g (I + U) = β (x · w), U_ut = β_t w_u · w_t for u < t.
    """
    ends, whole = _carried_behind(*(_in_chunks(each) for each in (key, vectors, beta)))
    return ends.flatten(-3, -2), whole.flatten(-3, -2)


def _in_chunks(tensor: Tensor) -> Tensor:
    """(..., N, ·) as (..., C, CHUNK, ·), with zeros behind the last."""
    behind = -tensor.shape[-2] % CHUNK
    if torch.compiler.is_exporting():  # of a single chunk a program would be for no more tokens than that
        behind = behind + CHUNK
    return pad(tensor, (0, 0, 0, behind)).unflatten(-2, (-1, CHUNK))


def _carried_behind(key: Tensor, vectors: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of chunks behind the last token of theirs, and the product of each chunk; see `_chunks`."""
    system = (vectors @ vectors.mT * beta.mT).triu(1)
    products = (key @ vectors.mT * beta.mT).triu(1)  # a key's own reflection is not between it and a query
    ends = key - _solved(system, products, upper=True) @ vectors
    identity = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
    return ends, identity - _solved(system, vectors.mT * beta.mT, upper=True) @ vectors


@dataclass(frozen=True, eq=False)
class ChunkedPath:
    """What chunks of `CHUNK` tokens have of a path, for the same queries and keys; the last one is filled with zeros.

    Shapes, for C chunks: near (..., C, CHUNK, CHUNK), numbers as of `ReflectedScores` for scale 1, within each chunk;
    queries (..., C, CHUNK, D), carried back to the first token of their chunk, H_s … H_i q_i; keys (..., C, CHUNK, D),
    carried behind the last, k_j H_j+1 … H_e; products (..., C, D, D).
    """

    near: Tensor
    queries: Tensor
    keys: Tensor
    products: Tensor

    @classmethod
    def of_tokens(cls, query: Tensor, key: Tensor, vectors: Tensor, beta: Tensor) -> ChunkedPath:
        """Of query, key and vectors (..., N, D), and beta (..., N, 1)."""
        query, key, vectors, beta = (_in_chunks(each) for each in (query, key, vectors, beta))
        gram = vectors @ vectors.mT * beta.mT
        coefficients = _solved(gram.tril(-1), (query @ vectors.mT * beta.mT).tril(), upper=False)
        near = -coefficients @ _after(vectors @ key.mT)
        keys, products = _carried_behind(key, vectors, beta)
        return cls(near, query - coefficients @ vectors, keys, products)


def carried_keys(before: Tensor, keys: Tensor, vectors: Tensor, beta: Tensor) -> Tensor:
    """Keys turned by all tokens after them, k_j H_j+1 … H_t, in the order of the keys: what decoding goes on from.

    Shapes: before (..., heads, N, D), turned up to the first of the new tokens; keys and vectors (..., heads, M, D) and
    beta (..., heads, M), of the new ones; the result (..., heads, N + M, D), in the dtype of `before`.
    """
    turned = before
    for start in range(0, keys.shape[-2], CHUNK):
        part = slice(start, start + CHUNK)
        own, w, weights = (each[..., part, :].to(before.dtype) for each in (keys, vectors, beta.unsqueeze(-1)))
        count, turned = own.shape[-2], torch.cat([turned, own], -2)
        products = turned @ w.mT * weights.mT
        later = torch.ones(count, count, dtype=torch.bool, device=own.device).triu(1)  # after the key itself
        products[..., -count:, :] = products[..., -count:, :].where(later, 0.0)
        turned = turned - _solved((w @ w.mT * weights.mT).triu(1), products, upper=True) @ w
    return turned


def _solved(system: Tensor, products: Tensor, *, upper: bool) -> Tensor:
    """X with X (I + system) = products, for a system that is strictly triangular."""
    if system.shape[:-2] != products.shape[:-2]:
        leading = broadcast_shapes(system.shape[:-2], products.shape[:-2])
        system, products = (each.expand(*leading, *each.shape[-2:]) for each in (system, products))
    return torch.linalg.solve_triangular(system, products, upper=upper, left=False, unitriangular=True)


def _after(pairs: Tensor) -> Tensor:
    """The pairs (t, j) of a square with t > j, the others 0."""
    return pairs.tril(-1)


def _places(grid: Grid) -> Tensor:
    """The number of the last key at or before each query's position, -1 where there is none: (..., m, 1)."""
    if grid.key_range is not None and grid.query_range is not None and grid.key_range.step == 1:
        first = grid.key_range.start - (grid.columns.start or 0)
        return grid.by_query(lambda positions: positions - first)
    has = grid.key_positions.long()

    def place(positions: Tensor) -> Tensor:
        batch = broadcast_shapes(positions.shape[:-1], has.shape[:-1])
        keys, queries = (each.expand(*batch, -1).contiguous() for each in (has, positions))
        return torch.searchsorted(keys, queries, right=True) - 1

    return grid.by_query(place)


def _extremes(grid: Grid, places: Tensor, keys: int) -> tuple[int, int]:
    """The first key of the chunk that the first of the queries is in, and the key behind that of the last one."""
    if not places.numel() or (grid.query_range is None and under_transform()):
        return 0, keys
    first, last = (max(min(int(each), keys - 1), 0) for each in places.aminmax())
    return first // CHUNK * CHUNK, last + 1
