"""Generalised delta rules against the plain one, loops, torch's chunks, softmax attention and transformers' layer.

    python benchmarks/delta_rules.py [--quick]

The plain delta rule removes the value of the key that it writes; a removal is one more product of keys and one more
gradient, and a beta for each feature a product with the keys. Two steps a token are a sequence of twice the length.
Goals: a removal takes at most 1.25 of the plain rule's time, two steps at most 2.4, and everything less than the loop.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import _timing
import torch
from _report import agree, gradients, met, milliseconds, table, times
from torch import Tensor

import regard
from regard import masks
from regard.linear import (
    DeltaRule,
    Identity,
    LinearState,
    SoftplusDecay,
    delta_product,
    linear_attention_with_state,
    naive,
)
from regard.nn import (
    GroupedValueProjections,
    L2Norm,
    LinearAttention,
    LinearCache,
    OutputGate,
    RMSNorm,
    ShortConvolution,
)

HEADS, DIM, ROUNDS, LONGEST_LOOP = 8, 64, 9, 1024
LENGTHS = (16, 64, 256, 1024, 4096, 16384)
RAW: dict[str, Any] = {"feature_map": Identity(), "normalize": False, "causal": True, "scale": 1.0}
LEAVES, STEP_LEAVES = ("query", "key", "value"), ("query", "keys of steps", "values of steps")
Work = Callable[[], Any]


def inputs(n: int, decay: str = "head") -> dict[str, Tensor]:
    """Queries, unit keys and removals, values, and the gates of n tokens."""
    torch.manual_seed(0)
    rows = (1, HEADS, n)
    query, key, removal = torch.nn.functional.normalize(torch.randn(3, *rows, DIM), dim=-1).unbind()
    found = {"query": query, "key": key, "value": torch.randn(*rows, DIM), "removal": removal}
    found["decay"] = -torch.rand(*rows, *([DIM] if decay == "feature" else [])) / 8
    found["beta"], found["beta of features"] = torch.rand(rows), torch.rand(*rows, DIM)
    found["keys of steps"], found["values of steps"] = torch.stack([key, removal], -2), torch.randn(*rows, 2, DIM)
    return found


RULES = {
    "plain": ("query", "key", "value", "decay", "beta"),
    "removal": ("query", "key", "value", "decay", "beta", "removal"),
    "beta per feature": ("query", "key", "value", "decay", "beta of features"),
}


def chosen(rule: str, given: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removesuffix(" of features"): given[name] for name in RULES[rule]}


def ours(rule: str, given: dict[str, Tensor]) -> Callable[..., Tensor]:
    return partial(regard.linear_attention, **chosen(rule, given), **RAW)


def by_torch(rule: str, given: dict[str, Tensor]) -> Callable[..., Tensor]:
    """The same in chunks of torch's operators, without the backend."""
    work = ours(rule, given)

    def run() -> Tensor:
        with mock.patch("regard.linear.recurrence._maker", return_value=None):
            return work()

    return run


def loop(given: dict[str, Tensor]) -> Callable[..., Tensor]:
    return lambda: naive.step_recurrence(**chosen("removal", given))[0]


def two_steps(given: dict[str, Tensor]) -> Callable[..., Tensor]:
    """DeltaProduct of two steps."""
    query, key, value = (given[name] for name in STEP_LEAVES)
    beta = given["beta"].unsqueeze(-1).expand(key.shape[:-1])
    return lambda: delta_product(query, key, value, beta=beta, decay=given["decay"], scale=1.0)


def softmax(given: dict[str, Tensor]) -> Callable[..., Tensor]:
    return lambda: regard.attention(given["query"], given["key"], given["value"], mask=masks.causal())


def works(n: int, decay: str, *, backward: bool) -> dict[str, Work]:
    given = inputs(n, decay)
    found = {rule: ours(rule, given) for rule in RULES} | {
        "two steps": two_steps(given),
        "torch": by_torch("removal", given),
        "softmax": softmax(given),
    }
    if n <= LONGEST_LOOP:
        found["loop"] = loop(given)
        agree("removal", [found["removal"](), found["torch"]()], [found["loop"]()] * 2)
    if not backward:
        return found
    for name in {*LEAVES, *STEP_LEAVES}:
        given[name].requires_grad_()
    needed = {name: [given[leaf] for leaf in (STEP_LEAVES if name == "two steps" else LEAVES)] for name in found}
    return {name: lambda run=run, name=name: gradients(run(), needed[name]) for name, run in found.items()}


def sequences(lengths: tuple[int, ...], decay: str, *, backward: bool) -> None:
    rows = []
    for n in lengths:
        calls = max(1, 512 // n)
        spent = _timing.in_turn(works(n, decay, backward=backward), rounds=ROUNDS, calls=calls)
        plain, removal = spent["plain"], spent["removal"]
        row = [f"{n:,}", milliseconds(plain), milliseconds(removal), times(removal / plain)]
        row += [times(spent[name] / plain) for name in ("beta per feature", "two steps")]
        row += [times(spent[name] / removal) if name in spent else "" for name in ("torch", "loop", "softmax")]
        limits = [(removal / plain, 1.25), (spent["two steps"] / plain, 2.4)] if n >= 256 else []
        fast = all(value <= goal for value, goal in limits) and spent.get("loop", removal) >= removal
        rows.append([*row, "yes" if fast else "**no**"])
    what = "forward and backward" if backward else "forward"
    title = f"Delta rules, decay per {decay}, {HEADS} heads of {DIM}, {what} (`benchmarks/delta_rules.py`)"
    of_plain = ["removal / plain", "beta per feature / plain", "two steps / plain"]
    of_removal = ["torch's chunks / removal", "loop / removal", "causal softmax / removal"]
    table(title, ["n", "plain", "removal", *of_plain, *of_removal, "goals"], rows)


def tokens() -> None:
    """One token by a cache: the plain rule and a removal, over a state in the processor's cache."""
    rows = []
    for batch in (1, 8):
        torch.manual_seed(0)
        query, key, removal = torch.nn.functional.normalize(torch.randn(3, batch, HEADS, 1, DIM), dim=-1).unbind()
        value, beta = torch.randn(batch, HEADS, 1, DIM), torch.rand(batch, HEADS, 1)
        state = LinearState(torch.randn(batch, HEADS, DIM, DIM))
        gates = {"decay": -torch.rand(batch, HEADS, 1) / 8, "beta": beta}
        found = linear_attention_with_state(query, key, value, state=state, removal=removal, **gates, **RAW)
        exact = naive.step_recurrence(query, key, value, state=state.sums, removal=removal, **gates)
        agree("one token", (found[0], found[1].sums), exact)

        def decoding(options: dict[str, Any], q: Tensor = query, k: Tensor = key, v: Tensor = value) -> Work:
            caches = [LinearCache(Identity(), False, LinearState(torch.randn(len(q), HEADS, DIM, DIM)), 1)]

            def run() -> None:
                caches.append(caches.pop().attend(q, k, v, **options)[1])

            return run

        spent = _timing.in_turn(
            {"plain": decoding(gates), "removal": decoding(gates | {"removal": removal})}, rounds=31, calls=32
        )
        ratio = spent["removal"] / spent["plain"]
        times_of = [f"{spent[name] * 1e6:,.1f} µs" for name in ("plain", "removal")]
        rows.append([f"{batch} × {HEADS} × {DIM} × {DIM}", *times_of, times(ratio), met(ratio, 1.25, most=True)])
    table("One token by a cache", ["state", "plain", "removal", "ratio", "goal"], rows)


def layers() -> None:
    """The block of Qwen3-Next here and in transformers, eager; tests/nn/test_linear_blocks.py holds them equal."""
    from transformers.cache_utils import DynamicCache
    from transformers.models.qwen3_next import configuration_qwen3_next, modeling_qwen3_next

    dim, heads, key_heads = 1024, 8, 4
    config = configuration_qwen3_next.Qwen3NextConfig(
        hidden_size=dim, num_hidden_layers=4, linear_num_value_heads=heads, linear_num_key_heads=key_heads
    )
    theirs = modeling_qwen3_next.Qwen3NextGatedDeltaNet(config, 0).eval()
    sizes = {"num_key_heads": key_heads, "head_dim": 128, "value_dim": 128}
    projections = GroupedValueProjections(dim, heads, bias=False, norm=L2Norm, **sizes)
    layer = LinearAttention(
        projections,
        feature_map=Identity(),
        causal=True,
        decay=SoftplusDecay(),
        rule=DeltaRule(),
        convolution=ShortConvolution(projections),
        gate=OutputGate(projections, norm=RMSNorm),
    ).eval()
    rows = []
    for n in (64, 1024, 4096):
        x = torch.randn(1, n, dim)
        spent = _timing.in_turn({"ours": partial(layer, x), "theirs": partial(theirs, x)}, rounds=5)
        rows.append([f"{n:,} tokens", *(milliseconds(spent[name]) for name in ("ours", "theirs"))])
        rows[-1].append(times(spent["theirs"] / spent["ours"]))
    token, past = torch.randn(1, 1, dim), DynamicCache(config=config)
    theirs(x[:, :64], cache_params=past)
    caches = [layer.step(x[:, :64], layer.make_cache())[1]]

    def step() -> None:
        caches.append(layer.step(token, caches.pop())[1])

    spent = _timing.in_turn({"ours": step, "theirs": lambda: theirs(token, cache_params=past)}, rounds=15, calls=8)
    rows.append(["a token with a cache", *(milliseconds(spent[name]) for name in ("ours", "theirs"))])
    rows[-1].append(times(spent["theirs"] / spent["ours"]))
    title = f"Gated DeltaNet of Qwen3-Next, dim {dim}, {heads} heads of 128, {key_heads} of keys, forward"
    table(title, ["work", "regard's", "transformers'", "ratio"], rows)


def main() -> None:
    lengths = LENGTHS[:4] if "--quick" in sys.argv else LENGTHS
    print(_timing.machine())
    for decay in ("head", "feature"):
        for backward in (False, True):
            sequences(lengths, decay, backward=backward)
    with torch.no_grad():
        tokens()
        layers()


if __name__ == "__main__":
    main()
