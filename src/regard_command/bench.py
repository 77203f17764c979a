"""`regard bench`: predicted and measured times of the kernels, and calibration of the predictions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from regard_command.command_error import CommandError
from regard_command.stdio import emit

if TYPE_CHECKING:
    from regard.kernels.planning.rates import FlashRates, Rates
    from regard_command.kernel_tables import ProblemTimings


def bench(
    calibrate: Annotated[
        bool, typer.Option("--calibrate", help="Measure this machine, about 10 seconds, and keep what was measured.")
    ] = False,
    agreement: Annotated[
        bool, typer.Option("--agreement", help="Compare the kernels' results with those of an oracle in float64.")
    ] = False,
    device: Annotated[
        str, typer.Option(help="With --agreement and --calibrate: the device, such as cpu, cuda or cuda:1.")
    ] = "cpu",
    cases: Annotated[int, typer.Option(min=1, help="With --agreement: the most cases of each kernel.")] = 50,
    choices: Annotated[
        bool, typer.Option("--choices", help="Measure on 100 problems whether the chosen kernel is the fastest.")
    ] = False,
    units: Annotated[
        bool, typer.Option("--units", help="Fit the prices of the units of work to times measured on these problems.")
    ] = False,
    part: Annotated[str, typer.Option(metavar="I/N", help="With --choices: the I-th of N parts of them.")] = "1/1",
    seed: Annotated[int, typer.Option(min=0, help="With --choices: 0 for the usual problems, or other ones.")] = 0,
) -> None:
    """Show how the kernels are chosen.

    Prints the rates in use, measured or defaults, and a table of problems and kernels: the time that the rates predict
    and the time that is measured. With --calibrate it measures the rates instead, and keeps them in the user's cache.

    With --agreement it computes cases of all masks, biases, layouts and dtypes on a device, forward and backward, and
    prints the largest error of each kernel as a share of what is allowed; the exit code is 1 if a kernel is wrong.

    With --choices it times the kernels on 100 problems of all kinds, in one to two minutes, and prints how often the
    chosen one takes at most 1.2 times the fastest one's time. REGARD_NATIVE=avx2, plain or off forces a variant of the
    native code.

    With --units it times them likewise, and prints each price of kernels/planning/unit_prices.json beside the one that
    fits the times best: a price that is far off, of many measurements, is worth a look.
    """
    commands = {"--agreement": agreement, "--calibrate": calibrate, "--choices": choices, "--units": units}
    asked = [name for name, is_asked in commands.items() if is_asked]
    if len(asked) > 1:
        raise CommandError(f"{' and '.join(asked)} are {len(asked)} commands: leave all but one out")
    if agreement:
        _compare(device, cases)
    elif choices:
        _show_choices(part, seed)
    elif units:
        _show_units(part, seed)
    elif calibrate:
        _calibrate(device)
    else:
        _show()


def _compare(name: str, most: int) -> None:
    from regard_command.kernel_tables import checked_device, measured_agreements

    device, faults = checked_device(name), []
    emit([f"{'kernel':<12} {'cases':>5} {'error / budget':>15}  worst case"])
    for row in measured_agreements(device, most):
        share = f"{row.worst:.2f}" if row.cases else ""
        emit([f"{row.kernel:<12} {row.cases:>5} {share:>15}  {row.worst_case or 'none that it computes on ' + name}"])
        faults += row.faults
    if faults:
        emit(["", *faults])
        raise typer.Exit(1)


def _calibrate(name: str) -> None:
    from regard.kernels.planning.calibration import measure
    from regard.kernels.planning.rates import cache_file, make_folder, save_rates
    from regard_command.kernel_tables import checked_device

    device = checked_device(name).type
    path = cache_file(device)
    make_folder(path)  # fails now, not after ten seconds of measuring
    typer.echo("measuring; other work on this machine would falsify it", err=True)
    measured = measure(device=device)
    save_rates(measured, path, device)
    emit([*_lines(measured, device), f"written to {path}"])


def _show_choices(part: str, seed: int) -> None:
    from regard import native
    from regard.kernels.planning.rates import rates_in_use
    from regard_command.kernel_choices import GOAL, WITHIN, grid, measured_choices, part_of

    problems = part_of(grid(seed), part)
    emit([rates_in_use().origin, f"native code: {native.variant_in_use() or 'none'}", ""])
    emit([f"{'problem':<56} {'chosen':<12} {'predicted':>10} {'measured':>10}  {'fastest':<12} {'factor':>6}"])
    found = []
    for choice in measured_choices(problems):
        found.append(choice)
        times = f"{choice.predicted[choice.chosen] * 1e3:7.2f} ms {choice.measured[choice.chosen] * 1e3:7.2f} ms"
        emit([f"{choice.problem!s:<56} {choice.chosen:<12} {times}  {choice.fastest:<12} {choice.factor:6.2f}"])
    within = sum(choice.factor <= WITHIN for choice in found)
    emit(["", f"within {WITHIN} times of the fastest: {within} of {len(found)} problems (goal: {GOAL:.0%})"])


def _show_units(part: str, seed: int) -> None:
    from regard.kernels.planning.rates import rates_in_use
    from regard_command.kernel_choices import grid, measured_choices, part_of
    from regard_command.unit_fit import fitted_prices

    emit([rates_in_use().origin, "", f"{'price':<32} {'in use':>10} {'fitted':>10} {'factor':>7} {'measurements':>13}"])
    for row in fitted_prices(list(measured_choices(part_of(grid(seed), part)))):
        factor = row.fitted / row.used
        emit([f"{row.name:<32} {row.used:10,.4g} {row.fitted:10,.4g} {factor:7.2f} {row.measurements:13,}"])


def _show() -> None:
    from regard.kernels.planning.rates import rates_in_use
    from regard_command.kernel_tables import measured_timings

    used = rates_in_use()
    emit([used.origin, *_lines(used.rates), ""])
    emit([f"{'problem':<34} {'kernel':<12} {'predicted':>10} {'measured':>10} {'ratio':>6}"])
    for timings in measured_timings():
        emit(_rows(timings))


def _lines(rates: Rates, device: str = "cpu") -> list[str]:
    from regard.kernels.planning.rates import Machine

    machine = Machine.here(device)
    return [
        f"  {machine.processor}, threads: {machine.threads}, torch {machine.torch}",
        f"  matrix products  {rates.flops / 1e9:10,.1f} GFLOP/s a thread, float32",
        f"  passes in cache  {rates.passes / 1e9:10,.2f} G numbers/s a thread",
        f"  main memory      {rates.moved / 1e9:10,.1f} GB/s read, beyond {rates.cache / 2**20:,.0f} MiB of cache",
        f"  new memory       {rates.fresh / 1e9:10,.1f} GB/s handed out",
        f"  a call           {rates.call / 1e-6:10,.2f} µs",
        f"  {'flash kernels, a thread':<32}{'GFLOP/s':>9}{'pairs':>9}{'packed':>9}{'streamed':>9}  backward  memory",
        *(line for backend, by_dtype in rates.flash.items() for line in _flash_lines(backend, by_dtype)),
    ]


def _flash_lines(name: str, by_dtype: dict[str, FlashRates]) -> list[str]:
    """A line for each dtype: billions a second, the backward pass in forward passes, and GB/s of main memory."""
    return [
        f"    {name:<8} {dtype:<19}{rates.flops / 1e9:9,.1f}{rates.pairs / 1e9:9,.2f}{rates.packed / 1e9:9,.2f}"
        f"{rates.streamed / 1e9:9,.2f}  {rates.backward:8.2f} {rates.moved / 1e9:7,.1f}"
        for dtype, rates in by_dtype.items()
    ]


def _rows(timings: ProblemTimings) -> list[str]:
    """A line for each kernel; an arrow marks the chosen one."""
    return [
        f"{timings.problem if first else '':<34} {'-> ' if row.chosen else '   '}{row.kernel:<9} "
        f"{row.predicted * 1e3:7.2f} ms {row.measured * 1e3:7.2f} ms {row.predicted / row.measured:6.2f}"
        for first, row in zip([True] + [False] * len(timings.rows), timings.rows, strict=False)
    ]
