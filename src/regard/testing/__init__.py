"""Testing kernels: seeded cases, budgets taken from float64, and the agreement of a kernel with the formula.

A kernel of your own is tested as the library's are, by pytest or without it:

    >>> from regard.kernels.reference import ReferenceKernel
    >>> from regard.testing import assert_agrees, suite
    >>> for kernel, case in suite([ReferenceKernel()], strength=1):
    ...     assert_agrees(kernel, case)

`long_cases()` cross the borders of a kernel's own tiles, `sampled(count)` draws cases at random. Dropout is in all of
them: which weights it drops is a function of its seed, `kept`.
"""

from .agreement import assert_agrees as assert_agrees
from .agreement import suite as suite
from .case_inputs import Inputs as Inputs
from .case_inputs import make_inputs as make_inputs
from .cases import Case as Case
from .cases import cases as cases
from .cases import long_cases as long_cases
from .cases import sampled as sampled
from .oracle import Answer as Answer
from .oracle import attempts as attempts
from .oracle import kept as kept
from .oracle import truth as truth
from .tolerance import Expected as Expected
from .tolerance import assert_close as assert_close
from .tolerance import fault as fault

__all__ = [
    "Answer",
    "Case",
    "Expected",
    "Inputs",
    "assert_agrees",
    "assert_close",
    "attempts",
    "cases",
    "fault",
    "kept",
    "long_cases",
    "make_inputs",
    "sampled",
    "suite",
    "truth",
]
