"""The state space of Mamba-3: the input between two tokens by the trapezoidal rule, and rotations of the state."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from ..core.score_forms import at_least_float32
from ..errors import ShapeError
from .feature_maps import Identity
from .linear_plans import choose_plan
from .linear_problem import make_linear_problem
from .token_numbers import check_token_numbers


def trapezoidal_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    step: Tensor,
    decay: Tensor,
    blend: Tensor,
    angles: Tensor | None = None,
) -> Tensor:
    """o_t = S_tᵀ q_t of a state that the values of a token and of the one before it are added to.

        S_t = e^{g_t} S_{t-1} + Δ_t ((1 - λ_t) e^{g_t} k_{t-1} v_{t-1}ᵀ + λ_t k_t v_tᵀ)

    With λ = 1 it is Mamba-2's, with λ = 1/2 the trapezoidal rule. Queries and keys are turned before by the angles
    Δ_1 θ_1 + ... + Δ_t θ_t, dims 0 and 1 by the first, 2 and 3 by the second, and so on; dims without an angle stay.
    The state is then that of complex decays e^{g - iΔθ}. Queries are C, keys B and values x of the paper.

    One call of linear attention, whose values have the factors Δ_t λ_t + Δ_{t+1} (1 - λ_{t+1}); the second term is not
    yet there for the query of the token itself, and is taken from it.

    Shapes:
        query (..., heads, N, D), key (..., key heads, N, D), value (..., key heads, N, Dv); the output is
        (..., heads, N, Dv).

    Args:
        query: (..., heads, N, D), without a scale.
        key: (..., key heads, N, D).
        value: (..., key heads, N, Dv).
        step: Δ, at least 0, (..., key heads, N); it broadcasts, as the next three do.
        decay: g = Δ A, a logarithm, at most 0, (..., key heads, N).
        blend: λ in 0..1, (..., key heads, N).
        angles: θ in radians for a step of 1, (..., key heads, N, angles), with 2 · angles at most D; the authors' code
            has π tanh of a projection. None for no rotation.

    Raises:
        ShapeError: step, blend or angles that do not broadcast to their shapes, or more angles than pairs of dims.
        ConfigurationError: a step below 0, or a blend out of 0..1.
        DtypeError, DeviceError: of other kinds of numbers or on other devices.
        RegardError: query, key, value and decay, as `regard.linear_attention` has them.

    Source: Lahoti et al. 2026, Mamba-3 (arXiv 2603.15569), section 3, with one input and one output for each head.

    >>> import torch, regard
    >>> one, half = torch.ones(2, 1), torch.full((2,), 0.5)
    >>> regard.linear.trapezoidal_attention(one, one, one, step=2 * half, decay=0 * half, blend=half)
    tensor([[0.5000],
            [1.5000]])
    """
    step = at_least_float32(check_token_numbers("step", step, value, most=math.inf))
    blend = at_least_float32(check_token_numbers("blend", blend, value, most=1.0))
    if angles is not None:
        angles = check_token_numbers("angles", angles, value, each="angles")
        if 2 * angles.shape[-1] > key.shape[-1]:
            raise ShapeError(
                f"angles has {angles.shape[-1]} for each token, which turn {2 * angles.shape[-1]} dims, but keys have "
                f"{key.shape[-1]}: pass at most {key.shape[-1] // 2}"
            )
        turns = (step.unsqueeze(-1) * angles).double().cumsum(-2)
        query, key = _turned(query, turns), _turned(key, turns)
    after = functional.pad((step * (1 - blend))[..., 1:], (0, 1)).unsqueeze(-1)  # what the next token adds
    total = ((step * blend).unsqueeze(-1) + after).to(value.dtype)
    problem = make_linear_problem(
        query, key, total * value, feature_map=Identity(), normalize=False, causal=True, decay=decay, scale=1.0
    )
    rows = choose_plan(problem).run().output  # no hook is told of weights that are not yet those of the tokens
    own = (query * _per_head(key, query)).sum(-1, keepdim=True)
    return rows - own * _per_head(after.to(value.dtype) * value, query)


def _turned(rows: Tensor, turns: Tensor) -> Tensor:
    """Rows (..., heads, N, D) whose pairs of dims are turned by (..., key heads, N, angles)."""
    turns = _per_head(turns, rows)
    cosine, sine = turns.cos().to(rows.dtype), turns.sin().to(rows.dtype)
    pairs, rest = rows.split([2 * turns.shape[-1], rows.shape[-1] - 2 * turns.shape[-1]], -1)
    first, second = pairs[..., ::2], pairs[..., 1::2]
    turned = torch.stack([first * cosine - second * sine, first * sine + second * cosine], -1).flatten(-2)
    return torch.cat([turned, rest], -1)


def _per_head(tensor: Tensor, rows: Tensor) -> Tensor:
    """(..., key heads, N, ·) once for each head of rows (..., heads, N, D)."""
    group = rows.shape[-3] // max(tensor.shape[-3], 1) if rows.ndim > 3 else 1
    return tensor if group == 1 else tensor.repeat_interleave(group, -3)
