"""Atlases: what every attention of a model computed, in one file, small enough to keep and exact where one looks."""

from .atlas import Atlas as Atlas
from .maps import AttentionMap as AttentionMap
from .tokens import Pieces as Pieces
from .translations import Hypothesis as Hypothesis

__all__ = ["Atlas", "AttentionMap", "Hypothesis", "Pieces"]
