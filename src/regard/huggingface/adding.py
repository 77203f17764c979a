"""Masks as eager attention has them: numbers that are added to the scores."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def added(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """What eager attention adds to scores of this dtype, from booleans: 0 (attend) or its least number."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, torch.finfo(dtype).min)


def adds_its_masks(configuration: type) -> bool:
    """Whether the models of a kind of configuration know masks as numbers that are added, and no booleans.

    A model that supports sdpa gets booleans there, so it knows both. One that does not may compute with its mask as if
    it could be nothing but numbers: pad it with 0.0 for "attend", or fill it with the least number for "do not". Where
    no model has this configuration, nor any that it is a kind of, no one expects numbers.
    """
    from transformers import PreTrainedModel

    known = list(_kinds_of(PreTrainedModel))
    for kind in configuration.__mro__:
        if models := [model for model in known if model.config_class is kind]:
            return not all(model._supports_sdpa for model in models)
    return False


def _kinds_of(model: type) -> Iterator[type]:
    """Its subclasses, and theirs."""
    for kind in model.__subclasses__():
        yield kind
        yield from _kinds_of(kind)
