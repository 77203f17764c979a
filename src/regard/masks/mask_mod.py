"""Masks from Python functions: the mask_mod of FlexAttention."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.broadcasting import broadcast_shapes
from ..core.grid import Blocks
from ..core.intervals import Ternary, Undecided
from ..core.mixed_devices import refuse_mixed_devices
from ..core.state import State
from ..core.state_search import state_of
from ..core.torch_modes import under_transform
from ..core.traced_function import PairFunctionTrace, TensorSubstitution
from ..errors import MaskError
from ..utils.pytree import object_token
from .base import Kept, Mask, Pairs
from .index_checks import checked_count, head_indices

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
_TRACED = "_memo_of_trace"  # the attribute of a mask with its `_Traced`
# The tensors that a function read when its mask was made. Masks have them too: an operator takes tensors as arguments.
_captured_by: weakref.WeakKeyDictionary[MaskMod, tuple[Tensor, ...]] = weakref.WeakKeyDictionary()


class _Traced(NamedTuple):
    """Whether a function may be broadcast, in this state of what it reads; None where that cannot be known."""

    state: State | None
    elementwise: bool


@dataclass(frozen=True, repr=False)
class MaskModMask(Mask):
    """mask_mod(batch, head, query position, key position)."""

    mask_mod: MaskMod
    batch: int | None
    heads: int | None
    elementwise: bool = field(compare=False)
    captured: tuple[Tensor, ...] = field(default=(), compare=False)
    _only_in_graphs: ClassVar = ("captured",)

    def keep(self, grid: Pairs) -> Kept:
        if isinstance(grid, Blocks):
            return self._on_tiles(grid)
        query, key = grid.query, grid.key
        one_pair = not query.ndim and not key.ndim
        evaluate = self.mask_mod if one_pair or self._may_be_broadcast() else self._mapped
        try:
            with self._in_graph():
                return evaluate(*self._indices(grid), query, key)
        except MaskError:
            raise
        except Exception as error:  # the function is the user's, and may raise anything
            refuse_mixed_devices(self, error, grid.device)
            raise MaskError(
                f"{self!r} cannot be evaluated: {type(error).__name__}: {error}. A mask_mod gets four tensors of whole "
                "numbers and returns a bool tensor; & | ~ and torch.where stand for and, or, not and if"
            ) from error

    def _in_graph(self) -> AbstractContextManager:
        """A context where the function reads the tensors of an exported graph in place of those that it captured."""
        if not self.captured or not torch.compiler.is_exporting():
            return nullcontext()
        return TensorSubstitution(_captured_by[self.mask_mod], self.captured)

    def _mapped(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The function evaluated for one pair at a time, mapped over all pairs by torch."""
        from torch.nn.attention.flex_attention import create_mask  # imports torch's compiler, which few functions need

        leading = broadcast_shapes(*(index.shape[:-2] for index in (batch, head, query, key)))
        rows, columns = query.shape[-2], key.shape[-1]
        if not leading.numel() * rows * columns:
            return torch.zeros(*leading, rows, columns, dtype=torch.bool, device=query.device)
        b, h, q, k = (
            index.expand((*leading, *index.shape[-2:])).reshape(leading.numel(), -1)
            for index in (batch, head, query, key)
        )
        kept = create_mask(
            lambda row, _, i, j: self.mask_mod(b[row, 0], h[row, 0], q[row, i], k[row, j]),
            len(b),
            1,
            rows,
            columns,
            query.device,
        )
        if kept.shape != (len(b), 1, rows, columns) or kept.dtype != torch.bool:
            raise _wrong_result(self, kept.dtype, tuple(kept.shape[4:]))
        return kept.view(*leading, rows, columns)

    def _on_tiles(self, blocks: Blocks) -> Ternary:
        """The function evaluated on intervals of positions; Undecided if it can only be mapped over single pairs."""
        if not self._may_be_broadcast():
            raise Undecided(f"{self!r} is evaluated pair by pair")
        return Ternary.convert(self.mask_mod(*self._indices(blocks), blocks.query, blocks.key))  # type: ignore[arg-type]

    def _may_be_broadcast(self) -> bool:
        """Whether the function may be broadcast; it is traced again where something has changed that it reads."""
        if under_transform():
            return self.elementwise
        traced = vars(self).get(_TRACED)
        if traced is None:
            traced = self._remember_trace(self.elementwise)
        if traced.state is None or traced.state.is_current():
            return traced.elementwise
        trace = _trace(self.mask_mod, self)
        _check_sizes(trace.reads, {"batch": self.batch, "heads": self.heads})
        return self._remember_trace(trace.elementwise).elementwise

    def _remember_trace(self, elementwise: bool) -> _Traced:
        vars(self)[_TRACED] = traced = _Traced(state_of(self.mask_mod), elementwise)
        return traced

    def _indices(self, grid: Pairs) -> tuple[Tensor, Tensor]:
        """Indices of batch and heads as leading axes, or 0 if the function reads neither."""
        batch = head = torch.zeros((), dtype=torch.int64, device=grid.device)
        if self.batch is not None:
            batch = grid.per_batch(torch.arange(self.batch, device=grid.device)[:, None, None])
        if self.heads is not None:
            head = head_indices(self, self.heads, grid)
        return batch, head

    def __repr__(self) -> str:
        name = getattr(self.mask_mod, "__name__", None) or repr(self.mask_mod)
        sizes = {"batch": self.batch, "heads": self.heads}
        return f"from_mod({name}{''.join(f', {axis}={size}' for axis, size in sizes.items() if size is not None)})"


def from_mod(mask_mod: MaskMod, *, batch: int | None = None, heads: int | None = None) -> Mask:
    """Pairs where *mask_mod(b, h, q, k)* is True: a mask_mod of FlexAttention, with positions as q and k.

    The function is written for one pair: its arguments are four whole numbers as tensors without axes, the indices of
    batch and head and the positions of query and key, and it returns a bool. (FlexAttention passes rows and columns
    instead of positions. These are the same for M = N, and otherwise with `query_positions=torch.arange(M)`.) A
    function that reads b or h needs `batch` or `heads`, their number, as in `create_block_mask`.

    A function of the operators and functions that `Mask` lists is also evaluated on whole tiles, by interval
    arithmetic. A tile on which that is undefined, and every tile of any other function, is PARTIAL.

    Raises:
        MaskError: mask_mod is not a function; it returns anything but one bool, reads b or h without `batch` or
            `heads`, or reads a tensor that requires a gradient; at evaluation, it fails.

    Source: FlexAttention, Dong et al. 2024, arXiv 2412.05496.

    >>> from regard import masks
    >>> masks.from_mod(lambda b, h, q, k: (q - k).abs() <= 1).dense(3, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 1],
            [0, 1, 1]], dtype=torch.int32)
    """
    if not callable(mask_mod) or isinstance(mask_mod, Mask):
        raise MaskError(f"from_mod needs a function (b, h, q, k) -> bool; it was given a {type(mask_mod).__name__}")
    sizes = {"batch": batch, "heads": heads}
    for name, size in sizes.items():
        if size is not None:
            checked_count(f"from_mod's {name}", size)
    trace = _trace(mask_mod, MaskModMask(mask_mod, batch, heads, False))
    _check_sizes(trace.reads, sizes)
    object_token(mask_mod)
    _captured_by[mask_mod] = tuple(trace.captured.values())
    mask = MaskModMask(mask_mod, batch, heads, trace.elementwise, _captured_by[mask_mod])
    mask._remember_trace(trace.elementwise)
    return mask


def _check_sizes(reads: set[str], sizes: dict[str, int | None]) -> None:
    """Raise a MaskError where the function reads an index whose number is not known."""
    for name in sorted(reads):
        if sizes[name] is None:
            raise MaskError(
                f"from_mod's function reads {'b' if name == 'batch' else 'h'}, so the mask differs between {name}: say "
                f"how many there are, from_mod(function, {name}=...)"
            )


def _trace(mask_mod: MaskMod, mask: MaskModMask) -> PairFunctionTrace:
    """Whether a function may be broadcast, what it reads of batch and heads, and its tensors, by one call of it."""
    batch, head, query, key = torch.zeros(4, dtype=torch.int64).unbind()
    trace = PairFunctionTrace(batch=batch, heads=head)
    try:
        with trace:
            kept = mask_mod(batch, head, query, key)
        trace.captured = {number: t for number, t in trace.captured.items() if t is not query and t is not key}
    except Exception:  # it may fail for this pair alone
        failed = PairFunctionTrace()
        failed.elementwise = False
        return failed
    if any(tensor.requires_grad for tensor in trace.captured.values()):
        raise MaskError(
            "from_mod's function reads a tensor that requires a gradient, and no gradient flows through a mask: give "
            "it tensor.detach(), or learn a bias instead"
        )
    if not isinstance(kept, Tensor):
        raise MaskError(
            f"from_mod's function returned {kept!r} for one pair; it needs a bool tensor, such as the result of k <= q"
        )
    if kept.dtype != torch.bool or kept.ndim:
        raise _wrong_result(mask, kept.dtype, tuple(kept.shape))
    return trace


def _wrong_result(mask: MaskModMask, dtype: torch.dtype, shape: tuple[int, ...]) -> MaskError:
    return MaskError(
        f"{mask!r}: the function returned {dtype} of shape {shape} for one pair; it needs one bool, of shape (). "
        "It is written for one query and one key, without axes; numbers that are added to the scores are a bias"
    )
