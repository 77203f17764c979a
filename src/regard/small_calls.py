"""Small calls of `regard.attention` that are repeated: from tensors to the arithmetic in few steps of Python.

The arithmetic of a sentence takes as long as the steps around it. For tensors of the shapes, strides and dtype of an
earlier call, with the same mask, all checks and the choice of the kernel would end as they did: they are memoized. What
is known of a mask that is not made of numbers alone is forgotten with it, and with a change of what it reads. Of a bias
of content, or of a tensor, and of a mask of `written_pairs`, only the kind is in the key: their numbers, of few pairs,
each call reads anew. The next token of a text has one key more each time: there the number of keys counts up to the
next power of two.

The key has the parts that `signature` lists, or the call takes the long way: it is written out where it is used, as an
object and its calls would take a tenth of the time of the smallest call. It is exact in what `signature` leaves out,
strides and scale, which what is prepared depends on; whether keys and values have one length is checked for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import wraps
from types import NoneType
from typing import Any, ParamSpec, TypeAlias, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from . import native
from .backends.base import PreparedStep, Rows
from .biases import Bias, RelativeBias, as_bias
from .biases.all_pairs import Described, described, numbers_of_pairs
from .biases.base import TensorBias
from .core.finite import all_finite
from .core.normalizer import Normalizer
from .core.problem import Problem
from .core.score_forms import AdditivePairs, DotPairs, PairForm
from .core.state import is_constant
from .core.stored_normalizer import StoredNormalizer
from .core.torch_modes import no_mode_active
from .errors import RegardError
from .kernels.additive import AdditiveTile
from .kernels.hooks import CURRENT_HOOK
from .kernels.one_tile import PreparedTile, StoredTile, parameters_of
from .kernels.planning import rates
from .kernels.planning.choice import ADDITIVE, DECODE, SHORT, TILED, choose
from .kernels.short import MAX_PAIRS_OF_BIAS, PreparedCall
from .kernels.validation import (
    LARGEST_POSITION,
    AttentionOptions,
    ScoreLike,
    drops_nothing,
    make_problem,
    scored_pairs,
)
from .masks import Mask
from .scores import Dot
from .tiles.dense_mask import dense_mask
from .tiles.memo import comes_again, memo_of, memo_of_bias
from .tiles.pair_terms import PairTerms
from .tiles.row_spans import last_keys_of_step, over_last_keys
from .written_pairs import PreparedWritingCall, WrittenPairs, written_pairs

PLAIN_TYPES = (Tensor, Parameter)
"""The types of queries, which may be learned themselves; keys and values follow from an input."""
QUICK = ("mask", "scale", "normalizer", "bias", "softcap", "sinks", "score", "key_positions")
"""The options of calls that are remembered."""
OF_ROWS = frozenset({"mask", "scale", "softcap"})
"""The same of calls that want the log-sum-exp."""
LONGEST = 512
"""The most queries and keys of a small call: of longer ones the steps of Python are a small part."""
MAX_CALLS = 4096
"""The number of memoized calls at which the memo is cleared."""


@dataclass(frozen=True, eq=False, slots=True)
class PreparedBiasCall:
    """What is known of calls of a kind whose bias has other numbers each time, of few pairs: all but these.

    reads_mask: whether the numbers depend on which pairs exist.
    """

    without_bias: PreparedCall
    reads_mask: bool

    def takes(self, pairs: PairForm) -> TypeGuard[DotPairs]:
        """Whether the pair form that a score gives is of these calls."""
        return self.without_bias.takes(pairs)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        bias: Bias | None,
        sinks: Tensor | None,
        *,
        learned: bool,
    ) -> Tensor | None:
        """The output of such a call, as `PreparedCall.run`."""
        call, weights = self.without_bias, self.without_bias.weights
        if learned and mask is not None and not all_finite(query, key):
            return None
        pairs = DotPairs(query, key, weights.scale)
        problem = Problem(pairs, value, mask, None, weights.softcap, sinks, normalizer=weights.normalizer)
        numbers = numbers_of_pairs(cast(Bias, bias), problem, dense_mask(problem) if self.reads_mask else None)
        keep = None if call.terms is None else call.terms.keep
        terms = PairTerms.over_pairs(numbers.detach() if learned else numbers, value.shape[2], keep)
        given = TensorBias(numbers) if learned else None
        return call.run_with(terms, query, key, value, mask, given, sinks, learned=learned)


@dataclass(frozen=True, eq=False, slots=True)
class PreparedWindowStep:
    """A step whose mask leaves its query the last so many keys: one over these alone, without a mask."""

    without_mask: PreparedStep
    most: int

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """The output of the step, from all keys that there are."""
        before = value.shape[2] - self.most
        if before > 0:
            key, value = key.narrow(2, before, self.most), value.narrow(2, before, self.most)
        return self.without_mask.run(query, key, value)


_PreparedShort: TypeAlias = PreparedCall | PreparedBiasCall | PreparedWritingCall
_Prepared: TypeAlias = _PreparedShort | PreparedStep | PreparedWindowStep | PreparedTile
_Calls: TypeAlias = dict[tuple[Any, ...], _Prepared | None]  # None: a call that takes the long way
_calls: _Calls = {}
_WITH_LSE = object()
"""What no other key of a call begins with."""

Arguments = ParamSpec("Arguments")


def repeated_calls(attention: Callable[Arguments, Tensor]) -> Callable[Arguments, Tensor]:
    """The function `attention`, whose small calls go straight to the arithmetic where their like came before."""
    in_full = cast(Callable[..., Tensor], attention)

    @wraps(attention)
    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        if _is_small(query) and (not options or _is_plain(options, query, value)):
            repeatedly = attend_repeatedly if query.ndim == 4 else _attend_one_head
            output = repeatedly(query, key, value, **options)
            if output is not None:
                return output
        return in_full(query, key, value, **options)

    return cast(Callable[Arguments, Tensor], attend)


def repeated_calls_with_lse(attention: Callable[Arguments, Rows]) -> Callable[Arguments, Rows]:
    """The function `attention_with_lse`, whose small calls of dot products go straight to the arithmetic likewise."""
    in_full = cast(Callable[..., Rows], attention)

    @wraps(attention)
    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Rows:
        if options.keys() <= OF_ROWS and _is_small(query):
            rows = _attend_with_lse(query, key, value, **options)
            if rows is not None:
                return rows
        return in_full(query, key, value, **options)

    return cast(Callable[Arguments, Rows], attend)


def _attend_with_lse(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Rows | None:
    """Output and log-sum-exp of a call whose like was computed before by the kernel `short`; None for any other."""
    if not no_mode_active() or CURRENT_HOOK.get() is not None:
        return None
    if not (mask is None or (isinstance(mask, Mask) and is_constant(mask))):
        return None
    if (layouts := _small_layouts(query, key, value)) is None:
        return None
    if type(scale) not in (NoneType, float) or type(softcap) not in (NoneType, float):
        return None
    learned = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    in_use = torch.get_num_threads(), native.variant_in_use(), rates.times_saved
    known = _WITH_LSE, mask, scale, softcap, learned, *in_use, *layouts
    if known not in _calls:
        problem = make_problem(query, key, value, wants_lse=True, mask=mask, scale=scale, softcap=softcap)
        if len(_calls) >= MAX_CALLS:
            _calls.clear()
        without = replace(problem, wants_lse=False)
        _calls[known] = SHORT.prepare_call(without) if choose(problem) is SHORT else None
    call = cast("PreparedCall | None", _calls[known])
    return None if call is None else call.run_with_lse(query, key, value, mask, learned=learned)


def _is_small(query: Tensor) -> bool:
    """Whether a query is a plain tensor of few rows; where torch traces the call, no length is compared."""
    if type(query) not in PLAIN_TYPES or query.is_nested:
        return False
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    return 2 <= query.ndim <= 4 and query.shape[-2] <= LONGEST


def _is_plain(options: dict[str, Any], query: Tensor, value: Tensor) -> bool:
    """Whether no option but those of `QUICK` is given, beside what says the same as nothing."""
    for name, given in options.items():
        if given is None or name in QUICK or (name == "dropout_p" and drops_nothing(given)):
            continue
        if name != "query_positions" or options.get("key_positions") is not None or not _are_last(given, query, value):
            return False
    return True


def _are_last(positions: object, query: Tensor, value: object) -> bool:
    """Whether these are a range of the last positions of the keys, where queries are without any."""
    if not isinstance(positions, range) or type(value) is not Tensor or value.is_nested or value.ndim < 2:
        return False
    keys = value.shape[-2]
    return positions.start >= 0 and positions == range(keys - query.shape[-2], keys)


def attend_repeatedly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    scale: float | None = None,
    normalizer: Normalizer | None = None,
    bias: Bias | Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    score: ScoreLike | None = None,
    key_positions: Tensor | range | None = None,
    **_: object,
) -> Tensor | None:
    """The output of a call whose like was computed before by the kernel `short`, or `decode`; None for any other call.

    Only tensors of four axes, of no subclass and of at most LONGEST rows, where nothing of torch's or ours watches the
    call, and it is not compiled.

    Raises:
        ShapeError, DtypeError, DeviceError, MaskError, ConfigurationError: as `attention`.
    """
    if not no_mode_active() or CURRENT_HOOK.get() is not None or not (mask is None or isinstance(mask, Mask)):
        return None
    if (layouts := _small_layouts(query, key, value)) is None or type(scale) is bool:  # which equals a number
        return None
    if key_positions is not None and not _are_consecutive(key_positions, value):
        return None
    learned = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    extras = None
    if not (normalizer is softcap is sinks is score is None):
        if (extras := _described_extras(normalizer, softcap, sinks, score)) is None:
            return None
        learned = learned or (sinks is not None and sinks.requires_grad and torch.is_grad_enabled())
    constant = mask is None or is_constant(mask)
    step = False
    if layouts[0][2] == 1 <= value.shape[2] and not learned and constant and extras is None and bias is None:
        step, layouts = True, _step_layouts(query, key, value)
        if key.shape[2] != value.shape[2]:
            return None
    if (of_call := _memo_of_call(mask, constant, query, value, has_bias=bias is not None)) is None:
        return None
    (calls, of_mask, written), of_bias = of_call, None
    if bias is not None:
        bias = as_bias(cast(Tensor, bias)) if type(bias) in PLAIN_TYPES else bias
        of_bias = described(bias)
        if of_bias is None and (memo := memo_of_bias(bias)) is not None and constant:
            calls = memo.calls
        elif of_bias is None and (of_bias := _described_by_distance(bias)) is None:
            return None
        learned = learned or (of_bias is not None and of_bias.learned and torch.is_grad_enabled())
    in_use = torch.get_num_threads(), native.variant_in_use(), rates.times_saved
    moved = key_positions is not None
    settings = of_mask, scale, extras, None if of_bias is None else of_bias.kind, learned, moved, *in_use
    known = *settings, *layouts
    try:
        call = calls[known]
    except TypeError:  # a scale without a hash is no number, which the long way refuses
        return None
    except KeyError:
        options: AttentionOptions = {"mask": mask, "scale": scale, "normalizer": normalizer, "bias": bias}
        options |= {"softcap": softcap, "sinks": sinks, "score": score, "key_positions": key_positions}
        problem = make_problem(query, key, value, **options)
        call = _remember(calls, known, problem, step, of_bias, written, given_sinks=sinks is not None)
    if step or call is None:
        return None if call is None else cast("PreparedStep | PreparedWindowStep", call).run(query, key, value)
    if type(call) is StoredTile:
        parameters = parameters_of(cast(StoredNormalizer, normalizer))
        learned = learned or (torch.is_grad_enabled() and any(each.requires_grad for each in parameters))
        return call.run((query, key, value, *parameters), mask, normalizer, learned=learned)
    if type(call) is AdditiveTile:
        pairs = scored_pairs(cast(ScoreLike, score), query, key, scale, masked=mask is not None)
        return _run_additive(call, pairs, value, mask) if call.takes(pairs) else None
    call = cast(_PreparedShort, call)
    if score is not None and type(score) is not Dot:  # which is of queries and keys as they are
        pairs = scored_pairs(score, query, key, scale, masked=mask is not None)
        if not call.takes(pairs):
            return None
        query, key = pairs.query, pairs.key
        learned = learned or (torch.is_grad_enabled() and (query.requires_grad or key.requires_grad))
    return call.run(query, key, value, mask, cast("Bias | None", bias), sinks, learned=learned)


def _run_additive(call: AdditiveTile, pairs: AdditivePairs, value: Tensor, mask: Mask | None) -> Tensor | None:
    """The output of a call whose score gave such pairs."""
    tensors = pairs.query, pairs.key, pairs.weight, value
    learned = torch.is_grad_enabled() and any(each.requires_grad for each in tensors)
    return call.run(tensors, mask, learned=learned)


def _are_consecutive(positions: Tensor | range, value: Tensor) -> bool:
    """Whether these are positions of all keys as a range that `attention` takes."""
    if not isinstance(positions, range) or positions.step != 1 or len(positions) != value.shape[2]:
        return False
    return positions.start >= -LARGEST_POSITION and positions.stop <= LARGEST_POSITION


def _memo_of_call(
    mask: Mask | None, constant: bool, query: Tensor, value: Tensor, *, has_bias: bool
) -> tuple[_Calls, object, WrittenPairs | None] | None:
    """Where calls with a mask are memoized, what tells it apart there, and its pairs where each call writes them.

    None of a mask that nothing is memoized of.
    """
    if constant:
        return _calls, mask, None
    written = None if has_bias else written_pairs(cast(Mask, mask))
    if written is not None and not written.fits(query.shape, value.shape):
        written = None
    if written is None or comes_again(cast(Mask, mask)):
        memo = memo_of(mask)
        if memo.state is not None:
            return memo.calls, None, None
    return None if written is None else (_calls, written.kind, written)


def _small_layouts(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...] | None:
    """Shapes, strides, dtypes and devices; None but of plain tensors of four axes, of few queries and keys."""
    if not (type(query) in PLAIN_TYPES and type(key) is type(value) is Tensor):
        return None
    try:
        shape, key_shape, value_shape = query.shape, key.shape, value.shape
    except RuntimeError:  # a nested tensor has none; the long way refuses it
        return None
    if not len(shape) == len(key_shape) == len(value_shape) == 4 or shape[2] > LONGEST or value_shape[2] > LONGEST:
        return None
    return (
        *(shape, query.stride(), query.dtype, query.device),
        *(key_shape, key.stride(), key.dtype, key.device),
        *(value_shape, value.stride(), value.dtype, value.device),
    )


def _attend_one_head(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    **options: Any,
) -> Tensor | None:
    """`attend_repeatedly` for tensors without an axis of heads, (batch, length, dim) or (length, dim).

    The long way takes masks and biases with tensors, whose axes are those of the weights, sinks, which need an axis of
    heads, scores, which may read the axes, and single queries, for which it may choose another kernel; and it refuses
    what does not fit, in words of the axes that the tensors have.
    """
    if not (mask is None or (isinstance(mask, Mask) and is_constant(mask))):
        return None
    if isinstance(bias, Tensor) or described(bias) is not None:
        return None
    if options.get("sinks") is not None or options.get("score") is not None:
        return None
    try:
        if not query.ndim == key.ndim == value.ndim or query.shape[-2] == 1:
            return None
        batched = query.ndim == 3
        four = [tensor.unsqueeze(1) if batched else tensor[None, None] for tensor in (query, key, value)]
        output = attend_repeatedly(*four, mask=mask, bias=bias, **options)
    except (RegardError, AttributeError, RuntimeError):
        return None
    if output is None:
        return None
    return output.squeeze(1) if batched else output[0, 0]


def _described_extras(
    normalizer: Normalizer | None, softcap: float | None, sinks: Tensor | None, score: ScoreLike | None
) -> tuple[Any, ...] | None:
    """What tells these options of two calls apart, sinks and a score by their kind; None of those of the long way."""
    of_normalizer = of_sinks = None
    if normalizer is not None and (of_normalizer := _described_normalizer(normalizer)) is None:
        return None
    if softcap is not None and type(softcap) not in (int, float):
        return None
    if sinks is not None:
        if type(sinks) not in PLAIN_TYPES:
            return None
        of_sinks = sinks.shape, sinks.dtype, sinks.device, sinks.layout
    return of_normalizer, softcap, of_sinks, None if score is None else type(score)


def _described_normalizer(normalizer: Normalizer) -> tuple[Any, ...] | None:
    """Type, numbers and kinds of tensors, as each call may make the object anew; None where it has anything else."""
    if not isinstance(normalizer, Normalizer):
        return None
    described: list[Any] = [type(normalizer)]
    for part in vars(normalizer).values():
        if type(part) in PLAIN_TYPES and isinstance(normalizer, StoredNormalizer):
            described += part.shape, part.dtype, part.device, part.layout, part.requires_grad
        elif type(part) in (bool, int, float, NoneType):
            described.append(part)
        else:
            return None
    return tuple(described)


def _step_layouts(query: Tensor, key: Tensor, value: Tensor) -> tuple[Any, ...]:
    """The same of a step, whose keys are those of a cache that grows."""
    of_query = query.shape, query.stride(), query.dtype, query.device
    return *of_query, *_described_growing(key), *_described_growing(value)


def _described_growing(tensor: Tensor) -> tuple[Any, ...]:
    """Of a cache: its length up to a power of two, as limits of kernels are such, and no strides that follow it."""
    batch, heads, length, dim = tensor.shape
    return batch, heads, (length - 1).bit_length(), dim, tensor.stride(3), tensor.dtype, tensor.device


def _described_by_distance(bias: object) -> Described | None:
    """The same of a bias by distance, which has other numbers in each call; None of any other."""
    if not isinstance(bias, RelativeBias) or type(bias).bound is not Bias.bound:
        return None
    learned = torch.is_grad_enabled() and any(each.requires_grad for each in bias.parameters())
    return Described(type(bias), learned, reads_mask=False)


def _remember(
    calls: _Calls,
    known: tuple[Any, ...],
    problem: Problem,
    step: bool,
    of_bias: Described | None,
    written: WrittenPairs | None,
    *,
    given_sinks: bool,
) -> _Prepared | None:
    """Memoize what there is to know of a problem: what computes its like, by the kernel that is chosen for it.

    of_bias: of a bias whose numbers each call computes; written: of a mask whose pairs each call writes. given_sinks:
    whether sinks are an argument, with other numbers in each call, and not those that a normalizer stands for.
    """
    if len(calls) >= MAX_CALLS:
        calls.clear()
    if problem.key_positions is not None and not _reads_distances_alone(problem):
        calls[known] = None
        return None
    kernel, call = choose(problem), None
    if given_sinks:
        problem = replace(problem, sinks=None)
    if step and kernel is DECODE:
        most = last_keys_of_step(problem)
        call = DECODE.prepare_step(problem if most is None else over_last_keys(problem, most))
        if most is not None and call is not None:
            call = PreparedWindowStep(call, most)
    elif written is not None and kernel is SHORT:
        without = SHORT.prepare_call(replace(problem, mask=None))
        call = None if without is None else PreparedWritingCall(without, SHORT.maker(problem.value))
    elif kernel is TILED and written is None:  # what is prepared holds the pairs of the mask
        call = TILED.prepare_call(problem)
    elif kernel is ADDITIVE and written is None:  # likewise
        call = ADDITIVE.prepare_call(problem)
    elif not step and kernel is SHORT and of_bias is None:
        call = SHORT.prepare_call(problem)
    elif kernel is SHORT and of_bias is not None and isinstance(problem.bias, RelativeBias):
        call = SHORT.prepare_call(problem, bias_anew=True)
    elif kernel is SHORT and of_bias is not None and problem.queries * problem.keys <= MAX_PAIRS_OF_BIAS:
        with torch.no_grad():
            problem.bias_values()  # which refuses one that does not fit
        without = SHORT.prepare_call(replace(problem, bias=None))
        call = None if without is None else PreparedBiasCall(without, of_bias.reads_mask)
    calls[known] = call
    return call


def _reads_distances_alone(problem: Problem) -> bool:
    """Whether nothing in a problem changes where all positions move by the same."""
    return problem.bias is None and (problem.mask is None or problem.mask.by_distance)
