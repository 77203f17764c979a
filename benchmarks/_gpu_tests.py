"""Tests of one marker, run in this process by pytest, with no plugin of it and no setting of the project."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Failed = Callable[[str, str], None]
"""Called with the name of a test that failed, and the first line of its error."""

APART = {"test_agreement.py"}
"""Files whose tests are a section of their own."""


class Outcomes:
    """Counts what became of tests, reports each failure at once, and ends the run when the time is over."""

    def __init__(self, left: Callable[[], float], failed: Failed) -> None:
        self.left, self.failed, self.counts = left, failed, Counter[str]()
        self.session: Any = None

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._add_failure(report)
        elif report.when == "call" or report.skipped:
            self.counts[report.outcome] += 1
        if report.when == "teardown" and self.left() <= 0:
            self.session.shouldstop = "the time of this section is over"

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._add_failure(report)

    def _add_failure(self, report: Any) -> None:
        self.counts["failed"] += 1
        crash = getattr(report.longrepr, "reprcrash", None)
        lines = (str(report.longrepr).splitlines()[-1:] if crash is None else crash.message.splitlines()) or [""]
        self.failed(report.nodeid, lines[0][:200])


def marked_files(root: Path, marker: str) -> list[str]:
    """The files of tests that have the marker, whole parts first: others may need what a bare machine lacks."""
    found = sorted((root / "tests").rglob("test_*.py"), key=lambda file: (len(file.parts), file))
    return [str(file) for file in found if file.name not in APART and f"mark.{marker}" in file.read_text("utf-8")]


def run_marked(root: Path, marker: str, left: Callable[[], float], failed: Failed) -> Mapping[str, int]:
    """How many tests of a marker passed, failed and were skipped.

    Raises:
        ModuleNotFoundError: there is no pytest.
    """
    import pytest

    outcomes = Outcomes(left, failed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setitem(os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
        settings = Path(folder, "pytest.ini")
        settings.write_text("[pytest]\naddopts = --import-mode=importlib\n")
        without = [option for name in ("terminal", "logging", "cacheprovider") for option in ("-p", f"no:{name}")]
        chosen = ["-c", str(settings), "--rootdir", str(root), "-m", marker, *marked_files(root, marker)]
        pytest.main([*without, *chosen], plugins=[outcomes])
    return dict(outcomes.counts)
