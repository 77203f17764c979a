"""CoPE: positions that are counted by gates, so that a query may count sentences, or words of a kind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.finite import waits
from ..core.grid import Grid
from ..core.problem import Problem
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, DtypeError, ShapeError
from .all_pairs import AllPairs, scaled_product, score_scale, wide_key, wide_query, without_batch_of_one
from .base import Bias, describe_tensor, is_floating
from .distance_tables import ContentBias
from .relative_vectors import heads_side, per_head_vectors
from .row_bias import RowBias

if TYPE_CHECKING:
    from ..masks import Mask


@dataclass(frozen=True, eq=False, repr=False)
class CountedPositions(RowBias):
    """query · vectors[p], interpolated, for p_ij the sum of the gates σ(scale · q_i · k) of keys from j on; see `cope`.

    Shapes: query (..., heads, M, D), key (..., heads, N, D), vectors (heads, positions, D).
    """

    query: Tensor
    key: Tensor
    vectors: Tensor
    scale: float
    mask: Mask | None

    def of_rows(self, grid: Grid, keep: Tensor | None) -> Tensor:
        query = self.query[..., grid.rows, :]
        gates = torch.sigmoid(self.scale * (query @ self.key[..., grid.columns, :].mT))
        return interpolated(query @ self.vectors.mT, gates if keep is None else gates * keep)

    def __repr__(self) -> str:
        return f"counted positions {describe_tensor(self.vectors)}"


class CountedRows(Protocol):
    """What a backend offers for rows of gates, and of products with the vectors, without gradients."""

    def takes(self, *rows: Tensor) -> bool:
        """Whether it computes with these tensors."""
        ...

    def interpolated(self, table: Tensor, gates: Tensor) -> Tensor:
        """As the function `interpolated`."""
        ...


_codes: list[CountedRows] = []


def register_positions(code: CountedRows) -> None:
    """Have a backend compute the rows that it takes."""
    _codes.append(code)


def interpolated(table: Tensor, gates: Tensor) -> Tensor:
    """The numbers of a table (..., m, positions) at the sums of gates (..., m, n) over each key and those after it."""
    if table.shape[:-1] == gates.shape[:-1]:
        for code in _codes:
            if code.takes(table, gates):
                return code.interpolated(table, gates)
    last = table.shape[-1] - 1
    places = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=last)  # p_ij
    steps = pad(table.diff(dim=-1), (0, 1))
    below = places.detach().long().clamp_(0, last)  # of NaN, too, which is no index
    return torch.addcmul(table.gather(-1, below), places.frac(), steps.gather(-1, below))


@dataclass(frozen=True, eq=False, repr=False)
class Cope(ContentBias, AllPairs):
    """Vectors for counted positions; see `cope`."""

    reads_mask: ClassVar[bool] = True
    vectors: Tensor

    def bound(self, problem: Problem) -> Bias:
        keys = problem.grid().key_positions
        if not (under_transform() or waits(keys)) and bool((keys.diff() <= 0).any()):
            raise ConfigurationError(
                "cope counts the keys from each key up to the query in the order of the columns, and key_positions are "
                "not in ascending order: sort keys, values and positions"
            )
        (query, scale), (key, _) = (heads_side(self, problem, side) for side in ("query", "key"))
        vectors = per_head_vectors(self, "vectors", self.vectors, problem)
        return CountedPositions(query, key, vectors, scale, problem.mask)

    def of_pairs(self, problem: Problem, keep: Tensor | None) -> Tensor:
        query = wide_query(problem)
        gates = scaled_product(query, wide_key(problem).mT, score_scale(problem)).sigmoid_()
        table = scaled_product(query, self.vectors.float().mT)
        return interpolated(table, gates if keep is None else gates * without_batch_of_one(keep))

    def __repr__(self) -> str:
        return f"cope({describe_tensor(self.vectors)})"


def cope(vectors: Tensor) -> Bias:
    """q_i · e[p_ij] with p_ij = Σ_{j <= k <= i} σ(s · q_i · k_k): positions that a query counts by its own gates.

    s is the scale of the scores, 1/√D by default. A gate near 1 counts a token, one near 0 does not; p is no whole
    number, and q · e is interpolated between its neighbours. Where the count is larger than the last position, that one
    is taken. Only keys that the mask leaves to the query are counted; it has to be causal, as keys after the query
    would be counted too.

    Shapes: vectors (heads or 1, positions, D), number 0 for a count of 0; gradients flow into them, and through the
    gates into queries and keys. Rows are computed as a whole, a few at a time: memory is linear in the length.

    Raises:
        DtypeError, ShapeError: vectors that are not as above, or do not fit the queries.
        ConfigurationError: keys in another order than their positions; an additive score.

    Source: Golovneva et al. 2024 (arXiv 2405.18719), Eq. 3 to 6; q · e is not scaled, as in the listing there.

    >>> import torch, regard
    >>> q = torch.zeros(1, 1, 4, 2)                          # gates of 1/2: two tokens count as one
    >>> q[..., 0] = 1.0
    >>> vectors = torch.tensor([[0.0, 0.0], [10.0, 0.0]])[None]
    >>> logits = regard.lenses.MaxLogit()
    >>> options = {"mask": regard.masks.causal(), "bias": regard.biases.cope(vectors)}
    >>> regard.observe(q, 0 * q, q, logits, **options)[logits].item()  # at the key one before: q · e[1]
    10.0
    """
    if not is_floating(vectors):
        has = vectors.dtype if isinstance(vectors, Tensor) else f"a {type(vectors).__name__}"
        raise DtypeError(f"cope needs floating-point vectors (heads, positions, D); this is {has}")
    if vectors.ndim != 3 or 0 in vectors.shape[:2]:
        raise ShapeError(
            f"cope needs vectors (heads, positions, D), or 1 in place of the heads; these have the shape "
            f"{tuple(vectors.shape)}"
        )
    return Cope(vectors)
