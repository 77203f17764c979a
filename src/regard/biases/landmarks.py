"""Landmark attention: a token at the end of each block of tokens decides how much weight the block has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.grid import Grid
from ..core.problem import Problem
from ..errors import ConfigurationError
from ..utils.pytree import tree_flatten
from .base import Bias, bias_parts
from .distance_tables import ContentBias
from .relative_vectors import heads_side
from .row_bias import RowBias

if TYPE_CHECKING:
    from ..masks import Mask


@dataclass(frozen=True, eq=False, repr=False)
class BlockWeights(RowBias):
    """Score of a block's landmark - log Σ exp(scores of its other keys), for keys of other blocks; see `landmarks`.

    Shapes: query (..., heads, M, D), key (..., heads, N, D).
    """

    query: Tensor
    key: Tensor
    scale: float
    size: int
    mask: Mask | None

    def of_rows(self, grid: Grid, keep: Tensor | None) -> Tensor:
        scores = self.scale * self.query[..., grid.rows, :] @ self.key[..., grid.columns, :].mT
        if keep is not None:  # a sum with -inf: to fill where a boolean says so takes several times as long
            scores = scores + torch.zeros(keep.shape, device=keep.device).masked_fill_(~keep, -torch.inf)
        is_landmark = grid.key % self.size == self.size - 1
        if grid.key_range is not None and grid.key_range.step == 1:
            shares = _of_whole_blocks(scores, grid.key_range.start % self.size, self.size)
        else:
            shares = _of_blocks(scores, is_landmark, _ranks(grid.key // self.size))
        own = grid.key // self.size == grid.query // self.size
        none = torch.zeros(is_landmark.shape, device=own.device).masked_fill_(is_landmark, -torch.inf)
        return torch.where(own, 0.0, shares) + none

    def structure(self, problem: Problem) -> tuple[int, bool]:
        """The size of blocks, and whether these are `in_place`."""
        return self.size, self.in_place(problem)

    def in_place(self, problem: Problem) -> bool:
        """Whether a problem has the call's own queries, keys and mask, consecutive, with a block's first key as its."""
        lengths = self.query.shape[-2] == problem.queries and self.key.shape[-2] == problem.keys
        if not lengths or problem.shift is None or problem.step != 1:
            return False
        begins = not isinstance(problem.key_positions, range) or problem.key_positions.start % self.size == 0
        return begins and _is_same_mask(self.mask, problem.mask)

    def __repr__(self) -> str:
        return f"weights of blocks of {self.size}"


@dataclass(frozen=True, repr=False)
class Landmarks(ContentBias):
    """Blocks weighted by their landmarks; see `landmarks`."""

    size: int

    def bound(self, problem: Problem) -> Bias:
        others = {"softcap": problem.softcap, "normalizer": problem.normalizer}
        given = [name for name, other in others.items() if other is not None]
        given += ["another bias"] if len(bias_parts(problem.bias)) > 1 else []
        if given:
            raise ConfigurationError(
                f"{self!r} weights blocks by a softmax of q · k alone, and the call has {given[0]}: leave it out. "
                "Positions come in by rotary embeddings of queries and keys"
            )
        (query, scale), (key, _) = (heads_side(self, problem, side) for side in ("query", "key"))
        return BlockWeights(query, key, scale, self.size, problem.mask)

    def __repr__(self) -> str:
        return f"landmarks({self.size})"


def landmarks(size: int) -> Bias:
    """Softmax within each block of keys, times the weight of the block's landmark: weights of landmark attention.

    The last token of each block of `size` positions is its landmark. A query weighs the keys of its own block and the
    landmarks of the other blocks by one softmax; the weight of a landmark goes to the other keys of its block, by a
    softmax over them. So w_ij = softmax_B(s_i)_j · w_i,landmark(B) for a key of another block B, and landmarks have no
    weight of their own. As a bias it is s_i,landmark(B) - log Σ_{k in B} e^{s_ik} for these keys, 0 in the query's own
    block, and -inf for landmarks.

    With `masks.causal() & masks.blocks(found, (1, size))`, of blocks found by `regard.selection.landmark_blocks`, a
    query sees its own block and those of the largest landmarks alone. A block whose landmark is masked, or all of whose
    other keys are, is left out of both softmaxes. The mask has to be causal: without one, later blocks have weights as
    earlier ones. Memory is linear: native code computes tiles of blocks, over consecutive positions whose first key
    begins a block, and reads a block of more than 64 tokens twice; of all others rows are computed as a whole, a few at
    a time.

    Args:
        size: the tokens of a block, with its landmark.

    Raises:
        ConfigurationError: a size below 2; a softcap, a normalizer, another bias or an additive score in the call.

    Source: Mohtashami and Jaggi 2023 (arXiv 2305.16300), section 3.1, with landmarks at a regular distance.

    >>> import torch, regard
    >>> q = torch.zeros(1, 1, 6, 2)
    >>> weights = regard.lenses.Weights(rows=slice(4, 6))
    >>> seen = regard.observe(q, q, q, weights, mask=regard.masks.causal(), bias=regard.biases.landmarks(3))
    >>> seen[weights][0, 0]  # key 4: the query's own block; landmark 2 gives its weight to the keys 0 and 1
    tensor([[0.1667, 0.1667, 0.0000, 0.3333, 0.3333, 0.0000],
            [0.1667, 0.1667, 0.0000, 0.3333, 0.3333, 0.0000]])
    """
    if not isinstance(size, int) or isinstance(size, bool) or size < 2:
        raise ConfigurationError(
            f"landmarks needs blocks of a whole number of tokens, at least 2 with the landmark; size is {size!r}"
        )
    return Landmarks(size)


def _is_same_mask(mask: Mask | None, other: Mask | None) -> bool:
    """Whether two masks are one, or a rebuilt one of the same tensors."""
    if mask is other:
        return True
    (tensors, spec), (others, other_spec) = tree_flatten(mask), tree_flatten(other)
    return spec == other_spec and all(a is b for a, b in zip(tensors, others, strict=True))


def _of_whole_blocks(scores: Tensor, start: int, size: int) -> Tensor:
    """For each key the score of its block's landmark, less the log-sum-exp of the block's other keys; (..., m, N).

    -inf where there is no landmark, or no other key. The keys are neighbours, and the first is at `start` in its block.
    """
    keys = scores.shape[-1]
    padded = pad(scores, (start, -(start + keys) % size), value=-torch.inf)
    by_block = padded.unflatten(-1, (-1, size))  # [..., m, blocks, size]
    others = by_block[..., :-1]
    peaks = others.detach().amax(-1)
    present = peaks > -torch.inf
    peaks = peaks.masked_fill(~present, 0.0)
    shares = _shares(by_block[..., -1], peaks, (others - peaks.unsqueeze(-1)).exp().sum(-1), present)
    return shares.unsqueeze(-1).expand_as(by_block).flatten(-2)[..., start : start + keys]


def _of_blocks(scores: Tensor, is_landmark: Tensor, blocks: Tensor) -> Tensor:
    """The same of keys in any order; blocks: the number of each key's, below N, that broadcasts to the scores."""
    blocks = blocks.expand(scores.shape)
    others, gates = scores.masked_fill(is_landmark, -torch.inf), scores.masked_fill(~is_landmark, -torch.inf)
    none = torch.full_like(scores, -torch.inf)
    peaks, of_landmarks = (none.scatter_reduce(-1, blocks, each.detach(), "amax") for each in (others, gates))
    present = peaks > -torch.inf
    peaks = peaks.masked_fill(~present, 0.0)
    sums = torch.zeros_like(scores).scatter_add(-1, blocks, (others - peaks.gather(-1, blocks)).exp())
    # A landmark's score by a sum: of a maximum autograd would divide the gradient among equal scores.
    found = torch.zeros_like(scores).scatter_add(-1, blocks, gates.masked_fill(gates == -torch.inf, 0.0))
    found = found.masked_fill(of_landmarks == -torch.inf, -torch.inf)
    return _shares(found, peaks, sums, present).gather(-1, blocks)


def _shares(gates: Tensor, peaks: Tensor, sums: Tensor, present: Tensor) -> Tensor:
    """Gate - log(sum · e^peak) of blocks, -inf where one has no gate or no other keys."""
    seen = present & (gates > -torch.inf)
    shares = torch.where(seen, gates, 0.0) - peaks - torch.where(seen, sums, 1.0).log()
    return shares.masked_fill(~seen, -torch.inf)


def _ranks(blocks: Tensor) -> Tensor:
    """The rank of each block among those in its row, from 0 on: (..., N).

    >>> _ranks(torch.tensor([7, 2, 7, 9]))
    tensor([1, 0, 1, 2])
    """
    ascending, order = blocks.sort(-1)
    steps = pad((ascending.diff(dim=-1) != 0).long().cumsum(-1), (1, 0))
    return torch.empty_like(steps).scatter_(-1, order, steps)
