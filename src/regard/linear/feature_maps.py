"""Feature maps φ of linear attention, whose weights are φ(q) · φ(k): elu + 1, ReLU, identity, softmax and FAVOR+."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ..core.tensor_memo import memoize_by_tensors
from ..errors import ConfigurationError, DtypeError, ShapeError
from ..utils.numbers import whole_number
from ..utils.other_types import needs_tensor

FeatureMap: TypeAlias = Callable[[Tensor], Tensor]
"""Any function of queries or keys (..., length, dim) to features (..., length, features), row by row."""


@dataclass(frozen=True)
class Elu:
    """φ(x) = elu(x) + 1, that is x + 1 for x > 0 and eˣ otherwise: all weights are positive.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), Eq. 7.

    >>> Elu()(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0.3679, 1.0000, 3.0000])
    """

    def __call__(self, x: Tensor) -> Tensor:
        # elu itself, eˣ - 1 for x < 0, would round small features to 0. For x > 0 the first term is 1.
        return x.clamp(max=0).exp() + x.relu()


@dataclass(frozen=True)
class Relu:
    """φ(x) = max(x, 0).

    Source: Qin et al. 2022 (arXiv 2202.08791), section 3.2.

    >>> Relu()(torch.tensor([-1.0, 0.0, 2.0]))
    tensor([0., 0., 2.])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return x.relu()


@dataclass(frozen=True)
class Identity:
    """φ(x) = x: weights q · k, which may be negative, as in RetNet, GLA and DeltaNet.

    Source: Sun et al. 2023 (arXiv 2307.08621), Eq. 5.

    >>> Identity()(torch.tensor([-1.0, 2.0]))
    tensor([-1.,  2.])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Softmax:
    """φ(x) = softmax(x) over the features of each row: positive, with sum 1.

    Source: Shen et al. 2021 (arXiv 1812.01243), Eq. 5, where keys are normalised along the length instead.

    >>> Softmax()(torch.tensor([[0.0, 0.0]]))
    tensor([[0.5000, 0.5000]])
    """

    def __call__(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


@dataclass(frozen=True)
class UnitNorm:
    """φ(x) / |φ(x)|, as the delta rule needs it: a key of norm 1 replaces exactly what the state has for it.

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3.

    >>> UnitNorm(Identity())(torch.tensor([3.0, 4.0]))
    tensor([0.6000, 0.8000])
    """

    feature_map: FeatureMap

    def __call__(self, x: Tensor) -> Tensor:
        return functional.normalize(self.feature_map(x), dim=-1)


@dataclass(frozen=True, eq=False)
class FavorPlus:
    """Positive orthogonal random features: E[φ(q) · φ(k)] = exp(q · k / √D), for D = dim of queries and keys.

    With x' = x / D^¼ and rows w_1, ..., w_m drawn from N(0, I), orthogonal within each D of them:

        φ(x)_r = exp(w_r · x' - |x'|² / 2) / √m      kernel="softmax"
        φ(x)_r = max(w_r · x', 0) / √m               kernel="relu"

    The error of the mean falls as 1/√m. The same map has to be used for queries and keys, and for all decoding steps
    of a sequence.

    Features of keys are stored relative to the largest of a head. In causal normalised attention on a CPU that is the
    largest so far; elsewhere (on CUDA, under a transform, where weights are not normalised) keys whose features are
    smaller by e^87 than those of any other are 0 in float32, and rows that attend to such keys alone are 0.

    Args:
        dim: D.
        num_features: m.
        seed: of the random rows; drawn from torch's default generator where it is None.
        kernel: "softmax" or "relu".
        matrix: the rows w, (m, D), in place of random ones.

    Raises:
        ConfigurationError: numbers below 1, another kernel.
        ShapeError: a matrix of another shape.

    Source: Choromanski et al. 2021 (arXiv 2009.14794), Lemma 1 and section 2.4.

    >>> features = FavorPlus(4, num_features=4096, seed=0)
    >>> q, k = torch.full((1, 4), 0.5), torch.full((1, 4), 0.25)
    >>> estimate, exact = (features(q) * features(k)).sum(), (q * k / 2).sum().exp()
    >>> bool((estimate / exact - 1).abs() < 0.05)
    True
    """

    dim: int
    num_features: int = 256
    seed: int | None = None
    kernel: str = "softmax"
    matrix: Tensor = field(default=None, repr=False)  # type: ignore[assignment]  # drawn where it is None

    def __post_init__(self) -> None:
        dim, count = whole_number("dim", self.dim), whole_number("num_features", self.num_features)
        if self.kernel not in ("softmax", "relu"):
            raise ConfigurationError(f"kernel is {self.kernel!r}; it needs 'softmax' or 'relu'")
        seed = int(torch.randint(2**62, (), device="cpu")) if self.seed is None else self.seed
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ConfigurationError(f"seed is {seed!r}; it needs a whole number, or None for one that is drawn")
        object.__setattr__(self, "seed", seed)
        if self.matrix is None:
            generator = torch.Generator().manual_seed(seed)
            object.__setattr__(self, "matrix", orthogonal_rows(count, dim, generator))
        elif refused := needs_tensor("matrix", self.matrix):
            raise DtypeError(refused)
        elif tuple(self.matrix.shape) != (count, dim):
            raise ShapeError(
                f"matrix has the shape {tuple(self.matrix.shape)}; it needs {(count, dim)}, one row a feature"
            )

    def redraw(self, seed: int | None = None) -> FavorPlus:
        """The same map with other random rows, by this seed or one from torch's default generator."""
        return replace(self, seed=seed, matrix=None)

    def __call__(self, x: Tensor) -> Tensor:
        """The features: (..., length, dim) to (..., length, num_features)."""
        if self.kernel == "relu":
            return self._projected(x).relu() * self.num_features**-0.5
        return self.logarithms(x).exp()

    def logarithms(self, x: Tensor) -> Tensor:
        """Logarithms of φ(x) for the softmax kernel, from which a maximum may be subtracted before `exp`."""
        scaled = x * self.dim**-0.25
        half_square = scaled.square().sum(-1, keepdim=True) / 2
        return self._projected(x) - (half_square + 0.5 * math.log(self.num_features))

    def _projected(self, x: Tensor) -> Tensor:
        """w_r · x' for each row of the matrix."""
        if x.shape[-1] != self.dim:
            raise ShapeError(
                f"the feature map has dim={self.dim}, but queries and keys have the dim {x.shape[-1]}: make it with "
                f"FavorPlus({x.shape[-1]})"
            )
        return x @ self._rows_for(x).mT

    def _rows_for(self, x: Tensor) -> Tensor:
        """The rows w / D^¼, (m, D), with device and dtype of x."""
        return memoize_by_tensors(
            (self.matrix,),
            ("rows", self.dim, x.device, x.dtype),
            lambda: (self.matrix * self.dim**-0.25).to(x.device, x.dtype),
        )

    def without_factors(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """φ of queries and keys for the softmax kernel, without factors of a query or a head: normalised, they cancel.

        Shapes: query (..., M, D), key (..., N, D) with at least one key; the largest logarithm of a query, and of a
        head's keys, is 0.
        """
        of_queries = self._projected(query)
        half_squares = key.square().sum(-1, keepdim=True) * (0.5 * self.dim**-0.5)
        of_keys = self._projected(key) - half_squares
        largest = of_keys.detach().amax((-2, -1), keepdim=True)
        return (of_queries - of_queries.detach().amax(-1, keepdim=True)).exp(), (of_keys - largest).exp()


def orthogonal_rows(count: int, dim: int, generator: torch.Generator | None = None) -> Tensor:
    """Rows (count, dim) in float64, each of distribution N(0, I), orthogonal to each other within blocks of `dim` rows.

    >>> rows = orthogonal_rows(3, 4)
    >>> bool((rows @ rows.T).triu(1).abs().max() < 1e-12)
    True
    """
    shape = 2, -(-count // dim), dim, dim
    normal, others = torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu")
    directions, triangle = torch.linalg.qr(normal)
    # By these signs the directions are uniform over orthogonal matrices (Mezzadri 2007, arXiv math-ph/0609050).
    directions = directions * triangle.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)
    return (directions.mT * others.norm(dim=-1, keepdim=True)).flatten(0, 1)[:count]


def query_features(feature_map: FeatureMap, query: Tensor) -> tuple[Tensor, Tensor | None]:
    """φ(query) e^{-c}, and c: the largest logarithm of each row, (..., M, 1), for FAVOR+; None, that is 0, for others.

    In normalised attention c cancels.
    """
    if not isinstance(feature_map, FavorPlus) or feature_map.kernel != "softmax":
        return feature_map(query), None
    logarithms = feature_map.logarithms(query)
    largest = logarithms.detach().amax(-1, keepdim=True)
    return (logarithms - largest).exp(), largest


def normalized_features(feature_map: FeatureMap, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """φ(query) and φ(key), of at least one key, without factors that cancel in normalised attention."""
    if isinstance(feature_map, FavorPlus) and feature_map.kernel == "softmax":
        return feature_map.without_factors(query, key)
    return feature_map(query), feature_map(key)


def key_features(
    feature_map: FeatureMap, key: Tensor, keep: Tensor | None = None, at_least: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """φ(key) e^{-c}, 0 for keys that are masked, and c: the largest logarithm of all keys, for FAVOR+; None for others.

    Shapes: key (..., N, D), keep bool that broadcasts to (..., N), c and at_least (..., 1, 1); c is at_least or more.
    """
    if not isinstance(feature_map, FavorPlus) or feature_map.kernel != "softmax":
        features = feature_map(key)
        return features if keep is None else features.where(keep.unsqueeze(-1), 0.0), None
    logarithms = feature_map.logarithms(key)
    if keep is not None:
        logarithms = logarithms.masked_fill(~keep.unsqueeze(-1), -torch.inf)
    if key.shape[-2]:
        largest = logarithms.detach().amax((-2, -1), keepdim=True)
    else:
        largest = logarithms.new_full((*key.shape[:-2], 1, 1), -torch.inf)
    if at_least is not None:
        largest = largest.maximum(at_least)
    largest = largest.masked_fill(largest == -torch.inf, 0.0)  # no key exists
    return (logarithms - largest).exp(), largest


LEAST_FEATURE = math.exp(-60)
"""The largest feature of a key relative to that of all: below it float32 would not have the smaller ones of the key."""


def are_far_apart(features: Tensor, keep: Tensor | None = None) -> bool:
    """Whether the features of some key (..., N, D) are too small relative to the largest of all, which is 1."""
    largest = features.amax(-1)
    if keep is not None:
        largest = largest.masked_fill(~keep, 1.0)
    return bool((largest < LEAST_FEATURE).any())
