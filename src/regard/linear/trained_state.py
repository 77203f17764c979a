"""TTT-Linear: a linear model with a layer norm is trained on the keys and values as they come, and read by queries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..core.score_forms import at_least_float32
from ..core.torch_modes import without_autocast
from ..errors import ConfigurationError, DtypeError, ShapeError
from ..kernels.validation import check_device, check_same_kind, check_shapes
from ..utils.numbers import lies_between, whole_number
from ..utils.other_types import needs_tensor
from .chunks import in_chunks
from .linear_arguments import BatchAxes
from .token_numbers import check_token_numbers


def ttt_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    rate: Tensor,
    initial: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    mini_batch: int = 16,
    epsilon: float = 1e-6,
) -> Tensor:
    """o_t = f(q_t; W_t) with f(x; W) = x + LN(Wᵀ x), of a W that takes a gradient step at each token.

        W_t = W_s - Σ_{s < j <= t} θ_j ∇_W ½ ‖f(k_j; W_s) - v_j‖²

    Gradients are at W_s, the weights before the token's mini-batch, so that those of a mini-batch are computed at once
    and mini-batches one after the other. Time is linear in N; memory holds one W for each mini-batch where there is a
    gradient. Without the norm and the residual it would be `titans_attention` without momentum.

    Shapes: query, key, value and the output (..., heads, N, D).

    Args:
        query: (..., heads, N, D), without a scale.
        key: (..., heads, N, D).
        value: (..., heads, N, D).
        rate: θ, at least 0, (..., heads, N); it broadcasts. In the paper it is a sigmoid of a projection, and its loss
            has no ½.
        initial: W before the first token, (heads, D, D), or (D, D) for all.
        norm_weight: the layer norm's factors, (heads, D), or (D,) for all.
        norm_bias: what it adds, likewise.
        mini_batch: how many tokens, from the first on, have their gradients at one W; 16 in the paper.
        epsilon: of the layer norm, added to the variance.

    Raises:
        ShapeError: query, key and value of other shapes than one another, or another argument that does not fit them.
        ConfigurationError: a rate below 0, a mini_batch below 1, an epsilon that is not above 0.
        DtypeError, DeviceError: of other kinds of numbers or on other devices.

    Source: Sun et al. 2024, Learning to (Learn at Test Time) (arXiv 2407.04620), section 2.4 to 2.7. The published code
    adds a bias to W, and divides rates by the place in the mini-batch.

    >>> import torch, regard
    >>> x, norm = torch.tensor([[3.0, 1.0], [3.0, 1.0]]), (torch.ones(2), torch.zeros(2))
    >>> told = {"initial": torch.eye(2), "norm_weight": norm[0], "norm_bias": norm[1]}
    >>> regard.linear.ttt_attention(x, x, x, rate=torch.zeros(2), **told).round(decimals=4)   # LN(3, 1) = (1, -1)
    tensor([[4., 0.],
            [4., 0.]])
    """
    query, key, value = check_same_kind(query, key, value)
    check_shapes(query, key, value)
    if not query.shape == key.shape == value.shape:
        raise ShapeError(
            f"query has the shape {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)}: they "
            "need one shape, since keys are added to what predicts the values"
        )
    mini_batch = whole_number("mini_batch", mini_batch)
    if not lies_between(0.0, epsilon, math.inf):
        raise ConfigurationError(f"epsilon is {epsilon!r}; it needs a finite number above 0, such as 1e-6")
    axes = BatchAxes.from_tensors(query, key, value)
    q, k, v = (at_least_float32(axes.as_4d(tensor)) for tensor in (query, key, value))
    rate = axes.as_4d(check_token_numbers("rate", rate, key, most=math.inf).unsqueeze(-1)).to(q.dtype)
    heads, dim = q.shape[1], q.shape[3]
    state = _of_heads("initial", initial, (heads, dim, dim), q).expand(len(q), heads, dim, dim)
    weight, bias = (
        _of_heads(name, tensor, (heads, dim), q).unsqueeze(-2)
        for name, tensor in (("norm_weight", norm_weight), ("norm_bias", norm_bias))
    )
    norm = _Norm(weight, bias, epsilon)
    with without_autocast(query.device.type):
        of_batches = (in_chunks(each, min(mini_batch, max(q.shape[2], 1))).unbind(2) for each in (q, k, v, rate))
        rows = []
        for queries, keys, values, rates in zip(*of_batches, strict=True):
            step = rates * norm.gradient(keys @ state, values - keys)  # (B, heads, b, D)
            rows.append(norm(queries @ state - (queries @ keys.mT).tril() @ step))
            state = state - keys.mT @ step
        found = q + torch.cat(rows, 2)[:, :, : q.shape[2]] if rows else q
    return axes.unflatten(found).to(value.dtype)


class _Norm:
    """γ ⊙ (z - mean) / √(variance + ε) + β over the last axis, and the gradient of ½ ‖LN(z) - target‖² in z."""

    def __init__(self, weight: Tensor, bias: Tensor, epsilon: float) -> None:
        self._weight, self._bias, self._epsilon = weight, bias, epsilon

    def __call__(self, rows: Tensor) -> Tensor:
        return self._weight * self._whitened(rows)[0] + self._bias

    def gradient(self, rows: Tensor, target: Tensor) -> Tensor:
        """By operations that autograd differentiates again."""
        whitened, factor = self._whitened(rows)
        upstream = self._weight * (self._weight * whitened + self._bias - target)
        along = (upstream * whitened).mean(-1, keepdim=True)
        return factor * (upstream - upstream.mean(-1, keepdim=True) - whitened * along)

    def _whitened(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        variance, mean = torch.var_mean(rows, -1, keepdim=True, correction=0)
        factor = (variance + self._epsilon).rsqrt()
        return (rows - mean) * factor, factor


def _of_heads(name: str, tensor: Tensor, needs: tuple[int, ...], rows: Tensor) -> Tensor:
    """A parameter of each head, or one for all, (heads, ...).

    Raises:
        ShapeError, DtypeError, DeviceError: it does not fit, or is no floating-point tensor.
    """
    if refused := needs_tensor(name, tensor):
        raise DtypeError(refused)
    if not tensor.is_floating_point():
        raise DtypeError(f"{name} needs a floating-point tensor; it is {tensor.dtype}")
    check_device(name, tensor, rows.device)
    if tuple(tensor.shape) not in (needs, needs[1:]):
        raise ShapeError(f"{name} has the shape {tuple(tensor.shape)}; it needs {needs}, or {needs[1:]} for all heads")
    return tensor.to(rows.dtype).expand(needs)
