"""The rules of the doctor, a file for each idea: `*_rules.py`, and beside it the texts and examples of its codes.

Codes: ATT1xx scale and softmax, ATT2xx masks, ATT3xx dropout and precision, ATT4xx heads and layouts, ATT5xx positions
and caches, ATT6xx speed, ATT9xx style.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from .base import RULES, AttentionRule, Report, certain, is_on_purpose

MODULES = tuple(
    import_module(f".{one.name}", __name__) for one in iter_modules(__path__) if one.name.endswith("_rules")
)
"""Where the rules are; importing these modules puts them into `RULES`."""

__all__ = ["MODULES", "RULES", "AttentionRule", "Report", "certain", "is_on_purpose"]
