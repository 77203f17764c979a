"""What belongs to a layer, and what a call adds to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..biases import Bias, as_bias
from ..errors import ConfigurationError, ShapeError
from ..masks import Mask, where
from ..positions import Rotation
from .caches import KVCache


class HeldBias(nn.Module):
    """A bias whose tensors are a module's own: they move, train and are saved with the layer that adds it.

    `forward()` gives the bias over them as they are now. A tensor that is an `nn.Parameter` is a parameter; any other
    one moves along and is not saved.

    >>> import torch, regard
    >>> table = nn.Parameter(torch.zeros(2, 8))
    >>> held = HeldBias(regard.biases.relative(table, max_distance=9) + regard.biases.alibi(2))
    >>> [name for name, _ in held.named_parameters()], list(held.state_dict())
    (['tensor_0'], ['tensor_0'])
    >>> held()
    relative(<float32 (2, 8)>, max_distance=9, bidirectional=True) + alibi(<float32 (2,)>)
    """

    def __init__(self, bias: Bias | Tensor) -> None:
        super().__init__()
        self.pattern = _Pattern(as_bias(bias))
        tensors = self.pattern.bias.parameters()
        self.names = [f"tensor_{index}" for index in range(len(tensors))]
        for name, tensor in zip(self.names, tensors, strict=True):
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=False)

    def forward(self) -> Bias:
        """The bias over the tensors that this module has now."""
        return self.pattern.bias.with_parameters([getattr(self, name) for name in self.names])

    def extra_repr(self) -> str:
        return repr(self.pattern.bias)


@dataclass(frozen=True, eq=False)
class _Pattern:
    """The bias that was given, which a copy of the module shares: what it is made of is replaced in each call.

    Were it copied, a function of `biases.from_mod` would no longer read the tensors that it is known by.
    """

    bias: Bias

    def __deepcopy__(self, memo: dict[int, Any]) -> _Pattern:
        return self


def joined_mask(own: Mask | None, given: Mask | Tensor | None) -> Mask | Tensor | None:
    """The pairs that both a layer's mask and that of a call keep.

    >>> from regard import masks
    >>> joined_mask(masks.causal(), masks.window(before=3))
    causal() & window(before=3)
    """
    if own is None or given is None:
        return given if own is None else own
    return own & (where(keep=given) if isinstance(given, Tensor) else given)


def joined_bias(own: HeldBias | None, given: Bias | Tensor | None) -> Bias | Tensor | None:
    """The sum of a layer's bias and that of a call."""
    if own is None:
        return given
    return own() if given is None else own() + as_bias(given)


def check_cache(cache: object, mask: Mask | None) -> None:
    """A cache that keeps what a layer with this mask needs.

    Raises:
        ConfigurationError: it is none, or drops by another mask.
    """
    if not isinstance(cache, KVCache):
        raise ConfigurationError(
            f"step needs a KVCache, such as layer.make_cache() gives; it was given a {type(cache).__name__}. "
            "Cross-attention has no steps: forward(query, memory) takes what remember(memory) gave"
        )
    if cache.mask is not None and cache.mask is not mask and cache.mask != mask:
        raise ConfigurationError(
            f"the cache drops keys by {cache.mask!r}, but the layer's own mask is {mask!r}: layer.make_cache() gives a "
            "cache for its mask, KVCache() one that keeps everything"
        )


def check_no_rotation(rotation: Rotation | None) -> None:
    """Nothing to turn by, for a layer that turns nothing.

    Raises:
        ConfigurationError: there is a rotation.
    """
    if rotation is not None:
        raise ConfigurationError(
            "the layer was given a rotation, and turns nothing: make it with rotary=, or leave the rotation out"
        )


def learned_sinks(sinks: Tensor, num_heads: int) -> nn.Parameter:
    """The logits of the heads' sinks, as a parameter.

    Raises:
        ShapeError: they are not one floating-point number for each head.
    """
    if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or tuple(sinks.shape) != (num_heads,):
        has = f"{sinks.dtype} {tuple(sinks.shape)}" if isinstance(sinks, Tensor) else f"a {type(sinks).__name__}"
        raise ShapeError(
            f"sinks is {has}; it needs the first value of one floating-point logit for each head: "
            f"torch.zeros({num_heads})"
        )
    return sinks if isinstance(sinks, nn.Parameter) else nn.Parameter(sinks)
