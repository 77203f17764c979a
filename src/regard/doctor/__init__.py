"""The doctor: finds mistakes in the attention of Python sources, without running them, and of models, by running them.

`diagnose(source)` analyzes one module, `diagnose_files(paths)` many; the command is `regard doctor`. `examine(model,
batch)` changes the inputs of a model and compares its outputs; the command is `regard examine`.

The analysis is built on the syntax trees of Python's own `ast`, which parses a hundred times as fast as LibCST;
rewrites are carried out on LibCST's trees, which keep comments and formatting.
"""

from __future__ import annotations

from .diagnosis import RuleSelection, diagnose, diagnose_file, diagnose_files
from .diagnosis_page import diagnosis_page
from .examination import CHECKS, examine
from .examination_page import examination_page
from .examination_report import Evidence, Examination, ModelFinding
from .finding import CodeFinding, Severity
from .rules import RULES, AttentionRule, Report

__all__ = [
    "CHECKS",
    "RULES",
    "AttentionRule",
    "CodeFinding",
    "Evidence",
    "Examination",
    "ModelFinding",
    "Report",
    "RuleSelection",
    "Severity",
    "diagnose",
    "diagnose_file",
    "diagnose_files",
    "diagnosis_page",
    "examination_page",
    "examine",
]
