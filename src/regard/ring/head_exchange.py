"""Heads instead of positions: an all-to-all that gives each process of a team all positions of some heads.

Before, each of the U processes of a team has all heads at its positions; after, 1/U of the heads at the positions of
the whole team, which attend as one shard of a ring of teams, or, where the team is all there is, as one process
(Jacobs et al. 2023, DeepSpeed-Ulysses, arXiv 2309.14509). Mask, bias, sinks and dropout are those of the heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from ..biases import Bias
from ..core.grid import Grid
from ..core.intervals import Ternary
from ..core.problem import Problem
from ..errors import ShapeError
from ..masks import Mask
from ..masks.base import Kept, Pairs
from .peers import Message, Peers


@dataclass(frozen=True)
class HeadExchange:
    """The processes of a team, which exchange heads for positions, and the number of positions of each.

    tag: of the first message; each kind of tensor has a tag of its own.
    """

    peers: Peers
    tag: int

    def to_positions(self, tensor: Tensor, lengths: tuple[int, ...], kind: int) -> Tensor:
        """All heads at the own positions, (..., H, m, D), to some heads at all, (..., H/U, M, D); differentiable."""
        return _ToPositions.apply(tensor, self, lengths, kind)

    def to_heads(self, tensor: Tensor, lengths: tuple[int, ...], kind: int) -> Tensor:
        """The inverse: some heads at all positions to all heads at the own positions; differentiable."""
        return _ToHeads.apply(tensor, self, lengths, kind)

    def scatter_heads(self, tensor: Tensor, lengths: Sequence[int], kind: int) -> Tensor:
        """`to_positions` without a gradient."""
        blocks = tensor.chunk(self.peers.size, -3)
        received = []
        for block, length in zip(blocks, lengths, strict=True):
            received.append(block.new_empty(*block.shape[:-2], length, block.shape[-1]))
        self._swap([block.contiguous() for block in blocks], received, kind)
        return torch.cat(received, -2)

    def gather_heads(self, tensor: Tensor, lengths: Sequence[int], kind: int) -> Tensor:
        """`to_heads` without a gradient."""
        rows = [part.contiguous() for part in tensor.split(list(lengths), -2)]
        received = [torch.empty_like(rows[self.peers.rank]) for _ in rows]
        self._swap(rows, received, kind)
        return torch.cat(received, -3)

    def _swap(self, parts: list[Tensor], received: list[Tensor], kind: int) -> None:
        """Send each process its part, and receive one of each."""
        others = [peer for peer in range(self.peers.size) if peer != self.peers.rank]
        sends: list[Message] = [(peer, parts[peer], self.tag + kind) for peer in others]
        receives: list[Message] = [(peer, received[peer], self.tag + kind) for peer in others]
        pending = self.peers.post(sends, receives)
        received[self.peers.rank].copy_(parts[self.peers.rank])
        pending.wait()


class _ToPositions(torch.autograd.Function):
    """Heads for positions; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: HeadExchange, lengths: tuple[int, ...], kind: int) -> Tensor:
        ctx.exchange, ctx.lengths, ctx.kind = exchange, lengths, kind
        return exchange.scatter_heads(tensor, lengths, kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange.gather_heads(gradient, ctx.lengths, ctx.kind), None, None, None


class _ToHeads(torch.autograd.Function):
    """Positions for heads; the gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, exchange: HeadExchange, lengths: tuple[int, ...], kind: int) -> Tensor:
        ctx.exchange, ctx.lengths, ctx.kind = exchange, lengths, kind
        return exchange.gather_heads(tensor, lengths, kind)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.exchange.scatter_heads(gradient, ctx.lengths, ctx.kind), None, None, None


def check_heads(problem: Problem, teams_of: int, processes: int) -> None:
    """Check that heads and processes can be divided over teams.

    Raises:
        ShapeError: they cannot; the message has the numbers that do.
    """
    if processes % teams_of:
        raise ShapeError(
            f"head_parallel={teams_of} cannot divide the {processes} processes of the group into teams: it needs to be "
            f"one of {_divisors(processes)}"
        )
    heads, key_heads = (tensor.shape[-3] if problem.heads else 1 for tensor in (problem.pairs.query, problem.value))
    if heads % teams_of or key_heads % teams_of:
        both = [number for number in _divisors(processes) if not (heads % number or key_heads % number)]
        raise ShapeError(
            f"head_parallel={teams_of} cannot divide {heads} query heads and {key_heads} key heads: it needs to divide "
            f"both, and the {processes} processes: one of {both}; the ring divides the positions of any number of heads"
        )


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if not number % divisor]


def with_heads(problem: Problem, part: int, parts: int) -> Problem:
    """Mask, bias, sinks and dropout of one part of the heads, which query, key and value have already."""
    number = problem.pairs.query.shape[-3]
    heads, every = range(part * number, (part + 1) * number), parts * number
    device = problem.value.device
    mask, bias, sinks, dropout = problem.mask, problem.bias, problem.sinks, problem.dropout
    if mask is not None and differs_by_head(mask, device):
        mask = MaskOfHeads(mask, heads.start, heads.stop)
    if bias is not None and differs_by_head(bias, device):
        bias = BiasOfHeads(bias, heads.start, heads.stop)
    if sinks is not None:
        sinks = sinks[heads.start : heads.stop]
    if dropout is not None:
        dropout = replace(dropout, head_block=(len(heads), heads.start, every))
    return replace(problem, mask=mask, bias=bias, sinks=sinks, dropout=dropout)


def differs_by_head(function: Mask | Bias | None, device: torch.device) -> bool:
    """Whether a mask or a bias has an axis of heads."""
    return function is not None and _has_heads(function.evaluate(Grid.from_lengths(1, 1, device=device)))


def _has_heads(pairs: Tensor) -> bool:
    return pairs.ndim >= 3 and pairs.shape[-3] > 1


@dataclass(frozen=True, repr=False)
class MaskOfHeads(Mask):
    """A mask of some of the heads, start..stop-1, of one that differs between heads."""

    mask: Mask
    start: int
    stop: int

    @property
    def by_distance(self) -> bool:
        return self.mask.by_distance

    @property
    def operands(self) -> tuple[Mask, ...]:
        return (self.mask,)

    def keep(self, grid: Pairs) -> Kept:
        kept = self.mask.keep(grid)
        if isinstance(kept, Ternary):
            return Ternary(self._of_heads(kept.verdicts))
        return self._of_heads(kept)

    def _of_heads(self, pairs: Tensor) -> Tensor:
        return pairs[..., self.start : self.stop, :, :] if _has_heads(pairs) else pairs

    def __repr__(self) -> str:
        return f"{self.mask!r} of the heads {self.start}..{self.stop - 1}"


@dataclass(frozen=True, eq=False, repr=False)
class BiasOfHeads(Bias):
    """A bias of some of the heads, start..stop-1, of one that differs between heads."""

    bias: Bias
    start: int
    stop: int

    def values(self, grid: Grid) -> Tensor:
        return self.bias.evaluate(grid)[..., self.start : self.stop, :, :]

    def parameters(self) -> tuple[Tensor, ...]:
        return self.bias.parameters()

    def with_parameters(self, tensors: Sequence[Tensor]) -> Self:
        return replace(self, bias=self.bias.with_parameters(tensors))

    def __repr__(self) -> str:
        return f"{self.bias!r} of the heads {self.start}..{self.stop - 1}"
