"""The doctor of Python sources: finds mistakes in their attention without running them, and without torch.

`diagnose(source)` analyzes one module, `diagnose_files(paths)` many; the command is `regard-doctor`, and `regard
doctor` where the library is installed as well.

The analysis is built on the syntax trees of Python's own `ast`, which parses a hundred times as fast as LibCST;
rewrites are carried out on LibCST's trees, which keep comments and formatting.
"""

from __future__ import annotations

__version__ = "0.1.0"

from .diagnosis import RuleSelection, diagnose, diagnose_file, diagnose_files
from .doctor_error import DoctorError
from .finding import CodeFinding, Severity
from .rules import RULES, AttentionRule, Report

__all__ = [
    "RULES",
    "AttentionRule",
    "CodeFinding",
    "DoctorError",
    "Report",
    "RuleSelection",
    "Severity",
    "diagnose",
    "diagnose_file",
    "diagnose_files",
]
