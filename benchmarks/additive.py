"""Additive scores: weight · tanh(q + k) for each pair and feature.

Peer: the broadcast formula, with a tanh for each feature of each pair in memory. The limit for native code is the
machine's rate of multiply-adds, five or so a feature; what is named is the rate of features.

bfloat16 and float16, on one thread: native code reads them as they are, and what a pair costs, a share of a division
for each feature, is float32 in all dtypes. The kernel is timed alone, and with the projections: torch's products.
"""

from copy import deepcopy
from functools import partial
from typing import Any

import _timing
import torch
from _memory import answer, peak
from _report import agree, gradients, mebibytes, met, milliseconds, table, times
from torch import Tensor

import regard
from regard import native

N, LONG, DIM, ROUNDS = 1024, 16384, 128, 5
HALVES, N_OF_HALVES = (torch.bfloat16, torch.float16), 512


def inputs(n: int, *, gradient: bool = True) -> tuple[regard.scores.Additive, list[Tensor]]:
    """A score whose projections are small beside the pairs, and query, key and value."""
    torch.manual_seed(0)
    score = regard.scores.Additive(DIM, DIM, DIM).requires_grad_(gradient)
    return score, [tensor.requires_grad_(gradient) for tensor in torch.randn(3, 1, n, DIM).unbind()]


def broadcast(score: regard.scores.Additive, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    sums = score.project_query(query).unsqueeze(-2) + score.project_key(key).unsqueeze(-3)  # [1, n, n, 128]
    return (sums.tanh() @ score.weight).softmax(-1) @ value


def training(n: int, kernel: str | None = None) -> Any:
    score, tensors = inputs(n)
    asked = [*tensors, *score.parameters()]
    return lambda: gradients(regard.attention(*tensors, score=score, kernel=kernel), asked)


def training_broadcast(n: int) -> Any:
    score, tensors = inputs(n)
    return lambda: gradients(broadcast(score, *tensors), [*tensors, *score.parameters()])


PEAKS = {"regard": training, "broadcast": training_broadcast}


def errors(kernels: list[str]) -> dict[str, float]:
    """The largest error of each against float64, of one in which the broadcast formula in float32 has its own."""
    score, tensors = inputs(256, gradient=False)
    single = broadcast(score, *tensors)
    results = {kernel: regard.attention(*tensors, score=score, kernel=kernel) for kernel in kernels}
    true = broadcast(score.double(), *(tensor.double() for tensor in tensors))
    worst = (single - true).abs().max().item()
    return {kernel: (result - true).abs().max().item() / worst for kernel, result in results.items()}


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sides_of_halves(n: int, *, gradient: bool) -> dict[str, dict[str, Any]]:
    """The kernel alone, attention with its projections, and the formula: the work of each in each dtype."""
    score, tensors = inputs(n, gradient=False)
    works: dict[str, dict[str, Any]] = {"the kernel": {}, "with projections": {}, "formula": {}}
    for dtype in (torch.float32, *HALVES):
        own = deepcopy(score).to(dtype).requires_grad_(gradient)
        leaves = [tensor.to(dtype).requires_grad_(gradient) for tensor in tensors]
        plan = regard.explain(*leaves, score=own)
        assert plan.kernel.name == "additive", plan
        attends = {
            "the kernel": (
                lambda plan=plan: plan.kernel.run(plan.problem).output,
                [plan.problem.pairs.query, leaves[2]],
            ),
            "with projections": (partial(regard.attention, *leaves, score=own), [*leaves, *own.parameters()]),
            "formula": (partial(broadcast, own, *leaves), [*leaves, *own.parameters()]),
        }
        for side, (attend, asked) in attends.items():
            works[side][name_of(dtype)] = (
                attend
                if not gradient
                else lambda attend=attend, asked=asked: torch.autograd.grad(
                    output := attend(), asked, output.detach(), retain_graph=True
                )
            )
    return works


def halves(n: int, rounds: int) -> None:
    """bfloat16 and float16 beside float32 and the formula."""
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    for way in ("forward", "forward and backward"):
        works = sides_of_halves(n, gradient=way != "forward")
        spent = {}
        for side, by_dtype in works.items():
            results = [[found] if isinstance(found := work(), Tensor) else found for work in by_dtype.values()]
            for dtype, result in zip(by_dtype, results, strict=True):
                agree(f"{side}, {way}, {dtype}", [of.float() for of in result], results[0], within=3e-2)
            spent[side] = _timing.in_turn(by_dtype, rounds=rounds if side != "formula" else 3)
        for side in ("the kernel", "with projections"):
            own, base = spent[side], spent[side]["float32"]
            ratios = [f"{base / own[name_of(dtype)]:.2f}" for dtype in HALVES]
            beside = [f"{spent['formula'][name] / own[name]:.0f}" if side != "the kernel" else "" for name in own]
            rows.append([way, side, f"{base * 1e3:.2f} ms", *ratios, *beside])
    torch.set_num_threads(threads)
    formula = [f"formula's {name_of(dtype)}" for dtype in (torch.float32, *HALVES)]
    columns = ["way", "what", "float32", "bfloat16: times as fast", "float16", *formula]
    table(f"Additive scores in 16 bits, n = {n:,}, d = {DIM}, one thread", columns, rows)
    print("\nThe last columns: the formula's time over ours in that dtype.")


def main(n: int = N, long: int = LONG) -> None:
    print(_timing.machine())
    kernels = {"tiled": (7.0, None)} if native.why_not() else {"additive": (50.0, 20.0), "tiled": (7.0, None)}
    memory = {"long": peak("regard", long), "regard": peak("regard", n), "broadcast": peak("broadcast", n)}
    off = errors(list(kernels))
    score, tensors = inputs(n, gradient=False)
    works: dict[str, Any] = {"broadcast": lambda: broadcast(score, *tensors)}
    both: dict[str, Any] = {"broadcast": training_broadcast(n)}
    for kernel in kernels:
        works[kernel] = partial(regard.attention, *tensors, score=score, kernel=kernel)
        both[kernel] = training(n, kernel)
        agree(f"{kernel}, forward", [works[kernel]()], [works["broadcast"]()])
        agree(f"{kernel}, backward", both[kernel](), both["broadcast"](), within=1e-3)
    rows = []
    for way, raced in (("forward", works), ("forward and backward", both)):
        spent = _timing.in_turn(raced, rounds=ROUNDS)
        for kernel, goals in kernels.items():
            ratio, goal = spent["broadcast"] / spent[kernel], goals[way != "forward"]
            row = [way, kernel, milliseconds(spent["broadcast"]), milliseconds(spent[kernel]), times(ratio)]
            rows.append([*row, met(ratio, goal) if goal else "", f"{n * n * DIM / spent[kernel] / 1e9:,.1f} G/s"])
    columns = ["way", "kernel", "broadcast", "regard", "ratio", "goal", "features of pairs"]
    table(f"Additive scores, n = {n:,}, d = {DIM}, float32 (`benchmarks/additive.py`)", columns, rows)
    print("\nErrors, of the broadcast formula's own in float32 (goal ≤ 5): ", end="")
    print(", ".join(f"{kernel} {each:.2f}" for kernel, each in off.items()) + ".", end=" ")
    print(f"Peaks forward and backward: {mebibytes(memory['regard'])}, broadcast {mebibytes(memory['broadcast'])}.")
    spent = _timing.seconds(training(long), 1)
    within = "yes" if memory["long"] < 1e9 else "**no**"
    print(
        f"\nn = {long:,}, forward and backward: {spent:.1f} s, peak {mebibytes(memory['long'])} (below 1 GB: {within})."
    )
    if reason := native.why_not():
        print(f"There is no native code: {reason}")
    else:
        halves(min(n, N_OF_HALVES), ROUNDS)


if __name__ == "__main__" and not answer(PEAKS):
    main()
