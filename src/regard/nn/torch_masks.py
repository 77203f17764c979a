"""The two mask tensors of torch's MultiheadAttention, checked, and read as a mask and a bias."""

from __future__ import annotations

import math
from functools import reduce
from operator import add, and_

import torch
from torch import Tensor

from ..biases import Bias, tensor
from ..errors import DeviceError, MaskError
from ..masks import Mask, causal, from_multihead, where
from ..transforms import transformed


def check_masks(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    sizes: tuple[int | None, int, int, int],
    is_causal: bool,
    device: torch.device,
) -> None:
    """Masks of bool or floats, of the shapes that torch takes; sizes are batch or None, heads, queries and keys.

    Raises:
        MaskError: they are not that; `is_causal` without `attn_mask`.
        DeviceError: one is not on the device of the queries.
    """
    batch, heads, queries, keys = sizes
    if is_causal and attn_mask is None:
        raise MaskError(
            "is_causal is a hint that attn_mask is causal, and needs attn_mask: give it as "
            "nn.Transformer.generate_square_subsequent_mask(M), or torch.ones(M, M, dtype=torch.bool).triu(1)"
        )
    if key_padding_mask is not None:
        shapes = {"(keys,)": (keys,)} if batch is None else {"(batch, keys)": (batch, keys)}
        _check_mask("key_padding_mask", key_padding_mask, shapes, device)
    if attn_mask is not None:
        per_head = (1 if batch is None else batch) * heads, queries, keys
        shapes = {"(queries, keys)": (queries, keys), "(batch · heads, queries, keys)": per_head}
        _check_mask("attn_mask", attn_mask, shapes, device)


def read_masks(
    attn_mask: Tensor | None, key_padding_mask: Tensor | None, heads: int, own: int
) -> tuple[Mask | None, Bias | None]:
    """What torch's two tensors say, as a mask and a bias; the layer's `own` last keys are there for all."""
    pairs, added_pairs = _taken_apart(attn_mask, own)
    keys, added_keys = _taken_apart(key_padding_mask, own)
    kept: list[Mask] = []
    if pairs is not None:
        kept.append(causal() if _is_causal(pairs) else from_multihead(pairs, heads=heads))
    if keys is not None:
        # Whether it is the last keys that are padded is seen in the numbers, which a compiled call does not have yet.
        over_pairs = keys if keys.ndim == 1 else keys[:, None, None, :]
        kept.append(where(ignore=over_pairs) if transformed() else from_multihead(key_padding_mask=keys))
    added: list[Bias] = []
    if added_pairs is not None:
        added.append(tensor(added_pairs if added_pairs.ndim == 2 else added_pairs.unflatten(0, (-1, heads))))
    if added_keys is not None:
        added.append(tensor(added_keys if added_keys.ndim == 1 else added_keys[:, None, None, :]))
    return reduce(and_, kept) if kept else None, reduce(add, added) if added else None


def _check_mask(name: str, mask: object, shapes: dict[str, tuple[int, ...]], device: torch.device) -> None:
    if not isinstance(mask, Tensor):
        raise MaskError(
            f"{name} is a {type(mask).__name__}; it needs a tensor: bool, where True = leave out, or floats that are "
            "added to the scores"
        )
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise MaskError(
            f"{name} is {mask.dtype}, whose polarity is not clear; it needs bool, where True = leave out, or floats "
            "that are added to the scores. If 1 means leave out, give the tensor's .bool()"
        )
    if tuple(mask.shape) not in shapes.values():
        needs = " or ".join(f"{word} {shape}" for word, shape in shapes.items())
        raise MaskError(f"{name} has the shape {tuple(mask.shape)}; it needs {needs}")
    if mask.device != device:
        raise DeviceError(
            f"{name} is on {mask.device}, but query, key and value are on {device}: move it with .to({str(device)!r})"
        )


def _taken_apart(mask: Tensor | None, own: int) -> tuple[Tensor | None, Tensor | None]:
    """Which pairs or keys are left out, and what is added to the others; None for what says nothing."""
    if mask is None:
        return None, None
    if own:
        mask = torch.cat([mask, mask.new_zeros(*mask.shape[:-1], own)], dim=-1)
    if mask.dtype == torch.bool:
        return mask if transformed() or mask.any() else None, None
    ignored = mask == -math.inf
    added = mask.masked_fill(ignored, 0.0)
    return (
        ignored if transformed() or ignored.any() else None,
        added if transformed() or added.requires_grad or added.any() else None,
    )


def _is_causal(ignored: Tensor) -> bool:
    """Whether nothing but later keys is left out, and all of these; most others show it in their first or last row."""
    if transformed() or ignored.ndim != 2 or ignored.shape[0] != ignored.shape[1]:
        return False
    if ignored[-1].any() or not ignored[0, 1:].all():
        return False
    return ignored.equal(torch.ones_like(ignored).triu(1))
