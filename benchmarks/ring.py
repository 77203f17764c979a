"""A ring of processes on one machine, against one process with as many threads: time, memory and bytes sent.

The ring's processes wait while the single one computes, and it waits for them: the sides alternate. Other work on the
machine slows both, so the ratio of processor seconds, summed over processes, is beside that of the clock: on as many
cores as threads the ring cannot be faster than that. Memory is the peak of what is resident (VmHWM, after clear_refs)
over what was resident before the call, when the allocator had returned what was free; output and gradients alone are
1/P of the single process's.

--peer FOLDER compares with lucidrains/ring-attention-pytorch, of which FOLDER has a checkout; put einops, beartype and
jaxtyping on PYTHONPATH. Errors are those of two heads beside attention in float64.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import _memory
import _timing
import torch
import torch.distributed as dist
from _report import agree, mebibytes, met, milliseconds, table, times

import regard
import regard.ring
from regard import masks
from regard.ring.peers import Message, Peers, Pending

LENGTH, HEADS, DIM, WINDOW, ROUNDS, THREADS = 8192, 8, 64, 512, 5, 2
SENT = 4 * HEADS * 2 * DIM
"""Bytes of the keys and values of one token."""


def problem(kind: str) -> tuple[masks.Mask, regard.ring.RingLayout]:
    if kind == "causal":
        return masks.causal(), regard.ring.Zigzag()
    return masks.causal() & masks.window(before=WINDOW - 1), regard.ring.Contiguous()


def inputs(length: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(1, HEADS, length, DIM) for _ in range(4)]


def serve(call: Any, parent: Connection) -> None:
    """Call for each message of the parent, and answer with (forward, forward and backward, processor) seconds."""
    call()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # or freed memory that was not returned would hide what is allocated
    before = _memory._from_now_on()
    while parent.recv():
        began, spent = time.perf_counter(), time.process_time()
        forward = call(began)
        parent.send((forward, time.perf_counter() - began, time.process_time() - spent))
    parent.send(_memory._highest() - before)


def process(rank: int, processes: int, store: str, kind: str, length: int, parent: Connection) -> None:
    """One process of the ring; at the end its peak of memory, the bytes that it sent forward, and the results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    mask, layout = problem(kind)
    query, key, value, above = (regard.ring.shard(tensor, 2, layout).clone() for tensor in inputs(length))
    whole, results, sent = [tensor.requires_grad_() for tensor in (query, key, value)], [], []

    def call(began: float = 0.0) -> float:
        with counted_bytes() as found:
            output = regard.ring.attention(query, key, value, mask=mask, layout=layout)
        forward = time.perf_counter() - began
        sent[:] = found
        results[:] = output.detach(), *torch.autograd.grad(output, whole, above)
        return forward

    serve(call, parent)
    gathered = [regard.ring.unshard(tensor, 2, layout).numpy() for tensor in results]
    parent.send((sum(sent), gathered if rank == 0 else None))
    dist.barrier()
    dist.destroy_process_group()


def peer_process(rank: int, processes: int, store: str, folder: str, length: int, parent: Connection) -> None:
    """One process of the peer's ring, causal, of contiguous shards in buckets of 512."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=processes)
    sys.path.insert(0, folder)
    ring_flash_attn = importlib.import_module("ring_attention_pytorch.ring_flash_attention").ring_flash_attn

    local = [regard.ring.shard(tensor, 2).transpose(1, 2).contiguous() for tensor in inputs(length)]
    above, whole, results = local.pop(), [tensor.requires_grad_() for tensor in local], []
    settings = {"causal": True, "bucket_size": min(512, length // processes), "ring_reduce_col": True}

    def call(began: float = 0.0) -> float:
        output = ring_flash_attn(*whole, **settings, ring_size=processes)
        forward = time.perf_counter() - began
        results[:] = output.detach(), *torch.autograd.grad(output, whole, above)
        return forward

    serve(call, parent)
    gathered = [regard.ring.unshard(tensor.transpose(1, 2).contiguous(), 2).numpy() for tensor in results]
    parent.send((0, gathered if rank == 0 else None))
    dist.barrier()
    dist.destroy_process_group()


def truth(length: int, heads: int) -> list[torch.Tensor]:
    """Output and gradients of causal attention of the first heads, by its formula in float64."""
    torch.set_num_threads(THREADS)
    found = []
    for head in range(heads):
        *whole, above = (tensor[:, head].double() for tensor in inputs(length))
        query, key, value = (tensor.requires_grad_() for tensor in whole)
        scores = query @ key.mT * DIM**-0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        output = scores.masked_fill_(future, -torch.inf).softmax(-1) @ value
        found.append([output.detach(), *torch.autograd.grad(output, (query, key, value), above)])
    return [torch.stack(parts, 1) for parts in zip(*found, strict=True)]


def compare_peer(folder: str, length: int, processes: int = 4, heads: int = 2) -> None:
    """The table of the peer: seconds of one call after the first, and relative errors beside float64."""
    context = multiprocessing.get_context("spawn")
    found: dict[str, tuple[float, float, list[torch.Tensor]]] = {}
    for name, target, argument in (("regard", process, "causal"), ("peer", peer_process, folder)):
        with tempfile.TemporaryDirectory() as place:
            pipes = [context.Pipe() for _ in range(processes)]
            started = [
                context.Process(
                    target=target, args=(rank, processes, str(Path(place) / "store"), argument, length, end)
                )
                for rank, (_, end) in enumerate(pipes)
            ]
            for each in started:
                each.start()
            for stage in (True, False):
                for ours, _ in pipes:
                    ours.send(stage)
                if stage:
                    answers = [ours.recv() for ours, _ in pipes]
            _ = [ours.recv() for ours, _ in pipes]  # memory
            results, *_ = [ours.recv()[1] for ours, _ in pipes]
            for each in started:
                each.join()
        spent = max(answer[1] for answer in answers), sum(answer[2] for answer in answers)
        found[name] = *spent, [torch.from_numpy(tensor)[:, :heads] for tensor in results]
    exact = truth(length, heads)
    errors = {
        name: [float((mine - real).norm() / real.norm()) for mine, real in zip(tensors, exact, strict=True)]
        for name, (_, _, tensors) in found.items()
    }
    (ours, our_processor, _), (theirs, their_processor, _) = found["regard"], found["peer"]
    rows = [
        ["seconds", f"{theirs:.2f}", f"{ours:.2f}", times(theirs / ours), met(theirs / ours, 5)],
        ["processor's", f"{their_processor:.2f}", f"{our_processor:.2f}", times(their_processor / our_processor), ""],
    ]
    for what, their, our in zip(("output", "query", "key", "value"), errors["peer"], errors["regard"], strict=True):
        goal = "" if what == "output" else met(their / our, 1000)
        rows.append([f"error: {what}", f"{their:.1e}", f"{our:.1e}", times(their / our), goal])
    table(
        f"Ring of {processes}, causal, {length:,} tokens, forward and backward",
        ["", "peer", "regard", "ratio", "goal"],
        rows,
    )


def single(threads: int, kind: str, length: int, parent: Connection) -> None:
    """One process with all threads."""
    torch.set_num_threads(threads)
    mask, _ = problem(kind)
    query, key, value, above = inputs(length)
    whole, results = [tensor.requires_grad_() for tensor in (query, key, value)], []

    def call(began: float = 0.0) -> float:
        output = regard.attention(query, key, value, mask=mask)
        forward = time.perf_counter() - began
        results[:] = output.detach(), *torch.autograd.grad(output, whole, above)
        return forward

    serve(call, parent)
    parent.send([tensor.numpy() for tensor in results])


@contextlib.contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The bytes of each message that is sent in the block."""
    sent: list[int] = []
    post = Peers.post

    def counting(self: Peers, sends: Iterable[Message], receives: Iterable[Message]) -> Pending:
        sends = list(sends)
        sent.extend(tensor.numel() * tensor.element_size() for _, tensor, _ in sends)
        return post(self, sends, receives)

    Peers.post = counting
    try:
        yield sent
    finally:
        Peers.post = post


def needed(kind: str, processes: int, length: int) -> float:
    """The bytes that the mask needs of other processes, forward, all processes together."""
    mask, layout = problem(kind)
    owner = torch.empty(length, dtype=torch.int64)
    for rank, pieces in enumerate(layout.pieces(length, processes)):
        for piece in pieces:
            owner[piece.start : piece.stop : piece.step] = rank
    keys = 0
    for rank in range(processes):
        rows = (owner == rank).nonzero().flatten()
        blocks = (mask.dense(len(part), length, query_positions=part).any(0) for part in rows.split(1024))
        keys += int((torch.stack(list(blocks)).any(0) & (owner != rank)).sum())
    return float(SENT * keys)


def measure(kind: str, processes: int, length: int, rounds: int) -> list[str]:
    """One row of the table."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes = [context.Pipe() for _ in range(processes + 1)]
        targets: list[tuple[Callable[..., None], tuple]] = [
            (process, (rank, processes, store, kind, length)) for rank in range(processes)
        ]
        targets.append((single, (THREADS, kind, length)))
        started = [
            context.Process(target=target, args=(*args, theirs))
            for (target, args), (_, theirs) in zip(targets, pipes, strict=True)
        ]
        for each in started:
            each.start()
        *ring, one = [ours for ours, _ in pipes]
        spent: dict[str, list[tuple[float, ...]]] = {"ring": [], "one": []}
        for _ in range(rounds):
            for name, group in (("one", [one]), ("ring", ring)):
                for connection in group:
                    connection.send(True)
                answers = [connection.recv() for connection in group]
                forward, both, processor = zip(*answers, strict=True)
                spent[name].append((max(forward), max(both), sum(processor)))
        for connection in (*ring, one):
            connection.send(False)
        memory = [connection.recv() for connection in (*ring, one)]
        (sent, results), *others = [connection.recv() for connection in ring]
        agree(f"ring of {processes}, {kind}", *([torch.from_numpy(t) for t in r] for r in (results, one.recv())))
        for each in started:
            each.join()
    ours, theirs = (
        [statistics.median(column) for column in zip(*spent[name], strict=True)] for name in ("ring", "one")
    )
    clock, share = ours[1] / theirs[1], max(memory[:-1]) / memory[-1]
    total = sent + sum(other[0] for other in others)
    least = needed(kind, processes, length)
    return [
        f"{kind}, {processes}",
        *(milliseconds(theirs[1]), milliseconds(ours[1]), times(clock)),
        times(ours[2] / theirs[2]),
        met(clock, 1.15 if processes <= THREADS else 1.3, most=True),
        f"{mebibytes(max(memory[:-1]))} of {mebibytes(memory[-1])}: {share:.2f}",
        met(share, 0.35, most=True) if processes == 4 else f"at least {1 / processes:.2f}",
        f"{total / 2**20:.2f} of {least / 2**20:.2f} MiB",
        met(total / least, 1.3, most=True),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--length", type=int, default=LENGTH)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--peer", help="a checkout of lucidrains/ring-attention-pytorch")
    options = parser.parse_args()
    print(_timing.machine())
    cases = [("causal", 2), ("causal", 4), ("window", 2), ("window", 4)]
    rows = [measure(kind, processes, options.length, options.rounds) for kind, processes in cases]
    table(
        f"Rings of gloo processes with a thread each, {options.length:,} tokens, {HEADS} heads of {DIM}, forward and "
        f"backward; window {WINDOW} (`benchmarks/ring.py`)",
        [
            "mask, processes",
            "one process",
            "ring",
            "ratio",
            "processor's",
            "goal",
            "peak memory",
            "goal",
            "sent forward",
            "goal",
        ],
        rows,
    )
    print(
        "\nSent: of what the mask needs of other processes. Processor's: the ratio of processor seconds of all threads."
    )
    if options.peer is None:
        print("No peer: give --peer FOLDER with a checkout of github.com/lucidrains/ring-attention-pytorch.")
    else:
        compare_peer(options.peer, options.length)


if __name__ == "__main__":
    main()
