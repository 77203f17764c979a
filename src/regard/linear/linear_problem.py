"""One call of `regard.linear_attention`, its arguments checked: what a plan computes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

import torch
from torch import Tensor

from ..core.score_forms import at_least_float32, zero_nonfinite
from ..errors import ConfigurationError
from ..kernels.validation import check_same_kind, check_shapes
from ..utils.numbers import truth_value
from .document_batches import DocumentBatches, document_batches
from .feature_maps import FeatureMap
from .linear_arguments import (
    BatchAxes,
    LinearOptions,
    check_order,
    checked_beta,
    checked_bonus,
    checked_map,
    checked_removal,
    checked_scale,
    checked_state,
    kept_keys,
)
from .linear_mask import read_mask
from .linear_state import LinearState
from .nonfinite_rows import NonfiniteRows


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """Queries, keys and values as (B, heads, length, ·), before the feature map, with all that the sums depend on.

    Shapes: query (B, H, M, D), key (B, Hk, N, D), value (B, Hk, N, Dv), beta (B, Hk, N) or (B, Hk, N, features),
    removal and bonus (B, Hk, N, features), state (B, Hk, D, Dv or Dv + 1).

    Args:
        query: queries; rows with NaN or infinity are 0 here, and `nonfinite` has them; so are those of keys and values.
        key: keys; those that are masked may be anything finite.
        value: values.
        feature_map: φ.
        scale: of queries, before φ.
        normalize: whether weights are divided by their sum.
        causal: whether there is an order of the keys.
        keep: which keys exist, as `kept_keys` returns it; None for all.
        documents: sequences that are computed as if each were alone; None for the whole.
        decay: as the caller gave it: whether it has an axis of features is known after φ, and a plan checks it then.
        beta: of the delta rule.
        removal: the key whose value the delta rule removes; None for φ(k).
        bonus: factors of the own term of each token, whose query then reads the state before it; None for no such term.
        state: what the sums start from.
        nonfinite: the rows that have NaN or infinity; None where there are none.
        axes: the leading axes of the caller.
        dtype: of the output.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    feature_map: FeatureMap
    scale: float
    normalize: bool
    causal: bool
    keep: Tensor | None
    documents: DocumentBatches | None
    decay: Tensor | None
    beta: Tensor | None
    removal: Tensor | None
    bonus: Tensor | None
    state: LinearState | None
    nonfinite: NonfiniteRows | None
    axes: BatchAxes
    dtype: torch.dtype

    def scaled_query(self) -> Tensor:
        """The queries times the scale."""
        return self.query if self.scale == 1.0 else self.query * self.scale

    def widened(self) -> LinearProblem:
        """The problem with query, key and value in the dtype of the sums, float32 at least."""
        query, key, value = (at_least_float32(tensor) for tensor in (self.query, self.key, self.value))
        return self if query is self.query else replace(self, query=query, key=key, value=value)

    def without_masked_keys(self) -> LinearProblem:
        """The problem with zeros in place of masked keys and their values."""
        if self.keep is None:
            return self
        return replace(self, key=_kept(self.key, self.keep), value=_kept(self.value, self.keep))

    def mark_nonfinite(self, rows: Tensor) -> Tensor:
        """Rows (B, H, M, ·) with NaN where one attends to a key that has NaN or infinity, or is such a query."""
        return rows if self.nonfinite is None else self.nonfinite.mark_rows(rows, self.causal, self.documents)


def make_linear_problem(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[LinearOptions]) -> LinearProblem:
    """Check the arguments of `linear_attention`, and take its mask apart.

    Raises:
        RegardError: as `linear_attention` has them; those of a decay, and of a feature map's results, a plan raises.
    """
    if torch._C._get_tracing_state() is not None:
        raise ConfigurationError(
            "linear attention is traced by torch.jit.trace, which would keep the chunks of this one length: use "
            "torch.export.export or torch.compile, which are right for all"
        )
    query, key, value = check_same_kind(query, key, value)
    check_shapes(query, key, value)
    causal, normalize = options.get("causal", False), options.get("normalize", True)
    for name, given in (("causal", causal), ("normalize", normalize)):
        if not isinstance(given, bool):
            truth_value(name, given)  # which refuses it
    mask, axes = read_mask(options.get("mask"), causal), BatchAxes.from_tensors(query, key, value)
    check_order(mask, query, key, options)
    feature_map = checked_map(options.get("feature_map"))
    scale = checked_scale(options.get("scale"), feature_map, normalize, query.shape[-1])
    query, key, value = (axes.as_4d(tensor) for tensor in (query, key, value))
    keep, beta = kept_keys(mask, axes, key), checked_beta(options.get("beta"), axes, key)
    gates = beta, checked_removal(options.get("removal"), axes, key), checked_bonus(options.get("bonus"), axes, key)
    nonfinite = NonfiniteRows.find(query, key, value, gates, keep)
    if nonfinite is not None and keep is not None:  # NaN in a masked row is nothing
        key, value = _kept(key, keep), _kept(value, keep)
        gates = tuple(None if gate is None else _kept_gate(gate, keep) for gate in gates)
        nonfinite = NonfiniteRows.find(query, key, value, gates, keep)
    if nonfinite is not None:  # before the feature map, whose gradient at NaN would be NaN
        query, key, value = (zero_nonfinite(tensor) for tensor in (query, key, value))
        gates = tuple(None if gate is None else zero_nonfinite(gate) for gate in gates)
    beta, removal, bonus = gates
    return LinearProblem(
        query=query,
        key=key,
        value=value,
        feature_map=feature_map,
        scale=scale,
        normalize=normalize,
        causal=mask.causal,
        keep=keep,
        documents=None if mask.documents is None else document_batches(mask.documents, value),
        decay=options.get("decay"),
        beta=beta,
        removal=removal,
        bonus=bonus,
        state=checked_state(options.get("state"), axes, key, normalize),
        nonfinite=nonfinite,
        axes=axes,
        dtype=value.dtype,
    )


def _kept(rows: Tensor, keep: Tensor) -> Tensor:
    """Keys or values with zeros where masked."""
    return rows.where(keep.unsqueeze(-1), 0.0)


def _kept_gate(gate: Tensor, keep: Tensor) -> Tensor:
    """A gate (B, Hk, N), or (B, Hk, N, features), with zeros where masked."""
    return _kept(gate, keep) if gate.ndim == 4 else gate.where(keep, 0.0)
