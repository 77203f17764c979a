"""The doctor: finds mistakes in the attention of Python sources, without running them, and of models, by running them.

`diagnose(source)` analyzes one module, `diagnose_files(paths)` many; the command is `regard doctor`. They are those of
`regard_doctor`, a distribution of its own that needs no torch. `examine(model, batch)` changes the inputs of a model
and compares its outputs; the command is `regard examine`.
"""

from __future__ import annotations

from ..errors import MissingExtra

try:
    from regard_doctor import (
        RULES,
        AttentionRule,
        CodeFinding,
        Report,
        RuleSelection,
        Severity,
        diagnose,
        diagnose_file,
        diagnose_files,
    )
except ModuleNotFoundError as error:
    if error.name != "regard_doctor":
        raise
    raise MissingExtra(
        "this needs the package 'regard-doctor', which is not installed; pip install regard-doctor"
    ) from None

from .diagnosis_page import diagnosis_page
from .examination import CHECKS, examine
from .examination_page import examination_page
from .examination_report import Evidence, Examination, ModelFinding

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
