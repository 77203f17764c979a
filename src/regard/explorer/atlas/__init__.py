"""Atlases: attention maps of a model in one file, stored as queries, keys and log-sum-exp instead of weights."""

from .atlas import Atlas as Atlas
from .attention_map import AttentionMap as AttentionMap
from .tokenized_text import TokenizedText as TokenizedText
from .translation_info import RankedTranslation as RankedTranslation

__all__ = ["Atlas", "AttentionMap", "RankedTranslation", "TokenizedText"]
