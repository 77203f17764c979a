"""Native CPU code for dot products, many or few queries, and for additive scores: C, compiled at installation.

Which variant runs is chosen by what the processor can do.

It is never needed: without it `why_not()` says what is missing, and other kernels compute the same.
"""

from __future__ import annotations

from torch import Tensor

from .additive import Prepared as Prepared
from .additive_gradient import Gradients as Gradients
from .attended import Attended as Attended
from .dots import few_rows as few_rows
from .flash import Drops as Drops
from .flash import FlashProblem as FlashProblem
from .flash import Tiles as Tiles
from .library import DTYPES as DTYPES
from .library import available as available
from .library import reads as reads
from .library import using as using
from .library import variant as variant
from .library import variants as variants
from .library import why_not as why_not
from .linear import times_matrix as times_matrix
from .reducing import reduce_weights as reduce_weights
from .reductions import AllWeights as AllWeights
from .reductions import Cells as Cells
from .reductions import ColumnSums as ColumnSums
from .reductions import Largest as Largest
from .reductions import Reach as Reach
from .reductions import Reduction as Reduction
from .reductions import RowTerms as RowTerms
from .reductions import grow as grow
from .reductions import near as near
from .weights import write_weights as write_weights

__all__ = [
    "DTYPES",
    "AllWeights",
    "Attended",
    "Cells",
    "ColumnSums",
    "Drops",
    "FlashProblem",
    "Gradients",
    "Largest",
    "Prepared",
    "Reach",
    "Reduction",
    "RowTerms",
    "Tiles",
    "additive_gradient",
    "additive_scores",
    "available",
    "few_rows",
    "grow",
    "near",
    "reads",
    "reduce_weights",
    "times_matrix",
    "using",
    "variant",
    "variants",
    "why_not",
    "write_weights",
]


def additive_scores(query: Tensor, key: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """score(i, j) = Σ_a weight_a · tanh(query_ia + key_ja): all scores at once, (H, M, N).

    Shapes, conventions and errors as for `Prepared`; `out` as for `Prepared.scores`.

    Raises:
        KernelError: there is no native code to call (`why_not`).
    """
    return Prepared(query, key, weight).scores(out=out)


def additive_gradient(query: Tensor, key: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient by query, key and weight, where `upstream` (H, M, N) is that by the scores, all at once.

    Formula, shapes, conventions and errors as for `Gradients`.

    Raises:
        KernelError: there is no native code to call (`why_not`).
    """
    gradients = Gradients(Prepared(query, key, weight))
    gradients.add(upstream)
    return gradients.result()
