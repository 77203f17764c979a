"""Messages with the states of linear attention, from each process to those with later positions, and their gradients.

The state after a piece, a range of consecutive positions, is a function of the state before it,

    S_out = T S_in + S_own,

where S_own and T depend on the keys of the piece alone: all processes compute theirs at once, send them, and compose
those of the pieces before their own. So no process waits for the computation of another one. A message has the size of
states, whatever the length of the pieces (as in Sun et al. 2025, arXiv 2502.07563, whose all-gather also sends states
to processes that read none of them).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..errors import KernelError
from .peers import Message, Peers

NO_SECOND_DERIVATIVES = (
    "linear attention in a ring has no second derivatives: take them over shorter sequences, with "
    "regard.linear_attention in one process, or leave out create_graph=True"
)


@dataclass(frozen=True, eq=False)
class PieceStates:
    """What pieces add to states, S_out = T S_in + S_own, one entry for each piece and sequence.

    Shapes: own (E, Hk, D, C); transition (E, Hk, D, D), a matrix, or (E, Hk, 1 or D, 1), factors of all features or of
    each, or None for 1. marks (E, Hk, 2): 1 where a key is NaN or infinite, and where any key exists, else 0.
    """

    own: Tensor
    transition: Tensor | None
    marks: Tensor

    def __getitem__(self, entries: Tensor) -> PieceStates:
        transition = None if self.transition is None else self.transition[entries]
        return PieceStates(self.own[entries], transition, self.marks[entries])

    def after(self, before: PieceStates) -> PieceStates:
        """The states after these pieces, of those before them."""
        state = before.own
        if self.transition is not None:
            is_matrix = self.transition.shape[-1] > 1
            state = self.transition @ state if is_matrix else self.transition * state
        return PieceStates(state + self.own, None, self.marks.maximum(before.marks))

    def flatten(self) -> Tensor:
        """All numbers of an entry in a row, (E, numbers)."""
        parts = [self.own, *([] if self.transition is None else [self.transition]), self.marks]
        return torch.cat([part.flatten(1) for part in parts], 1)

    def unflatten(self, rows: Tensor) -> PieceStates:
        """The entries of rows that entries like these were flattened to."""
        parts = [self.own, *([] if self.transition is None else [self.transition]), self.marks]
        cut = rows.split([part.shape[1:].numel() for part in parts], 1)
        own, *transition, marks = (row.unflatten(1, part.shape[1:]) for row, part in zip(cut, parts, strict=True))
        return PieceStates(own, transition[0] if transition else None, marks)


@dataclass(frozen=True, eq=False)
class StatePlan:
    """Which states travel in a call of causal linear attention, the same in every process.

    A sequence is a row of the batch, or a document of it that lies in several pieces.

    processes: the process of each piece, in the order of positions. present (pieces, sequences): bool, whether a piece
    has positions of a sequence. wants_final: whether all processes compute the states after the last piece. tags: of
    the messages forward and backward.
    """

    peers: Peers
    processes: tuple[int, ...]
    present: Tensor
    wants_final: bool
    tags: tuple[int, int]

    def entries(self, owner: int, reader: int) -> Tensor:
        """Pieces and sequences of the owner's states that the reader composes, (E, 2), in the order of pieces.

        All where the owner is the reader.
        """
        needed = self.present.clone()
        if reader != owner and not self.wants_final:
            later = torch.zeros_like(self.present[0])
            for piece in reversed(range(len(self.processes))):
                needed[piece] &= later
                if self.processes[piece] == reader:
                    later = later | self.present[piece]
        owned = torch.tensor([process == owner for process in self.processes])
        return (needed & owned.unsqueeze(-1)).nonzero()

    def send(self, own: PieceStates, anchor: Tensor) -> tuple[PieceStates, Tensor, Tensor]:
        """All states that this process composes, the pieces and sequences (E, 2) that they are of, and the anchor.

        own: the states of this process's pieces, in the order of `entries`. anchor: a tensor that the result of every
        process depends on, so that each runs the backward pass of the messages.
        """
        rank, others = self.peers.rank, [r for r in range(self.peers.size) if r != self.peers.rank]
        mine = self.entries(rank, rank)
        number = torch.full(self.present.shape, -1)
        number[mine[:, 0], mine[:, 1]] = torch.arange(len(mine))
        sent = {r: number[tuple(self.entries(rank, r).unbind(1))].to(own.own.device) for r in others}
        received = {r: self.entries(r, rank) for r in others}
        counts = {r: len(entries) for r, entries in received.items()}
        rows, anchor = _StateExchange.apply(self, sent, counts, own.flatten(), anchor)  # type: ignore[misc]
        return own.unflatten(rows), torch.cat([mine, *received.values()]), anchor

    def compose(self, states: PieceStates, entries: Tensor, first: PieceStates) -> tuple[PieceStates, PieceStates]:
        """The states before each piece of this process, in the order of `entries`, and those after all pieces.

        first: those before the first piece, one for each sequence. The last result is right where `wants_final`.
        """
        current, found = first, []
        for piece, process in enumerate(self.processes):
            if process == self.peers.rank:
                found.append(current[self.present[piece].nonzero().flatten().to(first.own.device)])
            here = (entries[:, 0] == piece).nonzero().flatten()
            if len(here):
                at = entries[here, 1].to(first.own.device)
                after = states[here.to(first.own.device)].after(current[at])
                current = replace(
                    current,
                    own=current.own.index_copy(0, at, after.own),
                    marks=current.marks.index_copy(0, at, after.marks),
                )
        own, marks = torch.cat([each.own for each in found]), torch.cat([each.marks for each in found])
        return PieceStates(own, None, marks), current


class _StateExchange(torch.autograd.Function):
    """Rows of this process, and behind them those that it received; gradients of these travel to where they are from.

    sent: for each other process, which rows go there. counts: how many come from there.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: StatePlan, sent: dict[int, Tensor], counts: dict[int, int], own: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.plan, ctx.sent, ctx.counts, ctx.rows = plan, sent, counts, len(own)
        arrived = {r: own.new_empty(count, own.shape[1]) for r, count in counts.items()}
        _transfer(plan.peers, {r: own[rows] for r, rows in sent.items()}, arrived, plan.tags[0])
        return torch.cat([own, *arrived.values()]), anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Any, ...]:
        gradient, grad_anchor = above
        if torch.is_grad_enabled():
            raise KernelError(NO_SECOND_DERIVATIVES)
        if not ctx.needs_input_grad[3]:
            return None, None, None, None, grad_anchor
        own, *parts = gradient.split([ctx.rows, *ctx.counts.values()])
        arrived = {r: own.new_empty(len(rows), own.shape[1]) for r, rows in ctx.sent.items()}
        home = dict(zip(ctx.counts, parts, strict=True))
        _transfer(ctx.plan.peers, home, arrived, ctx.plan.tags[1])
        own = own.clone()
        for r, rows in ctx.sent.items():
            own.index_add_(0, rows, arrived[r])
        return None, None, None, own, grad_anchor


def _transfer(peers: Peers, sent: dict[int, Tensor], arrived: dict[int, Tensor], tag: int) -> None:
    """Send a tensor to each process, and receive one from each."""
    sends: list[Message] = [(r, rows.contiguous(), tag) for r, rows in sent.items()]
    receives: list[Message] = [(r, space, tag) for r, space in arrived.items()]
    peers.post(sends, receives).wait()


def sum_over_processes(peers: Peers, tensor: Tensor) -> Tensor:
    """The sum of a tensor over all processes, whose gradient is the sum of all processes' gradients."""
    return _Sum.apply(peers, tensor)  # type: ignore[return-value]


class _Sum(torch.autograd.Function):
    """The sum over processes, forward and backward."""

    @staticmethod
    def forward(ctx: Any, peers: Peers, tensor: Tensor) -> Tensor:
        ctx.peers = peers
        return peers.sum(tensor.clone(memory_format=torch.contiguous_format), "while states were summed")

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[None, Tensor]:
        if torch.is_grad_enabled():
            raise KernelError(NO_SECOND_DERIVATIVES)
        return None, ctx.peers.sum(above[0].clone(memory_format=torch.contiguous_format))
