"""Recurrences beside the delta rules, from Mamba-1 to MesaNet and DeltaFormer, against their loops over the steps.

    python benchmarks/recurrences.py [--quick]

The loop is the formula, a step at a time. Goal: less time than the loop at every length, forward and with gradients.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import _timing
import torch
from _report import agree, gradients, met, milliseconds, table, times
from torch import Tensor

from regard.linear import (
    delta_former,
    log_linear_attention,
    mesa_attention,
    selective_scan,
    slot_attention,
    trapezoidal_attention,
)

HEADS, DIM, SLOTS, CHANNELS, STATES, ROUNDS, LONGEST = 4, 64, 32, 256, 16, 5, 4096
LENGTHS = (16, 128, 1024, 4096)
Named = dict[str, Tensor]


def inputs(n: int) -> Named:
    """The tensors of one sequence of n tokens."""
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, n, DIM).unbind()
    keep = (torch.randn(1, HEADS, n, SLOTS) + 2).sigmoid()
    found = {"query": query, "key": key, "value": value, "slots": 1 - keep, "fading": keep.log()}
    found |= {"levels": torch.rand(1, HEADS, n, 13), "decay": -torch.rand(1, HEADS, n) / 8}
    found |= {"blend": torch.rand(1, HEADS, n), "size": torch.rand(1, HEADS, n)}
    found |= {"unit key": torch.nn.functional.normalize(key, dim=-1), "ridge": torch.full((HEADS, DIM), 0.5)}
    found |= {"C": torch.randn(1, n, STATES), "B": torch.randn(1, n, STATES), "x": torch.randn(1, n, CHANNELS)}
    found |= {"step": torch.rand(1, n, CHANNELS) / 8, "rates": -torch.arange(1.0, STATES + 1).repeat(CHANNELS, 1)}
    return found


def channels(given: Named) -> Tensor:
    return selective_scan(given["C"], given["B"], given["x"], step=given["step"], rates=given["rates"])


def channels_by_steps(given: Named) -> Tensor:
    state, rows = torch.zeros(1, CHANNELS, STATES), []
    for query, key, value, step in zip(*(given[name].unbind(1) for name in ("C", "B", "x", "step")), strict=True):
        state = torch.exp(step.unsqueeze(-1) * given["rates"]) * state + (step * value).unsqueeze(-1) * key.unsqueeze(1)
        rows.append((state @ query.unsqueeze(-1)).squeeze(-1))
    return torch.stack(rows, 1)


def trapezoidal(given: Named) -> Tensor:
    rows = (given[name] for name in ("query", "key", "value"))
    return trapezoidal_attention(*rows, step=given["size"], decay=given["decay"], blend=given["blend"])


def trapezoidal_by_steps(given: Named) -> Tensor:
    state, before, rows = torch.zeros(1, HEADS, DIM, DIM), torch.zeros(1, HEADS, DIM, DIM), []
    factors = given["decay"].exp()[..., None, None]
    first, second = ((given["size"] * share)[..., None, None] for share in (1 - given["blend"], given["blend"]))
    for t in range(given["query"].shape[2]):
        added = given["key"][:, :, t, :, None] * given["value"][:, :, t, None]
        state = factors[:, :, t] * (state + first[:, :, t] * before) + second[:, :, t] * added
        rows.append(given["query"][:, :, t, None] @ state)
        before = added
    return torch.cat(rows, 2)


def slots(given: Named) -> Tensor:
    return slot_attention(*(given[name] for name in ("query", "key", "value", "slots", "fading")))


def slots_by_steps(given: Named) -> Tensor:
    keys, values, rows = torch.zeros(1, HEADS, SLOTS, DIM), torch.zeros(1, HEADS, SLOTS, DIM), []
    fading = given["fading"].exp()
    for t in range(given["query"].shape[2]):
        fade, share = fading[:, :, t, :, None], given["slots"][:, :, t, :, None]
        keys = fade * keys + share * given["key"][:, :, t, None]
        values = fade * values + share * given["value"][:, :, t, None]
        scores = given["query"][:, :, t, None] @ keys.mT / DIM**0.5
        rows.append(scores.softmax(-1) @ values)
    return torch.cat(rows, 2)


def levels(given: Named) -> Tensor:
    rows = (given[name] for name in ("query", "key", "value"))
    return log_linear_attention(*rows, levels=given["levels"], decay=given["decay"])


def levels_by_steps(given: Named) -> Tensor:
    """One state for each level: those of the blocks that end at t, joined where t has a bit more."""
    states: list[Tensor | None] = [None] * 14
    rows, factors = [], given["decay"].exp()[..., None, None]
    for t in range(given["query"].shape[2]):
        if t:
            level = (t & -t).bit_length()  # the blocks of the levels below join to one of this
            joined = [state for state in states[:level] if state is not None]
            states[:level] = [None] * level
            states[level] = torch.stack(joined).sum(0)
        states = [None if state is None else factors[:, :, t] * state for state in states]
        states[0] = given["key"][:, :, t, :, None] * given["value"][:, :, t, None]
        there = [(level, state) for level, state in enumerate(states) if state is not None]
        read = torch.stack([given["levels"][:, :, t, level, None, None] * state for level, state in there]).sum(0)
        rows.append(given["query"][:, :, t, None] @ read / DIM**0.5)
    return torch.cat(rows, 2)


def regression(given: Named) -> Tensor:
    query, key, value, ridge = (given[name] for name in ("query", "unit key", "value", "ridge"))
    return mesa_attention(query, key, value, ridge=ridge, decay=given["decay"])


def regression_by_steps(given: Named) -> Tensor:
    products, sums, rows = torch.diag_embed(0 * given["ridge"]), torch.zeros(1, HEADS, DIM, DIM), []
    ridge, factors = torch.diag_embed(given["ridge"]), given["decay"].exp()[..., None, None]
    for t in range(given["query"].shape[2]):
        key = given["unit key"][:, :, t, :, None]
        products = factors[:, :, t] * products + key * key.mT
        sums = factors[:, :, t] * sums + key * given["value"][:, :, t, None]
        rows.append(torch.linalg.solve(products + ridge, given["query"][:, :, t, :, None]).mT @ sums)
    return torch.cat(rows, 2)


def corrections(given: Named) -> Tensor:
    return delta_former(given["query"], given["key"], given["value"], beta=given["blend"])


def corrections_by_steps(given: Named) -> Tensor:
    query, key, value, beta = (given[name] for name in ("query", "key", "value", "blend"))
    corrected, rows = value[:, :, :0], []
    for t in range(query.shape[2]):
        scores = query[:, :, t, None] @ key[:, :, : t + 1].mT / DIM**0.5
        read = scores[..., :-1].softmax(-1) @ corrected if t else torch.zeros_like(value[:, :, :1])
        corrected = torch.cat([corrected, value[:, :, t, None] - beta[:, :, t, None, None] * read], 2)
        rows.append(scores.softmax(-1) @ corrected)
    return torch.cat(rows, 2)


CASES: dict[str, tuple[Callable[[Named], Tensor], Callable[[Named], Tensor], tuple[str, ...]]] = {
    f"Mamba-1, {CHANNELS} channels of {STATES} states": (channels, channels_by_steps, ("C", "B", "x", "step")),
    f"Mamba-3, {HEADS} heads of {DIM}": (trapezoidal, trapezoidal_by_steps, ("query", "key", "value", "blend")),
    f"slots, {HEADS} heads of {DIM}, {SLOTS} slots": (slots, slots_by_steps, ("query", "key", "value", "slots")),
    f"log-linear, {HEADS} heads of {DIM}": (levels, levels_by_steps, ("query", "key", "value", "levels")),
    f"MesaNet, {HEADS} heads of {DIM}": (regression, regression_by_steps, ("query", "unit key", "value", "ridge")),
    f"DeltaFormer, {HEADS} heads of {DIM}": (corrections, corrections_by_steps, ("query", "key", "value", "blend")),
}


def compared(lengths: tuple[int, ...], *, backward: bool) -> None:
    """A row for each recurrence: what is here, and how many times as long its loop takes."""
    rows = []
    for name, (ours, by_steps, leaves) in CASES.items():
        row, least = [name], float("inf")
        for n in lengths:
            given = inputs(n)
            agree(name, [ours(given)], [by_steps(given)])
            if backward:
                given |= {leaf: given[leaf].requires_grad_() for leaf in leaves}
            needed = [given[leaf] for leaf in leaves]

            def run(work: Callable[[Named], Tensor], given: Named = given, needed: list[Tensor] = needed) -> object:
                return gradients(work(given), needed) if backward else work(given)

            works = {"here": lambda run=run, ours=ours: run(ours), "loop": lambda run=run, loop=by_steps: run(loop)}
            rounds, calls = (ROUNDS, max(1, 128 // n)) if n < LONGEST else (3, 1)
            spent = _timing.in_turn(works, rounds=rounds, calls=calls, clock=time.thread_time)
            least = min(least, spent["loop"] / spent["here"])
            row += [milliseconds(spent["here"]), times(spent["loop"] / spent["here"])]
        rows.append([*row, met(least, 1.0)])
    what = "forward and backward" if backward else "forward"
    columns = [column for n in lengths for column in (f"n = {n:,}", "loop / here")]
    table(f"Recurrences, {what} (`benchmarks/recurrences.py`)", ["", *columns, "goal"], rows)


def main() -> None:
    lengths = LENGTHS[:3] if "--quick" in sys.argv else LENGTHS
    torch.set_num_threads(1)
    print(_timing.machine())
    for backward in (False, True):
        compared(lengths, backward=backward)


if __name__ == "__main__":
    main()
