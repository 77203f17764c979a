"""The attention masks of Hugging Face: of tokens, as tokenizers give them, and of pairs, as models pass them on."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import MaskError
from ..base import Mask, as_mask
from ..tensor_mask import where
from .torch_tensors import by_tokens, checked, four_axes, tokens, unmasked


def from_huggingface(attention_mask: Tensor) -> Mask:
    """The mask that Hugging Face's models read from an attention_mask.

    Shapes: (batch, N) of tokens, bool or 0 and 1, where 1 = token, 0 = padding: on the right it becomes
    `padding(lengths=...)`, anywhere else `where(keep=...)`. Or (batch|1, heads|1, M, N) of pairs: bool, where
    True = attend, or floats that are added, of nothing but 0 (attend) and -inf or the least number of a float type
    (leave out). The mask of tokens does not say `causal()`: where the model is causal, join it with `&`.

    Models that add the least number instead of -inf give a row without any key the mean of all values; such a row is
    0 here.

    Raises:
        MaskError: another shape; tokens that are floats, or other numbers than 0 and 1; pairs of whole numbers, or
            floats that are none of these.

    >>> from regard import masks
    >>> masks.from_huggingface(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    padding(lengths=[2, 3])
    """
    name = "from_huggingface's attention_mask"
    tensor = checked(name, attention_mask, (2, 4), "(batch, N) or (batch, heads or 1, M, N)")
    if tensor.ndim == 2:
        return by_tokens(_exist(name, tensor))
    return where(keep=tensor if tensor.dtype == torch.bool else unmasked(name, tensor, "attend", least=True))


def to_huggingface(
    mask: Mask,
    queries: int,
    keys: int,
    *,
    dtype: torch.dtype = torch.bool,
    device: torch.device | None = None,
) -> Tensor:
    """The attention_mask of pairs, (batch|1, heads|1, M, N): bool, where True = attend, or what is added to scores.

    A floating `dtype` gives 0 (attend) and the least number of that type (leave out), as Hugging Face's own do.

    Raises:
        MaskError: a dtype that is neither bool nor floating; a mask with more than one axis of batches.

    >>> from regard import masks
    >>> masks.to_huggingface(masks.causal(), 2, 2, dtype=torch.float16)
    tensor([[[[     0., -65504.],
              [     0.,      0.]]]], dtype=torch.float16)
    """
    keep = four_axes("to_huggingface", as_mask(mask).dense(queries, keys, device=device))
    if dtype == torch.bool:
        return keep
    if not dtype.is_floating_point:
        raise MaskError(f"to_huggingface's dtype is {dtype}; it needs bool (True = attend) or a floating type")
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill(~keep, torch.finfo(dtype).min)


def to_padding_mask(mask: Mask, queries: int, keys: int) -> Tensor:
    """The attention_mask of tokens, as Hugging Face's tokenizers give it: int64 (batch|1, N), 1 = token, 0 = padding.

    Raises:
        MaskError: the mask differs between queries or heads, or has more than one axis of batches.

    >>> from regard import masks
    >>> masks.to_padding_mask(masks.padding(lengths=[2, 3]), 3, 3)
    tensor([[1, 1, 0],
            [1, 1, 1]])
    """
    exist = tokens(as_mask(mask), queries, keys)
    if exist is None or exist.ndim > 2:
        raise MaskError(
            f"to_padding_mask: {mask!r} does not keep the same keys for every query and head of a sequence, which a "
            "mask of tokens does; to_huggingface gives the mask of pairs"
        )
    return exist.reshape(-1, keys).long()


def _exist(name: str, tensor: Tensor) -> Tensor:
    if tensor.dtype == torch.bool:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        raise MaskError(
            f"{name} of tokens is {tensor.dtype}, whose polarity is not clear; it needs bool or whole numbers, "
            "1 = token, 0 = padding: if 1.0 means a token, give the tensor's .bool()"
        )
    if ((tensor != 0) & (tensor != 1)).any():
        raise MaskError(
            f"{name} of tokens has values from {int(tensor.min())} to {int(tensor.max())}; it needs 1 = token, "
            "0 = padding. Numbers of documents go to masks.documents(...)"
        )
    return tensor == 1
