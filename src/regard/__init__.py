"""Attention for PyTorch: symbolic masks, biases and scores, exact kernels, and lenses on the attention weights."""

import importlib
from typing import TYPE_CHECKING, Any

from . import biases as biases
from . import lenses as lenses
from . import masks as masks
from . import normalizers as normalizers
from . import plots as plots
from . import positions as positions
from . import scores as scores
from .attention import attention as attention
from .attention import attention_with_lse as attention_with_lse
from .attention import explain as explain
from .attention import merge as merge
from .attention import observe as observe
from .attention import scaled_dot_product_attention as scaled_dot_product_attention

if TYPE_CHECKING:
    from .advisor import advise as advise
    from .approximations import approximation as approximation
    from .approximations import model_approximation as model_approximation
    from .differential import differential_attention as differential_attention
    from .differential import observe_differential_attention as observe_differential_attention
    from .linear import linear_attention as linear_attention
    from .linear import linear_attention_with_state as linear_attention_with_state
    from .linear import observe_linear_attention as observe_linear_attention
    from .value_vectors import relative_value_attention as relative_value_attention

__all__ = [
    "advise",
    "approximation",
    "attention",
    "attention_with_lse",
    "biases",
    "differential_attention",
    "explain",
    "lenses",
    "linear_attention",
    "linear_attention_with_state",
    "masks",
    "merge",
    "model_approximation",
    "normalizers",
    "observe",
    "observe_differential_attention",
    "observe_linear_attention",
    "plots",
    "positions",
    "relative_value_attention",
    "scaled_dot_product_attention",
    "scores",
]

__version__ = "0.1.0"

_LAZY_SUBPACKAGES = (
    *("advisor", "approximations", "explorer", "export", "heads", "huggingface", "linear", "models", "nn", "ring"),
    *("selection", "testing", "translation"),
)
_LAZY_FUNCTIONS = {
    "advise": "advisor",
    "approximation": "approximations",
    "differential_attention": "differential",
    "linear_attention": "linear",
    "linear_attention_with_state": "linear",
    "model_approximation": "approximations",
    "observe_differential_attention": "differential",
    "observe_linear_attention": "linear",
    "relative_value_attention": "value_vectors",
}


def __getattr__(name: str) -> Any:
    """Import a subpackage such as `regard.nn`, or the one of a function, lazily, at the first access."""
    if name in _LAZY_SUBPACKAGES:
        return importlib.import_module(f"regard.{name}")
    if name in _LAZY_FUNCTIONS:
        return getattr(importlib.import_module(f"regard.{_LAZY_FUNCTIONS[name]}"), name)
    raise AttributeError(f"module 'regard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY_SUBPACKAGES, *_LAZY_FUNCTIONS})
