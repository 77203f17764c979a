"""Which process of a group was lost, as far as it can be known when a message has failed.

A closed connection says that a process is gone, and not why: one that ends because another was lost is gone as well. So
each process notes in the group's store that it has met a loss, before its error is raised: who is gone without a note
was lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread
from typing import TypeVar

import torch
import torch.distributed as dist

STORE_SECONDS = 2.0
"""The most seconds that the group's store is waited for; the process that holds it may be the one that was lost."""
NOTE_SECONDS, PAUSE = 1.0, 0.05
"""Seconds in which all others that wait for the same process note that they have met its loss; between two looks."""
PROBE_TAG = 2**30
"""The tag of messages that nobody receives, above those of all calls."""
CLOSED = ("closed by peer", "reset by peer", "broken pipe")
"""Words of gloo's errors of a connection that the other process has closed."""

Found = TypeVar("Found")


def describe_loss(group: dist.ProcessGroup, timeout: float) -> str:
    """What became of which process, for the error of a message that failed; `timeout` is the group's, in seconds."""
    own, others = dist.get_rank(group), range(dist.get_world_size(group))
    loss = Loss.find(group, own, [rank for rank in others if rank != own])
    if loss.lost:
        return f"{_ranks(loss.lost)} lost"
    within = f"the group's timeout of {timeout:g} s"
    if loss.gone:
        return (
            f"{_ranks(loss.gone)} lost, or ended because another one was: the group's store, which would tell, "
            "does not answer"
        )
    if loss.silent:
        return f"{_ranks(loss.silent)} lost, or did not make the same call within {within}"
    return f"a process was lost, or did not make the same call within {within}"


def _ranks(ranks: list[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} was"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} were"


@dataclass(frozen=True)
class Loss:
    """Ranks that are gone without a note; that are gone, where notes cannot be read; and that are there without one."""

    lost: list[int]
    gone: list[int]
    silent: list[int]

    @classmethod
    def find(cls, group: dist.ProcessGroup, own: int, others: list[int]) -> Loss:
        """What a process finds out about the others; it notes its own loss first."""
        notes = Notes(group)
        notes.write(own)
        gone = [rank for rank in others if _has_closed(group, rank)]
        noted = notes.of(others)
        if noted is None:
            return cls(gone if len(gone) == 1 else [], gone, [])
        # A connection is closed at a timeout too, and by who ended because of the loss: then a note is on its way.
        until = time.monotonic() + NOTE_SECONDS
        while len(noted) + 1 < len(others) and time.monotonic() < until:
            time.sleep(PAUSE)
            noted = notes.of(others) or noted
        without = [rank for rank in others if rank not in noted]
        return cls([rank for rank in without if rank in gone], [], [rank for rank in without if rank not in gone])


class Notes:
    """Notes of the processes of a group that they have met a loss, in the store by which the group was formed."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.store = dist.distributed_c10d._get_default_store()
        self.prefix = f"regard.ring/{group.group_name}"

    def write(self, rank: int) -> None:
        """Note a loss that the process of this rank has met."""
        _within(STORE_SECONDS, lambda: self.store.set(f"{self.prefix}/{rank}", "1"))

    def of(self, ranks: list[int]) -> set[int] | None:
        """Which of the ranks have a note; None where the store does not answer."""
        return _within(STORE_SECONDS, lambda: {rank for rank in ranks if self.store.check([f"{self.prefix}/{rank}"])})


def _within(seconds: float, ask: Callable[[], Found]) -> Found | None:
    """The answer, or None where none comes in time, or an error does: the store may have been lost as well."""
    answers: list[Found] = []

    def answer() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            return

    thread = Thread(target=answer, daemon=True)
    thread.start()
    thread.join(seconds)
    return answers[0] if answers else None


def _has_closed(group: dist.ProcessGroup, rank: int) -> bool:
    """Whether a process has closed its connection, where the backend says so: gloo refuses to send to it."""
    if dist.get_backend(group) != "gloo":
        return False
    try:
        dist.isend(torch.empty(0, device="cpu"), group=group, tag=PROBE_TAG, group_dst=rank)
    except RuntimeError as error:
        return any(words in str(error).lower() for words in CLOSED)
    return False
