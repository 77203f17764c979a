"""bfloat16 and float16 beside float32 and torch's operator: in pairs where the processor multiplies those faster.

Goals: a causal window of 512 at n = 16,384 in bfloat16 1.6 times as fast as in float32 where the processor has AVX-512
BF16; all pairs and causal at 4,096, forward and backward, 1.5 times as fast as torch's operator in bfloat16 and 8 times
in float16; 8 queries over 16,384 keys in at most 1.3 times the time of one. The limit is the rate of products of pairs
(`benchmarks/processor.py`).
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import _timing
import torch
from _report import agree, gradients, table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import masks, native

Work = Callable[[], object]
HALVES = (torch.bfloat16, torch.float16)
COUNTS = (1, 2, 4, 8, 16)
WIDENED = {"avx512bf16": "avx512", "neonbf16": "neon"}
"""The variant without products of pairs, of one with them."""


def forward_and_backward(attend: Callable[..., Tensor], leaves: list[Tensor]) -> Work:
    return lambda: gradients(attend(*leaves), leaves)


def widened(work: Work) -> Work:
    """The same by native code that widens bfloat16; the variant is named once per call, which takes a microsecond."""

    def run() -> object:
        with native.using(WIDENED.get(native.variant(), native.variant())):
            return work()

    return run


PROBLEMS = (
    ("causal window of 512, n = 16,384", (1, 2, 16384, 64), masks.causal() & masks.window(512), None),
    ("all pairs, n = 4,096", (1, 2, 4096, 64), None, {}),
    ("causal, n = 4,096", (1, 2, 4096, 64), masks.causal(), {"is_causal": True}),
    ("causal, n = 4,096, heads of 128", (1, 2, 4096, 128), masks.causal(), {"is_causal": True}),
    ("32 sentences of 25", (32, 8, 25, 64), None, {}),
    ("4 texts of 256, causal", (4, 8, 256, 64), masks.causal(), {"is_causal": True}),
)


def sides(
    shape: tuple[int, ...], mask: masks.Mask | None, options: dict | None
) -> Iterator[tuple[str, dict[str, Work]]]:
    """Name and works of a row for each pass: ours in each dtype, bfloat16 widened as well, and torch's operator."""
    wide = torch.randn(3, *shape).unbind()
    for way in ("forward", "forward and backward"):
        works: dict[str, Work] = {}
        results: list[list[Tensor]] = []
        for dtype in (torch.float32, *HALVES):
            name = str(dtype).removeprefix("torch.")
            leaves = [tensor.to(dtype).requires_grad_(way != "forward") for tensor in wide]
            attends: dict[str, Callable[..., Tensor]] = {name: lambda *a: regard.attention(*a, mask=mask)}
            if options is not None and dtype != torch.float32:
                attends[f"torch {name}"] = lambda *a: sdpa(*a, **options)
            for side, attend in attends.items():
                works[side] = (
                    (lambda attend=attend, leaves=leaves: attend(*leaves))
                    if way == "forward"
                    else forward_and_backward(attend, leaves)
                )
        works["bfloat16 widened"] = widened(works["bfloat16"])
        for work in works.values():  # the output, and of the second way the gradients
            found: Any = work()
            results.append([found] if isinstance(found, Tensor) else list(found))
        for side, result in zip(works, results, strict=True):
            agree(f"{shape}, {way}, {side}", result, results[0], within=3e-2)
        yield way, works


def several_queries(rounds: int) -> list[list[str]]:
    rows = []
    for heads in (32, 8):
        for dtype in (torch.float32, *HALVES):
            key, value = (torch.randn(1, 8, 16384, 128).to(dtype) for _ in range(2))
            works = {}
            for count in COUNTS:
                inputs = torch.randn(1, heads, count, 128).to(dtype), key, value
                works[str(count)] = partial(regard.attention, *inputs)
            with torch.no_grad():
                spent = _timing.in_turn(works, rounds=rounds)
            one = spent["1"]
            rate = 2 * key.numel() * key.element_size() / one * 1e-9
            ratios = [f"{spent[str(count)] / one:.2f}" for count in COUNTS if count > 1]
            name = str(dtype).removeprefix("torch.")
            rows.append([f"{heads} and 8", name, f"{one * 1e3:.2f} ms", f"{rate:.1f} GB/s", *ratios])
    return rows


def main(rounds: int = 9) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(_timing.machine(), f"variant {native.variant()}")
    rows = []
    for name, shape, mask, options in PROBLEMS:
        for way, works in sides(shape, mask, options):
            calls = 10 if shape[2] < 1000 else 1
            spent = _timing.in_turn(works, rounds=rounds, calls=calls)
            base = spent["float32"]
            rows.append(
                [
                    *(name, way, f"{base * 1e3:.2f} ms"),
                    *(f"{base / spent[side]:.2f}" for side in ("bfloat16", "bfloat16 widened", "float16")),
                    *(
                        f"{spent[f'torch {side}'] / spent[side]:.1f}" if f"torch {side}" in spent else ""
                        for side in ("bfloat16", "float16")
                    ),
                ]
            )
    titles = ["pairs", "way", "float32", "bfloat16: times as fast", "widened", "float16", "torch's bfloat16", "float16"]
    table("Half precision, one thread (`benchmarks/half_precision.py`)", titles, rows)
    print("\nThe last two columns: torch's time over ours in that dtype.")
    titles = ["heads, of keys", "dtype", "one query", "read", "2 queries, of it", "4", "8", "16"]
    table("Several queries over 16,384 keys of 128, one thread", titles, several_queries(rounds))


if __name__ == "__main__":
    main()
