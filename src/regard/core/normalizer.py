"""Normalizers of attention: how the weights of a row follow from its scores. That of softmax attention is None."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Self

import torch
from torch import Tensor

from ..errors import ConfigurationError, nearest
from ..utils.pytree import tree_replace, tree_tensors

if TYPE_CHECKING:
    from ..kernels.base import Kernel
    from .problem import Problem

INFINITY = float("inf")


class Normalizer(ABC):
    """The weights w_ij of a row from its scores s_ij; the output of attention is Σ_j w_ij · value_j.

    Subclasses implement `normalize`, and are dataclasses where they have parameters: their tensors are differentiated.
    Whole rows are passed to `normalize`, a few at a time: any function of a row can be a normalizer. One whose weights
    are quotients is a `RatioNormalizer`, whose rows are computed tile by tile and merged by their log-sum-exp.

    name: the word that plans, messages and records have for it. sums_to_one: whether the weights of every row with keys
    sum to 1. signed: whether weights may be below 0. refuses: the arguments of attention that have no meaning for it
    ("sinks", "dropout_p"), and why. kernels: those that compute it, in place of those that compute any.

    >>> class Uniform(Normalizer):
    ...     '''Each key that a row attends to has the same weight.'''
    ...     name = "uniform"
    ...     def normalize(self, scores):
    ...         exists = (scores > -torch.inf).to(scores.dtype)
    ...         count = exists.sum(-1)
    ...         return exists / count.clamp(min=1.0).unsqueeze(-1), count.log()
    >>> import regard
    >>> q, v = torch.randn(3, 4), torch.tensor([[1.0], [2.0], [6.0]])
    >>> regard.attention(q, q, v, mask=regard.masks.causal(), normalizer=Uniform())
    tensor([[1.0000],
            [1.5000],
            [3.0000]])
    """

    name: ClassVar[str]
    has_lse: ClassVar[bool] = False
    sums_to_one: ClassVar[bool] = True
    signed: ClassVar[bool] = False
    refuses: ClassVar[Mapping[str, str]] = MappingProxyType({})
    kernels: ClassVar[tuple[Kernel, ...] | None] = None

    @property
    def rows_before(self) -> int | None:
        """The rows before its own from whose scores the weights of a row follow as well; None for all of them.

        Where there are some, `normalize` gets rows in their order, the earlier ones too, over keys that are neighbours.
        None: it gets all rows, and all weights are in memory.
        """
        return 0

    @abstractmethod
    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of whole rows, and a number for each row; both are differentiable, twice where that is needed.

        Shapes: scores and weights (..., heads, M, n), of all heads and of n keys, in the order of the keys; numbers
        (..., heads, M). A score of -inf, of a masked pair, has weight 0. A row of such scores alone has weights 0 and
        the number -inf; other numbers mean what the normalizer wants: lenses read from them which rows attend to
        something.
        """

    def backward(self, scores: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradients of Σ upstream · weights in the scores and in each of `parameters`, of whole rows.

        Shapes: all (..., heads, M, n). Called without autograd; here it is autograd that differentiates `normalize`.
        """
        leaves = [tensor.detach().requires_grad_() for tensor in (scores, *self.parameters())]
        with torch.enable_grad():
            found = self.with_parameters(leaves[1:]).normalize(leaves[0])[0]
        of_scores, *others = torch.autograd.grad(found, leaves, upstream, allow_unused=True, materialize_grads=True)
        return of_scores.masked_fill_(scores == -INFINITY, 0.0), tuple(others)

    def affected(self, rows: Tensor) -> Tensor:
        """The rows whose weights depend on the scores of a marked one, (..., heads, M, ·) bool; here these alone."""
        return rows

    def refused(self, problem: Problem) -> str | None:
        """The first argument of a problem that has no meaning for this normalizer; None where all have one."""
        asked = {"sinks": problem.sinks, "dropout_p": problem.dropout, "softcap": problem.softcap}
        return next((name for name, given in asked.items() if given is not None and name in self.refuses), None)

    def for_problem(self, problem: Problem) -> Problem:
        """The problem with this normalizer, after a check that it fits; defaults that depend on a call are set here.

        Raises:
            RegardError: it does not fit the problem.
        """
        problem.normalizer = self
        return problem

    def merge(self, outputs: Tensor) -> Tensor:
        """The output for all keys from those for disjoint sets of keys, stacked in front: (P, ..., M, Dv).

        Where `has_lse`, it is not called: parts are then merged by their log-sum-exp.

        Raises:
            ConfigurationError: it does not follow from them.
        """
        raise ConfigurationError(
            f"{self!r} has no merge: its weights of some keys do not follow from the outputs for parts of the keys. "
            "Compute attention over all keys at once"
        )

    def parameters(self) -> tuple[Tensor, ...]:
        """The tensors that the weights depend on, with or without `requires_grad`."""
        return tuple(tree_tensors(self))

    def with_parameters(self, tensors: Sequence[Tensor]) -> Self:
        """A copy with other tensors as parameters, in the order of `parameters`."""
        return tree_replace(self, tensors) if tensors else self

    def of_head(self, head: int) -> Self:
        """The normalizer of one head: with its own parameters, of those that have heads as their first axis.

        Here a parameter is a number for all heads, (), or one for each.
        """
        return self.with_parameters([each[head] if each.ndim else each for each in self.parameters()])


class RatioNormalizer(Normalizer):
    """w_ij = n(s_ij) / Σ_k d(s_ik), with n and d at least 0; d is n unless `log_denominator` says otherwise.

    The log-sum-exp of a row is lse_i = log Σ_k d(s_ik), as it is of softmax: weights are recomputed from it one by one,
    log w_ij = log n(s_ij) - lse_i, and parts of a row are merged by it. A sink is one more score, of no value.

    Subclasses implement `log_numerator`, and `log_unit`, `in_units` and `backward_tile` where these, by logarithms and
    by autograd, are slow.
    """

    has_lse: ClassVar[bool] = True

    @abstractmethod
    def log_numerator(self, scores: Tensor) -> Tensor:
        """Log n, elementwise and differentiable; -inf where n is 0, and of a score of -inf."""

    def log_denominator(self, scores: Tensor) -> Tensor:
        """Log d, likewise."""
        return self.log_numerator(scores)

    def backward_tile(
        self, scores: Tensor, lse: Tensor, upstream: Tensor, delta: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Upstream · n'(s) / Z - delta · d'(s) / Z for Z = e^lse, and the gradient of each of `parameters`.

        Shapes: scores and upstream (..., heads, m, n) of some keys, lse and delta (..., heads, m, 1). Here autograd
        differentiates `log_numerator` and `log_denominator`; Z and delta are numbers.
        """
        leaves = [tensor.detach().requires_grad_() for tensor in (scores, *self.parameters())]
        with torch.enable_grad():
            own = self.with_parameters(leaves[1:])
            total = (upstream * (own.log_numerator(leaves[0]) - lse).exp()).sum()
            total = total - (delta * (own.log_denominator(leaves[0]) - lse).exp()).sum()
        of_scores, *others = torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)
        return of_scores, tuple(others)

    def log_unit(self, scores: Tensor) -> Tensor:
        """A number u for each row (..., 1), near the largest log d: sums of d / e^u neither overflow nor vanish.

        -inf where all d are 0. It is no function of the scores for autograd.
        """
        return self.log_denominator(scores.detach()).amax(-1, keepdim=True)

    def in_units(self, scores: Tensor, log_unit: Tensor) -> tuple[Tensor, Tensor]:
        """N / e^u and d / e^u, differentiable; finite u (..., 1). Overridden where logarithms are a detour."""
        numerators = (self.log_numerator(scores) - log_unit).exp()
        if type(self).log_denominator is RatioNormalizer.log_denominator:
            return numerators, numerators
        return numerators, (self.log_denominator(scores) - log_unit).exp()

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and lse."""
        if not scores.shape[-1]:
            return scores, scores.sum(-1) - INFINITY
        log_unit = self.log_unit(scores)
        log_unit = log_unit.masked_fill(log_unit == -INFINITY, 0.0)
        numerators, denominators = self.in_units(scores, log_unit)
        total = denominators.sum(-1, keepdim=True)
        empty = total == 0
        total = total.masked_fill(empty, 1.0)  # neither the quotient nor the gradient of the log divides by 0
        return numerators / total, (total.log() + log_unit).masked_fill(empty, -INFINITY).squeeze(-1)


class OrderedNormalizer(Normalizer):
    """A normalizer whose rows follow from the row before: they are computed in their order, some at a time.

    What one row hands on to the next is a number for each key. Subclasses implement `normalize_after` and
    `backward_after`; the gradient is computed from the last rows to the first, from states that are computed again.
    """

    @property
    def rows_before(self) -> None:
        """All rows."""
        return

    @abstractmethod
    def normalize_after(self, scores: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The weights and numbers of some rows, as `normalize`, and what the last of them hands on.

        Shapes: scores (..., heads, m, N) of all keys, before and what is handed on (..., heads, N); before is None for
        the first rows. All are differentiable, twice where that is needed.
        """

    @abstractmethod
    def backward_after(
        self, scores: Tensor, before: Tensor | None, upstream: Tensor, upstream_after: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """The gradients of Σ upstream · weights + Σ upstream_after · after in scores, before, and each parameter.

        None for upstream_after is 0. Called without autograd.
        """

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of all rows, and their numbers."""
        if not scores.numel():
            return scores, scores.sum(-1) - INFINITY
        return self.normalize_after(scores, None)[:2]

    def backward(self, scores: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradients of all rows."""
        of_scores, _, of_parameters = self.backward_after(scores, None, upstream, None)
        return of_scores, of_parameters

    def affected(self, rows: Tensor) -> Tensor:
        """A marked row and all after it."""
        return rows.cumsum(-2) > 0


def quotients(numerators: Tensor, denominators: Tensor) -> tuple[Tensor, Tensor]:
    """e^n_j / Σ_k e^d_k of rows of logarithms (..., n), and log Σ e^d; 0 and -inf where all d are -inf.

    >>> quotients(torch.zeros(1, 4), torch.zeros(1, 4))
    (tensor([[0.2500, 0.2500, 0.2500, 0.2500]]), tensor([1.3863]))
    """
    if not numerators.shape[-1]:
        return numerators, numerators.sum(-1) - INFINITY
    peak = denominators.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == -INFINITY, 0.0)
    total = (denominators - peak).exp().sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)  # neither the quotient nor the gradient of the log divides by 0
    return (numerators - peak).exp() / total, (total.log() + peak).masked_fill(empty, -INFINITY).squeeze(-1)


NORMALIZERS: dict[str, Normalizer] = {}
"""The normalizers that records of explorer name, which `regard.kernels.register_normalizer` adds."""


def register_normalizer(normalizer: Normalizer) -> Normalizer:
    """Make a normalizer without parameters known by its name, to recordings of `regard.explorer`.

    Raises:
        ConfigurationError: another normalizer has that name.
    """
    if normalizer.name == SOFTMAX or NORMALIZERS.setdefault(normalizer.name, normalizer) is not normalizer:
        raise ConfigurationError(f"there is another normalizer {normalizer.name!r}: each needs a name of its own")
    return normalizer


SOFTMAX = "softmax"
"""The name of no normalizer."""


def normalizer_named(name: str) -> Normalizer | None:
    """The registered normalizer of that name; None for softmax.

    Raises:
        ConfigurationError: no normalizer of that name is registered.
    """
    if name == SOFTMAX:
        return None
    if name not in NORMALIZERS:
        raise ConfigurationError(
            f"there is no normalizer {name!r}; {nearest(name, [SOFTMAX, *NORMALIZERS])}. One of your own needs to be "
            "passed to regard.kernels.register_normalizer first"
        )
    return NORMALIZERS[name]
