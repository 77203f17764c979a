"""Structured masks at n = 16,384: what they leave is computed, and nothing else.

Peers: torch's operator given the mask as a tensor, and compiled FlexAttention, which has no gradient on a CPU. The
limit of the forward pass is the machine's own rate of matrix products, measured in the same run.
"""

import time
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
from regard.masks import Mask

N, WINDOW, DOCUMENTS, ROUNDS = 16384, 512, 16, 3
HEADS, DIM = 8, 64
Work = Callable[[], Any]


def window() -> Mask:
    return regard.masks.causal() & regard.masks.window(before=WINDOW - 1)


def documents(n: int) -> Mask:
    """Packed documents of unlike lengths, each causal."""
    lengths = torch.arange(1, DOCUMENTS + 1) + DOCUMENTS
    ends = (lengths.cumsum(0) * n / lengths.sum()).round().to(torch.int64)
    return regard.masks.causal() & regard.masks.documents(torch.searchsorted(ends, torch.arange(n), right=True))


def tensors(n: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(3, 1, HEADS, n, DIM).to(dtype).unbind())


def ours(mask: Mask, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return regard.attention(query, key, value, mask=mask)


def theirs(keep: Tensor, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return sdpa(query, key, value, keep)


def training(n: int, mask: Mask, *, peer: bool) -> Work:
    """Forward and backward; the peer's mask is there before it begins."""
    leaves = [tensor.requires_grad_() for tensor in tensors(n)]
    attend = partial(theirs, mask.dense(n, n)) if peer else partial(ours, mask)
    return lambda: gradients(attend(*leaves), leaves)


PEAKS = {
    "window, regard": lambda n: training(n, window(), peer=False),
    "window, torch": lambda n: training(n, window(), peer=True),
    "documents, regard": lambda n: training(n, documents(n), peer=False),
    "documents, torch": lambda n: training(n, documents(n), peer=True),
}


def flex(n: int, dtype: torch.dtype) -> tuple[Callable[..., Any] | None, str]:
    """Compiled FlexAttention for the window, and how long it took to be ready, or why it is not there."""
    import torch._inductor.config
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._inductor.config.force_disable_caches = True  # what an earlier run compiled is no compile time of this one
    try:
        began = time.perf_counter()
        blocks = create_block_mask(lambda b, h, q, k: (k <= q) & (k > q - WINDOW), None, None, n, n, device="cpu")
        made = time.perf_counter() - began
        compiled: Callable[..., Any] = torch.compile(partial(flex_attention, block_mask=blocks))
        compiled(*tensors(n, dtype))
        total = time.perf_counter() - began
    except Exception as error:  # whatever a compiler and its absence may raise: the other peers are measured without it
        return None, f"FlexAttention did not compile here: {type(error).__name__}: {str(error).splitlines()[0][:120]}"
    return compiled, f"{total:.1f} s to its first result, of which {made:.1f} s for its BlockMask"


def forward(n: int) -> None:
    """The window, forward, in two dtypes, beside the machine's own products."""
    keep, rows, notes = window().dense(n, n), [], []
    for dtype in (torch.float32, torch.bfloat16):
        inputs, word = tensors(n, dtype), str(dtype).removeprefix("torch.")
        compiled, note = flex(n, dtype)
        notes.append(f"FlexAttention, {word}: {note}.")
        single = dtype == torch.float32
        within = 2e-4 if single else 2e-2
        result = ours(window(), *inputs)
        agree(f"window, {word}", [result], [theirs(keep, *inputs)], within=within)
        square = torch.randn(2048, 2048).to(dtype)
        works: dict[str, Work] = {"regard": lambda x=inputs: ours(window(), *x), "product": lambda s=square: s @ s}
        if compiled is not None:
            agree(f"FlexAttention, {word}", [result], [compiled(*inputs)], within=within)
            works["flex"] = lambda f=compiled, x=inputs: f(*x)
        spent = _timing.in_turn(works, rounds=4 * ROUNDS + 1)
        peer = _timing.in_turn({"regard": works["regard"], "torch": lambda x=inputs: theirs(keep, *x)}, rounds=ROUNDS)
        kept = int(keep.sum()) if n <= 4096 else n * WINDOW - WINDOW * (WINDOW - 1) // 2
        rate, product = 4.0 * DIM * HEADS * kept / spent["regard"], 2.0 * 2048**3 / spent["product"]
        rows.append([word, "SDPA with the mask", milliseconds(peer["torch"]), milliseconds(peer["regard"])])
        rows[-1] += [times(peer["torch"] / peer["regard"]), met(peer["torch"] / peer["regard"], 20) if single else ""]
        if compiled is not None:
            rows.append([word, "FlexAttention", milliseconds(spent["flex"]), milliseconds(spent["regard"])])
            rows[-1] += [times(spent["flex"] / spent["regard"])]
            rows[-1] += [met(spent["flex"] / spent["regard"], 1.6 if single else 1.0)]
        rows.append([word, "products of 2048 × 2048", f"{product / 1e9:,.0f} GFLOP/s", f"{rate / 1e9:,.0f} GFLOP/s"])
        rows[-1] += [f"{rate / product:.0%}", met(rate / product, 0.5) if single else ""]
    title = f"Causal window of {WINDOW}, n = {n:,}, 8 heads of 64, forward (`benchmarks/masks.py`)"
    table(title, ["dtype", "peer", "peer's", "regard's", "ratio", "goal"], rows)
    print("\nRates count the pairs that the mask keeps; the limit is the products'. " + " ".join(notes))


def backward(n: int, memory: dict[str, float]) -> None:
    """Window and documents, forward and backward, with their peaks of memory."""
    rows = []
    for name, mask, goal in (("window", window(), 16), ("documents", documents(n), 10)):
        works = {"regard": training(n, mask, peer=False), "torch": training(n, mask, peer=True)}
        agree(name, works["regard"](), works["torch"]())
        spent = _timing.in_turn(works, rounds=ROUNDS)
        ratio, less = spent["torch"] / spent["regard"], memory[f"{name}, torch"] / memory[f"{name}, regard"]
        rows.append([name, milliseconds(spent["torch"]), milliseconds(spent["regard"]), times(ratio), met(ratio, goal)])
        rows[-1] += [mebibytes(memory[f"{name}, torch"]), mebibytes(memory[f"{name}, regard"]), times(less)]
        rows[-1] += [met(less, 5) if name == "window" else ""]
    columns = ["mask", "SDPA with the mask", "regard", "ratio", "goal", "its peak", "our peak", "ratio", "goal"]
    title = f"Causal window of {WINDOW}, and {DOCUMENTS} packed causal documents, n = {n:,}, forward and backward"
    table(title, columns, rows)
    print(
        "\nPeaks are above the inputs; the peer's mask counts as input. Limit of memory: output and gradients,", end=" "
    )
    print(f"{mebibytes(4 * 4 * n * HEADS * DIM)}.")


def growth(n: int) -> None:
    works = {length: training(length, window(), peer=False) for length in (n // 2, n, 2 * n)}
    spent = _timing.in_turn({f"{length:,}": work for length, work in works.items()}, rounds=2 * ROUNDS + 1)
    first, *_, last = spent.values()
    rows = [[length, milliseconds(each), times(each / first)] for length, each in spent.items()]
    table(f"Causal window of {WINDOW}, forward and backward: growth with n", ["n", "regard", "of the first"], rows)
    print(f"\nGoal: {met(last / first, 4.3, most=True)}; the limit is 4, the pairs.")


def main(n: int = N) -> None:
    print(_timing.machine())
    memory = {name: peak(name, n) for name in PEAKS}
    with torch.no_grad():
        forward(n)
    backward(n, memory)
    growth(n)


if __name__ == "__main__" and not answer(PEAKS):
    main()
