"""Methods that approximate softmax attention: feature maps, sparse masks, Linformer's projections, fewer bits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast

import torch
from torch import Tensor

from ..attention import attention, run_problem
from ..backends.base import TileWriter
from ..core.batched_problem import BatchedProblem
from ..core.cache_format import CacheFormat
from ..core.grid import Grid
from ..core.log_sum_exp import with_exact_lse
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, DotPairs, at_least_float32, per_head
from ..errors import ConfigurationError, DtypeError, MaskError, RegardError, ShapeError
from ..kernels import finite_problem
from ..kernels.hooks import compute_lse
from ..kernels.lens_pass import tile_writer
from ..kernels.validation import FLOATING
from ..lenses.forms import FAR
from ..linear import FavorPlus, FeatureMap, linear_attention
from ..linear.linear_mask import LinearMask, read_mask
from ..linear.linear_weights import make_weights_problem
from ..masks import Mask
from ..utils.numbers import whole_number

if TYPE_CHECKING:
    from typing import Self

NOT_CAUSAL = (
    "Linformer cannot be causal: each of its projected keys is a mixture of all positions, the later ones too, so that "
    "no mask can hide these from a query. A feature map such as regard.linear.Elu() and a sparse mask can be causal"
)
KNOWN = (
    "a feature map such as regard.linear.FavorPlus(dim) for linear attention, a mask such as masks.window(64) for "
    "sparse attention, regard.approximations.Linformer(projection) for mixed keys, "
    "a dtype such as torch.bfloat16, or a regard.nn.CacheFormat"
)


class ApproximateWeights(Protocol):
    """The weights that an approximation gives to the values, one tile after another."""

    def tile(self, batch: slice, rows: slice, columns: slice) -> Tensor:
        """Weights (b, H, m, n) of some batches, rows and columns; 0 where a pair is masked."""
        ...


class Method(ABC):
    """An approximation of softmax attention.

    Subclasses are frozen dataclasses that implement `why_not` and `run`, and `weights` where the output is a weighted
    sum of the values.
    """

    @property
    def is_random(self) -> bool:
        """Whether the method has random numbers that `redraw` draws anew."""
        return False

    def redraw(self, number: int) -> Self:
        """The same method with other random numbers, one for each number.

        Raises:
            ConfigurationError: nothing about the method is random.
        """
        raise ConfigurationError(f"{self} is not random, so there is nothing to draw again: leave redraws out")

    @abstractmethod
    def why_not(self, problem: Problem) -> str:
        """The reason why the method cannot compute a problem; empty if it can."""

    @abstractmethod
    def run(self, problem: Problem) -> Tensor:
        """The output (..., heads, M, Dv); called only if `why_not` is empty."""

    def weights(self, problem: Problem) -> ApproximateWeights | None:
        """The weights of the approximation, for a problem without NaN; None for a method that has none."""
        return None


MethodLike: TypeAlias = Method | FeatureMap | Mask | torch.dtype | CacheFormat
"""A method, or what stands for one: a feature map, a mask, a dtype, the format of a cache."""


def as_method(method: Any) -> Method:
    """The method that an argument stands for.

    Raises:
        ConfigurationError: another kind of argument; the message lists the kinds.
    """
    if isinstance(method, Method):
        return method
    if isinstance(method, Mask):
        return Masked(method)
    if isinstance(method, CacheFormat):
        from .stored import Stored  # which is a Method itself

        return Stored((method,))
    if isinstance(method, torch.dtype):
        return Rounded(method)
    if callable(method) and not isinstance(method, type):
        return Linearized(cast("FeatureMap", method))
    made = f"; make one, as {method.__name__}(...)" if isinstance(method, type) else ""
    raise ConfigurationError(f"method is {method!r}{made}: it needs {KNOWN}")


@dataclass(frozen=True)
class Linearized(Method):
    """Linear attention: exp(q · k / √D) is replaced by φ(q) · φ(k), in time and memory linear in the length.

    Args:
        feature_map: φ, from `regard.linear`, or a function of your own.

    Queries are multiplied by scale · √D before φ, so that `FavorPlus` estimates the exponential of the scores also
    where the scale is another than 1/√D. The mask may be causal, padding or documents.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), Eq. 4.

    >>> import torch, regard
    >>> q = torch.zeros(4, 8)
    >>> regard.approximation(q, q, torch.randn(4, 8), regard.linear.Elu(), lengths=()).error < 1e-6
    True
    """

    feature_map: FeatureMap

    def __str__(self) -> str:
        return f"linear attention by {self.feature_map}"

    @property
    def is_random(self) -> bool:
        return callable(getattr(self.feature_map, "redraw", None))

    def redraw(self, number: int) -> Linearized:
        if not self.is_random:
            return super().redraw(number)
        return Linearized(_redrawn(self.feature_map, number))

    def why_not(self, problem: Problem) -> str:
        if reason := not_plain(problem, "linear attention") or _mask_reason(problem):
            return reason
        dim = problem.pairs.query.shape[-1]
        if isinstance(self.feature_map, FavorPlus) and self.feature_map.dim != dim:
            return f"the feature map has dim={self.feature_map.dim}, but queries and keys have {dim}: FavorPlus({dim})"
        return ""

    def run(self, problem: Problem) -> Tensor:
        return linear_attention(
            _scaled_query(problem), problem.pairs.key, problem.value, feature_map=self.feature_map, mask=problem.mask
        )

    def weights(self, problem: Problem) -> TiledWeights | None:
        key, value = problem.pairs.key, problem.value
        try:
            features = make_weights_problem(
                _scaled_query(problem), key, value, feature_map=self.feature_map, mask=problem.mask
            )
        except ConfigurationError:  # features below 0, whose weights are no shares of a row
            return None
        return TiledWeights(features)


@dataclass(frozen=True)
class Masked(Method):
    """Sparse attention: softmax over the keys that a mask leaves, of those that the exact attention attends to.

    Args:
        mask: any of `regard.masks`, such as `window(64) | global_tokens(4)`.

    Source: Child et al. 2019 (arXiv 1904.10509), Eq. 2 and 3.

    >>> import torch, regard
    >>> q = torch.randn(4, 8)
    >>> regard.approximation(q, q, q, regard.masks.window(before=4, after=4), lengths=()).error < 1e-6
    True
    """

    mask: Mask

    def __str__(self) -> str:
        return f"attention where {self.mask}"

    def why_not(self, problem: Problem) -> str:
        try:
            self._masked(problem).keep(problem.grid().tile(slice(0, 1), slice(0, 1)))
        except RegardError as error:
            return str(error)
        return ""

    def run(self, problem: Problem) -> Tensor:
        return run_problem(self._masked(problem)).output

    def weights(self, problem: Problem) -> TiledWeights:
        return TiledWeights(self._masked(problem))

    def _masked(self, problem: Problem) -> Problem:
        return replace(problem, mask=self.mask if problem.mask is None else problem.mask & self.mask)


@dataclass(frozen=True)
class Rounded(Method):
    """Exact attention of queries, keys and values rounded to a dtype of fewer bits.

    Its weights are those of the rounded queries and keys; the output is rounded, too.

    Args:
        dtype: such as torch.bfloat16.

    Raises:
        DtypeError: no floating-point dtype that attention is computed in.

    >>> import torch, regard
    >>> q = torch.randn(4, 8)
    >>> 0 < regard.approximation(q, q, q, torch.bfloat16, lengths=()).error < 0.02
    True
    """

    dtype: torch.dtype

    def __post_init__(self) -> None:
        if self.dtype not in FLOATING:
            known = ", ".join(map(str, FLOATING))
            raise DtypeError(f"method is {self.dtype}; attention is computed in {known}: use one of these")

    def __str__(self) -> str:
        return f"attention in {self.dtype}"

    def why_not(self, problem: Problem) -> str:
        own = problem.value.dtype
        if torch.finfo(self.dtype).bits >= torch.finfo(own).bits:
            return f"query, key and value are {own}, and {self.dtype} does not have fewer bits: use one of fewer"
        return ""

    def run(self, problem: Problem) -> Tensor:
        return run_problem(self._rounded(problem)).output.to(problem.value.dtype)

    def weights(self, problem: Problem) -> TiledWeights:
        rounded, dtype = self._rounded(problem), problem.value.dtype
        return TiledWeights(_cast(rounded, dtype))

    def _rounded(self, problem: Problem) -> Problem:
        return _cast(problem, self.dtype)


class TiledWeights:
    """The weights of another problem, of softmax or of features, by tiles."""

    def __init__(self, problem: Problem) -> None:
        problem, lse = with_exact_lse(finite_problem(problem), compute_lse(problem))
        self.batched = BatchedProblem.from_problem(problem)
        lse = lse.reshape(*self.batched.shape[:3], 1)
        self.lse = torch.where(lse.isfinite(), lse, FAR)
        self._part: tuple[slice, TileWriter] | None = None

    def tile(self, batch: slice, rows: slice, columns: slice) -> Tensor:
        """Weights (b, H, m, n), which the next call overwrites."""
        if self._part is None or self._part[0] != batch:
            self._part = batch, tile_writer(self.batched.part(batch), self.lse[batch])
        return self._part[1].tile(rows, columns, masked=True, terms=False)[0]


@dataclass(frozen=True)
class RandomProjection:
    """E with entries N(0, 1/rank), (rank, length), drawn for each length from the seed.

    Source: Wang et al. 2020 (arXiv 2006.04768), Theorem 2.

    >>> RandomProjection(8)(100).shape
    torch.Size([8, 100])
    """

    rank: int
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("rank", self.rank)

    def __call__(self, length: int) -> Tensor:
        """The projection of this many positions."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.rank, length, generator=generator, device="cpu") * self.rank**-0.5

    def redraw(self, seed: int) -> RandomProjection:
        """A projection by another seed."""
        return RandomProjection(self.rank, seed)


@dataclass(frozen=True)
class SegmentMeans:
    """E whose rows are means over `rank` segments of nearly equal length; as many as positions where these are fewer.

    Source: Wang et al. 2020 (arXiv 2006.04768), section 4, general projections.

    >>> SegmentMeans(2)(4)
    tensor([[0.5000, 0.5000, 0.0000, 0.0000],
            [0.0000, 0.0000, 0.5000, 0.5000]])
    """

    rank: int

    def __post_init__(self) -> None:
        whole_number("rank", self.rank)

    def __call__(self, length: int) -> Tensor:
        """The projection of this many positions."""
        rank = min(self.rank, length)
        segments = torch.arange(length, device="cpu") * rank // max(length, 1)
        members = (segments == torch.arange(rank, device="cpu").unsqueeze(-1)).float()
        return members / members.sum(-1, keepdim=True)


@dataclass(frozen=True, eq=False)
class Linformer(Method):
    """softmax(Q (E K)ᵀ · scale) (F V): attention to `rank` mixtures of the keys and of the values.

    The weight of value j is Σ_r softmax(...)_ir F_rj, which may be negative, and whose sum need not be 1.

    Args:
        projection: E: `RandomProjection(rank)`, `SegmentMeans(rank)`, another function of the length, or a tensor
            (rank, length) or (key heads, rank, length), such as the `key_length.weight` of a
            `regard.nn.LinformerAttention`. Of a tensor shorter inputs use the first columns.
        value_projection: F; E by default.

    Raises:
        ConfigurationError: a projection that is neither.
        ShapeError: tensors that do not fit.

    Source: Wang et al. 2020 (arXiv 2006.04768), Eq. 7.

    >>> import torch, regard
    >>> q = torch.randn(6, 8)
    >>> exact = regard.approximations.Linformer(torch.eye(6))
    >>> regard.approximation(q, q, q, exact, lengths=()).error < 1e-6
    True
    """

    projection: Tensor | Callable[[int], Tensor]
    value_projection: Tensor | Callable[[int], Tensor] | None = None

    def __post_init__(self) -> None:
        for name, matrix in (("projection", self.projection), ("value_projection", self.value_projection)):
            if isinstance(matrix, Tensor) and matrix.ndim not in (2, 3):
                raise ShapeError(
                    f"{name} is {tuple(matrix.shape)}; it needs (rank, length) or (key heads, rank, length)"
                )
            if matrix is not None and (
                isinstance(matrix, type) or not (isinstance(matrix, Tensor) or callable(matrix))
            ):
                raise ConfigurationError(
                    f"{name} is {matrix!r}; it needs regard.approximations.RandomProjection(rank), SegmentMeans(rank), "
                    "or a tensor (rank, length) such as the weight of a regard.nn.LengthProjection"
                )

    def __str__(self) -> str:
        matrix = self.projection
        return f"Linformer by {f'a projection {tuple(matrix.shape)}' if isinstance(matrix, Tensor) else matrix}"

    __repr__ = __str__

    @property
    def is_random(self) -> bool:
        return any(callable(getattr(matrix, "redraw", None)) for matrix in (self.projection, self.value_projection))

    def redraw(self, number: int) -> Linformer:
        return (
            Linformer(*map(partial(_redrawn, number=number), self._both()))
            if self.is_random
            else super().redraw(number)
        )

    def why_not(self, problem: Problem) -> str:
        if reason := not_plain(problem, "Linformer"):
            return reason
        try:
            mask = read_mask(problem.mask, causal=False)
        except MaskError:
            return f"{problem.mask} is no mask for Linformer, whose projected keys mix all positions: it takes padding"
        if mask.causal:
            return NOT_CAUSAL
        if mask.documents is not None:
            return "each projected key of Linformer is a mixture of all documents: pass each as a sequence of its own"
        heads = problem.value.shape[-3] if problem.heads else 1
        for matrix in self._both():
            if isinstance(matrix, Tensor) and problem.keys > matrix.shape[-1]:
                return f"there are {problem.keys} keys, and the projection is for at most {matrix.shape[-1]}"
            if isinstance(matrix, Tensor) and matrix.ndim == 3 and matrix.shape[0] not in (1, heads):
                return f"the projection has {matrix.shape[0]} heads and there are {heads} key heads"
        ranks = [matrix.shape[-2] for matrix in self._matrices(problem)]
        if ranks[0] != ranks[1]:
            return f"the projection has the rank {ranks[0]} and that of values {ranks[1]}: they need the same"
        return ""

    def run(self, problem: Problem) -> Tensor:
        key_projection, value_projection, keep = self._projections(problem)
        pairs, value = problem.pairs, problem.value
        key = pairs.key if keep is None else pairs.key.where(keep, 0.0)
        value = value if keep is None else value.where(keep, 0.0)
        context = attention(pairs.query, key_projection @ key, value_projection @ value, scale=scale_of(problem))
        return context if keep is None else context.where(_any_key(keep, problem), 0.0)

    def weights(self, problem: Problem) -> MixtureWeights:
        key_projection, value_projection, keep = self._projections(problem)
        key, value_projection = problem.pairs.key, at_least_float32(value_projection)
        if keep is not None:
            key, value_projection = key.where(keep, 0.0), value_projection * keep.mT
        mixed = DotPairs(problem.pairs.query, key_projection @ key, scale_of(problem))
        shares = mixed.scores().softmax(-1)  # (..., heads, M, rank)
        return MixtureWeights(BatchedProblem.from_problem(problem), shares, value_projection)

    def _both(self) -> tuple[Any, Any]:
        """E and F as they were passed."""
        return self.projection, self.projection if self.value_projection is None else self.value_projection

    def _matrices(self, problem: Problem) -> list[Tensor]:
        """E and F for the problem's keys, (rank, N) or (key heads, rank, N)."""
        value, matrices = problem.value, []
        for matrix in self._both():
            matrix = matrix[..., : problem.keys] if isinstance(matrix, Tensor) else matrix(problem.keys)
            matrix = matrix.detach().to(value.device, value.dtype)
            matrices.append(matrix[0] if matrix.ndim == 3 and not problem.heads else matrix)
        return matrices

    def _projections(self, problem: Problem) -> tuple[Tensor, Tensor, Tensor | None]:
        """E and F for the problem's keys, and which keys exist, (..., N, 1), None for all."""
        return (*self._matrices(problem), _mask_of_keys(problem, read_mask(problem.mask, causal=False)))  # type: ignore[return-value]


class MixtureWeights:
    """The weights Σ_r p_ir F_rj of mixtures, by tiles; F for each key head, or for each head."""

    def __init__(self, batched: BatchedProblem, shares: Tensor, projection: Tensor) -> None:
        self.shares = batched.flatten_batch(shares.expand(*batched.problem.weights_shape[:-1], shares.shape[-1]))
        heads = max([batched.pairs.key.shape[1], *projection.shape[-3:-2]])
        axes = (heads,) if batched.problem.heads else ()
        projection = projection.expand(*batched.leading, *axes, *projection.shape[-2:])
        self.projection = batched.flatten_batch(projection)  # (B, Hk or H, rank, N)

    def tile(self, batch: slice, rows: slice, columns: slice) -> Tensor:
        """Weights (b, H, m, n)."""
        projection = self.projection[batch, :, :, columns]
        return per_head(lambda folded: folded @ projection, self.shares[batch, :, rows], projection)


def _redrawn(source: Any, number: int) -> Any:
    """A feature map or projection with other random numbers; what is not random, as it is."""
    redraw = getattr(source, "redraw", None)
    return redraw(getattr(source, "seed", 0) + number) if callable(redraw) else source


def not_plain(problem: Problem, name: str) -> str:
    """Why a method without scores of pairs cannot compute a problem: a part of it that changes single scores."""
    if problem.normalizer is not None:
        return f"{name} approximates softmax attention, and this is {problem.normalizer_name} attention"
    if not isinstance(problem.pairs, DotPairs):
        return f"{name} approximates dot products, and the score is additive"
    present = {
        "a bias": problem.bias is not None,
        "a softcap": problem.softcap is not None,
        "sinks": problem.sinks is not None,
        "dropout": problem.dropout is not None,
    }
    parts = [part for part, is_there in present.items() if is_there]
    return f"{name} has no scores of single pairs, so it cannot have {' or '.join(parts)}" if parts else ""


def _mask_reason(problem: Problem) -> str:
    """Why linear attention cannot compute a problem with this mask and these positions."""
    try:
        mask = read_mask(problem.mask, causal=False)
    except MaskError as error:
        return str(error)
    if (mask.causal or mask.documents is not None) and (problem.queries != problem.keys or problem.shift != 0):
        return (
            f"there are {problem.queries} queries and {problem.keys} keys; causal linear attention and documents need "
            "a query for each key, at its position"
        )
    return ""


def _mask_of_keys(problem: Problem, mask: LinearMask) -> Tensor | None:
    """Which keys exist, as a tensor that broadcasts to (..., key heads, N, 1); None for all."""
    grid = Grid.from_lengths(1, problem.keys, heads=problem.heads, device=problem.value.device)
    keep = mask.keep(grid)  # (..., N)
    return None if keep is None else keep.unsqueeze(-1)


def _any_key(keep: Tensor, problem: Problem) -> Tensor:
    """Whether a sequence has any key: keep (..., N, 1) to (..., 1, 1), for the query's heads."""
    exists = keep.any(-2, keepdim=True)
    if exists.ndim < 3 or exists.shape[-3] == 1 or not problem.heads:
        return exists
    return exists.repeat_interleave(problem.pairs.query.shape[-3] // exists.shape[-3], -3)


def _scaled_query(problem: Problem) -> Tensor:
    """The queries times scale · √D, for which dot products over √D are the scores."""
    factor = scale_of(problem) * problem.pairs.query.shape[-1] ** 0.5
    return problem.pairs.query if abs(factor - 1.0) < 1e-12 else problem.pairs.query * factor


def scale_of(problem: Problem) -> float:
    """The scale of the dot products."""
    return problem.pairs.scale if isinstance(problem.pairs, DotPairs) else 1.0


def _cast(problem: Problem, dtype: torch.dtype) -> Problem:
    """The problem with its pairs and values in another dtype."""
    pairs = problem.pairs
    changed: dict[str, Any] = {"query": pairs.query.to(dtype), "key": pairs.key.to(dtype)}
    if isinstance(pairs, AdditivePairs):
        changed["weight"] = pairs.weight.to(dtype)
    return replace(problem, pairs=replace(pairs, **changed), value=problem.value.to(dtype))
