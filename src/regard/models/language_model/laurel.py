"""The residual connection of Gemma 3n's attention: a learned low-rank map of its input beside it."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn

from ...nn import Linear, Residual
from ...nn.input_checks import probability
from ...nn.projections import init_xavier
from ...utils.numbers import whole_number


class LaurelNorm(Residual):
    """(x + dropout(norm_after(f(y))) + y + laurel_norm(R L y)) / √2, with y = norm_before(x) and f the sublayer.

    L maps dim to `rank`, R back.

    Source: Menghani et al. 2024, "LAuReL: Learned Augmented Residual Layer" (arXiv 2411.07501), LAuReL-LR; y in
    place of x, the norms and √2 are of the code released with Gemma 3n.

    >>> import torch
    >>> residual = LaurelNorm(4, rank=2, norm=lambda dim: nn.LayerNorm(dim))
    >>> residual.after(torch.randn(1, 3, 4), torch.randn(1, 3, 4)).shape
    torch.Size([1, 3, 4])
    """

    def __init__(self, dim: int, rank: int, norm: Callable[[int], nn.Module], dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_before, self.norm_after, self.laurel_norm = norm(dim), norm(dim), norm(dim)
        self.left = Linear(dim, whole_number("laurel_rank", rank), bias=False)
        self.right = Linear(rank, dim, bias=False)
        self.dropout = nn.Dropout(probability("dropout", dropout))
        for linear in (self.left, self.right):
            init_xavier(linear)

    def before(self, x: Tensor) -> Tensor:
        return self.norm_before(x)

    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        y = self.norm_before(x)
        mapped = y + self.laurel_norm(self.right(self.left(y)))
        return (x + self.dropout(self.norm_after(branch)) + mapped) * 2**-0.5
