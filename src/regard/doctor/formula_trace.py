"""How scores and weights come about in a run: factors of the dot products, inputs of each softmax, sums of weights."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from ..core.torch_modes import functorch_active
from .examination_report import Place
from .softmax_capture import ModuleWatch
from .subject import Subject


@dataclass(frozen=True)
class Origin:
    """How a tensor was computed.

    factor: the product of the numbers that have multiplied it since the last layer; NaN where one of them is learned or
    unknown. dim: length of the axis that was summed over, of the product of two tensors. is_weights: whether it is
    the result of a softmax, or that and a bias. is_average: whether it is a product of weights.
    """

    factor: float = 1.0
    dim: int | None = None
    is_weights: bool = False
    is_average: bool = False


PLAIN = Origin()
AVERAGE = Origin(is_average=True)


@dataclass(frozen=True)
class SoftmaxInput:
    """One softmax, or the one in SDPA: its scores and what they are.

    rows: the softmaxes that one call computes; None in SDPA. length: of the axis that is normalized. mask: the finite
    number that a mask has put in the scores, where the trace looks for it. origin: how the scores were computed.
    scores: where the trace keeps tensors; of SDPA the products of its queries and keys.
    """

    rows: int | None
    length: int
    origin: Origin
    dtype: torch.dtype
    place: Place
    mask: float | None = None
    scores: Tensor | None = None


@dataclass(frozen=True)
class WeightSum:
    """The smallest and the largest sum of weights over the axis along which they were multiplied by values."""

    least: float
    most: float
    dtype: torch.dtype
    place: Place


_VIEWS_AND_MASKS = (
    "view reshape transpose permute contiguous flatten unflatten unsqueeze squeeze expand expand_as repeat type_as "
    "repeat_interleave to float double half bfloat16 type clone detach chunk split unbind movedim moveaxis swapaxes "
    "swapdims T mT H roll neg tanh masked_fill dropout tensor_split flip"
)
SAME_NUMBERS = frozenset(_VIEWS_AND_MASKS.split())
"""Functions whose result has the scale of their first argument."""
PRODUCTS = frozenset(["matmul", "bmm", "rmatmul"])
MULTIPLIED = frozenset(["mul", "rmul", "imul", "multiply"])
DIVIDED = frozenset(["div", "truediv", "true_divide", "divide", "itruediv"])
SUMMED = frozenset(["add", "radd", "iadd", "sub", "rsub", "isub", "subtract"])
JOINED = frozenset(["cat", "concat", "stack", "where", "hstack"])


def _name(function: Callable[..., Any]) -> str:
    """Name of a torch function without underscores; of a property its own name."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        name = getattr(getattr(function, "__self__", None), "__name__", "")
    return name.strip("_")


def _number(value: Any) -> float | None:
    """A number, or that of a tensor of one element that is not learned; None of anything else."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Tensor) and value.numel() == 1 and not isinstance(value, nn.Parameter):
        return None if value.requires_grad or value.dtype == torch.bool else float(value)
    return None


def _unmapped(tensor: Tensor) -> Tensor:
    """A tensor whose numbers can be read: of one that `torch.func.vmap` maps, the one with the mapped axis."""
    functorch: Any = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


class FormulaTrace(ModuleWatch):
    """Follows tensors from layer to softmax, and weights from softmax to values.

    `softmaxes` and `sums` are in the order of the calls. `values` are those that weights multiply, where the trace
    keeps tensors. mask_of: called with the scores of each softmax, for the finite number of a mask in them.
    """

    def __init__(self, *, keeps_tensors: bool = False, mask_of: Callable[[Tensor], float | None] | None = None) -> None:
        super().__init__()
        self.keeps_tensors, self.mask_of = keeps_tensors, mask_of
        self.values: list[Tensor] = []
        self.softmaxes: list[SoftmaxInput] = []
        self.sums: list[WeightSum] = []
        self.origins = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        origin = self._origin_of_result(func, _name(func), args, kwargs)
        if origin is not None:
            for one in result if isinstance(result, (tuple, list)) else (result,):
                if isinstance(one, Tensor):
                    self.origins[one] = origin
        return result

    def origin(self, value: Any) -> Origin:
        """How a tensor was computed."""
        if not isinstance(value, Tensor):
            return PLAIN
        return self.origins.get(value) or PLAIN

    def _origin_of_result(self, func: Any, name: str, args: Any, kwargs: Any) -> Origin | None:
        """The origin of a result; None where nothing is known of it."""
        if func is functional.scaled_dot_product_attention:
            return self._sdpa(*args, **kwargs)
        if name == "softmax":
            return self._softmax(args, kwargs)
        if name == "einsum":
            return self._einsum(args)
        if name in PRODUCTS or name == "baddbmm":
            return self._product(name, args, kwargs)
        if not args:
            return None
        origin = self.origin(args[0])
        if name in SAME_NUMBERS:
            return origin
        if name == "getitem":
            return replace(origin, is_weights=False)
        if name in MULTIPLIED | DIVIDED and len(args) > 1:
            return self._scaled(args[0], args[1], divides=name in DIVIDED)
        if name in SUMMED and len(args) > 1:
            joined = self._joined([args[0], args[1]])
            is_weights = any(self.origin(one).is_weights for one in args[:2])
            return replace(joined, is_weights=is_weights) if is_weights else joined
        if name in JOINED:
            parts = args[1:] if name == "where" else args[0]
            return self._joined([part for part in parts if isinstance(part, Tensor)])
        is_mixture_of_heads = name == "linear" and origin.dim is not None and args[0].ndim >= 4
        return replace(origin, is_weights=False) if is_mixture_of_heads else None

    def _scaled(self, first: Any, second: Any, *, divides: bool) -> Origin:
        for tensor, other in ((first, second), (second, first)):
            number = _number(other)
            if isinstance(tensor, Tensor) and number is not None and not (divides and tensor is second):
                origin = self.origin(tensor)
                factor = number if not divides else 1 / number if number else math.inf
                return replace(origin, factor=origin.factor * factor)
        one, two = self.origin(first), self.origin(second)
        scores, other = (one, second) if one.dim is not None or one.is_weights else (two, first)
        if scores.dim is not None or scores.is_weights:
            is_of_heads = isinstance(other, Tensor) and other.shape[-2:].numel() == 1
            return replace(scores, factor=math.nan) if is_of_heads or other is None else scores
        learned = any(isinstance(value, nn.Parameter) and value.numel() == 1 for value in (first, second))
        return Origin(math.nan if learned else one.factor * two.factor)

    def _joined(self, parts: list[Any]) -> Origin:
        """Of sums and concatenations: the scores among the parts, or the factor that all parts have."""
        origins = [self.origin(part) for part in parts if isinstance(part, Tensor)]
        scores = [origin for origin in origins if origin.dim is not None]
        chosen = scores or origins or [PLAIN]
        factors = [origin.factor for origin in chosen]
        same = all(math.isclose(abs(one), abs(factors[0])) for one in factors)
        # The scale of a sum of products over different features, as of latent attention, is not known.
        same = same and len({origin.dim for origin in chosen}) == 1
        return Origin(factors[0] if same else math.nan, chosen[0].dim)

    def _product(self, name: str, args: Any, kwargs: Any) -> Origin | None:
        operands = [one for one in args if isinstance(one, Tensor)][-2:]
        if len(operands) < 2 or min(one.ndim for one in operands) < 2:
            return None
        first, second = operands[::-1] if name == "rmatmul" else operands
        for weights, axis in ((first, -1), (second, -2)):
            if self.origin(weights).is_weights:
                values = second if weights is first else first
                if not self.origin(values).is_average:
                    self._add_sum(weights, (axis,))
                if self.keeps_tensors:
                    self.values.append(values if weights is first else values.mT)
                return AVERAGE
        is_layer = any(isinstance(one, nn.Parameter) for one in operands) or (second.ndim == 2 < first.ndim)
        if is_layer:
            return PLAIN
        factor = self.origin(first).factor * self.origin(second).factor
        return Origin(factor * float(kwargs.get("alpha", 1.0)), first.shape[-1])

    def _einsum(self, args: Any) -> Origin | None:
        operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
        if not isinstance(args[0], str) or len(operands) != 2 or "->" not in args[0]:
            return None
        left, result = re.sub(r"\s", "", args[0]).split("->")
        letters = left.split(",")
        if "." in left or any(len(one) != tensor.ndim for one, tensor in zip(letters, operands, strict=True)):
            return None
        summed = [letter for letter in letters[0] if letter in letters[1] and letter not in result]
        for own, tensor, other in zip(letters, operands, operands[::-1], strict=True):
            if summed and self.origin(tensor).is_weights:
                if not self.origin(other).is_average:  # as of linear attention, whose queries have a softmax too
                    self._add_sum(tensor, tuple(own.index(letter) for letter in summed))
                return AVERAGE
        outer = all(set(one) & set(result) - set(other) for one, other in (letters, letters[::-1]))
        if not summed or not outer or any(isinstance(one, nn.Parameter) for one in operands):
            return PLAIN
        dim = math.prod(operands[0].shape[letters[0].index(letter)] for letter in summed)
        return Origin(self.origin(operands[0]).factor * self.origin(operands[1]).factor, dim)

    def _softmax(self, args: Any, kwargs: Any) -> Origin | None:
        scores = args[0] if args else kwargs.get("input")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
        if not isinstance(scores, Tensor) or not isinstance(dim, int) or not scores.is_floating_point():
            return None
        dtype = kwargs.get("dtype") or scores.dtype
        length = scores.shape[dim]
        found = SoftmaxInput(scores.numel() // max(length, 1), length, self.origin(scores), dtype, self.place())
        if self.mask_of is not None:
            found = replace(found, mask=self.mask_of(_unmapped(scores.detach())))
        if self.keeps_tensors:
            found = replace(found, scores=scores.detach())
        self.softmaxes.append(found)
        return Origin(is_weights=True)

    def _sdpa(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Origin:
        scale = options.get("scale", rest[3] if len(rest) > 3 else None)
        dim = query.shape[-1]
        factor = self.origin(query).factor * self.origin(key).factor
        origin = Origin(factor * (dim**-0.5 if scale is None else float(scale)), dim)
        scores = None
        if self.keeps_tensors:
            groups = query.shape[1] // key.shape[1] if query.ndim == key.ndim == 4 and key.shape[1] else 1
            scores = query @ key.repeat_interleave(groups, -3 if groups > 1 else 0).mT
            self.values.append(value)
        found = SoftmaxInput(None, key.shape[-2], origin, torch.float32, self.place(), scores=scores)
        self.softmaxes.append(found)
        return PLAIN

    def _add_sum(self, weights: Tensor, axes: tuple[int, ...]) -> None:
        if functorch_active():  # the numbers of a mapped tensor cannot be read
            return
        sums = weights.detach().double().sum(axes)
        sums = sums[(sums.abs() > 1e-12) & sums.isfinite()]  # rows without keys are 0
        if sums.numel():
            self.sums.append(WeightSum(float(sums.min()), float(sums.max()), weights.dtype, self.place()))


def trace_formulas(
    subject: Subject,
    sequence: Tensor | None = None,
    *,
    mask_of: Callable[[Tensor], float | None] | None = None,
    **changes: Any,
) -> FormulaTrace:
    """Every softmax of one run and every product of its weights; no scores are stored."""
    found = FormulaTrace(mask_of=mask_of)
    with found.of(subject.model), found:
        subject.run(sequence, **changes)
    return found
