"""LARA: softmax attention by few random features, each drawn near the queries and keys of a segment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..attention import attention, attention_with_lse
from ..core.batched_problem import BatchedProblem
from ..core.problem import Problem
from ..core.score_forms import DotPairs, at_least_float32
from ..core.torch_modes import without_autocast
from ..errors import ConfigurationError
from ..kernels.validation import make_problem
from ..utils.numbers import whole_number
from .methods import Method, MixtureWeights, not_plain, scale_of
from .nystrom import segment_means

SMALLEST_SHARE = 1e-8
"""The share of a sample is at least this, as in the authors' code: the correction by queries may be below 0."""


@dataclass(frozen=True)
class Lara(Method):
    """Σ_c p_ic Σ_j softmax_j(ω_c · k_j - ‖k_j‖² / 2) v_j: time and memory linear in the length; see `lara_attention`.

    Args:
        landmarks: the samples ω_c, each from a distribution around the means of a segment of queries and of keys; all
            positions where these are fewer.
        seed: of the noise of the samples, which is its own for each head; None for none: ω_c is the mean.

    Raises:
        ConfigurationError: landmarks below 1; a seed that is no whole number.

    Source: Zheng et al. 2022 (arXiv 2204.04667), LARA.

    >>> import torch, regard
    >>> q = torch.randn(6, 8) / 4
    >>> regard.approximation(q, q, torch.randn(6, 8), regard.approximations.Lara(landmarks=3), lengths=()).error < 0.2
    True
    """

    landmarks: int
    seed: int | None = None

    def __post_init__(self) -> None:
        whole_number("landmarks", self.landmarks)
        if self.seed is not None and (isinstance(self.seed, bool) or not isinstance(self.seed, int)):
            raise ConfigurationError(f"seed is {self.seed!r}; it needs a whole number, or None for no noise")

    def __str__(self) -> str:
        return f"LARA by {self.landmarks} samples"

    @property
    def is_random(self) -> bool:
        return self.seed is not None

    def redraw(self, number: int) -> Lara:
        return super().redraw(number) if self.seed is None else replace(self, seed=self.seed + number)

    def why_not(self, problem: Problem) -> str:
        if problem.mask is not None:
            return (
                f"{problem.mask} is no mask for LARA, whose samples are drawn near means of all positions: leave the "
                "mask out, and pass each sequence without padding"
            )
        if reason := not_plain(problem, "LARA"):
            return reason
        if scale_of(problem) < 0:
            return f"scale is {scale_of(problem)}; LARA multiplies queries and keys by its root: it needs one above 0"
        return ""

    def run(self, problem: Problem) -> Tensor:
        query, key, value, scale = problem.pairs.query, problem.pairs.key, problem.value, scale_of(problem)
        if not problem.queries or not problem.keys:
            return attention(query, key, value, scale=scale)
        with without_autocast(value.device.type):
            samples = self._samples(problem)
            read, lse = attention_with_lse(samples.readers, samples.keys, at_least_float32(value), scale=1.0)
            return (samples.shares(lse) @ read).to(value.dtype)

    def weights(self, problem: Problem) -> MixtureWeights:
        samples = self._samples(problem)
        scores = DotPairs(samples.readers, samples.keys, 1.0).scores()
        return MixtureWeights(
            BatchedProblem.from_problem(problem), samples.shares(scores.logsumexp(-1)), scores.softmax(-1)
        )

    def _samples(self, problem: Problem) -> _Samples:
        """Samples of all query heads, near the keys of their group."""
        root = scale_of(problem) ** 0.5
        query, key = (at_least_float32(each) * root for each in (problem.pairs.query, problem.pairs.key))
        count = min(self.landmarks, problem.queries, problem.keys)
        centres, near = segment_means(query, count), segment_means(key, count)
        if problem.heads:
            near = near.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        means = centres + near
        return _Samples(query, key, centres, means, means if self.seed is None else means + self._noise(means))

    def _noise(self, means: Tensor) -> Tensor:
        """Numbers of N(0, 1) by the seed, the same on all devices."""
        generator = torch.Generator().manual_seed(self.seed or 0)
        return torch.randn(means.shape, generator=generator, device="cpu").to(means)


class _Samples(NamedTuple):
    """The samples ω, (..., H, C, D), of N(μ, I) with μ = `means`, which are sums of `centres` of queries and of keys.

    query, key: times the root of the scale.
    """

    query: Tensor
    key: Tensor
    centres: Tensor
    means: Tensor
    drawn: Tensor

    @property
    def readers(self) -> Tensor:
        """[ω, 1], whose products with `keys` are the logarithms of e^(ω · k - ‖k‖² / 2)."""
        return torch.cat([self.drawn, torch.ones_like(self.drawn[..., :1])], -1)

    @property
    def keys(self) -> Tensor:
        """[k, -‖k‖² / 2]."""
        return torch.cat([self.key, _half_squares(self.key)], -1)

    def shares(self, lse: Tensor) -> Tensor:
        """p, (..., H, M, C): of each sample for each query; lse: the logarithms of the sums over keys, (..., H, C)."""
        densities = self.drawn @ self.means.mT + _half_squares(self.means).mT  # [c, c'] log N(ω_c; μ_c', I) / N(ω_c)
        own = densities.diagonal(dim1=-2, dim2=-1)
        nearness = (self.query @ self.centres.mT).softmax(-1)
        balanced = (own - densities.logsumexp(-1)).exp().unsqueeze(-2)
        chosen = (balanced + nearness - nearness.mean(-1, keepdim=True)).clamp(min=SMALLEST_SHARE)
        return (chosen.log() + self.query @ self.drawn.mT + (lse - own).unsqueeze(-2)).softmax(-1)


def lara_attention(
    query: Tensor, key: Tensor, value: Tensor, *, landmarks: int, seed: int | None = None, scale: float | None = None
) -> Tensor:
    """Softmax attention by C random features of several distributions, in time and memory linear in the length.

    With queries q and keys k times the root of the scale, e^(q · k) is the mean of e^(ω · q - ‖q‖² / 2) times
    e^(ω · k - ‖k‖² / 2) over ω of N(0, I). Here each of C samples is drawn where queries and keys are: ω_c of
    N(μ_c, I), where μ_c is the sum of the means of segment c of the queries and of the keys. The output is Σ_c p_ic r_c
    with

        r_c = Σ_j softmax_j(ω_c · k_j - ‖k_j‖² / 2) v_j,
        p_ic ∝ α_ic N(ω_c; 0, I) / N(ω_c; μ_c, I) e^(ω_c · q_i) Σ_j e^(ω_c · k_j - ‖k_j‖² / 2),
        α_ic = N(ω_c; μ_c, I) / Σ_c' N(ω_c; μ_c', I) + t_ic - Σ_c' t_ic' / C,  t_ic = softmax_c(q̃_c · q_i)

    with q̃_c the mean of segment c of the queries; Σ_c p_ic is 1. Both sums that p is a quotient of are unbiased. All is
    differentiable, the samples too, in their means. There is no mask: samples are drawn near means of all positions, so
    it cannot be causal.

    Shapes: as `regard.attention`, query (..., heads, M, D), key and value of as many heads or a divisor of them; the
    output is (..., heads, M, Dv).

    Args:
        query: (..., heads, M, D).
        key: (..., key heads, N, D).
        value: (..., key heads, N, Dv).
        landmarks: C, 49 in the paper for images; as many as positions where these are fewer.
        seed: of the noise, another for each step of a training; None for none: ω_c is μ_c, as the authors' code does
            where it does not train.
        scale: of the scores, 1/√D by default.

    Raises:
        ConfigurationError: landmarks below 1, a seed that is no whole number, a scale below 0.
        ShapeError, DtypeError, DeviceError: of tensors that do not fit, as `regard.attention`.

    Source: Zheng et al. 2022 (arXiv 2204.04667), section 4. There means go through a linear map and a LayerNorm, which
    is for a layer to add. The authors' code draws noise of the variance 1 in units in which the densities have √D; here
    it has that of the densities.

    >>> import torch, regard
    >>> query, key, value = torch.randn(3, 1, 2, 100, 8)
    >>> regard.approximations.lara_attention(query, key, value, landmarks=8).shape
    torch.Size([1, 2, 100, 8])
    >>> alike = torch.zeros(2, 1), torch.zeros(2, 1), torch.tensor([[1.0], [3.0]])
    >>> regard.approximations.lara_attention(*alike, landmarks=2, seed=0)
    tensor([[2.],
            [2.]])
    """
    method, problem = Lara(landmarks, seed), make_problem(query, key, value, scale=scale)
    if reason := method.why_not(problem):
        raise ConfigurationError(f"lara_attention cannot compute this: {reason}")
    return method.run(problem)


def _half_squares(rows: Tensor) -> Tensor:
    """-‖x‖² / 2 of each row, (..., N, 1)."""
    return rows.square().sum(-1, keepdim=True) / -2
