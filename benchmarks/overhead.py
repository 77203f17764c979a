"""What `regard.attention` costs over a direct call of torch's operator, where torch's operator is what it runs.

Goals: at most 25 µs more for q, k, v of (1, 8, 16, 64), and within 3 % for (1, 8, 1024, 64). The limit is 0 of both:
the same operator does the work.
"""

import _timing
import torch
from torch.nn.functional import scaled_dot_product_attention

import regard

SHAPES = (((1, 8, 16, 64), 200), ((1, 8, 1024, 64), 2))


def main() -> None:
    torch.manual_seed(0)
    print(_timing.machine())
    for shape, calls in SHAPES:
        query, key, value = torch.randn(3, *shape)
        for name, mask, is_causal in (("all pairs", None, False), ("causal", regard.masks.causal(), True)):
            ours, theirs, more = _timing.compare(
                lambda q=query, k=key, v=value, m=mask: regard.attention(q, k, v, mask=m),
                lambda q=query, k=key, v=value, c=is_causal: scaled_dot_product_attention(q, k, v, is_causal=c),
                calls=calls,
            )
            print(
                f"{shape!s:<18} {name:<10} torch {theirs * 1e6:9.1f} µs   regard {ours * 1e6:9.1f} µs   "
                f"{more * 1e6:+7.1f} µs   {more / theirs:+.1%}"
            )


if __name__ == "__main__":
    main()
