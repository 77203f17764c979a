"""MesaNet: each query reads the ridge regression of the values on the keys so far, by conjugate gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..core.finite import all_finite
from ..core.score_forms import at_least_float32, zero_nonfinite
from ..core.torch_modes import without_autocast
from ..errors import ConfigurationError, DtypeError, ShapeError
from ..kernels.validation import check_device, check_same_kind, check_shapes
from ..utils.other_types import needs_tensor
from .chunks import SMALLEST_DECAY
from .feature_maps import Identity
from .linear_arguments import check_logarithms, has_values
from .linear_plans import choose_plan
from .linear_problem import make_linear_problem
from .token_numbers import check_token_numbers

Solve = Callable[[Tensor], Tensor]

SHORT = 64
"""Positions up to which all matrices are in memory, and solved one by one."""


def mesa_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    ridge: Tensor,
    beta: Tensor | None = None,
    decay: Tensor | None = None,
    iterations: int | None = None,
) -> Tensor:
    """o_t = G_tᵀ (H_t + diag(λ))⁻¹ q_t: what the ridge regression of the values on the keys so far predicts for q_t.

        H_t = e^{g_t} H_{t-1} + β_t k_t k_tᵀ,    G_t = e^{g_t} G_{t-1} + β_t k_t v_tᵀ

    All N systems are solved at once by conjugate gradients, which need the products H_t p_t alone: each is linear
    attention of p with the keys as values. Memory is linear in N, and time that of `regard.linear_attention` once for
    each iteration; the backward pass solves once more, and keeps no iteration. Up to 64 positions each system is solved
    by itself, for as many unknowns as there are positions or, where there are more of these, dims.

    Shapes:
        query (..., heads, N, D), key (..., heads, N, D), value (..., heads, N, Dv); the output is (..., heads, N, Dv).

    Args:
        query: (..., heads, N, D).
        key: (..., heads, N, D), as many heads as queries.
        value: (..., heads, N, Dv).
        ridge: λ, above 0, (heads, D), or what broadcasts to it.
        beta: β, at least 0, (..., heads, N); None for 1.
        decay: g, a logarithm, at most 0, (..., heads, N); None for 0.
        iterations: of conjugate gradients at most; by default 2 D, after which rounding alone is left unless the
            systems are badly conditioned. They end before when no residual is above the rounding of its query.

    Raises:
        ShapeError: other numbers of heads or positions, a ridge that does not broadcast to (heads, D).
        ConfigurationError: a ridge that is not above 0, a beta below 0, iterations below 1.
        RegardError: as of `regard.linear_attention`.

    Source: von Oswald et al. 2025, MesaNet (arXiv 2506.05233), section 3; they stop after a fixed number of iterations.

    >>> import torch, regard
    >>> one, v = torch.ones(3, 1), torch.tensor([[2.0], [4.0], [6.0]])         # Σ v / (t + λ)
    >>> regard.linear.mesa_attention(one, one, v, ridge=torch.ones(1, 1)).mT
    tensor([[1., 2., 3.]])
    """
    query, key, value = check_same_kind(query, key, value)
    check_shapes(query, key, value)
    if query.shape != key.shape:
        raise ShapeError(
            f"query has the shape {tuple(query.shape)} and key {tuple(key.shape)}: each query solves a system of the "
            "keys up to it, so that they need the same heads and positions"
        )
    if iterations is not None and iterations < 1:
        raise ConfigurationError(f"iterations is {iterations}; it needs a number of at least 1, or None")
    ridge = _checked_ridge(ridge, query)
    beta = query.new_ones(query.shape[:-1]) if beta is None else beta
    beta = check_token_numbers("beta", beta, query, most=float("inf")).unsqueeze(-1)
    if decay is not None:
        decay = check_token_numbers("decay", decay, query)
        check_logarithms(decay)
    q, k, v, ridge, beta = (at_least_float32(each) for each in (query, key, value, ridge, beta))

    def read(rows: Tensor, values: Tensor) -> Tensor:
        problem = make_linear_problem(
            rows, k, beta * values, feature_map=Identity(), normalize=False, causal=True, decay=decay, scale=1.0
        )
        return choose_plan(problem).run().output

    def times_matrix(rows: Tensor) -> Tensor:
        return read(rows, k) + ridge * rows

    def solve(right: Tensor) -> Tensor:
        with torch.no_grad():
            return _conjugate_gradients(times_matrix, right, iterations or 2 * right.shape[-1])

    with without_autocast(query.device.type):
        if query.shape[-2] <= min(SHORT, query.shape[-1]) and _are_read_and_finite(q, k, v):
            return (_shares(q, k, _pair_weights(beta, decay), ridge) @ v).to(value.dtype)
        if query.shape[-2] <= SHORT:
            return read(_solve_each(q, k, beta, decay, ridge), v).to(value.dtype)
        solved = solve(q)
        if torch.is_grad_enabled():
            # The residual is 0 up to rounding, and has the derivatives of the system.
            solved = solved + _Inverse.apply(q - times_matrix(solved), solve)
        return read(solved, v).to(value.dtype)


def _pair_weights(beta: Tensor, decay: Tensor | None) -> Tensor:
    """w_tj = β_j e^{g_{j+1} + ... + g_t}, with which key j counts in the system of position t; 0 after it."""
    weights = beta.mT.expand(*beta.shape[:-1], beta.shape[-2])
    if decay is not None:
        ends = decay.clamp(min=SMALLEST_DECAY).double().cumsum(-1)
        weights = weights * (ends.unsqueeze(-1) - ends.unsqueeze(-2)).clamp(max=0).exp().to(beta.dtype)
    return weights.tril()


def _shares(query: Tensor, key: Tensor, weights: Tensor, ridge: Tensor) -> Tensor:
    """What each query reads of each value, y_t = W_t K x_t of x_t = (Kᵀ W_t K + diag(λ))⁻¹ q_t, (..., N, N).

    With x from its own equation, y = W (U - G y) of G = K diag(λ)⁻¹ Kᵀ and u = K diag(λ)⁻¹ q: a system of as many
    unknowns as there are keys, (1 + W_t G) y_t = W_t u_t, and no matrix of size D.
    """
    scaled = key / ridge
    systems = weights.unsqueeze(-1) * (key @ scaled.mT).unsqueeze(-3)  # (..., N, N, N)
    systems = systems + torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
    return torch.linalg.solve(systems, weights * (query @ scaled.mT))


def _are_read_and_finite(*tensors: Tensor) -> bool:
    """Whether numbers can be read here, and none is NaN or infinite, which would reach earlier positions by 0 · NaN."""
    return all(map(has_values, tensors)) and all_finite(*tensors)


def _solve_each(query: Tensor, key: Tensor, beta: Tensor, decay: Tensor | None, ridge: Tensor) -> Tensor:
    """(H_t + diag(λ))⁻¹ q_t of a short sequence, with all its matrices H in memory: iterations would take longer."""
    key = zero_nonfinite(key)  # 0 · NaN would reach earlier positions; what reads the values marks those behind
    squares = (key.unsqueeze(-1) * key.unsqueeze(-2)).flatten(-2)  # (..., N, D²)
    matrices = (_pair_weights(beta, decay) @ squares).unflatten(-1, (key.shape[-1], key.shape[-1]))
    return torch.linalg.solve(matrices + torch.diag_embed(ridge), query)


class _Inverse(torch.autograd.Function):
    """A⁻¹ r of a symmetric matrix: r's gradient is A⁻¹ times that of the result."""

    @staticmethod
    def forward(ctx: Any, right: Tensor, solve: Solve) -> Tensor:
        ctx.solve = solve
        return solve(right)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.solve(upstream), None


def _conjugate_gradients(times_matrix: Solve, right: Tensor, iterations: int) -> Tensor:
    """A⁻¹ r of each row, (..., N, D), by at most so many products with A, which is positive definite."""
    found, residual = torch.zeros_like(right), right
    direction, size = residual, _squared(residual)
    enough = size * torch.finfo(right.dtype).eps ** 2
    for _ in range(iterations):
        if has_values(size) and bool((size <= enough).all()):
            break
        image = times_matrix(direction)
        along = (direction * image).sum(-1, keepdim=True)
        share = size / along.where(along > 0, 1.0)
        found, residual = found + share * direction, residual - share * image
        before, size = size, _squared(residual)
        direction = residual + size / before.where(before > 0, 1.0) * direction
    return found


def _squared(rows: Tensor) -> Tensor:
    return rows.square().sum(-1, keepdim=True)


def _checked_ridge(ridge: Tensor, query: Tensor) -> Tensor:
    """λ as (..., heads or 1, 1, D), or (1, D) without heads."""
    if refused := needs_tensor("ridge", ridge):
        raise DtypeError(refused)
    check_device("ridge", ridge, query.device)
    heads = query.shape[-3] if query.ndim > 3 else 1
    try:
        ridge = ridge.expand(heads, query.shape[-1])
    except RuntimeError:
        raise ShapeError(
            f"ridge has the shape {tuple(ridge.shape)}; it needs {(heads, query.shape[-1])}, (heads, D), or 1 in place "
            "of these"
        ) from None
    if has_values(ridge) and float(ridge.detach().amin()) <= 0:
        raise ConfigurationError(
            f"ridge has values down to {float(ridge.min()):.4g}; it needs values above 0, without which the first keys "
            "are no regression: pass softplus of a parameter, or more"
        )
    return ridge.unsqueeze(-2) if query.ndim > 3 else ridge
