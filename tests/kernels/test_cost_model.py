"""What the choice between kernels knows of the machine: defaults, or what was measured and is still true."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import regard
from regard import masks, native
from regard.backends.torch.torch_flash_timing import TimedFlashOfTorch
from regard.errors import ConfigurationError
from regard.kernels import Cost
from regard.kernels.base import GRADIENT, FlashWork
from regard.kernels.planning import calibration, rates, signature
from regard.kernels.planning.rates import (
    REUSED_BYTES,
    FlashRates,
    Machine,
    Rates,
    cache_file,
    load_rates,
    make_folder,
    rates_in_use,
    save_rates,
)
from regard.kernels.planning.unit_costs import product_work, widened_bytes

DEFAULTS = rates.default_rates("cpu", native.variant() if native.available() else None)
FLASH = FlashRates(flops=6e10, pairs=1e9, packed=2e9, streamed=3e9, backward=2.5, moved=2e10)
MEASURED = Rates(4e10, 5e9, {"torch": {"float32": FLASH}, "cpu": {"float32": FLASH}}, moved=2e10, fresh=3e9, call=4e-6)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of its own, and nothing remembered of another."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(signature, "_choices", {})
    rates._rates_in_use.cache_clear()
    yield tmp_path / "cache"
    rates._rates_in_use.cache_clear()


def changed(path: Path, part: str, **values: object) -> None:
    """Something else in a part of the file."""
    held = json.loads(path.read_text("utf-8"))
    held[part] |= values
    path.write_text(json.dumps(held), "utf-8")


class TestSeconds:
    def test_each_kind_of_work_takes_its_time(self):
        own = FlashRates(flops=50.0, pairs=20.0, packed=10.0, streamed=5.0, backward=3.0, moved=4.0)
        double = replace(own, flops=25.0)
        unit = Rates(
            100.0,
            10.0,
            {"torch": {"float32": own, "float64": double}},
            moved=4.0,
            fresh=2.0,
            call=0.5,
            cache=1.0,
        )
        flash = FlashWork(flops=150.0, pairs=40.0, packed=50.0, streamed=5.0)  # 3 + 2 + 5, and 1 of reading
        cost = Cost(200.0, bytes=1.0, passes=30.0, moved=8.0, calls=3.0, flash={"torch": flash})
        assert unit.seconds(cost, torch.float32, threads=1) == pytest.approx(10 + 2 + 3 + 2 + 1.5)
        assert unit.seconds(cost, torch.float32, threads=2) == pytest.approx((10 + 2 + 3) / 2 + 2 + 1.5)
        assert unit.seconds(cost, torch.float64, threads=1) == pytest.approx(13 + 4 + 3 + 2 + 1.5)
        assert unit.seconds(cost, torch.bfloat16, threads=1) == unit.seconds(cost, torch.float32, threads=1)
        assert unit.seconds(replace(cost, flash={"torch": flash + flash}), torch.float32, threads=1) == pytest.approx(
            28.5
        )

    def test_keys_arrive_from_memory_while_others_are_multiplied(self):
        cost = Cost(0.0, 0.0, moved=4e10, calls=0.0, flash={"cpu": FlashWork(streamed=3e9)})
        assert MEASURED.seconds(cost, torch.float32, threads=1) == pytest.approx(2)
        assert MEASURED.seconds(replace(cost, moved=1e10), torch.float32, threads=1) == pytest.approx(1)

    def test_keys_that_native_code_packs_arrive_at_its_own_rate(self):
        cost = Cost(0.0, 0.0, moved=2.0 * MEASURED.cache, calls=0.0, flash={"cpu": FlashWork(packed=1e-3)})
        arriving = cost.moved / FLASH.moved
        assert replace(MEASURED, moved=1e20).seconds(cost, torch.float32, threads=1) == pytest.approx(arriving)

    def test_what_the_cache_keeps_does_not_arrive_from_memory(self):
        cost = Cost(0.0, 0.0, moved=MEASURED.cache, calls=0.0, flash={"cpu": FlashWork(streamed=3.0)})
        assert MEASURED.seconds(cost, torch.float32, threads=1) == pytest.approx(1e-9)
        beyond = replace(cost, moved=MEASURED.cache + 4)
        assert MEASURED.seconds(beyond, torch.float32, threads=1) == pytest.approx(beyond.moved / FLASH.moved)
        other = replace(MEASURED, moved=5e9)
        assert other.seconds(beyond, torch.float32, threads=1) == pytest.approx(beyond.moved / FLASH.moved)
        assert other.seconds(replace(beyond, flash={}), torch.float32) == pytest.approx(beyond.moved / 5e9)

    def test_products_of_few_rows_are_in_float32_whatever_comes_in(self):
        slow = replace(FLASH, streamed=1e9)
        rates = replace(MEASURED, flash={"torch": {"float32": FLASH, "float16": slow, "float64": slow}})
        cost = Cost(0.0, 0.0, calls=0.0, streamed=3e9)
        for dtype, seconds in ((torch.float32, 1), (torch.float16, 1), (torch.float64, 3)):
            assert rates.seconds(cost, dtype, threads=1) == pytest.approx(seconds)

    def test_tiles_take_time_to_begin_in_the_backward_pass_alone(self):
        rates = replace(MEASURED, flash={"torch": {"float32": replace(FLASH, tiles=10.0)}})
        cost = Cost(0.0, 0.0, calls=0.0, gradient=0.0, flash={"torch": FlashWork(tiles=20.0)})
        assert rates.seconds(cost, torch.float32, threads=1) == 0
        assert rates.seconds(cost, torch.float32, threads=1, training=True) == pytest.approx(2)

    def test_training_adds_the_backward_pass_and_the_calls_of_autograd(self):
        work = FlashWork(flops=6e10)
        for cost in (Cost(0.0, 0.0, calls=0.0, flash={"torch": work}), Cost(0.0, 0.0, calls=0.0, flash={"cpu": work})):
            assert MEASURED.seconds(cost, torch.float32, threads=1) == pytest.approx(1)
            seconds = MEASURED.seconds(replace(cost, calls=10.0), torch.float32, threads=1, training=True)
            assert seconds == pytest.approx(1 + 2.5 + (20 + GRADIENT) * 4e-6)

    def test_a_dtype_has_rates_of_its_own(self):
        rates = replace(
            MEASURED, flash={"torch": {"float32": FLASH, "bfloat16": replace(FLASH, flops=6e9, backward=7.0)}}
        )
        cost = Cost(0.0, 0.0, calls=0.0, flash={"torch": FlashWork(flops=6e10)})
        assert rates.seconds(cost, torch.bfloat16, threads=1) == pytest.approx(10)
        assert rates.seconds(cost, torch.bfloat16, threads=1, training=True) > 80

    def test_memory_takes_time_where_the_system_has_to_hand_it_out(self):
        within, beyond = (
            MEASURED.seconds(Cost(0.0, size, calls=0), torch.float32)
            for size in (REUSED_BYTES - 1.0, 2.0 * REUSED_BYTES)
        )
        assert within == 0
        assert beyond == pytest.approx(2 * REUSED_BYTES / MEASURED.fresh)


class TestDefaults:
    @pytest.mark.parametrize(
        ("capability", "processor", "expected"),
        [
            ("AVX512", "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 17\n", rates.ZEN_4),
            ("AVX512", "vendor_id\t: AuthenticAMD\ncpu family\t: 26\nmodel\t\t: 2\n", rates.ZEN_5),
            ("AVX512", "vendor_id\t: GenuineIntel\ncpu family\t: 6\n", "AVX512"),
            ("AVX2", "vendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: 33\n", "AVX2"),
        ],
    )
    def test_rates_of_the_processor_that_the_system_names(self, capability, processor, expected, monkeypatch):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
        monkeypatch.setattr(Path, "read_text", lambda *_: processor)
        assert rates._machine_here.__wrapped__() == expected

    @pytest.mark.parametrize("processor", ["AVX512", "AVX2", "DEFAULT", rates.ZEN_4, rates.ZEN_5])
    def test_each_variant_of_the_native_code_has_rates_of_its_own(self, processor):
        none, plain, avx512 = (rates.default_rates("cpu", each, processor) for each in (None, "plain", "avx512"))
        assert none.of("cpu", torch.float32) == none.of("torch", torch.float32)
        assert plain.of("cpu", torch.float32).flops < avx512.of("cpu", torch.float32).flops

    def test_rates_say_by_which_command_they_were_measured(self):
        for machine, held in rates.machine_rates().items():
            assert held["measured"], machine
            assert held["command"], machine
            assert all(rate > 0 for rate in rates.default_rates("cpu", None, machine).numbers())

    def test_few_rows_multiply_and_read_their_keys(self):
        assert product_work(800.0, 8, 64) == (2 * 800 * 64, 100 * 64)
        assert product_work(800.0, 16, 64) == (2 * 800 * 64, 0.0)

    def test_widened_keys_take_fresh_memory_where_one_tensor_is_large(self):
        keys = REUSED_BYTES // (4 * 64)
        for length, fresh in ((keys - 1, 0.0), (keys, 2.0 * REUSED_BYTES)):
            one = torch.empty(1, 1, 1, 64, dtype=torch.bfloat16).expand(1, 1, length, 64)
            posed = regard.explain(one[:, :, :1], one, one).problem
            assert widened_bytes(posed) == fresh


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
        for flops in (FLASH.flops, 1e8):
            own = {"float32": replace(FLASH, flops=flops)}
            save_rates(replace(MEASURED, flash={**MEASURED.flash, "cpu": own}), cache_file())
            plans += [regard.explain(query, query, query, mask=mask) for mask in (masks.causal(), masks.strided(64))]
            texts += [str(plan) for plan in plans[-2:]]
        assert [plan.kernel.name for plan in plans] == ["cpu_flash", "decomposed", "sdpa", "decomposed"]
        assert "64 × 64, by cpu_flash" in texts[1]
        assert "64 × 64, by block_sparse" in texts[3]

    def test_kernels_are_chosen_anew_for_another_variant_of_the_native_code(self, monkeypatch):
        variants = native.variants()
        if len(variants) < 2:
            pytest.skip("fewer than two variants of the native code run here")
        original = rates.default_rates

        def slow_in_the_last(device: str = "cpu", variant: str | None = None, machine: str | None = None) -> Rates:
            own = original(device, variant, "AVX2")
            slow = {"float32": replace(FLASH, flops=1e8)}
            return replace(own, flash={**own.flash, "cpu": slow}) if variant == variants[-1] else own

        monkeypatch.setattr(rates, "default_rates", slow_in_the_last)
        query = torch.zeros(1, 8, 4096, 64)
        names = []
        for variant in (variants[0], variants[-1], variants[0]):
            with native.using(variant):
                names.append(regard.explain(query, query, query, mask=masks.causal()).kernel.name)
        assert names[::2] == ["cpu_flash", "cpu_flash"]
        assert names[1] != "cpu_flash"

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
                assert rates_in_use().rates == rates.default_rates("cpu", variant)

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
        assert rates_in_use() == rates.RatesInUse(DEFAULTS, "defaults: could not determine home directory")


class TestFile:
    def test_round_trip(self, tmp_path):
        save_rates(MEASURED, tmp_path / "kept.json")
        assert load_rates(tmp_path / "kept.json") == (MEASURED, Machine.here())

    def test_it_is_in_the_home_where_no_cache_is_named(self, monkeypatch):
        monkeypatch.delenv("XDG_CACHE_HOME")
        assert cache_file() == Path.home() / ".cache" / "regard" / "calibration.json"

    @pytest.mark.parametrize("name", rates.NUMBERS)
    @pytest.mark.parametrize("value", [0, -1, float("inf"), float("nan"), "fast", None])
    def test_each_rate_needs_to_be_a_number_above_0(self, tmp_path, name, value):
        save_rates(MEASURED, tmp_path / "kept.json")
        changed(tmp_path / "kept.json", "rates", **{name: value})
        with pytest.raises(
            ConfigurationError, match=r"kept.json holds no calibration: .* for each of flops, passes, moved, "
        ):
            load_rates(tmp_path / "kept.json")

    @pytest.mark.parametrize("backend", ["torch", "cpu"])
    @pytest.mark.parametrize(
        "by_dtype",
        [{}, [], None, {"bfloat16": asdict(FLASH)}, {"float32": {}}, {"float32": asdict(FLASH) | {"pairs": -1}}],
    )
    def test_each_flash_kernel_needs_rates_above_0_in_float32(self, tmp_path, backend, by_dtype):
        save_rates(MEASURED, tmp_path / "kept.json")
        flash = {name: {"float32": asdict(FLASH)} for name in ("torch", "cpu")} | {backend: by_dtype}
        changed(tmp_path / "kept.json", "rates", flash=flash)
        with pytest.raises(ConfigurationError, match="those of the flash kernel of torch, and of other backends, in"):
            load_rates(tmp_path / "kept.json")

    def test_a_file_where_the_folder_should_be(self, tmp_path):
        (tmp_path / "file").touch()
        with pytest.raises(ConfigurationError, match=r"cannot write .*kept.json: .*; set XDG_CACHE_HOME to a folder"):
            save_rates(MEASURED, tmp_path / "file" / "kept.json")

    def test_a_folder_that_is_closed(self, tmp_path, monkeypatch):
        monkeypatch.setattr(rates.os, "access", lambda *_: False)
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
    def test_all_rates_are_numbers_above_0(self, monkeypatch):
        # Small and seldom: the numbers need not be good ones.
        monkeypatch.setattr(calibration, "MIN_ROUNDS", 2)
        monkeypatch.setitem(calibration.SIZES, "cpu", replace(calibration.SIZES["cpu"], heads=2, keys=256))
        measured = calibration.measure(budget=0.0, large=2**16)
        assert all(0 < rate < float("inf") for rate in measured.numbers())
        assert set(measured.flash["torch"]) == {"float32", "float64", "bfloat16", "float16"}
        if native.available():
            assert set(measured.flash["cpu"]) == {"float32", "bfloat16", "float16"}

    def test_other_devices_are_refused(self):
        with pytest.raises(ConfigurationError, match="rates are measured on cpu and cuda; this is .* 'mps'"):
            calibration.measure(device="mps")

    def test_brief_work_is_repeated_and_the_least_counts(self, monkeypatch):
        spent = iter([0.004, 0.001, 0.002, 0.5, 0.3])
        monkeypatch.setattr(calibration, "_once", lambda work: next(spent))
        monkeypatch.setattr(calibration, "BRIEF", 0.006)
        assert calibration._seconds(lambda: None) == 0.001
        assert calibration._seconds(lambda: None) == 0.5

    def test_what_a_tile_takes_follows_from_small_problems(self):
        times = [1.0, 2.0, 0.5, 0.1, 1.0, 3.0, 0.2, 0.6 + 64 * 0.01]
        rates = calibration._FlashBenchmark(
            "torch", TimedFlashOfTorch(), torch.bfloat16, calibration.SIZES["cpu"]
        ).rates(times)
        assert rates.backward == pytest.approx(3)
        assert rates.tiles == pytest.approx(100)

    def test_rates_follow_from_times(self):
        """Times that are made of known rates give these back; times of noise give none below 0."""
        known = FlashRates(flops=5e10, pairs=2e9, packed=1e9, streamed=4e9, backward=3.0)
        benchmark = calibration._FlashBenchmark("torch", TimedFlashOfTorch(), torch.float32, calibration.SIZES["cpu"])
        amounts = [benchmark.amounts(*shape) for shape in benchmark.shapes]
        times = [known.seconds(FlashWork(*each)) for each in amounts]
        flops, pairs, _ = benchmark.amounts(1, calibration.FEW_DIM)
        numbers = 8 * 1024 * 2 * calibration.FEW_DIM
        times += [known.seconds(FlashWork(flops, pairs)) + numbers / known.streamed, 1.0, 3.0]
        assert benchmark.rates(times).numbers() == pytest.approx(known.numbers())
        assert all(rate > 0 for rate in benchmark.rates([1.0, 0.5, 9.0, 1e-9, 1.0, 2.0]).numbers())

    def test_the_cache_is_what_is_read_as_fast_as_little(self):
        sizes = calibration.CACHE_SIZES
        assert calibration._cache_size([90e9, 80e9, 95e9, 70e9, 40e9, 36e9], 35e9) == sizes[3]
        assert calibration._cache_size([36e9] * len(sizes), 35e9) == sizes[-1]
        assert calibration._cache_size([10e9, 90e9, 10e9, 10e9, 10e9, 10e9], 9e9) == sizes[0]

    def test_work_in_turn(self, monkeypatch):
        monkeypatch.setattr(calibration, "BRIEF", 0.0)
        done: list[int] = []
        spent = calibration.time_in_turn([lambda: done.append(1), lambda: done.append(2)], budget=0.0)
        assert len(spent) == 2
        assert done == [1, 2] * (1 + calibration.MIN_ROUNDS)
