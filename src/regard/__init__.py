"""Attention for PyTorch: symbolic masks, biases and scores, exact kernels, and lenses on the attention weights."""

import importlib
from types import ModuleType

from . import biases as biases
from . import lenses as lenses
from . import masks as masks
from . import plots as plots
from . import positions as positions
from . import scores as scores
from .attention import attention as attention
from .attention import attention_with_lse as attention_with_lse
from .attention import explain as explain
from .attention import merge as merge
from .attention import observe as observe
from .attention import scaled_dot_product_attention as scaled_dot_product_attention

__all__ = [
    "attention",
    "attention_with_lse",
    "biases",
    "explain",
    "lenses",
    "masks",
    "merge",
    "observe",
    "plots",
    "positions",
    "scaled_dot_product_attention",
    "scores",
]

__version__ = "0.1.0.dev0"

_LAZY_SUBPACKAGES = ("explorer", "heads", "huggingface", "models", "nn", "testing", "translation")


def __getattr__(name: str) -> ModuleType:
    """Import a subpackage such as `regard.models` or `regard.nn` lazily, at the first access."""
    if name in _LAZY_SUBPACKAGES:
        return importlib.import_module(f"regard.{name}")
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY_SUBPACKAGES])
