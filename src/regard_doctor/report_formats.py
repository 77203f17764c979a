"""Findings as text, JSON, SARIF 2.1.0 and commands of GitHub Actions."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path, PurePath

from . import __version__
from .code_explanation import explanation, page_address
from .finding import CodeFinding, Severity
from .rules import RULES

_SARIF_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.HINT: "note"}
_GITHUB_LEVELS = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.HINT: "notice"}
_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"


def as_text(findings: Sequence[CodeFinding], documentation: str = "") -> str:
    """A line `FILE:LINE:COLUMN: CODE message` for each finding."""
    return "\n".join(map(str, findings))


def as_json(findings: Sequence[CodeFinding], documentation: str = "") -> str:
    """A JSON list of objects, with the fields of `CodeFinding`."""
    return json.dumps([asdict(finding) | {"severity": finding.severity.value} for finding in findings], indent=2)


def as_github(findings: Sequence[CodeFinding], documentation: str = "") -> str:
    """Workflow commands of GitHub Actions, which become annotations of a pull request."""
    return "\n".join(
        f"::{_GITHUB_LEVELS[finding.severity]} file={_property(_posix(finding.path))},line={finding.line},"
        f"col={finding.column},endLine={finding.end_line},endColumn={finding.end_column},title={finding.code}"
        f"::{_escaped(finding.code + ' ' + finding.message)}"
        for finding in findings
    )


def as_sarif(findings: Sequence[CodeFinding], documentation: str = "") -> str:
    """A log of the Static Analysis Results Interchange Format 2.1.0, one run, its rules described.

    documentation: the address of the folder of the documentation. Addresses in SARIF are absolute, so that rules have a
    `helpUri` only where there is one; the whole explanation is in `help`.
    """
    codes = sorted({finding.code for finding in findings})
    rules = [_sarif_rule(code, documentation) for code in codes]
    results = [_sarif_result(finding, codes.index(finding.code)) for finding in findings]
    driver = {"name": "regard doctor", "version": __version__, "rules": rules}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=2)


def _sarif_rule(code: str, documentation: str) -> dict:
    explained = explanation(code)
    described = {
        "id": code,
        "shortDescription": {"text": explained.summary},
        "fullDescription": {"text": explained.text},
        "help": {"text": str(explained), "markdown": explained.markdown},
        "defaultConfiguration": {"level": _SARIF_LEVELS[explained.severity]},
    }
    if code in RULES:
        described["name"] = "".join(word.capitalize() for word in RULES[code].check.__name__.split("_"))
    if documentation:
        described["helpUri"] = page_address(code, documentation)
    return described


def _sarif_result(finding: CodeFinding, index: int) -> dict:
    start = {"startLine": finding.line, "startColumn": finding.column}
    region = start | {"endLine": finding.end_line, "endColumn": finding.end_column}
    path = Path(finding.path)
    uri = path.as_uri() if path.is_absolute() else _posix(finding.path)
    return {
        "ruleId": finding.code,
        "ruleIndex": index,
        "level": _SARIF_LEVELS[finding.severity],
        "message": {"text": finding.message},
        "locations": [{"physicalLocation": {"artifactLocation": {"uri": uri}, "region": region}}],
    }


def _posix(path: str) -> str:
    return PurePath(path).as_posix()


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _escaped(text).replace(":", "%3A").replace(",", "%2C")


FORMATS: dict[str, Callable[[Sequence[CodeFinding], str], str]] = {
    "text": as_text,
    "json": as_json,
    "sarif": as_sarif,
    "github": as_github,
}
"""Each output format by its name: of findings and the address of the documentation, which SARIF alone has in it."""
