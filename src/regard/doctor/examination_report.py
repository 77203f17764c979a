"""The result of `regard.doctor.examine`: findings about a running model, their evidence, and how they are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from regard_doctor.finding import Severity
from regard_doctor.run_explanations import KINDS

if TYPE_CHECKING:
    from .finding_map import Maps


class Place(NamedTuple):
    """A module by its name, and a line: of its `forward`, or one that it has called from."""

    module: str
    file: str | None
    line: int | None


@dataclass(frozen=True)
class Evidence:
    """What was changed, what moved by it, and where.

    changed: index of the token that was changed, in its sequence. moved: index of the output that moved. by: the
    largest absolute difference of that output. tolerance: the largest difference that rounding explains. module: name
    in `model.named_modules()`. file, line: source of that module's `forward`, or the line that computes the softmax.
    """

    changed: int | None = None
    moved: int | None = None
    by: float | None = None
    tolerance: float | None = None
    module: str | None = None
    file: str | None = None
    line: int | None = None

    def __str__(self) -> str:
        words = []
        if self.changed is not None:
            words.append(f"token {self.changed} changed")
        if self.moved is not None:
            words.append(f"output {self.moved} moved")
        if self.by is not None:
            words.append(f"by {self.by:.2g}" + ("" if self.tolerance is None else f", rounding {self.tolerance:.1g}"))
        if self.module is not None:
            words.append(f"in {self.module or 'the model itself'}")
        if self.file is not None:
            words.append(f"at {self.file}:{self.line}")
        return ", ".join(words)


@dataclass(frozen=True)
class ModelFinding:
    """One fault of a running model.

    mended_by_swap: whether `regard.huggingface.swap` removes it; None where that was not tried. maps: pictures of it,
    where `examine` was called with `maps=True`; they are no part of `as_dict`.
    """

    code: str
    message: str
    evidence: Evidence = field(default_factory=Evidence)
    severity: Severity = Severity.ERROR
    mended_by_swap: bool | None = None
    maps: Maps = field(default=(), repr=False, compare=False)

    @property
    def name(self) -> str:
        """Name of the code, such as 'future leak'."""
        return KINDS[self.code][0]

    def __str__(self) -> str:
        text = f"{self.code} {self.severity.value}: {self.name}: {self.message}"
        evidence = str(self.evidence)
        if evidence:
            text += f"\n    {evidence}"
        if self.mended_by_swap is not None:
            text += f"\n    regard.huggingface.swap {'mends it' if self.mended_by_swap else 'does not mend it'}"
        return text

    def as_dict(self) -> dict[str, Any]:
        """Code, name, severity, message, evidence and mended_by_swap, of plain types."""
        return {
            "code": self.code,
            "message": self.message,
            "evidence": asdict(self.evidence),
            "severity": self.severity.value,
            "mended_by_swap": self.mended_by_swap,
            "name": self.name,
        }


def finding(
    code: str,
    message: str,
    place: Place | None = None,
    *,
    severity: Severity | None = None,
    maps: Maps = (),
    **evidence: Any,
) -> ModelFinding:
    """A finding with the severity of its code."""
    shown = Evidence(**evidence, **(place._asdict() if place else {}))
    return ModelFinding(code, message, shown, severity or KINDS[code][1], maps=maps)


@dataclass(frozen=True)
class Examination:
    """Result of `examine`; `print` it, or its `to_json()`, which says why checks were skipped.

    model: class of the model. findings: in order of their codes. skipped: by check, why it was not run. checked: the
    checks that ran. noise: what rounding alone changes, see `regard.doctor.rounding_noise.Noise`.
    """

    model: str
    findings: tuple[ModelFinding, ...]
    checked: tuple[str, ...]
    skipped: Mapping[str, str]
    noise: Mapping[str, float]

    @property
    def codes(self) -> frozenset[str]:
        """The codes that were found."""
        return frozenset(found.code for found in self.findings)

    def __str__(self) -> str:
        count = f"{len(self.findings)} finding{'' if len(self.findings) == 1 else 's'}"
        lines = [f"{self.model}: {count}, {len(self.checked)} checks, {len(self.skipped)} skipped"]
        lines += [f"  {line}" for found in self.findings for line in str(found).splitlines()]
        lines += [f"  skipped: {', '.join(self.skipped)}"] if self.skipped else []
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """All fields, of plain types."""
        findings = [found.as_dict() for found in self.findings]
        return {**vars(self), "findings": findings, "checked": list(self.checked)}

    def to_json(self) -> str:
        """As JSON text."""
        return json.dumps(self.as_dict(), indent=2)
