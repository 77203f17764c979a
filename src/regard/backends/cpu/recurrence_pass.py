"""The outputs of the linear recurrence of tensors of one layout, without states that nobody asked for.

What shapes, strides and dtypes decide is computed once, so that each pass is one call of C code, which also checks the
numbers that it reads. The structure is explained in recurrence.h.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.large_results import LARGE_BYTES, new_large
from ...core.recurrence_problem import RecurrenceInputs, RecurrenceProblem, StoredRecurrence
from ...errors import RegardError
from ...tiles.tile_bits import BLOCK
from . import library
from .library import last_contiguous, places_of
from .recurrence_struct import RecurrenceStruct, check, structure, sum_of_parts, threads_for
from .threads import no_memory, run_units

BONUS, BONUS_STEP = places_of(RecurrenceStruct, "bonus", "bonus_step")
INPUTS = places_of(RecurrenceStruct, "query", "key", "value", "decay", "beta", "removal")
FAILED, CHECKED, INVALID = places_of(RecurrenceStruct, "failed", "checked", "invalid")
OUTPUT, ROW_TOTAL, GRAD_OUTPUT = places_of(RecurrenceStruct, "output", "row_total", "grad_output")
BORDER_STATE, BORDER_TOTAL = places_of(RecurrenceStruct, "border_state", "border_total")
GRADIENTS = places_of(
    RecurrenceStruct, "grad_query", "grad_key", "grad_value", "grad_decay", "grad_beta", "grad_removal"
)
VALUE = 2
"""The place of the value among the inputs: its gradient alone has no parts."""


@dataclass(frozen=True, eq=False, slots=True)
class RecurrencePassInC:
    """The recurrence from a state of 0, for tensors of the layout that `prepare_pass` was given.

    numbers: the structure as 64-bit numbers, the addresses of a call 0. output_shape: (B, H, N, Dv). like_query:
    whether the output is contiguous as the query is. parts: of the value columns, over which gradients are summed.
    border_shape: (B, Hk, T, D, Dv), where there is more than one segment. ones: the beta where a removal has none.
    """

    numbers: array[int]
    output_shape: tuple[int, int, int, int]
    like_query: bool
    threads: int
    parts: int
    border_shape: tuple[int, ...] | None
    normalize: bool
    ones: Tensor | None

    def forward(
        self, inputs: RecurrenceInputs, *, stores: bool = False, bonus: Tensor | None = None
    ) -> tuple[Tensor, StoredRecurrence] | None:
        """The output, and if `stores` what `backward` needs; None where a number is out of its range or not finite.

        None too where there is no native code any more. bonus: as in the protocol.
        """
        if not library.available():
            return None
        query, numbers = inputs[0], self._with_inputs(inputs)
        output = torch.empty_like(query) if self.like_query else new_large(query, *self.output_shape)
        numbers[OUTPUT], numbers[CHECKED] = output.data_ptr(), 1
        if bonus is not None:
            bonus = last_contiguous(bonus)
            strides = (step if size > 1 else 0 for size, step in zip(bonus.shape, bonus.stride(), strict=True))
            *rows, numbers[BONUS_STEP] = strides
            numbers[BONUS : BONUS + 4] = array("q", (bonus.data_ptr(), *rows))
        row_total = border = border_total = None
        if stores and self.normalize:
            row_total = torch.empty(self.output_shape[:3], device="cpu")
            numbers[ROW_TOTAL] = row_total.data_ptr()
        if stores and self.border_shape is not None:
            border = torch.empty(self.border_shape, device="cpu")
            numbers[BORDER_STATE] = border.data_ptr()
            if self.normalize:
                border_total = torch.empty(self.border_shape[:-1], device="cpu")
                numbers[BORDER_TOTAL] = border_total.data_ptr()
        self._run(library.current().recurrence, numbers)
        if numbers[INVALID]:
            return None
        return output, (output if self.normalize else None, row_total, border, border_total)

    def backward(
        self, inputs: RecurrenceInputs, stored: StoredRecurrence, grad_output: Tensor
    ) -> tuple[Tensor | None, ...]:
        """The gradients of all inputs; stored: of `forward`."""
        numbers = self._with_inputs(inputs)
        grad_output = last_contiguous(grad_output)
        numbers[GRAD_OUTPUT : GRAD_OUTPUT + 4] = array("q", (grad_output.data_ptr(), *grad_output.stride()[:3]))
        for place, tensor in zip((OUTPUT, ROW_TOTAL, BORDER_STATE, BORDER_TOTAL), stored, strict=True):
            if tensor is not None:
                numbers[place] = tensor.data_ptr()
        gradients: list[Tensor | None] = [None] * len(GRADIENTS)
        for index, (place, tensor) in enumerate(zip(GRADIENTS, inputs, strict=True)):
            if tensor is None:
                if place == GRADIENTS[4] and self.ones is not None:
                    unread = torch.empty(self.parts, *self.ones.shape, device="cpu")
                    numbers[place] = unread.data_ptr()
                continue
            gradient = gradients[index] = self._room(tensor, index)
            numbers[place] = gradient.data_ptr()
        self._run(library.current().recurrence_backward, numbers)
        if self.parts > 1:
            for index, (gradient, tensor) in enumerate(zip(gradients, inputs, strict=True)):
                if gradient is not None and tensor is not None and index != VALUE:
                    gradients[index] = sum_of_parts(gradient).to(tensor.dtype)
        return tuple(gradients)

    def _room(self, tensor: Tensor, index: int) -> Tensor:
        """Contiguous memory for a gradient; that of parts is in float32."""
        if self.parts > 1 and index != VALUE:
            return torch.empty(self.parts, *tensor.shape, device="cpu")
        if tensor.is_contiguous() and tensor.nbytes < LARGE_BYTES:
            return torch.empty_like(tensor)
        return new_large(tensor, *tensor.shape)

    def _with_inputs(self, inputs: RecurrenceInputs) -> array[int]:
        """The numbers of a call, with the addresses of its inputs."""
        numbers = array("q", self.numbers)
        for place, tensor in zip(INPUTS, inputs, strict=True):
            if tensor is not None:
                numbers[place] = tensor.data_ptr()
        return numbers

    def _run(self, function: object, numbers: array[int]) -> None:
        """Run a pass; on one thread it is one call of C, with the address of the numbers."""
        if self.threads > 1:
            run_units(function, RecurrenceStruct.from_buffer(numbers), self.threads)
            return
        function(numbers.buffer_info()[0])  # type: ignore[operator]
        if numbers[FAILED]:
            raise no_memory()


def prepare_pass(problem: RecurrenceProblem, scale: float) -> RecurrencePassInC | None:
    """The pass for tensors of the layout of a problem's; None where there is no code for them.

    There is for a problem without a state, whose last axes are contiguous, and which is not empty.
    """
    ones = None
    if problem.removal is not None and problem.beta is None:
        ones = torch.ones(1, 1, 1, device="cpu").expand(problem.key.shape[:3])
    query, key, value, decay, removal = problem.query, problem.key, problem.value, problem.decay, problem.removal
    problem = RecurrenceProblem(
        query,
        key,
        value,
        decay,
        problem.beta if ones is None else ones,
        feature_map=problem.feature_map,
        normalize=problem.normalize,
        removal=removal,
    )
    try:
        check(problem)
    except RegardError:
        return None
    wide = (query, key, value, removal, decay if decay is not None and decay.ndim == 4 else None)
    if any(tensor is not None and (not tensor.numel() or tensor.stride(-1) != 1) for tensor in wide):
        return None
    work = structure(problem, scale)
    numbers = array("q", bytes(work))
    for place in INPUTS:
        numbers[place] = 0
    if ones is not None:
        numbers[INPUTS[4]] = ones.data_ptr()
    (batch, heads, tokens, dim), (key_heads, value_dim) = query.shape, (key.shape[1], value.shape[3])
    segments = -(-tokens // (BLOCK * work.segment))
    output_shape = batch, heads, tokens, value_dim
    return RecurrencePassInC(
        numbers,
        output_shape,
        query.is_contiguous() and query.shape == output_shape and query.nbytes < LARGE_BYTES,
        min(threads_for(problem), work.unit_count),
        work.parts,
        (batch, key_heads, segments, dim, value_dim) if segments > 1 else None,
        problem.normalize,
        ones,
    )
