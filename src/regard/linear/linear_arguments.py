"""The arguments of `regard.linear_attention`: their names, their leading axes, and what is checked of each.

Each check returns its argument as the sums over keys need it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypedDict

import torch
from torch import Tensor

from ..core.broadcasting import broadcast_shapes
from ..core.grid import Grid
from ..errors import ConfigurationError, DtypeError, MaskError, ShapeError
from ..kernels.validation import check_device
from ..masks import Mask
from ..utils.numbers import lies_between
from ..utils.other_types import needs_tensor
from .feature_maps import Elu, FeatureMap, Identity
from .linear_mask import LinearMask
from .linear_state import LinearState
from .nonfinite_rows import is_traced

LARGEST_BETA = 2.0
"""Above it the delta rule would scale the state along a unit key by less than -1, and so make it grow."""


class LinearOptions(TypedDict, total=False):
    """The keyword arguments of `linear_attention`, which documents them."""

    feature_map: FeatureMap | None
    causal: bool
    normalize: bool
    mask: Mask | Tensor | None
    decay: Tensor | None
    beta: Tensor | None
    removal: Tensor | None
    bonus: Tensor | None
    scale: float | None
    state: LinearState | None


@dataclass(frozen=True)
class BatchAxes:
    """The leading axes of the caller's tensors: broadcast batch, and whether there is a head axis."""

    batch: torch.Size
    has_heads: bool

    @classmethod
    def from_tensors(cls, *tensors: Tensor) -> BatchAxes:
        """Those of query, key and value."""
        has_heads = tensors[0].ndim > 3
        first, *others = (tensor.shape[: -3 if has_heads else -2] for tensor in tensors)
        return cls(first if all(other == first for other in others) else broadcast_shapes(first, *others), has_heads)

    def as_4d(self, tensor: Tensor, trailing: int = 2) -> Tensor:
        """(B, heads, ...) with `trailing` more axes: a view wherever possible."""
        if self.has_heads and tensor.ndim == 2 + trailing and tensor.shape[:1] == self.batch:
            return tensor
        if not self.has_heads:
            tensor = tensor.unsqueeze(-1 - trailing)
        own = tensor.shape[-1 - trailing :]
        return tensor.expand(*self.batch, *own).reshape(self.batch.numel(), *own)

    def unflatten(self, tensor: Tensor) -> Tensor:
        """(B, heads, ·, ·) with the leading axes of the caller."""
        return tensor.reshape(*self.batch, *tensor.shape[1 if self.has_heads else 2 :])


def kept_keys(mask: LinearMask, axes: BatchAxes, key: Tensor) -> Tensor | None:
    """Which keys exist, bool, (B or 1, Hk or 1, N); None for all.

    Raises:
        MaskError: a mask for other axes than (batch, key heads, N).
    """
    length = key.shape[2]
    keep = None
    if mask.of_keys and length:
        keep = mask.keep(Grid.from_lengths(1, length, heads=axes.has_heads, device=key.device))
    if keep is None:
        return None
    needs = (*axes.batch, key.shape[1], length) if axes.has_heads else (*axes.batch, length)
    try:
        keep = keep.expand(broadcast_shapes(keep.shape, (1,) * len(needs)))
        keep.expand(needs)
    except RuntimeError:
        raise MaskError(
            f"the mask says which keys exist in the shape {tuple(keep.shape)}, but linear attention needs one that "
            f"broadcasts to {needs}, (batch, key heads, keys): query heads that share a key head share its state"
        ) from None
    return axes.as_4d(keep, 1)


def checked_state(state: LinearState | None, axes: BatchAxes, key: Tensor, normalize: bool) -> LinearState | None:
    """The state with sums (B, Hk, D, Dv) in the dtype of the sums.

    Raises:
        ConfigurationError: no state, or a state of normalised attention for one that is not, or the reverse.
        ShapeError: another batch or number of heads.
    """
    if state is None:
        return None
    if not isinstance(state, LinearState):
        raise ConfigurationError(
            f"state needs a LinearState, as linear_attention_with_state returns it; it is a {type(state).__name__}"
        )
    if state.normalized != normalize:
        has = "has a total, of normalised attention" if state.normalized else "has no total"
        raise ConfigurationError(
            f"the state {has}, and normalize is {normalize}: continue with the options that it was computed with"
        )
    needs = (*axes.batch, key.shape[1]) if axes.has_heads else tuple(axes.batch)
    if tuple(state.sums.shape[:-2]) != needs:
        raise ShapeError(
            f"the state's matrix has the shape {tuple(state.matrix.shape)}; for this key it needs the leading axes "
            f"{needs}: " + ("(*batch, key heads)" if axes.has_heads else "(*batch)")
        )
    check_device("state", state.sums, key.device)
    dtype = torch.promote_types(key.dtype, torch.float32)
    scale = None if state.log_scale is None else axes.as_4d(state.log_scale.to(dtype))
    return LinearState(axes.as_4d(state.sums.to(dtype)), normalize, scale)


def initial_sums(state: LinearState, key: Tensor, columns: int, key_scale: Tensor | None) -> Tensor:
    """The sums of a state (B, Hk, D, columns), relative to the scale of the new keys.

    Raises:
        ShapeError: other features or value dims than key and value have.
    """
    sums, needs = state.sums, (key.shape[-1], columns)
    if tuple(sums.shape[-2:]) != needs:
        raise ShapeError(
            f"the state's matrix has {sums.shape[-2]} features and the value dim {state.matrix.shape[-1]}, but keys "
            f"have {needs[0]} features and values the dim {needs[1] - state.normalized}: continue with the feature map "
            "and the dims that the state was computed with"
        )
    if state.log_scale is None and key_scale is None:
        return sums
    if state.log_scale is None or key_scale is None:
        raise ConfigurationError(
            "the state was computed with another feature map: a state of FavorPlus continues with the same FavorPlus"
        )
    return sums * (state.log_scale - key_scale).exp()


def check_order(mask: LinearMask, query: Tensor, key: Tensor, options: LinearOptions) -> None:
    """Check that causal attention has as many queries as keys, and that what needs an order has one.

    Raises:
        ShapeError: another number of queries.
        ConfigurationError: decay, beta or a state without causal attention, or a combination that does not exist.
    """
    if (mask.causal or mask.documents is not None) and query.shape[-2] != key.shape[-2]:
        raise ShapeError(
            f"query has {query.shape[-2]} positions and key {key.shape[-2]}: causal linear attention, and documents, "
            "need as many queries as keys. To continue after earlier keys, pass their state= and the new keys alone"
        )
    for name in ("decay", "beta", "removal", "bonus", "state"):
        if options.get(name) is not None and not mask.causal:
            raise ConfigurationError(f"{name} needs an order of the keys: pass causal=True, or leave {name} out")
    if options.get("state") is not None and mask.documents is not None:
        raise ConfigurationError(
            "a state and masks.documents do not go together: it is not known which document continues. Pass each "
            "document as a sequence of its own"
        )
    for name in ("beta", "removal"):
        if options.get(name) is not None and options.get("normalize", True):
            raise ConfigurationError(
                f"{name} is the delta rule, whose weights have no sum to divide by: pass normalize=False with it"
            )
        if options.get(name) is not None and options.get("bonus") is not None:
            raise ConfigurationError(
                f"bonus is of sums, whose query reads the state before its own token, and {name} of the delta rule: "
                "pass one of the two"
            )


def checked_map(feature_map: FeatureMap | None) -> FeatureMap:
    """The feature map, `Elu()` by default.

    Raises:
        ConfigurationError: no function.
    """
    if feature_map is None:
        return Elu()
    if isinstance(feature_map, type) or not callable(feature_map):
        raise ConfigurationError(
            f"feature_map is {feature_map!r}; it needs a map such as regard.linear.Elu(), or a function of queries or "
            "keys (..., length, dim)"
        )
    return feature_map


def checked_scale(scale: float | None, feature_map: FeatureMap, normalize: bool, dim: int) -> float:
    """What queries are multiplied by.

    Raises:
        ConfigurationError: not finite.
    """
    if scale is None:
        return max(dim, 1) ** -0.5 if isinstance(feature_map, Identity) and not normalize else 1.0
    if not lies_between(-math.inf, scale, math.inf):
        raise ConfigurationError(f"scale is {scale!r}; it needs a finite number, or None for the default")
    return float(scale)


def check_features(feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that features are (..., length, features), as many for queries as for keys.

    Raises:
        ShapeError: they are not.
    """
    if query.ndim != 4 or key.ndim != 4 or query.shape[-1] != key.shape[-1] or key.shape[:3] != value.shape[:3]:
        raise ShapeError(
            f"{feature_map} makes features {tuple(query.shape)} of queries and {tuple(key.shape)} of keys (batch, "
            "heads, length, features): a feature map has to treat each row by itself, and to make as many features of "
            "queries as of keys"
        )


def checked_decay(decay: Tensor | None, axes: BatchAxes, key: Tensor, keep: Tensor | None) -> Tensor | None:
    """The decay as (B, Hk, N) or (B, Hk, N, D), 0 at masked keys.

    Raises:
        ShapeError, DtypeError, DeviceError: another shape, dtype or device.
        ConfigurationError: a decay above 0.
    """
    if decay is None:
        return None
    decay = _gate("decay", decay, axes, key)
    check_logarithms(decay)
    if keep is not None:
        decay = decay.where(keep if decay.ndim == 3 else keep.unsqueeze(-1), 0.0)
    return decay


def check_logarithms(decay: Tensor, name: str = "decay") -> None:
    """Check that a decay, or what one is a multiple of, is at most 0.

    Raises:
        ConfigurationError: it is not.
    """
    if has_values(decay) and float(decay.detach().amax()) > 0:
        raise ConfigurationError(
            f"{name} has values up to {float(decay.max()):.4g}; it is the logarithm of a factor of at most 1, so it "
            "needs values of at most 0: pass the logarithm of a gate, such as functional.logsigmoid(x)"
        )


def checked_beta(beta: Tensor | None, axes: BatchAxes, key: Tensor) -> Tensor | None:
    """The beta of the delta rule, (B, Hk, N), or (B, Hk, N, features) for each feature, whose number is known after φ.

    Raises:
        ShapeError, DtypeError, DeviceError: another shape, dtype or device.
        ConfigurationError: values out of 0..2.
    """
    if beta is None:
        return None
    beta = _gate("beta", beta, axes, key)
    if has_values(beta):
        least, most = (float(end) for end in beta.detach().aminmax())  # a comparison of all takes twenty times as long
        if least < 0 or most > LARGEST_BETA:
            raise ConfigurationError(
                f"beta has values from {least:.4g} to {most:.4g}; it needs values in 0..{LARGEST_BETA:g}: pass a gate, "
                "such as x.sigmoid()"
            )
    return beta


def checked_removal(removal: Tensor | None, axes: BatchAxes, key: Tensor) -> Tensor | None:
    """The key whose value the delta rule removes, (B, Hk, N, features).

    Raises:
        ShapeError, DtypeError, DeviceError: another shape, dtype or device.
    """
    return None if removal is None else _gate("removal", removal, axes, key)


def checked_bonus(bonus: Tensor | None, axes: BatchAxes, key: Tensor) -> Tensor | None:
    """The factors of each token's own term, (B, Hk, N, features).

    Raises:
        ShapeError, DtypeError, DeviceError: another shape, dtype or device.
    """
    return None if bonus is None else _gate("bonus", bonus, axes, key)


def delta_features(
    key: Tensor, beta: Tensor | None, removal: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The written key, the beta of each token and the removed key of features φ(k) and a checked beta and removal.

    A beta for each feature is a factor of the written key: (β ⊙ φ(k)) (v - Sᵀ φ(k))ᵀ.

    Raises:
        ShapeError: a beta or removal for another number of features.
    """
    _check_gate_features("beta", beta, key)
    _check_gate_features("removal", removal, key)
    removal = None if removal is None else removal.expand_as(key).to(key.dtype)
    if beta is not None and beta.ndim == 4:
        return beta.to(key.dtype) * key, torch.ones_like(beta[..., 0]), key if removal is None else removal
    if removal is not None and beta is None:
        beta = torch.ones_like(key[..., 0])
    return key, beta, removal


def bonus_features(key: Tensor, bonus: Tensor | None) -> Tensor | None:
    """The features u ⊙ φ(k) of each token's own term, of features φ(k) and a checked bonus u.

    Raises:
        ShapeError: a bonus for another number of features.
    """
    _check_gate_features("bonus", bonus, key)
    return None if bonus is None else bonus.to(key.dtype) * key


def _check_gate_features(name: str, gate: Tensor | None, key: Tensor) -> None:
    if gate is not None and gate.ndim == 4 and gate.shape[-1] not in (1, key.shape[-1]):
        raise ShapeError(
            f"{name} is for {gate.shape[-1]} features, but keys have {key.shape[-1]} after the feature map: it needs "
            f"{key.shape[-1]} numbers for each key"
        )


def _gate(name: str, gate: Tensor, axes: BatchAxes, key: Tensor) -> Tensor:
    """A gate broadcast to (B, Hk, N), or to (B, Hk, N, features) where it has one number for each feature.

    The features of a decay are those of the key, which is φ(k); those of others are checked after φ.
    """
    if refused := needs_tensor(name, gate):
        raise DtypeError(refused)
    if not gate.is_floating_point():
        raise DtypeError(f"{name} needs a floating-point tensor; it is {gate.dtype}")
    check_device(name, gate, key.device)
    heads = key.shape[1:2] if axes.has_heads else ()
    per_head = (*axes.batch, *heads, key.shape[2])
    features = key.shape[3] if name == "decay" or not gate.ndim else gate.shape[-1]
    always = name in ("removal", "bonus")
    shape = per_head if not always and gate.ndim == len(per_head) else (*per_head, features)
    try:
        fits = gate.ndim == len(shape) and broadcast_shapes(gate.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        named = "(*batch, key heads, keys" if axes.has_heads else "(*batch, keys"
        with_features = f"{(*per_head, key.shape[3])}, "
        needs = f"{with_features}{named}, features)"
        if not always:
            needs = f"{per_head}, {named}), or {(*per_head, key.shape[3])} with one for each feature"
        raise ShapeError(f"{name} has the shape {tuple(gate.shape)}; it needs {needs}")
    dtype = torch.promote_types(key.dtype, torch.float32)
    return axes.as_4d(gate.expand(shape).to(dtype), 1 + len(shape) - len(per_head))


def has_values(tensor: Tensor) -> bool:
    """Whether values may be read: on the CPU, and not while a transform or a dispatch mode traces the call."""
    return tensor.is_cpu and tensor.numel() > 0 and not is_traced()
