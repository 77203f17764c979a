"""The exchange of keys, values and their gradients between the processes of a ring, in parts of bounded size.

A hop is cut into parts over key heads, and over keys where the mask differs by head or there are too few heads. While
one part is computed, the next one arrives in the other of two buffers: beside its own tensors a process stores two
parts of other processes' keys and values, two of their gradients, and one of the gradients of its own that arrive.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from math import gcd

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.score_forms import DotPairs
from .head_exchange import differs_by_head
from .hops import Hop, HopPlan, count
from .peers import Message, Peers, Pending

KEY, VALUE, KEY_GRADIENT, VALUE_GRADIENT, KINDS = range(5)
"""Tags of the messages of a call, counted from its first one."""

MOST_PARTS = 16
"""Parts of a hop, at most."""
PART_BYTES = 2**19
"""Bytes of the keys and values of a part, at least, where there are several: each costs messages and calls."""


@dataclass(frozen=True, slots=True)
class PartCounts:
    """The number of parts of each hop by key heads and by keys, the same in all processes."""

    heads: int
    keys: int

    @classmethod
    def for_problem(cls, problem: Problem, longest: int, *, by_heads: bool = True) -> PartCounts:
        """The numbers of parts in a ring whose longest shard has `longest` keys; by_heads: whether heads may be cut."""
        key, value = problem.pairs.key, problem.value
        numbers = sum(longest * tensor.shape[:-2].numel() * tensor.shape[-1] for tensor in (key, value))
        possible = min(MOST_PARTS, numbers * value.element_size() // PART_BYTES)
        if possible < 2:
            return cls(1, 1)
        parts = 1 << possible.bit_length() - 1
        heads = gcd(parts, key.shape[-3]) if by_heads and _heads_alike(problem) else 1
        return cls(heads, parts // heads)


def _heads_alike(problem: Problem) -> bool:
    """Whether score, mask and bias are the same for all heads, and nothing is drawn for each."""
    plain = isinstance(problem.pairs, DotPairs) and problem.bias is None and problem.dropout is None
    return problem.heads and plain and not differs_by_head(problem.mask, problem.value.device)


@dataclass(frozen=True, slots=True)
class HopPart:
    """A part of a hop, whose keys and values travel and are computed together.

    hop: the hop over the part's keys. key_heads and query_heads: those of the part; None for all.
    """

    hop: Hop
    key_heads: slice | None = None
    query_heads: slice | None = None


def hop_parts(plan: HopPlan, problem: Problem, counts: PartCounts) -> list[HopPart]:
    """This process's own keys, whole, then the parts of all hops with a message, in the same order everywhere."""
    own, *others = plan.hops
    heads: list[tuple[slice, slice] | tuple[()]] = [()]
    if counts.heads > 1:
        of_keys, of_queries = (tensor.shape[-3] // counts.heads for tensor in (problem.value, problem.pairs.query))
        heads = [
            (slice(at * of_keys, (at + 1) * of_keys), slice(at * of_queries, (at + 1) * of_queries))
            for at in range(counts.heads)
        ]
    cut = [hop.part(index, counts.keys) for hop in others for index in range(counts.keys)]
    return [HopPart(own), *(HopPart(hop, *some) for hop in cut if hop.sent or hop.received for some in heads)]


class ReusedBuffers:
    """Some buffers that are used in turn: a message arrives in one while another one is read or sent."""

    def __init__(self, number: int) -> None:
        self.buffers: list[Tensor | None] = [None] * number
        self.turn = 0

    def rows_like(self, tensor: Tensor, rows: int) -> Tensor:
        """A tensor (..., rows, ·) like a tensor (..., n, ·), uninitialised, in the buffer used longest ago."""
        shape = torch.Size((*tensor.shape[:-2], rows, tensor.shape[-1]))
        self.turn = (self.turn + 1) % len(self.buffers)
        buffer = self.buffers[self.turn]
        if buffer is None or len(buffer) < shape.numel():
            self.buffers[self.turn] = buffer = tensor.new_empty(shape.numel())
        return buffer[: shape.numel()].view(shape)


@dataclass(frozen=True)
class KeyExchange:
    """The messages with keys and values of one call of the ring, of which this process has those of `problem`.

    tag: of the first message.
    """

    peers: Peers
    problem: Problem
    parts: list[HopPart]
    tag: int

    def received(self) -> Iterator[tuple[HopPart, Tensor, Tensor]]:
        """Each part with its keys and values, which are valid until the next but one; the next are under way.

        All processes post the messages of one part before those of the next, as NCCL needs.
        """
        buffers = ReusedBuffers(2), ReusedBuffers(2)
        following = self._exchange(self.parts[0], buffers)
        for part, next_part in zip_longest(self.parts, self.parts[1:]):
            pending, (key, value) = following
            if next_part is not None:
                following = self._exchange(next_part, buffers)
            pending.wait()
            yield part, key, value

    def _exchange(self, part: HopPart, buffers: tuple[ReusedBuffers, ReusedBuffers]) -> tuple[Pending, list[Tensor]]:
        """Start a part: send the keys and values that its destination needs, and receive those of its source."""
        hop, own = part.hop, [self.problem.pairs.key, self.problem.value]
        if hop.source == self.peers.rank:
            return self.peers.post((), ()), own
        sends: list[Message] = []
        receives: list[Message] = []
        for kind, tensor, buffer in zip((KEY, VALUE), own, buffers, strict=True):
            tensor = some_heads(tensor, part.key_heads)
            sends.append((hop.destination, take(tensor, hop.sent).contiguous(), self.tag + kind))
            receives.append((hop.source, buffer.rows_like(tensor, count(hop.received)), self.tag + kind))
        return self.peers.post(sends, receives), [tensor for _, tensor, _ in receives]


class GradientReturn:
    """The messages with gradients of keys and values, which travel to the process that has these.

    sums: the gradients of this process's keys and values, to which those that arrive are added.
    """

    def __init__(self, exchange: KeyExchange, sums: tuple[Tensor, Tensor]) -> None:
        self.exchange, self.sums = exchange, sums
        self.departures, self.arrivals = (ReusedBuffers(2), ReusedBuffers(2)), (ReusedBuffers(1), ReusedBuffers(1))
        self.under_way: tuple[HopPart, Pending, list[Tensor]] | None = None

    def zeros(self, part: HopPart) -> list[Tensor]:
        """Gradients of 0 of the keys and values of a part of another process."""
        rows = count(part.hop.received)
        return [
            buffers.rows_like(some_heads(total, part.key_heads), rows).zero_()
            for buffers, total in zip(self.departures, self.sums, strict=True)
        ]

    def send(self, part: HopPart, gradients: list[Tensor]) -> None:
        """Start sending the gradients of a part, once those of the part before have arrived."""
        self.wait()
        hop, tag = part.hop, self.exchange.tag
        sends: list[Message] = []
        receives: list[Message] = []
        for kind, gradient, buffers in zip((KEY_GRADIENT, VALUE_GRADIENT), gradients, self.arrivals, strict=True):
            sends.append((hop.source, gradient, tag + kind))
            receives.append((hop.destination, buffers.rows_like(gradient, count(hop.sent)), tag + kind))
        pending = self.exchange.peers.post(sends, receives)
        self.under_way = part, pending, [tensor for _, tensor, _ in receives]

    def wait(self) -> None:
        """Wait for the gradients under way, and add those that arrive."""
        if self.under_way is None:
            return
        part, pending, arrived = self.under_way
        pending.wait()
        for total, gradient in zip(self.sums, arrived, strict=True):
            add_rows(some_heads(total, part.key_heads), part.hop.sent, gradient)
        self.under_way = None


def some_heads(tensor: Tensor, heads: slice | None) -> Tensor:
    """Some heads of a tensor (..., heads, n, ·)."""
    return tensor if heads is None else tensor[..., heads, :, :]


def take(tensor: Tensor, spans: tuple[slice, ...]) -> Tensor:
    """Some rows of a tensor (..., n, ·): a view of one span, a copy of several."""
    if len(spans) == 1:
        return tensor[..., spans[0], :]
    return torch.cat([tensor[..., span, :] for span in spans], -2) if spans else tensor[..., :0, :]


def add_rows(tensor: Tensor, spans: tuple[slice, ...], rows: Tensor) -> None:
    """Add rows (..., number, ·) to some rows of a tensor, in place."""
    before = 0
    for span in spans:
        after = before + span.stop - span.start
        tensor[..., span, :] += rows[..., before:after, :]
        before = after
