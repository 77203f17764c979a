"""The masks and biases of cases: the library's object, and its meaning in plain index arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor

from .. import biases, masks
from ..biases import Bias
from ..masks import Mask

if TYPE_CHECKING:
    from .cases import CaseGenerator

MaskAndPairs: TypeAlias = tuple[Mask, Tensor]
"""A mask of the library, and the same as booleans (True = attend), broadcastable to (*batch, heads, M, N)."""


def draw_mask(draw: CaseGenerator) -> tuple[Mask | None, Tensor]:
    """The mask of a case, and its booleans computed without the library's masks."""
    if draw.case.mask == "all":
        return None, torch.ones(1, 1, dtype=torch.bool)
    return MASK_CASES[draw.case.mask](draw)


def _causal(draw: CaseGenerator) -> MaskAndPairs:
    return masks.causal(), draw.column_positions <= draw.row_positions


def _padding(draw: CaseGenerator) -> MaskAndPairs:
    lengths = draw.integers(draw.keys + 1, *draw.layout.batch)
    return masks.padding(lengths=lengths), draw.column_positions < lengths[..., None, None, None]


def _keep(draw: CaseGenerator) -> MaskAndPairs:
    pairs = draw.booleans(*draw.weights_shape)
    pairs[..., :1, :] = False  # the first row attends to nothing
    return masks.where(keep=pairs), pairs if draw.layout.heads else pairs.unsqueeze(-3)


def _ignore(draw: CaseGenerator) -> MaskAndPairs:
    ignored = draw.booleans(draw.keys)
    return masks.where(ignore=ignored), ~ignored


def _nothing(draw: CaseGenerator) -> MaskAndPairs:
    nothing = torch.zeros(draw.queries, draw.keys, dtype=torch.bool)
    return masks.where(keep=nothing), nothing


def _window(draw: CaseGenerator) -> MaskAndPairs:
    before, after, distance = draw.near_distance, draw.near_distance // 2, draw.row_positions - draw.column_positions
    return masks.window(before=before, after=after), (-after <= distance) & (distance <= before)


def _prefix(draw: CaseGenerator) -> MaskAndPairs:
    lengths = draw.integers(draw.near_distance + 1, *draw.layout.batch)
    pairs = draw.column_positions < lengths[..., None, None, None]
    return masks.prefix(lengths if draw.layout.batch else int(lengths)), pairs


def _strided(draw: CaseGenerator) -> MaskAndPairs:
    return masks.strided(3), (draw.row_positions - draw.column_positions).remainder(3) == 0


def _fixed(draw: CaseGenerator) -> MaskAndPairs:
    block, summary = draw.near_distance + 1, draw.near_distance // 2
    same = draw.row_positions.div(block, rounding_mode="floor") == draw.column_positions.div(
        block, rounding_mode="floor"
    )
    return masks.fixed(block, summary), same | (draw.column_positions.remainder(block) >= block - summary)


def _dilated(draw: CaseGenerator) -> MaskAndPairs:
    before, distance = draw.near_distance, draw.row_positions - draw.column_positions
    near = torch.stack([distance == 2 * step for step in range(-1, before + 1)]).any(0)
    return masks.dilated(before, 2, after=1), near


def _global(draw: CaseGenerator) -> MaskAndPairs:
    chosen = [1, draw.near_distance + 1]
    either = torch.stack([(draw.row_positions == token) | (draw.column_positions == token) for token in chosen])
    return masks.global_tokens(chosen), either.any(0)


def _documents(draw: CaseGenerator) -> MaskAndPairs:
    ids = _drawn_ids(draw)
    return masks.documents(_ids_argument(draw, ids)), _ids_at(ids, draw.row_positions) == _ids_at(
        ids, draw.column_positions.mT
    ).mT


def _head_documents(draw: CaseGenerator) -> MaskAndPairs:
    """Clusters of each head: ids in any order."""
    ids = torch.randint(3, (*draw.layout.batch, draw.heads, draw.positions_end), generator=draw.generator)
    return masks.documents(ids), _ids_at(ids, draw.row_positions) == _ids_at(ids, draw.column_positions.mT).mT


def _cross_documents(draw: CaseGenerator) -> MaskAndPairs:
    """Queries and keys that are packed each in their own way; some documents have no keys, or no queries."""
    of_queries, of_keys = _drawn_ids(draw), 2 * _drawn_ids(draw)
    mask = masks.documents(_ids_argument(draw, of_queries), _ids_argument(draw, of_keys))
    return mask, _ids_at(of_queries, draw.row_positions) == _ids_at(of_keys, draw.column_positions.mT).mT


def _drawn_ids(draw: CaseGenerator) -> Tensor:
    """Ids (*batch, 1, L) of documents one after the other."""
    new = torch.rand(*draw.layout.batch, 1, draw.positions_end, generator=draw.generator) < 1 / (draw.near_distance + 1)
    return new.cumsum(-1)


def _ids_argument(draw: CaseGenerator, ids: Tensor) -> Tensor:
    """Ids (*batch, 1, L) as `masks.documents` takes them: without the axis of heads where the batch has one axis."""
    return ids if len(draw.layout.batch) > 1 else ids.squeeze(-2)


def _ids_at(ids: Tensor, positions: Tensor) -> Tensor:
    """The ids (*batch, heads or 1, L) at positions (*batch or none, 1, M, 1)."""
    columns = positions.squeeze(-1)
    leading = torch.broadcast_shapes(ids.shape[:-1], columns.shape[:-1])
    return ids.expand(*leading, -1).gather(-1, columns.expand(*leading, -1)).unsqueeze(-1)


def _mod(draw: CaseGenerator) -> MaskAndPairs:
    reach, distance = draw.near_distance, draw.row_positions - draw.column_positions
    mask = masks.from_mod(lambda b, h, q, k: (k <= q) & (q - k < reach) | (k % 3 == 0))
    return mask, (distance >= 0) & (distance < reach) | (draw.column_positions.remainder(3) == 0)


def _head_mod(draw: CaseGenerator) -> MaskAndPairs:
    reach, head = draw.near_distance, torch.arange(draw.heads)[:, None, None]
    mask = masks.from_mod(lambda b, h, q, k: (q - k).abs() <= h * reach, heads=draw.heads)
    return mask, (draw.row_positions - draw.column_positions).abs() <= head * reach


def _blocks(draw: CaseGenerator, heads: int | None = None) -> MaskAndPairs:
    block = draw.near_distance
    count = min(1, draw.positions_end)
    mask = masks.random_blocks(draw.positions_end, block, count, seed=draw.case.seed % 97, heads=heads)
    blocks, generator = -(-draw.positions_end // block), torch.Generator().manual_seed(draw.case.seed % 97)
    drawn = torch.zeros(heads or 1, blocks, blocks, dtype=torch.bool)
    for head in drawn:  # for each block of queries the `count` blocks of keys with the largest random numbers
        largest = torch.rand(blocks, blocks, generator=generator).argsort(-1, descending=True)[:, :count]
        head.scatter_(-1, largest, True)
    query, key = draw.row_positions.clamp(min=0) // block, draw.column_positions // block
    return mask, drawn[torch.arange(len(drawn))[:, None, None], query, key]


def _head_blocks(draw: CaseGenerator) -> MaskAndPairs:
    return _blocks(draw, draw.heads)


def _chosen(draw: CaseGenerator, rows: int = 1, columns: int = 1) -> MaskAndPairs:
    """Lists of the key heads, with duplicates and with numbers that name nothing; the first is empty."""
    heads = () if draw.layout.heads is None else (draw.layout.key_heads or 1,)
    length, ends = draw.near_distance + 1, -(-draw.keys // columns)
    indices = draw.integers(ends + 1, *draw.layout.batch, *heads, -(-draw.queries // rows), length) - 1
    indices[..., :1, :] = -1
    mask = masks.chosen(indices, block=rows) if columns == 1 else masks.blocks(indices, (rows, columns))
    lists = indices if heads else indices.unsqueeze(-3)
    lists = lists.repeat_interleave(draw.heads // lists.shape[-3], -3)[..., torch.arange(draw.queries) // rows, :]
    return mask, (lists.unsqueeze(-1) == draw.column_positions.unsqueeze(-2) // columns).any(-2)


def _chosen_blocks(draw: CaseGenerator) -> MaskAndPairs:
    return _chosen(draw, rows=3, columns=2)


MaskCase: TypeAlias = "Callable[[CaseGenerator], MaskAndPairs]"


def _and(left: MaskCase, right: MaskCase) -> MaskCase:
    def both(draw: CaseGenerator) -> MaskAndPairs:
        (one, these), (other, those) = left(draw), right(draw)
        return one & other, these & those

    return both


def _or(left: MaskCase, right: MaskCase) -> MaskCase:
    def either(draw: CaseGenerator) -> MaskAndPairs:
        (one, these), (other, those) = left(draw), right(draw)
        return one | other, these | those

    return either


def _not(mask: MaskCase) -> MaskCase:
    def others(draw: CaseGenerator) -> MaskAndPairs:
        one, these = mask(draw)
        return ~one, ~these

    return others


# The agreement suite draws from all of these, and from no mask at all.
MASK_CASES: dict[str, MaskCase] = {
    "causal": _causal,
    "padding": _padding,
    "keep": _keep,
    "ignore": _ignore,
    "causal&padding": _and(_causal, _padding),
    "padding|keep": _or(_padding, _keep),
    "~causal": _not(_causal),
    "nothing": _nothing,
    "window": _window,
    "causal&window": _and(_causal, _window),
    "causal|prefix": _or(_causal, _prefix),
    "strided": _strided,
    "fixed": _fixed,
    "dilated": _dilated,
    "window|global": _or(_window, _global),
    "mod": _mod,
    "~(fixed|padding)": _not(_or(_fixed, _padding)),
    "documents": _documents,
    "causal&documents": _and(_causal, _documents),
    "cross-documents": _cross_documents,
    "head-documents": _head_documents,
    "blocks": _blocks,
    "head-mod": _head_mod,
    "head-blocks&causal": _and(_head_blocks, _causal),
    "chosen": _chosen,
    "causal&chosen": _and(_causal, _chosen),
    "chosen-blocks": _chosen_blocks,
}

MASKS_FROM_ZERO = {
    "documents",
    "causal&documents",
    "cross-documents",
    "head-documents",
    "blocks",
    "head-blocks&causal",
}
"""The masks of `MASK_CASES` that refuse positions below 0."""
MASKS_OF_HEADS = {"head-mod", "head-documents", "head-blocks&causal"}
"""The masks of `MASK_CASES` that differ between heads, and so need a head axis."""


Tensors = Mapping[str, Tensor]
BUCKETS, MAX_DISTANCE, BEFORE, AFTER, PERIOD = 8, 7, 2, 3, 3


@dataclass(frozen=True)
class PairPositions:
    """Positions of queries (*batch, 1, M, 1) and keys (*batch, 1, 1, N); `headless` if there is no head axis."""

    row_positions: Tensor
    column_positions: Tensor
    headless: bool

    @property
    def distance(self) -> Tensor:
        """Key position - query position, (*batch, 1, M, N)."""
        return self.column_positions - self.row_positions


@dataclass(frozen=True)
class BiasCase:
    """One kind of bias: draws its tensors, builds the library's bias, computes its values without the library.

    `values` broadcast to (*batch, heads, M, N). The second argument of `build` says that there is no head axis.
    """

    draw: Callable[[CaseGenerator], dict[str, Tensor]]
    build: Callable[[Tensors, bool], Bias | Tensor]
    values: Callable[[Tensors, PairPositions], Tensor]


def _pair_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    bias = tensors["bias"]
    return bias.unsqueeze(-3) if positions.headless and bias.ndim > 2 else bias


def _build_tensor(tensors: Tensors, headless: bool) -> Tensor:
    return tensors["bias"]


def _draw_blocked(draw: CaseGenerator) -> dict[str, Tensor]:
    blocked = ~draw.booleans(*draw.weights_shape)
    blocked[..., :1, :] = True
    return {"bias": draw.normal(*draw.weights_shape).masked_fill(blocked, -math.inf)}


def _gaussian_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    center = tensors["center"].unsqueeze(-2) if positions.headless else tensors["center"]
    return -((positions.column_positions - center.unsqueeze(-1)) ** 2) / (2 * tensors["sigma"] ** 2)


def _alibi_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    return -tensors["slopes"][:, None, None] * positions.distance.abs()


def _relative_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    """T5's buckets (Raffel et al. 2020): half for keys before, half for keys after; half of each exact distances."""
    side = BUCKETS // 2
    exact, distance = side // 2, positions.distance.abs()
    # Bucket exact + k begins where (distance/exact)^(side - exact) reaches (max_distance/exact)^k: in whole numbers.
    far = torch.zeros_like(distance)
    for k in range(1, side - exact):
        far += distance ** (side - exact) >= MAX_DISTANCE**k * exact ** (side - exact - k)
    bucket = torch.where(distance < exact, distance, exact + far) + side * (positions.distance > 0)
    return _gather_columns(tensors["table"], bucket)


def _clipped_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    return _gather_columns(tensors["table"], positions.distance.clamp(-BEFORE, AFTER) + BEFORE)


def _periodic_values(tensors: Tensors, positions: PairPositions) -> Tensor:
    return _gather_columns(tensors["table"], positions.column_positions.remainder(PERIOD))


def _gather_columns(table: Tensor, column: Tensor) -> Tensor:
    """table[head, column], for columns (*batch, 1, M, N) or (M, N)."""
    head = torch.arange(len(table))[:, None, None]
    return table[head, column]


def _build_relative(tensors: Tensors, headless: bool) -> Bias:
    return biases.relative(tensors["table"], max_distance=MAX_DISTANCE)


def _build_mod(tensors: Tensors, headless: bool) -> Bias:
    table = tensors["table"]
    if headless:
        return biases.from_mod(lambda score, b, h, q, k: score + table[0, k % PERIOD])
    return biases.from_mod(lambda score, b, h, q, k: score + table[h, k % PERIOD], heads=len(table))


def _draw_pairs(draw: CaseGenerator) -> dict[str, Tensor]:
    return {"bias": draw.normal(draw.queries, draw.keys)}


def _draw_slopes(draw: CaseGenerator) -> dict[str, Tensor]:
    return {"slopes": draw.normal(draw.heads).abs() * 2 / draw.near_distance}


def _draw_table(columns: int) -> Callable[[CaseGenerator], dict[str, Tensor]]:
    return lambda draw: {"table": draw.normal(draw.heads, columns)}


def _build_alibi(tensors: Tensors, headless: bool) -> Bias:
    return biases.alibi(tensors["slopes"])


def _build_clipped(tensors: Tensors, headless: bool) -> Bias:
    return biases.clipped(tensors["table"], before=BEFORE, after=AFTER)


BIAS_CASES: dict[str, BiasCase] = {
    "pairs": BiasCase(_draw_pairs, _build_tensor, _pair_values),
    "heads": BiasCase(
        lambda draw: {"bias": draw.normal(*draw.weights_shape[-3:-2][: draw.layout.heads], 1, draw.keys)},
        _build_tensor,
        _pair_values,
    ),
    "blocked": BiasCase(_draw_blocked, _build_tensor, _pair_values),
    "gaussian": BiasCase(
        lambda draw: {
            "center": draw.normal(*draw.weights_shape[:-1]) + draw.keys / 2,
            "sigma": (draw.normal().abs() + 1) * draw.near_distance / 2,
        },
        lambda tensors, headless: biases.gaussian(tensors["center"], tensors["sigma"]),
        _gaussian_values,
    ),
    "slopes": BiasCase(_draw_slopes, _build_alibi, _alibi_values),
    "relative": BiasCase(_draw_table(BUCKETS), _build_relative, _relative_values),
    "clipped": BiasCase(_draw_table(BEFORE + 1 + AFTER), _build_clipped, _clipped_values),
    "mod": BiasCase(_draw_table(PERIOD), _build_mod, _periodic_values),
    "pairs+relative": BiasCase(
        lambda draw: _draw_pairs(draw) | _draw_table(BUCKETS)(draw),
        lambda tensors, headless: biases.tensor(tensors["bias"]) + _build_relative(tensors, headless),
        lambda tensors, positions: _pair_values(tensors, positions) + _relative_values(tensors, positions),
    ),
    "given": BiasCase(lambda draw: {"bias": draw.normal(*draw.weights_shape)}, _build_tensor, _pair_values),
    "given-table": BiasCase(_draw_table(BUCKETS), _build_relative, _relative_values),
    "alibi": BiasCase(_draw_slopes, _build_alibi, _alibi_values),
}
