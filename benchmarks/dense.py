"""All pairs and causal, as torch's own operator computes them.

Goal: within 2 % of it. The limit is what the processor multiplies in its registers.
"""

from collections.abc import Callable
from functools import partial

import _timing
import torch
from _report import agree, gradients, milliseconds, table
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard

Attend = Callable[..., torch.Tensor]


def main(lengths: tuple[int, ...] = (1024, 4096), rounds: int = 15) -> None:
    torch.manual_seed(0)
    print(_timing.machine())
    rows = []
    for n in lengths:
        inputs = torch.randn(3, 1, 8, n, 64).unbind()
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        calls = max(2048**2 // n**2, 1)
        for name, mask in (("all pairs", None), ("causal", regard.masks.causal())):
            sides: list[Attend] = [partial(regard.attention, mask=mask), partial(sdpa, is_causal=mask is not None)]
            ours, theirs = sides
            agree(name, gradients(ours(*leaves), leaves), gradients(theirs(*leaves), leaves))
            pairs = {
                "forward": (partial(ours, *inputs), partial(theirs, *inputs)),
                "forward and backward": tuple(
                    lambda attend=attend, leaves=leaves: gradients(attend(*leaves), leaves) for attend in sides
                ),
            }
            for way, (mine, other) in pairs.items():
                spent, peer, more = _timing.compare(mine, other, calls=calls, rounds=rounds)
                row = [f"n = {n:,}", name, way, milliseconds(peer), milliseconds(spent), f"{more / peer:+.1%}"]
                rows.append([*row, "yes" if more / peer <= 0.02 else "**no**"])
    title = "Dense and causal, 8 heads of 64, float32 (`benchmarks/dense.py`)"
    table(title, ["length", "pairs", "way", "torch", "regard", "more", "within 2 %"], rows)
    print("\nThe limit is what the processor multiplies in its registers.")


if __name__ == "__main__":
    main()
