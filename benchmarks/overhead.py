"""What calls of `regard.attention` cost that take some microseconds, beside torch's operator: a sentence, a step.

Goals: at most 25 µs more for q, k, v of (1, 8, 16, 64), 20 with gradients, and within 3 % for (1, 8, 1024, 64). The
limit of small calls is what Python's own calls take: torch's operator is one, ours checks, chooses and makes a few.
"""

from __future__ import annotations

from collections.abc import Callable

import _report
import _timing
import torch
from _report import met, table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import regard
from regard import masks
from regard.masks import Mask

SMALL = [
    ((1, 1, 8, 16), False, False, None),
    ((1, 1, 8, 16), False, True, None),
    ((1, 8, 16, 64), False, False, 25.0),
    ((1, 8, 16, 64), True, False, 25.0),
    ((1, 8, 16, 64), False, True, 20.0),
    ((1, 8, 16, 64), True, True, 20.0),
    ((4, 8, 16, 64), False, False, None),
    ((4, 8, 16, 64), False, True, None),
]
"""Shape, whether causal, whether with gradients, and the most microseconds that ours may take longer."""
STEPS = [
    ((1, 8, 8), (1, 60, 64), "none", torch.float32),
    ((1, 8, 8), (1, 60, 64), "padded", torch.float32),
    ((1, 8, 8), (1, 60, 64), "fresh", torch.float32),
    ((1, 8, 8), (1, 200, 64), "padded", torch.bfloat16),
    ((1, 8, 8), (5, 60, 64), "none", torch.float32),
    ((32, 12, 12), (1, 200, 64), "padded", torch.float32),
    ((32, 12, 12), (1, 200, 64), "fresh", torch.float32),
    ((32, 12, 12), (1, 200, 64), "padded", torch.bfloat16),
    ((32, 12, 12), (1, 200, 64), "padded", torch.float16),
    ((32, 12, 12), (4, 200, 64), "padded", torch.bfloat16),
    ((32, 12, 12), (16, 200, 64), "padded", torch.bfloat16),
    ((4, 32, 8), (1, 200, 128), "none", torch.bfloat16),
    ((4, 32, 8), (4, 200, 128), "none", torch.bfloat16),
]
"""Batch, heads and key heads; queries, keys and dim; the mask, remembered or made anew for each call; the dtype."""
HALF_WITHIN = 2e-2


def both_sides(
    inputs: tuple[Tensor, ...], mask: Callable[[], Mask | None], gradients: bool, **options: object
) -> tuple[Callable[[], tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]:
    """The same work by regard and by torch, whose options are given."""
    for tensor in inputs:
        tensor.requires_grad_(gradients)
    upstream = torch.randn_like(inputs[0])

    def passes(output: Tensor) -> tuple[Tensor, ...]:
        return (output, *torch.autograd.grad(output, inputs, upstream)) if gradients else (output,)

    return (
        lambda: passes(regard.attention(*inputs, mask=mask())),
        lambda: passes(scaled_dot_product_attention(*inputs, **options)),  # type: ignore[arg-type]
    )


def small_calls() -> None:
    """Sentences in float32, the same call repeated."""
    rows = []
    for shape, is_causal, gradients, allowed in SMALL:
        kept = masks.causal() if is_causal else None
        inputs = tuple(torch.randn(shape) for _ in range(3))
        ours, theirs = both_sides(inputs, lambda kept=kept: kept, gradients, is_causal=is_causal)
        _report.agree(str(shape), ours(), theirs())
        mine, other = _timing.least(ours, theirs)
        more = (mine - other) * 1e6
        name = f"{shape}{', causal' * is_causal}, forward{' and backward' * gradients}"
        goal = "" if allowed is None else met(round(more, 1), allowed, most=True)
        rows.append([name, f"{other * 1e6:.1f} µs", f"{mine * 1e6:.1f} µs", f"{more:+.1f} µs", goal])
    table("Small calls, the least of 600 times 8", ["call", "torch", "regard", "more", "goal, µs"], rows)


def steps() -> None:
    """Few queries without gradients, as in decoding; torch gets the mask as a tensor that is there."""
    rows = []
    for (batch, heads, key_heads), (queries, keys, dim), kind, dtype in STEPS:
        query, key, value = (
            torch.randn(batch, count, length, dim).to(dtype)
            for count, length in ((heads, queries), (key_heads, keys), (key_heads, keys))
        )
        lengths = torch.randint(keys // 2, keys + 1, (batch,))
        kept = None if kind == "none" else masks.padding(lengths)
        attn_mask = None if kind == "none" else (torch.arange(keys) < lengths[:, None])[:, None, None]
        ours, theirs = both_sides(
            (query, key, value),
            lambda kept=kept, kind=kind, lengths=lengths: masks.padding(lengths) if kind == "fresh" else kept,
            gradients=False,
            attn_mask=attn_mask,
            enable_gqa=heads != key_heads,
        )
        _report.agree(str(query.shape), ours(), theirs(), within=2e-4 if dtype is torch.float32 else HALF_WITHIN)
        mine, other = _timing.least(ours, theirs, calls=2, batches=60)
        name = f"({batch}, {heads}{f'/{key_heads}' * (heads != key_heads)}, {queries}×{keys}, {dim})"
        chosen = regard.explain(query, key, value, mask=kept).kernel.name
        spent = [f"{seconds * 1e6:,.0f} µs" for seconds in (other, mine)]
        rows.append([name, str(dtype)[6:], kind, *spent, f"{other / mine:.2f}", chosen])
    table("Few queries", ["call", "dtype", "padding", "torch", "regard", "times faster", "kernel"], rows)


def longer_calls() -> None:
    """The same operator, or a faster one, for a longer text."""
    rows = []
    query, key, value = torch.randn(3, 1, 8, 1024, 64)
    for name, mask, is_causal in (("all pairs", None, False), ("causal", masks.causal(), True)):
        ours, theirs = both_sides((query, key, value), lambda mask=mask: mask, gradients=False, is_causal=is_causal)
        mine, other, more = _timing.compare(ours, theirs, calls=2)
        goal = met(round(100 * more / other, 1), 3, most=True)
        rows.append([name, f"{other * 1e6:,.0f} µs", f"{mine * 1e6:,.0f} µs", f"{more / other:+.1%}", goal])
    table("(1, 8, 1024, 64), medians", ["call", "torch", "regard", "more", "goal, %"], rows)


def main() -> None:
    torch.manual_seed(0)
    print(_timing.machine())
    small_calls()
    steps()
    longer_calls()


if __name__ == "__main__":
    main()
