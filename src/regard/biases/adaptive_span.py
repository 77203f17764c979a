"""Adaptive spans: heads that learn how far they look, by a weight that falls to 0 along a ramp of distances."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.score_forms import at_least_float32
from ..core.torch_modes import under_forward_mode, under_transform
from ..errors import ConfigurationError, DtypeError, ShapeError
from ..utils.numbers import lies_between
from .base import describe_tensor, is_floating
from .relative import RelativeBias


@dataclass(frozen=True, eq=False, repr=False)
class AdaptiveSpan(RelativeBias):
    """log clamp((ramp + span - |key position - query position|) / ramp, 0, 1); see `adaptive_span`."""

    spans: Tensor
    ramp: float

    @property
    def reach(self) -> int:
        """The largest distance at which any head has weight, for `masks.window(before=reach)`; at least 0."""
        return max(math.ceil(self.spans.detach().amax().item() + self.ramp) - 1, 0)

    def values_at(self, distances: Tensor) -> Tensor:
        spans = at_least_float32(self.spans.to(distances.device)).reshape(-1, *[1] * distances.ndim)
        # The difference of two near numbers first, as it is exact: the sum of span and ramp would round the ramp.
        shares = ((spans - distances.abs()) + self.ramp) / self.ramp
        if not (shares.requires_grad or under_transform() or under_forward_mode()):
            return shares.clamp_(0.0, 1.0).log_()
        # The lower bound of the clamp keeps the gradient beyond the span from being 0 · infinity.
        logs = shares.clamp(torch.finfo(shares.dtype).tiny, 1.0).log()
        return logs.masked_fill(shares <= 0, -math.inf)

    def __repr__(self) -> str:
        return f"adaptive_span({describe_tensor(self.spans)}, {self.ramp})"


def adaptive_span(spans: Tensor, ramp: float) -> AdaptiveSpan:
    """A span that each head learns: e^s is multiplied by m(|i - j|) = clamp((R + z_h - |i - j|) / R, 0, 1).

    A key up to z_h positions away has its whole weight, one R or more positions beyond that has none, and in between it
    falls linearly: w_ij = m(|i - j|) e^s_ij / Σ_k m(|i - k|) e^s_ik. The bias is log m, and R is the `ramp`.

    A mask leaves out the pairs that no head attends to, so that the time follows the longest span:
    `masks.causal() & masks.window(before=bias.reach)`. A query all of whose keys are beyond the span has output 0.

    Shapes: spans (heads,); gradients flow into it, from the keys on the ramp. Units of z and R: positions. The paper
    adds the mean of the spans to the loss, and keeps them in [0, longest] by `spans.data.clamp_(0, longest)`.

    Raises:
        DtypeError: spans are not floating point.
        ShapeError: spans are not one number for each head.
        ConfigurationError: a ramp that is not above 0.

    Source: Sukhbaatar et al. 2019 (arXiv 1905.07799), the soft mask m_z of section 2, over keys before the query; here
    the query's own position, and keys after it, count by their distance too, where no mask hides them.

    >>> import torch
    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> bias = biases.adaptive_span(torch.tensor([1.0]), ramp=2.0)
    >>> bias.values(Grid.from_lengths(1, 5)).exp()
    tensor([[[0.0000, 0.0000, 0.5000, 1.0000, 1.0000]]])
    >>> bias.reach
    2
    """
    if not is_floating(spans):
        has = spans.dtype if isinstance(spans, Tensor) else f"a {type(spans).__name__}"
        raise DtypeError(f"adaptive_span needs floating-point spans, one for each head; this is {has}")
    if spans.ndim != 1 or not spans.shape[0]:
        raise ShapeError(
            f"adaptive_span needs one span for each head, a tensor of the shape (heads,); this one has "
            f"{tuple(spans.shape)}"
        )
    if not lies_between(0.0, ramp, math.inf):
        raise ConfigurationError(f"adaptive_span needs a ramp of more than 0 positions, such as 32; it is {ramp!r}")
    return AdaptiveSpan(spans, ramp)
