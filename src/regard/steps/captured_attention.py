"""Attention of one module while a model runs: its problem, and its result changed for one row of one head or of all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ..attention import run_problem
from ..core.problem import Problem
from ..errors import ConfigurationError
from ..kernels import Result
from ..utils.call_site import find_call_site
from .what_if import WhatIf


@dataclass(eq=False)
class CapturedAttention:
    """Attention of one module: stores its last problem, and computes it changed for one row of one head.

    head: None for all heads. row: None for all rows, where the pairs of the change name theirs. Used as `compute` of an
    `AttentionSubstitute`.
    """

    names: Mapping[nn.Module, str]
    head: int | None
    row: int | None
    what_if: WhatIf | None
    problems: list[Problem] = field(default_factory=list)

    def __call__(self, problem: Problem) -> Result | None:
        """Store the problem, and return the changed result; None where nothing is changed."""
        if not find_call_site(self.names).name:
            return None
        row = slice(None) if self.row is None else self.row if problem.queries > 1 else 0
        changed = problem
        if self.what_if is not None:
            what_if = self.what_if if isinstance(row, slice) else _for_row(self.what_if, row)
            changed = what_if.apply(problem)
        self.problems.append(changed)
        if changed is problem:
            return None
        results = [run_problem(replace(one, wants_lse=True)) for one in (problem, changed)]
        output, lse = results[0].output.clone(), results[0].lse.clone()  # type: ignore[union-attr]
        heads = slice(None) if self.head is None else self.head
        at = (..., heads, row) if problem.heads else (..., row)
        output[(*at, slice(None))] = results[1].output[(*at, slice(None))]
        lse[at] = results[1].lse[at]  # type: ignore[index]
        return Result(output, lse)

    @property
    def problem(self) -> Problem:
        """The problem of the last call.

        Raises:
            ConfigurationError: the module has computed no attention.
        """
        if not self.problems:
            raise ConfigurationError(
                f"{', '.join(self.names.values())} called no regard.attention: there are no steps to print"
            )
        return self.problems[-1]


@contextmanager
def captured_calls(**modules: nn.Module) -> Iterator[dict[str, tuple[Any, Any]]]:
    """The arguments and the result of the last call of each module in the block, by name."""
    calls: dict[str, tuple[Any, Any]] = {}

    def hook(name: str) -> Callable[..., None]:
        return lambda module, arguments, result: calls.__setitem__(name, (arguments, result))

    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(hook(name)).remove)
        yield calls


def _for_row(what_if: WhatIf, row: int) -> WhatIf:
    """The same change with all its pairs in one row."""
    flip = [(row, key) for _, key in what_if.flip]
    return replace(what_if, flip=flip, add={(row, key): number for (_, key), number in what_if.add.items()})
