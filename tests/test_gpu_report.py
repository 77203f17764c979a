"""What of benchmarks/gpu.py needs no GPU: its rows on a CPU, their cells, the time of sections, and its arguments."""

import importlib
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard.testing import Case
from regard.testing.agreement import CaseAgreement

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Iterator[SimpleNamespace]:
    """The script and its modules."""
    names = {
        "script": "gpu",
        "report": "_gpu_report",
        "rows": "_gpu_rows",
        "timing": "_gpu_timing",
        "work": "_gpu_work",
    }
    names |= {"checks": "_gpu_checks", "tests": "_gpu_tests", "watch": "_gpu_watch"}
    before = sys.path[:]
    sys.path.insert(0, str(FOLDER))
    yield SimpleNamespace(**{name: importlib.import_module(module) for name, module in names.items()})
    sys.path[:] = before


def test_without_a_gpu_it_ends_with_one_sentence():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    done = subprocess.run([sys.executable, FOLDER / "gpu.py"], capture_output=True, text=True)
    assert done.returncode == 2
    assert not done.stdout
    assert done.stderr == (
        f"benchmarks/gpu.py needs a CUDA device: torch {torch.__version__}, built for no CUDA, finds none\n"
    )


class TestArguments:
    def test_all_sections_in_their_order(self, gpu):
        found = gpu.script.arguments([])
        assert found.sections == list(gpu.script.SECTIONS)
        assert found.sections[:2] == ["card", "agreement"]
        assert found.budget == gpu.script.SECONDS <= 480

    def test_some_sections(self, gpu):
        assert gpu.script.arguments(["--only", "decode, card"]).sections == ["card", "decode"]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            (["--only", "card,decoding"], "there is no section 'decoding': there are card, agreement, "),
            (["--budget", "-1"], "--budget is -1; it needs seconds, more than 0"),
            (["--budget", "nan"], "--budget is nan; it needs seconds, more than 0"),
            (["--out", "no/such/folder/gpu.md"], "there is no folder no/such/folder"),
        ],
    )
    def test_what_is_refused(self, gpu, given, message, capsys):
        with pytest.raises(SystemExit, match="2"):
            gpu.script.arguments(given)
        assert message in capsys.readouterr().err


class TestBudget:
    def test_what_one_section_leaves_goes_to_the_next(self, gpu):
        clock = iter([100.0, 100.0, 101.0, 103.0, 103.0, 109.0])
        budget = gpu.report.Budget({"a": 1.0, "b": 3.0}, 8.0, lambda: next(clock))
        assert budget.open("a") == 1.0
        assert budget.open("b") == 5.0
        assert (budget.left(), budget.left()) == (5.0, -1.0)

    def test_sections_that_are_asked_for_have_all_of_the_time(self, gpu):
        clock = iter([0.0] * 3)
        assert gpu.report.Budget({"decode": 12.0}, 480.0, lambda: next(clock)).open("decode") == 480.0

    def test_what_takes_too_long_is_stopped(self, gpu):
        def works() -> None:
            try:
                while True:
                    math.sqrt(2)
            except Exception:
                pytest.fail("no handler of errors sees it")

        with pytest.raises(gpu.report.OutOfTimeError, match="more than 0 s"), gpu.report.at_most(0.01):
            works()

    def test_nothing_begins_without_time(self, gpu):
        with pytest.raises(gpu.report.OutOfTimeError, match="no time was left"), gpu.report.at_most(0):
            pytest.fail("it ran")


class TestReport:
    def test_lines_are_printed_and_kept(self, gpu, capsys, tmp_path):
        report = gpu.report.Report()
        report.section("Card")
        report.columns("a", "b")
        report.row("1", "x | y")
        report.write(tmp_path / "gpu.md")
        text = "### Card\n\n| a | b |\n| --- | --- |\n| 1 | x / y |\n"
        assert capsys.readouterr().out.lstrip() == (tmp_path / "gpu.md").read_text("utf-8") == text

    def test_what_stands_above_the_report_stays(self, gpu, tmp_path):
        (page := tmp_path / "gpu.md").write_text(f"# GPU\n\n{gpu.report.MEASURED}\n\nold\n", "utf-8")
        report = gpu.report.Report()
        report.line("new")
        report.write(page)
        assert page.read_text("utf-8") == f"# GPU\n\n{gpu.report.MEASURED}\n\nnew\n"

    def test_the_page_has_that_line(self, gpu):
        assert (ROOT / "docs" / "gpu.md").read_text("utf-8").count(gpu.report.MEASURED) == 1

    def test_a_section_that_fails_stops_no_other(self, gpu, monkeypatch, capsys, tmp_path):
        def fails(report: Any, left: Any) -> None:
            raise RuntimeError("no card\nand more")

        sections = {"a": ("A", 1, fails), "b": ("B", 1, lambda report, left: report.line("b is measured"))}
        monkeypatch.setattr(gpu.script, "SECTIONS", sections)
        gpu.script.run(["a", "b"], 10.0, gpu.report.Report())
        printed = capsys.readouterr().out
        assert "This section failed: **RuntimeError**: no card\n" in printed
        assert "b is measured" in printed

    def test_a_device_that_is_lost_ends_the_process(self, gpu, monkeypatch, capsys):
        sections = {name: (name, 1, lambda report, left: report.line("measured")) for name in ("a", "b")}
        monkeypatch.setattr(gpu.script, "SECTIONS", sections)
        monkeypatch.setattr(gpu.script, "is_lost", lambda: True)
        with pytest.raises(SystemExit) as ended:
            gpu.script.run(["a", "b"], 10.0, gpu.report.Report())
        assert ended.value.code == gpu.script.LOST
        assert capsys.readouterr().out.count("measured") == 1


SECTION = """
import os, sys, time
for name in sys.argv[1].split(","):
    print(f"\\n### {name}\\n", flush=True)
    print(f"| {name} is measured |", flush=True)
    if name == "crashes":
        os.abort()
    if name == "hangs":
        time.sleep(60)
"""


class TestWatched:
    """Sections in processes of their own, which crash or hang."""

    @pytest.fixture
    def watched(self, gpu, monkeypatch) -> Callable[..., str]:
        def watched(*names: str) -> str:
            monkeypatch.setattr(gpu.watch, "SILENT", 3.0)
            report, kept = gpu.report.Report(), list[int]()

            def command(sections: Any, seconds: float) -> list[str]:
                assert 0 < seconds <= 40
                return [sys.executable, "-c", SECTION, ",".join(sections)]

            titles = {name: name for name in names}
            gpu.watch.run_watched(command, titles, 40.0, report, lambda: kept.append(len(report.lines)))
            assert kept[-1] == len(report.lines)
            return "\n".join(report.lines)

        return watched

    def test_what_ends_well(self, watched):
        assert watched("a", "b").count("is measured") == 2

    def test_a_crash(self, watched):
        report = watched("a", "crashes", "b")
        assert report.count("This section ended: its process ended with -6.") == 1
        assert [line for line in report.splitlines() if line.startswith("###")] == ["### a", "### crashes", "### b"]
        assert "| b is measured |" in report

    def test_a_process_that_hangs(self, watched):
        report = watched("hangs", "b")
        assert "it neither printed nor ended any more, and was killed" in report
        assert "| b is measured |" in report

    def test_nothing_that_begins(self, gpu):
        """A command that ends before its first section does not run for ever."""
        report = gpu.report.Report()
        command = [sys.executable, "-c", "raise SystemExit(2)"]
        gpu.watch.run_watched(lambda *_: command, {"a": "A", "b": "B"}, 40.0, report, lambda: None)
        assert sum("its process ended with 2" in line for line in report.lines) == 2

    def test_the_command_of_a_section(self, gpu):
        python, script, *options = gpu.script.command(["card", "decode"], 61.23)
        assert (python, Path(script)) == (sys.executable, FOLDER / "gpu.py")
        found = gpu.script.arguments(options)
        assert (found.sections, found.budget, found.here, found.out) == (["card", "decode"], 61.2, True, None)


class TestCells:
    """Cells of a row, from times and memory that are given."""

    @pytest.fixture
    def row(self, gpu) -> Any:
        return gpu.rows.Row("causal", lambda place: {}, "SDPA", 0.98)

    def test_a_ratio_beside_its_floor(self, gpu, row):
        found = gpu.timing.cells(row, {"regard": 2.0, "SDPA": 3.0}, {"regard": 2**20, "SDPA": 3 * 2**20}, {}, 1e-3)
        assert found == ["3.000 ms", "2.000 ms", "1.50", "≥ 0.98: yes", "3 MiB", "1 MiB", "0.001"]

    def test_a_floor_that_is_missed_and_a_result_that_differs(self, gpu, row):
        found = gpu.timing.cells(row, {"regard": 3.0, "SDPA": 1.5}, {"regard": 0, "SDPA": 0}, {}, math.inf)
        assert found[2:4] == ["0.50", "≥ 0.98: **no**"]
        assert found[-1] == "**inf**"

    def test_a_side_that_fails(self, gpu, row):
        found = gpu.timing.cells(row, {"SDPA": 1.5}, {"SDPA": 0}, {"regard": "**OutOfMemoryError**"}, None)
        assert found == ["1.500 ms", "**OutOfMemoryError**", "", "", "0 MiB", "", ""]

    def test_time_a_pair_and_memory(self, gpu, row):
        row = replace(row, floor=0.4, share=lambda: 0.25, megabytes=300)
        found = gpu.timing.cells(row, {"regard": 1.0, "SDPA": 2.0}, {"regard": 2**20, "SDPA": 0}, {}, None)
        assert found[2:4] == ["0.50", "≥ 0.4: yes"]
        assert found[5] == "1 MiB, in MB ≤ 300: yes"

    def test_measured(self, gpu, row, monkeypatch):
        monkeypatch.setattr(gpu.timing, "milliseconds", lambda work: 1.0)
        monkeypatch.setattr(gpu.timing, "peak", lambda work: 0)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

        def fails() -> torch.Tensor:
            raise ValueError("head dim 7")

        ones = torch.ones(3)
        sides = {"regard": lambda: ones, "SDPA": lambda: 2 * ones}
        assert gpu.timing.measured(replace(row, sides=lambda place: sides))[-1] == "**0.5**"
        sides["SDPA"] = fails
        found = gpu.timing.measured(replace(row, sides=lambda place: sides))
        assert found[:4] == ["**ValueError**: head dim 7", "1.000 ms", "", ""]
        del sides["SDPA"]
        assert gpu.timing.measured(replace(row, sides=lambda place: sides))[:3] == ["not installed", "1.000 ms", ""]

    def test_rows_that_fail_stop_no_other(self, gpu, row, monkeypatch, capsys):
        def fails(row: Any) -> list[str]:
            if row.work == "causal":
                raise MemoryError("too large")
            return ["1 ms"]

        monkeypatch.setattr(gpu.script, "measured", fails)
        monkeypatch.setitem(gpu.script.PARTS, "small", lambda: iter([row, replace(row, work="dense")]))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        gpu.script.part("small")(gpu.report.Report(), lambda: 10.0)
        *_, first, second = capsys.readouterr().out.splitlines()
        assert first == "| causal | SDPA | **MemoryError**: too large |  |  |  |  |  |  |"
        assert second == "| dense | SDPA | 1 ms |  |  |  |  |  |  |"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_sides_of_a_row_compute_the_same(gpu):
    """On the CPU, at a hundredth of the length; FlexAttention has no gradients there."""

    class Forward(gpu.work.Place):
        def tensors(self, *shape: int, gradients: bool = False, **options: Any) -> list[torch.Tensor]:
            return super().tensors(*shape, gradients=False, **options)

    every = [row for part in gpu.rows.PARTS.values() for row in part()]
    assert len({row.work + row.peer for row in every}) == len(every) > 40
    wrong = []
    for row in every:
        place = (Forward if row.peer == "FlexAttention" else gpu.work.Place)("cpu", 128, False)
        results = {name: side() for name, side in row.sides(place).items()}
        assert set(results) <= {"regard", row.peer}
        if row.compared and row.peer in results:
            apart = gpu.timing.difference(results["regard"], results[row.peer])
            wrong += [f"{row.work}: {apart}"] if apart > 2e-6 else []
    assert not wrong, "\n".join(wrong)


class TestAgreement:
    """The cells of a kernel, of results that are given."""

    @pytest.fixture
    def cells(self, gpu, monkeypatch) -> Callable[..., list[str]]:
        def agrees(*results: Any) -> list[str]:
            pending = iter(results)

            def measure(*_: Any) -> Any:
                if isinstance(result := next(pending), BaseException):
                    raise result
                return CaseAgreement(("grad of query\nat 3",) if result > 1 else (), result)

            monkeypatch.setattr(gpu.checks, "suite", lambda *_, **__: ((None, Case()) for _ in results))
            monkeypatch.setattr(gpu.checks, "measure_agreement", measure)
            return gpu.checks.agrees(SimpleNamespace(name="flash"), 60.0, "cpu")

        return agrees

    def test_cases_and_faults(self, gpu, cells):
        assert cells() == ["flash", "0", "", "", ""]
        assert cells(0.25, 0.5) == ["flash", "2", "0", "0.50", ""]
        name = Case().id
        assert cells(0.25, 7.0) == ["flash", "2", "1", "0.25", f"{name}: grad of query"]
        assert cells(ValueError("no code"), 7.0, 0.5) == ["flash", "3", "2", "0.50", f"{name}: **ValueError**: no code"]

    def test_it_ends_when_the_time_is_over(self, gpu, cells):
        assert cells(0.25, gpu.report.OutOfTimeError(), 0.5)[:2] == ["flash", "1"]

    def test_a_kernel(self, gpu):
        from regard.kernels.reference import ReferenceKernel

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gpu.checks, "long_cases", lambda: ())
            patch.setattr(gpu.checks, "cases", lambda strength: [Case()] if strength == 1 else ())
            name, count, wrong, worst, first = gpu.checks.agrees(ReferenceKernel(), 60.0, "cpu")
        assert [name, count, wrong, first] == ["reference", "1", "0", ""]
        assert 0 < float(worst) < 1


SOME_TESTS = """
import pytest

@pytest.mark.MARKER
def test_right():
    pass

@pytest.mark.MARKER
def test_wrong():
    assert 1 == 2, "not on this card"

@pytest.mark.MARKER
def test_skipped():
    pytest.skip("no card")

def test_other():
    assert False
"""


def test_tests_of_a_marker(gpu, tmp_path, capsys):
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_some.py").write_text(SOME_TESTS.replace("MARKER", "cuda"), "utf-8")
    (tmp_path / "tests" / "test_others.py").write_text("import a_module_that_is_missing\n")
    # In a process of its own: this one runs pytest.
    program = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); import _gpu_tests, pathlib; "
    program += f"print(_gpu_tests.run_marked(pathlib.Path({str(tmp_path)!r}), 'cuda', lambda: 9.0, print))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "tests/test_some.py::test_wrong AssertionError: not on this card",
        "{'passed': 1, 'failed': 1, 'skipped': 1}",
    ]


def test_files_with_tests_marked_cuda(gpu):
    first, *names = (Path(file).name for file in gpu.tests.marked_files(ROOT, "cuda"))
    assert first == "test_cuda.py"
    assert {"test_dispatch.py", "test_flex.py"} <= set(names)
    assert not {"test_agreement.py", "test_masks.py"} & set(names)
