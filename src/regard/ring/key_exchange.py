"""The exchange of keys, values and their gradients between the processes of a ring, in parts of bounded size.

A message is cut into parts over key heads, and over keys where the mask differs by head or there are too few heads.
While one part is computed, the next one arrives in the other of two buffers: beside its own tensors a process stores
two parts of other processes' keys and values, two of their gradients, and one of the gradients of its own that arrive.
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
from .hops import Hop, HopPlan, count, plan_limits
from .peers import Message, Peers, Pending

KEY, VALUE, KEY_GRADIENT, VALUE_GRADIENT, KINDS = range(5)
"""Tags of the messages of a call, counted from its first one."""

MOST_PARTS = 16
"""Parts of a message, at most."""
PART_BYTES = 2**19
"""Bytes of the keys and values of a part, at least, where there are several: each costs messages and calls."""


def exchange_limits() -> dict[str, str]:
    """The constants by which each process plans its messages, which need to be the same in all, by their names."""
    return {"parts of a hop": f"at most {MOST_PARTS}, of at least {PART_BYTES} bytes", "tiles of a hop": plan_limits()}


@dataclass(frozen=True, slots=True)
class PartCounts:
    """The number of parts of a message by key heads and by keys, which both its ends compute."""

    heads: int
    keys: int

    @classmethod
    def for_keys(cls, problem: Problem, keys: int, *, by_heads: bool) -> PartCounts:
        """The numbers of parts of a message with `keys` keys and their values; by_heads: whether heads may be cut."""
        key, value = problem.pairs.key, problem.value
        numbers = sum(keys * tensor.shape[:-2].numel() * tensor.shape[-1] for tensor in (key, value))
        possible = min(MOST_PARTS, numbers * value.element_size() // PART_BYTES)
        if possible < 2:
            return cls(1, 1)
        parts = 1 << possible.bit_length() - 1
        heads = gcd(parts, key.shape[-3]) if by_heads else 1
        return cls(heads, parts // heads)

    def slices(self, problem: Problem) -> list[MessagePart]:
        """The parts, those of the same keys after each other."""
        if self.heads == 1:
            return [MessagePart(None, None, (index, self.keys)) for index in range(self.keys)]
        key_heads, query_heads = (tensor.shape[-3] // self.heads for tensor in (problem.value, problem.pairs.query))
        return [
            MessagePart(
                slice(at * key_heads, (at + 1) * key_heads), slice(at * query_heads, (at + 1) * query_heads), rows
            )
            for rows in ((index, self.keys) for index in range(self.keys))
            for at in range(self.heads)
        ]


def heads_alike(problem: Problem) -> bool:
    """Whether score, mask and bias are the same for all heads, and nothing is drawn for each."""
    plain = isinstance(problem.pairs, DotPairs) and problem.bias is None and problem.dropout is None
    return problem.heads and plain and not differs_by_head(problem.mask, problem.value.device)


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A part of a message: its key heads, their query heads (None for all), and which of equal parts of its keys."""

    key_heads: slice | None = None
    query_heads: slice | None = None
    keys: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class HopPart:
    """A part of a hop, whose keys and values travel and are computed together.

    hop: the hop over the part's keys. number: of the part, the same in the process that sends it and in the one that
    receives it. sent_heads: key heads of the keys sent. key_heads and query_heads: those of the keys received. None for
    all.
    """

    hop: Hop
    number: int = 0
    sent_heads: slice | None = None
    key_heads: slice | None = None
    query_heads: slice | None = None


def hop_parts(plan: HopPlan, problem: Problem, longest: int, *, by_heads: bool = True) -> list[HopPart]:
    """This process's own keys, whole, then the parts of all hops with a message, in the same order everywhere.

    longest: keys of the longest shard of the ring. by_heads: whether heads may be cut where they are alike.
    """
    own, *others = plan.hops
    by_heads = by_heads and heads_alike(problem)
    most = PartCounts.for_keys(problem, longest, by_heads=by_heads)
    found = [HopPart(own)]
    for step, hop in enumerate(others):
        sent, received = (
            PartCounts.for_keys(problem, keys, by_heads=by_heads).slices(problem) if keys else []
            for keys in (count(hop.sent), count(hop.received))
        )
        for index, parts in enumerate(zip_longest(sent, received, fillvalue=MessagePart())):
            leaving, coming = parts
            number = step * most.heads * most.keys + index + 1
            part = hop.part(leaving.keys, coming.keys)
            if part.sent or part.received:
                found.append(HopPart(part, number, leaving.key_heads, coming.key_heads, coming.query_heads))
    return found


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

    def received(self, *, gradients_return: bool = False) -> Iterator[tuple[HopPart, Tensor, Tensor]]:
        """Each part with its keys and values, which are valid until the next but one; the next are under way.

        gradients_return: whether the caller sends gradients of each part home before it takes the next one. Where the
        backend does not match messages by tags, both ends of each message need to post it in the same order among all
        others. That of keys is the order of their numbers; gradients of a part come after the keys of the next number
        and before those of later ones, whether or not a process has that part.
        """
        buffers, in_order = (ReusedBuffers(2), ReusedBuffers(2)), gradients_return and not self.peers.matches_tags
        following: tuple[Pending, list[Tensor]] | None = self._exchange(self.parts[0], buffers)
        for part, next_part in zip_longest(self.parts, self.parts[1:]):
            pending, (key, value) = following or self._exchange(part, buffers)
            following = None
            if next_part is not None and not (in_order and 0 < part.number < next_part.number - 1):
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
            leaving, coming = some_heads(tensor, part.sent_heads), some_heads(tensor, part.key_heads)
            sends.append((hop.destination, take(leaving, hop.sent).contiguous(), self.tag + kind))
            receives.append((hop.source, buffer.rows_like(coming, count(hop.received)), self.tag + kind))
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
        for kind, gradient, total, buffers in zip(
            (KEY_GRADIENT, VALUE_GRADIENT), gradients, self.sums, self.arrivals, strict=True
        ):
            sends.append((hop.source, gradient, tag + kind))
            home = some_heads(total, part.sent_heads)
            receives.append((hop.destination, buffers.rows_like(home, count(hop.sent)), tag + kind))
        pending = self.exchange.peers.post(sends, receives)
        self.under_way = part, pending, [tensor for _, tensor, _ in receives]

    def wait(self) -> None:
        """Wait for the gradients under way, and add those that arrive."""
        if self.under_way is None:
            return
        part, pending, arrived = self.under_way
        pending.wait()
        for total, gradient in zip(self.sums, arrived, strict=True):
            add_rows(some_heads(total, part.sent_heads), part.hop.sent, gradient)
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
