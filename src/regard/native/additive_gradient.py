"""The gradient of additive scores, summed over tiles, by the C functions of `library`.

The layouts and what the fields of the structures mean are in additive.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_void_p

import torch
from torch import Tensor

from .additive import LEAST_WORK, STRIP, WHOLE, Prepared, Tile, check_pairs, interval
from .library import last_contiguous
from .threads import parts, share, workers

SUMS = tuple((name, c_void_p) for name in ("query", "key", "weight", "scratch"))


class Sums(ctypes.Structure):
    """The structure `sums` of additive.h."""

    _fields_ = SUMS


class Gradients:
    """The gradient of a loss by query, key and weight, summed over tiles of its gradient by the scores.

    With g_ij the gradient by score(i, j) and t_ija = tanh(query_ia + key_ja), which is taken anew and never stored:
    query_ia is Σ_j g_ij weight_a (1 - t²), key_ja the same over i, weight_a is Σ_ij g_ij t_ija.

    Each worker adds to memory of its own: the result depends on the number of threads in its last bits alone.
    """

    def __init__(self, prepared: Prepared) -> None:
        of = self.prepared = prepared
        self.workers = torch.get_num_threads()
        self.ways = _ways(of.key_heads, self.workers)
        self.query = torch.zeros(of.heads, of.rows, of.features)
        self.key = torch.zeros(self.ways, of.key_heads, of.strips, of.padded, STRIP)
        self.weight = torch.zeros(self.ways, of.key_heads, of.padded, dtype=torch.float64)
        self.scratch = torch.empty(self.workers, of.library.scratch(of.padded))

    def add(self, upstream: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        """Add the tile of some rows and columns: `upstream` (H, rows, columns), the gradient by its scores.

        Raises:
            ShapeError: `upstream` is not of this shape, or a slice has a step.
        """
        of = self.prepared
        (top, bottom), (left, right) = interval(rows, of.rows), interval(columns, of.columns)
        check_pairs("upstream", upstream, (of.heads, bottom - top, right - left))
        if not upstream.numel() or not of.features:
            return
        upstream = last_contiguous(upstream.detach())
        pairs = (upstream.data_ptr(), upstream.stride(0), upstream.stride(1))

        def call(worker: int, job: tuple[int, int, int]) -> None:
            way, begin, end = job
            own = (self.query, self.key[way], self.weight[way, begin // per_head], self.scratch[worker])
            sums = Sums(*(tensor.data_ptr() for tensor in own))
            tile = Tile(top, bottom, left, right, begin, end, *pairs)
            of.library.gradient(ctypes.byref(of.work), ctypes.byref(tile), ctypes.byref(sums))

        per_head = of.group * (bottom - top)  # the rows that share a key head
        jobs = [
            (way, head * per_head + begin, head * per_head + end)
            for head in range(of.key_heads)
            for way, (begin, end) in enumerate(parts(0, per_head, self.ways))
        ]
        count = min(self.workers, workers(upstream.numel() * of.features, LEAST_WORK))
        share(call, jobs, count)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient by query (H, M, A), by key (Hk, N, A) and by weight (A,), of all that was added."""
        of = self.prepared
        key = self.key[0] if self.ways == 1 else self.key.sum(0)  # [Hk, strips, padded, STRIP]
        key = key.mT.reshape(of.key_heads, of.strips * STRIP, of.padded)[:, : of.columns, : of.features]
        weight = self.weight.sum((0, 1))[: of.features].float()
        return self.query * of.weight, key * of.weight, weight


def _ways(key_heads: int, threads: int) -> int:
    """In how many parts the queries of a key head are cut, so that the threads have about equally much to do.

    Each way has its own sums for all keys, so there are no more of them than that takes.
    """
    if key_heads == 0 or key_heads % threads == 0:
        return 1
    return threads // key_heads if threads % key_heads == 0 else min(threads, -(-4 * threads // key_heads))
