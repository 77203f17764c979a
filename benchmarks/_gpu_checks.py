"""What is right on a GPU before anything is timed: agreement with float64, waits for the device, and plans."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import _report
import torch
from _gpu_report import OutOfTimeError, Report, at_most, described
from _gpu_timing import difference
from _gpu_work import OURS, Place, Work, plain, way

import regard
from regard import biases, lenses, masks, normalizers
from regard.kernels import KERNELS, Kernel
from regard.testing import Case, cases, long_cases, measure_agreement, suite

Left = Callable[[], float]
"""The seconds that are left of a section."""
CALLS = {"forward": 25, "with gradients": 60}
"""The most microseconds that a call may take beyond torch's, on the host."""


def agreement(report: Report, left: Left, device: str = "cuda") -> None:
    """Every kernel that computes on the device against the oracle in float64: more cases while time allows."""
    report.columns("kernel", "cases", "wrong", "largest error, as a share of its budget", "first fault")
    for number, kernel in enumerate(KERNELS):
        report.row(*agrees(kernel, left() / (len(KERNELS) - number), device))


def agrees(kernel: Kernel, seconds: float, device: str) -> list[str]:
    """The cells of a kernel, after as many cases as it computes in these seconds, the short ones first."""
    ends, shares, faults = time.monotonic() + seconds, list[float](), list[str]()
    for _, case in suite([kernel], among=more_and_more(), device=device):
        try:
            with at_most(ends - time.monotonic()):
                found = measure_agreement(kernel, case, device)
        except OutOfTimeError:
            break
        except Exception as error:
            shares.append(math.inf)
            faults.append(f"{case.id}: {described(error)}")
        else:
            shares.append(found.worst)
            faults += [f"{case.id}: {fault.splitlines()[0][:200]}" for fault in found.faults[:1]]
    if not shares:
        return [kernel.name, "0", "", "", ""]
    worst = max((share for share in shares if share <= 1), default=math.nan)
    return [kernel.name, f"{len(shares)}", f"{len(faults)}", f"{worst:.2f}", "".join(faults[:1])]


def more_and_more() -> Iterator[Case]:
    """Cases, few and short ones first."""
    yield from cases(1)
    yield from long_cases()
    yield from cases(2)


def public_calls() -> Iterator[tuple[str, Work]]:
    """Calls whose inputs and masks are on the device."""
    query, key, value = torch.randn(3, 2, 8, 512, 64, device="cuda", dtype=torch.bfloat16).unbind()
    lengths = masks.padding(lengths=torch.tensor([512, 300], device="cuda"))
    causal, window = masks.causal(), masks.causal() & masks.window(before=127)
    calls: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"mask": causal},
        "window": {"mask": window},
        "padding": {"mask": lengths},
        "mask of a tensor": {"mask": torch.ones(512, 512, dtype=torch.bool, device="cuda").tril()},
        "ALiBi": {"mask": causal, "bias": biases.alibi(8)},
        "softcap": {"mask": causal, "softcap": 30.0},
        "dropout": {"mask": causal, "dropout_p": 0.1},
        "sinks": {"sinks": torch.zeros(8, device="cuda")},
        "sigmoid": {"mask": causal, "normalizer": normalizers.Sigmoid()},
        "chosen keys": {"mask": causal & masks.chosen(torch.randint(512, (2, 1, 512, 64), device="cuda"))},
        "entmax-1.5": {"mask": causal, "normalizer": normalizers.Entmax(1.5)},
        "entmax-1.3": {"mask": causal, "normalizer": normalizers.Entmax(1.3)},
    }
    for name, options in calls.items():
        yield name, lambda options=options: regard.attention(query, key, value, **options)
    yield "decoding", lambda: regard.attention(query[:, :, -1:], key, value, mask=causal)
    yield "observe", lambda: regard.observe(query, key, value, lenses.Received(), mask=causal).output
    yield "linear attention", lambda: regard.linear_attention(query, key, value, causal=True)


def waits(report: Report, left: Left) -> None:
    """Whether the host waits for the device in a call, and whether a CUDA graph of it gives the same numbers."""
    report.columns("call", "the host waits", "replayed from a CUDA graph")
    for name, call in public_calls():
        waited = outcome(waiting, call)
        # A failed capture would spoil what comes after it.
        report.row(name, waited, outcome(replayed, call) if waited == NO else "not captured")


NO = "no"


def outcome(check: Callable[[Work], str], call: Work) -> str:
    """What a check says, or its error."""
    try:
        return check(call)
    except Exception as error:
        return described(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waiting(call: Work) -> str:
    """Checked in a second call: the first one compiles, and builds what is kept."""
    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    call()
    return NO


def replayed(call: Work) -> str:
    """Dropout draws a seed in each call, and in each replay another one than before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    expected, again = call(), call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    output.zero_()
    graph.replay()
    return f"differs by {difference(output, expected):.2g}" if expected.equal(again) else "yes, by other random numbers"


def calls(report: Report, left: Left) -> None:
    """What a small call takes on the host, beyond torch's operator."""
    report.columns("small call", "SDPA", "regard", "more", "at most")
    for gradients in (False, True):
        sides = plain(1, 16, True, gradients, Place())
        spent = {name: host_microseconds(side) for name, side in sides.items()}
        more, most = spent[OURS] - spent["SDPA"], CALLS[way(gradients)]
        cells = [f"{spent[name]:.0f} µs" for name in ("SDPA", OURS)]
        report.row(f"(1, 16, 16, 128), {way(gradients)}", *cells, f"{more:.0f} µs", _report.met(more, most, most=True))


def host_microseconds(work: Work, count: int = 200) -> float:
    """The time of the host for a call of which the device takes less."""
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            work()
        rounds.append((time.perf_counter() - began) / count * 1e6)
    torch.cuda.synchronize()
    return statistics.median(rounds)


def explained(report: Report, left: Left) -> None:
    """What is chosen for a few problems, and why nothing else is."""
    query, key, value = torch.randn(3, 2, 8, 1024, 64, device="cuda", dtype=torch.bfloat16).unbind()
    problems: dict[str, dict[str, Any]] = {
        "causal": {"mask": masks.causal()},
        "a causal window with ALiBi": {"mask": masks.causal() & masks.window(before=127), "bias": biases.alibi(8)},
        "dropout and softcap": {"mask": masks.causal(), "dropout_p": 0.1, "softcap": 30.0},
    }
    plans = {name: regard.explain(query, key, value, **options) for name, options in problems.items()}
    plans["one query"] = regard.explain(query[:, :, -1:], key, value, mask=masks.causal())
    plans["float64"] = regard.explain(query.double(), key.double(), value.double())
    for name, plan in plans.items():
        report.line(f"\n{name}:\n")
        report.line("\n".join(f"    {line}".rstrip() for line in str(plan).splitlines()))
