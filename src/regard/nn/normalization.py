"""Root mean square layer normalisation, computed in float32 for narrower dtypes too."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.score_forms import at_least_float32
from ..errors import ConfigurationError
from ..utils.numbers import whole_number


class RMSNorm(nn.Module):
    """(offset + g) · x / √(mean(x²) + eps), over the last axis: any shape (..., dim), the same shape and dtype.

    It is computed in float32 at least and rounded once, under autocast too, where `torch.nn.RMSNorm` computes in the
    narrow dtype. g is initialised so that the gain offset + g is 1.

    Args:
        dim: of the last axis.
        eps: added to the mean square, so that vectors near 0 are not amplified.
        offset: 1.0 for checkpoints that store g - 1, as Gemma's do.

    Raises:
        ConfigurationError: a dim below 1, an eps below 0.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), Eq. 4; eps is of their code.

    >>> norm = RMSNorm(2, eps=0.0)
    >>> norm(torch.tensor([1.0, 7.0])).detach()
    tensor([0.2000, 1.4000])
    """

    def __init__(self, dim: int, eps: float = 1e-6, *, offset: float = 0.0) -> None:
        super().__init__()
        self.dim, self.eps, self.offset = whole_number("dim", dim), eps, offset
        if not eps >= 0:
            raise ConfigurationError(f"eps is {eps}; it needs a number of at least 0")
        self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) to (..., dim)."""
        wide = at_least_float32(x)
        gain = self.weight.to(wide.dtype) + self.offset if self.offset else self.weight.to(wide.dtype)
        return functional.rms_norm(wide, (self.dim,), gain, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}" + (f", offset={self.offset}" if self.offset else "")
