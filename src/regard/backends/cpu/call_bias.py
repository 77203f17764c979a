"""What the content of one call adds to scores in C: sums of gates, tables of queries and keys, biases by distance."""

from __future__ import annotations

import ctypes
import math
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from ...biases import Bias, RelativeBias
from ...biases.base import bias_parts
from ...biases.distance_tables import KeyTable, QueryTable
from ...biases.forget_gates import GateSums, two_terms
from ...core.batched_problem import BatchedProblem
from ...core.problem import Problem
from ...tiles.diagonals import bias_along, distances
from ...tiles.tile_bias import add_in_own_axes

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


class CallBiasStruct(ctypes.Structure):
    """The structure `call_bias` of flash.h."""

    _fields_ = (
        *(("row_sums", SumsStruct), ("column_sums", SumsStruct)),
        *(("query_table", TableStruct), ("key_table", TableStruct)),
    )


def is_native(bias: Bias) -> bool:
    """Whether C adds the bias: one of each kind of those of a call, and any by distance."""
    parts = [part for part in bias_parts(bias) if not isinstance(part, RelativeBias)]
    kinds = [type(part) for part in parts]
    return len(set(kinds)) == len(kinds) and all(
        isinstance(part, QueryTable | KeyTable) or (isinstance(part, GateSums) and part.side == "all") for part in parts
    )


@dataclass(frozen=True, eq=False, slots=True)
class CallBiasTerms:
    """The parts of a bias as C reads them, of all batches: (B or 1, H or 1, length, width), and a line by distance.

    sums: c of queries and keys, float64. columns: of each table the one that each diagonal has, (M + N - 1) int32.
    """

    sums: tuple[Tensor, Tensor] | None = None
    query_table: Tensor | None = None
    key_table: Tensor | None = None
    query_columns: Tensor | None = None
    key_columns: Tensor | None = None

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
        return cls(**found)

    def struct(self, batch: slice, gradients: CallBiasGradients | None) -> tuple[CallBiasStruct, list[Tensor]]:
        """The C structure for some of the batches, and the tensors that own its memory."""
        struct, held = CallBiasStruct(), []
        if self.sums is not None:
            for name, sums in zip(("row_sums", "column_sums"), self.sums, strict=True):
                terms = torch.stack(two_terms(_of_batches(sums, batch).squeeze(-1) * LOG2_E)).contiguous()
                strides = [0 if size == 1 else stride for size, stride in zip(terms.shape, terms.stride(), strict=True)]
                setattr(struct, name, SumsStruct(terms.data_ptr(), strides[1], strides[2], terms.stride(0)))
                held.append(terms)
        for name, table, columns in (
            ("query_table", self.query_table, self.query_columns),
            ("key_table", self.key_table, self.key_columns),
        ):
            if table is not None and columns is not None:
                scaled = (_of_batches(table, batch) * LOG2_E).contiguous()
                strides = [0 if size == 1 else stride for size, stride in zip(scaled.shape, scaled.stride(), strict=True)]
                address = scaled.data_ptr()
                setattr(
                    struct, name, TableStruct(address, *strides[:2], scaled.shape[3], scaled.shape[3], columns.data_ptr())
                )
                held += [scaled, columns]
        if gradients is not None:
            gradients.write_to(struct, batch)
        return struct, held


def _of_batches(tensor: Tensor, batch: slice) -> Tensor:
    return tensor if tensor.shape[0] == 1 else tensor[batch]


@dataclass(frozen=True, eq=False, slots=True)
class CallBiasGradients:
    """The gradients of the terms of all batches and heads, float32: of sums (B, H, length), of tables with a count."""

    row_sums: Tensor | None = None
    column_sums: Tensor | None = None
    query_table: Tensor | None = None
    key_table: Tensor | None = None

    @classmethod
    def zeros(cls, batched: BatchedProblem, terms: CallBiasTerms) -> CallBiasGradients:
        """Zeros to add to."""
        batches, heads, rows, columns = batched.shape
        new = batched.value.new_zeros
        made: dict[str, Tensor] = {}
        if terms.sums is not None:
            made["row_sums"] = new(batches, heads, rows, dtype=torch.float32)
            made["column_sums"] = new(batches, heads, columns, dtype=torch.float32)
        if terms.query_table is not None:
            made["query_table"] = new(batches, heads, rows, terms.query_table.shape[3], dtype=torch.float32)
        if terms.key_table is not None:
            made["key_table"] = new(batches, heads, columns, terms.key_table.shape[3], dtype=torch.float32)
        return cls(**made)

    def write_to(self, struct: CallBiasStruct, batch: slice) -> None:
        """Enter the addresses for some of the batches."""
        for name in ("row_sums", "column_sums", "query_table", "key_table"):
            tensor = getattr(self, name)
            if tensor is not None:
                getattr(struct, name).gradient = tensor[batch].data_ptr()


def add_bias_gradients(
    batched: BatchedProblem, line: Tensor | None, call: CallBiasGradients | None, into: tuple[Tensor, ...]
) -> None:
    """Add the gradients of the parts of a problem's bias: of those by distance from the gradient of each diagonal."""
    problem, first = batched.problem, 0
    for part in bias_parts(problem.bias):
        own = into[first : first + len(part.parameters())]
        first += len(own)
        if isinstance(part, RelativeBias):
            _add_along(problem, part, line, own)
        elif call is not None:
            for target, gradient in zip(own, _gradients_of(part, call), strict=True):
                add_in_own_axes(batched, gradient, target)


def _add_along(problem: Problem, bias: RelativeBias, line: Tensor | None, into: tuple[Tensor, ...]) -> None:
    if line is not None and into:
        of_line = bias_along(problem, bias)
        bias.accumulate_at(distances(problem), line.sum_to_size(of_line.shape), into)


def _gradients_of(part: Bias, call: CallBiasGradients) -> list[Tensor]:
    """The gradients of the parameters of a part, (B, H, length, width)."""
    if isinstance(part, GateSums):
        found = [sums.unsqueeze(-1) for sums in (call.row_sums, call.column_sums) if sums is not None]
    else:
        found = [call.query_table if isinstance(part, QueryTable) else call.key_table]
    return [gradient for gradient in found if gradient is not None]
