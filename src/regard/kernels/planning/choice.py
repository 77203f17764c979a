"""The choice of a kernel by predicted time, and the plan that explains it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ... import native
from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.finite import waits
from ...core.problem import Problem
from ...core.score_forms import DotPairs
from ...core.torch_modes import functorch_active, under_dispatch_mode
from ...errors import KernelError, nearest
from ...masks.causal import Causal
from ...tiles.dense_mask import is_one_causal_query, is_square_causal
from ...tiles.memo import within_choice
from ...tiles.row_spans import last_keys_of_step
from ..additive import AdditiveKernel
from ..base import EVERY_GRADIENT, INPUT_GRADIENTS, CheckedKernel, Cost, Kernel, OwnGradient, Result, needs_no_look
from ..block_sparse import BlockSparseKernel
from ..custom_op import apply_kernel, register
from ..decode import DecodeKernel
from ..decomposed import DecomposedKernel
from ..flash import FlashKernel
from ..flex import FlexKernel
from ..gathered import GatheredKernel
from ..normalizer_tiles import MIXED_HEADS, THRESHOLD
from ..one_tile import is_one_tile
from ..packed_inputs import codes_are_read, widened
from ..reference import ReferenceKernel
from ..reflected import ReflectedKernel, has_reflections
from ..sdpa import SdpaKernel
from ..short import ShortKernel
from ..tiled import TiledKernel
from .rates import predicted_seconds
from .signature import memoize_choice, rounded_signature
from .unit_costs import UNREAD

PLAIN_KERNEL = SdpaKernel()
"""The kernel of plain problems that are small, or off the CPU and without a gradient: no times are compared."""

SHORT, DECODE = ShortKernel(), DecodeKernel()
FLASH, BLOCK_SPARSE, ADDITIVE, TILED = FlashKernel(), BlockSparseKernel(), AdditiveKernel(), TiledKernel()
REFERENCE = ReferenceKernel()

KERNELS: tuple[Kernel, ...] = (
    PLAIN_KERNEL,
    SHORT,
    DECODE,
    FLASH,
    BLOCK_SPARSE,
    FlexKernel(),
    DecomposedKernel((FLASH, ADDITIVE, TILED), without_bias=(BLOCK_SPARSE,)),
    GatheredKernel(),
    ADDITIVE,
    TILED,
    REFERENCE,
)
"""The kernels of softmax attention. Of those that can compute a problem, that of the lowest predicted time is chosen,
of equal times the first; the last is differentiable in forward mode, as `forward_mode_kernel` requires."""

REFLECTED_KERNELS: tuple[Kernel, ...] = (ReflectedKernel((SHORT, FLASH, TILED)), *KERNELS)
"""Those of biases with reflections (PaTH), of which a causal mask makes plain attention."""

ROW_KERNELS: tuple[Kernel, ...] = (SHORT, FLASH, THRESHOLD, MIXED_HEADS, TILED, REFERENCE)
"""The kernels of every other normalizer, unless it names its own."""

MAX_UNCOMPARED_LENGTH = 256
"""The most queries and keys on the CPU of which the kernel is known by their sizes: no times are compared."""

STREAMED, MOST_STREAMING = {torch.float32: 2**18, torch.bfloat16: 2**15, torch.float16: 2**15}, 16
"""From so many numbers of keys and values for each query on, and up to so many queries, `DECODE`, which reads them as
they are, is faster than `SHORT`, which lays them out, but where each head has as many queries as keys, and where
`SHORT` as well reads them as they are, and those in a mask's spans alone. Numbers of 16 bits are widened to be laid
out."""

MAX_PLAIN_PAIRS, MAX_PLAIN_NUMBERS = 2**16, 2**17
"""The most query-key pairs, and numbers of all values, of a plain problem on the CPU that `PLAIN_KERNEL` computes
without a comparison: up to there it is done before another kernel has started."""

MAX_ONE_TILE = 2**17
"""The most pairs of all heads of a normalizer other than those of `SHORT` that `TILED` computes at once, without a
comparison: up to there it is done before C code by tiles has started."""

UNVECTORISED = "plain"
"""The variant of the native code without vector instructions, beside which torch's operator may be the faster one at
any size."""

AnyKernel = TypeVar("AnyKernel", bound=Kernel)


def kernels_of(problem: Problem) -> tuple[Kernel, ...]:
    """The kernels of softmax attention, or of the problem's normalizer."""
    if problem.normalizer is None:
        return REFLECTED_KERNELS if problem.bias is not None and has_reflections(problem) else KERNELS
    return ROW_KERNELS if problem.normalizer.kernels is None else problem.normalizer.kernels


def forward_mode_kernel(problem: Problem) -> Kernel:
    """The kernel under forward-mode differentiation: the last of them, by plain torch operations alone."""
    return kernels_of(problem)[-1]


def _reasons_against(kernel: Kernel, problem: Problem, *, forward_mode: bool) -> list[str]:
    """The reasons why a kernel cannot compute the problem, `why_not` and those of forward-mode differentiation."""
    reasons = kernel.why_not(problem)
    if forward_mode and kernel is not (last := forward_mode_kernel(problem)):
        return [f"only kernel={last.name!r} has forward-mode derivatives (torch.func.jvp, jacfwd, hessian)", *reasons]
    return reasons


def choose(problem: Problem, name: str | None = None) -> Kernel:
    """The kernel with the lowest predicted time, or the one of that name, which never falls back to another.

    Three cases need no comparison of times: forward-mode differentiation has one kernel (`forward_mode_kernel`); small
    problems, and plain ones of few pairs, off the CPU without a gradient, or under torch.compile, have that of
    `uncompared_kernel`; and for what is not plain under torch.compile and torch.func, where tensors have no values yet,
    and for all that is exported, the choice is made when the function runs.

    Raises:
        KernelError: no kernel has that name, or it cannot compute the problem; without a name, no kernel can.
    """
    if problem.has_codes():
        return DECODE  # to which `readable` left them
    forward_mode = forward_ad._current_level >= 0  # `under_forward_mode` without a call, on the way of every attention
    if name is None:
        if forward_mode:
            kernel = forward_mode_kernel(problem)
            if kernel.why_not(problem):
                raise _no_kernel_error(problem, "it has no forward-mode derivatives")
            return kernel
        # An exported program is for all lengths: of plain problems too its kernel is chosen when it runs.
        exporting = torch.compiler.is_exporting()
        if not exporting and (kernel := uncompared_kernel(problem)) is not None:
            return kernel
        if exporting or ((torch.compiler.is_compiling() or functorch_active()) and not _is_plain(problem)):
            return _DEFERRED
        return _memoized_choice(problem)
    kernels = kernels_of(problem)
    if not isinstance(name, str):
        names = ", ".join(repr(kernel.name) for kernel in kernels)
        raise KernelError(f"kernel is {name!r}; it needs the name of one, {names}, or None for the fastest")
    kernel = next((kernel for kernel in kernels if kernel.name == name), None)
    if kernel is None:
        raise KernelError(f"there is no kernel {name!r}; {nearest(name, [kernel.name for kernel in kernels])}")
    reasons = _reasons_against(kernel, problem, forward_mode=forward_mode)
    if not reasons and not _agrees(kernel, problem):
        reasons = kernel.why_not(problem)
    if reasons:
        raise KernelError(
            f"kernel {name!r} cannot compute this: {'; '.join(reasons)}. Leave kernel out to let one be chosen; "
            "regard.explain(...) says which"
        )
    return kernel


def readable(problem: Problem, name: str | None) -> Problem:
    """The problem as its kernel reads it, of that name or the fastest.

    Keys and values that are codes are left to `DECODE` where it computes the problem, and no other kernel was asked
    for; else they become numbers.
    """
    if not problem.has_codes():
        return problem
    as_they_are = name in (None, DECODE.name) and codes_are_read(problem) and not DECODE.why_not(problem)
    return problem if as_they_are else widened(problem)


def _memoized_choice(problem: Problem) -> Kernel:
    """The kernel of `_lowest_time`, memoized for problems of about the same sizes."""
    return memoize_choice(
        problem, rounded_signature, "call", lambda: within_choice(problem.mask, lambda: _lowest_time(problem))
    )


def _lowest_time(problem: Problem) -> Kernel:
    """The kernel with the lowest predicted time of those that can compute the problem, of equal times the first."""
    able = [kernel for kernel in kernels_of(problem) if not kernel.why_not(problem)]
    if not able:
        raise _no_kernel_error(problem)
    return _fastest_that_agrees(able, problem)


def _fastest_that_agrees(able: Sequence[AnyKernel], problem: Problem) -> AnyKernel:
    """The kernel with the lowest predicted time whose self-check, if it has one, passes."""
    by_time = sorted(able, key=lambda kernel: _seconds(kernel, problem))
    return next(kernel for kernel in by_time if _agrees(kernel, problem))


def _agrees(kernel: Kernel, problem: Problem) -> bool:
    """Whether a kernel that compares itself with the reference at its first use agrees; true for any other."""
    return not isinstance(kernel, CheckedKernel) or kernel.agrees(problem)


def _no_kernel_error(problem: Problem, otherwise: str = "") -> KernelError:
    """The error where no kernel can compute a problem, with the reasons of each.

    otherwise: the reason against a kernel whose `why_not` is empty.
    """
    reasons = (f"{kernel.name}: {', '.join(kernel.why_not(problem)) or otherwise}" for kernel in kernels_of(problem))
    return KernelError(
        f"no kernel of {problem.normalizer_name} attention can compute this: {'; '.join(reasons)}. Leave out what they "
        "refuse, or give the normalizer a kernel that computes it"
    )


def uncompared_kernel(problem: Problem) -> Kernel | None:
    """The kernel that `choose` takes without comparing times; None where it compares them.

    The first row that fits decides; small (at most 256 queries and keys) and few (at most 2^16 pairs, and 2^17 numbers
    of values) as in the constants of this file. Plain is what torch's operator computes on its fast path, `_is_plain`.

        | problem, not traced by torch.compile or torch.func   | gradient | kernel    |
        | ---------------------------------------------------- | -------- | --------- |
        | small, CPU, many keys for each query, or one query   | no       | decode    |
        | small, CPU, one query of float32 over all keys       | no       | sdpa      |
        | small, CPU, whatever `short` computes                | any      | short     |
        | few pairs, CPU, additive scores alone, or masked     | any      | additive  |
        | few pairs, CPU, a normalizer that can store its own  | any      | tiled     |
        | plain, CPU, few pairs                                | no       | sdpa      |
        | plain, CPU, few pairs, float32 and float64           | yes      | sdpa      |
        | plain without a mask, another device                 | no       | sdpa      |
        | all others; small ones in native code of `plain`     | any      | compared  |

    Traced, only the rows of plain problems are left, without a mask and without a gradient; under torch.compile all of
    them are `sdpa`.
    """
    traced = torch.compiler.is_compiling() or functorch_active()
    if not traced and _is_small(problem):
        if native.variant_in_use() == UNVECTORISED:
            return None
        if (kernel := _small_kernel(problem)) is not None:
            return kernel
    if not _is_plain(problem):
        return None
    if torch.compiler.is_compiling():  # where lengths may vary, and to compare one would fix it
        return PLAIN_KERNEL
    if not problem.value.is_cpu:  # where a mask costs `sdpa` what keeps NaN behind it away
        return None if problem.inputs_require_grad() or problem.mask is not None else PLAIN_KERNEL
    if problem.value.dtype in (torch.bfloat16, torch.float16) and problem.inputs_require_grad():
        return None  # of which torch's backward pass takes up to sixty times as long as the forward pass
    pairs = problem.pairs.query.shape[:-1].numel() * problem.keys
    return PLAIN_KERNEL if pairs <= MAX_PLAIN_PAIRS and problem.value.numel() <= MAX_PLAIN_NUMBERS else None


def _is_small(problem: Problem) -> bool:
    """Whether lengths are small enough for `SHORT` on the CPU, and its units enough for all threads or little work."""
    rows, value = problem.queries, problem.value
    if rows > MAX_UNCOMPARED_LENGTH or problem.keys > MAX_UNCOMPARED_LENGTH or not value.is_cpu:
        return False
    if type(value) not in (Tensor, Parameter) or under_dispatch_mode():  # that mode wants to see torch's operator
        return False
    units = value.shape[:-2].numel()
    return units >= torch.get_num_threads() or units * rows * problem.keys <= MAX_PLAIN_PAIRS // 8


def _small_kernel(problem: Problem) -> Kernel | None:
    """The kernel of a problem that `_is_small`, by what each query reads; None where that does not tell."""
    if problem.normalizer is None and not problem.inputs_require_grad():
        if (_streams(problem) or _is_step(problem)) and not DECODE.why_not(problem):
            return DECODE
        if _is_plain_step(problem) and not PLAIN_KERNEL.why_not(problem):
            return PLAIN_KERNEL
    if not SHORT.why_not(problem):
        return SHORT
    if ADDITIVE.is_one_tile(problem):
        return ADDITIVE
    return TILED if is_one_tile(problem) and problem.weights_shape.numel() <= MAX_ONE_TILE else None


def _streams(problem: Problem) -> bool:
    """Whether each query has so many keys and values to read that laying them out, as `SHORT` does, does not pay."""
    queries, value = problem.queries, problem.value
    least = STREAMED.get(value.dtype)
    if least is None or not 0 < queries <= MOST_STREAMING or queries == problem.keys:
        return False
    if value.dtype == torch.float32 and SHORT.reads_spans_alone(problem):
        return False
    return problem.pairs.key.numel() + value.numel() >= least * queries and DECODE.is_one_call(problem)


def _is_step(problem: Problem) -> bool:
    """Whether one query of each head attends to all its keys, or to the last ones, by one call of native code."""
    if problem.queries != 1 or problem.softcap is not None or problem.dropout is not None:
        return False
    return (problem.mask is None or last_keys_of_step(problem) is not None) and DECODE.is_one_call(problem)


def _is_plain_step(problem: Problem) -> bool:
    """Whether one query of each head attends to all its keys in float32: one call of torch's operator."""
    query, value = problem.pairs.query, problem.value
    return (
        query.shape[-2] == 1
        and value.dtype is torch.float32
        and query.shape[:-2] == value.shape[:-2]
        and problem.bias is None
        and (problem.mask is None or is_one_causal_query(problem))
    )


def _is_plain(problem: Problem) -> bool:
    """Whether torch's operator computes the problem on its fast path: dot products alone, equal heads, equal dims.

    All pairs, or those of a causal mask as torch has it. One query (a decoding step) and grouped heads are not plain.
    """
    # Under a transform the kernels differ in what they can do with a mask or a gradient.
    if (torch.compiler.is_compiling() or functorch_active()) and (
        problem.mask is not None or problem.inputs_require_grad()
    ):
        return False
    if not (
        (problem.mask is None or isinstance(problem.mask, Causal))
        and problem.bias is None
        and problem.softcap is None
        and problem.sinks is None
        and problem.dropout is None
        and not problem.wants_lse
        and isinstance(problem.pairs, DotPairs)
        and problem.normalizer is None
    ):
        return False
    query, key, value = problem.pairs.query.shape, problem.pairs.key.shape, problem.value.shape
    even = query[-1] == value[-1] and query[:-2] == key[:-2] == value[:-2] and query[-2] > 1
    return even and (problem.mask is None or is_square_causal(problem))


def _seconds(kernel: Kernel, problem: Problem) -> float:
    """The predicted time, with that of keeping NaN behind a mask away where no result is read to find it."""
    cost = kernel.cost(problem)
    if waits(problem.value) and _hides_keys(problem) and not needs_no_look(kernel, problem, backward=False):
        numbers = problem.pairs.query.numel() + problem.pairs.key.numel() + problem.value.numel()
        cost = replace(cost, passes=cost.passes + UNREAD * numbers)
    return predicted_seconds(cost, problem)


def _hides_keys(problem: Problem) -> bool:
    """Whether a mask leaves keys out."""
    return problem.mask is not None and not is_one_causal_query(problem)


class _DeferredChoice:
    """A kernel that chooses another at run time, when tensors have values: for calls under torch.compile or vmap."""

    name = "auto"

    def __init__(self) -> None:
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def cost(self, problem: Problem) -> Cost:
        return Cost(0.0, 0.0)

    def gradients(self, problem: Problem) -> frozenset[str]:
        return EVERY_GRADIENT

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        kernels = [fastest_own_gradient(problem)]
        if backward and problem.bias is not None:
            kernels.append(fastest_own_gradient(problem, bias=True))
        return all(needs_no_look(each, problem, backward=backward) for each in kernels)

    def run(self, problem: Problem) -> Result:
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        return fastest_own_gradient(batched.problem).forward(batched)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        return fastest_own_gradient(batched.problem, bias=saved.needs_bias_grad).backward(batched, saved)


def fastest_own_gradient(problem: Problem, *, bias: bool = False) -> OwnGradient:
    """The fastest kernel with a backward of its own; one that computes the gradient of a bias if `bias` is true."""
    needed = INPUT_GRADIENTS if not bias else EVERY_GRADIENT
    able = [
        kernel
        for kernel in kernels_of(problem)
        if isinstance(kernel, OwnGradient) and kernel.gradients(problem) >= needed and not kernel.why_not(problem)
    ]
    if not able:
        raise _no_kernel_error(problem, "it has no backward of its own, as torch.compile and torch.func need")
    return _fastest_that_agrees(able, problem)


_DEFERRED = _DeferredChoice()
