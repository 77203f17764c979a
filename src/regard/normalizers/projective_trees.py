"""Structured attention over trees whose arcs do not cross: the parents of tokens, by sums over spans."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..core.normalizer import INFINITY
from ..core.torch_modes import under_dispatch_mode, under_forward_mode, under_transform
from .tree_normalizer import TreeNormalizer

IMPOSSIBLE = -1e290
"""The logarithm of 0 in sums over spans: finite, so that differences of it are no NaN, and sums do not overflow."""
STEP = 2.0**-200
"""The imaginary part of a step: its square is beyond all digits of float64, and its product with a share is above 0."""


@dataclass(frozen=True)
class ProjectiveTrees(TreeNormalizer):
    """w_ij = p(the parent of token i is token j), over all trees of the tokens whose arcs do not cross; w_ii: of none.

    p(tree) ∝ exp(Σ_i s_i,parent(i)), where s_ii is the score of i as a root. A tree is projective: the tokens between a
    token and its parent are the parent's descendants, and so no arc leads over a root. It has one root, or several
    where not `single_root`. Each row sums to 1. Where arcs may cross it is `DependencyTrees`.

    By Eisner's algorithm a span of tokens under a head at one of its ends is a shorter one and that of the head's last
    child, so that the sums over all trees of all spans take N³ steps and N² numbers; the derivatives of the logarithm
    of the last sum in the scores are the weights. They are sums of positive numbers: nothing cancels, whatever the
    scores. Their own derivatives are those of a step along the upstream gradient, as the matrix of the second
    derivatives of a logarithm is symmetric: a complex step, whose imaginary part is exact, in N² numbers as well; third
    derivatives take N³. Sums are in float64, of all spans of one length at a time: N steps.

    Queries are the tokens that keys are: as many, in the same order. A token that attends to nothing, or that no token
    attends to, itself included, as padding, is left out: it has no parent and is none, and arcs may lead over it. Where
    the mask leaves no tree at all, weights are NaN; with the diagonal unmasked there always is one of several roots.

    Source: Kim et al. 2017 (arXiv 1702.00887), section 3.2, syntactic attention, with Eisner's algorithm (1996); there
    the potential of a pair comes from a network of both tokens, and the root is a token of its own before the first.

    There is no log-sum-exp and no sink.

    Args:
        single_root: whether only trees with one root count.

    Raises:
        ShapeError: of the call, which has not as many queries as keys.

    >>> import torch, regard
    >>> equal = torch.zeros(1, 3, 3)    # of the 9 trees of three tokens with one root 7 are projective
    >>> 7 * regard.normalizers.ProjectiveTrees(single_root=True).normalize(equal)[0]
    tensor([[[3., 2., 2.],
             [3., 1., 3.],
             [2., 2., 3.]]])
    """

    name = "projective-trees"

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities of parents, and the logarithm of the sum of each row, 0 or -inf."""
        if not scores.numel():
            return scores, scores.sum(-1) - INFINITY
        wide = scores.double()
        masked = wide.detach() == -INFINITY
        empty = masked.all(-1) | masked.all(-2)
        arcs = torch.where(empty.unsqueeze(-1) | empty.unsqueeze(-2), _next_to(empty), wide).clamp(min=IMPOSSIBLE)
        if under_transform() or under_forward_mode() or under_dispatch_mode():
            weights = _marginals(arcs, self.single_root)
        else:
            weights = _Marginals.apply(arcs, self.single_root)
        sums = torch.zeros_like(wide[..., 0]).masked_fill(empty, -INFINITY)
        return weights.masked_fill(empty.unsqueeze(-1), 0.0).to(scores.dtype), sums.to(scores.dtype)


def _next_to(empty: Tensor) -> Tensor:
    """Scores of tokens that are left out: 0 for the neighbour towards the first other token, and else impossible.

    So each is a leaf in one place, which crosses no arc, and the trees are those of the others.
    """
    size = empty.shape[-1]
    at = torch.arange(size, device=empty.device)
    first = (~empty).long().argmax(-1, keepdim=True)
    neighbour = torch.where(at < first, at + 1, at - 1)
    parent = (neighbour.unsqueeze(-1) == at) & empty.unsqueeze(-1)
    return torch.full(parent.shape, IMPOSSIBLE, dtype=torch.float64, device=empty.device).masked_fill(parent, 0.0)


class _Marginals(torch.autograd.Function):
    """`_marginals`, which stores the scores alone, and differentiates by a complex step."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, single_root: bool) -> Tensor:
        ctx.save_for_backward(scores)
        ctx.single_root = single_root
        return _marginals(scores, single_root)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        (scores,) = ctx.saved_tensors
        if torch.is_grad_enabled():  # the gradient will be differentiated in turn
            scores = scores.view_as(scores)
            found = _marginals(scores, ctx.single_root)
            return torch.autograd.grad(found, scores, upstream[0], create_graph=True)[0], None
        return _marginals(torch.complex(scores, STEP * upstream[0]), ctx.single_root).imag / STEP, None


def _marginals(scores: Tensor, single_root: bool) -> Tensor:
    """The weights of finite scores (..., N, N), real or complex; NaN where all trees are impossible."""
    own = torch.eye(scores.shape[-1], dtype=torch.bool, device=scores.device)
    if single_root:
        spans = _Spans.of(scores.masked_fill(own, IMPOSSIBLE))
        total, weights = spans.below_one_root(scores.diagonal(dim1=-2, dim2=-1))
    else:  # a root is a child of one more token, before the first
        arcs = functional.pad(scores.masked_fill(own, IMPOSSIBLE), (1, 0, 1, 0), value=IMPOSSIBLE)
        above = torch.cat([torch.full_like(scores[..., :1, 0], IMPOSSIBLE), scores.diagonal(dim1=-2, dim2=-1)], -1)
        spans = _Spans.of(torch.cat([above.unsqueeze(-1), arcs[..., 1:]], -1))
        total, found = spans.below_the_first()
        weights = found[..., 1:, 1:] + torch.diag_embed(found[..., 1:, 0])
    return weights.masked_fill((_real(total) < IMPOSSIBLE / 2)[..., None, None], math.nan)


class _Spans(NamedTuple):
    """Logarithms of sums over the trees of spans, (2, ..., T, T): of heads at the left, and at the right.

    Index [.., i, w] of `heads` is the span of w + 1 tokens whose head is i, at its end; of `ends` that whose other end
    is i. `arcs` is as `heads`, of spans whose other end is a child of the head without further children there: `pairs`
    (..., T, T) has these without the score of the arc, [.., i, w] from i to i + w.
    """

    heads: Tensor
    ends: Tensor
    arcs: Tensor
    pairs: Tensor

    @classmethod
    def of(cls, scores: Tensor) -> _Spans:
        """From the scores of arcs (..., T, T), [child, parent], from the short spans to the long ones."""
        size = scores.shape[-1]
        empty = scores.new_zeros(2, *scores.shape)
        spans = cls(empty, empty.clone(), empty.clone(), empty[0].clone())
        for width in range(1, size):
            pairs = _log_sum(spans.splits(width))
            for side, arc in enumerate((scores.diagonal(-width, -2, -1), scores.diagonal(width, -2, -1))):
                spans.arcs[side, ..., _heads(side, size, width), width] = pairs + arc
            spans.pairs[..., : size - width, width] = pairs
            for side in (0, 1):
                found = _log_sum(spans.last_children(side, width))
                spans.heads[side, ..., _heads(side, size, width), width] = found
                spans.ends[side, ..., _heads(1 - side, size, width), width] = found
        return spans

    def splits(self, width: int) -> Tensor:
        """The spans below both ends of each span, (..., T - width, width), by where they meet."""
        left = self.heads[0, ..., : self.size - width, :width]
        return left + self.heads[1, ..., width:, :width].flip(-1)

    def last_children(self, side: int, width: int) -> Tensor:
        """The spans to the head's last child, and below that, (..., T - width, width)."""
        arcs = self.arcs[side, ..., _heads(side, self.size, width), 1 : width + 1]
        return arcs + self.ends[side, ..., _heads(1 - side, self.size, width), :width].flip(-1)

    @property
    def size(self) -> int:
        """T."""
        return self.pairs.shape[-1]

    def below_the_first(self) -> tuple[Tensor, Tensor]:
        """The sum over the trees of all tokens with the first as root, and the probability of each arc, (..., T, T)."""
        total, counts = self.heads[0, ..., 0, -1], torch.zeros_like(self.heads)
        counts[0, ..., 0, -1] = 1.0
        return total, self.arc_counts(counts)

    def below_one_root(self, roots: Tensor) -> tuple[Tensor, Tensor]:
        """Of any root, with scores (..., T) of its own; probabilities with those of the roots on the diagonal."""
        before, behind = self.heads[1].diagonal(dim1=-2, dim2=-1), self.heads[0].flip(-1).diagonal(dim1=-2, dim2=-1)
        logarithms = roots + before + behind
        total = _log_sum(logarithms)
        shares = (logarithms - total.unsqueeze(-1)).exp()
        counts = torch.stack([torch.diag_embed(shares).flip(-1), torch.diag_embed(shares)])
        return total, self.arc_counts(counts) + torch.diag_embed(shares)

    def arc_counts(self, counts: Tensor) -> Tensor:
        """The expected number of each arc, (..., T, T), from those of spans as `heads` that are no part of others.

        A span's number goes to what it may be made of by the share that it has, from the long spans to the short ones.
        """
        size, of_ends, of_arcs = self.size, torch.zeros_like(counts), torch.zeros_like(counts)
        found = torch.zeros_like(counts[0])
        for width in range(size - 1, 0, -1):
            for side in (0, 1):
                heads, ends = _heads(side, size, width), _heads(1 - side, size, width)
                logarithms = self.last_children(side, width) - self.heads[side, ..., heads, width].unsqueeze(-1)
                own = counts[side, ..., heads, width] + of_ends[side, ..., ends, width]
                shares = own.unsqueeze(-1) * logarithms.exp()
                of_arcs[side, ..., heads, 1 : width + 1] += shares
                of_ends[side, ..., ends, :width] += shares.flip(-1)
            left, right = (of_arcs[side, ..., _heads(side, size, width), width].clone() for side in (0, 1))
            found.diagonal(-width, -2, -1).copy_(left)
            found.diagonal(width, -2, -1).copy_(right)
            logarithms = self.splits(width) - self.pairs[..., : size - width, width].unsqueeze(-1)
            shares = (left + right).unsqueeze(-1) * logarithms.exp()
            counts[0, ..., : size - width, :width] += shares
            counts[1, ..., width:, :width] += shares.flip(-1)
        return found


def _heads(side: int, size: int, width: int) -> slice:
    """The left ends of spans of width + 1 of so many tokens, or the right ones."""
    return slice(width, size) if side else slice(size - width)


def _log_sum(logarithms: Tensor) -> Tensor:
    """Log Σ e^x over the last axis, of finite numbers."""
    peak = _real(logarithms).detach().amax(-1, keepdim=True)
    return (logarithms - peak).exp().sum(-1).log() + peak.squeeze(-1)


def _real(numbers: Tensor) -> Tensor:
    """The real parts."""
    return numbers.real if numbers.is_complex() else numbers
