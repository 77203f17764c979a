"""The table that takes the operators of regard out of an exported program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._ops import OperatorBase

from .. import linear as linear  # whose operator is in the table once it is loaded
from ..core.decomposition import DECOMPOSITIONS


def decompositions() -> dict[OperatorBase, Callable[..., Any]]:
    """The operators of regard and what they are in operators of torch, for `ExportedProgram.run_decompositions`.

    The program then needs torch alone: it is loaded and run where regard is not installed, and AOTInductor compiles the
    formula into its library. Where torch's `scaled_dot_product_attention` says the same, that is what is left of a
    call; any other holds its scores in memory. NaN and infinity in a masked position are not kept away there: in the
    formula they are multiplied by 0, which is NaN.

    >>> sorted(map(str, decompositions()))
    ['regard.attend.default', 'regard.linear_recurrence.default']
    """
    return dict(DECOMPOSITIONS)
