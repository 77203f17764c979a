"""Vectors by distance that are added to the values, as Shaw et al. have them beside those of the keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Unpack

import torch
from torch import Tensor

from .attention import attention, merge, run_problem
from .biases.all_pairs import MAX_TABLES
from .biases.base import is_floating
from .biases.distance_index import ClippedDistances
from .biases.distance_products import WeightedVectors, with_vectors
from .core.broadcasting import broadcast_shapes
from .core.grid import Grid
from .core.problem import Problem
from .core.score_forms import at_least_float32
from .core.torch_modes import no_mode_active
from .errors import ConfigurationError, DtypeError, ShapeError
from .kernels.hooks import current_hook, current_substitute, no_hook, refuse_few_positions
from .kernels.validation import AttentionOptions, make_problem
from .masks import Mask, causal, window
from .masks.base import Not
from .utils.numbers import whole_number

FEW_KEYS = 256
"""Up to so many keys, all weights of a query are in memory: one call takes less time than three."""

FEW_POSITIONS = (
    "relative_value_attention in ring.sharded would add the vectors of the keys of this process alone: leave the block "
    "for it, and pass it the whole sequence"
)


def relative_value_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    vectors: Tensor,
    *,
    before: int,
    after: int,
    kernel: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Σ_j w_ij (v_j + a[clip(j - i, -before, after)]): attention that adds a vector to each value, by distance.

    w are the weights of softmax attention with all its options; with `bias=biases.shaw(...)` this is all of Shaw et
    al. Weights do not depend on the vectors: `regard.observe` with the same options shows them.

    Distances are *key position - query position*, in positions; row 0 of the vectors is for keys `before` or more
    positions before the query, the last row for keys `after` or more after it, both ends included. Keys far before,
    near and far after are three softmaxes, which `merge` joins: no pair is computed twice, and
    memory is linear, with before + after numbers for each key and each query.

    Shapes: query (..., heads, M, D), key (..., key heads, N, D), value (..., key heads, N, Dv), vectors (heads,
    before + 1 + after, Dv), or (1, ...) for all heads; the output is (..., heads, M, Dv). Gradients flow into all.

    Args:
        query: as of `attention`.
        key: as of `attention`.
        value: as of `attention`.
        vectors: a.
        before: the distance from which on earlier keys share a vector.
        after: the same of later keys; 0 with a causal mask.
        kernel: as of `attention`, for each of the three.
        options: those of `attention`, softmax without a normalizer.

    Raises:
        DtypeError: the vectors are not floating point.
        ShapeError: the vectors are not (heads or 1, before + 1 + after, Dv).
        ConfigurationError: before or after is no whole number of at least 0; a normalizer.
        RegardError: as `attention`.

    Source: Shaw et al. 2018 (arXiv 1803.02155), Eq. 3 and section 3.2 with before = after = k; the vectors are shared
    by the heads there.

    >>> import torch, regard
    >>> zeros = torch.zeros(1, 1, 4, 1)
    >>> vectors = torch.tensor([[[100.0], [10.0], [1.0]]])  # two or more before, one before, the token itself
    >>> options = {"before": 2, "after": 0, "mask": regard.masks.causal()}
    >>> regard.relative_value_attention(zeros, zeros, zeros, vectors, **options).flatten() * torch.arange(1, 5)
    tensor([  1.,  11., 111., 211.])
    """
    if options.get("normalizer") is not None:
        raise ConfigurationError(
            "relative_value_attention joins its parts by the log-sum-exp of softmax, and normalizer is "
            f"{options.get('normalizer')!r}: leave it out"
        )
    if kernel is None and _is_small(query, key, value, options):
        _check(vectors, before, after, heads=query.shape[1], dim=value.shape[3])
        return _of_small_call(query, key, value, at_least_float32(vectors), ClippedDistances(before, after), options)
    problem = make_problem(query, key, value, wants_lse=True, **options)
    heads = problem.weights_shape[-3] if problem.heads else 1
    _check(vectors, before, after, heads=heads, dim=problem.value.shape[-1])
    per_head = at_least_float32(vectors if problem.heads else vectors.squeeze(0))
    if torch.compiler.is_compiling():
        return _added(problem, per_head, before, after, kernel)
    if current_substitute() is not None:  # it has whole rows of weights, and not those of three softmaxes
        refuse_few_positions(FEW_POSITIONS)
        return _of_few_keys(problem, per_head, before, after, kernel)
    if current_hook() is None:
        return _added(problem, per_head, before, after, kernel)
    run_problem(problem, kernel)  # for the hook, which is to see one attention, with the values as they are
    with no_hook():
        return _added(problem, per_head, before, after, kernel)


def _is_small(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> bool:
    """Whether tensors fit together, keys are few, and no option or hook is such that `attention` has no short way."""
    if torch.compiler.is_compiling() or not no_mode_active() or current_hook() or current_substitute():
        return False
    if not type(query) is type(key) is type(value) is Tensor or not query.ndim == key.ndim == value.ndim == 4:
        return False
    (batch, heads, queries, dim), (own_batch, shared, keys, _) = query.shape, value.shape
    fits = key.shape == (batch, shared, keys, dim) and batch == own_batch and shared > 0 == heads % max(shared, 1)
    small = fits and value.is_cpu and 0 < keys <= FEW_KEYS and 0 < queries <= FEW_KEYS
    return small and options.keys() <= {"mask", "bias", "scale"} and query.dtype is value.dtype


def _of_small_call(
    query: Tensor, key: Tensor, value: Tensor, vectors: Tensor, index: ClippedDistances, options: AttentionOptions
) -> Tensor:
    """The output as `_of_few_keys`, of attention at default positions that may be a repeated small call."""
    keys, dim = value.shape[2], value.shape[3]
    each = _ones_and_zeros(keys, value.dtype, value.shape[:2])
    output = at_least_float32(attention(query, key, torch.cat([value, each], -1), **options))
    weights, added = output.narrow(3, dim, keys), output.narrow(3, 0, dim)
    return with_vectors(WeightedVectors(weights, vectors.to(output.dtype), index, added)).to(value.dtype)


@lru_cache(MAX_TABLES)
def _ones_and_zeros(keys: int, dtype: torch.dtype, leading: torch.Size) -> Tensor:
    """The values (*leading, N, N) whose outputs are the weights by key."""
    with torch.inference_mode(False):
        return torch.eye(keys, dtype=dtype).expand(*leading, -1, -1)


def _added(problem: Problem, per_head: Tensor, before: int, after: int, kernel: str | None) -> Tensor:
    """The output, from all weights of few keys or from three softmaxes."""
    if problem.keys <= FEW_KEYS:
        return _of_few_keys(problem, per_head, before, after, kernel)
    sides, parts = _Sides(before, after), []
    for mask, column in sides.far():
        parts.append(_with_vector(_part(problem, mask), per_head[..., column, :].unsqueeze(-2), kernel))
    if sides.near:
        parts.append(_with_near_vectors(problem, sides, per_head[..., 1:-1, :], kernel))
    if problem.sinks is not None:
        output, lse = parts[0]
        parts.append((torch.zeros_like(output), problem.sinks.to(lse.dtype).unsqueeze(-1).expand_as(lse)))
    return merge(parts)[0].to(problem.value.dtype)


@dataclass(frozen=True)
class _Sides:
    """Which keys share a vector with all beyond, and which have one for their own distance."""

    before: int
    after: int

    @property
    def near(self) -> int:
        """The number of distances with a vector of their own."""
        return max(self.before + self.after - 1, 0)

    def far(self) -> Iterator[tuple[Mask | None, int]]:
        """The masks of the keys that share a vector, and which one."""
        if self.before == self.after == 0:
            yield None, 0
            return
        yield Not(self._not_before()), 0  # `~` of a mask cannot be traced by torch.compile
        yield Not(self._not_after()), -1

    def near_mask(self) -> Mask:
        """The other keys."""
        return self._not_before() & self._not_after()

    def _not_before(self) -> Mask:
        return window(before=self.before - 1) if self.before else Not(causal())

    def _not_after(self) -> Mask:
        return window(after=self.after - 1) if self.after else Not(window(before=0))

    def marks(self, grid: Grid, value: Tensor) -> Tensor:
        """1 in the column of a key's position modulo `near`, which no other of a query's near keys has: (N, near)."""
        columns = torch.arange(self.near, device=value.device)
        found = grid.per_batch(grid.key_positions.long().remainder(self.near).unsqueeze(-1) == columns)
        return found.to(value.dtype)

    def by_distance(self, grid: Grid, marked: Tensor) -> Tensor:
        """The weights of the near distances, in ascending order, from sums of the marks: both (..., M, near)."""
        first = torch.arange(1 - self.before, self.after, device=marked.device)
        places = grid.per_batch((grid.query_positions.long().unsqueeze(-1) + first).remainder(self.near))
        return marked.gather(-1, places.expand(marked.shape))


def _of_few_keys(problem: Problem, vectors: Tensor, before: int, after: int, kernel: str | None) -> Tensor:
    """The output from weights by key, which are the output for values of ones and zeros."""
    value, grid, dim = problem.value, problem.grid(), problem.value.shape[-1]
    each = torch.eye(problem.keys, dtype=value.dtype, device=value.device).expand(*value.shape[:-1], -1)
    output, _ = _run(replace(problem, value=torch.cat([value, each], -1)), kernel)
    weights = output[..., dim:]
    columns = (grid.key - grid.query).clamp(-before, after) + before
    sums = weights.new_zeros(*weights.shape[:-1], vectors.shape[-2])
    sums = sums.scatter_add(-1, columns.expand(weights.shape), weights)
    return (output[..., :dim] + sums @ vectors.to(sums.dtype)).to(value.dtype)


def _part(problem: Problem, mask: Mask | None) -> Problem:
    """The problem over the keys of another mask too; sinks are a part of their own."""
    both = problem.mask if mask is None else mask if problem.mask is None else problem.mask & mask
    return replace(problem, mask=both, sinks=None)


def _with_vector(part: Problem, vector: Tensor, kernel: str | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp with one vector (..., 1, Dv) added to all values."""
    value = part.value
    if part.dropout is None:
        output, lse = _run(part, kernel)
        kept = (lse != -torch.inf).to(output.dtype).unsqueeze(-1)  # weights sum to 1, or there is none
        return output + kept * vector, lse
    output, lse = _run(replace(part, value=torch.cat([value, torch.ones_like(value[..., :1])], -1)), kernel)
    return output[..., :-1] + output[..., -1:] * vector, lse


def _with_near_vectors(problem: Problem, sides: _Sides, vectors: Tensor, kernel: str | None) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of the near keys, each value with the vector of its distance, (..., near, Dv)."""
    part, grid, dim = _part(problem, sides.near_mask()), problem.grid(), problem.value.shape[-1]
    value, marks = problem.value, sides.marks(grid, problem.value)
    leading = broadcast_shapes(value.shape[:-1], marks.shape[:-1])
    marked = torch.cat([each.expand(*leading, -1) for each in (value, marks)], -1)
    output, lse = _run(replace(part, value=marked), kernel)
    return output[..., :dim] + sides.by_distance(grid, output[..., dim:]) @ vectors.to(output.dtype), lse


def _run(problem: Problem, kernel: str | None) -> tuple[Tensor, Tensor]:
    """Output, in float32 at least, and log-sum-exp."""
    result = run_problem(problem, kernel)
    if result.lse is None:
        raise AssertionError("a kernel chosen for a problem that wants the log-sum-exp gave none")
    return at_least_float32(result.output), result.lse


def _check(vectors: object, before: int, after: int, *, heads: int, dim: int) -> None:
    name = "relative_value_attention"
    for side, distance in (("before", before), ("after", after)):
        whole_number(f"{name}'s {side}", distance, least=0)
    count = before + 1 + after
    if not isinstance(vectors, Tensor) or not is_floating(vectors):
        has = vectors.dtype if isinstance(vectors, Tensor) else f"a {type(vectors).__name__}"
        raise DtypeError(f"{name} needs floating-point vectors (heads, before + 1 + after, Dv); this is {has}")
    if vectors.ndim != 3 or vectors.shape[0] not in (1, heads) or vectors.shape[1:] != (count, dim):
        raise ShapeError(
            f"{name} needs vectors ({heads}, {count}, {dim}), one for each of the before + 1 + after distances and of "
            f"the size of a value, or 1 in place of the heads; these have the shape {tuple(vectors.shape)}"
        )
