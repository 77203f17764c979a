"""Attention to listed keys in C, which reads them where they are, forward and backward.

`GatheredInC` calls `regard_gathered` and `regard_gathered_backward`; the structure is explained in gathered.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, Saved
from ...core.problem import Problem
from ...core.score_forms import DotPairs
from ...tiles.key_lists import KeyLists, ListGradients, ListTerms
from . import library
from .library import DTYPES, last_contiguous
from .threads import run_units, thread_count

PIECES_AT_ONCE = 16
"""The most pieces of lists that a thread takes at a time, as in gathered.h."""
MOST_ROWS = 64
"""The most queries of a piece of a list."""
LEAST_WORK = 2**18
"""The fewest numbers of listed keys and values a thread."""
WIDEST = 16
"""The numbers of a vector, in the variant that has the most."""


class GatheredStruct(ctypes.Structure):
    """The structure `gathered` of gathered.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed", "at_once", "batches", "heads")),
        *((name, c_int64) for name in ("key_heads", "queries", "keys", "dim", "value_dim", "dtype", "list_heads")),
        *((name, c_int64) for name in ("lists", "rows", "height", "length", "columns", "first", "blocks", "block")),
        *(("scale", c_float), ("softcap", c_float)),
        *(("indices", c_void_p), ("index_batch", c_int64), ("index_head", c_int64)),
        *(("spans", c_void_p), ("span_batch", c_int64)),
        *(("query", c_void_p), ("query_batch", c_int64), ("query_head", c_int64), ("query_row", c_int64)),
        *(("key", c_void_p), ("key_batch", c_int64), ("key_head", c_int64), ("key_row", c_int64)),
        *(("value", c_void_p), ("value_batch", c_int64), ("value_head", c_int64), ("value_row", c_int64)),
        *(("added", c_void_p), ("added_batch", c_int64), ("added_head", c_int64)),
        *(("factors", c_void_p), ("factor_batch", c_int64), ("factor_head", c_int64)),
        *((name, c_void_p) for name in ("output", "lse", "grad_output", "delta")),
        *((name, c_void_p) for name in ("grad_query", "grad_key", "grad_value", "grad_added")),
        *(("grad_row", c_int64), ("grad_value_row", c_int64)),
    )


class GatheredInC:
    """One list after another: its keys are found once for all rows that share it."""

    in_tiles = False

    def why_not(self, problem: Problem) -> list[str]:
        """No reasons."""
        return []

    def forward(self, batched: BatchedProblem, lists: KeyLists, terms: ListTerms) -> tuple[Tensor, Tensor]:
        """Output (B, H, M, Dv) and log-sum-exp (B, H, M), float32."""
        rows, call = batched.shape[:3], _Call(batched, lists, terms)
        output = torch.empty(*rows, batched.value.shape[-1], device="cpu")
        lse = torch.empty(rows, device="cpu")
        if not call.has_pairs:
            return output.zero_(), lse.fill_(float("-inf"))
        call.work.output, call.work.lse = output.data_ptr(), lse.data_ptr()
        call.run(library.current().gathered, -(-call.pieces // call.work.at_once))
        return output, lse

    def backward(
        self, batched: BatchedProblem, saved: Saved, lists: KeyLists, terms: ListTerms, *, of_added: bool
    ) -> ListGradients:
        """The gradients, float32; one thread has those of a key head."""
        (batches, heads, queries, keys), call = batched.shape, _Call(batched, lists, terms)
        key_heads, dim, value_dim = batched.pairs.key.shape[1], batched.pairs.key.shape[3], batched.value.shape[3]
        above, lse, delta = (tensor.float().contiguous() for tensor in (saved.grad_output, saved.lse, saved.delta()))
        query = torch.zeros(batches, heads, queries, _padded(dim), device="cpu")
        key = torch.zeros(batches, key_heads, keys, _padded(dim), device="cpu")
        value = torch.zeros(batches, key_heads, keys, _padded(value_dim), device="cpu")
        added = torch.zeros(batches, heads, queries, lists.length, device="cpu") if of_added else None
        if call.has_pairs:
            work = call.work
            work.grad_output, work.lse, work.delta = above.data_ptr(), lse.data_ptr(), delta.data_ptr()
            work.grad_query, work.grad_key, work.grad_value = query.data_ptr(), key.data_ptr(), value.data_ptr()
            work.grad_added = None if added is None else added.data_ptr()
            work.grad_row, work.grad_value_row = key.shape[-1], value.shape[-1]
            call.run(library.current().gathered_backward, batches * key_heads)
        return ListGradients(_narrowed(query, dim), _narrowed(key, dim), _narrowed(value, value_dim), added)


class _Call:
    """One call of C, and the tensors that it reads."""

    def __init__(self, batched: BatchedProblem, lists: KeyLists, terms: ListTerms) -> None:
        pairs = batched.pairs
        if not isinstance(pairs, DotPairs):
            raise AssertionError("gathered keys of scores that are no dot products")
        (batches, heads, queries, keys), key_heads = batched.shape, pairs.key.shape[1]
        self.read = [last_contiguous(tensor) for tensor in (pairs.query, pairs.key, batched.value)]
        self.indices, self.spans = lists.indices, lists.spans
        self.terms = [None if term is None else term.float().contiguous() for term in terms]
        pieces = -(-lists.rows // MOST_ROWS)
        list_heads = heads if self.indices.shape[1] == heads else key_heads
        self.pieces = batches * list_heads * self.indices.shape[2] * pieces
        self.has_pairs = bool(self.pieces and keys and queries and lists.length)
        self.numbers = self.pieces * lists.length * (pairs.key.shape[3] + batched.value.shape[3])
        block = lists.first // lists.columns
        self.threads = thread_count(self.numbers, LEAST_WORK)
        at_once = min(max(self.pieces // (4 * self.threads), 1), PIECES_AT_ONCE)  # so that no thread waits long
        self.work = GatheredStruct(
            *(0, 0, 0, at_once, batches, heads, key_heads, queries, keys, pairs.key.shape[3], batched.value.shape[3]),
            *(DTYPES.index(batched.value.dtype), list_heads, self.indices.shape[2], lists.rows),
            *(-(-lists.rows // max(pieces, 1)), self.indices.shape[3], lists.columns, lists.first),
            *((lists.first + keys - 1) // lists.columns - block + 1, block),
            *(pairs.scale, batched.problem.softcap or 0.0),
            *(self.indices.data_ptr(), *_shared_strides(self.indices)),
            *((None, 0) if self.spans is None else (self.spans.data_ptr(), _shared_strides(self.spans)[0])),
            *(number for tensor in self.read for number in (tensor.data_ptr(), *tensor.stride()[:3])),
            *(
                number
                for term in self.terms
                for number in ((None, 0, 0) if term is None else (term.data_ptr(), *_shared_strides(term)))
            ),
        )

    def run(self, function: object, units: int) -> None:
        """Run a C function over so many units."""
        self.work.unit_count = units
        run_units(function, self.work, self.threads)


def _shared_strides(tensor: Tensor) -> tuple[int, int]:
    """The strides of the first two axes; 0 of one that all share."""
    first, second = (
        0 if size == 1 else stride for size, stride in zip(tensor.shape[:2], tensor.stride()[:2], strict=True)
    )
    return first, second


def _padded(dim: int) -> int:
    """A row of so many numbers in whole vectors of any variant."""
    return -(-dim // WIDEST) * WIDEST


def _narrowed(tensor: Tensor, dim: int) -> Tensor:
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim].contiguous()
