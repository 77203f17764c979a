"""Comparison with a float64 truth, within a tolerance derived from the errors of the oracle in low precision.

No tolerance is chosen by hand. The oracle computed in the working precision (`Oracle.approximations`) has some error; a
kernel, which sums in another order, may have twice that error, and one rounding of its dtype more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Expected:
    """The expected values of a tensor, and the inputs of their tolerance.

    truth: in float64. dtype: the required dtype. approximations: the same in the working precision, once
    or several times, by `Oracle.approximations`; without them only one rounding is allowed.
    magnitude: the size of the terms, where they cancel; the largest |truth| where that is larger. exponential: the
    relative error of the exponentials that a kernel declares; 0 for correctly rounded ones.
    """

    truth: Tensor
    dtype: torch.dtype
    approximations: Sequence[Tensor] = ()
    magnitude: float = 0.0
    exponential: float = 0.0

    def budget(self) -> float:
        """The largest error an element may have: twice that of the approximations, and one rounding at the magnitude.

        One number for the whole tensor: each element is a sum of products, and the error of a sum depends on the size
        of its terms, which the elements of a tensor share, not on the size of the sum.

        Raises:
            ValueError: an approximation is NaN or infinite where the truth is not.
        """
        truth = self.truth.double()
        finite = truth.isfinite()
        magnitude = max(self.magnitude, _largest(truth[finite]))
        worst = 0.0
        if self.approximations and truth.numel():
            errors = torch.stack([tensor.double() for tensor in self.approximations]) - truth
            scales = truth.new_tensor([self._scale(tensor) for tensor in self.approximations])
            worst = _largest(scales * errors.masked_fill(~finite, 0.0).abs().reshape(len(errors), -1).amax(1))
        if not math.isfinite(worst):
            raise ValueError("an approximation is not finite where the truth is: it sets no budget")
        rounding = torch.finfo(self.dtype).eps
        exponential = 0.0 if self.dtype == torch.float64 else self.exponential
        return 2 * worst + max(rounding, exponential) * magnitude

    def _scale(self, approximation: Tensor) -> float:
        """The factor from an error in float32 to one in float64, where the approximation is the truth itself."""
        if self.dtype != torch.float64 or approximation.dtype == torch.float64:
            return 1.0
        return 2 * torch.finfo(torch.float64).eps / torch.finfo(approximation.dtype).eps


@dataclass(frozen=True, slots=True)
class TensorError:
    """The largest error of a tensor as a share of its budget, and the sentence of `fault`, None if it agrees.

    share: infinite where shape, dtype, NaN or infinity differ.
    """

    share: float
    fault: str | None = None


def fault(actual: Tensor, expected: Expected) -> str | None:
    """A sentence on how a tensor differs: shape, dtype, NaN and infinity, or errors over budget; None if it agrees.

    >>> truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> fault(truth.float(), Expected(truth, torch.float32))
    >>> print(fault(torch.tensor([1.0, 2.5]), Expected(truth, torch.float32)))
    1 of 2 elements (50 %) is over its budget; the worst at [1]: 2.5, but the truth is 2; error 0.5, budget 2.4e-07
    """
    return compare(actual, expected).fault


def compare(actual: Tensor, expected: Expected) -> TensorError:
    """The error of a tensor as a share of its budget, and what is wrong with it.

    >>> truth = torch.tensor([1.0, 2.0], dtype=torch.float64)
    >>> compare(truth.float(), Expected(truth, torch.float32)).share
    0.0
    """
    truth = expected.truth.double()
    if actual.shape != truth.shape:
        text = f"the shape is {tuple(actual.shape)}, but it has to be {tuple(truth.shape)}"
        return TensorError(math.inf, text)
    if actual.dtype != expected.dtype:
        return TensorError(math.inf, f"the dtype is {actual.dtype}, but it has to be {expected.dtype}")
    actual = actual.detach().cpu().double()
    same_non_finite = (actual == truth) | (actual.isnan() & truth.isnan())
    finite = actual.isfinite() & truth.isfinite()
    error = torch.where(finite, (actual - truth).abs(), torch.where(same_non_finite, 0.0, torch.inf))
    budget = expected.budget()
    over = error > budget
    count = int(over.sum())
    if not count:
        return TensorError(_largest(error) / budget if budget else 0.0)
    worst = int(error.argmax())
    place = [int(index) for index in torch.unravel_index(torch.tensor(worst), truth.shape)]
    has, needs, by = (tensor.flatten()[worst].item() for tensor in (actual, truth, error))
    text = (
        f"{count} of {truth.numel()} elements ({100 * count / truth.numel():.3g} %) {'is' if count == 1 else 'are'} "
        f"over {'its' if count == 1 else 'their'} budget; the worst at {place}: {has:.9g}, but the truth is "
        f"{needs:.9g}; error {by:.2g}, budget {budget:.2g}"
    )
    return TensorError(by / budget if budget else math.inf, text)


def _largest(numbers: Tensor) -> float:
    """The largest absolute value, 0 of no values."""
    return float(numbers.abs().max()) if numbers.numel() else 0.0


def assert_close(actual: Tensor, expected: Expected, name: str = "tensor") -> None:
    """Raise an AssertionError with the `fault` of a tensor, if it has one."""
    if problem := fault(actual, expected):
        raise AssertionError(f"{name}: {problem}")
