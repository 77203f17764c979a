"""Atlases: what every attention of a model computed, in one file, small enough to keep and exact where one looks."""

from .atlas import Atlas as Atlas
from .attention_map import AttentionMap as AttentionMap
from .tokenized_text import TokenizedText as TokenizedText
from .translation_info import RankedTranslation as RankedTranslation

__all__ = ["Atlas", "AttentionMap", "Hypothesis", "Pieces"]
