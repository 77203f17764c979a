"""Exported programs in standard operators."""
from .core.decomposition import DECOMPOSITIONS
def decompositions():
    return dict(DECOMPOSITIONS)
