"""A file of findings that are known already, so that a run reports those alone that are new."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from .doctor_error import DoctorError
from .finding import CodeFinding

VERSION = 1


@dataclass(frozen=True, slots=True)
class Baseline:
    """How many findings of each file, code and message are known; their lines may move."""

    known: Counter[tuple[str, str, str]]

    @classmethod
    def of(cls, findings: Iterable[CodeFinding]) -> Baseline:
        """The baseline that knows these findings."""
        return cls(Counter(map(_identity, findings)))

    @classmethod
    def read(cls, path: Path) -> Baseline:
        """A baseline from its file.

        Raises:
            DoctorError: there is no such file, or it is no baseline of this version.
        """
        mend = "`--write-baseline` writes one"
        try:
            document = json.loads(path.read_text("utf-8"))
        except OSError as error:
            raise DoctorError(f"the baseline {path} cannot be read: {error.strerror or error}; {mend}") from None
        except ValueError as error:
            raise DoctorError(f"the baseline {path} is not JSON: {error}; {mend}") from None
        version = document.get("version") if isinstance(document, dict) else None
        if version != VERSION:
            raise DoctorError(f"the baseline {path} has version {version!r}; this doctor reads {VERSION}; {mend} anew")
        try:
            return cls(Counter({(one["path"], one["code"], one["message"]): one["count"] for one in document["known"]}))
        except (KeyError, TypeError) as error:
            raise DoctorError(f"the baseline {path} has an entry that is none ({error!r}); {mend} anew") from None

    def write(self, path: Path) -> None:
        """Write the baseline as JSON, an entry for each kind of finding, sorted.

        Raises:
            DoctorError: the file cannot be written.
        """
        known = [
            {"path": file, "code": code, "message": message, "count": count}
            for (file, code, message), count in sorted(self.known.items())
        ]
        try:
            path.write_text(json.dumps({"version": VERSION, "known": known}, indent=1) + "\n", "utf-8")
        except OSError as error:
            raise DoctorError(f"cannot write {path}: {error.strerror or error}; name another file") from None

    def new(self, findings: Sequence[CodeFinding]) -> list[CodeFinding]:
        r"""The findings that are not known; of more than are known, the last.

        >>> from .diagnosis import diagnose
        >>> found = diagnose("def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-2) @ v")
        >>> len(Baseline.of(found).new(found)), len(Baseline.of(found).new([*found, *found])) == len(found)
        (0, True)
        """
        seen, new = Counter[tuple[str, str, str]](), []
        for finding in findings:
            seen[_identity(finding)] += 1
            if seen[_identity(finding)] > self.known[_identity(finding)]:
                new.append(finding)
        return new


def _identity(finding: CodeFinding) -> tuple[str, str, str]:
    return PurePath(finding.path).as_posix(), finding.code, finding.message
