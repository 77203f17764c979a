"""Multi-token attention: scores and weights are convolved over neighbouring queries and keys, and mixed over heads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, pad

from ..core.normalizer import Normalizer
from ..core.problem import Problem
from ..core.stored_normalizer import PairMask, Stored, softmax_gradient, softmax_of
from ..errors import ConfigurationError, ShapeError
from ..utils.numbers import whole_number
from .parameters import check_head_matrix, check_tensor, check_tensors, with_shapes
from .talking_heads import MixedHeads, existing_pairs, mixed, products_of_heads, softmax_of_pairs, transposed

MOST_COPIED = 2**19
"""Up to so many numbers pairs are copied for each place of a kernel: a product of matrices takes fewer steps than a
convolution, whose code waits for larger ones."""


@dataclass(frozen=True, eq=False, repr=False)
class MultiToken(MixedHeads):
    """w = heads_after · (after * softmax(heads_before · (before * s))), where * is a convolution over queries and keys.

    A convolution with θ_h, (c_q, c_k), of head h looks at the query itself and at those before it, and at the keys on
    both sides: (θ * s)_hij = Σ_ab θ_hab s_h,i+a-c_q+1,j+b-(c_k-1)/2. Scores and weights of pairs that do not exist, as
    behind the mask or before the first query, count as 0, and those of the result are masked again. Then the heads are
    mixed, as in `TalkingHeads`. Weights may be below 0. A pair that any head may not attend to counts for none. Dropout
    drops what multiplies the values.

    Neighbours are those of the call: rows one after another, keys one after another. Documents packed into one sequence
    would reach into each other, so give each document a call of its own; a decoding step needs the c_q - 1 queries
    before its own, which the cache of `nn.MultiTokenAttention` has.

    Source: Golovneva et al. 2025 (arXiv 2504.00927), Eq. 3 to 5 and sections 3.1 to 3.3, heads in groups being
    matrices of blocks; the norm of heads behind it (section 3.4) belongs to a layer.

    How it is computed: some whole rows at a time, with the rows before them that the kernels reach to, whose scores are
    computed once more; memory is linear in the lengths. No sink: it has no place among the keys.

    Args:
        before: (heads, c_q, c_k), with c_k odd; None for scores as they are.
        after: likewise, of the softmax's weights.
        heads_before: (heads, heads), logit g from score h at [g, h]; None for scores as they are.
        heads_after: likewise, of the weights.

    Raises:
        ConfigurationError: an even number of keys.
        ShapeError, DtypeError, DeviceError: when attention runs, a tensor that does not fit.

    >>> import torch, regard
    >>> previous = torch.tensor([[[1.0], [0.0]]])  # the weights of the query before
    >>> scores = torch.tensor([[[0.0, -torch.inf], [0.0, 0.0]]])
    >>> regard.normalizers.MultiToken(after=previous).normalize(scores)[0]
    tensor([[[0., 0.],
             [1., 0.]]])
    """

    before: Tensor | None = None
    after: Tensor | None = None
    heads_before: Tensor | None = None
    heads_after: Tensor | None = None

    name = "multi-token"
    sums_to_one = False
    signed = True
    refuses: ClassVar[Mapping[str, str]] = {"sinks": "a sink has no place among the keys that are convolved"}

    def __post_init__(self) -> None:
        check_tensors(self)
        for name, kernel in (("before", self.before), ("after", self.after)):
            if kernel is not None and kernel.ndim == 3 and kernel.shape[-1] % 2 == 0:
                raise ConfigurationError(
                    f"{name} is {tuple(kernel.shape)}, over {kernel.shape[-1]} keys; it needs an odd number, as many "
                    "on each side of a key"
                )

    @classmethod
    def learned(cls, num_heads: int, queries: int, keys: int) -> Self:
        """Kernels (queries, keys) and matrices of all kinds, as parameters that start with attention as it is.

        >>> import regard
        >>> regard.normalizers.MultiToken.learned(4, queries=6, keys=11).rows_before
        10
        """
        heads, sizes = (
            whole_number("num_heads", num_heads),
            (whole_number("queries", queries), whole_number("keys", keys)),
        )
        kernel = torch.zeros(heads, *sizes)
        kernel[:, -1, sizes[1] // 2] = 1.0
        kernels, matrices = ([nn.Parameter(each.clone()) for _ in range(2)] for each in (kernel, torch.eye(heads)))
        return cls(*kernels, *matrices)

    @property
    def rows_before(self) -> int:
        """Those that both kernels together reach back to."""
        return sum(kernel.shape[-2] - 1 for kernel in (self.before, self.after) if kernel is not None)

    def __repr__(self) -> str:
        return with_shapes(self)

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and the log-sum-exp of the softmax."""
        exists = existing_pairs(scores)
        logits = mixed(self.heads_before, convolved(self.before, torch.where(exists, scores, 0.0)))
        weights, lse = softmax_of_pairs(logits, exists)
        if self.after is not None:
            weights = torch.where(exists, convolved(self.after, weights), 0.0)
        return mixed(self.heads_after, weights), lse

    def weigh(self, scores: Tensor, mask: PairMask | None) -> tuple[Tensor, Stored]:
        """The weights; stored are the scores, the convolved ones, the softmax, and the convolved weights."""
        if mask is not None:
            scores = scores.mul_(mask.factor)
        near = convolved(self.before, scores)
        logits = mixed(self.heads_before, near)
        softmax = softmax_of(logits if mask is None else logits + mask.added, mask)
        spread = convolved(self.after, softmax)
        if self.after is not None and mask is not None:
            spread = spread.mul_(mask.factor)
        return mixed(self.heads_after, spread), (scores, near, softmax, spread)

    def differentiate(
        self, stored: Stored, upstream: Tensor, mask: PairMask | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The steps of `weigh` back to front; the gradient of a kernel takes autograd several times as long."""
        scores, near, softmax, spread = stored
        of_spread = mixed(transposed(self.heads_after), upstream)
        if self.after is not None and mask is not None:
            of_spread = of_spread * mask.factor
        of_logits = softmax_gradient(scattered(self.after, of_spread), softmax)
        of_near = mixed(transposed(self.heads_before), of_logits)
        of_scores = scattered(self.before, of_near)
        gradients = (
            None if self.before is None else kernel_gradient(self.before, of_near, scores),
            None if self.after is None else kernel_gradient(self.after, of_spread, softmax),
            None if self.heads_before is None else products_of_heads(of_logits, near),
            None if self.heads_after is None else products_of_heads(upstream, spread),
        )
        of_scores = of_scores if mask is None else of_scores * mask.factor
        return of_scores, tuple(each for each in gradients if each is not None)

    def for_problem(self, problem: Problem) -> Problem:
        """The problem with this normalizer."""
        heads = problem.pairs.query.shape[-3] if problem.heads else 1
        for name, kernel in (("before", self.before), ("after", self.after)):
            check_tensor(name, kernel, problem)
            if kernel is not None and (kernel.ndim != 3 or len(kernel) != heads or not kernel.numel()):
                raise ShapeError(
                    f"{name} is {tuple(kernel.shape)}; it needs (heads, queries, keys), here ({heads}, ·, ·)"
                )
        check_head_matrix("heads_before", self.heads_before, problem)
        check_head_matrix("heads_after", self.heads_after, problem)
        return Normalizer.for_problem(self, problem)

    def affected(self, rows: Tensor) -> Tensor:
        """These rows and those behind them that look back to one, of all heads."""
        back = self.rows_before
        seen = pad(rows.any(-3, keepdim=True), (0, 0, back, 0)).unfold(-2, back + 1, 1).any(-1)
        return seen.expand_as(rows)


def convolved(kernel: Tensor | None, pairs: Tensor) -> Tensor:
    """Each head of pairs (..., heads, M, n) convolved with its kernel (heads, c_q, c_k); as they are without one."""
    if kernel is None or not pairs.numel():
        return pairs
    return _summed(kernel, _padded(kernel, pairs))


def scattered(kernel: Tensor | None, gradients: Tensor) -> Tensor:
    """The gradients of the pairs that `convolved` got, from those of what it returned."""
    if kernel is None or not gradients.numel():
        return gradients
    across, back = kernel.shape[-1] // 2, kernel.shape[-2] - 1
    return _summed(kernel.flip(-2, -1), pad(gradients, (across, across, 0, back)))


def kernel_gradient(kernel: Tensor, gradients: Tensor, pairs: Tensor) -> Tensor:
    """The gradient of the kernel of `convolved`: Σ gradients · pairs, shifted against each other, over all pairs."""
    padded, (rows, columns) = _padded(kernel, pairs), pairs.shape[-2:]
    if _places_are_few(kernel, pairs):
        products = gradients.flatten(-2).unsqueeze(-2) @ _places(kernel, padded).mT  # [..., heads, 1, places]
        return products.reshape(-1, *kernel.shape).sum(0)
    result = pairs.new_zeros(kernel.shape)
    for a in range(kernel.shape[-2]):
        for b in range(kernel.shape[-1]):
            products = gradients * padded[..., a : a + rows, b : b + columns]
            result[:, a, b] = products.sum((-2, -1)).reshape(-1, kernel.shape[0]).sum(0)
    return result


def _padded(kernel: Tensor, pairs: Tensor) -> Tensor:
    across, back = kernel.shape[-1] // 2, kernel.shape[-2] - 1
    return pad(pairs, (across, across, back, 0))


def _places_are_few(kernel: Tensor, pairs: Tensor) -> bool:
    """Whether a copy of the pairs for each place of the kernel stays in the cache; not in a graph, of any length."""
    return not torch.compiler.is_compiling() and pairs.numel() * kernel.shape[-2:].numel() <= MOST_COPIED


def _places(kernel: Tensor, padded: Tensor) -> Tensor:
    """What each place of a kernel is multiplied with, (..., heads, c_q · c_k, M · n)."""
    queries, keys = kernel.shape[-2:]
    rows, columns = padded.shape[-2] - queries + 1, padded.shape[-1] - keys + 1
    windows = padded.unfold(-2, rows, 1).unfold(-2, columns, 1)  # [..., heads, c_q, c_k, M, n]
    return windows.reshape(*padded.shape[:-2], queries * keys, rows * columns)


def _summed(kernel: Tensor, padded: Tensor) -> Tensor:
    """The sums over each place of a kernel, smaller than what is padded by its size less 1."""
    heads, (queries, keys), kernel = kernel.shape[0], kernel.shape[-2:], kernel.to(padded.dtype)
    learned = torch.is_grad_enabled() and (padded.requires_grad or kernel.requires_grad)
    if not learned and _places_are_few(kernel, padded):  # autograd takes long to add up the copies
        found = kernel.reshape(heads, 1, queries * keys) @ _places(kernel, padded)
        return found.view(*padded.shape[:-2], padded.shape[-2] - queries + 1, padded.shape[-1] - keys + 1)
    found = conv2d(padded.reshape(-1, heads, *padded.shape[-2:]), kernel.unsqueeze(1), groups=heads)
    return found.view(*padded.shape[:-2], *found.shape[-2:])
