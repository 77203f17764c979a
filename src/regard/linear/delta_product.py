"""Several steps of the delta rule for each token: DeltaProduct, and removal and writing by keys of their own."""

from __future__ import annotations

from functools import reduce
from operator import and_
from typing import TypedDict, Unpack, cast

from torch import Tensor
from torch.nn import functional

from ..core.grid import Grid
from ..errors import ShapeError
from ..masks import Mask
from ..masks.causal import Causal
from ..masks.documents import Documents
from ..masks.tensor_mask import TensorMask
from .feature_maps import FeatureMap, Identity
from .linear_arguments import LinearOptions
from .linear_attention import linear_attention, linear_attention_with_state
from .linear_mask import read_mask
from .linear_state import LinearState


class StepOptions(TypedDict, total=False):
    """The keyword arguments of `delta_product`, which documents them."""

    beta: Tensor | None
    removal: Tensor | None
    decay: Tensor | None
    feature_map: FeatureMap | None
    mask: Mask | Tensor | None
    scale: float | None
    state: LinearState | None


def delta_product(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[StepOptions]) -> Tensor:
    """o_t = S_tᵀ φ(q_t) after n steps of the delta rule for each token t, the first of them on e^{g_t} S_{t-1}.

        S_{t,0} = e^{g_t} S_{t-1},    S_{t,i} = S_{t,i-1} + β_{t,i} φ(k_{t,i}) (v_{t,i} - S_{t,i-1}ᵀ r_{t,i})ᵀ,
        S_t = S_{t,n}

    A token multiplies the state by a product of n matrices I - β φ(k) rᵀ, with r = φ(k) of n generalised Householder
    maps, and so does what one step cannot, such as rotations. With n = 2 the first step can remove by keys that the
    second one does not write: RWKV-7, S_t = (diag(w_t) + a_t b_tᵀ) S_{t-1} + k_t v_tᵀ with a = -κ ⊙ rate and b = κ, has
    the keys (κ ⊙ rate, k), the removals (κ / w, 0), the values (0, v) and the decay log w.

    Time and memory are those of `regard.linear_attention` of n times the length.

    Shapes:
        query (..., heads, N, D), key (..., key heads, N, n, D), value (..., key heads, N, n, Dv); the output is
        (..., heads, N, Dv).

    Args:
        query: (..., heads, N, D).
        key: (..., key heads, N, n, D), of each token in the order of its steps.
        value: (..., key heads, N, n, Dv).
        options: beta (..., key heads, N, n), or with one number for each feature (..., key heads, N, n, features);
            removal r (..., key heads, N, n, features); decay (..., key heads, N) or (..., key heads, N, features), once
            for each token; feature_map, `Identity()` by default; mask, scale and state as of `regard.linear_attention`.

    Raises:
        ShapeError: a key or value without an axis of steps, or of another number of them; others as of
            `regard.linear_attention`.

    Source: Siems et al. 2025, DeltaProduct (arXiv 2502.10297), section 3; Peng et al. 2025, RWKV-7 (arXiv 2503.14456).

    >>> import torch, regard
    >>> query, key = torch.ones(1, 2), torch.eye(2)[None]          # one token of two steps
    >>> regard.linear.delta_product(query, key, torch.tensor([[[2.0], [3.0]]]), beta=torch.ones(1, 2), scale=1.0)
    tensor([[5.]])
    """
    steps = _checked_steps(query, key, value)
    rows = linear_attention(*_in_one_axis(query, key, value), **_options_of_steps(options, key))
    return _last_of_each(rows, steps)


def delta_product_with_state(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[StepOptions]
) -> tuple[Tensor, LinearState]:
    """`delta_product`, and the state after the last token, which the next call continues from.

    Raises:
        ShapeError, DtypeError, DeviceError, MaskError, ConfigurationError: as of `delta_product`; documents, of which
            it is not known which one continues.
    """
    steps = _checked_steps(query, key, value)
    rows, state = linear_attention_with_state(*_in_one_axis(query, key, value), **_options_of_steps(options, key))
    return _last_of_each(rows, steps), state


def attend_by_steps(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[LinearOptions]) -> Tensor:
    """`regard.linear_attention`, or, of keys with an axis of steps, `delta_product` with those of its options."""
    if key.ndim == query.ndim:
        return linear_attention(query, key, value, **options)
    return delta_product(query, key, value, **_given_to_steps(options))


def attend_by_steps_with_state(
    query: Tensor, key: Tensor, value: Tensor, **options: Unpack[LinearOptions]
) -> tuple[Tensor, LinearState]:
    """The same, and the state after the last token."""
    if key.ndim == query.ndim:
        return linear_attention_with_state(query, key, value, **options)
    return delta_product_with_state(query, key, value, **_given_to_steps(options))


def _given_to_steps(options: LinearOptions) -> StepOptions:
    return cast(StepOptions, {name: given for name, given in options.items() if name in StepOptions.__annotations__})


def _in_one_axis(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries after the last step of each token, zeros after the others, and keys and values of all steps."""
    queries = functional.pad(query.unsqueeze(-2), (0, 0, key.shape[-2] - 1, 0))
    return queries.flatten(-3, -2), key.flatten(-3, -2), value.flatten(-3, -2)


def _last_of_each(rows: Tensor, steps: int) -> Tensor:
    """The rows after the last step of each token."""
    return rows[..., steps - 1 :: steps, :]


def _options_of_steps(options: StepOptions, key: Tensor) -> LinearOptions:
    """The options of `linear_attention` over all steps."""
    beta, removal = options.get("beta"), options.get("removal")
    beta = key.new_ones(key.shape[:-1]) if beta is None else beta
    axes = key.ndim - 3, key.ndim - 2
    return {
        "feature_map": options.get("feature_map") or Identity(),
        "causal": True,
        "normalize": False,
        "mask": _mask_of_steps(options.get("mask"), key),
        "decay": _decay_of_steps(options.get("decay"), key),
        "beta": beta.flatten(*axes),
        "removal": None if removal is None else removal.flatten(*axes),
        "scale": options.get("scale"),
        "state": options.get("state"),
    }


def _checked_steps(query: Tensor, key: Tensor, value: Tensor) -> int:
    """The number of steps of each token.

    Raises:
        ShapeError: key and value have not one axis more than the query, or not the same steps of the same tokens.
    """
    if key.ndim != value.ndim or key.ndim < 3 or key.shape[-3:-1] != value.shape[-3:-1] or not key.shape[-2]:
        raise ShapeError(
            f"key has the shape {tuple(key.shape)} and value {tuple(value.shape)}; they need (..., key heads, N, "
            "steps, D) and (..., key heads, N, steps, Dv), with one step at least"
        )
    if query.ndim != key.ndim - 1 or query.shape[-2] != key.shape[-3]:
        raise ShapeError(
            f"query has the shape {tuple(query.shape)}; with a key of {tuple(key.shape)} it needs (..., heads, "
            f"{key.shape[-3]}, {key.shape[-1]}): it reads the state once for each token"
        )
    return key.shape[-2]


def _decay_of_steps(decay: Tensor | None, key: Tensor) -> Tensor | None:
    """The decay of each step, (..., N · steps) or (..., N · steps, features): that of the token at its first one."""
    if decay is None:
        return None
    length, others = key.shape[-3], key.shape[-2] - 1
    if decay.ndim == key.ndim - 1:  # for each feature
        decay = decay.expand(*decay.shape[:-2], length, decay.shape[-1])
        return functional.pad(decay.unsqueeze(-2), (0, 0, 0, others)).flatten(-3, -2)
    decay = decay.expand(*decay.shape[:-1], length)
    return functional.pad(decay.unsqueeze(-1), (0, others)).flatten(-2)


def _mask_of_steps(mask: Mask | Tensor | None, key: Tensor) -> Mask | None:
    """The mask of all steps of the tokens that a mask keeps."""
    if mask is None:
        return None
    parts, (length, steps) = read_mask(mask, causal=True), key.shape[-3:-1]
    masks: list[Mask] = [Causal()]
    keep = parts.keep(Grid.from_lengths(1, length, heads=key.ndim > 4, device=key.device)) if length else None
    if keep is not None:
        masks.append(TensorMask(keep.repeat_interleave(steps, -1).unsqueeze(-2)))
    if parts.documents is not None:
        masks.append(Documents(parts.documents.ids.repeat_interleave(steps, -1)))
    return reduce(and_, masks)
