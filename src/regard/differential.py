"""Differential attention: the weights of one softmax less a share of those of another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor

from .attention import Observation, attention, observe
from .errors import ConfigurationError, ShapeError
from .kernels.validation import AttentionOptions
from .lenses import Lens, Weights

Pair = tuple[Tensor, Tensor]
"""Queries or keys of the first softmax, and of the second."""


def differential_attention(
    query: Pair, key: Pair, value: Tensor, share: Tensor | float, **options: Unpack[AttentionOptions]
) -> Tensor:
    """(softmax(Q₁ K₁ᵀ) - λ softmax(Q₂ K₂ᵀ)) V: what both softmaxes attend to, as they do without a reason, cancels out.

    It is two calls of `attention`, in memory linear in the lengths: (A₁ - λ A₂) V = A₁ V - λ A₂ V. Masks, biases, sinks
    and the other options are those of `attention`, the same for both; dropout drops weights of each softmax on its own.

    Shapes: each query (..., heads, M, D), each key (..., key heads, N, D), value (..., key heads, N, Dv), where Dv is
    2 D in the paper; the output is (..., heads, M, Dv). In version 2 both softmaxes have the same keys:
    key = (k, k), with twice as many queries, which are of one group of heads: query = (q[:, 0::2], q[:, 1::2]).

    Args:
        query: Q₁ and Q₂.
        key: K₁ and K₂.
        value: V.
        share: λ, a number, a tensor () of one, or one for each row, which broadcasts to (..., heads, M). In version 2
            it is the sigmoid of a projection of the query's token.

    Raises:
        ShapeError: no pair of queries or keys; a share that does not fit.
        RegardError: as `attention`.

    Source: Ye et al. 2024 (arXiv 2410.05258), Eq. 1, without its norm and λ, which `nn.DifferentialAttention` has;
    version 2: Ye et al. 2026, "Differential Transformer V2".

    >>> import torch, regard
    >>> q, k = torch.randn(2, 1, 4, 5, 8).unbind(), torch.randn(2, 1, 4, 5, 8).unbind()
    >>> v = torch.ones(1, 4, 5, 16)
    >>> regard.differential_attention(q, k, v, 0.8, mask=regard.masks.causal()).mean()
    tensor(0.2000)
    """
    first, second = (attention(q, k, value, **options) for q, k in _pairs(query, key))
    return _difference(first, second, share)


@dataclass(frozen=True, eq=False)
class DifferentialObservation:
    """The result of `observe_differential_attention`: the output, and what lenses saw of either softmax.

    `seen[lens]` are the weights A₁ - λ A₂ where the lens is a `lenses.Weights`; `seen.first[lens]` and
    `seen.second[lens]` are what any lens says of A₁ and A₂.
    """

    output: Tensor
    first: Observation
    second: Observation
    share: Tensor | float

    def __getitem__(self, lens: Weights) -> Tensor:
        """The weights, which may be below 0.

        Raises:
            ConfigurationError: another lens, which says nothing of a difference of weights.
        """
        first, second = self.first[lens], self.second[lens]
        if not isinstance(lens, Weights):
            raise ConfigurationError(
                f"{lens!r} says nothing of a difference of weights, which may be below 0: look at .first[lens] and "
                ".second[lens]"
            )
        share = self.share
        if isinstance(share, Tensor) and share.ndim and share.shape[-1] > 1:
            share = share[..., lens.rows]
        return _difference(first, second, share)


def observe_differential_attention(
    query: Pair, key: Pair, value: Tensor, share: Tensor | float, *lenses: Lens, **options: Unpack[AttentionOptions]
) -> DifferentialObservation:
    """`differential_attention`, with lenses from `regard.lenses` on the weights.

    >>> import torch, regard
    >>> q, weights = torch.zeros(1, 1, 2, 4), regard.lenses.Weights()
    >>> seen = regard.observe_differential_attention((q, q), (q, q), q, 0.5, weights)
    >>> seen[weights]
    tensor([[[[0.2500, 0.2500],
              [0.2500, 0.2500]]]])
    """
    first, second = (observe(q, k, value, *lenses, **options) for q, k in _pairs(query, key))
    return DifferentialObservation(_difference(first.output, second.output, share), first, second, share)


def _pairs(query: Pair, key: Pair) -> list[Pair]:
    """Query and key of the first softmax, and of the second."""
    for name, pair in (("query", query), ("key", key)):
        if not isinstance(pair, tuple) or len(pair) != 2:
            has = f"shape {tuple(pair.shape)}" if isinstance(pair, Tensor) else f"{type(pair).__name__}"
            raise ShapeError(
                f"{name} needs a pair of tensors, one for each softmax; it is of {has}. Of version 2, pass "
                "query=(q[:, 0::2], q[:, 1::2]) and key=(k, k)"
            )
    return list(zip(query, key, strict=True))


def _difference(first: Tensor, second: Tensor, share: Tensor | float) -> Tensor:
    """First - share · second, of (..., heads, M, ·); share (..., heads, M) or one number."""
    if not isinstance(share, Tensor):
        return first.sub(second, alpha=share)
    if share.ndim:
        rows = first.shape[:-1]
        if len(share.shape) > len(rows) or any(
            size not in (1, of) for size, of in zip(reversed(share.shape), reversed(rows), strict=False)
        ):
            raise ShapeError(
                f"share is {tuple(share.shape)}; it needs to broadcast to a number for each row, {tuple(rows)}, or to "
                "be one number"
            )
        share = share.unsqueeze(-1)
    return first - share.to(first.dtype) * second
