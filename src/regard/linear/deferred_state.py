"""A state of decoding that is written once for many tokens, as writing it takes longer than reading it."""

from __future__ import annotations

from functools import cached_property
from threading import Lock

import torch
from torch import Tensor

from ..backends.base import TokenStep
from .linear_state import LinearState


class StateMemory:
    """What states of one sequence share: sums, written once for many tokens, and the tokens since.

    sums is (B, Hk, D · Dv), with the total after them where weights are normalised. recent is (B, Hk, capacity, width),
    or None for a capacity of 0, and its first `filled` tokens are set. A token is φ(k), u and the factor of its decay:
    none, one number, or one for each feature. What is set is not written again, as several states may read it: each
    appends behind its own last token, or, where another has done so before, in a copy, and then both are `shared`, as
    the sums are the same tensor. The tokens of a state that alone reads a memory may be added to its sums in place.

    A state is read by several threads at once. Whoever refers to the memory, and then has had the lock, can read it as
    long as the reference lasts.
    """

    def __init__(self, sums: Tensor, recent: Tensor | None, filled: int = 0, *, shared: bool = False) -> None:
        self.sums, self.recent, self.filled, self.shared = sums, recent, filled, shared
        self.lock = Lock()

    def __getstate__(self) -> tuple[Tensor, Tensor | None, int]:
        return self.sums, self.recent, self.filled

    def __setstate__(self, content: tuple[Tensor, Tensor | None, int]) -> None:
        self.__init__(*content, shared=True)

    def append_after(self, count: int) -> StateMemory:
        """This memory where its next token follows the first `count`, else a copy of these; the token counts as set."""
        if self.filled != count or not writable(self.recent):
            self.shared = True
            return StateMemory(self.sums, cloned(self.recent), count + 1, shared=True)
        self.filled += 1
        return self


class DeferredState(LinearState):
    """A state whose last tokens are beside its sums: S = diag(f) S' + Σ_j φ(k_j) u_jᵀ over the tokens since S'.

    Writing a state takes longer than reading it, so this one is written once for many tokens. It is as immutable as any
    other: `sums` is computed where it is read.

    The tokens are the first `count` of the memory; step is that of the last token.
    """

    def __init__(self, memory: StateMemory, count: int, step: TokenStep) -> None:
        vars(self).update(memory=memory, count=count, step=step, normalized=step.normalize, log_scale=None)

    memory: StateMemory
    count: int
    step: TokenStep

    def readable(self) -> tuple[StateMemory, int]:
        """The memory and the number of tokens in it that belong to the state, as long as the former is referred to."""
        memory = self.memory
        with memory.lock:
            return memory, self.count

    @cached_property
    def sums(self) -> Tensor:  # type: ignore[override]  # a field of the class above
        """S, and z beside it: (B, Hk, D, Dv or Dv + 1)."""
        memory, count = self.readable()
        dim, value_dim = self.step.dim, self.step.value_dim
        matrix = memory.sums[..., : dim * value_dim].unflatten(-1, (dim, value_dim))
        total = memory.sums[..., dim * value_dim :].unsqueeze(-1)  # without columns where there is no total
        stored = torch.cat([matrix, total], -1) if self.normalized else matrix.clone()
        if memory.recent is None or not count:
            return stored
        tokens = memory.recent[:, :, :count]
        keys, written, factors = tokens.split([dim, value_dim, self.step.decay_dim], -1)
        if self.normalized:
            written = torch.cat([written, torch.ones_like(written[..., :1])], -1)
        if factors.shape[-1]:
            stored = stored * factors.prod(2).unsqueeze(-1)
            later = torch.cat([factors[:, :, 1:], torch.ones_like(factors[:, :, :1])], 2)
            keys = keys * later.flip(2).cumprod(2).flip(2)
        return stored + keys.mT @ written

    @property
    def nbytes(self) -> int:
        """Bytes of the sums and of the memory for recent tokens."""
        memory = self.memory
        return memory.sums.nbytes + (0 if memory.recent is None else memory.recent.nbytes)

    def reorder(self, rows: Tensor) -> LinearState:
        """The state for these rows of the first axis, in this order."""
        memory, count = self.readable()
        recent = None if memory.recent is None else memory.recent[rows]
        return DeferredState(StateMemory(memory.sums[rows], recent, count), count, self.step)


def writable(tensor: Tensor | None) -> bool:
    """Whether there is a tensor, and the mode of torch allows that it is written."""
    return tensor is not None and (not tensor.is_inference() or torch.is_inference_mode_enabled())


def cloned(tensor: Tensor | None) -> Tensor | None:
    """A copy of the tensor, if there is one."""
    return None if tensor is None else tensor.clone()
