"""Causal linear attention with elu + 1 in one pass of a backend: feature map, recurrence and division by the totals.

Computed one after the other, each of them would read and write all queries, keys or outputs once more, which takes
longer than the recurrence.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from ..backends.base import Recurrences
from ..backends.registry import BACKENDS
from ..core.recurrence_problem import RecurrenceProblem
from ..core.score_forms import at_least_float32
from ..core.torch_modes import mapped_by_autograd, under_dispatch_mode, under_forward_mode, under_transform
from .feature_maps import Elu
from .recurrence import differentiable_views, recurrence
from .sums_over_keys import divide_by_totals


def runs_in_one_pass(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether `elu_recurrence` takes these tensors, of one dtype and device: a backend does, outside of transforms."""
    if under_transform() or under_forward_mode() or under_dispatch_mode():
        return False
    maker = _maker(query)
    return maker is not None and not maker.why_not(_problem((query, key, value, None, None, None)))


def elu_recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None = None, sums: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs S_tᵀ φ(q_t) / z_tᵀ φ(q_t) with φ = elu + 1, 0 where the divisor is 0, and the state after all positions.

    S_t = e^{g_t} S_{t-1} + φ(k_t) v_tᵀ and z_t = e^{g_t} z_{t-1} + φ(k_t). Both results are differentiable twice, with
    respect to all arguments.

    Shapes: query (B, H, N, D), key (B, Hk, N, D), value (B, Hk, N, Dv), decay (B, Hk, N) or (B, Hk, N, D), at most 0;
    sums, before and after, (B, Hk, D, Dv + 1): S, and z in the last column. The first three, and the outputs, are
    float32, bfloat16 or float16, the others float32.
    """
    matrix, total = (None, None) if sums is None else (sums[..., :-1], sums[..., -1])
    output, matrix, total = _EluRecurrence.apply(query, key, value, decay, matrix, total)  # type: ignore[misc]
    return output, torch.cat([matrix, total.unsqueeze(-1)], -1)


def _unfused(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, matrix: Tensor | None, total: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The same by an operation for each step, which can be differentiated twice."""
    dtype = value.dtype
    query, key, value = (at_least_float32(tensor) for tensor in (query, key, value))
    sums = None if matrix is None or total is None else torch.cat([matrix, total.unsqueeze(-1)], -1)
    value = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], -1)
    rows, sums = recurrence(Elu()(query), Elu()(key), value, decay, None, sums)
    return divide_by_totals(rows).to(dtype), sums[..., :-1], sums[..., -1]


class _EluRecurrence(torch.autograd.Function):
    """`elu_recurrence` with the matrix and the total apart."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        maker = cast("Recurrences", _maker(inputs[0]))
        result = maker.forward(_problem(inputs), stores_borders=any(ctx.needs_input_grad))
        ctx.save_for_backward(result.output, result.row_total, result.border_state, result.border_total, *inputs)
        return result.output, result.state, result.total  # type: ignore[return-value]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_matrix: Tensor, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        output, row_total, border_state, border_total, *inputs = ctx.saved_tensors
        above = grad_output, grad_matrix, grad_total
        if torch.is_grad_enabled() or any(map(mapped_by_autograd, above)):
            return _gradients_by_torch(inputs, above, ctx.needs_input_grad)
        stored = {"output": output, "row_total": row_total, "border_total": border_total}
        maker = cast("Recurrences", _maker(inputs[0]))
        found = maker.backward(
            _problem(inputs), border_state, grad_output, grad_matrix, grad_total=grad_total, **stored
        )
        gradients = found.query, found.key, found.value, found.decay, found.state, found.total
        return tuple(gradient if need else None for gradient, need in zip(gradients, ctx.needs_input_grad, strict=True))


def _problem(inputs: Any) -> RecurrenceProblem:
    """The problem of the tensors of `_EluRecurrence`."""
    query, key, value, decay, matrix, total = inputs
    return RecurrenceProblem(query, key, value, decay, None, matrix, total, "elu", normalize=True)


def _maker(query: Tensor) -> Recurrences | None:
    """The recurrences of the first backend that has some for tensors of this device and dtype."""
    for backend in BACKENDS:  # no generator: it takes half a microsecond of a call of 70
        if backend.runs(query) and backend.recurrences is not None:
            return backend.recurrences
    return None


def _gradients_by_torch(
    inputs: list[Any], above: tuple[Tensor, ...], needed: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """The gradients of the inputs that need one, by operations that have gradients themselves and can be mapped."""
    twice, views = torch.is_grad_enabled(), cast("list[Any]", differentiable_views(inputs, needed))
    wanted = [tensor for tensor, need in zip(views, needed, strict=True) if need]
    with torch.enable_grad():
        found = torch.autograd.grad(
            _unfused(*views), wanted, above, create_graph=twice, allow_unused=True, materialize_grads=True
        )
    rest = iter(found)
    return tuple(next(rest) if need else None for need in needed)
