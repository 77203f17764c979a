"""A step of a language model over tensors alone: tokens and past in, logits and present out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..errors import ExportError, ShapeError
from ..models import LanguageModel
from ..models.language_model import LanguageModelCache
from ..nn import BlockCache, Cache, KVCache, LinearCache
from ..nn.forget_gate import ForgetGate
from .tensor_cache import TensorCache


class TensorStep(nn.Module):
    """`LanguageModel.step` as a module of tensors alone, to be exported: (tokens, *past) to (logits, *present).

    The past of a layer of softmax attention is its keys and values of all tokens so far, that of a layer of linear
    attention its state, the last rows of its convolution, its last token, and the number of tokens before, as far as it
    has them. `names` says which tensor is which, `no_past` gives those before the first token.

    A layer with a window keeps all keys here, and attends to those of its window.

    Shapes: tokens (batch, length); logits (batch, length, vocabulary size); keys and values (batch, key heads, N, ·).

    Args:
        model: a language model.

    Raises:
        ExportError: a layer whose cache is neither keys and values nor a state, or that has a forget gate.
        ShapeError: another number of tensors than the model has.

    >>> import torch
    >>> from regard.models import LanguageModel, language_model as lm
    >>> config = lm.LanguageModelConfig(
    ...     vocabulary_size=9,
    ...     dim=8,
    ...     layers=(lm.LayerConfig(),),
    ...     attention=lm.AttentionConfig(num_heads=2),
    ...     feed_forward=lm.GatedFeedForwardConfig(8),
    ... )
    >>> step = TensorStep(LanguageModel(config))
    >>> step.names
    ('keys.0', 'values.0')
    >>> logits, *past = step(torch.tensor([[1, 2, 3]]), *step.no_past(batch=1))
    >>> logits, *past = step(torch.tensor([[4]]), *past)
    >>> past[0].shape
    torch.Size([1, 2, 4, 4])
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        gated = [name for name, module in model.named_modules() if isinstance(module, ForgetGate)]
        if gated:
            raise ExportError(
                f"module {gated[0]!r} goes on from the last key of the cache, where there is one, and a graph has no "
                "branch for that: export the model itself, without a cache"
            )
        self.model = model
        device = model.embedding.weight.device
        with torch.no_grad():
            _, cache = model.step(torch.zeros(1, 1, dtype=torch.int64, device=device), model.make_cache())
        self._caches = tuple(_without_tokens(number, layer.attention) for number, layer in enumerate(cache.layers))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the tensors of the past, in order, each with the number of its layer."""
        return tuple(f"{name}.{layer}" for layer, cache in enumerate(self._caches) for name in _names(cache))

    def no_past(self, batch: int) -> tuple[Tensor, ...]:
        """The past of so many sequences before their first token."""
        rows = torch.zeros(batch, dtype=torch.int64, device=self.model.embedding.weight.device)
        return tuple(tensor for cache in self._caches for tensor in _tensors(cache.reorder(rows)))

    def forward(self, tokens: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """The logits of the token after each token, and the past of the next step."""
        if len(past) != len(self.names):
            raise ShapeError(
                f"a step needs the {len(self.names)} tensors of `names`, and was given {len(past)}: pass what the last "
                "step returned after the logits, or no_past(batch) before the first token"
            )
        given = iter(past)
        layers = tuple(BlockCache(_with_tensors(cache, given)) for cache in self._caches)
        logits, after = self.model.step(tokens, LanguageModelCache(layers))
        return logits, *(tensor for layer in after.layers for tensor in _tensors(layer.attention))


def _without_tokens(number: int, cache: Cache) -> TensorCache | LinearCache:
    """The cache of a layer as it is before the first token, for a batch of 1."""
    if isinstance(cache, KVCache):
        return TensorCache(cache.keys[:, :, :0].clone(), cache.values[:, :, :0].clone())
    if not isinstance(cache, LinearCache) or cache.state is None or cache.state.log_scale is not None:
        raise ExportError(
            f"layer {number} decodes from a {type(cache).__name__}, which is no set of tensors: layers of softmax "
            "attention, and of linear attention with a feature map that has no running maximum, can be exported. "
            "Export model.forward, without a cache"
        )
    state, tail, last = cache.state, cache.tail, cache.last
    return replace(
        cache,
        state=replace(state, sums=torch.zeros_like(state.sums)),
        tail=None if tail is None else torch.zeros_like(tail),
        last=None if last is None else torch.zeros_like(last),
        next_position=torch.zeros(1, dtype=torch.int64, device=state.sums.device),
    )


def _names(cache: TensorCache | LinearCache) -> list[str]:
    """The names of the tensors of a layer's cache."""
    if isinstance(cache, TensorCache):
        return ["keys", "values"]
    parts = {"state": cache.state, "tail": cache.tail, "last": cache.last, "length": cache.next_position}
    return [name for name, part in parts.items() if part is not None]


def _tensors(cache: Cache) -> Sequence[Tensor]:
    """The tensors of a layer's cache, in the order of `_names`."""
    if isinstance(cache, TensorCache):
        return cache.keys, cache.values
    if not isinstance(cache, LinearCache) or cache.state is None:
        raise AssertionError("a step gives caches of the kinds that it was given")
    parts = cache.state.sums, cache.tail, cache.last, cache.next_position
    return [part for part in parts if isinstance(part, Tensor)]


def _with_tensors(cache: TensorCache | LinearCache, given: Iterator[Tensor]) -> TensorCache | LinearCache:
    """A layer's cache with its tensors taken from those that are given."""
    parts = {name: next(given) for name in _names(cache)}
    if isinstance(cache, TensorCache):
        return TensorCache(parts["keys"], parts["values"])
    if cache.state is None:
        raise AssertionError("a cache of linear attention has a state here")
    state = replace(cache.state, sums=parts["state"])
    return replace(cache, state=state, tail=parts.get("tail"), last=parts.get("last"), next_position=parts["length"])
