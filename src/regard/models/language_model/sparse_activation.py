"""An activation of the largest features alone, by a threshold from their mean and deviation."""

from __future__ import annotations

from collections.abc import Callable
from statistics import NormalDist

from torch import Tensor, nn

from ...errors import ConfigurationError


class SparseActivation(nn.Module):
    """a(max(0, x - mean(x) - z · σ(x))), mean and deviation over the last axis: (..., hidden_dim) to the same.

    z is the quantile of the normal distribution at `sparsity`, so that this share of normally distributed features is
    at a(0).

    Raises:
        ConfigurationError: a sparsity that is not between 0 and 1.

    Source: You et al. 2025, "Spark Transformer" (arXiv 2506.06644), "statistical top-k", as in Gemma 3n.

    >>> import torch
    >>> sparse = SparseActivation(torch.relu, 0.95)
    >>> hidden = torch.randn(1000, 100, generator=torch.Generator().manual_seed(0))
    >>> round(float((sparse(hidden) == 0).float().mean()), 2)
    0.95
    """

    def __init__(self, activation: Callable[[Tensor], Tensor], sparsity: float) -> None:
        super().__init__()
        if not 0 < sparsity < 1:
            raise ConfigurationError(f"sparsity is {sparsity}; it needs a share between 0 and 1, or None for none")
        self.activation, self.sparsity = activation, sparsity
        self.deviations = NormalDist().inv_cdf(sparsity)

    def forward(self, x: Tensor) -> Tensor:
        """(..., hidden_dim) to (..., hidden_dim)."""
        threshold = x.mean(-1, keepdim=True) + self.deviations * x.std(-1, keepdim=True, unbiased=False)
        return self.activation((x - threshold).relu())

    def extra_repr(self) -> str:
        return f"sparsity={self.sparsity}"
