"""The linear recurrence of causal linear attention, in chunks of tokens: forward and backward.

S_t = e^{g_t} S_{t-1} + k_t u_tᵀ and o_t = S_tᵀ q_t, with u_t = v_t, or by the delta rule (Yang et al. 2024, arXiv
2406.06484; with decay arXiv 2412.06464) u_t = β_t (v_t - (e^{g_t} S_{t-1})ᵀ r_t), r_t = k_t unless it is given. The
structure is explained in recurrence.h.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...core.large_results import new_large
from ...core.recurrence_problem import RecurrenceGradients, RecurrenceProblem, RecurrenceResult
from ...tiles.tile_bits import BLOCK
from . import library
from .flash_tiles import rows_struct
from .library import last_contiguous
from .recurrence_pass import prepare_pass
from .recurrence_struct import (
    FEATURE_MAPS,
    address_of,
    check,
    parts_of,
    segment_chunks,
    structure,
    sum_of_parts,
    threads_for,
)
from .threads import run_units
from .token_step import one_token, prepare_step


class RecurrencesInC:
    """The linear recurrence in chunks of tokens, and one token of it."""

    prepare_step = staticmethod(prepare_step)
    prepare_pass = staticmethod(prepare_pass)

    def why_not(self, problem: RecurrenceProblem) -> list[str]:
        """Sums that are not float32, and a feature map or a total that it has no code for."""
        reasons = []
        for name in ("decay", "beta", "state", "total"):
            tensor = getattr(problem, name)
            if tensor is not None and (tensor.dtype is not torch.float32 or not tensor.is_cpu):
                kind = f"{tensor.dtype} on {tensor.device}"
                reasons.append(f"its code reads the {name} as float32 on the CPU; this is {kind}")
        if problem.feature_map not in FEATURE_MAPS:
            reasons.append(f"its code has the feature maps {FEATURE_MAPS}; this is {problem.feature_map!r}")
        if problem.normalize and problem.beta is not None:
            reasons.append("its code has no total of weights for the delta rule")
        if problem.removal is not None and problem.feature_map != "identity":
            reasons.append("its code removes the values of keys without a feature map")
        return reasons

    def forward(self, problem: RecurrenceProblem, *, stores_borders: bool = False) -> RecurrenceResult:
        """The outputs and the final state; stores_borders: with the states that `backward` starts from.

        Raises:
            KernelError: there is no native code to call (`regard.native.why_not`).
            ShapeError, DtypeError, DeviceError: a tensor is not as `RecurrenceProblem` has it, or not as `why_not`.
            ConfigurationError: the feature map is unknown, or a total is normalised by that the delta rule does not
                keep; of one token, a decay above 0, or a beta not within 0..2.
        """
        if problem.key.shape[2:3] == (1,) and not stores_borders and (token := one_token(problem)) is not None:
            return RecurrenceResult(token[0], None, token[1], None, None, None)
        check(problem)
        code, new = library.current(), partial(problem.query.new_empty, dtype=torch.float32)
        batch, heads, tokens, dim = problem.query.shape
        key_heads, value_dim = problem.value.shape[1], problem.value.shape[3]
        segments = self.segments(problem)
        output = new_large(problem.query, batch, heads, tokens, value_dim)
        state = new((batch, key_heads, dim, value_dim))
        border = new((batch, key_heads, segments, dim, value_dim)) if stores_borders else None
        row_total = new((batch, heads, tokens)) if problem.normalize else None
        total = new((batch, key_heads, dim)) if problem.normalize else None
        border_total = new((batch, key_heads, segments, dim)) if stores_borders and problem.normalize else None
        read = _contiguous_rows(problem)  # what it owns, C reads
        work = structure(
            read,
            output=address_of(output),
            row_total=address_of(row_total),
            final_state=address_of(state),
            final_total=address_of(total),
            border_state=address_of(border),
            border_total=address_of(border_total),
        )
        run_units(code.recurrence, work, threads_for(problem))
        return RecurrenceResult(output, row_total, state, total, border, border_total)

    def backward(
        self,
        problem: RecurrenceProblem,
        border_state: Tensor,
        grad_output: Tensor,
        grad_state: Tensor | None = None,
        *,
        grad_total: Tensor | None = None,
        output: Tensor | None = None,
        row_total: Tensor | None = None,
        border_total: Tensor | None = None,
    ) -> RecurrenceGradients:
        """The gradients of all inputs, from those of the output and of the final state and total; None for 0.

        border_state: of `forward` with `stores_borders`; where outputs are divided by their totals, so are output,
        row_total and border_total, which are needed there. Errors are those of `forward`.
        """
        check(problem)
        code, new = library.current(), partial(problem.query.new_empty, dtype=torch.float32)
        (batch, heads, tokens, dim), (_, key_heads, _, value_dim) = problem.query.shape, problem.value.shape
        parts, dtype = parts_of(problem), problem.query.dtype
        like = problem.query if parts == 1 else new(0)  # sums of parts are rounded
        query = new_large(like, parts, batch, heads, tokens, dim)
        key = new_large(like, parts, batch, key_heads, tokens, dim)
        value = new_large(problem.query, batch, key_heads, tokens, value_dim)
        state = new((batch, key_heads, dim, value_dim))
        decay = None if problem.decay is None else new((parts, *problem.decay.shape))
        beta = None if problem.beta is None else new((parts, *problem.beta.shape))
        removal = None if problem.removal is None else new_large(like, *key.shape)
        total = new((batch, key_heads, dim)) if problem.normalize else None
        border_state, grad_output = border_state.contiguous(), last_contiguous(grad_output)
        grad_state, grad_total = _contiguous(grad_state), _contiguous(grad_total)
        read = _contiguous_rows(problem)  # what it owns, C reads
        work = structure(
            read,
            output=address_of(output),
            row_total=address_of(row_total),
            border_state=address_of(border_state),
            border_total=address_of(border_total),
            grad_output=rows_struct(grad_output),
            grad_final_state=address_of(grad_state),
            grad_final_total=address_of(grad_total),
            grad_query=address_of(query),
            grad_key=address_of(key),
            grad_value=address_of(value),
            grad_decay=address_of(decay),
            grad_beta=address_of(beta),
            grad_removal=address_of(removal),
            grad_state=address_of(state),
            grad_total=address_of(total),
        )
        run_units(code.recurrence_backward, work, threads_for(problem))
        query, key = (sum_of_parts(gradient).to(dtype) for gradient in (query, key))
        decay, beta = (None if gradient is None else sum_of_parts(gradient) for gradient in (decay, beta))
        removal = None if removal is None else sum_of_parts(removal).to(dtype)
        return RecurrenceGradients(query, key, value, decay, beta, state, total, removal)

    def segments(self, problem: RecurrenceProblem) -> int:
        """The number of states that `forward` stores for the backward pass, of each key head."""
        return -(-problem.key.shape[2] // (BLOCK * segment_chunks(problem)))


def _contiguous_rows(problem: RecurrenceProblem) -> RecurrenceProblem:
    """The problem without its history, copied where a last axis, or a state, is not contiguous: as C reads it."""
    query, key, value = (last_contiguous(tensor.detach()) for tensor in (problem.query, problem.key, problem.value))
    removal = None if problem.removal is None else last_contiguous(problem.removal.detach())
    decay, beta = (None if tensor is None else tensor.detach() for tensor in (problem.decay, problem.beta))
    decay = decay if decay is None or decay.ndim == 3 else last_contiguous(decay)
    state, total = _contiguous(problem.state), _contiguous(problem.total)
    return replace(
        problem,
        query=query,
        key=key,
        value=value,
        decay=decay,
        beta=beta,
        state=state,
        total=total,
        removal=removal,
    )


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    """The tensor without its history, copied if it is not contiguous."""
    return None if tensor is None else tensor.detach().contiguous()
