"""The native code in C for CPUs: whether it is there, which variant runs, and the memory of its results.

A variant is chosen by the vector instructions of the processor. Nothing needs it: without native code `why_not()` says
what is missing, and other kernels compute the same. The code is in `regard.backends.cpu`.
"""

from .backends.cpu.library import available as available
from .backends.cpu.library import supports as supports
from .backends.cpu.library import using as using
from .backends.cpu.library import variant as variant
from .backends.cpu.library import variant_in_use as variant_in_use
from .backends.cpu.library import variants as variants
from .backends.cpu.library import why_not as why_not
from .core.large_results import release_memory as release_memory

__all__ = [
    "available",
    "release_memory",
    "supports",
    "using",
    "variant",
    "variant_in_use",
    "variants",
    "why_not",
]
