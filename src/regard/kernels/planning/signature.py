"""The signature of a problem: all that a choice of a kernel depends on; and the choices that are memoized by it.

Problems of one signature share a choice, and the kernel is not asked `why_not` again: so a `why_not` reads nothing of a
problem that its signature does not have, unless it is about time or memory (`MAX_BITS` of `flash`). In it are:

    the normalizer, the form of the scores, and which options there are (softcap, sinks, dropout, log-sum-exp);
    of the tensors the leading axes, dims, class, dtype and device, and how the last axis of queries lies in memory;
    the lengths, and how far apart the positions of queries and keys are;
    of the mask and the bias the classes and numbers, whether rows are spans, of their tensors kind and size, of their
    functions the code; never a value of a tensor, and of a user's own mask the state of what it reads;
    which gradients are needed;
    threads, variant of the native code and measured rates, as times depend on them.

Lengths are exact, or rounded: while text is generated, each call has one key more than the last. Calls of a few
microseconds have a key of their own (`small_calls`), of the same parts but exact in strides and scale.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from types import FunctionType
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from ... import native
from ...biases import Bias
from ...biases.base import Sum
from ...core.normalizer import Normalizer
from ...core.problem import Problem
from ...core.state import is_constant
from ...masks import Mask
from ...tiles.memo import Memo, memo_of
from ...utils.pytree import part_names
from . import rates

MAX_CHOICES = 4096
"""The number of memoized choices at which all are cleared."""
LARGEST_EXACT_LENGTH = 64
"""Longer lengths are rounded; below, the fastest kernel changes from length to length."""

Signature: TypeAlias = tuple[Hashable, ...]
Length: TypeAlias = Callable[[int], int]
Choice = TypeVar("Choice")
_choices: dict[tuple[Hashable, Signature], Any] = {}
_HAS_SPAN = ("has a span",)


def memoize_choice(
    problem: Problem, signature: Callable[[Problem], Signature], what: Hashable, choose: Callable[[], Choice]
) -> Choice:
    """Memoize a choice of a kernel for problems of one signature, `exact_signature` or `rounded_signature`.

    It holds for other values of tensors: masks that are made anew for each batch, or of a cache that fills up, share a
    choice. Only its price was that of the first.
    """
    try:
        key = what, signature(problem)
    except LookupError:
        return choose()
    if key not in _choices:
        if len(_choices) >= MAX_CHOICES:
            _choices.clear()
        _choices[key] = choose()
    return _choices[key]


def exact_signature(problem: Problem) -> Signature:
    """The signature of a problem with its lengths.

    Raises:
        LookupError: it has none, as it cannot be known what a user's mask reads that decides on its structure.
    """
    return _signature(problem, _exact_length)


def rounded_signature(problem: Problem) -> Signature:
    """The signature of a problem with its lengths rounded to within a sixteenth.

    Raises:
        LookupError: as `exact_signature`.
    """
    return _signature(problem, _rounded_length)


def _signature(problem: Problem, length: Length) -> Signature:
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    queries, keys, shift = problem.queries, problem.keys, problem.shift
    return (
        None if problem.normalizer is None else _normalizer_signature(problem.normalizer),
        type(problem.pairs),
        *(problem.softcap is None, problem.sinks is None, problem.dropout is None, problem.wants_lse),
        *(query.shape[:-2], key.shape[:-2], value.shape[:-2], query.shape[-1], value.shape[-1]),
        *(type(value), value.dtype, value.device, query.stride(-1)),
        *(length(queries), queries.bit_length(), length(keys), queries == keys),
        *(shift if shift is None else (length(shift) if shift >= 0 else -length(-shift)), problem.step),
        None if problem.mask is None else _mask_signature(problem.mask, length),
        None if problem.bias is None else _bias_signature(problem.bias, problem),
        *(problem.inputs_require_grad(), problem.requires_grad()),
        # As `rates.rates_key`, without a call on the way of every attention.
        *(torch.get_num_threads(), native.variant_in_use(), rates.times_saved),
    )


def _normalizer_signature(normalizer: Normalizer) -> Hashable:
    """The class of a normalizer and its numbers, and of its tensors the size; itself where it is no dataclass."""
    if not is_dataclass(normalizer):
        return normalizer
    parts = [getattr(normalizer, each.name) for each in fields(normalizer) if each.init]
    return type(normalizer), *(part.shape if isinstance(part, Tensor) else part for part in parts)


def _mask_signature(mask: Mask, length: Length) -> Hashable:
    """A mask of numbers itself; of any other all but the values of its tensors, and of what its functions read."""
    if is_constant(mask):
        return mask
    if mask.operands:
        return type(mask), *(_mask_signature(operand, length) for operand in mask.operands)
    memo = memo_of(mask)
    if not mask.is_of_library:
        if memo.state is None:
            raise LookupError
        return memo.state_number
    parts = [getattr(mask, name) for name in part_names(mask)] if is_dataclass(mask) else [memo]
    return type(mask), _has_span(mask, memo), *(_field_signature(part, memo, length) for part in parts)


def _has_span(mask: Mask, memo: Memo) -> bool:
    """Whether a mask tells the keys of each row as a span, which may depend on the values of its tensors."""
    if type(mask).key_span is Mask.key_span:
        return False
    if (known := memo.values.get(_HAS_SPAN)) is None:
        known = mask.key_span() is not None
        if memo.state is not None:
            memo.values[_HAS_SPAN] = known
    return known


def _field_signature(part: Any, memo: Memo, length: Length) -> Hashable:
    """Of a tensor its kind and size, of a function its code, of what else may change the number of the mask's memo."""
    if isinstance(part, Tensor):
        return tuple(map(length, part.shape)), _size_signature(part), part.dtype, part.device
    if isinstance(part, FunctionType):
        return part.__code__
    return part if is_constant(part) else memo.number


def _bias_signature(bias: Bias, problem: Problem) -> Hashable:
    """The classes of a bias and its parts, what kernels ask of their structure, and their parameters.

    The parameters by size and by whether they have a gradient.
    """
    if isinstance(bias, Sum):
        return _bias_signature(bias.left, problem), _bias_signature(bias.right, problem)
    learned = torch.is_grad_enabled()
    parameters = tuple((_size_signature(each), learned and each.requires_grad) for each in bias.parameters())
    return type(bias), bias.structure(problem), *parameters


def _size_signature(tensor: Tensor) -> int:
    """The size of a tensor up to a power of two: the most numbers that a kernel reads are such."""
    return (tensor.numel() - 1).bit_length()


def _exact_length(length: int) -> int:
    return length


def _rounded_length(length: int) -> int:
    """A length, rounded to within a sixteenth above LARGEST_EXACT_LENGTH.

    Lengths up to a power of two are never rounded as those above it: the most queries and keys of a kernel are such.
    """
    if length <= LARGEST_EXACT_LENGTH:
        return length
    before = length - 1
    dropped = before.bit_length() - 5
    return (before >> dropped << dropped) + 1
