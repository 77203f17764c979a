"""The checked inputs of one call of attention, passed to every kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import DeviceError, MaskError, ShapeError
from .broadcasting import broadcast_shapes
from .dropout import Dropout
from .grid import WHOLE, Grid
from .normalizer import SOFTMAX, Normalizer, OrderedNormalizer, RatioNormalizer
from .packed_rows import PackedTensor
from .score_forms import AdditivePairs, PairForm
from .symbolic_positions import Positions

if TYPE_CHECKING:
    from ..biases import Bias
    from ..masks import Mask


@dataclass(eq=False, slots=True)  # never changed, but not frozen: small calls would feel what that takes
class Problem:
    """softmax( softcap(f(Q, K)) + B, where M ) · V, with the score's projections done; or another normalizer.

    Shapes: pairs over query (..., heads, M, ·) and key (..., key heads, N, ·); value (..., key heads, N, Dv); the
    weights are (..., heads, M, N). Inputs with fewer than four dimensions have no head axis.
    """

    pairs: PairForm
    value: Tensor
    mask: Mask | None = None
    bias: Bias | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    dropout: Dropout | None = None
    query_positions: Positions | None = None
    key_positions: Positions | None = None
    wants_lse: bool = False
    normalizer: Normalizer | None = None

    @property
    def queries(self) -> int:
        """M, the number of queries."""
        return self.pairs.query.shape[-2]

    @property
    def keys(self) -> int:
        """N, the number of keys."""
        return self.value.shape[-2]

    @property
    def heads(self) -> bool:
        """Whether the inputs have a head axis."""
        return self.value.ndim >= 4

    @property
    def batch(self) -> torch.Size:
        """The axes in front of heads, or in front of the lengths where there are no heads."""
        return self.weights_shape[: -3 if self.heads else -2]

    @property
    def weights_shape(self) -> torch.Size:
        """The shape of the weights: (..., heads, M, N)."""
        query = self.pairs.query
        last = -3 if query.ndim >= 4 else -2
        batches = query.shape[:last], self.pairs.key.shape[:last], self.value.shape[:last]
        alike = batches[0] == batches[1] == batches[2]  # the usual case, and much the faster to see
        batch = batches[0] if alike else broadcast_shapes(*batches)
        return torch.Size((*batch, *query.shape[last:-1], self.keys))

    @property
    def step(self) -> int:
        """Distance of neighbouring positions where `shift` is a number: 1 unless they are ranges with a step."""
        for positions in (self.key_positions, self.query_positions):
            if isinstance(positions, range):
                return positions.step
        return 1

    @property
    def shift(self) -> int | None:
        """Offset of the keys from their default positions: pair (i, j) is (j - i - (N - M) + shift) · step apart.

        0 by default, where the queries are at the last M key positions; None where positions are not equally spaced.
        """
        queries, keys = self.query_positions, self.key_positions
        if keys is None and queries is None:
            return 0
        step = self.step
        for positions in (queries, keys):
            if not (step == 1 if positions is None else isinstance(positions, range) and positions.step == step):
                return None
        first_key = keys.start if isinstance(keys, range) else 0
        default = first_key + (self.keys - self.queries) * step
        offset = default - (queries.start if isinstance(queries, range) else default)
        return None if offset % step else offset // step

    def grid(self, device: torch.device | None = None) -> Grid:
        """The pairs of this problem and their positions, on the problem's device unless another is named."""
        return Grid.from_lengths(
            self.queries,
            self.keys,
            query_positions=self.query_positions,
            key_positions=self.key_positions,
            heads=self.heads,
            device=device or self.value.device,
        )

    def keep(self, grid: Grid | None = None) -> Tensor | None:
        """Which pairs of the grid exist (True = attend), broadcastable to its weights; None: all do.

        grid: the whole grid by default. A mask of the key heads is that of all query heads of their groups.
        """
        if self.mask is None:
            return None
        grid = grid or self.grid()
        try:
            keep = self.mask.evaluate(grid)
        except ShapeError as error:
            raise MaskError(f"mask {self.mask!r} does not fit: {error}") from None
        if keep.device != grid.device:  # which may be the CPU, for the tiles of a formula
            raise DeviceError(_elsewhere(f"mask {self.mask!r}", keep, grid.device))
        if not self._fits(keep):
            if self._is_per_key_head(keep):
                return keep.repeat_interleave(self.weights_shape[-3] // keep.shape[-3], -3)
            raise MaskError(
                f"mask {self.mask!r} has the shape {(*keep.shape[:-2], *self.weights_shape[-2:])}, which does not "
                f"broadcast to the weights' shape {tuple(self.weights_shape)} (batch and heads, queries, keys)"
            )
        return keep

    def bias_values(self, grid: Grid | None = None) -> Tensor | None:
        """The bias of the grid, by default of all pairs, broadcastable to its weights; None without a bias."""
        if self.bias is None:
            return None
        try:
            values = self.bias.evaluate(grid or self.grid())
        except ShapeError as error:
            raise ShapeError(f"bias {self.bias!r} does not fit: {error}") from None
        if values.device != self.value.device:
            raise DeviceError(_elsewhere(f"bias {self.bias!r}", values, self.value.device))
        if not self._fits(values):
            raise ShapeError(
                f"bias {self.bias!r} has the shape {(*values.shape[:-2], *self.weights_shape[-2:])}, which does not "
                f"broadcast to the weights' shape {tuple(self.weights_shape)} (batch and heads, queries, keys)"
            )
        return values

    def scores(self, rows: slice = WHOLE, columns: slice = WHOLE) -> Tensor:
        """softcap(f(Q, K)) + B where M, and -inf elsewhere, for some rows and columns: (..., heads, M, N)."""
        return self.complete_scores(self.pairs.tile(rows, columns).scores(), self.grid().tile(rows, columns))

    def complete_scores(self, scores: Tensor, grid: Grid) -> Tensor:
        """softcap(scores) + B where M, and -inf elsewhere, for the scores f(Q, K) of a grid."""
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        bias, keep = self.bias_values(grid), self.keep(grid)
        if bias is not None:
            scores = scores + bias
        if keep is not None:
            scores = scores.masked_fill(~keep, float("-inf"))
        return scores

    def dropout_indices(self, grid: Grid, batch: slice = WHOLE) -> tuple[Tensor, Tensor, Tensor]:
        """Arguments of `Dropout.dropout_mask` for a tile of some batches: head numbers, query and key positions."""
        count, heads = self.batch.numel(), self.weights_shape[-3] if self.heads else 1
        numbers = torch.arange(count * heads, device=grid.device).view(count, heads, 1)[batch]

        def per_batch(positions: Tensor) -> Tensor:
            if positions.ndim == 1:
                return positions.long()
            return positions.long().expand(*self.batch, -1).reshape(count, 1, -1)[batch]

        queries, keys = grid.query_positions[..., grid.rows], grid.key_positions[..., grid.columns]
        return numbers, per_batch(queries), per_batch(keys)

    def log_numerator(self, scores: Tensor) -> Tensor:
        """The logarithms of the weights of some scores before their rows are normalized; for softmax the scores."""
        return scores if self.normalizer is None else self._ratio.log_numerator(scores)

    def log_denominator(self, scores: Tensor) -> Tensor:
        """The logarithms of what each score adds to the sum that its row is divided by; for softmax the scores."""
        return scores if self.normalizer is None else self._ratio.log_denominator(scores)

    @property
    def has_lse(self) -> bool:
        """Whether a row has a log-sum-exp, from which its weights follow one by one, and by which parts are merged."""
        return self.normalizer is None or self.normalizer.has_lse

    @property
    def normalizer_name(self) -> str:
        """The word for how rows are normalized, "softmax" unless there is a normalizer."""
        return SOFTMAX if self.normalizer is None else self.normalizer.name

    @property
    def _ratio(self) -> RatioNormalizer:
        if not isinstance(self.normalizer, RatioNormalizer):
            raise AssertionError(f"the weights of {self.normalizer!r} are no quotients")
        return self.normalizer

    def normalized(self, rows: slice = WHOLE) -> tuple[Tensor, Tensor]:
        """The normalizer's weights of some rows over all keys, (..., heads, m, N), and its numbers, (..., heads, m)."""
        if self.normalizer is None:
            raise AssertionError("softmax attention has no normalizer")
        if rows != WHOLE and isinstance(self.normalizer, OrderedNormalizer):
            return self._normalized_in_order(self.normalizer, range(self.queries)[rows])
        if rows != WHOLE and self.normalizer.rows_before != 0:
            return self._normalized_with_others(range(self.queries)[rows], self.normalizer.rows_before)
        return self._normalized_alone(rows)

    def _normalized_with_others(self, rows: range, before: int | None) -> tuple[Tensor, Tensor]:
        """`normalized` where the scores of so many rows before are needed too, or of all."""
        scored = slice(0, self.queries)
        if before is not None and rows:
            scored = slice(max(rows[0] - before, 0), rows[-1] + 1)
        weights, numbers = self._normalized_alone(scored)
        own = slice(rows.start - scored.start, rows.stop - scored.start, rows.step)
        return weights[..., own, :], numbers[..., own]

    def _normalized_in_order(self, normalizer: OrderedNormalizer, rows: range) -> tuple[Tensor, Tensor]:
        """`normalized` from the first row on, some at a time, of which those that are wanted are kept."""
        leading, state, found = self.weights_shape[:-2], None, []
        height = max(2**20 // max(leading.numel() * self.keys, 1), 1)
        end = rows[-1] + 1 if rows and self.keys else 0
        for first in range(0, end, height):
            scored = slice(first, min(first + height, end))
            scores = self.scores(scored, WHOLE)
            weights, numbers, state = normalizer.normalize_after(scores if self.heads else scores.unsqueeze(-3), state)
            wanted = [row - first for row in rows if row in range(scored.start, scored.stop)]
            found.append((weights[..., wanted, :], numbers[..., wanted]))
        if not found:
            scores = self.scores(WHOLE, WHOLE)[..., : len(rows), :]
            return scores, scores.sum(-1) - float("inf")
        weights, numbers = (torch.cat(each, -2 + axis) for axis, each in enumerate(zip(*found, strict=True)))
        return weights.reshape(*leading, -1, self.keys), numbers.reshape(*leading, -1)

    def _normalized_alone(self, rows: slice) -> tuple[Tensor, Tensor]:
        if self.normalizer is None:
            raise AssertionError("softmax attention has no normalizer")
        scores = self.scores(rows, WHOLE)
        whole = scores if self.heads else scores.unsqueeze(-3)  # of one head
        if self.sinks is not None:  # one more score in each row
            sinks = self.sinks.to(scores.dtype)[:, None, None].expand(*whole.shape[:-1], 1)
            whole = torch.cat([whole, sinks], -1)
        weights, numbers = self.normalizer.normalize(whole)
        return weights[..., : self.keys].reshape(scores.shape), numbers.reshape(scores.shape[:-1])

    def inputs_require_grad(self) -> bool:
        """Whether autograd needs the gradient of query, key or value."""
        query, key = self.pairs.query, self.pairs.key
        return torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or self.value.requires_grad)

    def has_codes(self) -> bool:
        """Whether keys or values are codes of few bits, which `decode` reads as they are."""
        return type(self.value) is PackedTensor or type(self.pairs.key) is PackedTensor

    def requires_grad(self) -> bool:
        """Whether autograd needs the gradient of any tensor."""
        tensors = [self.sinks] if self.bias is None else [self.sinks, *self.bias.parameters()]
        if isinstance(self.pairs, AdditivePairs):
            tensors.append(self.pairs.weight)
        if self.normalizer is not None:
            tensors += self.normalizer.parameters()
        return self.inputs_require_grad() or (
            torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
        )

    def bias_requires_grad(self) -> bool:
        """Whether autograd needs the gradient of the bias."""
        return (
            self.bias is not None and torch.is_grad_enabled() and any(p.requires_grad for p in self.bias.parameters())
        )

    def _is_per_key_head(self, pairs: Tensor) -> bool:
        """Whether a tensor over pairs, which does not fit the weights, has the key heads in place of the heads."""
        if not self.heads or pairs.ndim < 3 or pairs.shape[-3] != self.value.shape[-3]:
            return False
        return self._fits(pairs[..., :1, :, :])

    def _fits(self, pairs: Tensor) -> bool:
        """Whether the leading axes broadcast to the weights' without enlarging them (`Grid.cut` checks M and N)."""
        leading, whole = pairs.shape[:-2], self.weights_shape[:-2]
        return len(leading) <= len(whole) and all(
            size in (1, of) for size, of in zip(reversed(leading), reversed(whole), strict=False)
        )


def _elsewhere(name: str, found: Tensor, device: torch.device) -> str:
    """The message for a mask or a bias that was computed on another device."""
    return f"{name} is on {found.device}, but query, key and value are on {device}: move it with .to({str(device)!r})"
