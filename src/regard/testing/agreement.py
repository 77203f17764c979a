"""Does a kernel compute what the formula says? Forward and gradients, over every case that its `why_not` admits."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..kernels import KERNELS, Kernel, Result
from .case_inputs import Inputs, make_inputs
from .cases import Case, cases
from .oracle import Answer, attempts, truth, upstream
from .tolerance import Expected, fault


def suite(
    kernels: Iterable[Kernel] = KERNELS,
    *,
    strength: int = 3,
    among: Iterable[Case] | None = None,
    device: str | torch.device = "cpu",
) -> Iterator[tuple[Kernel, Case]]:
    """The kernels with the cases that they admit: what `assert_agrees` is to be called with, one by one.

    Any `strength` choices of score, mask, bias, layout, lengths, dtype and so on meet in some case (see `cases`);
    `among` has other cases instead, such as `long_cases()` or `sampled(1000)`.

    >>> from regard.testing import suite
    >>> kernel, case = next(suite(strength=1))
    >>> kernel.name, case.id
    ('sdpa', 'default-2d-5x7-float32')
    """
    kernels = tuple(kernels)
    for case in cases(strength) if among is None else among:
        problem = make_inputs(case, device).problem()
        yield from ((kernel, case) for kernel in kernels if not kernel.why_not(problem))


def assert_agrees(kernel: Kernel, case: Case, device: str | torch.device = "cpu") -> None:
    """Compute a case by a kernel, and say what is wrong with the result.

    Checked, alone and with the log-sum-exp if the kernel can give it: the output, the log-sum-exp, the gradients of
    query, key, value, bias, sinks and the score's parameters, each within its budget. Rows that attend to nothing are
    exactly 0, with log-sum-exp -inf (but for a sink) and gradient 0; what nothing attends to has gradient exactly 0,
    whatever stands there. Rows that attend to NaN or infinity are not finite, and no other row is touched by it.

    Raises:
        AssertionError: with every fault found.
    """
    inputs = make_inputs(case, device)
    alone, with_lse = inputs.problem(), inputs.problem(wants_lse=True)
    can_give_lse = not kernel.why_not(with_lse)
    known = replace(_known(case, can_give_lse), exponential=getattr(kernel, "exponential", 0.0))
    faults = []
    if not kernel.why_not(alone):
        faults = _output_faults(kernel.run(alone).output, inputs, known)
    if not faults:
        faults = _faults(kernel.run(with_lse if can_give_lse else alone), inputs, known)
    if faults:
        raise AssertionError("\n".join([f"kernel {kernel.name!r} is wrong on the case {case.id}:", *faults]))


@dataclass(frozen=True, eq=False)
class _Known:
    """What is known of a case: the truth, and how near the plain formula comes to it."""

    truth: Answer
    near: Sequence[Answer]
    with_lse: bool
    exponential: float = 0.0

    # How far from true ones the exponentials are shows in the log of a sum once, in a weight twice, as numerator and in
    # its sum. In a gradient it does four times: in the weight, and in the output that is part of it.
    @property
    def in_output(self) -> float:
        return 2 * self.exponential

    @property
    def in_gradient(self) -> float:
        return 4 * self.exponential


@lru_cache(maxsize=256)
def _known(case: Case, with_lse: bool) -> _Known:
    inputs = make_inputs(case)
    answer = truth(inputs, with_lse=with_lse)
    return _Known(answer, attempts(inputs, answer, with_lse=with_lse), with_lse)


def _faults(result: Result, inputs: Inputs, known: _Known) -> list[str]:
    """All that is wrong with a result."""
    results = [result.output]
    if known.with_lse:
        if result.lse is None:
            return ["lse: there is none, and it was wanted"]
        results.append(result.lse)
    faults = _output_faults(result.output, inputs, known)
    if result.lse is not None:
        faults += _lse_faults(result.lse, inputs, known)
    if faults:
        return faults
    above = [g.to(of) for g, of in zip(upstream(inputs, known.truth.output), results, strict=False)]
    leaves = inputs.leaves
    gradients = torch.autograd.grad(results, list(leaves.values()), above, allow_unused=True, materialize_grads=True)
    return _gradient_faults(dict(zip(leaves, gradients, strict=True)), inputs, known)


def _output_faults(output: Tensor, inputs: Inputs, known: _Known) -> list[str]:
    expected = Expected(
        _one_kind(known.truth.output),
        inputs.leaves["value"].dtype,
        [answer.output for answer in known.near],
        exponential=known.in_output,
    )
    if text := fault(_one_kind(output), expected):
        return [f"output: {text}"]
    empty = ~inputs.keep.any(-1).reshape(known.truth.lse.shape)
    return [] if (output.cpu()[empty] == 0).all() else ["output: a row that attends to nothing is not exactly 0"]


def _lse_faults(lse: Tensor, inputs: Inputs, known: _Known) -> list[str]:
    """In float32 at least; where a sum is off by its millionth, its log is off by a millionth: the scale is 1."""
    dtype = torch.promote_types(inputs.leaves["value"].dtype, torch.float32)
    near = [answer.lse for answer in known.near]
    text = fault(_one_kind(lse), Expected(_one_kind(known.truth.lse), dtype, near, 1.0, known.exponential))
    return [f"lse: {text}"] if text else []


def _gradient_faults(gradients: dict[str, Tensor], inputs: Inputs, known: _Known) -> list[str]:
    dtype = inputs.leaves["value"].dtype
    attends_to_bad = inputs.case.poison in ("query", "key", "value")
    # A row's gradient is a difference that may cancel to nothing; what it is a difference of is as large as the others.
    sizes = [gradient.abs().mean().item() for gradient in known.truth.gradients.values() if gradient.isfinite().all()]
    magnitude = max((size for size in sizes if size == size), default=0.0)
    faults = []
    for name, gradient in gradients.items():
        # NaN that is attended to may be in any gradient but those of the queries whose rows are finite.
        if attends_to_bad and name != "query":
            continue
        true, near = known.truth.gradients[name], [answer.gradients[name] for answer in known.near]
        if attends_to_bad:
            finite = inputs.entries("query", known.truth.output.isfinite().all(-1))
            gradient, true, *near = (torch.where(finite.to(of.device), of, 0.0) for of in (gradient, true, *near))
        if text := fault(gradient, Expected(true, dtype, near, magnitude, known.in_gradient)):
            faults.append(f"gradient of {name}: {text}")
        elif name in ("query", "key", "value") and not (gradient.cpu()[~inputs.reached(name)] == 0).all():
            faults.append(f"gradient of {name}: it is not exactly 0 where nothing is attended to")
    return faults


def _one_kind(tensor: Tensor) -> Tensor:
    """Infinity as NaN: which of the two a row shows that attends to infinity is the kernel's choice; -inf stays."""
    return tensor.masked_fill(tensor == torch.inf, torch.nan)
