"""What the choice between kernels knows of the machine: defaults, or what was measured and is still true."""

import json
import re
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
import torch

import regard
from regard import masks, native
from regard.errors import ConfigurationError
from regard.kernels import Cost, cost_model
from regard.kernels.cost_model import (
    REUSED_BYTES,
    Machine,
    Rates,
    cache_file,
    load_rates,
    make_folder,
    rates_in_use,
    save_rates,
)

DEFAULTS = cost_model.default_rates("cpu", native.variant() if native.available() else None)
MEASURED = Rates(flops=4e10, native=6e10, passes=5e9, moved=2e10, fresh=3e9, call=4e-6)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of its own, and nothing remembered of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cost_model._rates_in_use.cache_clear()
    yield tmp_path / "cache"
    cost_model._rates_in_use.cache_clear()


def changed(path: Path, part: str, **values: object) -> None:
    """Something else in a part of the file."""
    held = json.loads(path.read_text("utf-8"))
    held[part] |= values
    path.write_text(json.dumps(held), "utf-8")


class TestSeconds:
    def test_each_kind_of_work_takes_its_time(self):
        threads = torch.get_num_threads()
        unit = Rates(flops=100.0, native=50.0, passes=10.0, moved=4.0, fresh=2.0, call=0.5)
        cost = Cost(200.0 * threads, bytes=1.0, passes=30.0 * threads, moved=8.0, calls=3.0, native=250.0 * threads)
        assert unit.seconds(cost, torch.float32) == pytest.approx(2 + 5 + 3 + 2 + 1.5)
        assert unit.seconds(cost, torch.float64) == pytest.approx(4 + 5 + 3 + 2 + 1.5)

    def test_memory_takes_time_where_the_system_has_to_hand_it_out(self):
        within, beyond = (
            MEASURED.seconds(Cost(0.0, size, calls=0), torch.float32) for size in (REUSED_BYTES, 2.0 * REUSED_BYTES)
        )
        assert within == 0
        assert beyond == pytest.approx(2 * REUSED_BYTES / MEASURED.fresh)


class TestInUse:
    def test_defaults_where_nothing_was_measured(self):
        assert rates_in_use().rates == DEFAULTS
        assert rates_in_use().origin == (
            "defaults: nothing was measured here; `regard bench --calibrate` measures them"
        )

    def test_what_was_written_is_in_use_at_once(self, cache):
        assert rates_in_use().rates == DEFAULTS
        save_rates(MEASURED, cache_file())
        assert rates_in_use().rates == MEASURED
        assert rates_in_use().origin == f"measured here, from {cache / 'regard' / 'calibration.json'}"

    def test_kernels_are_chosen_anew_by_rates_that_were_saved(self):
        if not native.available():
            pytest.skip(native.why_not() or "")
        query, plans, texts = torch.zeros(1, 8, 4096, 64), [], []
        for _ in range(2):
            plans += [regard.explain(query, query, query, mask=mask) for mask in (masks.causal(), masks.strided(64))]
            texts += [str(plan) for plan in plans[-2:]]
            save_rates(replace(MEASURED, native=1e8), cache_file())
        assert [plan.kernel.name for plan in plans] == ["cpu_flash", "decomposed", "sdpa", "decomposed"]
        assert "64 × 64, by cpu_flash" in texts[1]
        assert "64 × 64, by block_sparse" in texts[3]

    def test_kernels_are_chosen_anew_for_another_variant_of_the_native_code(self, monkeypatch):
        variants = native.variants()
        if len(variants) < 2:
            pytest.skip("fewer than two variants of the native code run here")
        monkeypatch.setitem(cost_model.DEFAULT_NATIVE, variants[-1], 1e8)
        query = torch.zeros(1, 8, 4096, 64)
        names = []
        for variant in (variants[0], variants[-1], variants[0]):
            with native.using(variant):
                names.append(regard.explain(query, query, query, mask=masks.causal()).kernel.name)
        assert names == ["cpu_flash", "sdpa", "cpu_flash"]

    @pytest.mark.parametrize(
        ("name", "value"), [("threads", 99), ("torch", "1.0.0"), ("processor", "an abacus"), ("native", "sse9")]
    )
    def test_what_was_measured_on_another_machine_is_not_used(self, name, value):
        save_rates(MEASURED, cache_file())
        changed(cache_file(), "machine", **{name: value})
        assert rates_in_use().rates == DEFAULTS
        now = re.escape(str(asdict(Machine.here())[name]))
        assert re.fullmatch(
            rf"defaults: .*calibration.json was measured on another machine \({name} {value}, now {now}\); .* anew",
            rates_in_use().origin,
        )

    def test_another_number_of_threads_is_another_machine(self):
        threads = torch.get_num_threads()
        save_rates(MEASURED, cache_file())
        try:
            torch.set_num_threads(threads + 1)
            assert rates_in_use().rates == DEFAULTS
            assert f"(threads {threads}, now {threads + 1})" in rates_in_use().origin
        finally:
            torch.set_num_threads(threads)
        assert rates_in_use().rates == MEASURED

    def test_another_variant_of_the_native_code_has_rates_of_its_own(self):
        for variant in native.variants():
            with native.using(variant):
                assert rates_in_use().rates == cost_model.default_rates("cpu", variant)

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", "null", '{"rates": {}, "machine": {}}', "\x00"])
    def test_a_damaged_file_is_told_of_and_not_in_the_way(self, text):
        make_folder(cache_file())
        cache_file().write_text(text, "utf-8")
        assert rates_in_use().rates == DEFAULTS
        assert rates_in_use().origin.startswith(
            f"defaults: {cache_file()} holds no calibration: it needs a number above 0"
        )

    def test_bytes_that_are_no_text(self):
        make_folder(cache_file())
        cache_file().write_bytes(b"\xff\xfe")
        assert "holds no calibration" in rates_in_use().origin

    def test_a_folder_in_its_place(self):
        cache_file().mkdir(parents=True)
        assert rates_in_use().rates == DEFAULTS
        assert rates_in_use().origin.startswith("defaults: ")

    def test_no_home(self, monkeypatch):
        def homeless() -> Path:
            raise RuntimeError("could not determine home directory")

        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setattr(Path, "home", homeless)
        assert rates_in_use() == cost_model.RatesInUse(DEFAULTS, "defaults: could not determine home directory")


class TestFile:
    def test_round_trip(self, tmp_path):
        save_rates(MEASURED, tmp_path / "kept.json")
        assert load_rates(tmp_path / "kept.json") == (MEASURED, Machine.here())

    def test_it_is_in_the_home_where_no_cache_is_named(self, monkeypatch):
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_file() == Path.home() / ".cache" / "regard" / "calibration.json"

    @pytest.mark.parametrize("name", [field.name for field in fields(Rates)])
    @pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "fast", None])
    def test_each_rate_needs_to_be_a_number_above_0(self, tmp_path, name, value):
        save_rates(MEASURED, tmp_path / "kept.json")
        changed(tmp_path / "kept.json", "rates", **{name: value})
        with pytest.raises(
            ConfigurationError, match=r"kept.json holds no calibration: .* for each of flops, native, passes, "
        ):
            load_rates(tmp_path / "kept.json")

    def test_a_file_where_the_folder_should_be(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match=r"cannot write .*kept.json: .*; set XDG_CACHE_HOME to a folder"):
            save_rates(MEASURED, tmp_path / "file" / "kept.json")

    def test_a_folder_that_is_closed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(cost_model.os, "access", lambda *_: False)
        with pytest.raises(
            ConfigurationError, match=r"cannot write .*kept.json: Permission denied; set XDG_CACHE_HOME"
        ):
            make_folder(tmp_path / "kept.json")

    def test_what_fails_half_way_leaves_the_old_file_and_no_other(self, tmp_path, monkeypatch):
        save_rates(MEASURED, tmp_path / "kept.json")

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(ConfigurationError, match="No space left on device"):
            save_rates(replace(MEASURED, flops=1.0), tmp_path / "kept.json")
        assert [file.name for file in tmp_path.iterdir()] == ["kept.json"]
        assert load_rates(tmp_path / "kept.json")[0] == MEASURED


class TestCalibration:
    def test_all_rates_are_numbers_above_0(self):
        measured = cost_model.measure(budget=0.0, large=2**16)
        assert all(0 < rate < float("inf") for rate in asdict(measured).values())

    def test_work_in_turn(self):
        done: list[int] = []
        spent = cost_model.time_in_turn([lambda: done.append(1), lambda: done.append(2)], budget=0.0)
        assert len(spent) == 2
        assert done == [1, 2] * (1 + cost_model.MIN_ROUNDS)
