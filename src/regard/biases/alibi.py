"""ALiBi: a bias linear in the distance, with one slope per head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.score_forms import at_least_float32
from ..core.tensor_memo import copy_on
from ..errors import ConfigurationError, DtypeError, ShapeError
from .base import describe_tensor, is_floating
from .relative import RelativeBias


@dataclass(frozen=True, eq=False, repr=False)
class Alibi(RelativeBias):
    """-slope · |key position - query position|."""

    slopes: Tensor

    def values_at(self, distances: Tensor) -> Tensor:
        slopes = at_least_float32(copy_on(self.slopes, distances.device))
        return slopes.reshape(-1, *[1] * distances.ndim) * -distances.abs()

    def __repr__(self) -> str:
        return f"alibi({describe_tensor(self.slopes)})"


def alibi(heads: int | Tensor) -> RelativeBias:
    """-m_h · |key position - query position|: a penalty linear in the distance, with slope m_h in head h.

    Shapes: `heads` is the number of heads, for the published slopes m = `alibi_slopes(heads)`, or a tensor (heads,) of
    other slopes, into which gradients flow. Units: positions. For numbers of heads that are not powers of two, two
    conventions are in use: `alibi(heads)` is that of the authors' code, `alibi(geometric_slopes(heads))` the formula of
    the paper. They agree for powers of two.

    Raises:
        ConfigurationError: a number of heads below 1.
        DtypeError: heads is neither a whole number nor a floating-point tensor.
        ShapeError: slopes that are not (heads,).

    Source: Press et al. 2022 (arXiv 2108.12409), section 3. There keys after the query are always masked; here they
    get the penalty of their distance. Implementations that multiply the slope by the key's own position differ, under
    a causal mask, by a constant per row, which the softmax cancels.

    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> biases.alibi(2).values(Grid.from_lengths(2, 3))[0]
    tensor([[-0.0625,  0.0000, -0.0625],
            [-0.1250, -0.0625,  0.0000]])
    """
    if isinstance(heads, int) and not isinstance(heads, bool):
        return Alibi(alibi_slopes(heads))
    if not is_floating(heads):
        has = heads.dtype if isinstance(heads, Tensor) else f"a {type(heads).__name__}"
        raise DtypeError(f"alibi needs the number of heads, or a floating-point tensor of their slopes; this is {has}")
    if heads.ndim != 1 or not len(heads):
        raise ShapeError(
            f"alibi needs one slope for each head, a tensor of the shape (heads,); this one has {tuple(heads.shape)}"
        )
    return Alibi(heads)


def alibi_slopes(heads: int, *, steepness: float = 8.0) -> Tensor:
    """The slopes of the published ALiBi models, (heads,) float32.

    With P the largest power of two up to `heads`: the P slopes 2^(-steepness · h/P), h = 1..P, then for the remaining
    heads the first, third, fifth and so on of the slopes for 2P heads.

    Raises:
        ConfigurationError: heads below 1, or a steepness that is not above 0.

    Source: `get_slopes` in the code released with Press et al. 2022 (arXiv 2108.12409); steepness is `bias_max` in
    keras-hub.

    >>> alibi_slopes(3).tolist()
    [0.0625, 0.00390625, 0.25]
    """
    _check(heads, steepness)
    power = 1 << (heads.bit_length() - 1)
    slopes, twice_as_many = (geometric_slopes(n, steepness=steepness) for n in (power, 2 * power))
    return torch.cat([slopes, twice_as_many[::2][: heads - power]])


def geometric_slopes(heads: int, *, steepness: float = 8.0) -> Tensor:
    """The slopes 2^(-steepness · h/heads), h = 1..heads, for any number of heads: (heads,) float32.

    Raises:
        ConfigurationError: heads below 1, or a steepness that is not above 0.

    Source: Press et al. 2022 (arXiv 2108.12409), section 3, where the sequence starts at 2^(-8/heads), its ratio.

    >>> geometric_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    _check(heads, steepness)
    return torch.tensor([2.0 ** (-steepness * head / heads) for head in range(1, heads + 1)])


def _check(heads: int, steepness: float) -> None:
    if heads < 1:
        raise ConfigurationError(f"the slopes of ALiBi need at least 1 head; heads is {heads}")
    if not steepness > 0:
        raise ConfigurationError(f"the slopes of ALiBi need a steepness above 0; it is {steepness}")
