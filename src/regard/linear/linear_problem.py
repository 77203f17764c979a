"""Check the arguments of `regard.linear_attention`, apply the feature map, and compute the sums."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack, cast

import torch
from torch import Tensor

from ..core.finite import all_finite
from ..core.grid import Grid
from ..core.score_forms import at_least_float32, zero_nonfinite
from ..core.torch_modes import under_dispatch_mode, under_transform, without_autocast
from ..errors import ConfigurationError, DtypeError, MaskError, ShapeError
from ..kernels.validation import check_device, check_same_kind, check_shapes
from ..masks import Mask
from ..utils.numbers import lies_between
from .favor_attention import favor_attention, takes_features_in_blocks
from .feature_maps import Elu, FavorPlus, FeatureMap, Identity, key_features, query_features
from .linear_mask import DocumentBatches, LinearMask, document_batches, read_mask
from .linear_state import LinearState
from .normalized_recurrence import divide_by_totals, normalized_recurrence, runs_natively
from .recurrence import recurrence

LARGEST_BETA = 2.0
"""Above it the delta rule would scale the state along a unit key by less than -1, and so make it grow."""

FEATURELESS = -torch.inf
"""A key of which elu + 1 has only zeros, and a gradient of 0."""


class LinearOptions(TypedDict, total=False):
    """The keyword arguments of `linear_attention`, which documents them."""

    feature_map: FeatureMap | None
    causal: bool
    normalize: bool
    mask: Mask | Tensor | None
    decay: Tensor | None
    beta: Tensor | None
    scale: float | None
    state: LinearState | None


@dataclass(frozen=True, eq=False)
class LinearResult:
    """output (..., heads, M, Dv); the final state, None for documents and without an order; each row's sum of weights.

    total (..., heads, M): Σ_j w_ij of the features in `LinearProblem`; None where weights are not normalised, or are
    normalised without it.
    """

    output: Tensor
    state: LinearState | None
    total: Tensor | None


@dataclass(frozen=True, eq=False)
class LinearProblem:
    """One call, checked: tensors as (B, heads, length, ·) in the dtype of the sums, with the feature map applied.

    Where maps_elu, query, key and value are in the caller's dtype, which native code widens as it reads them.

    Shapes: query (B, H, M, D), key (B, Hk, N, D), value (B, Hk, N, Dv), decay (B, Hk, N) or (B, Hk, N, D), beta
    (B, Hk, N), state (B, Hk, D, Dv). Where normalised, value has one more column, of ones, and the state the total.
    Masked keys have features and decay 0. query_scale (B, H, M, 1), key_scale (B, Hk, 1, 1): the logarithms of factors
    that stabilised features lack; None for 0. layout, dtype: of the output. maps_elu: query and key are to be mapped by
    elu + 1 yet, and value has no column of ones: `normalized_recurrence` does all at once. favor: they are to be mapped
    by it, and `favor_attention` does all, without the masked keys. keep: as `Layout.kept_keys` returns it.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    causal: bool
    normalize: bool
    decay: Tensor | None
    beta: Tensor | None
    state: Tensor | None
    documents: DocumentBatches | None
    nonfinite: NonfiniteRows | None
    query_scale: Tensor | None
    key_scale: Tensor | None
    layout: Layout
    dtype: torch.dtype
    maps_elu: bool
    favor: FavorPlus | None
    keep: Tensor | None

    def widened(self) -> LinearProblem:
        """The problem with query, key and value in the dtype of the sums, float32 at least."""
        query, key, value = (at_least_float32(tensor) for tensor in (self.query, self.key, self.value))
        return replace(self, query=query, key=key, value=value)

    def run(self) -> LinearResult:
        """Output, final state and total weights, in the caller's shapes."""
        sequences = self.query, self.key, self.value, self.decay, self.beta
        unflatten = self.layout.unflatten
        state = sums = None
        with without_autocast(self.query.device.type):
            if self.documents is not None:
                if self.maps_elu:
                    output = self.documents.map(self._document_output, sequences)
                else:
                    sums = self.documents.map(self._document_sums, sequences)
                    output = self.finish(sums)
            elif self.favor is not None:
                output = favor_attention(self.query, self.key, self.value, self.favor, self.keep)
            else:
                if self.maps_elu:
                    output, final = normalized_recurrence(*sequences[:4], self.state)
                else:
                    sums, final = self._sums(*sequences, self.state)
                    output = self.finish(sums)
                if self.nonfinite is not None:
                    final = self.nonfinite.mark_state(final)
                scale = None if self.key_scale is None else unflatten(self.key_scale)
                state = LinearState(unflatten(final), self.normalize, scale)
            total = None if sums is None or not self.normalize else sums[..., -1:]
            if self.nonfinite is not None:
                output = self.nonfinite.mark_rows(output, self.causal, self.documents)
                total = None if total is None else self.nonfinite.mark_rows(total, self.causal, self.documents)
            total = None if total is None else unflatten(total).squeeze(-1)
            return LinearResult(unflatten(output).to(self.dtype), state, total)

    def _document_sums(self, query: Tensor, key: Tensor, value: Tensor, *gates_and_exists: Any) -> Tensor:
        """The sums of documents of different lengths; after the end of each, exists is False."""
        *gates, exists = gates_and_exists
        return self._sums(query, key.where(exists.unsqueeze(-1), 0.0), value, gates[0], gates[1], None)[0]

    def _document_output(self, query: Tensor, key: Tensor, value: Tensor, *gates_and_exists: Any) -> Tensor:
        """The same by `normalized_recurrence`, divided by the totals."""
        decay, _, exists = gates_and_exists
        return normalized_recurrence(query, key.where(exists.unsqueeze(-1), FEATURELESS), value, decay)[0]

    def _sums(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor | None,
        beta: Tensor | None,
        state: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Σ_j w_ij v_j, the total in the last column where normalised, and the state after all keys."""
        if self.causal:
            return recurrence(query, key, value, decay, beta, state)
        state = key.mT @ value  # (B, Hk, D, Dv)
        return read_state(query, state), state

    def finish(self, sums: Tensor) -> Tensor:
        """The rows divided by their totals, or multiplied by the factors that their features lack."""
        if self.normalize:
            return divide_by_totals(sums)
        if self.query_scale is None or self.key_scale is None:
            return sums
        group = sums.shape[1] // max(self.key_scale.shape[1], 1)
        return sums * (self.query_scale + self.key_scale.repeat_interleave(group, 1)).exp()


def read_state(query: Tensor, state: Tensor) -> Tensor:
    """Sᵀ q of each query: (B, H, M, D) and (B, Hk, D, Dv) to (B, H, M, Dv)."""
    key_heads = state.shape[1]
    folded = query.unflatten(1, (key_heads, -1)) if key_heads else query.unsqueeze(2)  # (B, Hk, r, M, D)
    return (folded.flatten(2, 3) @ state).view(*query.shape[:3], state.shape[-1])


def make_linear_problem(query: Tensor, key: Tensor, value: Tensor, **options: Unpack[LinearOptions]) -> LinearProblem:
    """Check the arguments of `linear_attention` and apply the feature map."""
    if torch._C._get_tracing_state() is not None:
        raise ConfigurationError(
            "linear attention is traced by torch.jit.trace, which would keep the chunks of this one length: use "
            "torch.export.export or torch.compile, which are right for all"
        )
    query, key, value = check_same_kind(query, key, value)
    check_shapes(query, key, value)
    mask, layout = read_mask(options.get("mask"), options.get("causal", False)), Layout.from_tensors(query, key, value)
    _check_order(mask, query, key, options)
    feature_map, normalize = _checked_map(options.get("feature_map")), options.get("normalize", True)
    dtype = value.dtype
    scale = _checked_scale(options.get("scale"), feature_map, normalize, query.shape[-1])
    with without_autocast(query.device.type):
        query, key, value = (layout.as_4d(tensor) for tensor in (query, key, value))
        maps_elu = type(feature_map) is Elu and normalize and mask.causal and (scale == 1.0 or dtype == torch.float32)
        maps_elu = maps_elu and key.shape[2] > 1 and runs_natively(query, key, value)
        if not maps_elu:
            query, key, value = (at_least_float32(tensor) for tensor in (query, key, value))
        keep, beta = layout.kept_keys(mask, key), _checked_beta(options.get("beta"), layout, key)
        nonfinite = None if keep is not None and not maps_elu else NonfiniteRows.find(query, key, value, beta, keep)
        if keep is not None and (nonfinite is not None or not maps_elu):  # else FEATURELESS keys below are enough
            key, value = key.where(keep.unsqueeze(-1), 0.0), value.where(keep.unsqueeze(-1), 0.0)
            nonfinite = NonfiniteRows.find(query, key, value, beta, keep)
        if nonfinite is not None:  # before the feature map, whose gradient at NaN would be NaN
            query, key, value = (zero_nonfinite(tensor) for tensor in (query, key, value))
            beta = None if beta is None else zero_nonfinite(beta)
        state = layout.checked_state(options.get("state"), key, normalize)
        query, query_scale, key_scale = query if scale == 1.0 else query * scale, None, None
        favor = None
        if maps_elu and keep is not None:
            key = key.where(keep.unsqueeze(-1), FEATURELESS)
        elif _maps_in_blocks(feature_map, mask, normalize, query, key, value):
            favor = cast("FavorPlus", feature_map)
        elif not maps_elu:
            query, query_scale = query_features(feature_map, query)
            key, key_scale = key_features(feature_map, key, keep, None if state is None else state.log_scale)
            _check_features(feature_map, query, key, value)
            if normalize:
                value = torch.cat([value, value.new_ones(*value.shape[:-1], 1)], -1)
        return LinearProblem(
            query=query,
            key=key,
            value=value,
            causal=mask.causal,
            normalize=normalize,
            decay=_checked_decay(options.get("decay"), layout, key, keep),
            beta=beta,
            state=None if state is None else _initial_sums(state, key, value.shape[-1] + maps_elu, key_scale),
            documents=None if mask.documents is None else document_batches(mask.documents, value),
            nonfinite=nonfinite,
            query_scale=query_scale,
            key_scale=key_scale,
            layout=layout,
            dtype=dtype,
            maps_elu=maps_elu,
            favor=favor,
            keep=keep,
        )


def _maps_in_blocks(feature_map: FeatureMap, mask: LinearMask, normalize: bool, *tensors: Tensor) -> bool:
    """Whether `favor_attention` computes the problem."""
    if mask.causal or mask.documents is not None or not normalize:
        return False
    return takes_features_in_blocks(feature_map, *tensors)


@dataclass(frozen=True)
class Layout:
    """The leading axes of the caller's tensors: broadcast batch, and whether there is a head axis."""

    batch: torch.Size
    has_heads: bool

    @classmethod
    def from_tensors(cls, *tensors: Tensor) -> Layout:
        """The layout of query, key and value."""
        has_heads = tensors[0].ndim > 3
        first, *others = (tensor.shape[: -3 if has_heads else -2] for tensor in tensors)
        return cls(
            first if all(other == first for other in others) else torch.broadcast_shapes(first, *others), has_heads
        )

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

    def kept_keys(self, mask: LinearMask, key: Tensor) -> Tensor | None:
        """Which keys exist, bool, (B or 1, Hk or 1, N); None for all.

        Raises:
            MaskError: a mask for other axes than (batch, key heads, N).
        """
        length = key.shape[2]
        keep = mask.keep(Grid.from_lengths(1, length, heads=self.has_heads, device=key.device)) if length else None
        if keep is None:
            return None
        axes = (*self.batch, key.shape[1], length) if self.has_heads else (*self.batch, length)
        try:
            keep = keep.expand(torch.broadcast_shapes(keep.shape, (1,) * len(axes)))
            keep.expand(axes)
        except RuntimeError:
            raise MaskError(
                f"the mask says which keys exist in the shape {tuple(keep.shape)}, but linear attention needs one that "
                f"broadcasts to {axes}, (batch, key heads, keys): query heads that share a key head share its state"
            ) from None
        return self.as_4d(keep, 1)

    def checked_state(self, state: LinearState | None, key: Tensor, normalize: bool) -> LinearState | None:
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
        needs = (*self.batch, key.shape[1]) if self.has_heads else tuple(self.batch)
        if tuple(state.sums.shape[:-2]) != needs:
            raise ShapeError(
                f"the state's matrix has the shape {tuple(state.matrix.shape)}; for this key it needs the leading axes "
                f"{needs}: " + ("(*batch, key heads)" if self.has_heads else "(*batch)")
            )
        check_device("state", state.sums, key.device)
        dtype = torch.promote_types(key.dtype, torch.float32)
        scale = None if state.log_scale is None else self.as_4d(state.log_scale.to(dtype))
        return LinearState(self.as_4d(state.sums.to(dtype)), normalize, scale)


@dataclass(frozen=True, eq=False)
class NonfiniteRows:
    """Rows with NaN or infinity, which are computed as 0, and after which the rows that attend to them become NaN.

    A product with 0 would carry NaN to rows that do not attend to it. Shapes: query (B, H, M), key (B, Hk, N), bool;
    keep as `kept_keys` returns it.
    """

    query: Tensor
    key: Tensor
    keep: Tensor | None

    @classmethod
    def find(
        cls, query: Tensor, key: Tensor, value: Tensor, beta: Tensor | None, keep: Tensor | None
    ) -> NonfiniteRows | None:
        """The rows of tensors (B, heads, length, ·) and beta (B, Hk, N); None where all numbers are finite.

        A single row of each needs no care: no product with 0 is between them.
        """
        if query.shape[2] == key.shape[2] == 1 and keep is None:
            return None
        finite = not _is_traced() and all_finite(query, key) and all_finite(value)
        if finite and (beta is None or all_finite(beta)):
            return None
        key = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
        return cls(~query.isfinite().all(-1), key if beta is None else key | ~beta.isfinite(), keep)

    def mark_rows(
        self,
        output: Tensor,
        causal: bool,
        documents: DocumentBatches | None,
        elsewhere: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The output (B, H, M, Dv) with NaN in the rows that attend to such a key, or are such a query.

        elsewhere: of keys of other processes, whether a row attends to such a key, and to any key: bool (B, Hk, M).
        """
        queries = self.query.shape[-1]
        sees_bad = _attends_to(self.key, queries, causal, documents)
        exists = torch.ones_like(self.key) if self.keep is None else self.keep.expand_as(self.key)
        sees_any = _attends_to(exists, queries, causal, documents)
        if elsewhere is not None:
            sees_bad, sees_any = sees_bad | elsewhere[0], sees_any | elsewhere[1]
        group = self.query.shape[1] // max(self.key.shape[1], 1)
        sees_bad, sees_any = (seen.repeat_interleave(group, 1) for seen in (sees_bad, sees_any))
        return output.masked_fill((sees_bad | (self.query & sees_any)).unsqueeze(-1), torch.nan)

    def mark_state(self, state: Tensor) -> Tensor:
        """The state (B, Hk, D, Dv) with NaN where a key was such a row."""
        return state.masked_fill(self.key.any(-1)[..., None, None], torch.nan)


def _attends_to(marked: Tensor, queries: int, causal: bool, documents: DocumentBatches | None) -> Tensor:
    """Whether each query attends to a marked key: bool (B, Hk, N) to (B, Hk, M)."""

    def attends(marked: Tensor, exists: Tensor | None = None) -> Tensor:
        marked = marked if exists is None else marked & exists.unsqueeze(-1)
        return marked.cumsum(2) > 0 if causal else marked.any(2, keepdim=True).expand_as(marked)

    if documents is not None:
        return documents.map(attends, [marked.unsqueeze(-1)]).squeeze(-1)
    if causal:
        return attends(marked.unsqueeze(-1)).squeeze(-1)
    return marked.any(2, keepdim=True).expand(*marked.shape[:2], queries)


def _initial_sums(state: LinearState, key: Tensor, columns: int, key_scale: Tensor | None) -> Tensor:
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


def _check_order(mask: LinearMask, query: Tensor, key: Tensor, options: LinearOptions) -> None:
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
    for name in ("decay", "beta", "state"):
        if options.get(name) is not None and not mask.causal:
            raise ConfigurationError(f"{name} needs an order of the keys: pass causal=True, or leave {name} out")
    if options.get("state") is not None and mask.documents is not None:
        raise ConfigurationError(
            "a state and masks.documents do not go together: it is not known which document continues. Pass each "
            "document as a sequence of its own"
        )
    if options.get("beta") is not None and options.get("normalize", True):
        raise ConfigurationError(
            "beta is the delta rule, whose weights have no sum to divide by: pass normalize=False with it"
        )


def _checked_map(feature_map: FeatureMap | None) -> FeatureMap:
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


def _checked_scale(scale: float | None, feature_map: FeatureMap, normalize: bool, dim: int) -> float:
    """What queries are multiplied by.

    Raises:
        ConfigurationError: not finite.
    """
    if scale is None:
        return max(dim, 1) ** -0.5 if isinstance(feature_map, Identity) and not normalize else 1.0
    if not lies_between(-math.inf, scale, math.inf):
        raise ConfigurationError(f"scale is {scale!r}; it needs a finite number, or None for the default")
    return float(scale)


def _check_features(feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor) -> None:
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


def _checked_decay(decay: Tensor | None, layout: Layout, key: Tensor, keep: Tensor | None) -> Tensor | None:
    """The decay as (B, Hk, N) or (B, Hk, N, D), 0 at masked keys.

    Raises:
        ShapeError, DtypeError, DeviceError: another shape, dtype or device.
        ConfigurationError: a decay above 0.
    """
    if decay is None:
        return None
    decay = _gate("decay", decay, layout, key)
    if _has_values(decay) and bool((decay > 0).any()):
        raise ConfigurationError(
            f"decay has values up to {float(decay.max()):.4g}; it is the logarithm of a factor of at most 1, so it "
            "needs values of at most 0: pass the logarithm of a gate, such as functional.logsigmoid(x)"
        )
    if keep is not None:
        decay = decay.where(keep if decay.ndim == 3 else keep.unsqueeze(-1), 0.0)
    return decay


def _checked_beta(beta: Tensor | None, layout: Layout, key: Tensor) -> Tensor | None:
    """The beta of the delta rule, (B, Hk, N).

    Raises:
        ShapeError, DtypeError, DeviceError: another shape, dtype or device.
        ConfigurationError: values out of 0..2.
    """
    if beta is None:
        return None
    beta = _gate("beta", beta, layout, key)
    if _has_values(beta) and bool(((beta < 0) | (beta > LARGEST_BETA)).any()):
        raise ConfigurationError(
            f"beta has values from {float(beta.min()):.4g} to {float(beta.max()):.4g}; it needs values in "
            f"0..{LARGEST_BETA:g}: pass a gate, such as x.sigmoid()"
        )
    return beta


def _gate(name: str, gate: Tensor, layout: Layout, key: Tensor) -> Tensor:
    """A gate broadcast to (B, Hk, N), or for a decay (B, Hk, N, D) where it has one number for each feature."""
    if not isinstance(gate, Tensor) or not gate.is_floating_point():
        has = gate.dtype if isinstance(gate, Tensor) else f"a {type(gate).__name__}"
        raise DtypeError(f"{name} needs a floating-point tensor; it is {has}")
    check_device(name, gate, key.device)
    heads = key.shape[1:2] if layout.has_heads else ()
    per_head = (*layout.batch, *heads, key.shape[2])
    shape = per_head if name == "beta" or gate.ndim == len(per_head) else (*per_head, key.shape[3])
    try:
        fits = gate.ndim == len(shape) and torch.broadcast_shapes(gate.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        axes = "(*batch, key heads, keys)" if layout.has_heads else "(*batch, keys)"
        per_feature = "" if name == "beta" else f", or {(*per_head, key.shape[3])} with one for each feature"
        raise ShapeError(f"{name} has the shape {tuple(gate.shape)}; it needs {per_head}, {axes}{per_feature}")
    dtype = torch.promote_types(key.dtype, torch.float32)
    return layout.as_4d(gate.expand(shape).to(dtype), 1 + len(shape) - len(per_head))


def _has_values(tensor: Tensor) -> bool:
    """Whether values may be read: on the CPU, and not while a transform or a dispatch mode traces the call."""
    return tensor.is_cpu and tensor.numel() > 0 and not _is_traced()


def _is_traced() -> bool:
    """Whether tensors may have no values, as under torch.compile, torch.func and FakeTensorMode."""
    return under_transform() or under_dispatch_mode()
