"""Talking heads: scores of all heads are mixed before the softmax, and its weights after."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from ..core.normalizer import INFINITY, Normalizer
from ..core.problem import Problem
from ..core.stored_normalizer import PairMask, Stored, StoredNormalizer, softmax_gradient, softmax_of
from ..utils.numbers import whole_number
from .parameters import check_head_matrix, check_tensors, with_shapes


class MixedHeads(StoredNormalizer):
    """A normalizer that mixes scores of different heads: a pair that any head may not attend to counts for none."""

    def existing(self, keep: Tensor) -> Tensor:
        """Those of all heads."""
        return keep.all(-3, keepdim=True)

    def backward(self, scores: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The steps of `normalize` once more, and back to front."""
        exists = existing_pairs(scores)
        mask = PairMask.of(exists, scores.dtype)
        stored = self.weigh(torch.where(exists, scores, 0.0), mask)[1]
        return self.differentiate(stored, upstream, mask)

    def affected(self, rows: Tensor) -> Tensor:
        """The same rows of all heads."""
        return rows.any(-3, keepdim=True).expand_as(rows)


@dataclass(frozen=True, eq=False, repr=False)
class TalkingHeads(MixedHeads):
    """w = after · softmax(before · s): the scores of a pair are mixed over the heads, and so are its weights.

    Each query attends in head g by w_gij = Σ_h after_gh softmax_j(Σ_e before_he s_eij). Rows sum to the sums of the
    rows of `after`, and weights may be below 0. A pair that any head may not attend to counts for none; a sink is one
    more score of each head, mixed as they are. Dropout drops mixed weights.

    Source: Shazeer et al. 2020 (arXiv 2003.02436), section 3, with as many heads of scores, of softmax and of values.

    How it is computed: a softmax needs all scores of its row, so weights can be mixed once the sums of all heads are
    known. Forward goes over the tiles twice, first for the sums, L = before · S and lse = log Σ_j e^L, then for the
    output, W = e^(L - lse) and O_g = Σ_j (after · W)_g V_g. Backward, with the gradient U = dO Vᵀ of mixed weights and
    P = afterᵀ · U, it is dL = W (P - δ); δ = Σ_j W P takes a pass over the tiles of its own, as it is no product of dO
    and O once weights are mixed. Then dS = beforeᵀ · dL, d after = Σ U Wᵀ and d before = Σ dL Sᵀ over all pairs.

    There is a log-sum-exp of the softmax, but parts of a row cannot be merged by it. `Observation.lse` has it.

    Args:
        before: (heads, heads), the weight of score e in logit h at [h, e]; None for scores as they are.
        after: (heads, heads), likewise of the softmax's weights; None for weights as they are.

    Raises:
        ShapeError, DtypeError, DeviceError: when attention runs, a matrix that does not fit.

    >>> import torch, regard
    >>> q, v = torch.zeros(2, 3, 4), torch.ones(2, 3, 1)
    >>> mixed = regard.normalizers.TalkingHeads(after=torch.tensor([[1.0, 0.0], [1.0, -1.0]]))
    >>> regard.attention(q[None], q[None], v[None], normalizer=mixed).squeeze()
    tensor([[1., 1., 1.],
            [0., 0., 0.]])
    """

    before: Tensor | None = None
    after: Tensor | None = None

    name = "talking heads"
    sums_to_one = False
    signed = True

    @classmethod
    def learned(cls, num_heads: int) -> Self:
        """Both matrices as parameters that start as the identity, which is attention without mixing.

        >>> import regard
        >>> layer = regard.nn.Attention(
        ...     regard.nn.Projections(16, num_heads=4), normalizer=regard.normalizers.TalkingHeads.learned(4)
        ... )
        >>> [tuple(each.shape) for name, each in layer.named_parameters() if "normalizer" in name]
        [(4, 4), (4, 4)]
        """
        heads = whole_number("num_heads", num_heads)
        return cls(nn.Parameter(torch.eye(heads)), nn.Parameter(torch.eye(heads)))

    def __post_init__(self) -> None:
        check_tensors(self)

    def __repr__(self) -> str:
        return with_shapes(self)

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The mixed weights, and the log-sum-exp of the softmax."""
        exists = existing_pairs(scores)
        weights, lse = softmax_of_pairs(mixed(self.before, torch.where(exists, scores, 0.0)), exists)
        return mixed(self.after, weights), lse

    def weigh(self, scores: Tensor, mask: PairMask | None) -> tuple[Tensor, Stored]:
        """The mixed weights; stored are the scores, and the softmax of the mixed ones."""
        logits = mixed(self.before, scores)
        if mask is not None:
            logits = logits + mask.added
        softmax = softmax_of(logits, mask)
        return mixed(self.after, softmax), (scores, softmax)

    def differentiate(
        self, stored: Stored, upstream: Tensor, mask: PairMask | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """DS, and d before, d after: those of the docstring of the class."""
        scores, softmax = stored
        of_logits = softmax_gradient(mixed(transposed(self.after), upstream), softmax)
        found = (
            None if self.before is None else products_of_heads(of_logits, scores),
            None if self.after is None else products_of_heads(upstream, softmax),
        )
        return mixed(transposed(self.before), of_logits), tuple(each for each in found if each is not None)

    def for_problem(self, problem: Problem) -> Problem:
        """The problem with this normalizer."""
        check_head_matrix("before", self.before, problem)
        check_head_matrix("after", self.after, problem)
        return Normalizer.for_problem(self, problem)


def existing_pairs(scores: Tensor) -> Tensor:
    """Which pairs all heads may attend to, (..., 1, M, n), by their scores (..., heads, M, n)."""
    return scores.detach().amin(-3, keepdim=True) != -INFINITY


def softmax_of_pairs(logits: Tensor, exists: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax of rows over the pairs that exist, and its log-sum-exp; 0 and -inf of rows without any."""
    hidden = ~exists
    logits = logits.masked_fill(hidden, torch.finfo(logits.dtype).min / 2)  # of -inf, an empty row would be NaN
    weights = logits.softmax(-1).masked_fill(hidden, 0.0)
    return weights, logits.detach().logsumexp(-1).masked_fill(hidden.all(-1), -INFINITY)


def mixed(matrix: Tensor | None, pairs: Tensor) -> Tensor:
    """Σ_h matrix_gh pairs_h, of pairs (..., heads, M, n); the pairs themselves without a matrix."""
    if matrix is None:
        return pairs
    matrix, shape = matrix.to(pairs.dtype), pairs.shape
    if len(shape) == 4 and shape[0] == 1:  # a product of two matrices, in fewer steps
        return torch.mm(matrix, pairs.reshape(shape[1], shape[2] * shape[3])).view(shape)
    return (matrix @ pairs.flatten(-2)).unflatten(-1, shape[-2:])


def transposed(matrix: Tensor | None) -> Tensor | None:
    """Its transpose, if there is a matrix."""
    return None if matrix is None else matrix.mT


def products_of_heads(left: Tensor, right: Tensor) -> Tensor:
    """Σ left_g · right_h over all pairs and batches, (heads, heads), of pairs (..., heads, M, n)."""
    left, right = left.flatten(-2), right.flatten(-2)
    if left.ndim == 3 and len(left) == 1:
        return torch.mm(left[0], right[0].mT)
    products = left @ right.mT
    return products.flatten(0, -3).sum(0) if products.ndim > 2 else products
