"""The mask that goes through a model of transformers as a tensor, and stays a symbol."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from ..errors import MaskError
from ..masks import Mask
from .frame import Frame
from .reading import MaskFunction, both, ends_at_the_query, existing, read


@dataclass
class Held:
    """What a symbolic mask holds, which all its aliases share: a mask, and its booleans once they were asked for."""

    mask: Mask | None
    frame: Frame
    reached: Frame
    booleans: Tensor | None = None

    def dense(self) -> Tensor:
        """The booleans, (batch, 1, M, N), True = attend; of a part, its own."""
        if self.booleans is None and self.mask is not None:
            frame = self.reached
            positions = frame.query_positions
            keep = self.mask.dense(frame.queries, frame.keys, query_positions=positions, device=frame.device)
            self.booleans = torch.zeros(self.frame.shape, dtype=torch.bool, device=frame.device)
            self.booleans[..., : frame.keys] = keep
        if self.booleans is None:
            raise AssertionError("a part of a mask is made of booleans")
        return self.booleans


class SymbolicMask(Tensor):
    """A mask that looks like a bool tensor (batch, 1, M, N), True = attend, and holds no pairs: it says which exist.

    Models hand on what their mask function gives, look at its shape, and now and then compute with it. This goes
    through all of that: whatever computes with it gets the booleans, made once and kept, so that a change in place is
    seen too. A module that computes attention by itself adds its mask to the scores; what is added there is 0 (attend)
    or the least number of the scores' dtype, as by eager attention. `symbol` is the mask over the first `reach` keys,
    `None` of a part and once the booleans may have changed; no query attends to a key beyond these.

    Raises:
        MaskError: it is converted to floating-point numbers, which may mean either.
    """

    held: Held

    @staticmethod
    def __new__(cls, held: Held) -> SymbolicMask:
        made = held.booleans
        shape = held.frame.shape if made is None else made.shape
        strides = None if made is None else made.stride()
        mask = Tensor._make_wrapper_subclass(cls, shape, strides, dtype=torch.bool, device=held.frame.device)
        mask.held = held
        return mask

    @property
    def symbol(self) -> Mask | None:
        """Which pairs exist, keys at 0..reach-1 and queries at `query_positions`; None: what `dense` says."""
        # Whoever changes the booleans, or a part of them, changes this tensor, as autograd counts it. What is made in
        # inference mode counts no changes: its booleans are taken as they are, once someone asked for them.
        changed = self.held.booleans is not None and (self.is_inference() or self._version > 0)
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
        """The booleans, (batch, 1, M, N), True = attend."""
        return self.held.dense()

    def added(self, dtype: torch.dtype) -> Tensor:
        """What eager attention adds to scores of this dtype: 0 (attend) or its least number."""
        dense = self.dense()
        added = torch.zeros(dense.shape, dtype=dtype, device=dense.device)
        return added.masked_fill_(~dense, torch.finfo(dtype).min)

    def tolist(self) -> Any:
        """The booleans as lists."""
        return self.dense().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """The booleans as an array."""
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
        into = next((scores.dtype for scores in args[:2] if _is_floating(scores)), None)
        as_tensor = cls.dense if func not in _ADDITIONS or into is None else lambda mask: mask.added(into)
        result = func(*tree_map_only(cls, as_tensor, args), **tree_map_only(cls, as_tensor, kwargs))
        return cls(replace(args[0].held, mask=None, booleans=result)) if func in _PARTS else result


def _converted(mask: SymbolicMask, kwargs: dict) -> Tensor:
    """The mask on another device, still a symbol; or the numbers that it is made into."""
    dtype = kwargs.get("dtype") or torch.bool
    if dtype.is_floating_point:
        raise MaskError(
            f"{mask!r} is bool, True = attend: as {dtype} it may mean what is added to scores or what they are "
            "multiplied with. Take torch.where(mask, 0.0, -inf), or choose attn_implementation='eager'"
        )
    if dtype != torch.bool:
        return _aten._to_copy.default(mask.dense(), **kwargs)
    held, device = mask.held, kwargs.get("device") or mask.device
    dense = None if mask.symbol is not None else mask.dense().to(device)
    frames = {name: replace(getattr(held, name), device=device) for name in ("frame", "reached")}
    return SymbolicMask(replace(held, mask=mask.symbol, booleans=dense, **frames))


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
"""What takes a part, or gives it another shape: booleans of the same meaning."""

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
    **options: Any,
) -> Tensor:
    """The mask function of "regard": which keys exist (`attention_mask`) and which of them a query sees, as symbols.

    It is never None: to transformers that means "causal, or not, as the module has it", which is a guess where there
    are fewer queries than keys. While a graph is traced it is the booleans themselves, made by transformers.

    Shapes: (batch, 1, M, N) for M = q_length and N = kv_length; the first query has the position q_offset, the first
    key kv_offset; attention_mask is bool (batch, positions), True = token.
    """
    from transformers.masking_utils import causal_mask_function, sdpa_mask
    from transformers.utils.import_utils import is_tracing

    function = causal_mask_function if mask_function is None else mask_function
    if is_tracing(attention_mask) or is_tracing(q_offset if isinstance(q_offset, Tensor) else None):
        options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False, "q_offset": q_offset}
        keep = sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            device=device,
            **options,
        )
        if keep is None:
            raise AssertionError("transformers left out a mask that it was told to make")
        return keep
    frame = Frame(batch_size, q_length, kv_length, int(q_offset), int(kv_offset), torch.device(device))
    mask = read(function, frame)
    reached = frame
    if ends_at_the_query(mask) and frame.last + 1 < frame.keys:
        reached = replace(frame, keys=max(frame.last + 1, 0))
        mask = read(function, reached)
    if attention_mask is not None:
        mask = both([mask, existing(attention_mask, reached)])
    return SymbolicMask(Held(mask, frame, reached))
