"""Atlases: what every attention of a model computed, in one file, small enough to keep and exact where one looks."""

from .atlas import Atlas as Atlas
from .attention_map import AttentionMap as AttentionMap
from .tokenized_text import Pieces as Pieces
from .translation_info import Hypothesis as Hypothesis

__all__ = ["Atlas", "AttentionMap", "Hypothesis", "Pieces"]
