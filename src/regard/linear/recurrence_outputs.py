"""Outputs of causal linear attention from a state of 0, in one call of a backend, and without the state at the end.

The arithmetic of a sentence takes as long as the steps around it. For tensors of the shapes, strides and dtypes of an
earlier call all checks but those of numbers would end as they did, so what computes them is memoized; the numbers are
checked where they are read. What is refused here, `make_linear_problem` takes, or says what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from ..backends.base import RecurrencePass, Recurrences
from ..backends.registry import BACKENDS
from ..core.finite import all_finite
from ..core.recurrence_problem import FeatureMapName, RecurrenceInputs, RecurrenceProblem, StoredRecurrence
from ..core.torch_modes import mapped_by_autograd, no_mode_active
from ..masks.causal import Causal
from .feature_maps import Elu, FavorPlus, FeatureMap, Identity, are_far_apart, normalized_features, query_features
from .linear_arguments import LinearOptions
from .linear_plans import choose_plan
from .linear_problem import make_linear_problem
from .recurrence import differentiable_views

PLAIN_TYPES = (Tensor, Parameter)
MAX_PASSES = 4096
"""The number of memoized passes at which the memo is cleared."""

_passes: dict[tuple[Any, ...], RecurrencePass | None] = {}  # None: a call that takes the long way


@dataclass(frozen=True, slots=True)
class RecurrenceKind:
    """What is computed of tensors: feature map, whether weights are divided by their sum, and the scale of queries."""

    feature_map: FeatureMapName
    normalize: bool
    scale: float

    def in_full(self, inputs: RecurrenceInputs, bonus: Tensor | None = None) -> Tensor:
        """The outputs by the general path."""
        query, key, value, decay, beta, removal = inputs
        problem = make_linear_problem(
            query,
            key,
            value,
            feature_map=Elu() if self.feature_map == "elu" else Identity(),
            causal=True,
            normalize=self.normalize,
            decay=decay,
            beta=beta,
            removal=removal,
            bonus=bonus,
            scale=self.scale,
        )
        return choose_plan(problem).run().output


def recurrence_outputs(query: Tensor, key: Tensor, value: Tensor, options: LinearOptions) -> Tensor | None:
    """The output of `linear_attention`, differentiable as often as is asked for; None where another path computes it.

    Shapes: query (B, H, N, D), key (B, Hk, N, D), value (B, Hk, N, Dv).
    """
    if torch.compiler.is_compiling() or type(query) not in PLAIN_TYPES:
        return None
    mask, get = options.get("mask"), options.get
    if not (get("causal") is True if mask is None else type(mask) is Causal):
        return None
    if get("state") is not None or not no_mode_active():
        return None
    kind, feature_map, bonus = _kind(query, options), get("feature_map"), get("bonus")
    if kind is None:
        return None
    known = feature_map is None or type(feature_map) in (Elu, Identity)
    if not known or (bonus is not None and kind.feature_map != "identity"):
        features = _features(kind, query, key, value, Elu() if feature_map is None else feature_map)
        if features is None:
            return None
        (query, key), kind = features, RecurrenceKind("identity", kind.normalize, 1.0)
    inputs = query, key, value, get("decay"), get("beta"), get("removal")
    return _outputs(kind, inputs, bonus) if bonus is None or _takes_bonus(kind, inputs, bonus) else None


def _outputs(kind: RecurrenceKind, inputs: RecurrenceInputs, bonus: Tensor | None) -> Tensor | None:
    """The outputs of the pass for such inputs, if there is one that takes them."""
    known = _known(kind, inputs)
    if known is None:
        return None
    try:
        prepared = _passes[known]
    except KeyError:
        prepared = _remember(known, kind, inputs)
    if prepared is None:
        return None
    tensors = *inputs, bonus
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return _apply(kind, prepared, *tensors)
    found = prepared.forward(inputs, bonus=bonus)
    return None if found is None else found[0]


def _kind(query: Tensor, options: LinearOptions) -> RecurrenceKind | None:
    """What is computed; None for a scale, or a normalize, that is none."""
    feature_map, normalize, scale = options.get("feature_map"), options.get("normalize", True), options.get("scale")
    if type(normalize) is not bool:
        return None
    if scale is None:
        dim = query.shape[-1] if query.ndim else 0
        scale = max(dim, 1) ** -0.5 if type(feature_map) is Identity and not normalize else 1.0
    elif type(scale) not in (float, int) or not abs(scale) < float("inf"):
        return None
    return RecurrenceKind("identity" if type(feature_map) is Identity else "elu", normalize, float(scale))


def _features(
    kind: RecurrenceKind, query: Tensor, key: Tensor, value: Tensor, feature_map: FeatureMap
) -> tuple[Tensor, Tensor] | None:
    """φ of scaled queries and of keys; None where they are not those of the pass, or nothing may compute it.

    What is not finite is looked for here: φ of it may be finite.
    """
    tensors = query, key, value
    if not all(type(each) in PLAIN_TYPES and each.dtype is torch.float32 and each.is_cpu for each in tensors):
        return None
    if not query.ndim == key.ndim == value.ndim == 4 or not key.numel() or not callable(feature_map):
        return None
    if isinstance(feature_map, type) or _recurrences(*tensors) is None or not all_finite(query, key):
        return None
    if kind.scale != 1.0:
        query = query * kind.scale
    if kind.normalize:
        features = normalized_features(feature_map, query, key)
        apart = type(feature_map) is FavorPlus and are_far_apart(features[1].detach())
        return None if apart else features
    features, factor = query_features(feature_map, query)
    return None if factor is not None else (features, feature_map(key))


def _takes_bonus(kind: RecurrenceKind, inputs: RecurrenceInputs, bonus: Tensor) -> bool:
    """Whether a pass reads a bonus beside such inputs: all float32, of sums, with keys each of one query head.

    It broadcasts to the keys, and is finite.
    """
    query, key, value, _, beta, removal = inputs
    if kind.normalize or beta is not None or removal is not None:
        return False
    for tensor in (bonus, query, key, value):
        if type(tensor) not in PLAIN_TYPES or tensor.dtype is not torch.float32 or tensor.ndim != 4:
            return False
    if query.shape != key.shape or not bonus.is_cpu or not all_finite(bonus):
        return False
    return all(own in (1, wanted) for own, wanted in zip(bonus.shape, key.shape, strict=True))


def _recurrences(*inputs: Tensor) -> Recurrences | None:
    """The recurrences of the first backend that has some for such tensors."""
    for backend in BACKENDS:
        if backend.runs(*inputs) and backend.recurrences is not None:
            return backend.recurrences
    return None


def _known(kind: RecurrenceKind, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """What decides the pass; None for what is no plain tensor, and a gate of another kind than a pass has."""
    known: list[Any] = [kind.feature_map, kind.normalize, kind.scale, torch.get_num_threads()]
    for tensor in inputs:
        if tensor is None:
            known.append(None)
            continue
        if type(tensor) not in PLAIN_TYPES or not torch._C._has_storage(tensor):  # as one that outlived its transform
            return None
        try:
            known += (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
        except RuntimeError:  # a nested or a sparse tensor
            return None
    return tuple(known)


def _remember(known: tuple[Any, ...], kind: RecurrenceKind, inputs: RecurrenceInputs) -> RecurrencePass | None:
    """Memoize the pass of the first backend that has recurrences for such tensors."""
    if len(_passes) >= MAX_PASSES:
        _passes.clear()
    query, key, value, decay, beta, removal = inputs
    problem = RecurrenceProblem(
        query,
        key,
        value,
        decay,
        beta,
        feature_map=kind.feature_map,
        normalize=kind.normalize,
        removal=removal,
    )
    maker = _recurrences(query, key, value)
    if maker is None:
        return None
    found = _passes[known] = maker.prepare_pass(problem, kind.scale)
    return found


class _RecurrenceOutputs(torch.autograd.Function):
    """The outputs of a pass, with the inputs and the bonus as tensors with gradients; None as the pass has it."""

    @staticmethod
    def forward(ctx: Any, kind: RecurrenceKind, prepared: RecurrencePass, *tensors: Any) -> Tensor | None:
        found = prepared.forward(cast("RecurrenceInputs", tensors[:6]), stores=True, bonus=tensors[6])
        if found is None:
            return None
        output, stored = found
        ctx.call = kind, prepared
        ctx.save_for_backward(*tensors, *stored)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        (kind, prepared), saved, needed = ctx.call, ctx.saved_tensors, ctx.needs_input_grad[2:]
        inputs, bonus, stored = saved[:6], saved[6], saved[7:]
        if torch.is_grad_enabled() or mapped_by_autograd(grad_output):
            return None, None, *_in_full(kind, saved[:7], needed, grad_output)
        if bonus is None:
            found = *prepared.backward(inputs, stored, grad_output), None
        else:
            found = _gradients_with_bonus(kind, prepared, inputs, bonus, stored, grad_output)
        return None, None, *(own if need else None for own, need in zip(found, needed, strict=True))


def _gradients_with_bonus(
    kind: RecurrenceKind,
    prepared: RecurrencePass,
    inputs: RecurrenceInputs,
    bonus: Tensor,
    stored: StoredRecurrence,
    grad_output: Tensor,
) -> tuple[Tensor | None, ...]:
    """The gradients of all inputs and the bonus: through the state before a token, and through its own value."""
    query, key, value, decay, *_ = inputs
    of_earlier = grad_output.roll(-1, 2)  # what a state gave was the output of the token after it
    of_earlier[:, :, -1] = 0.0
    found = prepared.backward((query.roll(-1, 2), key, value, decay, None, None), stored, of_earlier)
    of_query, of_key, of_value, *of_gates = cast("tuple[Tensor, ...]", found)
    of_weight = kind.scale * (grad_output * value).sum(-1, keepdim=True)
    weighted_key, weighted_query = bonus * key, of_weight * query
    weight = kind.scale * (query * weighted_key).sum(-1, keepdim=True)
    return (
        of_query.roll(1, 2).addcmul_(of_weight, weighted_key),
        torch.addcmul(of_key, weighted_query, bonus),
        torch.addcmul(of_value, weight, grad_output),
        *of_gates,
        (weighted_query * key).sum_to_size(bonus.shape),
    )


def _in_full(
    kind: RecurrenceKind, inputs: tuple[Any, ...], needed: tuple[bool, ...], grad_output: Tensor
) -> list[Tensor | None]:
    """The gradients by the general path, which can be differentiated in turn and mapped."""
    twice, views = torch.is_grad_enabled(), cast("list[Any]", differentiable_views(inputs, needed))
    wanted = [tensor for tensor, need in zip(views, needed, strict=True) if need]
    with torch.enable_grad():
        output = kind.in_full(cast("RecurrenceInputs", tuple(views[:6])), views[6])
        found = iter(
            torch.autograd.grad(
                output, wanted, grad_output, create_graph=twice, allow_unused=True, materialize_grads=True
            )
        )
    return [next(found) if need else None for need in needed]


_apply: Callable[..., Tensor | None] = super(torch.autograd.Function, _RecurrenceOutputs).apply  # pyright: ignore[reportAttributeAccessIssue]
"""`_RecurrenceOutputs.apply` in fewer steps: transforms of torch.func, for which it would look, are excluded."""
