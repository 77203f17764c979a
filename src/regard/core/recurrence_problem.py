"""The linear recurrence as one object, its results and its gradients: what linear attention hands to a backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from torch import Tensor

FeatureMapName: TypeAlias = Literal["identity", "elu", "unit_norm"]
"""Feature maps that backends may have code for: x, elu(x) + 1, and x / |x|."""


RecurrenceInputs: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]
"""Query, key, value, decay, beta and removal, as `RecurrenceProblem` has them."""

StoredRecurrence: TypeAlias = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]
"""Of a forward pass for the backward pass: output and sums of weights where it is normalised, and states and totals
before each segment, where there are several."""


@dataclass(frozen=True, eq=False, slots=True)
class RecurrenceProblem:
    """S_t = e^{g_t} S_{t-1} + φ(k_t) u_tᵀ, o_t = S_tᵀ φ(q_t): the inputs of both passes.

    u_t = v_t, or by the delta rule (Yang et al. 2024, arXiv 2406.06484; with decay arXiv 2412.06464)
    u_t = β_t (v_t - (e^{g_t} S_{t-1})ᵀ r_t) with r_t = φ(k_t) unless it is given.

    Args:
        query: (B, H, N, D), of one dtype and device with key and value, and of any strides; head h reads the state of
            key head ⌊h · Hk / H⌋.
        key: (B, Hk, N, D).
        value: (B, Hk, N, Dv).
        decay: g <= 0, (B, Hk, N), or (B, Hk, N, D) for each feature; -inf forgets all.
        beta: β, (B, Hk, N), for the delta rule.
        state: S before the first token, (B, Hk, D, Dv); None for 0.
        total: z before the first token, (B, Hk, D); None for 0.
        feature_map: φ, "identity" or "elu".
        normalize: whether outputs are divided by z_tᵀ φ(q_t), where z_t = e^{g_t} z_{t-1} + φ(k_t) is the total; those
            whose divisor is 0 are 0.
        removal: r, (B, Hk, N, D), the key whose value the delta rule removes, of the dtype of the keys; None for φ(k).
    """

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None = None
    beta: Tensor | None = None
    state: Tensor | None = None
    total: Tensor | None = None
    feature_map: FeatureMapName = "identity"
    normalize: bool = False
    removal: Tensor | None = None


@dataclass(frozen=True, eq=False, slots=True)
class RecurrenceResult:
    """Results of the forward pass: the output in the dtype of the inputs, the others float32 at least.

    Shapes: output (B, H, N, Dv); row_total (B, H, N), the sums that outputs are divided by, or None; state
    (B, Hk, D, Dv) and total (B, Hk, D) after the last token, the latter None where nothing is normalised; border_state
    (B, Hk, T, D, Dv) and border_total (B, Hk, T, D): the same before each segment of tokens, for the backward pass, or
    None.
    """

    output: Tensor
    row_total: Tensor | None
    state: Tensor
    total: Tensor | None
    border_state: Tensor | None
    border_total: Tensor | None


@dataclass(frozen=True, eq=False, slots=True)
class RecurrenceGradients:
    """Gradients of a recurrence's inputs, in their shapes; None for those that it has not."""

    query: Tensor
    key: Tensor
    value: Tensor
    decay: Tensor | None
    beta: Tensor | None
    state: Tensor
    total: Tensor | None
    removal: Tensor | None = None
