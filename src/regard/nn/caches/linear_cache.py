"""The cache of linear attention: a state of constant size, as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Unpack

from torch import Tensor

from ...linear import Elu, FeatureMap, LinearState
from ...linear.delta_product import attend_by_steps_with_state
from ...linear.linear_arguments import LinearOptions
from ..input_checks import check_positions
from .base import Cache, check_rows


@dataclass(frozen=True, eq=False)
class LinearCache(Cache):
    """S_t = e^{g_t} S_{t-1} + φ(k_t) v_tᵀ of all positions so far, for one layer; its size does not grow with them.

    Args:
        feature_map: φ.
        normalize: whether weights are divided by their sum, for which the state has a total.
        state: None before the first token.
        next_position: default position of the next token, one number or (batch,).
        tail: of a layer with a convolution, the last rows that the next ones read, (batch, width - 1, features).
        last: of a layer with a token shift, the last token, (batch, 1, dim).

    >>> import torch, regard
    >>> cache = regard.nn.LinearCache()
    >>> for token in torch.randn(100, 2, 4, 1, 8):
    ...     cache = cache.append(token, token)
    >>> cache.next_position, cache.state.matrix.shape, cache.nbytes < 1.25 * 2 * 4 * 8 * (8 + 1) * 4
    (100, torch.Size([2, 4, 8, 8]), True)
    """

    feature_map: FeatureMap = field(default_factory=Elu)
    normalize: bool = True
    state: LinearState | None = field(default=None, repr=False)
    next_position: int | Tensor = 0  # type: ignore[assignment]  # a property of the protocol
    tail: Tensor | None = field(default=None, repr=False)
    last: Tensor | None = field(default=None, repr=False)

    def __bool__(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of the state, the tail and the last token; 0 before the first token."""
        return sum(part.nbytes for part in (self.state, self.tail, self.last) if part is not None)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> LinearCache:
        """The cache after M more tokens, at the next positions or at the given ones.

        Shapes: keys (batch, key heads, M, key dim), before φ, values (batch, key heads, M, value dim), positions (M,)
        or (batch, M).

        Raises:
            ShapeError, DtypeError, DeviceError: tensors that do not fit each other, or the state.
        """
        return self.attend(keys, keys, values, positions)[1]

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        positions: Tensor | None = None,
        *,
        tail: Tensor | None = None,
        last: Tensor | None = None,
        **options: Unpack[LinearOptions],
    ) -> tuple[Tensor, LinearCache]:
        """Causal linear attention of M more tokens to themselves and all before, and the cache after them.

        Shapes: as `append`, and queries (batch, heads, M, key dim); the output is (batch, heads, M, value dim). Keys
        and values may have an axis of steps after M, as those of `regard.linear.delta_product`.
        tail, last: of the cache after them. `options` are those of `regard.linear_attention` for these tokens, such as
        decay, beta and mask.
        """
        added = keys.shape[2]
        next_position = self.next_position + added
        if positions is not None:
            batch = keys.shape[0]
            check_positions("positions", positions, batch, added)
            positions = positions.expand(batch, added) if positions.ndim == 2 else positions
            next_position = positions.amax(-1) + 1 if added else self.next_position
        options.update(feature_map=self.feature_map, normalize=self.normalize, causal=True, state=self.state)
        output, state = attend_by_steps_with_state(queries, keys, values, **options)
        after = object.__new__(LinearCache)  # the __init__ of a frozen dataclass takes three times as long
        vars(after).update(
            feature_map=self.feature_map,
            normalize=self.normalize,
            state=state,
            next_position=next_position,
            tail=tail,
            last=last,
        )
        return output, after

    def evict(self) -> LinearCache:
        """The cache itself: all keys are in its sums."""
        return self

    def reorder(self, rows: Tensor) -> LinearCache:
        """The cache for these rows of the batch, in this order; rows may repeat, as in beam search.

        Shapes: rows (count,), integers in 0..batch-1, or bool (batch,). An empty cache fits any batch.

        Raises:
            ShapeError, DtypeError: other shapes, dtypes or values.
        """
        if self.state is None:
            return self
        check_rows(rows, self.state.sums.shape[0])
        next_position = self.next_position
        if isinstance(next_position, Tensor) and next_position.ndim:
            next_position = next_position[rows]
        tail, last = (None if part is None else part[rows] for part in (self.tail, self.last))
        return replace(self, state=self.state.reorder(rows), next_position=next_position, tail=tail, last=last)
