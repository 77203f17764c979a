"""What the content of one call adds to scores in C: sums of gates, tables of queries and keys, biases by distance."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...biases import Bias, RelativeBias
from ...biases.base import bias_parts
from ...biases.distance_tables import KeyTable, QueryTable, QueryVectors
from ...biases.forget_gates import GateSums, two_terms
from ...core.batched_problem import BatchedProblem
from ...core.large_results import new_large
from ...tiles.diagonals import bias_along, distances
from ...tiles.tile_bias import add_in_own_axes
from ...tiles.tile_bits import BLOCK

LOG2_E = math.log2(math.e)


class SumsStruct(ctypes.Structure):
    """The structure `call_sums` of flash.h."""

    _fields_ = (("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("terms", c_int64), ("gradient", c_void_p))


class TableStruct(ctypes.Structure):
    """The structure `call_table` of flash.h."""

    _fields_ = (
        *(("data", c_void_p), ("batch", c_int64), ("head", c_int64), ("row", c_int64), ("count", c_int64)),
        *(("columns", c_void_p), ("gradient", c_void_p)),
    )


class VectorsStruct(ctypes.Structure):
    """The structure `call_vectors` of flash.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "vectors", "turned")),
        *((name, c_int64) for name in ("query_batch", "query_head", "vector_head", "dim", "length")),
        *(("grad_queries", c_void_p), ("grad_vectors", c_void_p)),
    )


class CallBiasStruct(ctypes.Structure):
    """The structure `call_bias` of flash.h."""

    _fields_ = (
        *(("row_sums", SumsStruct), ("column_sums", SumsStruct)),
        *(("query_table", TableStruct), ("key_table", TableStruct), ("vectors", VectorsStruct)),
    )


MARGIN, WIDEST = BLOCK, 32
"""As in flash.h; and the most floats of a pair of vectors, to whole ones of which features are padded."""


def is_native(bias: Bias) -> bool:
    """Whether C adds the bias: one of each kind of those of a call, and any by distance."""
    parts = [part for part in bias_parts(bias) if not isinstance(part, RelativeBias)]
    kinds = [type(part) for part in parts]
    return len(set(kinds)) == len(kinds) and all(map(_is_native_part, parts))


def _is_native_part(part: Bias) -> bool:
    if isinstance(part, QueryTable | KeyTable):
        return part.index.gradual
    return isinstance(part, QueryVectors) or (isinstance(part, GateSums) and part.side == "all")


@dataclass(frozen=True, eq=False, slots=True)
class CallBiasTerms:
    """The parts of a bias as C reads them, of all batches: (B or 1, H or 1, length, width), and a line by distance.

    sums: c of queries and keys, float64. columns: of each table the one that each diagonal has, (M + N - 1) int32.
    queries (B or 1, H, M, D) and vectors (H or 1, M + N - 1, D), one for each diagonal, are padded.
    """

    sums: tuple[Tensor, Tensor] | None = None
    query_table: Tensor | None = None
    key_table: Tensor | None = None
    query_columns: Tensor | None = None
    key_columns: Tensor | None = None
    queries: Tensor | None = None
    vectors: Tensor | None = None

    @classmethod
    def from_problem(cls, batched: BatchedProblem) -> CallBiasTerms | None:
        """The terms of a problem; None where nothing but distance decides."""
        problem = batched.problem
        parts = [part for part in bias_parts(problem.bias) if not isinstance(part, RelativeBias)]
        if not parts:
            return None
        problem.bias_values(problem.grid().tile(slice(0, 1), slice(0, 1)))  # says what does not fit
        along, found = distances(problem), {}
        for part in parts:
            own = [batched.as_4d(tensor.detach()) for tensor in part.parameters()]
            if isinstance(part, GateSums):
                found["sums"] = (own[0], own[1])
            elif isinstance(part, QueryTable | KeyTable):
                side = "query" if isinstance(part, QueryTable) else "key"
                found[f"{side}_table"] = own[0].float()
                found[f"{side}_columns"] = part.index(along).int().contiguous()
            elif isinstance(part, QueryVectors):
                rows, features = -batched.shape[2] % BLOCK, -own[0].shape[-1] % WIDEST
                found["queries"] = pad(own[0].float() * LOG2_E, (0, features, 0, rows)).contiguous()
                of_diagonals = own[1][0][:, part.index(along)].float()
                found["vectors"] = pad(of_diagonals, (0, features, MARGIN, MARGIN)).contiguous()
        return cls(**found)

    def struct(self, batch: slice, gradients: CallBiasGradients | None) -> tuple[CallBiasStruct, list[Tensor]]:
        """The C structure for some of the batches, and the tensors that own its memory."""
        struct, held = CallBiasStruct(), []
        if self.sums is not None:
            for name, sums in zip(("row_sums", "column_sums"), self.sums, strict=True):
                terms = torch.stack(two_terms(_of_batches(sums, batch).squeeze(-1) * LOG2_E)).contiguous()
                setattr(struct, name, SumsStruct(terms.data_ptr(), *_strides(terms)[1:3], terms.stride(0)))
                held.append(terms)
        for name, table, columns in (
            ("query_table", self.query_table, self.query_columns),
            ("key_table", self.key_table, self.key_columns),
        ):
            if table is not None and columns is not None:
                own = _of_batches(table, batch).contiguous()
                strides, count = _strides(own), own.shape[3]
                setattr(struct, name, TableStruct(own.data_ptr(), *strides[:2], count, count, columns.data_ptr()))
                held += [own, columns]
        if self.queries is not None and self.vectors is not None:
            own, turned = _of_batches(self.queries, batch), self.vectors.mT.contiguous()
            (batches, heads, *_), (length, dim) = _strides(own), self.vectors.shape[1:]
            addresses = own.data_ptr(), self.vectors.data_ptr(), turned.data_ptr()
            struct.vectors = VectorsStruct(*addresses, batches, heads, _strides(self.vectors)[0], dim, length)
            held += [own, self.vectors, turned]
        if gradients is not None:
            gradients.write_to(struct, batch)
        return struct, held


def _of_batches(tensor: Tensor, batch: slice) -> Tensor:
    return tensor if tensor.shape[0] == 1 else tensor[batch]


def _strides(tensor: Tensor) -> list[int]:
    """The strides of a tensor, 0 where all of an axis have the same numbers."""
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]


@dataclass(frozen=True, eq=False, slots=True)
class CallBiasGradients:
    """The gradients of the terms of all batches and heads, float32: of sums (B, H, length), of tables with a count.

    A table's is the gradient of the bias's parameter itself, where that has the same shape, and is not added to it.
    """

    row_sums: Tensor | None = None
    column_sums: Tensor | None = None
    query_table: Tensor | None = None
    key_table: Tensor | None = None
    queries: Tensor | None = None
    vectors: Tensor | None = None

    @classmethod
    def over(cls, batched: BatchedProblem, into: tuple[Tensor, ...]) -> CallBiasGradients | None:
        """Zeros to add to, or the gradients of the bias's parameters; None where nothing but distance decides."""
        batches, heads, rows, columns = batched.shape
        made: dict[str, Tensor] = {}
        for part, own in _with_gradients(batched.problem.bias, into):
            if isinstance(part, GateSums):
                made["row_sums"] = batched.value.new_zeros(batches, heads, rows, dtype=torch.float32)
                made["column_sums"] = batched.value.new_zeros(batches, heads, columns, dtype=torch.float32)
            elif isinstance(part, QueryTable | KeyTable):
                length, name = (rows, "query_table") if isinstance(part, QueryTable) else (columns, "key_table")
                shape, (target,) = (batches, heads, length, part.index.count), own
                same = target.numel() == math.prod(shape) and target.is_contiguous() and target.dtype == torch.float32
                made[name] = target.view(shape) if same else batched.value.new_zeros(shape, dtype=torch.float32)
            elif isinstance(part, QueryVectors):
                dim, length = -(-part.query.shape[-1] // WIDEST) * WIDEST, rows + columns - 1 + 2 * MARGIN
                for name, count in (("queries", -(-rows // BLOCK) * BLOCK), ("vectors", length)):
                    made[name] = new_large(batched.value.float(), batches, heads, count, dim).zero_()
        return cls(**made) if made else None

    def write_to(self, struct: CallBiasStruct, batch: slice) -> None:
        """Enter the addresses for some of the batches."""
        for name in ("row_sums", "column_sums", "query_table", "key_table"):
            tensor = getattr(self, name)
            if tensor is not None:
                getattr(struct, name).gradient = tensor[batch].data_ptr()
        if self.queries is not None and self.vectors is not None:
            struct.vectors.grad_queries = self.queries[batch].data_ptr()
            struct.vectors.grad_vectors = self.vectors[batch].data_ptr()

    def add_to(self, batched: BatchedProblem, part: Bias, into: tuple[Tensor, ...]) -> None:
        """Add the gradients of a part's parameters to these, unless they stand there."""
        if isinstance(part, QueryVectors):
            found = self._of_vectors(batched, part)
        elif isinstance(part, GateSums):
            found = [None if sums is None else sums.unsqueeze(-1) for sums in (self.row_sums, self.column_sums)]
        else:
            found = [self.query_table if isinstance(part, QueryTable) else self.key_table]
        for target, gradient in zip(into, found, strict=True):
            if gradient is not None and gradient.data_ptr() != target.data_ptr():
                add_in_own_axes(batched, gradient, target)

    def _of_vectors(self, batched: BatchedProblem, part: QueryVectors) -> list[Tensor | None]:
        """The gradients of queries, and of vectors from those of the diagonals."""
        if self.queries is None or self.vectors is None:
            return [None, None]
        rows, dim, along = batched.shape[2], part.query.shape[-1], distances(batched.problem)
        of_diagonals = self.vectors[:, :, MARGIN : MARGIN + len(along), :dim].sum(0) / LOG2_E
        of_vectors = of_diagonals.new_zeros(1, batched.shape[1], part.index.count, dim)
        return [self.queries[:, :, :rows, :dim], of_vectors.index_add_(2, part.index(along), of_diagonals[None])]


def add_bias_gradients(
    batched: BatchedProblem, line: Tensor | None, call: CallBiasGradients | None, into: tuple[Tensor, ...]
) -> None:
    """Add the gradients of the parts of a problem's bias: of those by distance from the gradient of each diagonal."""
    problem = batched.problem
    for part, own in _with_gradients(problem.bias, into):
        if not isinstance(part, RelativeBias):
            if call is not None:
                call.add_to(batched, part, own)
        elif line is not None and own:
            of_line = bias_along(problem, part)
            part.accumulate_at(distances(problem), line.sum_to_size(of_line.shape), own)


def _with_gradients(bias: Bias | None, into: tuple[Tensor, ...]) -> Iterator[tuple[Bias, tuple[Tensor, ...]]]:
    """The parts of a bias, and of the gradients of its parameters those of each."""
    first = 0
    for part in bias_parts(bias):
        count = len(part.parameters())
        yield part, into[first : first + count]
        first += count
