"""Structured attention over trees: each token attends to what may be its parent in a dependency tree of the tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.normalizer import INFINITY
from .tree_normalizer import TreeNormalizer

LARGEST_ERROR = 1e-6
"""By how much a row may miss the sum 1; more is the error of a system that float64 does not solve."""


@dataclass(frozen=True)
class DependencyTrees(TreeNormalizer):
    """w_ij = p(the parent of token i is token j), over all trees of the tokens, and w_ii = p(token i is a root).

    p(tree) ∝ exp(Σ_i s_i,parent(i)), where s_ii is the score of i as a root; trees may cross (they are non-projective),
    and have one root, or several where not `single_root`. Each row sums to 1.

    By the matrix-tree theorem the sum over all trees is the determinant of L = diag(Σ_j A_ij + r_i) - A, with
    A_ij = e^s_ij off the diagonal and r_i = e^s_ii, where with a single root r_i is left out of the sum. In place of
    the first column L has r, which for several roots is the sum of its columns, and with X = L⁻¹

        w_ij = A_ij (Y_ii - Y_ji),    w_ii = r_i X_1i, and for several roots r_i Y_ii more,

    where Y is X with a first row and column of 0. No root is part of a larger number there, so that roots may be far
    likelier or less likely than arcs. All rows are one system, so that all weights are in memory, and time grows with
    N³. It is solved in float64: L is close to singular where scores prefer cycles.

    Queries are the tokens that keys are: as many, in the same order. A token that attends to nothing has no parent; it
    may be one, but not with a single root, which it is not below. Where the mask leaves no tree at all, or scores
    prefer cycles by more than float64 holds, weights are NaN; with the diagonal unmasked there always is a tree of
    several roots.

    Source: Koo et al. 2007 (Structured Prediction Models via the Matrix-Tree Theorem), section 3; in attention Kim et
    al. 2017 (arXiv 1702.00887), section 3.2, whose trees do not cross, `ProjectiveTrees`, and Liu and Lapata 2018
    (arXiv 1705.09207), with a single root.

    There is no log-sum-exp and no sink.

    Args:
        single_root: whether only trees with one root count.

    Raises:
        ConfigurationError: `single_root` is neither True nor False.
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

    name = "dependency-trees"

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities of parents, and the logarithm of the sum of each row, 0 or -inf."""
        if not scores.numel():
            return scores, scores.sum(-1) - INFINITY
        wide = scores.double()
        empty = (wide.detach() == -INFINITY).all(-1)  # tokens that attend to nothing, roots of the mass 1
        arcs, roots = self._masses(wide, empty)
        first = torch.nn.functional.one_hot((~empty).long().argmax(-1), wide.shape[-1]).bool()
        totals = arcs.sum(-1) + (empty if self.single_root else roots.exp())
        largest = roots.detach().amax(-1, keepdim=True)
        column = (roots - largest.masked_fill(largest == -INFINITY, 0.0)).exp()  # its factor is one of all trees
        laplacian = torch.diag_embed(totals) - arcs
        laplacian = torch.where(first.unsqueeze(-2), column.unsqueeze(-1), laplacian)
        inverse, failed = torch.linalg.inv_ex(laplacian)
        own = inverse.diagonal(dim1=-2, dim2=-1).masked_fill(first, 0.0)
        of_roots = column * inverse.masked_fill(~first.unsqueeze(-1), 0.0).sum(-2)
        if not self.single_root:
            of_roots = of_roots + roots.exp() * own
        weights = arcs * (own.unsqueeze(-1) - inverse.mT.masked_fill(first.unsqueeze(-2), 0.0))
        weights = weights + torch.diag_embed(of_roots.masked_fill(empty, 0.0))
        found = (weights.detach().sum(-1) - 1).abs() < LARGEST_ERROR
        treeless = (failed != 0) | ~(found | empty).all(-1)
        weights = weights.masked_fill(treeless[..., None, None], math.nan)
        return weights.to(scores.dtype), torch.zeros_like(wide[..., 0]).masked_fill(empty, -INFINITY).to(scores.dtype)

    def _masses(self, scores: Tensor, empty: Tensor) -> tuple[Tensor, Tensor]:
        """The masses of arcs, and the logarithms of those of roots; a factor of a row is one of all trees."""
        own = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
        below = own | empty.unsqueeze(-2) if self.single_root else own
        arcs, roots = scores.masked_fill(below, -INFINITY), scores.diagonal(dim1=-2, dim2=-1)
        peak = (arcs if self.single_root else scores).detach().amax(-1)
        peak = torch.where(peak == -INFINITY, roots.detach(), peak)
        peak = peak.masked_fill(peak == -INFINITY, 0.0)
        return (arcs - peak.unsqueeze(-1)).exp(), (roots - peak).masked_fill(empty, 0.0)
