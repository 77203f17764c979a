"""The custom operator `regard::attend`: autograd, torch.compile, torch.func and second derivatives for every kernel.

A kernel that brings its own gradient (`OwnGradient`) is registered by name and run by `apply_kernel`. Eagerly it is
called directly, inside an autograd Function where a gradient is required. Under torch.compile it is the operator
`regard::attend`, one opaque node of the graph. torch.func maps and differentiates the same Function. The derivative of
the gradient is that of the formula, with all weights in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..backends.registry import some_nan_safe
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.decomposition import compiled_whole, decompose
from ..core.finite import CheckedRows, SinkRows, all_finite, waits
from ..core.log_sum_exp import add_exact_gradients, coarse_rows, lse_dtype, split_float64, within_float32
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, DotPairs
from ..core.torch_modes import functorch_active, mapped_by_autograd, without_autocast
from ..errors import ConfigurationError, ExportError, KernelError
from ..masks import Mask
from ..tiles.memo import ForwardState
from ..utils.pytree import tree_flatten, tree_tensors, tree_unflatten
from .base import Kernel, NanSafeKernel, OwnGradient, Result
from .formula import by_operators, formula
from .infinite_scores import mask_without_infinity
from .nan_safety import run_nan_safe, zero_nonfinite_inputs

MAX_SECOND_DERIVATIVE_PAIRS = 2**27
"""The most query-key pairs that a second derivative is computed for: it needs several numbers for each in memory."""

INCLUDED_IN_OPERATORS = (
    *("AutogradFunctionality", "ADInplaceOrView", "AutogradOther", "AutogradCPU", "AutogradCUDA"),
    *("FuncTorchDynamicLayerFrontMode", "FuncTorchDynamicLayerBackMode", "FuncTorchBatched", "FuncTorchVmapMode"),
    *("FuncTorchGradWrapper", "PythonTLSSnapshot", "PreDispatch"),
)
"""The dispatch keys that torch excludes inside an operator and `with_autograd` includes."""

_COMPUTATIONS: dict[str, OwnGradient] = {}
_NAN_SAFE: dict[str, NanSafeKernel] = {}
_WITH_EXACT_LSE: set[str] = set()


def register(computation: OwnGradient, *, exact_lse: bool = False) -> None:
    """Register a kernel with the operator under its name.

    exact_lse: whether log-sum-exps off the CPU are computed in float64, of which nobody has to see whether float32 had
    been too coarse for them.

    Raises:
        ConfigurationError: a kernel of another class has that name.
    """
    known = _COMPUTATIONS.setdefault(computation.name, computation)
    if type(known) is not type(computation):
        raise ConfigurationError(
            f"there is another kernel {computation.name!r}, a {type(known).__name__}: {type(computation).__name__} "
            "needs a name of its own"
        )
    _COMPUTATIONS[computation.name] = computation
    if isinstance(computation, NanSafeKernel):
        _NAN_SAFE[computation.name] = computation
    if exact_lse:
        _WITH_EXACT_LSE.add(computation.name)


def _is_nan_safe(name: str, problem: Problem, *, backward: bool) -> bool:
    """Whether nobody has to look at what a kernel gives, forward or backward."""
    kernel, value = _NAN_SAFE.get(name), problem.value
    if kernel is None or not some_nan_safe(value.device, value.dtype):
        return False
    return kernel.is_nan_safe(problem, backward=backward)


def _computation(name: str, problem: Problem, mask: Mask | None) -> OwnGradient:
    """The kernel of that name, which computes the problem with the given mask; if with its own it does not, `tiled`."""
    kernel = _COMPUTATIONS[name]
    if problem.mask is mask or (isinstance(kernel, Kernel) and not kernel.why_not(problem)):
        return kernel
    return _COMPUTATIONS["tiled"]


def _lse_dtype(problem: Problem, name: str) -> torch.dtype:
    """The dtype of the log-sum-exp that is kept for the gradient."""
    if name in _WITH_EXACT_LSE and problem.normalizer is None:
        return lse_dtype(problem.value)
    return torch.promote_types(problem.value.dtype, torch.float32)


def apply_kernel(problem: Problem, computation: OwnGradient) -> Result:
    """Run a registered kernel on a problem; the result is differentiable twice."""
    if torch.compiler.is_compiling():
        output, lse = torch.ops.regard.attend(*tree_flatten(problem), computation.name)
    elif functorch_active():
        output, lse = _Attend.apply(problem, computation.name, *tree_tensors(problem))
    elif problem.requires_grad():
        output, lse = _AttendEagerly.apply(problem, computation.name, *tree_tensors(problem))
    else:
        output, lse = compute_forward(problem, computation.name)
    if not problem.wants_lse:
        return Result(output)
    return Result(output, lse.to(torch.promote_types(problem.value.dtype, torch.float32)))


def _with_tensors(problem: Problem, tensors: Sequence[Tensor]) -> Problem:
    """The problem with its tensors replaced; the problem itself, with its memoized mask tiles, if they are its own."""
    if all(a is b for a, b in zip(tree_tensors(problem), tensors, strict=True)):
        return problem
    return tree_unflatten(tree_flatten(problem)[1], tensors)


def compute_forward(problem: Problem, name: str) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, in the problem's own shapes; the latter in float32 at least."""
    problem = replace(problem, wants_lse=True)

    def compute(clean: Problem) -> Result:
        # Which rows attend to NaN, softmax attention is asked, whatever the normalizer.
        own = _computation(name, clean, problem.mask) if clean.normalizer is problem.normalizer else None
        return _with_sinks(clean, own or _COMPUTATIONS["tiled"])

    with torch.no_grad():
        if _is_nan_safe(name, problem, backward=False):
            with without_autocast(problem.value.device.type):
                result = compute(problem)
        else:
            result = run_nan_safe(problem, compute)
    return result.output, require_lse(result.lse).to(_lse_dtype(problem, name))


def require_lse(lse: Tensor | None) -> Tensor:
    """The log-sum-exp of a result that must have one."""
    if lse is None:
        raise AssertionError("a problem that wants the log-sum-exp was computed without it")
    return lse


def _with_sinks(problem: Problem, computation: OwnGradient) -> Result:
    """Run a kernel, and scale its rows for the sinks: one more score in each row's softmax, with no value."""
    batched = BatchedProblem.from_problem(problem)
    rows = computation.forward(batched)
    (output, lse), checked = rows, isinstance(rows, CheckedRows) and problem.sinks is None
    if problem.sinks is not None and problem.has_lse and not isinstance(rows, SinkRows):
        output, lse = add_sinks(output, lse, problem.log_denominator(problem.sinks))
    return Result(batched.unflatten_batch(output).to(problem.value.dtype), batched.unflatten_batch(lse), checked)


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output (..., heads, M, Dv) and log-sum-exp (..., heads, M) with one more score in each row, of no value."""
    sinks = sinks.to(lse.dtype)[:, None]
    # Of the difference, not of lse - total: the total's rounding, 2^-24 |total|, would be in all weights of a row.
    # Where neither a key nor a sink has any weight, the share is 0 and not NaN.
    share = torch.sigmoid(lse - sinks).masked_fill(lse == float("-inf"), 0.0)
    return output * share.unsqueeze(-1), torch.logaddexp(lse, sinks)


def compute_gradients(
    grad_output: Tensor,
    grad_lse: Tensor | None,
    output: Tensor,
    lse: Tensor,
    problem: Problem,
    needed: Sequence[bool],
    name: str,
) -> list[Tensor]:
    """The gradient of each tensor that needs one, in its shape and dtype; an empty tensor for the others.

    Where NaN is met, it is computed again from inputs with NaN and infinity set to 0: NaN behind a mask has no effect.
    A device that would have to be waited for computes from such inputs at once. grad_lse: None stands for 0.
    """
    with torch.no_grad(), without_autocast(problem.value.device.type):
        tensors = tree_tensors(problem)
        needed_ids = {id(tensor) for tensor, need in zip(tensors, needed, strict=True) if need}
        nan_safe = _is_nan_safe(name, problem, backward=True)
        compute = partial(_gradients, name=name, needed=needed_ids, nan_safe=nan_safe)
        if not (nan_safe or output.is_cpu):  # as `waits` says, a file further
            clean = _without_nonfinite(problem, output, lse, grad_output, grad_lse)
            gradients, _ = compute(*clean, mask=problem.mask)
        else:
            gradients, checked = compute(problem, output, lse, grad_output, grad_lse, mask=problem.mask)
            wanted = (gradient for gradient, need in zip(gradients, needed, strict=True) if need)
            if not (checked or nan_safe or all_finite(*wanted)):
                clean = _without_nonfinite(problem, output, lse, grad_output, grad_lse)
                if clean[0] is not problem:
                    gradients, _ = compute(*clean, mask=mask_without_infinity(problem))
    return [
        _as_gradient_of(tensor, gradient) if need else tensor.new_empty(0)
        for gradient, tensor, need in zip(gradients, tensors, needed, strict=True)
    ]


def _without_nonfinite(
    problem: Problem, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor | None
) -> tuple[Problem, Tensor, Tensor, Tensor, Tensor | None]:
    """The arguments of `_gradients` with inputs that are finite; the problem itself where all were found to be.

    NaN that was attended to stands in the output; no gradient comes from there.
    """
    clean = zero_nonfinite_inputs(problem)
    if clean is problem:
        return problem, output, lse, grad_output, grad_lse
    bad, bad_row = output.isnan(), lse.isnan()
    if waits(output):  # NaN of finite inputs, as of scores that overflow, stays
        inputs = problem.pairs.query, problem.pairs.key, problem.value
        met = ~torch.stack([tensor.isfinite().all() for tensor in inputs]).all()
        bad, bad_row = bad & met, bad_row & met
    grad_lse = None if grad_lse is None else grad_lse.masked_fill(bad_row, 0.0)
    grad_output, output = grad_output.masked_fill(bad, 0.0), output.masked_fill(bad, 0.0)
    return clean, output, lse.masked_fill(bad_row, float("inf")), grad_output, grad_lse


def _as_gradient_of(tensor: Tensor, gradient: Tensor) -> Tensor:
    """A gradient summed over the axes that the tensor was broadcast along, in its dtype."""
    if gradient.shape != tensor.shape:
        gradient = gradient.sum_to_size(tensor.shape)
    return gradient.to(tensor.dtype)


def _gradients(
    problem: Problem,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    *,
    mask: Mask | None,
    name: str,
    needed: set[int],
    nan_safe: bool,
) -> tuple[list[Tensor], bool]:
    """The gradients of a problem's tensors in the order of `tree_tensors`, undefined where none is needed.

    Also whether they need no check for NaN. mask: that of the pairs that count, in place of the problem's.
    """
    masked = problem if mask is problem.mask else replace(problem, mask=mask)
    has_lse_grad = grad_lse is not None and (waits(grad_lse) or bool(grad_lse.any()))
    grad_lse = torch.zeros_like(lse) if grad_lse is None else grad_lse
    if nan_safe:
        lse = lse.to(torch.promote_types(problem.value.dtype, torch.float32))
    exact = waits(lse) and (lse.dtype == torch.float64 or problem.normalizer is not None)
    if exact and lse.dtype == torch.float64 and problem.value.dtype != torch.float64:
        lse, share = split_float64(lse)
        grad_output, grad_lse = grad_output * share.unsqueeze(-1).to(grad_output.dtype), grad_lse * share
    usual, upstream = nan_safe or (not exact and within_float32(lse)), (grad_output, grad_lse)
    coarse = None if usual or exact else coarse_rows(masked, lse)
    if coarse is not None:
        # Of these rows the kernel takes no notice: their gradients are computed in float64, and added.
        lse, grad_lse = lse.masked_fill(coarse, float("inf")), grad_lse.masked_fill(coarse, 0.0)
        grad_output = grad_output.masked_fill(coarse.unsqueeze(-1), 0.0)
    batched = BatchedProblem.from_problem(masked)
    output, lse, grad_output, grad_lse = (
        batched.flatten_batch(tensor) for tensor in (output, lse, grad_output, grad_lse)
    )
    grad_lse = grad_lse.to(lse.dtype)
    if not usual:
        lse = lse.masked_fill(lse == float("-inf"), float("inf"))
        grad_lse = grad_lse.masked_fill(lse == float("inf"), 0.0)
    bias = problem.bias is not None and any(id(parameter) in needed for parameter in problem.bias.parameters())
    normalizer = problem.normalizer is not None and any(id(each) in needed for each in problem.normalizer.parameters())
    saved = Saved(output, lse, grad_output, grad_lse, bias, has_lse_grad, normalizer)
    gradients = _computation(name, masked, problem.mask).backward(batched, saved)
    if coarse is None and isinstance(problem.pairs, DotPairs) and problem.sinks is None and not gradients.others:
        # The usual case without another problem: query, key and value are the first tensors, no other has a gradient.
        dots = (batched.unflatten_batch(each) for each in (gradients.query, gradients.key, gradients.value))
        return [*dots, *tree_tensors(problem)[3:]], gradients.checked
    if nan_safe and problem.sinks is not None:  # whose gradient is computed here
        saved = _without_nan(saved)
    as_problem = _gradients_as_problem(problem, batched, gradients, saved)
    if coarse is not None:
        tensors, form = tree_flatten(as_problem)
        shapes = [tensor.shape for tensor in tree_tensors(problem)]
        as_problem = tree_unflatten(form, [t.sum_to_size(shape) for t, shape in zip(tensors, shapes, strict=True)])
        rows = coarse & ((upstream[0] != 0).any(-1) | (upstream[1] != 0))
        add_exact_gradients(masked, rows, *upstream, needed, as_problem)
    return tree_tensors(as_problem), False


def _gradients_as_problem(
    problem: Problem, batched: BatchedProblem, gradients: ProblemGradients, saved: Saved
) -> Problem:
    """A problem whose tensors are the gradients of the given problem's tensors."""
    pairs = replace(
        problem.pairs, query=batched.unflatten_batch(gradients.query), key=batched.unflatten_batch(gradients.key)
    )
    if isinstance(pairs, AdditivePairs):
        pairs = replace(pairs, weight=gradients.weight)
    sinks, normalizer = gradients.sinks, problem.normalizer
    if problem.sinks is not None and sinks is None:
        sinks = sinks_gradient(problem, problem.sinks, saved)
    if normalizer is not None and gradients.normalizer:
        normalizer = normalizer.with_parameters(gradients.normalizer)
    bias = problem.bias.with_parameters(gradients.bias) if problem.bias is not None and gradients.bias else problem.bias
    value = batched.unflatten_batch(gradients.value)
    return replace(problem, pairs=pairs, value=value, bias=bias, sinks=sinks, normalizer=normalizer)


def _without_nan(saved: Saved) -> Saved:
    """The same, where no gradient comes from entries of the output that are not finite, and from rows of NaN."""
    bad, bad_row = ~saved.output.isfinite(), saved.lse.isnan()
    return replace(
        saved,
        output=saved.output.masked_fill(bad, 0.0),
        lse=saved.lse.masked_fill(bad_row, float("inf")),
        grad_output=saved.grad_output.masked_fill(bad, 0.0),
        grad_lse=saved.grad_lse.masked_fill(bad_row, 0.0),
    )


def sinks_gradient(problem: Problem, sinks: Tensor, saved: Saved) -> Tensor:
    """The gradient of the sinks, (heads,), from the log-sum-exp that includes them."""
    leaf = sinks.detach().to(saved.lse.dtype).requires_grad_()
    with torch.enable_grad():
        logs = problem.log_denominator(leaf)
    above = -(torch.exp(logs.detach()[:, None] - saved.lse) * saved.delta()).sum((0, 2))
    return above if logs is leaf else torch.autograd.grad(logs, leaf, above)[0]


def differentiate(
    problem: Problem,
    name: str,
    needed: tuple[bool, ...],
    upstream: tuple[Tensor | None, Tensor | None],
    result: tuple[Tensor, Tensor],
    tensors: Sequence[Tensor],
) -> list[Tensor | None]:
    """The gradient of each of a problem's tensors that needs one, which can be differentiated in turn.

    upstream: the gradients of output and log-sum-exp, which are `result`; None stands for 0. tensors: as `tree_tensors`
    of the problem.
    """
    grad_output, grad_lse = upstream
    grad_output = torch.zeros_like(result[0]) if grad_output is None else grad_output
    given = [each for each in (grad_output, grad_lse) if each is not None]
    if not torch.is_grad_enabled() and not any(map(mapped_by_autograd, given)):
        problem = _with_tensors(problem, tensors)
        gradients = compute_gradients(grad_output, grad_lse, *result, problem, needed, name)
        return [gradient if need else None for gradient, need in zip(gradients, needed, strict=True)]
    both = grad_output, torch.zeros_like(result[1]) if grad_lse is None else grad_lse
    if any(map(mapped_by_autograd, both)):
        return _mapped_gradients(_with_tensors(problem, tensors), needed, both, result)
    gradients = _Gradient.apply(problem, name, needed, *both, *result, *tensors)  # differentiated in turn
    return _scatter_needed(gradients, needed)


def _mapped_gradients(
    problem: Problem, needed: Sequence[bool], upstream: tuple[Tensor, Tensor], result: tuple[Tensor, Tensor]
) -> list[Tensor | None]:
    """The gradients for many upstream ones at once, by the formula: torch's operators alone can be mapped."""
    _check_pairs(problem, "a gradient with is_grads_batched=True")
    clean, (grad_output, grad_lse) = zero_nonfinite_inputs(problem), upstream
    if clean is not problem:
        output, lse = result
        grad_output, grad_lse = grad_output.masked_fill(output.isnan(), 0.0), grad_lse.masked_fill(lse.isnan(), 0.0)
    twice, tensors, mask = torch.is_grad_enabled(), tree_tensors(clean), mask_without_infinity(problem)
    with torch.enable_grad():
        inputs = [
            (tensor.view_as(tensor) if twice else tensor.detach().requires_grad_()) if need else tensor
            for tensor, need in zip(tensors, needed, strict=True)
        ]
        computed = formula(replace(_with_tensors(clean, inputs), mask=mask, wants_lse=True))
    wanted = [tensor for tensor, need in zip(inputs, needed, strict=True) if need]
    results = computed.output, require_lse(computed.lse)
    found = torch.autograd.grad(
        results, wanted, (grad_output, grad_lse), create_graph=twice, allow_unused=True, materialize_grads=True
    )
    return _scatter_needed(found, needed)


class _Attend(torch.autograd.Function):
    """A kernel's forward and backward as an autograd Function."""

    @staticmethod
    def forward(problem: Problem, name: str, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        return compute_forward(_with_tensors(problem, tensors), name)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        ctx.problem, ctx.name, *tensors = inputs
        ctx.state = ForwardState(ctx.problem)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*output, *tensors)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        output, lse, *tensors = ctx.saved_tensors
        ctx.state.require_unchanged()
        needed, upstream = tuple(ctx.needs_input_grad[2:]), (grad_output, grad_lse)
        return None, None, *differentiate(ctx.problem, ctx.name, needed, upstream, (output, lse), tensors)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, problem: Problem, name: str, *tensors: Tensor) -> tuple:
        return _vmap_by_loop(info.batch_size, in_dims[2:], tensors, lambda each: _Attend.apply(problem, name, *each))


class _AttendEagerly(torch.autograd.Function):
    """`_Attend` without a transform of torch.func: torch binds no arguments, which takes as long as a small product."""

    @staticmethod
    def forward(ctx: Any, problem: Problem, name: str, *tensors: Tensor) -> tuple[Tensor, Tensor]:
        output = compute_forward(problem, name)
        _Attend.setup_context(ctx, (problem, name, *tensors), output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        return _Attend.backward(ctx, grad_output, grad_lse)


class _Gradient(torch.autograd.Function):
    """The backward as an autograd Function of its own, so that it can be differentiated in turn."""

    @staticmethod
    def forward(problem: Problem, name: str, needed: tuple[bool, ...], *tensors: Tensor) -> tuple[Tensor, ...]:
        grad_output, grad_lse, output, lse, *own = tensors
        gradients = compute_gradients(grad_output, grad_lse, output, lse, _with_tensors(problem, own), needed, name)
        return tuple(gradient for gradient, need in zip(gradients, needed, strict=True) if need)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        ctx.problem, _, ctx.needed, *tensors = inputs
        ctx.state = ForwardState(ctx.problem)
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, *above: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        ctx.state.require_unchanged()
        gradients = _second_derivative(saved, ctx.problem, ctx.needed, above)
        return None, None, None, *gradients[:2], None, None, *gradients[2:]

    @staticmethod
    def vmap(info: Any, in_dims: tuple, problem: Problem, name: str, needed: tuple[bool, ...], *tensors: Tensor):
        return _vmap_by_loop(
            info.batch_size, in_dims[3:], tensors, lambda each: _Gradient.apply(problem, name, needed, *each)
        )


def _check_pairs(problem: Problem, what: str) -> None:
    """Raise a KernelError where the formula would hold too many pairs in memory."""
    pairs = problem.weights_shape.numel()
    if pairs > MAX_SECOND_DERIVATIVE_PAIRS:
        raise KernelError(
            f"{what} holds all {pairs:,} query-key pairs of the weights {tuple(problem.weights_shape)} in "
            f"memory several times over, and is refused above {MAX_SECOND_DERIVATIVE_PAIRS:,}; take it over "
            "shorter sequences or fewer heads at a time, or ask for kernel='reference', which has no such limit"
        )


def _second_derivative(
    saved: Sequence[Tensor], problem: Problem, needed: Sequence[bool], above: Sequence[Tensor]
) -> list[Tensor | None]:
    """The derivative of Σ above · gradient with respect to the upstream gradients and each tensor, by the formula.

    saved: the tensor arguments of `_Gradient`.
    """
    _check_pairs(problem, "a second derivative")
    grad_output, grad_lse, output, lse, *tensors = saved
    # As in `compute_gradients`: the gradient of finite inputs, with none from the rows that attend to NaN.
    problem = _with_tensors(problem, tensors)
    is_clean, mask = (clean := zero_nonfinite_inputs(problem)) is problem, mask_without_infinity(problem)
    problem, tensors = clean, tree_tensors(clean)
    inputs = [tensor for tensor, need in zip(tensors, needed, strict=True) if need]

    def computed(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        spread = _scatter_needed(inputs, needed)
        over = [tensor if new is None else new for tensor, new in zip(tensors, spread, strict=True)]
        result = formula(replace(_with_tensors(problem, over), mask=mask, wants_lse=True))
        return result.output, require_lse(result.lse)

    def gradient(grad_output: Tensor, grad_lse: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
        if not is_clean:
            grad_output, grad_lse = grad_output.masked_fill(output.isnan(), 0.0), grad_lse.masked_fill(lse.isnan(), 0.0)
        return torch.func.vjp(computed, *inputs)[1]((grad_output, grad_lse))

    pull = torch.func.vjp(gradient, grad_output, grad_lse, *inputs)[1]
    return _scatter_needed(pull(tuple(above)), (True, True, *needed))


def _scatter_needed(gradients: Sequence[Tensor | None], needed: Sequence[bool]) -> list[Tensor | None]:
    """Gradients at the positions of the tensors that need one, None elsewhere."""
    left = iter(gradients)
    return [next(left) if need else None for need in needed]


def _vmap_by_loop(size: int, in_dims: Sequence[int | None], tensors: Sequence[Tensor], compute: Any) -> tuple:
    """Vmap as a loop over the batch: correct for any mask and bias, whichever tensors are mapped."""
    mapped = list(zip(tensors, in_dims, strict=True))
    if not size:  # the first none of a result for zeros, which sums over nothing are: it has a gradient like any other
        computed = compute([tensor if dim is None else tensor.sum(dim) for tensor, dim in mapped])
        return tuple(part.unsqueeze(0)[:0] for part in computed), (0,) * len(computed)
    results = [
        compute([tensor if dim is None else tensor.select(dim, index) for tensor, dim in mapped])
        for index in range(size)
    ]
    stacked = tuple(torch.stack(parts) for parts in zip(*results, strict=True))
    return stacked, (0,) * len(stacked)


@contextmanager
def with_autograd() -> Iterator[None]:
    """Enable autograd and vmap inside an operator, where torch excludes their dispatch keys.

    Bias gradients are computed by autograd, and FlexAttention traces and maps its functions.
    """
    left_out = torch._C._dispatch_tls_local_exclude_set()
    for key in INCLUDED_IN_OPERATORS:
        left_out = left_out.remove(getattr(torch._C.DispatchKey, key))
    included = torch._C._dispatch_tls_local_include_set()
    with torch.inference_mode(False), torch._C._ForceDispatchKeyGuard(included, left_out):
        yield


def _contiguous(tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Contiguous copies where needed, as the fake implementations declare the results contiguous."""
    return tuple(tensor.contiguous() for tensor in tensors)


def _by_torch(tensors: Sequence[Tensor], form: str, name: str) -> tuple[Tensor, ...]:
    """`regard::attend` in operators of torch; of finite inputs, as NaN behind a mask is NaN times 0 there."""
    problem: Problem = tree_unflatten(form, tensors)
    if problem.dropout is not None:
        raise ExportError(
            "it drops weights, and a graph would drop the same ones in each run. Call eval() before exporting"
        )
    output, lse = by_operators(problem)
    return _contiguous((output, lse.to(_lse_dtype(problem, name))))


def _define() -> torch.library.Library:
    """Define `regard::attend` and `regard::attend_backward`, their fake implementations and the gradient."""
    library = torch.library.Library("regard", "DEF")
    library.define("attend(Tensor[] tensors, str form, str name) -> (Tensor, Tensor)")
    library.define(
        "attend_backward(Tensor grad_output, Tensor grad_lse, Tensor output, Tensor lse, Tensor[] tensors, "
        "bool[] needed, str form, str name) -> Tensor[]"
    )

    def forward_impl(tensors: Sequence[Tensor], form: str, name: str) -> tuple[Tensor, ...]:
        with with_autograd():
            return _contiguous(compute_forward(tree_unflatten(form, tensors), name))

    def backward_impl(
        grad_output: Tensor, grad_lse: Tensor, output: Tensor, lse: Tensor, tensors: Any, needed: Any, *form: str
    ) -> list[Tensor]:
        problem = tree_unflatten(form[0], tensors)
        with with_autograd():
            return list(_contiguous(compute_gradients(grad_output, grad_lse, output, lse, problem, needed, form[1])))

    library.impl("attend", forward_impl, "CompositeExplicitAutograd")
    library.impl("attend_backward", backward_impl, "CompositeExplicitAutograd")

    def forward_fake(tensors: Sequence[Tensor], form: str, name: str) -> tuple[Tensor, Tensor]:
        problem: Problem = tree_unflatten(form, tensors)
        rows = problem.weights_shape[:-1]
        lse = problem.value.new_empty(rows, dtype=_lse_dtype(problem, name))
        return problem.value.new_empty(*rows, problem.value.shape[-1]), lse

    def backward_fake(
        grad_output: Tensor, grad_lse: Tensor, output: Tensor, lse: Tensor, tensors: Any, needed: Any, *_: str
    ) -> list[Tensor]:
        return [tensor.new_empty(tensor.shape if need else 0) for tensor, need in zip(tensors, needed, strict=True)]

    def setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
        tensors, ctx.form, ctx.name = inputs
        ctx.needed = [tensor.requires_grad for tensor in tensors]
        ctx.save_for_backward(*output, *tensors)

    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor) -> tuple:
        output, lse, *tensors = ctx.saved_tensors
        gradients = torch.ops.regard.attend_backward(
            grad_output, grad_lse, output, lse, tensors, ctx.needed, ctx.form, ctx.name
        )
        return [gradient if need else None for gradient, need in zip(gradients, ctx.needed, strict=True)], None, None

    torch.library.register_fake("regard::attend", compiled_whole("regard::attend", forward_fake), lib=library)
    torch.library.register_fake("regard::attend_backward", backward_fake, lib=library)
    torch.library.register_autograd("regard::attend", backward, setup_context=setup_context, lib=library)
    decompose(torch.ops.regard.attend.default, forward_fake, _by_torch)
    return library


_LIBRARY = _define()
