"""Structured attention over trees: each token attends to what may be its parent in a dependency tree of the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.normalizer import INFINITY, Normalizer
from ..core.problem import Problem
from ..errors import ShapeError


@dataclass(frozen=True)
class DependencyTrees(Normalizer):
    """w_ij = p(the parent of token i is token j), over all trees of the tokens, and w_ii = p(token i is a root).

    p(tree) ∝ exp(Σ_i s_i,parent(i)), where s_ii is the score of i as a root; trees may cross (they are non-projective),
    and have one root, or several where not `single_root`. Each row sums to 1.

    By the matrix-tree theorem the sum over all trees is the determinant of L = diag(Σ_j A_ij + r_i) - A, with
    A_ij = e^s_ij off the diagonal and r_i = e^s_ii, and with X = L⁻¹

        w_ij = A_ij (X_ii - X_ji),    w_ii = r_i X_ii.

    With a single root the first column of L is r, and X_ii is not subtracted from in the first row, X_ji not for the
    first token. All rows are one system, so that all weights are in memory, and time grows with N³. It is solved in
    float64: L is close to singular where scores prefer cycles.

    Queries are the tokens that keys are: as many, in the same order. A token that attends to nothing has no parent, and
    may be one. Where the mask leaves no tree at all weights are NaN; with the diagonal unmasked there always is one of
    several roots.

    Source: Koo et al. 2007 (Structured Prediction Models via the Matrix-Tree Theorem), section 3; in attention Kim et
    al. 2017 (arXiv 1702.00887), section 3.2, whose trees do not cross, and Liu and Lapata 2018 (arXiv 1705.09207), with
    a single root.

    There is no log-sum-exp and no sink.

    Args:
        single_root: whether only trees with one root count.

    Raises:
        ShapeError: of the call, which has not as many queries as keys.

    >>> import torch, regard
    >>> equal = torch.zeros(1, 2, 2)    # two roots; or one of two, which is the parent of the other
    >>> regard.normalizers.DependencyTrees().normalize(equal)[0]
    tensor([[[0.6667, 0.3333],
             [0.3333, 0.6667]]])
    >>> regard.normalizers.DependencyTrees(single_root=True).normalize(equal)[0]
    tensor([[[0.5000, 0.5000],
             [0.5000, 0.5000]]])
    """

    single_root: bool = False

    name = "dependency-trees"
    refuses: ClassVar[Mapping[str, str]] = {"sinks": "each token has a parent or is a root, and nothing is divided"}

    @property
    def rows_before(self) -> None:
        """All rows: each weight depends on all scores."""
        return

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities of parents, and the logarithm of the sum of each row, 0 or -inf."""
        if not scores.numel():
            return scores, scores.sum(-1) - INFINITY
        wide = scores.double()
        peak = wide.detach().amax(-1, keepdim=True)
        empty = peak == -INFINITY  # of a token that attends to nothing
        masses = (wide - peak.masked_fill(empty, 0.0)).exp()  # a factor of a row is one of all trees
        roots = masses.diagonal(dim1=-2, dim2=-1)
        arcs = masses - torch.diag_embed(roots)
        totals = (masses.sum(-1) - roots if self.single_root else masses.sum(-1)) + empty.squeeze(-1)
        laplacian = torch.diag_embed(totals) - arcs
        if self.single_root:
            weights = self._of_single_root(laplacian, arcs, roots)
        else:
            inverse = torch.linalg.inv_ex(laplacian).inverse
            own = inverse.diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
            weights = arcs * (own - inverse.mT) + torch.diag_embed(roots) * own
        sums = torch.zeros_like(peak).masked_fill(empty, -INFINITY).squeeze(-1)
        return weights.to(scores.dtype), sums.to(scores.dtype)

    def _of_single_root(self, laplacian: Tensor, arcs: Tensor, roots: Tensor) -> Tensor:
        """The weights where the first column, whose arcs follow from the others, is the masses of roots."""
        inverse = torch.linalg.inv_ex(torch.cat([roots.unsqueeze(-1), laplacian[..., 1:]], -1)).inverse
        others = (torch.arange(roots.shape[-1], device=roots.device) > 0).to(inverse.dtype)
        own = (inverse.diagonal(dim1=-2, dim2=-1) * others).unsqueeze(-1)
        return arcs * (own - inverse.mT * others) + torch.diag_embed(roots * inverse[..., 0, :])

    def affected(self, rows: Tensor) -> Tensor:
        """All rows of a head with a marked one."""
        return rows.any(-2, keepdim=True).expand_as(rows)

    def for_problem(self, problem: Problem) -> Problem:
        """The problem with this normalizer."""
        if problem.queries != problem.keys:
            raise ShapeError(
                f"there are {problem.queries} queries and {problem.keys} keys: dependency trees need the queries of "
                "all tokens, in the order of their keys; attend to a whole sequence at once"
            )
        return Normalizer.for_problem(self, problem)
