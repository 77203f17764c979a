"""One dense rectangle of dot-product attention with its log-sum-exp, forward and backward.

On the CPU it is torch's flash kernel, called where it can be: equal dims, weights that are not dropped. Elsewhere it is
the formula on the rectangle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.finite import all_finite, waits
from ...core.grid import WHOLE
from ...core.log_sum_exp import lse_dtype, merge_softmax
from ...core.problem import Problem
from ...core.score_forms import DotPairs, at_least_float32, per_head, per_key_head
from ...tiles.mask_tiles import split_slice

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

NARROW = 64
"""The fewest keys with which torch's flash kernel keeps NaN of a query or key: its maximum over fewer may lose it."""
LONG_ROW = 2**12
"""The most keys that torch sums for a single row: over more, its rounding errors add up."""
EXPONENTIAL = 2.0**-20
"""The relative error of the exponentials of torch's flash kernel, which have 20 bits."""


def dense_reasons(problem: Problem) -> list[str]:
    """Features that a dense rectangle does not support."""
    reasons = []
    if not isinstance(problem.pairs, DotPairs):
        reasons.append("its dense kernel computes dot products; this score is additive")
    if problem.softcap is not None:
        reasons.append("its dense kernel has no softcap")
    if problem.dropout is not None:
        reasons.append("its dense kernel drops no weights")
    if problem.bias_requires_grad():
        reasons.append("its dense kernel gives no gradient to a bias")
    return reasons


@dataclass(frozen=True, eq=False, slots=True)
class Rectangle:
    """query (B, H, m, D), key and value (B, Hk, n, ·), and an optional additive mask.

    added: (B or 1, H or 1, m, n), -inf where nothing is kept. causal: row i keeps columns 0..i, and m = n.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    added: Tensor | None = None
    causal: bool = False

    def columns(self, columns: slice) -> Rectangle:
        """The same for some of the columns."""
        added = None if self.added is None else self.added[..., columns]
        return replace(self, key=self.key[:, :, columns], value=self.value[:, :, columns], added=added)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Output (B, H, m, Dv) and log-sum-exp (B, H, m); 0 and -inf for rows that attend to no key."""
        if not self._suits_flash():
            return self._formula()
        if self.query.shape[2] == 1 and self.key.shape[2] > LONG_ROW:
            return self._one_long_row()
        rows = self.query.shape[2]
        query, key, value = self._equal_dims()
        query = without_single_row(query)
        output, lse = _flash(query, key, value, is_causal=self.causal, attn_mask=self.added, scale=self.scale)
        output, lse = output[:, :, :rows], lse[:, :, :rows]
        if (lse == 0).any():  # which is what the flash kernel calls the log-sum-exp of a row that keeps nothing
            lse = lse.masked_fill(self._keeps_nothing(), float("-inf"))
        return _narrowed(output, self.value.shape[-1]), lse

    def _keeps_nothing(self) -> Tensor:
        """Which rows (B or 1, H or 1, m) have only scores of -inf, by the mask or by infinity in query or key."""
        if all_finite(self.query, self.key):
            nothing = torch.zeros(1, 1, 1, dtype=torch.bool, device=self.query.device)
            return nothing if self.added is None else (self.added == float("-inf")).all(-1)
        parts = split_slice(slice(0, self.query.shape[2]), NARROW)
        return torch.cat([(self._scores(rows) == float("-inf")).all(-1) for rows in parts], -1)

    def _one_long_row(self) -> tuple[Tensor, Tensor]:
        """Heads of a group as rows, or parts of the keys: torch's kernel sums a single row one key after another."""
        batch, heads, _, dim = self.query.shape
        key_heads = self.key.shape[1]
        if heads == key_heads:
            parts = [self.columns(part).forward() for part in split_slice(slice(0, self.key.shape[2]), LONG_ROW)]
            outputs, lses = (torch.stack(tensors) for tensors in zip(*parts, strict=True))
            return merge_softmax(outputs, lses, dim=0)
        rows = batch, key_heads, heads // key_heads
        added = None if self.added is None else self.added.expand(-1, heads, -1, -1)
        output, lse = replace(
            self,
            query=self.query.reshape(*rows, dim),
            added=None if added is None else added.reshape(added.shape[0], *rows[1:], added.shape[-1]),
        ).forward()
        return output.reshape(batch, heads, 1, output.shape[-1]), lse.reshape(batch, heads, 1)

    def backward(
        self, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor, *, has_lse_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of query, key and value; output and log-sum-exp of rows may include keys outside the rectangle.

        has_lse_grad: whether grad_lse is anything but 0.
        """
        if not self._suits_flash():
            return self._formula_backward(output, lse, grad_output, grad_lse)
        query, key, value = self._equal_dims()
        dim, value_dim = self.query.shape[-1], self.value.shape[-1]
        output, grad_output = _widened(output, value.shape[-1]), _widened(grad_output, value.shape[-1])
        if has_lse_grad:
            # One more column of ones in the values: its gradient from above is that of the log-sum-exp.
            query, key, output = pad(query, (0, 1)), pad(key, (0, 1)), pad(output, (0, 1))
            value = pad(value, (0, 1), value=1.0)
            grad_output = torch.cat([grad_output, grad_lse.to(grad_output.dtype).unsqueeze(-1)], dim=-1)
        gradients = _flash_backward(
            grad_output, query, key, value, output, lse, 0.0, self.causal, attn_mask=self.added, scale=self.scale
        )
        return _narrowed(gradients[0], dim), _narrowed(gradients[1], dim), _narrowed(gradients[2], value_dim)

    def _suits_flash(self) -> bool:
        """Whether torch's CPU flash kernel can run: on the CPU, no axis empty, and no NaN that few keys would lose."""
        query, key = self.query, self.key
        return (
            query.is_cpu
            and query.numel() > 0
            and self.value.numel() > 0
            and key.numel() > 0
            and (key.shape[-2] >= NARROW or all_finite(query, key))
        )

    def _equal_dims(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value padded with zeros to equal dims, which changes no score."""
        dim = max(self.query.shape[-1], self.value.shape[-1])
        return _widened(self.query, dim), _widened(self.key, dim), _widened(self.value, dim)

    def _scores(self, rows: slice = WHOLE) -> Tensor:
        query, key = at_least_float32(self.query[:, :, rows]), at_least_float32(self.key)
        scores = per_head(lambda folded: self.scale * (folded @ key.mT), query, key)
        if self.causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + (rows.start or 0))
            scores = scores.masked_fill(later, float("-inf"))
        return scores if self.added is None else scores + self.added[..., rows, :]

    def _formula(self) -> tuple[Tensor, Tensor]:
        scores, value = self._scores(), at_least_float32(self.value)
        if waits(value):
            peak = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.sum(-1, keepdim=True) + float("-inf")
            weights = torch.exp(scores - peak.masked_fill(peak == float("-inf"), 0.0))
            total = weights.sum(-1, keepdim=True)
            weights = weights / total.masked_fill(total == 0, 1.0)
            lse = (total.to(lse_dtype(value)).log() + peak).squeeze(-1)
        else:
            lse = scores.logsumexp(-1)
            weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
        return per_head(lambda folded: folded @ value, weights, value).to(self.value.dtype), lse

    def _formula_backward(
        self, output: Tensor, lse: Tensor, grad_output: Tensor, grad_lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = torch.exp(self._scores() - lse.unsqueeze(-1))
        query, key, value = at_least_float32(self.query), at_least_float32(self.key), at_least_float32(self.value)
        above = at_least_float32(grad_output)
        delta = (above * at_least_float32(output)).sum(-1, keepdim=True) - grad_lse.unsqueeze(-1)
        grad_scores = self.scale * weights * (per_head(lambda folded: folded @ value.mT, above, value) - delta)
        return (
            per_head(lambda folded: folded @ key, grad_scores, key),
            per_key_head(grad_scores, query, key),
            per_key_head(weights, above, value),
        )


def without_single_row(query: Tensor) -> Tensor:
    """The query; a single row of bfloat16 on the CPU is doubled, as torch takes up to ten times as long for one."""
    single = query.shape[-2] == 1 and query.dtype == torch.bfloat16 and query.is_cpu
    return torch.cat((query, query), dim=-2) if single else query


def _narrowed(tensor: Tensor, dim: int) -> Tensor:
    return tensor if tensor.shape[-1] == dim else tensor[..., :dim]


def _widened(tensor: Tensor, dim: int) -> Tensor:
    return tensor if tensor.shape[-1] == dim else pad(tensor, (0, dim - tensor.shape[-1]))
