"""Tests for kernels and normalizers: seeded cases, a float64 oracle, tolerances derived from it.

A kernel of your own is tested like the library's, by pytest or without it:

    >>> from regard.kernels.reference import ReferenceKernel
    >>> from regard.testing import assert_agrees, suite
    >>> for kernel, case in suite([ReferenceKernel()], strength=1):
    ...     assert_agrees(kernel, case)

`long_cases()` cross the borders of a kernel's tiles, `random_cases(count)` are random. Dropout is part of all of them:
`dropout_keeps` says which weights a seed keeps.

Another normalizer than softmax is tested by the same cases, with an `Oracle` of its own:
`assert_agrees(kernel, case, oracle=ReluOracle())`; `regard.testing.oracle` has that example.
"""

from .agreement import CaseAgreement as CaseAgreement
from .agreement import Implementation as Implementation
from .agreement import assert_agrees as assert_agrees
from .agreement import measure_agreement as measure_agreement
from .agreement import suite as suite
from .case_inputs import Inputs as Inputs
from .case_inputs import make_inputs as make_inputs
from .cases import Case as Case
from .cases import cases as cases
from .cases import long_cases as long_cases
from .cases import random_cases as random_cases
from .mask_parts import assert_parts as assert_parts
from .oracle import SOFTMAX as SOFTMAX
from .oracle import Oracle as Oracle
from .oracle import OracleResult as OracleResult
from .oracle import dropout_keeps as dropout_keeps
from .tolerance import Expected as Expected
from .tolerance import assert_close as assert_close
from .tolerance import fault as fault

__all__ = [
    "SOFTMAX",
    "Case",
    "CaseAgreement",
    "Expected",
    "Implementation",
    "Inputs",
    "Oracle",
    "OracleResult",
    "assert_agrees",
    "assert_close",
    "assert_parts",
    "cases",
    "dropout_keeps",
    "fault",
    "long_cases",
    "make_inputs",
    "measure_agreement",
    "random_cases",
    "suite",
]
