"""FlexAttention's block mask of a causal window, from the mask's tiles and by torch's `create_block_mask`.

Torch evaluates all n² pairs: eagerly with a bool for each in memory, 17 GB at n = 131,072, compiled in passes over all.
Its time is measured at n = 2,048 and 8,192 and multiplied by the ratio of pairs, which favours it: there it fits into
fewer caches. Goal: 100 times faster at n = 131,072, with memory for the blocks alone. The limit is writing their lists,
four of n²/128² numbers.
"""

import warnings

import _timing
import torch
from _memory import answer, peak
from _report import mebibytes, met, milliseconds, table
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from regard import masks

WINDOW, N = 512, 131_072
SMALLER = (2048, 8192)


def ours(n: int) -> BlockMask:
    return masks.to_block_mask(masks.causal() & masks.window(before=WINDOW - 1), n, n)


def inside(b, h, q, k):  # torch names the arguments of a mask_mod so
    return (q >= k) & (q - k < WINDOW)


def eager(n: int) -> BlockMask:
    return create_block_mask(inside, None, None, n, n, "cpu")


compiled = torch.compile(create_block_mask)

PEAKS = {
    "regard": lambda n: lambda: ours(n),
    "eager": lambda n: lambda: eager(n),
}


def main() -> None:
    warnings.simplefilter("ignore")
    print(_timing.machine())
    rows = []
    for n in SMALLER:
        if not ours(n).to_dense().equal(eager(n).to_dense()):
            raise SystemExit(f"the blocks differ at n = {n:,}")
        works = {
            "regard": lambda n=n: ours(n),
            "eager": lambda n=n: eager(n),
            "compiled": lambda n=n: compiled(inside, None, None, n, n, "cpu"),
        }
        spent = _timing.in_turn(works, rounds=1)
        rows.append([f"{n:,}", *(milliseconds(spent[name]) for name in works), "", mebibytes(peak("regard", n))])
        rows[-1].append(mebibytes(peak("eager", n)))
    mine = _timing.in_turn({"regard": lambda: ours(N)}, rounds=7)["regard"]
    pairs = (N / SMALLER[-1]) ** 2
    scaled = {name: spent[name] * pairs for name in ("eager", "compiled")}
    least = min(scaled.values()) / mine
    rows.append([f"{N:,}", milliseconds(mine), *(f"{each:,.0f} s (scaled)" for each in scaled.values())])
    rows[-1] += [f"{least:,.0f} times, {met(least, 100)}", mebibytes(peak("regard", N)), mebibytes(float(N) ** 2)]
    columns = ["n", "regard", "torch, eager", "torch, compiled", "goal", "our peak", "its peak"]
    table(f"Block mask of a causal window of {WINDOW} (`benchmarks/flex.py`)", columns, rows)
    print("\nThe last peak of torch is that of its bools alone, by their number.")


if __name__ == "__main__" and not answer(PEAKS):
    main()
