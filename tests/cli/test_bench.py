"""`regard bench`: what it prints and keeps; how long anything takes is no matter here."""

import re

import pytest
import torch

from regard import masks
from regard.cli import kernel_timings
from regard.kernels import cost_model
from regard.kernels.cost_model import Rates, cache_file, save_rates

MEASURED = Rates(flops=4e10, native=6e10, passes=5e9, moved=2e10, fresh=3e9, call=4e-6)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of its own, one small problem, and a machine that is measured in no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_timings, "BUDGET", 0.0)
    monkeypatch.setattr(kernel_timings, "benchmark_cases", lambda: iter([small()]))
    monkeypatch.setattr(cost_model, "measure", lambda: MEASURED)
    cost_model._rates_in_use.cache_clear()
    yield tmp_path / "cache"
    cost_model._rates_in_use.cache_clear()


def small() -> kernel_timings.BenchmarkCase:
    query, key, value = torch.rand(3, 1, 2, 16, 8)
    return kernel_timings.BenchmarkCase("a small one", (query, key, value), {"mask": masks.causal()})


def test_it_has_help(regard):
    result = regard("bench", "--help")
    assert result.exit_code == 0
    assert "--calibrate" in result.stdout


def test_defaults_and_how_well_they_predict(regard):
    result = regard("bench")
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "defaults: nothing was measured here; `regard bench --calibrate` measures them"
    assert f"threads: {torch.get_num_threads()}, torch {torch.__version__}" in lines[1]
    assert lines[7].split() == ["a", "call", "2.50", "µs"]
    assert lines[9].split() == ["problem", "kernel", "predicted", "measured", "ratio"]
    rows = [re.fullmatch(r"(a small one)? +(-> )?(\w+) +[\d.]+ ms +[\d.]+ ms +[\d.]+", line) for line in lines[10:]]
    assert all(rows)
    assert "sdpa" in {row[3] for row in rows if row}
    assert sum(bool(row[2]) for row in rows if row) == 1
    assert sum(bool(row[1]) for row in rows if row) == 1


def test_what_was_measured_is_in_use(regard):
    save_rates(MEASURED, cache_file())
    lines = regard("bench").stdout.splitlines()
    assert lines[0] == f"measured here, from {cache_file()}"
    assert lines[2].split()[-6:] == ["products", "40.0", "GFLOP/s", "a", "thread,", "float32"]


def test_a_damaged_file_is_told_of(regard):
    save_rates(MEASURED, cache_file())
    cache_file().write_text("{}")
    result = regard("bench")
    assert result.exit_code == 0
    assert result.stdout.startswith(f"defaults: {cache_file()} holds no calibration: ")


def test_calibration_is_printed_and_kept(regard):
    result = regard("bench", "--calibrate")
    assert result.exit_code == 0, result.stderr
    assert "   40.0 GFLOP/s a thread" in result.stdout
    assert result.stdout.endswith(f"written to {cache_file()}\n")
    assert "other work on this machine" in result.stderr
    assert cost_model.load_rates(cache_file())[0] == MEASURED


def test_a_cache_that_cannot_be_written_is_said_before_anything_is_measured(regard, cache, monkeypatch):
    monkeypatch.setattr(cost_model, "measure", lambda: pytest.fail("it was measured"))
    cache.touch()
    result = regard("bench", "--calibrate")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert re.fullmatch(
        r"regard: cannot write \S+calibration.json: .+; set XDG_CACHE_HOME to a folder that can be written to\n",
        result.stderr,
    )


@pytest.mark.parametrize("arguments", [["--calibrates"], ["--calibrate", "now"]])
def test_misuse(regard, arguments):
    result = regard("bench", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""


def test_every_case_is_a_problem(monkeypatch):
    monkeypatch.undo()
    names = [case.name for case in kernel_timings.benchmark_cases()]
    assert len(set(names)) == len(names)
    for case in kernel_timings.benchmark_cases():
        assert kernel_timings.explain(*case.tensors, **case.options).kernel.name
