"""The weights of linear attention: for lenses, for records of a model, and signed ones of chosen rows."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Unpack

import torch
from torch import Tensor

from ..attention import Observation, observe_problem, run_problem
from ..core.problem import Problem
from ..core.score_forms import DecayedDotPairs, DotPairs
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError
from ..kernels import make_problem
from ..kernels.hooks import linear_observer
from ..lenses import Lens
from ..masks import Mask, causal
from .feature_maps import Elu, FavorPlus, Relu, Softmax
from .linear_arguments import LinearOptions
from .linear_mask import mask_of_keys
from .linear_operator import LINEAR
from .linear_plans import FeaturePlan, choose_plan, feature_plan
from .linear_problem import make_linear_problem

NONNEGATIVE = (Elu, FavorPlus, Relu, Softmax)
"""Feature maps without negative features, whose values need no check."""

_exact_too: ContextVar[bool] = ContextVar("exact_too", default=False)
_is_exact_twin: ContextVar[bool] = ContextVar("is_exact_twin", default=False)


def observe_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *lenses: Lens, **options: Unpack[LinearOptions]
) -> Observation:
    """`linear_attention`, with results of lenses from `regard.lenses` over its weights: `seen.output`, `seen[lens]`.

        w_ij = φ(q_i) · φ(k_j) / Σ_k φ(q_i) · φ(k_k),    with decay as `linear_attention` has it

    Output and sums take time linear in the lengths; the lenses read all weights, tile by tile: time as of exact
    attention, memory linear in the lengths. Exact attention on the same query and key, to compare with, is
    `regard.observe(query, key, value, *lenses, mask=...)`.

    Shapes, arguments and errors are those of `linear_attention`; `seen.lse` is log Σ_k φ(q_i) · φ(k_k), for `FavorPlus`
    less the logarithms that stabilise its features. And:

    Raises:
        ConfigurationError: weights that may be negative, or do not sum to 1: `normalize=False`, a feature map with
            negative features (`linear_attention_weights` returns those of chosen rows); a state, whose keys are gone.

    >>> import torch, regard
    >>> received = regard.lenses.Received()
    >>> q = torch.zeros(3, 4)
    >>> regard.observe_linear_attention(q, q, q, received, causal=True)[received]
    tensor([1.8333, 0.8333, 0.3333])
    """
    observer = None if under_transform() else linear_observer()
    if observer is not None:
        return observer(query, key, value, options, lenses)
    return observe_problem(make_weights_problem(query, key, value, **options), lenses)


def linear_attention_weights(
    query: Tensor, key: Tensor, rows: slice = slice(None), **options: Unpack[LinearOptions]
) -> Tensor:
    """The weights of some rows, (..., heads, rows, N): o_i = Σ_j w_ij v_j, for any options of `linear_attention`.

    They may be negative, and sum to 1 only where they are normalised. Of the delta rule, o_i is linear in the values
    too: its w_ij is what is left of v_j in the state when q_i reads it. Time is that of a backward pass with values of
    as many columns as there are rows, memory (rows + features) · N.

    Args:
        query: (..., heads, M, D).
        key: (..., key heads, N, D).
        rows: which of the M rows.
        options: as of `linear_attention`; with a state, the weights of the keys after it.

    Raises:
        ShapeError, DtypeError, DeviceError, MaskError, ConfigurationError: as of `linear_attention`.

    >>> import torch, regard
    >>> q, k = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0], [-1.0]])
    >>> options = {"feature_map": regard.linear.Identity(), "normalize": False, "causal": True}
    >>> regard.linear.linear_attention_weights(q, k, **options)
    tensor([[ 1.,  0.],
            [ 2., -2.]])
    """
    chosen = range(query.shape[-2])[rows]
    group = query.shape[-3] // max(key.shape[-3], 1) if query.ndim > 3 else 1
    columns = group * len(chosen)  # of each key head: the rows of all its query heads
    with torch.enable_grad():
        value = key.new_zeros(*key.shape[:-1], columns, requires_grad=True)
        problem = make_linear_problem(query.detach(), key.detach(), value, **options)
        output = choose_plan(problem).run().output
    at = torch.tensor(list(chosen), dtype=torch.int64, device=query.device)
    upstream = torch.zeros_like(output)  # (..., heads, M, columns)
    if group == 1:
        upstream[..., at, torch.arange(columns, device=at.device)] = 1.0
    else:
        grouped = upstream.unflatten(-3, (-1, group)).unflatten(-1, (group, -1))  # (..., Hk, g, M, g, rows)
        for head in range(group):
            grouped[..., head, at, head, torch.arange(len(chosen), device=at.device)] = 1.0
    (weights,) = torch.autograd.grad(output, value, upstream)  # (..., Hk, N, columns)
    if group == 1:
        return weights.mT
    return weights.unflatten(-1, (group, -1)).movedim((-2, -1), (-3, -2)).flatten(-4, -3)


def make_weights_problem(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[LinearOptions]) -> Problem:
    """The `Problem` over features whose weights are those of linear attention with these arguments.

    Raises:
        ConfigurationError: weights that are no shares of their row.
    """
    check_has_weights(options)
    plan = feature_plan(make_linear_problem(query, key, value, **options))
    queries, keys = marked_features(plan)
    check_nonnegative(options, queries, keys)
    unflatten, decay = plan.problem.axes.unflatten, plan.sequences.decay
    if decay is None:
        pairs = DotPairs(unflatten(queries), unflatten(keys), 1.0)
    else:
        decay = decay.unsqueeze(-1) if decay.ndim == 3 else decay
        pairs = DecayedDotPairs.from_decay(unflatten(queries), unflatten(keys), unflatten(decay))
    return Problem(pairs, value.expand(*pairs.key.shape[:-1], -1), _whole_mask(options), normalizer=LINEAR)


def check_has_weights(options: LinearOptions) -> None:
    """Check that the weights of a call sum to 1, and that each key still has one.

    Raises:
        ConfigurationError: `normalize=False`, or a state.
    """
    if not options.get("normalize", True):
        raise ConfigurationError(
            "lenses read weights of at least 0 that sum to 1 in each row, and normalize=False has others: pass "
            "normalize=True, or read the signed weights of some rows with regard.linear.linear_attention_weights"
        )
    if options.get("bonus") is not None:
        raise ConfigurationError(
            "lenses read weights that are products of features and decays, and a bonus gives a token's own another "
            "factor: read the weights of some rows with regard.linear.linear_attention_weights"
        )
    if options.get("state") is not None:
        raise ConfigurationError(
            "a state has the sums of its keys, and no longer the weight of each: observe the whole sequence, without "
            "state"
        )


def report_to_hook(query: Tensor, key: Tensor, value: Tensor, options: LinearOptions) -> None:
    """Call the current attention hook with the weights of a call, then perhaps with those of exact attention.

    Weights that are no shares of their row are not recorded, with a warning.
    """
    with torch.no_grad():
        try:
            problem = make_weights_problem(query, key, value, **options)
        except ConfigurationError as error:
            warnings.warn(f"weights of linear attention are not recorded: {error}", stacklevel=3)
            return
        run_problem(problem)  # calls the hook
        if _exact_too.get():
            token = _is_exact_twin.set(True)
            try:
                run_problem(make_problem(query, key, value, mask=problem.mask))
            finally:
                _is_exact_twin.reset(token)


@contextmanager
def reporting_exact_attention() -> Iterator[None]:
    """In the block, hooks are called for exact attention on the same query and key after each linear attention."""
    token = _exact_too.set(True)
    try:
        yield
    finally:
        _exact_too.reset(token)


def is_exact_twin() -> bool:
    """Whether a hook is being called for the exact attention beside a linear one."""
    return _is_exact_twin.get()


def marked_features(plan: FeaturePlan) -> tuple[Tensor, Tensor]:
    """φ of queries and keys, (B, heads, length, features), with NaN in rows that have NaN or infinity."""
    (query, key, *_), nonfinite = plan.sequences, plan.problem.nonfinite
    if nonfinite is None:
        return query, key
    return (
        query.masked_fill(nonfinite.query.unsqueeze(-1), math.nan),
        key.masked_fill(nonfinite.key.unsqueeze(-1), math.nan),
    )


def _whole_mask(options: LinearOptions) -> Mask | None:
    """The mask of a call together with its `causal`."""
    mask = options.get("mask")
    whole = None if mask is None else mask_of_keys(mask)
    if not options.get("causal"):
        return whole
    return causal() if whole is None else causal() & whole


def check_nonnegative(options: LinearOptions, *features: Tensor) -> None:
    """Check that no feature is negative.

    Raises:
        ConfigurationError: one is.
    """
    feature_map = options.get("feature_map")
    if feature_map is None or isinstance(feature_map, NONNEGATIVE):
        return
    least = min((float(tensor.detach().nan_to_num().min()) for tensor in features if tensor.numel()), default=0.0)
    if least < 0:
        raise ConfigurationError(
            f"{feature_map!r} has features down to {least:.4g}, so that weights may be negative, and lenses read those "
            "of at least 0 alone: read the signed weights of some rows with regard.linear.linear_attention_weights"
        )
