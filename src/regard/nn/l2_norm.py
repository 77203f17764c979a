"""The L2 norm of queries and keys, as layers of the delta rule have it."""

from __future__ import annotations

from torch import Tensor, nn

from ..core.score_forms import at_least_float32
from ..errors import ConfigurationError
from ..utils.numbers import whole_number


class L2Norm(nn.Module):
    """x / √(Σ x² + eps), over the last axis: any shape (..., dim), the same shape and dtype.

    `Projections(norm=L2Norm)` norms the queries and keys of each head. It is computed in float32 at least.

    Args:
        dim: of the last axis.
        eps: added to the square of the norm, so that vectors near 0 are not amplified.

    Raises:
        ConfigurationError: a dim below 1, an eps below 0.

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3; eps is of the code released with it.

    >>> import torch
    >>> L2Norm(2, eps=0.0)(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.dim, self.eps = whole_number("dim", dim), eps
        if not eps >= 0:
            raise ConfigurationError(f"eps is {eps}; it needs a number of at least 0")

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) to (..., dim)."""
        wide = at_least_float32(x)
        return (wide * (wide.square().sum(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, eps={self.eps}"
