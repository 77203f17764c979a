"""How a block adds what its parts say to what goes through it."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from .checks import probability


class Residual(nn.Module, ABC):
    """x and a part f become `after(x, f(before(x)))`. A block has one for each of its parts."""

    @abstractmethod
    def before(self, x: Tensor) -> Tensor:
        """What the part is given."""

    @abstractmethod
    def after(self, x: Tensor, said: Tensor) -> Tensor:
        """What goes on, from x and from what the part said."""


class PostNorm(Residual):
    """norm(x + dropout(f(x))).

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sections 3.1 and 5.4.

    >>> import torch
    >>> residual = PostNorm(nn.LayerNorm(2))
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> residual.after(x, 2 * residual.before(x)).detach().round()
    tensor([[-1.,  1.]])
    """

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor, said: Tensor) -> Tensor:
        return self.norm(x + self.dropout(said))


class PreNorm(Residual):
    """x + dropout(f(norm(x))); a stack of such blocks ends in one more norm.

    Source: Xiong et al. 2020 (arXiv 2002.04745), Table 1.

    >>> import torch
    >>> residual = PreNorm(nn.LayerNorm(2))
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> residual.after(x, 2 * residual.before(x)).detach().round()
    tensor([[-1.,  5.]])
    """

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = norm
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def before(self, x: Tensor) -> Tensor:
        return self.norm(x)

    def after(self, x: Tensor, said: Tensor) -> Tensor:
        return x + self.dropout(said)


class SandwichNorm(Residual):
    """x + dropout(norm_after(f(norm_before(x)))).

    Source: Gemma 2 (arXiv 2408.00118), section 2.

    >>> import torch
    >>> residual = SandwichNorm(nn.LayerNorm(2), nn.LayerNorm(2))
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> residual.after(x, 2 * residual.before(x)).detach().round()
    tensor([[0., 4.]])
    """

    def __init__(self, norm_before: nn.Module, norm_after: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_before, self.norm_after = norm_before, norm_after
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def before(self, x: Tensor) -> Tensor:
        return self.norm_before(x)

    def after(self, x: Tensor, said: Tensor) -> Tensor:
        return x + self.dropout(self.norm_after(said))
