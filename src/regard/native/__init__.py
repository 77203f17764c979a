"""Native CPU code in C, compiled at installation: attention, lenses, linear recurrence, products of few rows.

A variant is chosen by the vector instructions of the processor. Nothing needs it: without native code `why_not()` says
what is missing, and other kernels compute the same.
"""

from .additive_tiles import AdditiveBackward as AdditiveBackward
from .additive_tiles import AdditiveForward as AdditiveForward
from .additive_tiles import AdditiveGradients as AdditiveGradients
from .additive_tiles import AdditiveScores as AdditiveScores
from .decode_rows import attend_few_queries as attend_few_queries
from .flash import DropoutHashes as DropoutHashes
from .flash import FlashProblem as FlashProblem
from .flash import FlashTiles as FlashTiles
from .flash import write_weights as write_weights
from .gemv import matmul_few_rows as matmul_few_rows
from .large_results import release_memory as release_memory
from .library import DTYPE_NAMES as DTYPE_NAMES
from .library import DTYPES as DTYPES
from .library import all_finite as all_finite
from .library import available as available
from .library import supports as supports
from .library import using as using
from .library import variant as variant
from .library import variant_in_use as variant_in_use
from .library import variants as variants
from .library import why_not as why_not
from .linear_recurrence import RecurrenceGradients as RecurrenceGradients
from .linear_recurrence import RecurrenceProblem as RecurrenceProblem
from .linear_recurrence import RecurrenceResult as RecurrenceResult
from .reductions import CellReduction as CellReduction
from .reductions import ColumnSums as ColumnSums
from .reductions import CReduction as CReduction
from .reductions import DistanceSums as DistanceSums
from .reductions import EntropySums as EntropySums
from .reductions import LargestWeights as LargestWeights
from .reductions import RowSums as RowSums
from .reductions import TermPositions as TermPositions
from .reductions import WeightMatrix as WeightMatrix
from .reductions import never_decrease as never_decrease
from .reductions import reduce_weights as reduce_weights
from .reductions import within_max_distance as within_max_distance
from .token_step import TokenStep as TokenStep
from .token_step import prepare_step as prepare_step
from .token_step import recurrence_step as recurrence_step

__all__ = [
    "DTYPES",
    "AdditiveBackward",
    "AdditiveForward",
    "AdditiveGradients",
    "AdditiveScores",
    "CReduction",
    "CellReduction",
    "ColumnSums",
    "DistanceSums",
    "DropoutHashes",
    "EntropySums",
    "FlashProblem",
    "FlashTiles",
    "LargestWeights",
    "RecurrenceGradients",
    "RecurrenceProblem",
    "RecurrenceResult",
    "RowSums",
    "TermPositions",
    "TokenStep",
    "WeightMatrix",
    "all_finite",
    "attend_few_queries",
    "available",
    "matmul_few_rows",
    "never_decrease",
    "prepare_step",
    "recurrence_step",
    "reduce_weights",
    "release_memory",
    "supports",
    "using",
    "variant",
    "variant_in_use",
    "variants",
    "why_not",
    "within_max_distance",
    "write_weights",
]
