"""The mask function registered with transformers, and the tensor subclass for symbolic masks that it returns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import MaskError
from ..masks import Mask
from .mask_functions import MaskExtent, MaskFunction, convert, intersection, is_causal_mask, padding_mask


def additive_mask(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """The additive mask of eager attention from booleans: 0 where True, else the lowest finite number of the dtype."""
    return torch.zeros(keep.shape, dtype=dtype, device=keep.device).masked_fill_(~keep, torch.finfo(dtype).min)


def needs_additive_masks(configuration: type) -> bool:
    """Whether the models of a configuration class expect additive float masks, and not booleans.

    A model that supports sdpa gets booleans with it, so it accepts both. One that does not may rely on float masks: pad
    them with 0.0 for "attend", or fill them with the lowest number for "ignore". False where no model has this
    configuration class or one of its bases.
    """
    from transformers import PreTrainedModel

    known = list(_subclasses(PreTrainedModel))
    for kind in configuration.__mro__:
        if models := [model for model in known if model.config_class is kind]:
            return not all(model._supports_sdpa for model in models)
    return False


@cache
def _running_model_needs_additive_masks(configuration: type) -> bool:
    """`needs_additive_masks`, found once: a model that runs is among those known. Not for graphs that are traced."""
    return needs_additive_masks(configuration)


def _subclasses(model: type) -> Iterator[type]:
    """All direct and indirect subclasses."""
    for kind in model.__subclasses__():
        yield kind
        yield from _subclasses(kind)


@dataclass
class MaskContents:
    """Contents of a symbolic mask, shared by all its aliases: the mask, and its elements once they are evaluated.

    extent: positions of the whole tensor; reachable: the same without the keys that no query can attend to.
    """

    mask: Mask | None
    extent: MaskExtent
    reachable: MaskExtent
    dtype: torch.dtype = torch.bool
    elements: Tensor | None = None

    def dense(self) -> Tensor:
        """The elements, (batch, 1, M, N): booleans, True = attend, or an additive mask."""
        if self.elements is None and self.mask is not None:
            extent = self.reachable
            positions = extent.query_positions
            booleans = torch.zeros(self.extent.shape, dtype=torch.bool, device=extent.device)
            booleans[..., : extent.keys] = self.mask.dense(
                extent.queries, extent.keys, query_positions=positions, device=extent.device
            )
            self.elements = booleans if self.dtype == torch.bool else additive_mask(booleans, self.dtype)
        if self.elements is None:
            raise AssertionError("a mask without a symbol needs elements")
        return self.elements


class LazyMaskTensor(Tensor):
    """A lazy mask tensor (batch, 1, M, N): a symbolic mask, and its elements once an operation needs them.

    Its dtype is the one that the model expects: booleans, True = attend, for a model that supports sdpa; else the
    additive mask of eager attention, 0 (attend) or the lowest number of its dtype. So the results of operations on it
    are those with eager attention.

    Models pass on the result of their mask function, read its shape, and sometimes compute with it. Operations get the
    elements, which are evaluated once and stored, so that changes in place take effect. Booleans that a module adds to
    its scores are converted to an additive mask of the dtype of the scores. `symbol` is the mask over the first
    `reachable_keys` keys, and None for a slice or once the elements may have changed; no query attends to a key beyond
    these.

    Raises:
        MaskError: booleans are converted to floating-point numbers, which may mean either.
    """

    contents: MaskContents

    @staticmethod
    def __new__(cls, contents: MaskContents) -> LazyMaskTensor:
        elements = contents.elements
        shape = contents.extent.shape if elements is None else elements.shape
        strides = None if elements is None else elements.stride()
        mask = Tensor._make_wrapper_subclass(cls, shape, strides, dtype=contents.dtype, device=contents.extent.device)
        mask.contents = contents
        return mask

    @property
    def symbol(self) -> Mask | None:
        """The mask over keys 0..reachable_keys-1 and queries at `query_positions`; None where only `dense` has it."""
        # A change in place of the elements or of a view increases the version of this tensor. Inference tensors have no
        # version: there the elements count, once they have been evaluated.
        changed = self.contents.elements is not None and (self.is_inference() or self._version > 0)
        return None if changed else self.contents.mask

    @property
    def reachable_keys(self) -> int:
        """Number of keys that a query may attend to: a static cache has more, not yet written."""
        return self.contents.reachable.keys

    @property
    def query_positions(self) -> range | None:
        """Positions of the queries, M of them, where they are not the last M of the reachable keys."""
        return self.contents.reachable.query_positions

    def dense(self) -> Tensor:
        """The elements, (batch, 1, M, N): booleans, True = attend, or an additive mask, depending on `dtype`."""
        return self.contents.dense()

    def tolist(self) -> Any:
        """The elements as lists."""
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The elements as an array."""
        return self.dense().numpy(force=force)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"LazyMaskTensor({self.symbol!r}, {tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _ALIASES:
            return cls(args[0].contents)
        if func is _aten._to_copy.default:
            return _convert_copy(args[0], kwargs)
        added_to = _floating_dtype(args[:2]) if func in _ADDITIONS else None

        def as_tensor(mask: LazyMaskTensor) -> Tensor:
            if added_to is None or mask.dtype != torch.bool:
                return mask.dense()
            return additive_mask(mask.dense(), added_to)

        result = func(*tree_map_only(cls, as_tensor, args), **tree_map_only(cls, as_tensor, kwargs))
        return cls(replace(args[0].contents, mask=None, elements=result)) if func in _VIEWS else result


def _convert_copy(mask: LazyMaskTensor, kwargs: dict) -> Tensor:
    """The mask on another device, still symbolic; or its elements in another dtype."""
    dtype = kwargs.get("dtype") or mask.dtype
    if mask.dtype == torch.bool and dtype.is_floating_point:
        raise MaskError(
            f"{mask!r} is bool, True = attend: as {dtype} it may mean numbers to add to scores, "
            "or to multiply them with. Take torch.where(mask, 0.0, -inf), or choose attn_implementation='eager'"
        )
    if dtype != mask.dtype:
        return _aten._to_copy.default(mask.dense(), **kwargs)
    contents, device = mask.contents, kwargs.get("device") or mask.device
    dense = None if mask.symbol is not None else mask.dense().to(device)
    extents = {name: replace(getattr(contents, name), device=device) for name in ("extent", "reachable")}
    return LazyMaskTensor(replace(contents, mask=mask.symbol, elements=dense, **extents))


def _floating_dtype(values: tuple) -> torch.dtype | None:
    """Dtype of the first floating-point tensor among values."""
    return next((value.dtype for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


_aten = torch.ops.aten
_ALIASES = {_aten.alias.default, _aten.detach.default}
"""Operations that return the same elements, so that the result stays symbolic."""

_VIEWS = {
    _aten.clone.default,
    _aten.expand.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.unsqueeze.default,
    _aten.view.default,
}
"""Operations that slice or reshape: the result has elements of the same meaning, and no symbol."""

_ADDITIONS = {_aten.add.Tensor, _aten.add_.Tensor}


def symbolic_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    config: object = None,
    **options: Any,
) -> Tensor:
    """The mask function of "regard": a `LazyMaskTensor` of padding (`attention_mask`) and of the given `mask_function`.

    It never returns None: to transformers that means "causal or not, as the module decides", which is ambiguous with
    fewer queries than keys. While a graph is traced it returns the elements, evaluated by transformers.

    Shapes: (batch, 1, M, N) for M = q_length and N = kv_length; the first query has the position q_offset, the first
    key kv_offset; attention_mask is bool (batch, positions), True = token. The result is bool, or an additive mask
    of `dtype` where the models of this `config` expect one.
    """
    if mask_function is None:
        from transformers.masking_utils import causal_mask_function

        mask_function = causal_mask_function
    device = torch.device(device)
    if _is_traced(attention_mask, q_offset, device):
        return _traced_mask(
            needs_additive_masks(type(config)),
            batch_size,
            q_length,
            kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            device=device,
            dtype=dtype,
            **options,
        )
    extent = MaskExtent(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), device)
    mask = convert(mask_function, extent)
    reachable = extent
    if extent.last_query + 1 < extent.keys and is_causal_mask(mask):
        reachable = replace(extent, keys=max(extent.last_query + 1, 0))
        mask = convert(mask_function, reachable)
    if attention_mask is not None:
        mask = intersection([mask, padding_mask(attention_mask, reachable)])
    additive = _running_model_needs_additive_masks(type(config))
    return LazyMaskTensor(MaskContents(mask, extent, reachable, dtype if additive else torch.bool))


def _is_traced(attention_mask: Any, q_offset: Any, device: torch.device) -> bool:
    """Whether a graph is traced, as transformers asks it; of a step of decoding on the CPU in a tenth of its time."""
    if attention_mask is None and type(q_offset) is int and device.type == "cpu":
        return torch.compiler.is_compiling() or torch._C._is_tracing()
    from transformers.utils.import_utils import is_tracing

    return is_tracing(attention_mask) or (isinstance(q_offset, Tensor) and is_tracing(q_offset))


def _traced_mask(additive: bool, *lengths: Any, **options: Any) -> Tensor:
    """The elements of a mask whose graph is traced, evaluated by transformers."""
    from transformers.masking_utils import eager_mask, sdpa_mask

    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    elements = (eager_mask if additive else sdpa_mask)(*lengths, **options)
    if elements is None:
        raise AssertionError("transformers returned no mask, although skipping it was disabled")
    return elements
