"""The mask that goes through a model of transformers as a tensor, and stays a symbol.

Masks as eager attention has them: numbers that are added to the scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import MaskError
from ..masks import Mask
from .mask_functions import Frame, MaskFunction, both, ends_at_the_query, existing, read


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


@dataclass
class Held:
    """What a symbolic mask holds, which all its aliases share: a mask, and its elements once they were asked for."""

    mask: Mask | None
    frame: Frame
    reached: Frame
    dtype: torch.dtype = torch.bool
    elements: Tensor | None = None

    def dense(self) -> Tensor:
        """The elements, (batch, 1, M, N): booleans, True = attend, or numbers that are added; of a part, its own."""
        if self.elements is None and self.mask is not None:
            frame = self.reached
            positions = frame.query_positions
            booleans = torch.zeros(self.frame.shape, dtype=torch.bool, device=frame.device)
            booleans[..., : frame.keys] = self.mask.dense(
                frame.queries, frame.keys, query_positions=positions, device=frame.device
            )
            self.elements = booleans if self.dtype == torch.bool else added(booleans, self.dtype)
        if self.elements is None:
            raise AssertionError("a part of a mask is made of its elements")
        return self.elements


class SymbolicMask(Tensor):
    """A mask that looks like a tensor (batch, 1, M, N), and holds no pairs: it says which exist.

    It looks like what the model expects. A model that supports sdpa knows booleans, True = attend. One that does not
    knows the mask of eager attention alone, numbers that are added: 0 (attend) or the least of its dtype; so this looks
    like them, and whatever the model computes with it is what it computes with eager attention.

    Models hand on what their mask function gives, look at its shape, and now and then compute with it. This goes
    through all of that: whatever computes with it gets the elements, made once and kept, so that a change in place is
    seen too. Booleans that a module adds to its scores are 0 or the least number of the scores' dtype there. `symbol`
    is the mask over the first `reach` keys, `None` of a part and once the elements may have changed; no query attends
    to a key beyond these.

    Raises:
        MaskError: booleans are converted to floating-point numbers, which may mean either.
    """

    held: Held

    @staticmethod
    def __new__(cls, held: Held) -> SymbolicMask:
        made = held.elements
        shape = held.frame.shape if made is None else made.shape
        strides = None if made is None else made.stride()
        mask = Tensor._make_wrapper_subclass(cls, shape, strides, dtype=held.dtype, device=held.frame.device)
        mask.held = held
        return mask

    @property
    def symbol(self) -> Mask | None:
        """Which pairs exist, keys at 0..reach-1 and queries at `query_positions`; None: what `dense` says."""
        # Whoever changes the elements, or a part of them, changes this tensor, as autograd counts it. What is made in
        # inference mode counts no changes: its elements are taken as they are, once someone asked for them.
        changed = self.held.elements is not None and (self.is_inference() or self._version > 0)
        return None if changed else self.held.mask

    @property
    def reach(self) -> int:
        """How many keys there are that a query may attend to: a static cache has more, not yet written."""
        return self.held.reached.keys

    @property
    def query_positions(self) -> Tensor | None:
        """Positions of the queries, (M,), where they are not the last M of the keys within reach."""
        return self.held.reached.query_positions

    def dense(self) -> Tensor:
        """The elements, (batch, 1, M, N): booleans, True = attend, or numbers that are added, as `dtype` says."""
        return self.held.dense()

    def tolist(self) -> Any:
        """The elements as lists."""
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The elements as an array."""
        return self.dense().numpy(force=force)

    def __repr__(self, *, tensor_contents: object = None) -> str:
        return f"SymbolicMask({self.symbol!r}, {tuple(self.shape)})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _AS_IT_IS:
            return cls(args[0].held)
        if func is _aten._to_copy.default:
            return _converted(args[0], kwargs)
        into = next((scores.dtype for scores in args[:2] if _is_floating(scores)), None) if func in _ADDITIONS else None

        def as_tensor(mask: SymbolicMask) -> Tensor:
            return mask.dense() if into is None or mask.dtype != torch.bool else added(mask.dense(), into)

        result = func(*tree_map_only(cls, as_tensor, args), **tree_map_only(cls, as_tensor, kwargs))
        return cls(replace(args[0].held, mask=None, elements=result)) if func in _PARTS else result


def _converted(mask: SymbolicMask, kwargs: dict) -> Tensor:
    """The mask on another device, still a symbol; or its elements in another dtype."""
    dtype = kwargs.get("dtype") or mask.dtype
    if mask.dtype == torch.bool and dtype.is_floating_point:
        raise MaskError(
            f"{mask!r} is bool, True = attend: as {dtype} it may mean what is added to scores or what they are "
            "multiplied with. Take torch.where(mask, 0.0, -inf), or choose attn_implementation='eager'"
        )
    if dtype != mask.dtype:
        return _aten._to_copy.default(mask.dense(), **kwargs)
    held, device = mask.held, kwargs.get("device") or mask.device
    dense = None if mask.symbol is not None else mask.dense().to(device)
    frames = {name: replace(getattr(held, name), device=device) for name in ("frame", "reached")}
    return SymbolicMask(replace(held, mask=mask.symbol, elements=dense, **frames))


def _is_floating(value: object) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


_aten = torch.ops.aten
_AS_IT_IS = {_aten.alias.default, _aten.detach.default}
"""What hands a tensor on without a change, so that it may stay a symbol."""

_PARTS = {
    _aten.clone.default,
    _aten.expand.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.unsqueeze.default,
    _aten.view.default,
}
"""What takes a part, or gives it another shape: elements of the same meaning."""

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
    """The mask function of "regard": which keys exist (`attention_mask`) and which of them a query sees, as symbols.

    It is never None: to transformers that means "causal, or not, as the module has it", which is a guess where there
    are fewer queries than keys. While a graph is traced it is the elements themselves, made by transformers.

    Shapes: (batch, 1, M, N) for M = q_length and N = kv_length; the first query has the position q_offset, the first
    key kv_offset; attention_mask is bool (batch, positions), True = token. It looks like booleans, or like numbers of
    `dtype` that are added where the models of this `config` know no others.
    """
    from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    function = causal_mask_function if mask_function is None else mask_function
    adds = adds_its_masks(type(config))
    if is_tracing(attention_mask) or is_tracing(q_offset if isinstance(q_offset, Tensor) else None):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "q_offset": q_offset}
        made = (eager_mask if adds else sdpa_mask)(
            batch_size,
            q_length,
            kv_length,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            device=device,
            dtype=dtype,
            **options,
        )
        if made is None:
            raise AssertionError("transformers left out a mask that it was told to make")
        return made
    frame = Frame(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), torch.device(device))
    mask = read(function, frame)
    reached = frame
    if ends_at_the_query(mask) and frame.last + 1 < frame.keys:
        reached = replace(frame, keys=max(frame.last + 1, 0))
        mask = read(function, reached)
    if attention_mask is not None:
        mask = both([mask, existing(attention_mask, reached)])
    return SymbolicMask(Held(mask, frame, reached, dtype if adds else torch.bool))
