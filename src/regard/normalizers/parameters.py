"""Parameters of normalizers: one number for all heads, or one for each."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from torch import Tensor

from ..biases.base import describe_tensor
from ..core.problem import Problem
from ..errors import ConfigurationError, DeviceError, DtypeError, ShapeError
from ..utils.numbers import lies_between
from ..utils.other_types import needs_tensor


def over_heads(parameter: Tensor | float, scores: Tensor) -> Tensor | float:
    """A parameter as a number or a tensor that broadcasts to scores (..., heads, M, n), in their dtype."""
    if not isinstance(parameter, Tensor):
        return parameter
    parameter = parameter.to(scores.dtype)
    return parameter.view(-1, 1, 1) if parameter.ndim else parameter


def sum_over_heads(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of a parameter, () or (heads,), from those of the pairs (..., heads, M, n)."""
    if not parameter.ndim:
        return gradient.sum()
    return gradient.flatten(0, -4).sum((0, -2, -1)) if gradient.ndim > 3 else gradient.sum((-2, -1))


def with_shapes(parameters: Any) -> str:
    """The name of a dataclass of tensors, with the shapes of those that it has."""
    named = ((each.name, getattr(parameters, each.name)) for each in fields(parameters))
    shown = (f"{name}={describe_tensor(tensor)}" for name, tensor in named if tensor is not None)
    return f"{type(parameters).__name__}({', '.join(shown)})"


def check_number(name: str, parameter: Tensor | float | None) -> None:
    """Check that a parameter is a finite number, any tensor, or None.

    Raises:
        ConfigurationError: it is none.
    """
    if parameter is not None and not isinstance(parameter, Tensor) and not lies_between(-math.inf, parameter, math.inf):
        raise ConfigurationError(f"{name} is {parameter!r}; it needs a finite number, or a tensor")


def check_tensors(parameters: Any) -> None:
    """Check that the fields of a dataclass of tensors are tensors, or None.

    Raises:
        DtypeError: one is not.
    """
    for each in fields(parameters):
        parameter = getattr(parameters, each.name)
        if parameter is not None and (refused := needs_tensor(each.name, parameter)):
            raise DtypeError(refused)


def check_parameter(name: str, parameter: Tensor | float | None, problem: Problem) -> None:
    """Check that a parameter is a finite number, a tensor () or (heads,), or None.

    Raises:
        ConfigurationError, ShapeError, DtypeError, DeviceError: it is none.
    """
    check_number(name, parameter)
    if not isinstance(parameter, Tensor):
        return
    heads = problem.pairs.query.shape[-3] if problem.heads else 1
    check_tensor(name, parameter, problem)
    if tuple(parameter.shape) not in ((), (heads,)):
        raise ShapeError(
            f"{name} is {tuple(parameter.shape)}; it needs one number, (), or one for each head, ({heads},)"
        )


def check_head_matrix(name: str, matrix: Tensor | None, problem: Problem) -> None:
    """Check that a matrix has one number for each two heads, or is None.

    Raises:
        ShapeError, DtypeError, DeviceError: it has not.
    """
    heads = problem.pairs.query.shape[-3] if problem.heads else 1
    check_tensor(name, matrix, problem)
    if matrix is not None and tuple(matrix.shape) != (heads, heads):
        raise ShapeError(
            f"{name} is {tuple(matrix.shape)}; of {heads} heads of queries it needs ({heads}, {heads}), a number for "
            "each two of them"
        )


def check_tensor(name: str, parameter: Tensor | None, problem: Problem) -> None:
    """Check that a parameter has floating-point numbers on the device of a problem, or is None.

    Raises:
        DtypeError, DeviceError: it has not.
    """
    if parameter is None:
        return
    if not parameter.is_floating_point():
        raise DtypeError(f"{name} needs floating-point numbers; it is {parameter.dtype}: call .float()")
    if parameter.device != problem.value.device:
        raise DeviceError(
            f"{name} is on {parameter.device}, but query, key and value are on {problem.value.device}: move it with "
            f".to({str(problem.value.device)!r})"
        )
