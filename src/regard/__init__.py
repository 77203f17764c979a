"""regard computes attention: declared once, exact, as fast as the mask allows, its weights always there to look at."""

from . import biases as biases
from . import lenses as lenses
from . import masks as masks
from . import scores as scores
from .attention import attention as attention
from .attention import attention_with_lse as attention_with_lse
from .attention import explain as explain
from .attention import merge as merge
from .attention import observe as observe
from .sdpa import scaled_dot_product_attention as scaled_dot_product_attention

__all__ = [
    "attention",
    "attention_with_lse",
    "biases",
    "explain",
    "lenses",
    "masks",
    "merge",
    "observe",
    "scaled_dot_product_attention",
    "scores",
]

__version__ = "0.1.0.dev0"
