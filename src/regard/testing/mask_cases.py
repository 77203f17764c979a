"""The masks of cases: the library's mask, and the same pairs in plain index arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import masks
from ..masks import Mask
from .case_generator import CaseGenerator

MaskAndPairs = tuple[Mask, Tensor]
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
    return masks.prefix(lengths), draw.column_positions < lengths[..., None, None, None]


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
    new = torch.rand(*draw.layout.batch, draw.positions_end, generator=draw.generator) < 1 / (draw.near_distance + 1)
    ids = new.cumsum(-1)
    every = ids[..., None, None, :].expand(*draw.layout.batch, 1, 1, draw.positions_end)
    query, key = (
        at.expand(*draw.layout.batch, 1, *at.shape[-2:]) for at in (draw.row_positions, draw.column_positions)
    )
    of_query = every.expand(*query.shape[:-1], -1).gather(-1, query)
    of_key = every.gather(-1, key)
    return masks.documents(ids), of_query == of_key


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
    drawn = mask.drawn  # type: ignore[attr-defined]  # random blocks: tests/masks checks their distribution
    query, key = draw.row_positions.clamp(min=0) // block, draw.column_positions // block
    head = torch.arange(len(drawn))[:, None, None]
    return mask, drawn[head, query, key]


def _head_blocks(draw: CaseGenerator) -> MaskAndPairs:
    return _blocks(draw, draw.heads)


MaskCase = Callable[[CaseGenerator], MaskAndPairs]


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
    "blocks": _blocks,
    "head-mod": _head_mod,
    "head-blocks&causal": _and(_head_blocks, _causal),
}
