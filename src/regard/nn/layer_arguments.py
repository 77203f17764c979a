"""Combine the mask, bias and sinks of a layer with those passed to one call, and check its cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..biases import Bias, as_bias
from ..core.normalizer import Normalizer
from ..errors import ConfigurationError, ShapeError
from ..masks import Mask, where
from ..positions import Rotary, Rotation
from .caches import KeyValueStore, KVCache
from .caches.base import KEY_VALUE_MEMBERS
from .key_selection import KeySelection


class TensorsModule(nn.Module):
    """What has tensors, as a module: they are registered, so that they are moved, trained and saved with the layer.

    An `nn.Parameter` is registered as a parameter, any other tensor as a buffer that is not saved.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.names = [f"tensor_{index}" for index in range(len(tensors))]
        for name, tensor in zip(self.names, tensors, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=False)

    def tensors(self) -> list[Tensor]:
        """The tensors that are registered now."""
        return [getattr(self, name) for name in self.names]


class BiasModule(TensorsModule):
    """A bias as a module; `forward()` returns the bias over the tensors that are registered now.

    >>> import torch, regard
    >>> table = nn.Parameter(torch.zeros(2, 8))
    >>> module = BiasModule(regard.biases.relative(table, max_distance=9) + regard.biases.alibi(2))
    >>> [name for name, _ in module.named_parameters()], list(module.state_dict())
    (['tensor_0'], ['tensor_0'])
    >>> module()
    relative(<float32 (2, 8)>, max_distance=9, bidirectional=True) + alibi(<float32 (2,)>)
    """

    def __init__(self, bias: Bias | Tensor) -> None:
        bias = as_bias(bias)
        super().__init__(bias.parameters())
        self.template = _BiasTemplate(bias)

    def forward(self) -> Bias:
        """The bias over the tensors that are registered now."""
        return self.template.bias.with_parameters(self.tensors())

    def extra_repr(self) -> str:
        return repr(self.template.bias)


class NormalizerModule(TensorsModule):
    """A normalizer as a module; `forward()` returns the normalizer over the tensors that are registered now.

    >>> import torch, regard
    >>> module = NormalizerModule(regard.normalizers.Sigmoid(nn.Parameter(torch.zeros(2))))
    >>> [name for name, _ in module.named_parameters()]
    ['tensor_0']
    """

    def __init__(self, normalizer: Normalizer) -> None:
        if isinstance(normalizer, type) or not isinstance(normalizer, Normalizer):
            raise ConfigurationError(
                f"normalizer needs one from regard.normalizers, such as normalizers.Sigmoid(), or None for softmax; it "
                f"is {normalizer!r}"
            )
        super().__init__(normalizer.parameters())
        self.template = normalizer

    def forward(self) -> Normalizer:
        """The normalizer over the tensors that are registered now."""
        return self.template.with_parameters(self.tensors())

    def extra_repr(self) -> str:
        return repr(self.template)


@dataclass(frozen=True, eq=False)
class _BiasTemplate:
    """The original bias, shared by deep copies of the module; every call substitutes the registered tensors.

    A copy would break `biases.from_mod`: its function closes over the original tensors.
    """

    bias: Bias

    def __deepcopy__(self, memo: dict[int, Any]) -> _BiasTemplate:
        return self


def combine_masks(own: Mask | None, passed: Mask | Tensor | None) -> Mask | Tensor | None:
    """The intersection of a layer's own mask and the mask of a call.

    >>> from regard import masks
    >>> combine_masks(masks.causal(), masks.window(before=3))
    causal() & window(before=3)
    """
    if own is None or passed is None:
        return passed if own is None else own
    return own & (where(keep=passed) if isinstance(passed, Tensor) else passed)


def combine_biases(own: BiasModule | None, passed: Bias | Tensor | None) -> Bias | Tensor | None:
    """The sum of a layer's own bias and the bias of a call."""
    if own is None:
        return passed
    return own() if passed is None else own() + as_bias(passed)


def check_cache(cache: KeyValueStore, mask: Mask | None) -> None:
    """Check that a cache stores keys and values, and evicts by no other mask than the layer's.

    Raises:
        ConfigurationError: it lacks a member of `KeyValueStore`, or evicts by another mask.
    """
    kind = type(cache)
    missing = () if kind is KVCache else sorted(set(KEY_VALUE_MEMBERS).difference(dir(cache)))
    if missing:
        raise ConfigurationError(
            f"step needs a KVCache, such as layer.make_cache() returns, or another cache of keys and values; it got a "
            f"{kind.__name__}, which has no {', '.join(missing)}. Cross-attention has no steps: forward(query, memory) "
            "accepts what project_memory(memory) returned"
        )
    if cache.mask is not None and cache.mask is not mask and cache.mask != mask:
        raise ConfigurationError(
            f"the cache evicts keys by {cache.mask!r}, but the layer's own mask is {mask!r}: layer.make_cache() "
            "returns a cache for its mask, KVCache() one that never evicts"
        )


def check_no_rotation(rotation: Rotation | None) -> None:
    """Refuse a rotation for a layer without rotary embedding.

    Raises:
        ConfigurationError: a rotation was passed.
    """
    if rotation is not None:
        raise ConfigurationError(
            "a rotation was passed, but the layer has no rotary embedding: make it with rotary=, or leave rotation= out"
        )


def check_no_selection(selection: KeySelection | None) -> None:
    """Refuse a selection for a layer that attends to all keys that its mask allows.

    Raises:
        ConfigurationError: a selection was passed.
    """
    if selection is not None:
        raise ConfigurationError(
            "a selection was passed, but no indexer chooses the keys of the layer: leave selection= out, or make a "
            "LatentAttention with indexer="
        )


def learned_sinks(sinks: Tensor, num_heads: int) -> nn.Parameter:
    """The sink logits (num_heads,) as a parameter.

    Raises:
        ShapeError: not one floating-point number for each head.
    """
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or tuple(sinks.shape) != (num_heads,):
        has = f"{sinks.dtype} {tuple(sinks.shape)}" if isinstance(sinks, Tensor) else f"a {type(sinks).__name__}"
        raise ShapeError(
            f"sinks is {has}; it needs the first value of one floating-point logit for each head: "
            f"torch.zeros({num_heads})"
        )
    return sinks if isinstance(sinks, nn.Parameter) else nn.Parameter(sinks)


def check_parts_of_layer(projections: object, gate: object) -> None:
    """Check that an attention layer is made of modules.

    Raises:
        ConfigurationError: projections, or a gate, that are none.
    """
    if not isinstance(projections, nn.Module) or not hasattr(projections, "head_dim"):
        raise ConfigurationError(
            f"projections is {projections!r}; the layer needs its dims and heads as nn.Projections(dim, num_heads)"
        )
    if gate is not None and not isinstance(gate, nn.Module):
        raise ConfigurationError(f"gate is {gate!r}; it needs an nn.OutputGate, or None for no gate")


def checked_rotary(rotary: Rotary | None, head_dim: int) -> Rotary | None:
    """Refuse what is no rotary embedding, and one of more features than a head has."""
    if rotary is not None and not hasattr(rotary, "rotation"):
        raise ConfigurationError(
            f"rotary is {rotary!r}; it needs a positions.Rotary({head_dim}), or None for no rotary embedding"
        )
    if rotary is not None and rotary.dim > head_dim:
        raise ConfigurationError(
            f"rotary turns {rotary.dim} features, but heads have head_dim={head_dim}: give Rotary a dim of {head_dim} "
            "or less"
        )
    return rotary
