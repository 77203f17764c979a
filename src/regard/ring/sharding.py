"""Cutting tensors into the shards of a ring, and gathering them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import RegardError, ShapeError
from .handshake import agree_on
from .layout import Contiguous, RingLayout, Shards, place
from .peers import Group, Peers


def shard(tensor: Tensor, dim: int, layout: RingLayout | None = None, group: Group = None) -> Tensor:
    """This process's positions of a tensor that every process has whole, in the order of the layout's ranges.

    Args:
        tensor: the whole sequence, for example token numbers (batch, N) with dim=1, or (batch, heads, N, D) with dim=2.
        dim: the axis of positions.
        layout: which positions each process has, `Contiguous()` unless given.
        group: a process group or a one-dimensional DeviceMesh; the default group without it.

    Nothing is sent. The gradient is that of selecting: zero at the positions of other processes.

    Raises:
        ShapeError: fewer positions than processes; no such axis.
        ConfigurationError: no process group, or no layout.

    >>> import torch
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> shard(torch.arange(4), 0)
    tensor([0, 1, 2, 3])
    >>> dist.destroy_process_group()
    """
    peers = Peers.from_group(group)
    dim = _axis(tensor, dim)
    shards = place(Contiguous() if layout is None else layout, tensor.shape[dim], peers.size)
    return _select(tensor, dim, shards, peers.rank)


def unshard(tensor: Tensor, dim: int, layout: RingLayout | None = None, group: Group = None) -> Tensor:
    """The whole sequence, in every process, from the shards of all: the inverse of `shard`.

    Shards may differ in length along `dim`, as the layout cuts them, and in nothing else. The gradient of a shard is
    that of the sum of all processes' losses: where each process computes the same loss of the whole, divide by their
    number.

    Raises:
        ShapeError: shards that have not the lengths of the layout; no such axis.
        ConfigurationError: a device that the group's backend does not send from.
        RingError: processes disagree (the message names rank and argument), one is lost, or does not gather.
    """
    peers, layout = Peers.from_group(group), Contiguous() if layout is None else layout
    fault: RegardError | None = None
    described, numbers = {}, [0]
    try:
        dim = _axis(tensor, dim)
        peers.check_device(tensor.device)
        described, numbers = _describe(tensor, dim, layout), [tensor.shape[dim]]
    except RegardError as error:
        fault = error  # raised once the others know
    lengths = tuple(length for (length,) in agree_on(peers, fault, described, numbers))
    shards = place(layout, sum(lengths), peers.size)
    if shards.lengths != lengths:
        rank = next(r for r in range(peers.size) if shards.lengths[r] != lengths[r])
        raise ShapeError(
            f"rank {rank} has {lengths[rank]:,} positions along dim {dim}, but {layout!r} gives it "
            f"{shards.lengths[rank]:,} of {sum(lengths):,}: unshard with the layout by which the tensor was cut"
        )
    return _Unshard.apply(tensor, dim, shards, peers)


def _describe(tensor: Tensor, dim: int, layout: RingLayout) -> dict[str, str]:
    """The arguments of `unshard` that need to be the same in all processes, by their names, as text."""
    sizes = ["·" if axis == dim else str(size) for axis, size in enumerate(tensor.shape)]
    return {
        "operator": "unshard",
        "layout": repr(layout),
        "dim": str(dim),
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": f"({', '.join(sizes)})",
        "requires_grad": repr(torch.is_grad_enabled() and tensor.requires_grad),
    }


def gather_shards(tensor: Tensor, dim: int, shards: Shards, peers: Peers) -> Tensor:
    """The whole sequence from shards that differ along `dim` alone, in every process; without a gradient."""
    rows = tensor.detach().movedim(dim, 0)
    padded = rows.new_zeros(max(shards.lengths), *rows.shape[1:])
    padded[: len(rows)] = rows
    whole = rows.new_empty(sum(shards.lengths), *rows.shape[1:])
    for process, part in enumerate(peers.all_gather(padded, "while shards were gathered")):
        for own, positions in shards.rows(process):
            whole[positions.start : positions.stop : positions.step] = part[own]
    return whole.movedim(0, dim).contiguous()


def _axis(tensor: Tensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ShapeError(f"dim is {dim}, but the tensor has {tensor.ndim} axes, {tuple(tensor.shape)}")
    return dim % tensor.ndim


def _select(tensor: Tensor, dim: int, shards: Shards, process: int) -> Tensor:
    """The positions of a process along an axis; a view of one range, a copy of several."""
    before = (slice(None),) * dim
    parts = [tensor[(*before, slice(each.start, each.stop, each.step))] for each in shards.pieces[process]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


class _Unshard(torch.autograd.Function):
    """Gathering, whose gradient is the sum of all processes' gradients at this process's positions."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, shards: Shards, peers: Peers) -> Tensor:
        ctx.dim, ctx.shards, ctx.peers = dim, shards, peers
        return gather_shards(tensor, dim, shards, peers)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        total = ctx.peers.sum(gradient.contiguous().clone())
        return _select(total, ctx.dim, ctx.shards, ctx.peers.rank), None, None, None
