"""Biases whose numbers of all pairs, where these are few, take a few operators of torch.

Small repeated calls compute them so, each time anew, where the checks of the first call hold for all of their kind.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ..core.score_forms import DotPairs
from .base import Bias, Sum, TensorBias
from .distance_index import DistanceIndex

if TYPE_CHECKING:
    from ..core.problem import Problem

MAX_TABLES = 64
"""The number of memoized tables of columns, of at most 512 KiB each."""


class AllPairs:
    """A bias that computes its numbers of all pairs at once, over default positions and (batch, heads, length, dim).

    It is beside `Bias`, and no abstract class itself: to ask whether an object is of one takes some steps of Python.

    reads_mask: whether they depend on which pairs exist.
    """

    reads_mask: ClassVar[bool] = False

    @abstractmethod
    def of_pairs(self, problem: Problem, keep: Tensor | None) -> Tensor:
        """The numbers that `values` of the bound bias has on the whole grid, differentiable in its tensors.

        It checks nothing: `bound` and `evaluate` refuse no other bias of this kind. What is not finite reaches pairs
        that no mask has to hide. keep: the pairs that exist, if `reads_mask`; None for all.
        """


class Described(NamedTuple):
    """A bias by its classes, its numbers, and shape, dtype, device and gradient of its tensors.

    learned: whether a tensor of it requires a gradient.
    """

    kind: Hashable
    learned: bool
    reads_mask: bool


def described(bias: object) -> Described | None:
    """What biases of one kind have in common; None of one that has numbers for all pairs in another way."""
    if type(bias) is Sum:
        left, right = described(bias.left), described(bias.right)
        if left is None or right is None:
            return None
        reads_mask = left.reads_mask or right.reads_mask
        return Described((Sum, left.kind, right.kind), left.learned or right.learned, reads_mask)
    if isinstance(bias, AllPairs):
        parts, reads_mask = vars(bias).values(), bias.reads_mask
    elif type(bias) is TensorBias:
        parts, reads_mask = (bias.pairs,), False
    else:
        return None
    kind: list[Any] = [type(bias)]
    learned = False
    for part in parts:
        if isinstance(part, Tensor):
            if type(part) not in (Tensor, Parameter) or part.is_nested:
                return None
            learned = learned or part.requires_grad
            part = part.shape, part.dtype, part.device, part.requires_grad
        kind.append(part)
    return Described(tuple(kind), learned, reads_mask)


def numbers_of_pairs(bias: Bias, problem: Problem, keep: Tensor | None) -> Tensor:
    """The numbers of a `described` bias, or sum of such, for all pairs: broadcastable to (batch, heads, M, N)."""
    if isinstance(bias, AllPairs):
        return bias.of_pairs(problem, keep)
    if isinstance(bias, Sum):
        return numbers_of_pairs(bias.left, problem, keep) + numbers_of_pairs(bias.right, problem, keep)
    if isinstance(bias, TensorBias):
        return bias.pairs
    raise AssertionError(f"{bias!r} does not compute its numbers of all pairs at once")


class PairColumns(NamedTuple):
    """Of a table by distance the columns that pairs have, None for all or most, and the one of each pair among them.

    Shapes: of_pairs (*leading, M, N), expanded.
    """

    reached: slice | None
    of_pairs: Tensor

    def among(self, vectors: Tensor) -> Tensor:
        """The vectors (heads, columns, D) that are reached."""
        return vectors if self.reached is None else vectors[:, self.reached]


@lru_cache(MAX_TABLES)
def pair_columns(index: DistanceIndex, queries: int, keys: int, leading: torch.Size, *, by_key: bool) -> PairColumns:
    """The columns of pairs at default positions; by_key: of the transposed pairs, (*leading, N, M).

    >>> from regard.biases.distance_index import ClippedDistances
    >>> pair_columns(ClippedDistances(3, 3), 2, 2, torch.Size(), by_key=False).of_pairs  # of the columns 2, 3 and 4
    tensor([[1, 2],
            [0, 1]])
    """
    with torch.inference_mode(False):
        distances = torch.arange(keys) - torch.arange(keys - queries, keys).unsqueeze(-1)
        columns = index(distances)
        first, last = (int(each) for each in columns.aminmax())
        # To leave out a few columns would cost more than it saves: memory with gaps makes products slow.
        reached = slice(first, last + 1) if 2 * (last - first + 1) <= index.count else None
        columns = columns if reached is None else columns - first
        return PairColumns(reached, (columns.mT.contiguous() if by_key else columns).expand(*leading, -1, -1))


def score_scale(problem: Problem) -> float:
    """The scale of dot products, as `bound` refuses other scores."""
    pairs: DotPairs = problem.pairs  # type: ignore[assignment]
    return pairs.scale


def wide_query(problem: Problem) -> Tensor:
    """Queries in float32, as those of half precision are read."""
    return problem.pairs.query.float()


def wide_key(problem: Problem) -> Tensor:
    """Keys in float32, repeated to as many heads as the queries have."""
    key, heads = problem.pairs.key, problem.pairs.query.shape[1]
    if key.shape[1] != heads:
        key = key.repeat_interleave(heads // key.shape[1], 1)
    return key.float()


def scaled_product(left: Tensor, right: Tensor, scale: float = 1.0) -> Tensor:
    """Scale · left · right for (..., M, D) and (..., D, C), in as few operators as there are; differentiable.

    A batch of one is left out of (1, H, M, D), as the result broadcasts.
    """
    left, right = without_batch_of_one(left), without_batch_of_one(right)
    if left.ndim == right.ndim == 3 and left.shape[0] == right.shape[0]:
        return torch.bmm(left, right) if scale == 1.0 else torch.baddbmm(_NOTHING, left, right, beta=0, alpha=scale)
    products = left @ right
    return products if scale == 1.0 else products.mul_(scale)


def without_batch_of_one(tensor: Tensor) -> Tensor:
    """(H, M, N) of (1, H, M, N), any other tensor unchanged."""
    return tensor.squeeze(0) if tensor.ndim == 4 and tensor.shape[0] == 1 else tensor


_NOTHING = torch.zeros((), dtype=torch.float32, device="cpu")
"""What a product is added to, times 0."""
