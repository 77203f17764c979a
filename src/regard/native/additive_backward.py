"""Gradients of additive scores, summed over tiles.

The structures and their layouts are explained in additive.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_void_p

import torch
from torch import Tensor

from .additive_forward import LEAST_WORK, STRIP, WHOLE, AdditiveScores, AdditiveTileStruct, check_pairs, slice_bounds
from .library import last_contiguous
from .threads import run_jobs, split_range, workers

SUMS = tuple((name, c_void_p) for name in ("query", "key", "weight", "scratch"))


class AdditiveSumsStruct(ctypes.Structure):
    """The structure `sums` of additive.h."""

    _fields_ = SUMS


class AdditiveGradients:
    """The gradient of a loss by query, key and weight, summed over tiles of its gradient by the scores.

    With g_ij the gradient by score(i, j) and t_ija = tanh(query_ia + key_ja), which is taken anew and never stored:
    query_ia is Σ_j g_ij weight_a (1 - t²), key_ja the same over i, weight_a is Σ_ij g_ij t_ija.

    Each worker adds to memory of its own: the result depends on the number of threads in its last bits alone.
    """

    def __init__(self, scores: AdditiveScores) -> None:
        self.scores = scores
        self.workers = torch.get_num_threads()
        self.partial_sums = _partial_sums(scores.key_heads, self.workers)
        self.query = torch.zeros(scores.heads, scores.rows, scores.features)
        self.key = torch.zeros(self.partial_sums, scores.key_heads, scores.strips, scores.padded, STRIP)
        self.weight = torch.zeros(self.partial_sums, scores.key_heads, scores.padded, dtype=torch.float64)
        self.scratch = torch.empty(self.workers, scores.library.additive_scratch(scores.padded))

    def add(self, upstream: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        """Add the tile of some rows and columns: `upstream` (H, rows, columns), the gradient by its scores.

        Raises:
            ShapeError: `upstream` is not of this shape, or a slice has a step.
        """
        scores = self.scores
        (top, bottom), (left, right) = slice_bounds(rows, scores.rows), slice_bounds(columns, scores.columns)
        check_pairs("upstream", upstream, (scores.heads, bottom - top, right - left))
        if not upstream.numel() or not scores.features:
            return
        upstream = last_contiguous(upstream.detach())
        pairs = (upstream.data_ptr(), upstream.stride(0), upstream.stride(1))

        def call(worker: int, job: tuple[int, int, int]) -> None:
            part, begin, end = job
            own = (self.query, self.key[part], self.weight[part, begin // per_head], self.scratch[worker])
            sums = AdditiveSumsStruct(*(tensor.data_ptr() for tensor in own))
            tile = AdditiveTileStruct(top, bottom, left, right, begin, end, *pairs)
            scores.library.additive_backward(ctypes.byref(scores.work), ctypes.byref(tile), ctypes.byref(sums))

        per_head = scores.group * (bottom - top)  # the rows that share a key head
        jobs = [
            (part, head * per_head + begin, head * per_head + end)
            for head in range(scores.key_heads)
            for part, (begin, end) in enumerate(split_range(0, per_head, self.partial_sums))
        ]
        count = min(self.workers, workers(upstream.numel() * scores.features, LEAST_WORK))
        run_jobs(call, jobs, count)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient by query (H, M, A), by key (Hk, N, A) and by weight (A,), of all that was added."""
        scores = self.scores
        key = self.key[0] if self.partial_sums == 1 else self.key.sum(0)  # [Hk, strips, padded, STRIP]
        key = key.mT.reshape(scores.key_heads, scores.strips * STRIP, scores.padded)[
            :, : scores.columns, : scores.features
        ]
        weight = self.weight.sum((0, 1))[: scores.features].float()
        return self.query * scores.weight, key * scores.weight, weight


def _partial_sums(key_heads: int, threads: int) -> int:
    """Into how many parts the queries of a key head are split, so that all threads have about equally much to do.

    Each part has sums of its own for all keys, so there are no more of them than needed.
    """
    if key_heads == 0 or key_heads % threads == 0:
        return 1
    return threads // key_heads if threads % key_heads == 0 else min(threads, -(-4 * threads // key_heads))
