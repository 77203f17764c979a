"""The rules of the doctor, a file for each idea.

Codes: ATT1xx scale and softmax, ATT2xx masks, ATT3xx dropout and precision, ATT4xx heads and layouts, ATT5xx positions
and caches, ATT6xx speed, ATT9xx style.
"""

from __future__ import annotations

from . import (
    cache_rules,
    causality_rules,
    decoding_rules,
    dropout_rules,
    encoding_rules,
    head_rules,
    mask_rules,
    padding_rules,
    position_rules,
    scale_rules,
    softmax_rules,
    speed_rules,
    textbook_rules,
    unused_rules,
    window_rules,
)
from .base import RULES, AttentionRule, Report, certain, is_on_purpose

MODULES = (
    scale_rules,
    softmax_rules,
    mask_rules,
    causality_rules,
    padding_rules,
    window_rules,
    cache_rules,
    decoding_rules,
    unused_rules,
    dropout_rules,
    head_rules,
    position_rules,
    encoding_rules,
    speed_rules,
    textbook_rules,
)
"""Where the rules are; importing these modules puts them into `RULES`."""

__all__ = ["MODULES", "RULES", "AttentionRule", "Report", "certain", "is_on_purpose"]
