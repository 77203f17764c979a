"""`regard bench`: what it prints and keeps; how long anything takes is no matter here."""

import re

import pytest
import torch

from regard import masks, native
from regard.kernels import KERNELS, Result
from regard.kernels.planning import calibration, rates
from regard.kernels.planning.rates import FlashRates, Rates, cache_file, save_rates
from regard.kernels.reference import ReferenceKernel
from regard_command import kernel_choices, kernel_tables

FLASH = FlashRates(flops=6e10, pairs=1e9, packed=2e9, streamed=3e9, backward=2.5)
MEASURED = Rates(4e10, 5e9, {"torch": {"float32": FLASH}, "cpu": {"float32": FLASH}}, moved=2e10, fresh=3e9, call=4e-6)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of its own, one small problem, and a machine that is measured in no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kernel_tables, "BUDGET", 0.0)
    monkeypatch.setattr(kernel_tables, "benchmark_cases", lambda: iter([small()]))
    monkeypatch.setattr(calibration, "measure", lambda **_: MEASURED)
    rates._rates_in_use.cache_clear()
    yield tmp_path / "cache"
    rates._rates_in_use.cache_clear()


def small() -> kernel_tables.BenchmarkCase:
    query, key, value = torch.rand(3, 1, 2, 16, 8)
    return kernel_tables.BenchmarkCase("a small one", (query, key, value), {"mask": masks.causal()})


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
    call = rates.rates_in_use().rates.call
    assert lines[6].split() == ["a", "call", f"{call * 1e6:.2f}", "µs"]
    assert lines[8].split()[:2] == ["torch", "float32"]
    first = next(number for number, line in enumerate(lines) if line.startswith("problem"))
    assert lines[first].split() == ["problem", "kernel", "predicted", "measured", "ratio"]
    rows = [
        re.fullmatch(r"(a small one)? +(-> )?(\w+) +[\d.]+ ms +[\d.]+ ms +[\d.]+", line) for line in lines[first + 1 :]
    ]
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
    assert rates.load_rates(cache_file())[0] == MEASURED


def test_a_cache_that_cannot_be_written_is_said_before_anything_is_measured(regard, cache, monkeypatch):
    monkeypatch.setattr(calibration, "measure", lambda **_: pytest.fail("it was measured"))
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
    names = [case.name for case in kernel_tables.benchmark_cases()]
    assert len(set(names)) == len(names)
    for case in kernel_tables.benchmark_cases():
        assert kernel_tables.explain(*case.tensors, **case.options).kernel.name


class TestChoices:
    @pytest.fixture(autouse=True)
    def few(self, monkeypatch):
        """A grid of four small problems, each timed once."""
        small = [each for each in kernel_choices.grid() if each.work < 2**20][:4]
        monkeypatch.setattr(kernel_choices, "grid", lambda seed: small if seed == 0 else small[:1])
        monkeypatch.setattr(kernel_choices, "BUDGET", 0.0)
        monkeypatch.setattr(kernel_choices, "ROUNDS", 1)
        return small

    def test_a_row_for_each_problem(self, regard, few):
        result = regard("bench", "--choices")
        assert result.exit_code == 0, result.stderr
        lines = result.stdout.splitlines()
        assert lines[1] == f"native code: {native.variant_in_use() or 'none'}"
        rows = lines[4:8]
        assert [row[:56].strip() for row in rows] == [str(each) for each in few]
        for row in rows:
            assert re.fullmatch(r"(\w+) +[\d.]+ ms +[\d.]+ ms  \w+ +[\d.]+", row[56:].strip())
        within = sum(float(row.split()[-1]) <= 1.2 for row in rows)
        assert lines[-1] == f"within 1.2 times of the fastest: {within} of 4 problems (goal: 95%)"

    def test_parts_are_all_of_it(self, regard, few):
        found = [
            line[:56].strip()
            for part in ("1/3", "2/3", "3/3")
            for line in regard("bench", "--choices", "--part", part).stdout.splitlines()[4:-2]
        ]
        assert sorted(found) == sorted(str(each) for each in few)

    def test_another_seed_has_other_problems(self, regard):
        assert " of 1 problems" in regard("bench", "--choices", "--seed", "7").stdout

    @pytest.mark.parametrize("part", ["0/2", "3/2", "1", "a/b", "1/0", "-1/2"])
    def test_a_part_that_is_none(self, regard, part):
        result = regard("bench", "--choices", f"--part={part}")
        assert result.exit_code == 2
        assert f"--part is the number of a part and how many there are, as in 2/4; this is {part!r}" in result.stderr


def test_the_grid_has_every_kind_and_dtype():
    problems = kernel_choices.grid()
    assert len(problems) == len(set(map(str, problems))) == kernel_choices.PROBLEMS
    assert problems == kernel_choices.grid() != kernel_choices.grid(1)
    assert {each.kind for each in problems} == set(kernel_choices.KINDS)
    assert {each.dtype for each in problems} == {torch.float32, torch.bfloat16, torch.float16}
    assert 20 < sum(each.training for each in problems) < 80


def test_a_kernel_that_is_slower_is_found():
    """The factor is that of measured times, whichever kernel was chosen."""
    times = {"sdpa": 3.0, "reference": 2.0}
    choice = kernel_choices.Choice(kernel_choices.grid()[0], "sdpa", times, {})
    assert (choice.fastest, choice.factor) == ("reference", 1.5)


class TestAgreement:
    @pytest.mark.skipif(not native.available(), reason="it counts the kernels of native code, too")
    def test_every_kernel_has_a_row(self, regard):
        result = regard("bench", "--agreement", "--cases", "2")
        assert result.exit_code == 0, result.stdout + result.stderr
        header, *rows = result.stdout.splitlines()
        assert header.split() == ["kernel", "cases", "error", "/", "budget", "worst", "case"]
        assert [row.split()[0] for row in rows] == [kernel.name for kernel in KERNELS]
        for row in rows:
            name, cases, share, *_ = row.split()
            if name == "flex":
                assert row.endswith(" 0" + " " * 18 + "none that it computes on cpu")
            else:
                assert cases in ("1", "2")
                assert 0 <= float(share) <= 1

    def test_what_is_wrong_is_printed(self, regard, monkeypatch):
        class Wrong(ReferenceKernel):
            name = "wrong"

            def run(self, problem):
                result = super().run(problem)
                return Result(result.output * 1.01, result.lse)

        class Broken(ReferenceKernel):
            name = "broken"

            def run(self, problem):
                raise RuntimeError("an illegal access\nof memory")

        monkeypatch.setattr(kernel_tables, "KERNELS", (Wrong(), Broken()))
        result = regard("bench", "--agreement", "--device", "cpu", "--cases", "3")
        assert result.exit_code == 1
        _, wrong, broken, empty, *faults = result.stdout.splitlines()
        assert float(wrong.split()[2]) > 1
        assert broken.split()[2] == "inf"
        assert empty == ""
        assert re.fullmatch(r"wrong on \S+: output: \d+ of \d+ elements .* over (its|their) budget; .*", faults[0])
        assert re.fullmatch(r"broken on \S+: RuntimeError: an illegal access", faults[-1])

    @pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
    @pytest.mark.parametrize("device", ["cuda", "abacus", "cuda:99"])
    def test_a_device_that_is_not_here(self, regard, device):
        result = regard("bench", "--agreement", "--device", device)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert result.stderr.startswith(f"regard: kernels cannot run on the device '{device}': ")
        assert "`--device cpu` is on every machine; cuda needs a GPU" in result.stderr

    @pytest.mark.parametrize(
        ("options", "said"),
        [
            (["--calibrate"], "--agreement and --calibrate are 2 commands"),
            (["--choices"], "--agreement and --choices are 2 commands"),
            (["--cases", "0"], "--cases"),
        ],
    )
    def test_refused_options(self, regard, options, said):
        result = regard("bench", "--agreement", *options)
        assert result.exit_code == 2
        assert said in result.stderr


def test_a_device_that_is_not_there_is_not_calibrated(regard):
    result = regard("bench", "--calibrate", "--device", "tpu")
    assert result.exit_code == 2
    assert "kernels cannot run on the device 'tpu'" in result.stderr
