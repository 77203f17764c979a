"""What heads do with the tokens that one asks about: numbers for a few queries and keys, heads ranked by them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import AtlasError, ConfigurationError
from .atlas import Atlas, AttentionMap

Floats = NDArray[np.float32]
By: TypeAlias = Literal["weight", "contribution"]
Indices: TypeAlias = Sequence[int] | None

MOST_KEPT = 64
"""The most queries, and the most keys, that are asked about at a time."""
AT_ONCE = 2**20
"""The most weights that are computed together."""
MOST_LISTED = 4096
"""The most keys of a list of the largest weights."""


@dataclass(frozen=True, slots=True)
class RankedHead:
    """One head of a ranking: the index of its map in the atlas, its number, and what it is ranked by."""

    map: int
    head: int
    value: float


def rank_heads(
    atlas: Atlas,
    queries: Indices,
    keys: Indices,
    *,
    map: int = 0,  # noqa: A002
    by: By | Atlas | Mapping[tuple[str, int], float] = "weight",
) -> list[RankedHead]:
    """Order the heads that read the same tokens by one pair, a few, or one token: "which head resolves *it*?".

    Args:
        atlas: the record.
        queries: indices of rows; None for all.
        keys: indices of columns. The number of a head is the mean over the queries of the sum over the keys; without
            keys, the mean of each query's largest value.
        map: the index in `atlas.maps` of one map; others are asked where they are of the same tokens.
        by: "weight"; "contribution", weights times the norms of the values (Kobayashi et al. 2020, arXiv 2004.10102);
            another atlas, for the change since then, this one less that one (without keys: half the sum of the
            differences of each query's row, 0 to 1, whose sign is lost); or numbers by (name of module, head), such as
            effects, for which queries and keys do not count.

    Returns heads from the largest to the smallest, changes and given numbers by their absolute value; NaN, where no
    pair exists, and infinity, where a query attends to NaN, come last.

    Raises:
        AtlasError: there is no such map, row or column; no norms; another atlas of other lengths, or without the map.

    >>> import torch
    >>> from regard.explorer import Atlas, rank_heads
    >>> weights = torch.tensor([[[1.0, 0.0], [0.9, 0.1]], [[1.0, 0.0], [0.2, 0.8]]])
    >>> [(found.head, round(found.value, 2)) for found in rank_heads(Atlas.from_weights([weights]), [1], [0])]
    [(0, 0.9), (1, 0.2)]
    """
    if not 0 <= map < len(atlas.maps):
        raise AtlasError(f"the atlas has the maps 0 to {len(atlas.maps) - 1}; there is no map {map}")
    alike = [at for at, of in enumerate(atlas.maps) if _reads_the_same(of, atlas.maps[map])]
    if isinstance(by, Atlas):
        own = {at: _changes(atlas.maps[at], _counterpart(atlas.maps[at], by), queries, keys) for at in alike}
    elif isinstance(by, Mapping):
        own = {at: [by.get((of.name, head), math.nan) for head in range(of.heads)] for at, of in _maps(atlas, alike)}
    else:
        own = {at: kept_values(of, queries, keys, by).tolist() for at, of in _maps(atlas, alike)}
    found = [RankedHead(at, head, value) for at, values in own.items() for head, value in enumerate(values)]
    signed = not isinstance(by, str)
    return sorted(found, key=lambda each: _order(each.value, signed=signed))


def _maps(atlas: Atlas, indices: Sequence[int]) -> Iterator[tuple[int, AttentionMap]]:
    return ((at, atlas.maps[at]) for at in indices)


def _order(value: float, *, signed: bool) -> tuple[bool, float]:
    return not math.isfinite(value), -(abs(value) if signed else value)


def _reads_the_same(of: AttentionMap, other: AttentionMap) -> bool:
    """Whether two maps have the same tokens as queries and as keys."""
    places = [(each.kind, each.sequence, each.hypothesis, each.queries, each.keys) for each in (of, other)]
    return places[0] == places[1] and (of.query_tokens, of.key_tokens) == (other.query_tokens, other.key_tokens)


def kept_values(of: AttentionMap, queries: Indices, keys: Indices, by: By) -> Floats:
    """For each head the mean over queries of the sum over keys, (heads,); see `rank_heads`.

    NaN where no pair exists, infinity where a query attends to NaN.

    Raises:
        AtlasError: there is no such row or column; no norms; another `by`.
    """
    _check(of, queries, keys, by)
    return np.array([_kept_value(of, head, queries, keys, by) for head in range(of.heads)], dtype=np.float32)


def _kept_value(of: AttentionMap, head: int, queries: Indices, keys: Indices, by: By) -> float:
    broken = of.attends_to_nan(head)
    if broken.any() and (queries is None or broken[list(queries)].any()):
        return math.inf
    norms = of.value_norms(head) if by == "contribution" else None
    if queries is None:
        received = of.received(head) if norms is None else of.received(head) * norms
        return float(received[list(keys or ())].sum()) / of.queries
    if keys is None:
        if norms is None:
            return float(of.largest(head)[list(queries)].mean())
        return float(np.mean([(row * norms).max() for row in _rows(of, head, queries)]))
    found, exists = 0.0, False
    for rows in _runs(queries):
        for columns in _spans(keys, rows.stop - rows.start):
            own = [key - columns.start for key in keys if columns.start <= key < columns.stop]
            weights = of.weights(head, rows, columns)[:, own]
            weights = weights if norms is None else weights * norms[columns][own]
            exists = exists or bool(of.exists(head, rows, columns)[:, own].any())
            found += float(weights.sum())
    return found / len(queries) if exists else math.nan


def _rows(of: AttentionMap, head: int, queries: Sequence[int]) -> Iterator[Floats]:
    """The weights of some rows, one after another, over all keys."""
    return (of.weights(head, slice(query, query + 1), slice(0, of.keys))[0] for query in queries)


def _runs(indices: Sequence[int]) -> Iterator[slice]:
    """The runs of consecutive indices."""
    order = sorted(indices)
    start = order[0]
    for one, following in pairwise([*order, order[-1] + 2]):
        if following != one + 1:
            yield slice(start, one + 1)
            start = following


def _spans(keys: Sequence[int], rows: int) -> Iterator[slice]:
    """All keys as one span, where it has few enough weights, else their runs."""
    whole = slice(min(keys), max(keys) + 1)
    return iter([whole]) if (whole.stop - whole.start) * rows <= AT_ONCE else _runs(keys)


def _counterpart(of: AttentionMap, before: Atlas) -> AttentionMap:
    """The map of another atlas that is of the same module, call and sequence."""
    rank = of.hypothesis and of.hypothesis.rank
    for other in before.maps:
        same = (other.name, other.call, other.sequence) == (of.name, of.call, of.sequence)
        if same and (other.hypothesis and other.hypothesis.rank) == rank:
            break
    else:
        raise AtlasError(f"the other atlas has no map {of.name!r}, call {of.call}, sequence {of.sequence}")
    if (other.queries, other.keys, other.heads) != (of.queries, of.keys, of.heads):
        raise AtlasError(
            f"the map {of.name!r} has {of.queries:,} × {of.keys:,} tokens and {of.heads} heads, and that of the other "
            f"atlas {other.queries:,} × {other.keys:,} and {other.heads}: changes are told of texts of one length"
        )
    return other


def _changes(of: AttentionMap, other: AttentionMap, queries: Indices, keys: Indices) -> list[float]:
    if keys is not None or queries is None:
        pairs = zip(kept_values(of, queries, keys, "weight"), kept_values(other, queries, keys, "weight"), strict=True)
        return [float(one) - float(earlier) for one, earlier in pairs]
    _check(of, queries, keys, "weight")
    return [
        float(np.mean([np.abs(one - earlier).sum() / 2 for one, earlier in _pairs_of_rows(of, other, head, queries)]))
        for head in range(of.heads)
    ]


def _pairs_of_rows(
    of: AttentionMap, other: AttentionMap, head: int, queries: Sequence[int]
) -> Iterator[tuple[Floats, Floats]]:
    return zip(_rows(of, head, queries), _rows(other, head, queries), strict=True)


def top_values(of: AttentionMap, head: int, side: str, index: int, count: int, by: str) -> dict[str, Any]:
    """The largest weights, or contributions, of a row (side "query") or a column ("key"), as JSON.

    {"indices", "weights", "contributions" or None, "tokens", "rest": the sum of the other weights, "broken": whether
    the row attends to NaN, with empty lists}. Pairs of weight 0 are not listed.

    Raises:
        AtlasError: there is no such head, row or column; no norms; more than MOST_LISTED.
    """
    if side not in ("query", "key"):
        raise AtlasError(f"a map has rows, of the side 'query', and columns, of the side 'key'; it is {side[:40]!r}")
    if not 1 <= count <= MOST_LISTED:
        raise AtlasError(f"{count:,} of the largest weights were asked for; it needs to be 1 to {MOST_LISTED:,}")
    chosen = slice(index, index + 1)
    rows, columns = (chosen, slice(0, of.keys)) if side == "query" else (slice(0, of.queries), chosen)
    _check(of, [index] if side == "query" else None, [index] if side == "key" else None, by)
    weights = of.weights(head, rows, columns).reshape(-1)
    if side == "query" and bool(np.isnan(weights).any()):
        return {"indices": [], "weights": [], "contributions": None, "tokens": [], "rest": 0.0, "broken": True}
    weights = np.nan_to_num(weights, nan=0.0)
    contributions = weights * of.value_norms(head)[columns] if of.has_value_norms else None
    order = weights if contributions is None or by == "weight" else contributions
    largest = np.argpartition(order, -count)[-count:] if count < len(order) else np.arange(len(order))
    largest = largest[np.argsort(-order[largest], kind="stable")]
    largest = largest[order[largest] > 0]
    tokens = of.key_tokens if side == "query" else of.query_tokens
    return {
        "indices": largest.tolist(),
        "weights": weights[largest].tolist(),
        "contributions": None if contributions is None else contributions[largest].tolist(),
        "tokens": [tokens[at] for at in largest],
        "rest": max(float(weights.sum(dtype=np.float64) - weights[largest].sum(dtype=np.float64)), 0.0),
        "broken": False,
    }


def _check(of: AttentionMap, queries: Indices, keys: Indices, by: str) -> None:
    """Check indices and the name of what is asked for.

    Raises:
        AtlasError: they are none.
    """
    if by not in ("weight", "contribution"):
        raise AtlasError(f"heads are ranked by 'weight' and by 'contribution'; there is no {str(by)[:40]!r}")
    if by == "contribution":
        of.value_norms(0)
    if queries is None and keys is None:
        raise AtlasError("heads are ranked by tokens: give indices of queries, of keys, or of both")
    for name, indices, count in (("rows", queries, of.queries), ("columns", keys, of.keys)):
        if indices is None:
            continue
        if not 1 <= len(indices) <= MOST_KEPT:
            raise AtlasError(f"{len(indices)} {name} were asked about; it needs to be 1 to {MOST_KEPT}")
        wrong = next((at for at in indices if not 0 <= at < count), None)
        if wrong is not None:
            raise AtlasError(f"the map {of.name[:80]!r} has the {name} 0 to {count - 1}; there is no {wrong}")


def indices(name: str, text: str) -> tuple[int, ...] | None:
    """Indices of tokens in a request, 1.2.3, each once; "-" for all.

    Raises:
        ConfigurationError: they are not that.

    >>> indices("queries", "3.1"), indices("queries", "-")
    ((3, 1), None)
    """
    if text == "-":
        return None
    parts = text.split(".")
    if not all(part.isascii() and part.isdigit() and len(part) <= 12 for part in parts):
        raise ConfigurationError(f"{name} is {text[:40]!r}; it needs indices such as {name}=3.4, or - for all")
    return tuple(dict.fromkeys(map(int, parts)))
