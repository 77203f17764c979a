"""Lenses on contributions, weights times the norms of what their keys add, in place of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError, ShapeError
from .base import LensState, Reduction, WeightsLayout, WeightTile
from .pooled import Pooled
from .segment_mass import Mass
from .topk import TopK
from .value_norms import transformed_norms
from .weight_sums import Received
from .weights import Weights

Linear: TypeAlias = Weights | TopK | Pooled | Received | Mass
"""Lenses whose results are weights, sums or maxima of weights."""


class KeyScaled:
    """A reduction of w_ij · n_j in place of w_ij; factors n (B, H, N), at least 0.

    A pass over all weights adds log n_j to the scores where it can, and `inner` then gets the products.
    """

    needs_entropy_terms = False

    def __init__(self, inner: Reduction, factors: Tensor) -> None:
        self.inner, self.factors = inner, factors

    def add(self, tile: WeightTile) -> None:
        factors = self.factors[tile.batch, :, tile.columns].unsqueeze(-2)
        self.inner.add(replace(tile, weights=tile.weights * factors.to(tile.weights.dtype)))


@dataclass(frozen=True, eq=False)
class Contribution:
    """A lens on ‖α_ij v_j W_h‖ = α_ij · ‖v_j W_h‖, the norm of what key j adds to row i, in place of the weights α.

    A large weight on a key with a small value, as often on separators, contributes little. α is a number, so that one
    norm for each key and head is all that is needed, and memory stays linear in the lengths: `Contribution(TopK(8), w)`
    are the largest contributions of each row, `Contribution(Received(), w)` what each key contributes in all.

    A row of contributions sums to no fixed number: norms of terms that point in different directions do not add up. The
    bias of the output projection is no term. Dropout is not applied. No autograd but for `Weights`.

    Args:
        lens: what is shown of the contributions: `Weights`, `TopK`, `Pooled`, `Received` or `Mass`; its result has its
            own shape.
        output_weight: of the output projection behind these heads, (dim, heads · Dv), as `torch.nn.Linear` stores it.

    Raises:
        ConfigurationError: another lens.
        ShapeError: when it starts, an output weight that does not fit the heads and values.

    Source: Kobayashi et al. 2020 (arXiv 2004.10102), section 3.

    >>> import torch, regard
    >>> q, v = torch.zeros(1, 1, 2, 4), torch.tensor([[[[3.0], [0.0]]]])
    >>> shown = regard.lenses.Contribution(regard.lenses.Weights(), torch.tensor([[2.0]]))
    >>> regard.observe(q, q, v, shown)[shown][0, 0]
    tensor([[3., 0.],
            [3., 0.]])
    """

    lens: Linear
    output_weight: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.lens, Linear):
            raise ConfigurationError(
                "Contribution needs one of the lenses Weights, TopK, Pooled, Received and Mass, which are weights or "
                f"sums or maxima of them; it is {self.lens!r}"
            )

    def start(self, problem: Problem) -> _ScaledWeightsState | _ContributionState:
        """The state of one run."""
        layout = WeightsLayout.from_problem(problem)
        norms = _norms(problem, layout, self.output_weight)
        inner = self.lens.start(problem)
        if isinstance(self.lens, Weights | Received):
            columns = self.lens.columns if isinstance(self.lens, Weights) else slice(None)
            own = layout.to_result(norms[..., columns])
            return _ScaledWeightsState(inner, own.unsqueeze(-2) if isinstance(self.lens, Weights) else own)
        return _ContributionState(inner, norms)


def _norms(problem: Problem, layout: WeightsLayout, output_weight: Tensor) -> Tensor:
    """‖v_j W_h‖, (B, H, N), in float32 at least; 0 of values that are not finite: a row that attends to one is NaN."""
    value = problem.value.detach() if problem.heads else problem.value.detach().unsqueeze(-3)
    value, weight = value.to(layout.dtype), output_weight.detach().to(layout.dtype)
    norms = transformed_norms(torch.where(value.isfinite(), value, 0.0), weight)
    if norms.shape[-2] != layout.heads:
        raise ShapeError(
            f"output_weight has the shape {tuple(output_weight.shape)}, of {norms.shape[-2]} heads of "
            f"{value.shape[-1]}; the weights have {layout.heads}: it needs (dim, {layout.heads * value.shape[-1]})"
        )
    return norms.expand(*problem.batch, *norms.shape[-2:]).reshape(layout.batch, layout.heads, layout.keys)


class _ScaledWeightsState:
    """Results for each key, multiplied with the norms of the keys when they are there."""

    def __init__(self, inner: LensState[Any], norms: Tensor) -> None:
        self.inner, self.norms = inner, norms

    @property
    def reductions(self) -> Sequence[Reduction]:
        return self.inner.reductions

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        return self.inner.finish(problem, lse) * self.norms


class _ContributionState:
    """The reductions of a lens over the products of weights and norms."""

    def __init__(self, inner: LensState[Any], norms: Tensor) -> None:
        self.inner = inner
        self.reductions = tuple(KeyScaled(reduction, norms) for reduction in inner.reductions)

    def finish(self, problem: Problem, lse: Tensor) -> Any:
        return self.inner.finish(problem, lse)
