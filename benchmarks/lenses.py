"""What is seen of the weights beside the output, in a second pass over the tiles: pooled maps, entropy, the largest.

Goals, 8 heads of 64, causal, float32, n = 16,384: a pooled map of 256 × 256 and the entropy of each row beside the
output at most 1.7 times the time of attention alone, in less than 200 MB above the inputs (all weights take 8.6 GB);
with TopK(8) and Received too at most 2.2 times. All weights of n = 2,048 no slower than an eager softmax.

The limit: the products of queries and keys once more, half of what attention multiplies, and an exponential a pair.
`Received` alone is little more than that, and so shows what the pass costs before anything is reduced.

bfloat16 and float16 are read as they are; where the processor multiplies bfloat16 in pairs, so does the pass. What it
costs there beside float32's, without the attention itself, is in a table of its own.
"""

import math
import sys
from functools import partial

import _memory
import _timing
import torch
from _report import agree, mebibytes, met, milliseconds, table, times

import regard
from regard import lenses

MAP = (lenses.Pooled((256, 256)), lenses.Entropy())
SETS = {
    "Received alone": (lenses.Received(),),
    "Pooled (256 × 256) and Entropy": MAP,
    "and TopK(8), Received": (*MAP, lenses.TopK(8), lenses.Received()),
    "Pooled (256 × 256), largest": (lenses.Pooled((256, 256), "max"),),
    "Mass of 8 segments": (),
    "Distance": (lenses.Distance(),),
}
GOALS = {"Pooled (256 × 256) and Entropy": 1.7, "and TopK(8), Received": 2.2}


def inputs(n: int) -> tuple[torch.Tensor, ...]:
    return torch.randn(3, 1, 8, n, 64).unbind()


def observing(name: str, n: int):
    """The work of a set of lenses, on inputs of its own."""
    query, key, value = inputs(n)
    wanted = SETS[name] or (lenses.Mass(torch.arange(n) * 8 // n),)
    return partial(regard.observe, query, key, value, *wanted, mask=regard.masks.causal())


def beside_the_output(n: int, rounds: int) -> None:
    query, key, value = inputs(n)
    causal = regard.masks.causal()
    works = {"attention alone": partial(regard.attention, query, key, value, mask=causal)}
    works |= {name: observing(name, n) for name in SETS}
    spent, rows = _timing.in_turn(works, rounds=rounds), []
    alone = spent["attention alone"]
    for name, each in spent.items():
        ratio, goal = each / alone, GOALS.get(name)
        held = mebibytes(_memory.peak(name, n)) if name in SETS else ""
        rows.append([name, milliseconds(each), times(ratio), met(ratio, goal, most=True) if goal else "", held])
    title = f"Lenses beside the output, n = {n:,}, 8 heads of 64, causal, float32 (`benchmarks/lenses.py`)"
    table(title, ["what", "time", "of attention alone", "goal", "memory above inputs"], rows)


def eager(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and weights as models without a fused kernel compute them."""
    weights = (query @ key.mT / math.sqrt(query.shape[-1])).softmax(-1)
    return weights @ value, weights


def all_weights(n: int, rounds: int) -> None:
    query, key, value = inputs(n)
    whole = lenses.Weights()

    def ours() -> tuple[torch.Tensor, torch.Tensor]:
        seen = regard.observe(query, key, value, whole)
        return seen.output, seen[whole]

    agree("weights", ours(), eager(query, key, value))
    mine, other, more = _timing.compare(ours, lambda: eager(query, key, value), calls=1, rounds=rounds)
    row = [
        f"n = {n:,}",
        milliseconds(other),
        milliseconds(mine),
        f"{more / other:+.0%}",
        met(more / other, 0, most=True),
    ]
    table("All weights and the output, 8 heads of 64, float32", ["length", "eager", "Weights", "more", "goal"], [row])


def halves(n: int, rounds: int) -> None:
    """The pass alone, of one thread, in each dtype: what observing takes beyond attention."""
    causal, threads, rows = regard.masks.causal(), torch.get_num_threads(), []
    torch.set_num_threads(1)
    wide = torch.randn(3, 1, 4, n, 64)
    for name, wanted in SETS.items():
        if not wanted:
            continue
        works = {}
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            tensors = wide.to(dtype).unbind()
            works[f"{dtype} attention"] = partial(regard.attention, *tensors, mask=causal)
            works[f"{dtype} seen"] = partial(regard.observe, *tensors, *wanted, mask=causal)
        spent = _timing.in_turn(works, rounds=rounds)
        passes = [
            spent[f"{dtype} seen"] - spent[f"{dtype} attention"]
            for dtype in (torch.float32, torch.bfloat16, torch.float16)
        ]
        rows.append([name, milliseconds(passes[0]), *(f"{passes[0] / each:.2f}" for each in passes[1:])])
    torch.set_num_threads(threads)
    title = f"The pass over the weights in 16 bits, n = {n:,}, 4 heads of 64, causal, one thread"
    table(title, ["what", "float32", "bfloat16: times as fast", "float16"], rows)


def main(n: int = 16_384, rounds: int = 5, weights: int = 2048) -> None:
    if _memory.answer({name: partial(observing, name) for name in SETS}):
        return
    torch.manual_seed(0)
    print(_timing.machine())
    all_weights(weights, 4 * rounds + 1)
    beside_the_output(n, rounds)
    halves(n // 4, rounds)


if __name__ == "__main__":
    main(*(int(argument) for argument in sys.argv[1:] if sys.argv[1] != "--peak"))
