"""The recurrence of causal linear attention, S_t = e^{g_t} S_{t-1} + k_t u_tᵀ and o_t = S_tᵀ q_t, and its gradient.

The forward pass stores the state before each segment of positions, and nothing else that grows with the length but its
inputs and its output; the backward pass computes each segment anew, from the last to the first, and so needs memory
for one of them: O(n · d + n / SEGMENT · d · dv). A backend that has recurrences does both, with
segments of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..backends.base import Recurrences
from ..backends.registry import BACKENDS
from ..core.decomposition import compiled_whole, decompose
from ..core.recurrence_problem import RecurrenceProblem
from ..core.torch_modes import functorch_active, mapped_by_autograd, under_dispatch_mode, under_forward_mode
from ..kernels.custom_op import with_autograd
from .chunks import advance
from .scanned_recurrence import scanned

SEGMENT, SMALLEST_SEGMENT = 2**14, 256
"""Positions times key heads that are computed at once, and positions at least."""
GATED = 8
"""Times as much memory as without is needed for a segment with a decay for each feature."""


def recurrence(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    state: Tensor | None = None,
    removal: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs o_t = S_tᵀ q_t of all positions, and the state S after the last one; nothing is normalised.

    S_t = e^{g_t} S_{t-1} + k_t u_tᵀ with u_t = v_t, or with a beta u_t = β_t (v_t - (e^{g_t} S_{t-1})ᵀ r_t), where r_t
    is k_t without a removal, which needs a beta. Both results are differentiable twice, with respect to all arguments.

    Shapes: query (B, H, N, D), key (B, Hk, N, D), value (B, Hk, N, Dv), decay (B, Hk, N) or (B, Hk, N, D), at most 0
    and -inf at least, beta (B, Hk, N), state (B, Hk, D, Dv), zeros by default, removal (B, Hk, N, D); output
    (B, H, N, Dv), final state (B, Hk, D, Dv). Query head h reads the state of key head ⌊h · Hk / H⌋. All in one dtype,
    float32 or float64.
    """
    if state is None:
        state = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
    if functorch_active() or under_forward_mode():
        return advance(query, key, value, decay, beta, state, removal)
    if torch.compiler.is_compiling() or under_dispatch_mode():
        output, final, _ = torch.ops.regard.linear_recurrence(query, key, value, decay, beta, state, removal)
        return output, final
    inputs = (query, key, value, decay, beta, state, removal)
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in inputs):
        output, final, _ = _Recurrence.apply(*inputs)  # type: ignore[misc]
        return output, final
    output, final, _ = _forward(*inputs, stores_borders=False)
    return output, final


def _maker(problem: RecurrenceProblem) -> Recurrences | None:
    """The methods of the backend that computes the problem; None where `advance` has to."""
    for backend in BACKENDS:
        if not backend.runs(problem.query, problem.key, problem.value):
            continue
        found = backend.recurrences
        if found is not None and not found.why_not(problem):
            return found
    return None


def _segment_size(key: Tensor, decay: Tensor | None) -> int:
    """The positions that are computed at once; by functions that leave open what varies under torch.compile."""
    share = torch.sym_max(key.shape[0] * key.shape[1], 1) * (GATED if decay is not None and decay.ndim == 4 else 1)
    return torch.sym_max(SEGMENT // share, SMALLEST_SEGMENT)  # type: ignore[return-value]  # a whole number, or a symbol


def _segments(key: Tensor, decay: Tensor | None) -> list[slice]:
    """The segments of positions that are computed at once, one at least."""
    size = _segment_size(key, decay)
    return [slice(start, start + size) for start in range(0, max(key.shape[2], 1), size)]


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    removal: Tensor | None,
    *,
    stores_borders: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """The output, the final state, and the states before each segment, (B, Hk, segments, D, Dv)."""
    problem = RecurrenceProblem(query, key, value, decay, beta, state, removal=removal)
    maker = _maker(problem)
    if maker is not None:
        result = maker.forward(problem, stores_borders=stores_borders)
        return result.output, result.state, result.state if result.border_state is None else result.border_state
    outputs, states = [], [state]
    with torch.no_grad():
        for segment in _segments(key, decay):
            part = _cut((query, key, value, decay, beta), segment)
            own_removal = None if removal is None else removal[:, :, segment]
            output, state = advance(*part, state, own_removal)  # type: ignore[call-arg]
            outputs.append(output)
            states.append(state)
    borders = torch.stack(states[:-1], 2) if stores_borders else state
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2), state, borders


def _cut(sequences: Sequence[Tensor | None], segment: slice) -> list[Any]:
    """One segment of tensors (B, Hk, N, ...)."""
    return [None if tensor is None else tensor[:, :, segment] for tensor in sequences]


def _backward(
    grad_output: Tensor,
    grad_final: Tensor,
    states: Tensor,
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """The gradient of each input that needs one, None for the others; states (B, Hk, segments, D, Dv)."""
    problem = _problem(inputs)
    maker = _maker(problem)
    if maker is not None:
        found = maker.backward(problem, states, grad_output, grad_final)
        gradients = [found.query, found.key, found.value, found.decay, found.beta, found.state, found.removal]
        return [gradient if need else None for gradient, need in zip(gradients, needed, strict=True)]
    *sequences, _, removal = inputs
    *needs, needs_first, needs_removal = needed
    sequences, needs = [*sequences, removal], [*needs, needs_removal]
    gradients = [
        torch.empty_like(tensor) if tensor is not None and need else None
        for tensor, need in zip(sequences, needs, strict=True)
    ]
    segments = _segments(inputs[1], inputs[3])  # type: ignore[arg-type]
    for index, segment in reversed([*enumerate(segments)]):
        tensors = (*_cut(sequences, segment), states[:, :, index])
        part: list[Any] = [None if x is None else x.detach() for x in tensors]
        needs_state = index > 0 or needs_first
        wanted = [x.requires_grad_() for x, need in zip(part, (*needs, needs_state), strict=True) if need]
        *part, own_removal, before = part
        found = iter(_pull_back([*part, before, own_removal], wanted, grad_output[:, :, segment], grad_final))
        for gradient in gradients:
            if gradient is not None:
                gradient[:, :, segment] = next(found)
        if needs_state:
            grad_final = next(found)
    *gradients, of_removal = gradients
    return [*gradients, grad_final if needs_first else None, of_removal]


def _problem(inputs: Sequence[Any]) -> RecurrenceProblem:
    """The problem of the tensors of `_Recurrence`, whose last one is the removal."""
    return RecurrenceProblem(*inputs[:6], removal=inputs[6])


def _pull_back(
    inputs: Sequence[Any], wanted: Sequence[Tensor], grad_output: Tensor, grad_final: Tensor, twice: bool = False
) -> Sequence[Tensor]:
    """The gradients of some of the inputs, by autograd through the chunks; `twice`: to be differentiated in turn."""
    with torch.enable_grad():
        pairs = zip(advance(*inputs), (grad_output, grad_final), strict=True)
    pairs = [pair for pair in pairs if pair[0].requires_grad]
    if not pairs:  # no positions, and no gradient of the state
        return [torch.zeros_like(tensor) for tensor in wanted]
    results, above = zip(*pairs, strict=True)
    return torch.autograd.grad(results, wanted, above, create_graph=twice, allow_unused=True, materialize_grads=True)


def differentiable_views(inputs: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Inputs to compute a gradient from by torch's operators: where it is differentiated in turn, or many at once.

    Views, as one input may be a function of another; of those that need a gradient alone, leaves of a graph of its own
    where the gradient is not differentiated in turn.
    """
    if torch.is_grad_enabled():
        return [None if tensor is None else tensor.view_as(tensor) for tensor in inputs]
    return [
        tensor.detach().requires_grad_() if need and tensor is not None else tensor
        for tensor, need in zip(inputs, needed, strict=True)
    ]


class _Recurrence(torch.autograd.Function):
    """The recurrence, whose backward computes each segment anew."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        output, final, borders = _forward(*inputs)  # type: ignore[arg-type]
        ctx.save_for_backward(borders, *inputs)
        ctx.mark_non_differentiable(borders)
        return output, final.clone() if final is inputs[5] else final, borders

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        states, *inputs = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if not torch.is_grad_enabled() and not any(map(mapped_by_autograd, (grad_output, grad_final))):
            return tuple(_backward(grad_output, grad_final, states, inputs, needed))
        inputs = differentiable_views(inputs, needed)
        wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need and tensor is not None]
        found = iter(_pull_back(inputs, wanted, grad_output, grad_final, twice=torch.is_grad_enabled()))
        return tuple(next(found) if need else None for need in needed)


def _by_torch(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
    """`regard::linear_recurrence` in operators of torch; of the borders, which a gradient alone needs, the first."""
    output, final = scanned(*inputs)
    return output.contiguous(), final.contiguous(), inputs[5].unsqueeze(2)


def _define() -> torch.library.Library:
    """Define `regard::linear_recurrence` and its backward, opaque nodes in the graphs of torch.compile."""
    library = torch.library.Library("regard", "FRAGMENT")
    arguments = "Tensor query, Tensor key, Tensor value, Tensor? decay, Tensor? beta, Tensor state, Tensor? removal"
    library.define(f"linear_recurrence({arguments}) -> (Tensor, Tensor, Tensor)")
    library.define(
        f"linear_recurrence_backward(Tensor grad_output, Tensor grad_final, Tensor states, {arguments}, "
        "bool[] needed) -> Tensor[]"
    )

    def forward_impl(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        output, final, borders = _forward(*inputs)
        return output.contiguous(), final.clone(memory_format=torch.contiguous_format), borders

    def backward_impl(grad_output: Tensor, grad_final: Tensor, states: Tensor, *rest: Any) -> list[Tensor]:
        *inputs, needed = rest
        with with_autograd():
            gradients = _backward(grad_output, grad_final, states, inputs, needed)
        return [states.new_empty(0) if gradient is None else gradient.contiguous() for gradient in gradients]

    def forward_fake(*inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, decay = inputs[:4]
        problem, matrix = _problem(inputs), (key.shape[-1], value.shape[-1])
        maker = _maker(problem)
        segments = -(-torch.sym_max(key.shape[2], 1) // _segment_size(key, decay))
        if maker is not None:
            segments = maker.segments(problem)
        output = query.new_empty(*query.shape[:3], value.shape[-1])
        return output, key.new_empty(*key.shape[:2], *matrix), key.new_empty(*key.shape[:2], segments, *matrix)

    def backward_fake(grad_output: Tensor, grad_final: Tensor, states: Tensor, *rest: Any) -> list[Tensor]:
        *inputs, needed = rest
        return [states.new_empty(tensor.shape if need else 0) for tensor, need in zip(inputs, needed, strict=True)]

    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.needed = [tensor is not None and tensor.requires_grad for tensor in inputs]
        ctx.save_for_backward(output[2], *inputs)

    def backward(ctx: Any, grad_output: Tensor, grad_final: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        gradients = torch.ops.regard.linear_recurrence_backward(grad_output, grad_final, *ctx.saved_tensors, ctx.needed)
        return tuple(gradient if need else None for gradient, need in zip(gradients, ctx.needed, strict=True))

    library.impl("linear_recurrence", forward_impl, "CompositeExplicitAutograd")
    library.impl("linear_recurrence_backward", backward_impl, "CompositeExplicitAutograd")
    torch.library.register_fake(
        "regard::linear_recurrence", compiled_whole("regard::linear_recurrence", forward_fake), lib=library
    )
    torch.library.register_fake("regard::linear_recurrence_backward", backward_fake, lib=library)
    torch.library.register_autograd("regard::linear_recurrence", backward, setup_context=setup_context, lib=library)
    decompose(torch.ops.regard.linear_recurrence.default, forward_fake, _by_torch)
    return library


_LIBRARY = _define()
