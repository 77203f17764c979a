"""x Wᵀ + b by what is fastest for so many positions: for few, native code reads W as fast as memory gives it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import native
from ..transforms import transformed
from .products import are_plain, is_for_onednn, product

MOST_ROWS = {torch.float32: 64, torch.bfloat16: 8}
"""Positions, of all sequences together, up to which torch's products take longer."""

MOST_ROWS_BEFORE_ONEDNN = 24
"""The same for products that are large enough for oneDNN."""

LEAST_WEIGHTS = 2**20
"""Fewer weights are done before native code has begun."""


class Linear(nn.Linear):
    """`torch.nn.Linear`, the same weights and the same result: y = x Wᵀ + b, x (..., in), y (..., out).

    While text is generated, each step reads all weights for a few positions, and takes as long as that. Torch's matrix
    products are made for many positions; for few, on a CPU and without gradient, native code reads the weights at the
    rate of memory. For many, in single precision on a CPU with AVX-512, it is oneDNN that multiplies, unless
    `torch.backends.mkldnn.enabled` is False; torch calls MKL there. Everything else is torch's own.

    >>> import torch
    >>> layer = Linear(4, 2)
    >>> layer(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002  (torch calls it so)
        """The product of the positions with the weights."""
        return linear(input, self.weight, self.bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The product x Wᵀ + b, x (..., in), W (out, in), b (out,): `torch.nn.functional.linear`, as `Linear` computes it.

    >>> import torch
    >>> linear(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([[3., 7.]])
    """
    if not _reads_fast(x, weight, bias):
        return product(x, weight, bias)
    rows = native.times_matrix(x.reshape(-1, x.shape[-1]), weight, bias)
    return rows.view(*x.shape[:-1], weight.shape[0])


def _reads_fast(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether it is a matter of reading the weights, and native code can."""
    return (
        weight.numel() >= LEAST_WEIGHTS  # before all else, for few are done in microseconds
        and not transformed()
        and are_plain(x, weight, bias)
        and x.shape[-1] == weight.shape[-1]
        and 0 < x.numel() <= MOST_ROWS.get(x.dtype, 0) * x.shape[-1]
        and not (torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in (x, weight, bias)))
        and not torch.is_autocast_enabled("cpu")
        and native.reads(x, weight)
        and (x.numel() <= MOST_ROWS_BEFORE_ONEDNN * x.shape[-1] or not is_for_onednn(x, weight, bias))
    )
