"""Causal linear attention: forward and backward against the machine's products and exact attention, and one token.

Useful flops are those of the algorithm in chunks of 64: pairs within a chunk once, with each state and without those
that are computed anew. Steps are a loop over tokens in torch, at a length that it finishes.

The limits: for whole sequences the machine's products, and memory that is mapped already, as results that find no
memory of earlier ones are mapped and zeroed; for a token reading, or copying, the state, and a call of C from Python
with a tensor for its output.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import _timing
import torch
from _report import agree, gradients, met, milliseconds, table, times
from torch import Tensor

import regard
from regard import masks
from regard.backends.cpu import library
from regard.linear import FavorPlus, Identity, LinearState, linear_attention, linear_attention_with_state, naive
from regard.linear.linear_arguments import LinearOptions
from regard.linear.recurrence import recurrence
from regard.nn import LinearCache

N, HEADS, DIM, CHUNK, ROUNDS = 16384, 8, 64, 64, 3
STEPS, LENGTHS, MATRIX = 1024, (32768, 65536, 131072, 262144), 2048
LONG_HEADS = 2
"""Heads at the lengths that are compared with their halves, for memory's sake."""

Work = Callable[[], Any]


def leaves(n: int, heads: int = HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [tensor.to(dtype).requires_grad_() for tensor in torch.randn(3, 1, heads, n, DIM).unbind()]


def linear(n: int, heads: int = HEADS) -> Work:
    inputs = leaves(n, heads)
    return lambda: gradients(linear_attention(*inputs, causal=True), inputs)


def in_mapped_memory(work: Work) -> Work:
    """The same work, whose large results are written into the memory of those of the call before."""
    memory: list[Tensor] = []

    def run() -> Any:
        numbers = iter(range(1000))

        def stored(tensor: Tensor, *shape: int) -> Tensor:
            number = next(numbers)
            if number == len(memory):
                memory.append(tensor.new_empty(shape))
            return memory[number]

        with mock.patch("regard.backends.cpu.linear_recurrence.new_large", stored):
            return work()

    return run


def exact(n: int) -> Work:
    inputs = leaves(n)
    return lambda: gradients(regard.attention(*inputs, mask=masks.causal()), inputs)


def steps(n: int) -> Work:
    """The recurrence token by token, with elu + 1 and the division."""
    inputs = leaves(n)

    def run() -> tuple[Tensor, ...]:
        query, key, value = inputs
        query, key = (torch.nn.functional.elu(tensor) + 1 for tensor in (query, key))
        value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
        rows = naive.step_recurrence(query, key, value)[0]
        return gradients(rows[..., :-1] / rows[..., -1:], inputs)

    return run


def useful_flops(n: int, heads: int) -> float:
    """Products of chunks: half of those of pairs, forward 2 and backward 5, and those with states, 2 and 4."""
    pairs, states = 2 * CHUNK * DIM / 2, 2 * DIM * DIM
    return n * heads * (7 * pairs + 6 * states)


def whole_sequences() -> None:
    agree("linear", linear(257)(), steps(257)(), within=1e-3)
    left, right = torch.randn(2, MATRIX, MATRIX)
    spent = _timing.in_turn(
        {
            "linear": linear(N),
            "mapped": in_mapped_memory(linear(N)),
            "exact": exact(N),
            "product": lambda: torch.mm(left, right),
        },
        rounds=ROUNDS,
    )
    short = _timing.in_turn({"linear": linear(STEPS), "steps": steps(STEPS)}, rounds=ROUNDS)
    rate = 2 * MATRIX**3 / spent["product"]
    share = useful_flops(N, HEADS) / spent["linear"] / rate
    ratio, by_steps = spent["exact"] / spent["linear"], short["steps"] / short["linear"]
    rows = [
        ["exact causal attention", milliseconds(spent["exact"]), milliseconds(spent["linear"]), times(ratio)],
        [f"steps, n = {STEPS:,}", milliseconds(short["steps"]), milliseconds(short["linear"]), times(by_steps)],
        ["rate of products", f"{rate / 1e9:.0f} GF/s", f"{rate * share / 1e9:.0f} GF/s", f"{share:.0%}"],
    ]
    for row, value, goal in zip(rows, (ratio, by_steps, share), (25, 100, 1 / 3), strict=True):
        row.append(met(value, round(goal, 2)))
    of_mapped = useful_flops(N, HEADS) / spent["mapped"] / rate
    rates = [f"{rate / 1e9:.0f} GF/s", f"{rate * of_mapped / 1e9:.0f} GF/s", f"{of_mapped:.0%}"]
    rows.append(["the same, results in mapped memory", *rates, "the limit of fresh memory"])
    title = f"Causal linear attention, elu + 1, n = {N:,}, {HEADS} heads of {DIM}, forward and backward"
    table(f"{title} (`benchmarks/linear.py`)", ["peer", "peer's", "regard's", "ratio", "goal"], rows)


def doubling() -> None:
    rows = []
    for n in LENGTHS:
        half, whole = linear(n // 2, LONG_HEADS), linear(n, LONG_HEADS)
        works = {"half": half, "whole": whole}
        mapped = {f"mapped {name}": in_mapped_memory(work) for name, work in works.items()}
        spent = _timing.in_turn(works | mapped, rounds=ROUNDS)
        ratio, limit = spent["whole"] / spent["half"], spent["mapped whole"] / spent["mapped half"]
        row = [f"{n:,}", milliseconds(spent["half"]), milliseconds(spent["whole"]), times(ratio)]
        rows.append([*row, met(ratio, 2.1, most=True), times(limit)])
    title = f"Twice the length, {LONG_HEADS} heads, forward and backward"
    table(title, ["n", "n / 2", "n", "ratio", "goal", "in mapped memory"], rows)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
HALVES_N = 8192


def halves() -> None:
    """bfloat16 and float16, which are widened as they are read, against float32."""

    def whole(dtype: torch.dtype) -> Work:
        inputs = leaves(HALVES_N, dtype=dtype)
        return lambda: gradients(linear_attention(*inputs, causal=True), inputs)

    def forward(dtype: torch.dtype) -> Work:
        query, key, value = (tensor.detach() for tensor in leaves(HALVES_N, dtype=dtype))
        return lambda: linear_attention(query, key, value, causal=True)

    def token(dtype: torch.dtype) -> Work:
        query, key, value = torch.randn(3, 1, 32, 1, 128).to(dtype)
        caches = [LinearCache(state=LinearState(torch.rand(1, 32, 128, 129), normalized=True), next_position=1)]

        def run() -> None:
            caches.append(caches.pop().attend(query, key, value)[1])

        return run

    rows = []
    for name, work, calls in (("forward", forward, 1), ("forward and backward", whole, 1), ("one token", token, 17)):
        spent = _timing.in_turn({key: work(dtype) for key, dtype in DTYPES.items()}, rounds=9, calls=calls)
        shares = [spent[key] / spent["float32"] for key in DTYPES]
        cells = [f"{microseconds(spent[key])}, {times(share)}" for key, share in zip(DTYPES, shares, strict=True)]
        rows.append([name, *cells, met(max(shares), 1, most=True)])
    title = f"Halves, causal, elu + 1, n = {HALVES_N:,}, {HEADS} heads of {DIM}; a token of 32 heads of 128"
    table(title, ["work", *DTYPES, "goal"], rows)


def performer(features: int = 256) -> None:
    """FAVOR+ features against exact attention, neither causal."""
    query, key, value = inputs = leaves(N)
    maps = {"feature_map": FavorPlus(DIM, features, seed=0)}

    def forward(attend: Callable[..., Tensor], **options: Any) -> Work:
        return lambda: attend(query.detach(), key.detach(), value.detach(), **options)

    def backward(attend: Callable[..., Tensor], **options: Any) -> Work:
        return lambda: gradients(attend(*inputs, **options), inputs)

    rows = []
    for name, work in (("forward", forward), ("forward and backward", backward)):
        works = {"exact": work(regard.attention), "performer": work(linear_attention, **maps)}
        spent = _timing.in_turn(works, rounds=1 if name != "forward" else ROUNDS)
        ratio = spent["exact"] / spent["performer"]
        row = [name, milliseconds(spent["exact"]), milliseconds(spent["performer"]), times(ratio)]
        rows.append([*row, met(ratio, 12)])
    title = f"Performer, {features} features, not causal, n = {N:,}, {HEADS} heads of {DIM}"
    table(title, ["pass", "exact attention", "regard's", "ratio", "goal"], rows)


STATES = ((1, 8, 64), (8, 8, 64), (16, 16, 64), (1, 32, 128), (8, 32, 128))
"""Sequences, heads and dim: states of 128 KiB to 16 MiB."""


def one_token(batch: int, heads: int, dim: int) -> tuple[list[str], list[str]]:
    """A row of decoding against reading the state, and one of the gated delta rule against copying it."""
    torch.manual_seed(0)
    state, target = torch.randn(2, batch, heads, dim, dim)
    query, key, value = torch.randn(3, batch, heads, 1, dim)
    key = torch.nn.functional.normalize(key, dim=-1)
    decay, beta = -torch.rand(batch, heads, 1), torch.rand(batch, heads, 1)
    gates: LinearOptions = {"decay": decay, "beta": beta}
    raw: LinearOptions = {"feature_map": Identity(), "normalize": False, "causal": True, "scale": 1.0}
    sums = LinearState(torch.rand(batch, heads, dim, dim + 1), normalized=True)
    plain = LinearCache(state=sums, next_position=1)
    gated = LinearCache(Identity(), False, LinearState(state), next_position=1)
    options: LinearOptions = raw | gates | {"state": LinearState(state)}
    found = linear_attention_with_state(query, key, value, **options)
    expected = naive.step_recurrence(query, key, value, decay=decay, beta=beta, state=state)
    agree("one token", (found[0], found[1].sums), expected)

    def decode() -> None:
        nonlocal plain
        _, plain = plain.attend(query, key, value)

    def decode_gated() -> None:
        nonlocal gated
        _, gated = gated.attend(query, key, value, **gates)

    works: dict[str, Work] = {
        "written": lambda: recurrence(query, key, value, decay, beta, state),
        "decode": decode,
        "decode gated": decode_gated,
        "reading": state.sum,
        "copy": lambda: target.copy_(state),
    }
    calls = 16  # a state is written once in 8 or 16 tokens
    with torch.no_grad():
        spent = _timing.in_turn(works, rounds=31, calls=calls)
    size = f"{batch} × {heads} × {dim} × {dim}, {state.nbytes / 2**20:g} MiB"
    reading, copy = spent["reading"], spent["copy"]
    ratio, share, written = spent["decode"] / reading, copy / spent["decode gated"], copy / spent["written"]
    first = [size, microseconds(reading), microseconds(spent["decode"]), times(ratio), met(ratio, 2, most=True)]
    second = [size, microseconds(copy), microseconds(spent["decode gated"]), f"{share:.0%}", met(share, 0.7)]
    return first, [*second, microseconds(spent["written"]), f"{written:.0%}", met(written, 0.7)]


def microseconds(spent: float) -> str:
    return f"{spent * 1e6:,.0f} µs"


def least_call() -> float:
    """Seconds of a call of C that does nothing, with a tensor for its output."""
    output, code = torch.empty(1, 8, 1, 64), library.current()
    work = lambda: (torch.empty_like(output), code.finite(output.data_ptr(), 0, 0))  # noqa: E731
    return _timing.in_turn({"call": work}, rounds=31, calls=16)["call"]


def tokens() -> None:
    """Decoding by a cache, whose tokens are written into the state now and then, and steps that write it each time."""
    reading, copying = zip(*(one_token(*sizes) for sizes in STATES), strict=True)
    table("One token, elu + 1, by a cache", ["state", "reading it", "regard's", "ratio", "goal"], reading)
    columns = ["state", "copying it", "by a cache", "rate", "goal", "written each time", "rate", "goal"]
    table("One token, the gated delta rule", columns, copying)
    print(f"\nA call of C from Python, with a tensor for its output, that does nothing: {least_call() * 1e6:.1f} µs.")


def main() -> None:
    print(_timing.machine())
    whole_sequences()
    doubling()
    halves()
    performer()
    tokens()


if __name__ == "__main__":
    main()
