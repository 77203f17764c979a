"""A learned bias, ALiBi and dropout at n = 4,096, forward and backward.

Peer: torch's operator, given the bias as a mask of n² numbers, or told to drop weights. The limit is its own time
without any of these: that is measured beside them.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import _timing
import torch
from _memory import answer, peak
from _report import agree, gradients, mebibytes, met, milliseconds, table, times
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import biases, masks

N, HEADS, DIM, ROUNDS = 4096, 8, 64, 3
DROPPED = 0.1
Work = Callable[[], Any]


def leaves(n: int) -> list[Tensor]:
    torch.manual_seed(0)
    return [tensor.requires_grad_() for tensor in torch.randn(3, 1, HEADS, n, DIM).unbind()]


def learned(n: int, *, peer: bool) -> Work:
    """T5's buckets: the peer looks its numbers up in the same table, so that the gradient reaches it."""
    inputs, entries = leaves(n), torch.randn(HEADS, 32).requires_grad_()
    bias = biases.relative(entries)

    def theirs(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        distances = torch.arange(1 - n, n)  # of the key from the query
        numbers = bias.values_at(distances)
        return sdpa(query, key, value, numbers.unfold(-1, n, 1).flip(-2)[None])

    attend: Callable[..., Tensor] = theirs if peer else partial(regard.attention, bias=bias)
    return lambda: gradients(attend(*inputs), [*inputs, entries])


def alibi(n: int, *, peer: bool) -> Work:
    """The peer's mask of numbers is there before it begins, -inf above the diagonal."""
    inputs, bias = leaves(n), biases.alibi(HEADS)
    if not peer:
        return lambda: gradients(regard.attention(*inputs, mask=masks.causal(), bias=bias), inputs)
    line = bias.values_at(torch.arange(1 - n, n)).masked_fill(torch.arange(1 - n, n) > 0, float("-inf"))
    numbers = line.unfold(-1, n, 1).flip(-2).contiguous()[None]
    query, key, value = inputs
    return lambda: gradients(sdpa(query, key, value, numbers), inputs)


def dropout(n: int, *, peer: bool) -> Work:
    inputs = leaves(n)
    query, key, value = inputs
    if peer:
        return lambda: gradients(sdpa(query, key, value, is_causal=True, dropout_p=DROPPED), inputs)
    return lambda: gradients(regard.attention(query, key, value, mask=masks.causal(), dropout_p=DROPPED), inputs)


def plain(n: int, *, causal: bool) -> Work:
    """The limit: torch's operator without bias and dropout."""
    inputs = leaves(n)
    query, key, value = inputs
    return lambda: gradients(sdpa(query, key, value, is_causal=causal), inputs)


CASES = {"T5's bias, learned": learned, "ALiBi, causal": alibi, f"dropout {DROPPED}, causal": dropout}
PEAKS = {
    f"{name}, {side}": partial(make, peer=side == "torch")
    for name, make in CASES.items()
    for side in ("regard", "torch")
}
GOALS = {"T5's bias, learned": (2.0, 8.0), "ALiBi, causal": (1 / 1.1, None), f"dropout {DROPPED}, causal": (3.0, 10.0)}


def check(name: str, make: Callable[..., Work]) -> None:
    """Agreement, of a shorter sequence; dropout has a pattern of its own, so it is held against the formula."""
    if make is not dropout:
        agree(name, make(512, peer=False)(), make(512, peer=True)())
        return
    inputs = leaves(512)
    results = []
    for kernel in (None, "reference"):
        torch.manual_seed(1)
        output = regard.attention(*inputs, mask=masks.causal(), dropout_p=DROPPED, kernel=kernel)
        results.append(gradients(output, inputs))
    agree(name, *results)


def main(n: int = N) -> None:
    print(_timing.machine())
    memory = {name: peak(name, n) for name in PEAKS}
    rows = []
    for name, make in CASES.items():
        check(name, make)
        works = {
            "regard": make(n, peer=False),
            "torch": make(n, peer=True),
            "plain": plain(n, causal=make is not learned),
        }
        spent = _timing.in_turn(works, rounds=ROUNDS)
        ratio, less = spent["torch"] / spent["regard"], memory[f"{name}, torch"] / memory[f"{name}, regard"]
        faster, smaller = GOALS[name]
        rows.append([name, *(milliseconds(spent[side]) for side in ("torch", "regard", "plain"))])
        rows[-1] += [times(ratio), met(ratio, round(faster, 2))]
        rows[-1] += [mebibytes(memory[f"{name}, {side}"]) for side in ("torch", "regard")]
        rows[-1] += [times(less), met(less, smaller) if smaller else ""]
    columns = ["work", "SDPA", "regard", "limit", "ratio", "goal", "SDPA's peak", "our peak", "ratio", "goal"]
    table(f"Bias and dropout, n = {n:,}, 8 heads of 64, forward and backward (`benchmarks/biases.py`)", columns, rows)
    print(
        "\nThe limit is torch's operator without bias and dropout. Peaks are above the inputs; ALiBi's mask of", end=" "
    )
    print(f"{mebibytes(4 * HEADS * n**2)} counts as input of the peer's.")


if __name__ == "__main__" and not answer(PEAKS):
    main()
