"""Calls of attention while a model runs: their module, the positions of their queries, and the sums of their terms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..core.problem import Problem
from ..errors import ConfigurationError
from ..kernels import Result, choose, finite_problem
from ..kernels.hooks import AttentionSubstitute, active_substitute
from ..lenses import Weights
from ..utils.call_site import CallSite, find_call_site
from .terms import ChosenTerms

T = TypeVar("T")
NEEDS_REGARD = (
    "it needs to compute its attention by regard.attention: call regard.huggingface.swap(model) first for a model of "
    "transformers, regard.nn.swap(model) for torch's layers"
)


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One call of attention: its module, problem, output, log-sum-exp, and the positions (..., M) of its queries."""

    module: str
    problem: Problem
    output: Tensor
    lse: Tensor
    rows: Tensor

    def key_sums(self, chosen: Sequence[ChosenTerms], values: Tensor | None = None) -> Tensor:
        """Σ_j α_ij · v_j over the keys j of the chosen terms, each once, and 0 in other rows; shaped as the output.

        values: (key heads, Dv) in place of all v_j.
        """
        problem, heads = finite_problem(self.problem), self.problem.heads
        found = torch.zeros_like(self.output)
        for column in _columns(chosen):
            weights = Weights(columns=slice(column, column + 1)).compute(problem, self.lse)  # [..., H, M, 1]
            own = problem.value[..., column : column + 1, :] if values is None else values.to(found).unsqueeze(-2)
            if heads:
                own = own.repeat_interleave(problem.weights_shape[-3] // own.shape[-3], -3)
            elif values is not None:
                own = own.squeeze(0)
            wanted = reduce(or_, (each.of_key(column, heads=heads) for each in chosen))
            found = found + torch.where(wanted, weights * own, 0.0).to(found.dtype)
        return found


def _columns(chosen: Sequence[ChosenTerms]) -> list[int]:
    """The columns that some of the terms have."""
    columns = [each.columns.reshape(-1, each.columns.shape[-1]).any(0) for each in chosen if each.columns is not None]
    return reduce(or_, columns).nonzero().flatten().tolist() if columns else []


class CallListener:
    """Finds the module that a call of attention comes from, and the positions of its queries.

    Queries of cross-attention are at the positions of the self-attention before it in the same pass, unless they have
    their own as a tensor: masks of cross-attention count from 0 in each step.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._last: Tensor | None = None

    def place(self, problem: Problem) -> tuple[str, Tensor]:
        """The name of the module, "" for a call from outside of the model, and the positions (..., M)."""
        site = find_call_site(self._names)
        return site.name, self._rows(problem, site)

    def _rows(self, problem: Problem, site: CallSite) -> Tensor:
        if not (site.is_cross or problem.queries > problem.keys):
            self._last = problem.grid().query_positions
            return self._last
        if isinstance(problem.query_positions, Tensor):
            return problem.query_positions
        if self._last is not None and self._last.shape[-1] == problem.queries:
            return self._last
        return torch.arange(problem.queries, device=problem.value.device)


def listen(model: nn.Module, run: Callable[[], T], heard: Callable[[AttentionCall], None]) -> T:
    """Run a model without autograd, pass each call of its attention to a function that reads it, and return the result.

    Raises:
        ConfigurationError: no attention of the model was called.
    """
    listener, count = CallListener(model), 0

    def compute(problem: Problem) -> Result | None:
        nonlocal count
        name, rows = listener.place(problem)
        if not name:
            return None
        problem = replace(problem, wants_lse=True)
        result = choose(problem).run(problem)
        heard(AttentionCall(name, problem, result.output, checked_lse(result), rows))
        count += 1
        return result

    with torch.no_grad(), active_substitute(AttentionSubstitute(compute)):
        found = run()
    if not count:
        raise ConfigurationError(f"no attention of this {type(model).__name__} was called: {NEEDS_REGARD}")
    return found


def checked_lse(result: Result) -> Tensor:
    """The log-sum-exp of a result that was asked for it."""
    if result.lse is None:
        raise AssertionError("a kernel chosen for a problem that wants the log-sum-exp gave none")
    return result.lse
