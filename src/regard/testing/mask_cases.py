"""The masks of cases: each as the library says it, and which pairs it keeps in plain index arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .. import masks
from ..masks import Mask
from .random_tensors import Draw

Kept = tuple[Mask, Tensor]
"""A mask, and the booleans that it means: over pairs, broadcastable to (*batch, heads, M, N)."""


def mask_of(draw: Draw) -> tuple[Mask | None, Tensor]:
    """The mask of a case and its meaning; it knows nothing of the library's own."""
    if draw.case.mask == "all":
        return None, torch.ones(1, 1, dtype=torch.bool)
    return _MASKS[draw.case.mask](draw)


def _causal(draw: Draw) -> Kept:
    return masks.causal(), draw.key_at <= draw.query_at


def _padding(draw: Draw) -> Kept:
    lengths = draw.integers(draw.keys + 1, *draw.layout.batch)
    return masks.padding(lengths=lengths), draw.key_at < lengths[..., None, None, None]


def _keep(draw: Draw) -> Kept:
    pairs = draw.coins(*draw.weights_shape)
    pairs[..., :1, :] = False  # the first row attends to nothing
    return masks.where(keep=pairs), pairs if draw.layout.heads else pairs.unsqueeze(-3)


def _ignore(draw: Draw) -> Kept:
    ignored = draw.coins(draw.keys)
    return masks.where(ignore=ignored), ~ignored


def _nothing(draw: Draw) -> Kept:
    nothing = torch.zeros(draw.queries, draw.keys, dtype=torch.bool)
    return masks.where(keep=nothing), nothing


def _window(draw: Draw) -> Kept:
    before, after, distance = draw.reach, draw.reach // 2, draw.query_at - draw.key_at
    return masks.window(before=before, after=after), (-after <= distance) & (distance <= before)


def _prefix(draw: Draw) -> Kept:
    lengths = draw.integers(draw.reach + 1, *draw.layout.batch)
    return masks.prefix(lengths), draw.key_at < lengths[..., None, None, None]


def _strided(draw: Draw) -> Kept:
    return masks.strided(3), (draw.query_at - draw.key_at).remainder(3) == 0


def _fixed(draw: Draw) -> Kept:
    block, summary = draw.reach + 1, draw.reach // 2
    same = draw.query_at.div(block, rounding_mode="floor") == draw.key_at.div(block, rounding_mode="floor")
    return masks.fixed(block, summary), same | (draw.key_at.remainder(block) >= block - summary)


def _dilated(draw: Draw) -> Kept:
    before, distance = draw.reach, draw.query_at - draw.key_at
    near = torch.stack([distance == 2 * step for step in range(-1, before + 1)]).any(0)
    return masks.dilated(before, 2, after=1), near


def _global(draw: Draw) -> Kept:
    chosen = [1, draw.reach + 1]
    either = torch.stack([(draw.query_at == token) | (draw.key_at == token) for token in chosen])
    return masks.global_tokens(chosen), either.any(0)


def _documents(draw: Draw) -> Kept:
    new = torch.rand(*draw.layout.batch, draw.positions_end, generator=draw.generator) < 1 / (draw.reach + 1)
    ids = new.cumsum(-1)
    every = ids[..., None, None, :].expand(*draw.layout.batch, 1, 1, draw.positions_end)
    query, key = (at.expand(*draw.layout.batch, 1, *at.shape[-2:]) for at in (draw.query_at, draw.key_at))
    of_query = every.expand(*query.shape[:-1], -1).gather(-1, query)
    of_key = every.gather(-1, key)
    return masks.documents(ids), of_query == of_key


def _mod(draw: Draw) -> Kept:
    reach, distance = draw.reach, draw.query_at - draw.key_at
    mask = masks.from_mod(lambda b, h, q, k: (k <= q) & (q - k < reach) | (k % 3 == 0))
    return mask, (distance >= 0) & (distance < reach) | (draw.key_at.remainder(3) == 0)


def _head_mod(draw: Draw) -> Kept:
    reach, head = draw.reach, torch.arange(draw.heads)[:, None, None]
    mask = masks.from_mod(lambda b, h, q, k: (q - k).abs() <= h * reach, heads=draw.heads)
    return mask, (draw.query_at - draw.key_at).abs() <= head * reach


def _blocks(draw: Draw, heads: int | None = None) -> Kept:
    block = draw.reach
    count = min(1, draw.positions_end)
    mask = masks.random_blocks(draw.positions_end, block, count, seed=draw.case.seed % 97, heads=heads)
    drawn = mask.drawn  # type: ignore[attr-defined]  # which blocks they are is chance: tests/masks hold it to that
    query, key = draw.query_at.clamp(min=0) // block, draw.key_at // block
    head = torch.arange(len(drawn))[:, None, None]
    return mask, drawn[head, query, key]


def _head_blocks(draw: Draw) -> Kept:
    return _blocks(draw, draw.heads)


Make = Callable[[Draw], Kept]


def _and(left: Make, right: Make) -> Make:
    def both(draw: Draw) -> Kept:
        (one, these), (other, those) = left(draw), right(draw)
        return one & other, these & those

    return both


def _or(left: Make, right: Make) -> Make:
    def either(draw: Draw) -> Kept:
        (one, these), (other, those) = left(draw), right(draw)
        return one | other, these | those

    return either


def _not(mask: Make) -> Make:
    def others(draw: Draw) -> Kept:
        one, these = mask(draw)
        return ~one, ~these

    return others


_MASKS: dict[str, Make] = {
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
