"""Nyström attention: softmax attention through landmarks, the means of segments of queries and keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention import attention
from ..core.batched_problem import BatchedProblem
from ..core.problem import Problem
from ..core.score_forms import DotPairs, at_least_float32
from ..errors import ConfigurationError
from ..kernels.validation import make_problem
from ..utils.numbers import whole_number
from .methods import Method, MixtureWeights, not_plain, scale_of


@dataclass(frozen=True)
class Nystrom(Method):
    """softmax(Q K̃ᵀ) softmax(Q̃ K̃ᵀ)⁺ softmax(Q̃ Kᵀ) V: time and memory linear in the length; see `nystrom_attention`.

    Args:
        landmarks: the rows of Q̃ and K̃, means of as many segments; all positions where these are fewer.
        iterations: of the pseudo-inverse.

    Raises:
        ConfigurationError: landmarks or iterations below 1.

    Source: Xiong et al. 2021 (arXiv 2102.03902), Nyströmformer.

    >>> import torch, regard
    >>> q = torch.randn(6, 8)
    >>> exact = regard.approximations.Nystrom(landmarks=6, iterations=40)
    >>> regard.approximation(q, q, q, exact, lengths=()).error < 1e-3
    True
    """

    landmarks: int
    iterations: int = 6

    def __post_init__(self) -> None:
        for name in ("landmarks", "iterations"):
            whole_number(name, getattr(self, name))

    def __str__(self) -> str:
        return f"Nyström attention by {self.landmarks} landmarks"

    def why_not(self, problem: Problem) -> str:
        if problem.mask is not None:
            return (
                f"{problem.mask} is no mask for Nyström attention, whose landmarks are means of all positions: leave "
                "the mask out, and pass each sequence without padding"
            )
        return not_plain(problem, "Nyström attention")

    def run(self, problem: Problem) -> Tensor:
        query, key, value, scale = problem.pairs.query, problem.pairs.key, problem.value, scale_of(problem)
        if not problem.queries or not problem.keys:
            return attention(query, key, value, scale=scale)
        small_query, small_key = self._landmarks(problem)
        read = self._inverse(small_query, small_key, scale) @ at_least_float32(
            attention(small_query, key, value, scale=scale)
        )
        return attention(query, small_key, read.to(value.dtype), scale=scale)

    def weights(self, problem: Problem) -> MixtureWeights:
        small_query, small_key = self._landmarks(problem)
        scale = scale_of(problem)
        shares = DotPairs(problem.pairs.query, small_key, scale).scores().softmax(-1)
        shares = at_least_float32(shares) @ self._inverse(small_query, small_key, scale)
        columns = DotPairs(small_query, problem.pairs.key, scale).scores().softmax(-1)
        return MixtureWeights(BatchedProblem.from_problem(problem), shares, at_least_float32(columns))

    def _landmarks(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """Q̃ and K̃, of as many heads: those of a group share keys, and not what their landmarks read."""
        query, key = problem.pairs.query, problem.pairs.key
        small_key = segment_means(key, self.landmarks)
        if problem.heads:
            small_key = small_key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        return segment_means(query, self.landmarks), small_key

    def _inverse(self, small_query: Tensor, small_key: Tensor, scale: float) -> Tensor:
        weights = DotPairs(small_query, small_key, scale).scores().softmax(-1)
        return pseudo_inverse(at_least_float32(weights), self.iterations)


def nystrom_attention(
    query: Tensor, key: Tensor, value: Tensor, *, landmarks: int, iterations: int = 6, scale: float | None = None
) -> Tensor:
    """Softmax attention through landmarks: softmax(Q K̃ᵀ) Z (softmax(Q̃ Kᵀ) V), in time and memory linear in the length.

    Q̃ and K̃ are the means of `landmarks` segments of queries and keys, of nearly equal length, and Z is the
    pseudo-inverse of softmax(Q̃ K̃ᵀ), by `pseudo_inverse`. Each softmax has the scores times `scale`. All is
    differentiable. There is no mask: landmarks mix all positions, so it cannot be causal.

    Shapes: as `regard.attention`, query (..., heads, M, D), key and value of as many heads or a divisor of them; the
    output is (..., heads, M, Dv).

    Args:
        query: (..., heads, M, D).
        key: (..., key heads, N, D).
        value: (..., key heads, N, Dv).
        landmarks: 32 or 64 in the paper, for texts of 512 to 4,096 tokens; with as many as there are tokens it is
            softmax attention, up to the error of the inverse.
        iterations: of the pseudo-inverse.
        scale: of the scores, 1/√D by default.

    Raises:
        ConfigurationError: landmarks or iterations below 1.
        ShapeError, DtypeError, DeviceError: of tensors that do not fit, as `regard.attention`.

    Source: Xiong et al. 2021 (arXiv 2102.03902), Nyströmformer. There lengths are multiples of the landmarks; the layer
    of the paper also adds a depthwise convolution of the values.

    >>> import torch, regard
    >>> query, key, value = torch.randn(3, 1, 2, 100, 8)
    >>> regard.approximations.nystrom_attention(query, key, value, landmarks=8).shape
    torch.Size([1, 2, 100, 8])
    """
    method, problem = Nystrom(landmarks, iterations), make_problem(query, key, value, scale=scale)
    if reason := method.why_not(problem):
        raise ConfigurationError(f"nystrom_attention cannot compute this: {reason}")
    return method.run(problem)


def segment_means(rows: Tensor, count: int) -> Tensor:
    """The means of `count` segments of nearly equal length: (..., N, D) to (..., count, D), (..., N, D) if N is less.

    Position i of N is in segment ⌊i · count / N⌋.

    >>> segment_means(torch.tensor([[1.0], [3.0], [4.0], [8.0], [9.0]]), 2).flatten()
    tensor([2.6667, 8.5000])
    """
    length = rows.shape[-2]
    if length <= count:
        return rows
    wide = at_least_float32(rows)
    if length % count == 0:
        return wide.unflatten(-2, (count, -1)).mean(-2).to(rows.dtype)
    segment = torch.arange(length, device=rows.device) * count // length
    sums = wide.new_zeros(*rows.shape[:-2], count, rows.shape[-1]).index_add(-2, segment, wide)
    return (sums / segment.bincount(minlength=count).unsqueeze(-1)).to(rows.dtype)


def pseudo_inverse(matrices: Tensor, iterations: int = 6) -> Tensor:
    """The Moore-Penrose inverse of (..., m, n) matrices by products alone, (..., n, m), to a number of iterations.

    Z ← Z (13 I - A Z (15 I - A Z (7 I - A Z))) / 4 from Z = Aᵀ / (‖A‖₁ ‖A‖∞), whose error falls with its third power
    once it is below 1. Differentiable.

    Source: Razavi et al. 2014, as of Xiong et al. 2021 (arXiv 2102.03902); the norms are those of each matrix, as in
    the paper, where its published code takes the largest of all.

    >>> pseudo_inverse(torch.tensor([[2.0, 0.0], [0.0, 4.0]]), 20)
    tensor([[0.5000, 0.0000],
            [0.0000, 0.2500]])
    """
    stacked = matrices.reshape(-1, *matrices.shape[-2:])
    sizes = stacked.abs()
    norms = sizes.sum(-2).amax(-1) * sizes.sum(-1).amax(-1)
    inverse = stacked.mT / norms[:, None, None]
    for _ in range(iterations):  # multiplied out, so that each product adds what is before it, and no I is needed
        product = stacked @ inverse
        inner = torch.baddbmm(product, product, product, beta=7, alpha=-1)
        inner = torch.baddbmm(product, product, inner, beta=15, alpha=-1)
        inverse = torch.baddbmm(inverse, inverse, inner, beta=13 / 4, alpha=-1 / 4)
    return inverse.view(*matrices.shape[:-2], *inverse.shape[-2:])
