"""Conversion between masks and torch's mask tensors: scaled_dot_product_attention's and nn.MultiheadAttention's.

The checks of mask tensors are shared with the converters of other libraries.
"""

from __future__ import annotations

from collections.abc import Container
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from ...core.intervals import FULL, PARTIAL
from ...core.torch_modes import is_causal_bias
from ...errors import MaskError
from ..base import And, Mask, Not, as_mask
from ..causal import causal
from ..index_checks import checked_count
from ..padding import padding
from ..tensor_mask import where
from ..window import window

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def checked(name: str, tensor: object, axes: Container[int], shapes: str) -> Tensor:
    """A tensor with one of the allowed numbers of axes; `name` (function and argument) and `shapes` are for messages.

    Raises:
        MaskError: not a tensor, a `CausalBias`, or another number of axes.
    """
    if not isinstance(tensor, Tensor):
        raise MaskError(f"{name} needs a tensor of the shape {shapes}; it is {tensor!r}")
    if is_causal_bias(tensor):
        raise MaskError(f"{name} is a CausalBias of torch, which has no numbers: masks.from_sdpa reads it")
    if tensor.ndim not in axes:
        raise MaskError(f"{name} has the shape {tuple(tensor.shape)}; it needs {shapes}")
    return tensor


def unmasked(name: str, added: Tensor, true: str, *, least: bool = False) -> Tensor:
    """Where an additive mask is 0: bool. Elsewhere it must be -inf or, with `least`, the least number of a float type.

    `true` is, for messages, the meaning of True in a bool mask of the same library.

    Raises:
        MaskError: not floating point, or other numbers: these are a bias.
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
    """The least number of each float type: a mask may be created in one type and passed in another."""
    return torch.tensor([torch.finfo(dtype).min for dtype in FLOATS], dtype=torch.float64).to(like)


def token_mask(tokens: Tensor) -> Mask:
    """The mask of bool tokens (batch, N): `padding` if they come first in each sequence, else `where`."""
    lengths = tokens.sum(-1)
    first = torch.arange(tokens.shape[-1], device=tokens.device) < lengths[:, None]
    return padding(lengths=lengths) if first.equal(tokens) else where(keep=tokens[:, None, None, :])


def tokens_of(mask: Mask, queries: int, keys: int) -> Tensor | None:
    """The keys that exist, bool (*batch, N), if they are the same for every query and head; None otherwise."""
    verdicts = mask.tiles(max(queries, 1), keys, (max(queries, 1), 1)).squeeze(-2)
    if (verdicts == PARTIAL).any():
        return None
    exist = verdicts == FULL
    if exist.ndim == 1:
        return exist
    same_for_heads = bool((exist == exist[..., :1, :]).all())
    return exist[..., 0, :] if same_for_heads else None


def conjuncts(mask: Mask) -> list[Mask]:
    """The operands of nested `&`, in order."""
    return [*conjuncts(mask.left), *conjuncts(mask.right)] if isinstance(mask, And) else [mask]


def four_axes(name: str, pairs: Tensor) -> Tensor:
    """A tensor over pairs as (batch | 1, heads | 1, ·, ·); a MaskError if it has more axes."""
    if pairs.ndim > 4:
        raise MaskError(
            f"{name} makes tensors with one axis for the batch and one for heads; this mask has the axes "
            f"{tuple(pairs.shape[:-2])} in front of queries and keys"
        )
    return pairs[(None,) * (4 - pairs.ndim)]


def from_sdpa(attn_mask: Tensor) -> Mask:
    """The mask that torch's scaled_dot_product_attention reads from its attn_mask: True = attend.

    Shapes: (..., M|1, N|1), broadcastable to the weights. Floats that are all 0 (attend) or -inf (leave out) are a mask
    too; other floats are a bias.

    A `torch.nn.attention.bias.CausalBias` for M queries and N keys becomes a symbolic mask: `causal_lower_right`
    is `causal()`, whose last query attends to every key; `causal_upper_left`, where query i attends to keys 0..i, is
    the window *query position - key position >= N - M*, for these lengths and default positions.

    Raises:
        MaskError: neither bool nor float; floats that are neither 0 nor -inf; fewer than two axes.

    >>> from regard import masks
    >>> masks.from_sdpa(torch.tensor([[0.0, -torch.inf], [0.0, 0.0]])).dense(2, 2).int()
    tensor([[1, 0],
            [1, 1]], dtype=torch.int32)
    """
    if is_causal_bias(attn_mask):
        return _from_causal_bias(attn_mask)
    name = "from_sdpa's attn_mask"
    pairs = checked(name, attn_mask, range(2, 99), "(..., M, N)")
    return where(keep=pairs if pairs.dtype == torch.bool else unmasked(name, pairs, "attend"))


def read_causal_bias(bias: Any, queries: int, keys: int) -> Mask:
    """The mask of a `CausalBias` in a call with M queries and N keys.

    Raises:
        MaskError: the `CausalBias` is for other lengths.
    """
    if (bias.seq_len_q, bias.seq_len_kv) != (queries, keys):
        raise MaskError(
            f"this CausalBias is for {bias.seq_len_q} queries and {bias.seq_len_kv} keys, but there are {queries} "
            f"queries and {keys} keys: make it for these lengths, or give masks.causal(), which fits any"
        )
    return _from_causal_bias(bias)


def _from_causal_bias(bias: Any) -> Mask:
    """The mask of a `CausalBias` for default positions: keys 0..N-1, queries the last M of these."""
    first = bias.seq_len_kv - bias.seq_len_q  # the position of the first query
    if bias.variant.name == "LOWER_RIGHT" or not first:
        return causal()
    return Not(window(before=first - 1)) if first > 0 else window(after=-first)


def to_sdpa(mask: Mask, queries: int, keys: int, *, device: torch.device | None = None) -> Tensor:
    """The attn_mask of torch's scaled_dot_product_attention: bool, (M, N) or (..., heads|1, M, N), True = attend.

    A row that attends to nothing has output 0 in torch too.

    >>> from regard import masks
    >>> masks.to_sdpa(masks.causal(), 2, 2)
    tensor([[ True, False],
            [ True,  True]])
    """
    return as_mask(mask).dense(queries, keys, device=device)


def from_multihead(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, *, heads: int | None = None
) -> Mask:
    """The mask that nn.MultiheadAttention and nn.Transformer read from their tensors, where True = leave out.

    With both, a pair exists if neither leaves it out. Floats that are all 0 (attend) or -inf (leave out) work too.

    Shapes: attn_mask is (M, N), or (batch · heads, M, N), which needs `heads`; key_padding_mask is (batch, N), or (N,)
    without a batch. If padding comes last in each sequence, the mask is `padding(lengths=...)`.

    Raises:
        MaskError: neither is passed; another shape or dtype; floats that are neither 0 nor -inf; `heads` missing, or
            not a divisor of the first axis.

    >>> from regard import masks
    >>> masks.from_multihead(key_padding_mask=torch.tensor([[False, True], [False, False]]))
    padding(lengths=[1, 2])
    """
    parts = []
    if attn_mask is not None:
        parts.append(_ignored_pairs(attn_mask, heads))
    if key_padding_mask is not None:
        parts.append(_ignored_keys(key_padding_mask))
    if not parts:
        raise MaskError("from_multihead needs attn_mask or key_padding_mask, or both; it was given neither")
    return reduce(and_, parts)


def to_multihead(
    mask: Mask,
    queries: int,
    keys: int,
    *,
    batch: int | None = None,
    heads: int | None = None,
    device: torch.device | None = None,
) -> dict[str, Tensor | None]:
    """The arguments attn_mask and key_padding_mask of nn.MultiheadAttention, in which True = leave out.

    `layer(x, x, x, **to_multihead(mask, M, N))` passes them. Operands of `&` that leave out the same keys for every
    query and head become the key_padding_mask, (batch, N); the others become the attn_mask, (M, N), or
    (batch · heads, M, N) if it depends on batch or heads, which needs their numbers, `batch` and `heads`. An argument
    without operands is None. The output of the layer is NaN for a row that attends to nothing, and 0 here.

    Raises:
        MaskError: the mask depends on batch or heads, and `batch` or `heads` is missing or not the mask's own number.

    >>> from regard import masks
    >>> masks.to_multihead(masks.causal() & masks.padding(lengths=[1, 2]), 2, 2)
    {'attn_mask': tensor([[False,  True],
            [False, False]]), 'key_padding_mask': tensor([[False,  True],
            [False, False]])}
    """
    padded, pairs = None, []
    for part in conjuncts(as_mask(mask)):
        exist = tokens_of(part, queries, keys)
        if exist is None or exist.ndim != 2 or len(exist) == 1:  # one row may be meant for any batch
            pairs.append(part)
        else:
            padded = exist if padded is None else padded & exist
    attended = None
    if pairs:
        attended = _per_head(reduce(and_, pairs).dense(queries, keys, device=device), {"batch": batch, "heads": heads})
    return {
        "attn_mask": None if attended is None else ~attended,
        "key_padding_mask": None if padded is None else ~padded.to(device),
    }


def _ignored_pairs(attn_mask: Tensor, heads: int | None) -> Mask:
    name = "from_multihead's attn_mask"
    tensor = checked(name, attn_mask, (2, 3), "(M, N) or (batch · heads, M, N)")
    keep = _attended(name, tensor)
    if keep.ndim == 2:
        return where(keep=keep)
    if heads is None:
        raise MaskError(
            f"{name} has the shape {tuple(keep.shape)}, (batch · heads, M, N): say how many heads there are, heads=..."
        )
    if keep.shape[0] % checked_count("from_multihead's heads", heads, least=1):
        raise MaskError(
            f"{name} has the shape {tuple(keep.shape)}: its first axis needs to be batch · heads, and is no multiple "
            f"of {heads} heads"
        )
    per_head = keep.unflatten(0, (keep.shape[0] // heads, heads))
    return where(keep=per_head[0] if len(per_head) == 1 else per_head)


def _ignored_keys(key_padding_mask: Tensor) -> Mask:
    name = "from_multihead's key_padding_mask"
    keep = _attended(name, checked(name, key_padding_mask, (1, 2), "(N,) or (batch, N)"))
    return where(keep=keep) if keep.ndim == 1 else token_mask(keep)


def _attended(name: str, tensor: Tensor) -> Tensor:
    """True = attend, from bool, where True = leave out, or from floats of 0 and -inf."""
    return ~tensor if tensor.dtype == torch.bool else unmasked(name, tensor, "leave out")


def _per_head(keep: Tensor, sizes: dict[str, int | None]) -> Tensor:
    """(M, N), or (batch · heads, M, N) if the mask depends on batch or heads."""
    four = four_axes("to_multihead", keep)
    if four.shape[:2] == (1, 1):
        return four[0, 0]
    for (name, size), own in zip(sizes.items(), four.shape[:2], strict=True):
        if size is None:
            raise MaskError(
                f"to_multihead: this mask depends on batch or heads, its shape is {tuple(keep.shape)}, and the layer "
                f"needs (batch · heads, M, N): say both, batch=... and heads=...; {name} is missing"
            )
        if own not in (1, checked_count(f"to_multihead's {name}", size)):
            raise MaskError(f"to_multihead: {name} is {size}, but this mask has the shape {tuple(keep.shape)}")
    return four.expand(*sizes.values(), -1, -1).flatten(0, 1)  # type: ignore[arg-type]
