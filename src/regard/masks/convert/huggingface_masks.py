"""Conversion between masks and Hugging Face's attention_mask: of tokens (tokenizers) or of pairs (models)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...errors import MaskError
from ..base import Mask, as_mask
from ..tensor_mask import where
from .torch_tensors import checked, four_axes, token_mask, tokens_of, unmasked


def from_huggingface(attention_mask: Tensor) -> Mask:
    """The mask that Hugging Face's models read from an attention_mask.

    Shapes: (batch, N) of tokens, bool or 0 and 1, where 1 = token, 0 = padding: padding on the right becomes
    `padding(lengths=...)`, any other `where(keep=...)`. Or (batch|1, heads|1, M, N) of pairs: bool, where
    True = attend, or floats added to the scores that are all 0 (attend), -inf or the least number of a float type
    (leave out). A mask of tokens is not causal: for a causal model, combine it with `causal()` by `&`.

    In models that add the least number instead of -inf, a row without any key gets the mean of all values; here its
    output is 0.

    Raises:
        MaskError: another shape; tokens that are floats, or numbers other than 0 and 1; pairs of whole numbers, or
            other floats.

    >>> from regard import masks
    >>> masks.from_huggingface(torch.tensor([[1, 1, 0], [1, 1, 1]]))
    padding(lengths=[2, 3])
    """
    name = "from_huggingface's attention_mask"
    tensor = checked(name, attention_mask, (2, 4), "(batch, N) or (batch, heads or 1, M, N)")
    if tensor.ndim == 2:
        return token_mask(_tokens(name, tensor))
    return where(keep=tensor if tensor.dtype == torch.bool else unmasked(name, tensor, "attend", least=True))


def to_huggingface(
    mask: Mask,
    queries: int,
    keys: int,
    *,
    dtype: torch.dtype = torch.bool,
    device: torch.device | None = None,
) -> Tensor:
    """The mask as an attention_mask of pairs, (batch|1, heads|1, M, N): bool, True = attend, or added to the scores.

    With a floating `dtype` it is 0 (attend) or the least number of that type (leave out), as in Hugging Face's models.

    Raises:
        MaskError: a dtype that is neither bool nor floating; a mask with more than one batch axis.

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
    """The mask as an attention_mask of tokens, as from a tokenizer: int64 (batch|1, N), 1 = token, 0 = padding.

    Raises:
        MaskError: the mask differs between queries or heads, or has more than one batch axis.

    >>> from regard import masks
    >>> masks.to_padding_mask(masks.padding(lengths=[2, 3]), 3, 3)
    tensor([[1, 1, 0],
            [1, 1, 1]])
    """
    exist = tokens_of(as_mask(mask), queries, keys)
    if exist is None or exist.ndim > 2:
        raise MaskError(
            f"to_padding_mask: {mask!r} does not keep the same keys for every query and head of a sequence, which a "
            "mask of tokens does; to_huggingface gives the mask of pairs"
        )
    return exist.reshape(-1, keys).long()


def _tokens(name: str, tensor: Tensor) -> Tensor:
    """A mask of tokens as bool; a MaskError for floats and for numbers other than 0 and 1."""
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
