"""The doctor: finds mistakes in the attention of Python sources, without running them.

`diagnose(source)` analyzes one module, `diagnose_files(paths)` many; the command is `regard doctor`.

The analysis is built on the syntax trees of Python's own `ast`, which parses a hundred times as fast as LibCST;
rewrites are carried out on LibCST's trees, which keep comments and formatting.
"""

from __future__ import annotations

from .diagnosis import RuleSelection, diagnose, diagnose_file, diagnose_files
from .finding import CodeFinding, Severity
from .rules import RULES, AttentionRule, Report

__all__ = [
    "RULES",
    "AttentionRule",
    "CodeFinding",
    "Report",
    "RuleSelection",
    "Severity",
    "diagnose",
    "diagnose_file",
    "diagnose_files",
]
