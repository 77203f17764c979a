"""Attention operators: how the weights of a row follow from its scores. Softmax attention is the first of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..errors import ConfigurationError, nearest

if TYPE_CHECKING:
    from ..kernels.base import Kernel, Result
    from .problem import Problem


@dataclass(frozen=True, eq=False, slots=True)
class Operator:
    """w_ij = g(s_ij) / Σ_k g(s_ik) for the scores s of a row, with g at least 0; the output is Σ_j w_ij · value_j.

    Every result has, beside the output, the logarithm of each row's sum, lse_i = log Σ_k g(s_ik), for softmax the
    log-sum-exp: weights are recomputed from it, log w_ij = log g(s_ij) - lse_i, and parts of a row are merged by it.

    Args:
        name: the word that `Problem.operator` and records store.
        log_numerator: log g, elementwise and differentiable; -inf where g is 0, and of a score of -inf.
        formula: output and lse of a problem by differentiable torch operations, with all weights in memory: second
            derivatives are those of the formula.
        kernels: of those that can compute a problem, the one that takes the least time is chosen; where none can, a
            `KernelError` lists their reasons. Under forward-mode differentiation the last is taken.
    """

    name: str
    log_numerator: Callable[[Tensor], Tensor]
    formula: Callable[[Problem], Result]
    kernels: tuple[Kernel, ...]


OPERATORS: dict[str, Operator] = {}
"""All operators by their names, which `regard.kernels.register_operator` adds."""


def operator_named(name: str) -> Operator:
    """The operator of that name.

    Raises:
        ConfigurationError: no operator of that name is registered.
    """
    if name not in OPERATORS:
        raise ConfigurationError(
            f"there is no attention operator {name!r}; {nearest(name, OPERATORS)}. One of your own needs to be passed "
            "to regard.kernels.register_operator first"
        )
    return OPERATORS[name]
