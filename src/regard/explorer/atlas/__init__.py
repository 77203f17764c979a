"""Atlases: what every attention of a model computed, in one file, small enough to keep and exact where one looks."""

from .atlas import Atlas as Atlas
from .maps import AttentionMap as AttentionMap

__all__ = ["Atlas", "AttentionMap"]
