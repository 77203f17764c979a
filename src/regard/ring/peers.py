"""Messages between the processes of a ring, over the point-to-point operations of torch.distributed.

A message that does not arrive ends in a `RingError`, within the timeout of the group; it names the process that was
lost as far as that can be known (`lost_processes`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ConfigurationError, RingError
from .lost_processes import describe_loss

Group: TypeAlias = dist.ProcessGroup | DeviceMesh | None
"""A process group, a one-dimensional device mesh, or None for the default group."""

Message: TypeAlias = tuple[int, Tensor, int]
"""Another process, a contiguous tensor that is sent or written to, and a tag by which the two sides are matched."""


_connected: weakref.WeakKeyDictionary[dist.ProcessGroup, set[str]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Peers:
    """The processes of a group, or some of them, and this one's rank among them.

    members: the ranks in the group, where these are not all of it.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    members: range | None = None

    def some(self, members: range) -> Peers:
        """Some of the processes, among them this one; they exchange messages, and gather nothing."""
        return Peers(self.group, members.index(self.rank), len(members), members)

    @classmethod
    def from_group(cls, group: Group) -> Peers:
        """The processes of a group or a one-dimensional mesh.

        Raises:
            ConfigurationError: torch.distributed is not initialised, this process is not in the group, or a mesh has
                several dimensions.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise ConfigurationError(
                "there is no process group: call torch.distributed.init_process_group('gloo') in each process, as "
                "started by torchrun, before a ring is used"
            )
        if isinstance(group, DeviceMesh):
            if group.ndim != 1:
                raise ConfigurationError(
                    f"the mesh has {group.ndim} dimensions, {group.mesh_dim_names or tuple(group.shape)}; a ring needs "
                    "one: choose it with mesh['name']"
                )
            group = group.get_group()
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise ConfigurationError(
                f"group is {group!r}, of which this process is no member: call the ring in the processes of the group "
                "alone, or leave group out for all"
            )
        group = dist.distributed_c10d._get_default_group() if group is None else group
        return cls(group, dist.get_rank(group), dist.get_world_size(group))

    @property
    def timeout(self) -> float:
        """Seconds after which a message that has not arrived is an error."""
        return self.group._get_backend(torch.device(self.device)).options._timeout.total_seconds()

    @property
    def device(self) -> str:
        """The kind of device whose tensors carry numbers: the CPU where a backend of the group sends from there."""
        kinds = [device.type for device in self.group._device_types]
        return "cpu" if "cpu" in kinds else kinds[0]

    def check_device(self, device: torch.device) -> None:
        """Check that the group has a backend that sends tensors of a device.

        Raises:
            ConfigurationError: it has none; gloo sends messages from the CPU alone.
        """
        try:
            backend = self.group._get_backend(device).name().lower()
        except RuntimeError:
            backend = "none"
        if backend == "none" or (device.type != "cpu" and backend == "gloo"):
            mend = "gloo" if device.type == "cpu" else "nccl"
            raise ConfigurationError(
                f"the tensors are on {device}, from where the backend of the group, "
                f"{dist.get_backend(self.group)!r}, sends no messages: call torch.distributed.init_process_group("
                f"{mend!r}), or move the tensors"
            )

    def connect(self, device: torch.device) -> None:
        """Run one collective on a device before the first messages from there; every process has to call it.

        NCCL makes its communicator at the first call, in which all processes of a group need to take part.
        """
        kinds = _connected.setdefault(self.group, set())
        if device.type != "cpu" and device.type not in kinds:
            self.sum(torch.zeros(1, device=device), "while the processes were connected")
            kinds.add(device.type)

    @property
    def matches_tags(self) -> bool:
        """Whether the backend finds the receiver of a message by its tag, so that order does not matter."""
        return dist.get_backend(self.group) == "gloo"

    def gather_numbers(self, numbers: Sequence[int]) -> list[list[int]]:
        """A few 64-bit numbers of each process, in the order of ranks."""
        own = torch.tensor(numbers, dtype=torch.int64, device=self.device)
        return torch.stack(self.all_gather(own, "while the processes agreed on a call")).tolist()

    def gather_objects(self, value: Any) -> list[Any]:
        """A small value of each process, in the order of ranks."""
        every: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(every, value, group=self.group)
        except RuntimeError as error:
            raise self._lost("while the processes compared their arguments", error) from error
        return every

    def all_gather(self, tensor: Tensor, when: str) -> list[Tensor]:
        """A tensor of each process, all of one shape; `when` is for the error."""
        every = [torch.empty_like(tensor) for _ in range(self.size)]
        try:
            dist.all_gather(every, tensor, group=self.group)
        except RuntimeError as error:
            raise self._lost(when, error) from error
        return every

    def sum(self, tensor: Tensor, when: str = "while gradients were summed") -> Tensor:
        """The sum of a tensor over all processes, in place; `when` is for the error."""
        return self._reduce(tensor, dist.ReduceOp.SUM, when)

    def maximum(self, tensor: Tensor, when: str) -> Tensor:
        """The maximum of a tensor over all processes, in place; `when` is for the error."""
        return self._reduce(tensor, dist.ReduceOp.MAX, when)

    def _reduce(self, tensor: Tensor, operation: Any, when: str) -> Tensor:
        try:
            dist.all_reduce(tensor, operation, group=self.group)
        except RuntimeError as error:
            raise self._lost(when, error) from error
        return tensor

    def post(self, sends: Iterable[Message], receives: Iterable[Message]) -> Pending:
        """Start sending and receiving; `Pending.wait` ends it. Empty tensors do not travel."""
        named = [
            (
                kind,
                self._rank(peer),
                dist.P2POp(operation, tensor, group=self.group, tag=tag, group_peer=self._rank(peer)),
            )
            for kind, operation, messages in (("to", dist.isend, sends), ("from", dist.irecv, receives))
            for peer, tensor, tag in messages
            if tensor.numel()
        ]
        if not named:
            return Pending(self, (), ())
        try:
            works = dist.batch_isend_irecv([operation for *_, operation in named])
        except RuntimeError as error:
            raise self._lost(f"in a message {named[0][0]} rank {named[0][1]}", error) from error
        what = tuple(f"{kind} rank {peer}" for kind, peer, _ in named)
        return Pending(self, tuple(works), what, tuple(operation.tensor for *_, operation in named))

    def _rank(self, peer: int) -> int:
        return peer if self.members is None else self.members[peer]

    def _lost(self, when: str, error: RuntimeError) -> RingError:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        rank, size = dist.get_rank(self.group), dist.get_world_size(self.group)
        return RingError(
            f"rank {rank} of {size}: {when}, {describe_loss(self.group, self.timeout)} ({reason}). Every process of "
            "the group needs to make the same calls of the ring in the same order, forward and backward; look for the "
            "first error of another process"
        )


@dataclass(frozen=True)
class Pending:
    """Messages under way."""

    peers: Peers
    works: tuple[dist.Work, ...]
    names: tuple[str, ...]
    tensors: tuple[Tensor, ...] = ()

    def wait(self) -> None:
        """Wait until all have arrived; on an accelerator, until its stream waits for them.

        Raises:
            RingError: one has not arrived within the group's timeout, or its process is gone.
        """
        for index, work in enumerate(self.works):
            name = self.names[index] if len(self.works) == len(self.names) else " and ".join(self.names)
            try:
                work.wait()
            except RuntimeError as error:
                raise self.peers._lost(f"in a message {name}", error) from error
