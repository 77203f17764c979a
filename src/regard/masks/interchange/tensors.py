"""What the tensors of other libraries say, checked: which pairs they keep, and which keys a mask keeps for all."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor

from ...errors import MaskError
from ...tiles import FULL, PARTIAL
from ..base import And, Mask
from ..padding import padding
from ..where import where

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def checked(name: str, tensor: object, axes: Container[int], shapes: str) -> Tensor:
    """A tensor with as many axes as its `shapes` may have; `name` is the function and its argument."""
    if not isinstance(tensor, Tensor):
        raise MaskError(f"{name} needs a tensor of the shape {shapes}; it is {tensor!r}")
    if tensor.ndim not in axes:
        raise MaskError(f"{name} has the shape {tuple(tensor.shape)}; it needs {shapes}")
    return tensor


def unmasked(name: str, added: Tensor, true: str, *, least: bool = False) -> Tensor:
    """Where 0 is added to the scores; elsewhere it has to be -inf, or, if `least`, the least number of a float type.

    `true` is what True means, to the library that the tensor comes from, where it is bool instead.
    """
    if not added.is_floating_point():
        raise MaskError(
            f"{name} is {added.dtype}, whose polarity is not clear; it needs bool, where True = {true}, or floats of 0 "
            f"(attend) and -inf (leave out). If 1 means {true}, give the tensor's .bool()"
        )
    masked = added == -torch.inf
    if least:
        masked |= torch.isin(added, _least(added))
    kept = added == 0
    other = ~(kept | masked)
    if other.any():
        raise MaskError(
            f"{name} is {added.dtype} and adds {added[other][0].item():.6g} to a score, which is neither 0 (attend) "
            f"nor -inf{' nor the least number of its type' if least else ''} (leave out): it is a bias, not a mask. "
            "Give it to attention(bias=biases.tensor(...)), or say which pairs exist by bool"
        )
    return kept


def _least(like: Tensor) -> Tensor:
    """The least number of each float type: a mask may have been made in one and be handed over in another."""
    return torch.tensor([torch.finfo(dtype).min for dtype in FLOATS], dtype=torch.float64).to(like)


def by_tokens(exist: Tensor) -> Mask:
    """Keys that exist, bool (batch, N): `padding` where they come first in each sequence, else `where`."""
    lengths = exist.sum(-1)
    first = torch.arange(exist.shape[-1], device=exist.device) < lengths[:, None]
    return padding(lengths=lengths) if first.equal(exist) else where(keep=exist[:, None, None, :])


def tokens(mask: Mask, queries: int, keys: int) -> Tensor | None:
    """Keys that exist for every query and head, bool (*batch, N), if no others exist for any; None otherwise."""
    verdicts = mask.tiles(max(queries, 1), keys, (max(queries, 1), 1)).squeeze(-2)
    if (verdicts == PARTIAL).any():
        return None
    exist = verdicts == FULL
    if exist.ndim == 1:
        return exist
    same_for_heads = bool((exist == exist[..., :1, :]).all())
    return exist[..., 0, :] if same_for_heads else None


def conjuncts(mask: Mask) -> list[Mask]:
    """The masks that `&` joins."""
    return [*conjuncts(mask.left), *conjuncts(mask.right)] if isinstance(mask, And) else [mask]


def four_axes(name: str, pairs: Tensor) -> Tensor:
    """(batch | 1, heads | 1, ·, ·), for those who need all four."""
    if pairs.ndim > 4:
        raise MaskError(
            f"{name} makes tensors with one axis for the batch and one for heads; this mask has the axes "
            f"{tuple(pairs.shape[:-2])} in front of queries and keys"
        )
    return pairs[(None,) * (4 - pairs.ndim)]
