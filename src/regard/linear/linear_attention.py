"""Linear attention, whose weights are products of features: sums over keys in place of the weights of all pairs."""

from __future__ import annotations

from typing import Unpack, cast

import torch
from torch import Tensor

from ..core.torch_modes import functorch_active
from ..errors import ConfigurationError, MaskError
from ..kernels.hooks import current_hook, linear_substitute
from ..masks import Mask
from .feature_maps import FeatureMap
from .linear_arguments import LinearOptions
from .linear_plans import choose_plan
from .linear_problem import make_linear_problem
from .linear_state import LinearState
from .linear_weights import report_to_hook
from .recurrence_outputs import recurrence_outputs
from .single_token import single_token


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    feature_map: FeatureMap | None = None,
    causal: bool = False,
    normalize: bool = True,
    mask: Mask | Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    removal: Tensor | None = None,
    bonus: Tensor | None = None,
    scale: float | None = None,
    state: LinearState | None = None,
) -> Tensor:
    """Σ_j w_ij v_j / Σ_j w_ij, with w_ij = φ(q_i) · φ(k_j) where M: attention in time and memory linear in the lengths.

    Causal attention is the recurrence o_t = S_tᵀ φ(q_t), computed in chunks, of the state

        S_t = e^{g_t} S_{t-1} + φ(k_t) u_tᵀ,    u_t = v_t  or  β_t (v_t - (e^{g_t} S_{t-1})ᵀ r_t),  r_t = φ(k_t)

    and the weights are then w_ij = Σ_d φ(q_i)_d φ(k_j)_d e^{g_{j+1,d} + ... + g_{i,d}} for j <= i.

    Shapes:
        query (..., heads, M, D), key (..., key heads, N, D), value (..., key heads, N, Dv); the output is
        (..., heads, M, Dv). Key heads divide query heads. Input with three dimensions is (batch, length, dim), with
        two (length, dim): one head. Batch dimensions broadcast; any length may be 0. Causal attention has M = N.

    Args:
        query: (..., heads, M, D).
        key: (..., key heads, N, D).
        value: (..., key heads, N, Dv).
        feature_map: φ, from `regard.linear`, or a function of your own from (..., length, D) to (..., length,
            features); `Elu()` by default.
        causal: each query attends to the keys up to its own position.
        normalize: whether the weights are divided by their sum, as above; never with `beta` or `removal`.
        mask: M: `masks.causal()`, `masks.padding(lengths)`, `masks.documents(ids)`, `masks.where(keep=keys)` with keys
            (batch, 1, 1, N), and these joined by &. A key that is masked leaves the state as it is, and its decay
            counts for nothing; a document is computed as if it were alone.
        decay: g, a logarithm, at most 0, for causal attention: (..., key heads, N), one per head and position (RetNet,
            Sun et al. 2023, arXiv 2307.08621, Eq. 6), or (..., key heads, N, features), one per feature (gated linear
            attention, Yang et al. 2024, arXiv 2312.06635, Eq. 3). Axes of size 1 broadcast.
        beta: β in 0..2, (..., key heads, N): the delta rule (Yang et al. 2024, arXiv 2406.06484, Eq. 3), and with decay
            the gated delta rule (arXiv 2412.06464, Eq. 10): the state decays before it is read. Keys need a norm of at
            most 1, or the state grows. With one number for each feature, (..., key heads, N, features), it is a factor
            of the written key: S_t = e^{g_t} S_{t-1} + (β_t ⊙ φ(k_t)) (v_t - (e^{g_t} S_{t-1})ᵀ r_t)ᵀ.
        removal: r, (..., key heads, N, features), the key whose value the delta rule removes, where it is another one
            than φ(k): the generalised delta rule, without a `beta` for β = 1. Gated DeltaNet-2 (Hatamizadeh et al.
            2026, arXiv 2605.22791) has r = b ⊙ k and values w ⊙ v. The state decays before it is read; r e^{-g}, for
            decays that are not strong, reads it as it was before, as Comba (Hu et al. 2025, arXiv 2506.02475) does with
            r = d k.
            |r| |φ(k)| β needs to be at most 2, or the state may grow.
        bonus: u, (..., key heads, N, features), of which axes of size 1 broadcast: a token's own weight is
            φ(q_t) · (u ⊙ φ(k_t)), and its query reads the state before it, o_t = S_{t-1}ᵀ φ(q_t) + own weight · v_t, as
            in RWKV-6 (Peng et al. 2024, arXiv 2404.05892). Not with the delta rule.
        scale: what queries are multiplied by before φ; by default 1, and 1/√D for `Identity()` without `normalize`.
        state: what the sums start from, as `linear_attention_with_state` returns it for the positions before; for
            causal attention.

    A row without keys, or whose weights add up to 0, below the smallest normal number, has output 0. Sums are in
    float32 at least.

    Raises:
        ShapeError, DtypeError, DeviceError: tensors that do not fit; the message has their shapes and the mend.
        MaskError: a mask that linear attention cannot take; the message names it and lists those that it can.
        ConfigurationError: decay above 0, beta out of 0..2, beta or removal with `normalize`, and what needs causal
            attention without it.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), Eq. 4 to 12.

    >>> import torch, regard
    >>> q, k, v = torch.zeros(3, 4), torch.zeros(3, 4), torch.tensor([[0.0], [2.0], [4.0]])
    >>> regard.linear_attention(q, k, v), regard.linear_attention(q, k, v, causal=True)
    (tensor([[2.],
            [2.],
            [2.]]), tensor([[0.],
            [1.],
            [2.]]))
    """
    options: LinearOptions = {
        "feature_map": feature_map,
        "causal": causal,
        "normalize": normalize,
        "mask": mask,
        "decay": decay,
        "beta": beta,
        "removal": removal,
        "bonus": bonus,
        "scale": scale,
        "state": state,
    }
    substitute = linear_substitute()
    if substitute is not None:
        return substitute(query, key, value, options, False)[0]
    if state is None:
        output = recurrence_outputs(query, key, value, options)
    else:
        step = single_token(query, key, value, options)
        output = None if step is None else step[0]
    if output is None:
        output = choose_plan(make_linear_problem(query, key, value, **options)).run().output
    if _is_observed():
        report_to_hook(query, key, value, options)
    return output


def linear_attention_with_state(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[LinearOptions]
) -> tuple[Tensor, LinearState]:
    """Causal `linear_attention`, and the state after the last position, which the next call continues from.

    Shapes: output (..., heads, N, Dv), state matrix (..., key heads, features, Dv) and total (..., key heads,
    features), in float32 at least. Both have gradients. Arguments and errors are those of `linear_attention`, and:

    Raises:
        ConfigurationError: attention that is not causal, which has no state to continue from.
        MaskError: documents, of which it is not known which one continues.

    >>> import torch, regard
    >>> q, k, v = torch.randn(3, 1, 2, 7, 4)
    >>> first, state = regard.linear_attention_with_state(q[..., :5, :], k[..., :5, :], v[..., :5, :], causal=True)
    >>> rest = regard.linear_attention(q[..., 5:, :], k[..., 5:, :], v[..., 5:, :], causal=True, state=state)
    >>> whole = regard.linear_attention(q, k, v, causal=True)
    >>> torch.allclose(torch.cat([first, rest], -2), whole, atol=1e-6)
    True
    """
    substitute = linear_substitute()
    if substitute is not None:
        return substitute(query, key, value, options, True)
    step = single_token(query, key, value, options)
    if step is None:
        problem = make_linear_problem(query, key, value, **options)
        check_has_state(causal=problem.causal, documents=problem.documents is not None)
        result = choose_plan(problem).run()
        step = result.output, cast("LinearState", result.state)
    if _is_observed():
        report_to_hook(query, key, value, options)
    return step


def check_has_state(*, causal: bool, documents: bool) -> None:
    """Check that there is a state to continue from.

    Raises:
        ConfigurationError, MaskError: there is none.
    """
    if not causal:
        raise ConfigurationError(
            "linear_attention_with_state needs causal=True: the state is what the next positions continue from, and "
            "without an order there are none"
        )
    if documents:
        raise MaskError(
            "masks.documents has several documents in one sequence, so that no state is the one to continue from: pass "
            "each document as a sequence of its own, or take linear_attention, which returns no state"
        )


def _is_observed() -> bool:
    """Whether a hook wants the weights of the call, whose values can be read."""
    return not torch.compiler.is_compiling() and current_hook() is not None and not functorch_active()
