"""The short kernel: attention over few keys, with any mask and bias, all scores of a row at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..backends.base import ShortPass, ShortRows
from ..backends.registry import BACKENDS, is_nan_safe, reasons_against
from ..backends.torch.row_loop import RowAttention
from ..backends.torch.tile_loop import TiledAttention
from ..biases import Bias, RelativeBias
from ..biases.base import TensorBias, summed_to
from ..biases.relative import TableBias
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.finite import CheckedGradients, CheckedRows, SinkRows
from ..core.log_sum_exp import within_float32
from ..core.problem import Problem
from ..core.row_weights import RowWeights
from ..core.score_forms import DotPairs, PairForm, at_least_float32
from ..core.torch_modes import functorch_active, mapped_by_autograd, unwrap_if_dead
from ..masks import Mask
from ..masks.tensor_mask import TensorMask
from ..tiles.dense_mask import MAX_MEMO_PAIRS, dense_mask
from ..tiles.diagonals import add_gradient_along, bias_along, distance_range, line_along, table_of_line
from ..tiles.landmark_blocks import LandmarkBlocks
from ..tiles.mask_tiles import distinct_matrices
from ..tiles.memo import modified, remembered_state
from ..tiles.pair_terms import PairTerms
from ..tiles.row_spans import has_spans, key_spans
from ..tiles.tile_size import SCORES_PER_TILE
from ..utils.pytree import tree_tensors
from .base import EVERY_GRADIENT, GRADIENT, Cost, FlashWork, Result
from .custom_op import apply_kernel, compute_forward, differentiate, register
from .planning.unit_costs import MASK, RESULT, bias_passes, bytes_read, evaluated, heads_per_key, total_width
from .planning.unit_prices import price

CALLS = price("short.calls")
OWN_GRADIENT = price("short.own_gradient")
TERM = price("short.term")
TERM_CALLS = price("short.term_calls")
LAID_OUT = price("short.laid_out")
AS_THEY_ARE = price("short.as_they_are")
CAP = 2 * price("flash.extra")
MAX_PAIRS_OF_BIAS = 2**16
"""Up to so many pairs a bias with a gradient is evaluated once, and what autograd needs of it is kept."""
ROWS_AT_ONCE = 8
"""For so many rows at once, all that one of them reads is computed."""


class ShortKernel:
    """Attention over at most some hundreds of keys: all scores of a row at once, one call forward and one backward.

    It reads float32, bfloat16 and float16, and grouped heads, and computes a softcap and sinks in the same call. Of
    masks of which each row is a span of keys (causal, windows, padding, documents in order, and what `&` makes of them)
    the span of a row is two numbers: no mask of n² is in memory, and keys outside of it are not read. Of a bias by
    distance it reads one number for each diagonal. Of any other mask or bias it reads the tensor over the pairs, where
    it is, once for equal batches and heads.
    """

    name = "short"

    def __init__(self) -> None:
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Features that its code does not support, or more keys than it is meant for."""
        reasons, value = [], problem.value
        if not isinstance(problem.pairs, DotPairs):
            reasons.append("its code computes dot products; this score is additive")
        if problem.dropout is not None:
            reasons.append("its code has no dropout")
        reasons += reasons_against([each for each in BACKENDS if each.short is not None], value)
        if reasons:
            return reasons
        rows = _maker(value)[1]
        if not rows.takes(problem.normalizer):
            reasons.append(
                "its code computes softmax, sparsemax, entmax-1.5, ReLU, softpick, stick-breaking, top scores, "
                f"hard, and sigmoid attention with a number as bias; this is {problem.normalizer!r}"
            )
        if problem.normalizer is not None and problem.sinks is not None:
            reasons.append("its code has sinks of softmax alone")
        if problem.keys > (longest := rows.longest):
            reasons.append(f"it is for at most {longest} keys, whose scores fit into a core's cache; here are more")
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """The pairs of the spans, in whole vectors of keys; keys and values are laid out once for each key head.

        Those behind all spans of a sequence are not read. Values of float32 are read as they are in the forward pass.
        """
        backend, short_rows = _maker(problem.value)
        rows, width = problem.weights_shape[:-1].numel(), total_width(problem)
        pairs = rows * _mean_columns(problem, short_rows.keys_at_once())
        value, units = problem.value, problem.value.shape[:-2].numel()
        as_they_are = value.element_size() == 4 and not problem.inputs_require_grad()
        share, threads = _attended_share(problem), torch.get_num_threads()
        parts = short_rows.row_parts(units, problem.queries)
        laid_out = parts * share * value.shape[:-1].numel() * (width - as_they_are * value.shape[-1])
        few = heads_per_key(problem) * problem.queries <= short_rows.rows_as_they_are(problem)
        idle = threads / max(min(units * parts, threads), 1)  # a part of the rows of a key head has one thread
        packed = (AS_THEY_ARE if few else LAID_OUT) * idle * laid_out
        terms = _term_costs(problem)
        return Cost(
            flops=0.0,
            flash={backend: FlashWork(2.0 * idle * pairs * width, idle * pairs, packed)},
            bytes=terms.bytes,
            passes=RESULT * rows * problem.value.shape[-1]
            + (TERM * terms.read + CAP * (problem.softcap is not None)) * pairs
            + terms.passes,
            moved=bytes_read(problem, again=share),
            calls=CALLS + TERM_CALLS * terms.read,
            gradient=OWN_GRADIENT if has_short_tensors(problem) else GRADIENT,
        )

    def reads_spans_alone(self, problem: Problem) -> bool:
        """Whether it reads keys and values as they are, and none outside of a mask's spans: of few rows."""
        value, mask, rows = problem.value, problem.mask, heads_per_key(problem) * problem.queries
        found = next((each.short for each in BACKENDS if each.short is not None and each.runs(value)), None)
        if found is None or mask is None:  # it is asked before anybody has asked who computes the problem
            return False
        return rows <= found.rows_as_they_are(problem) and has_spans(mask, problem)

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        """Whether the backend that computes a problem is."""
        return is_nan_safe(_maker(problem.value)[0])

    def run(self, problem: Problem) -> Result:
        """Output, and the log-sum-exp if it is requested.

        Where nothing but the output is, a call takes few steps in Python, as it may take no longer than they do.
        """
        pairs: DotPairs = problem.pairs  # type: ignore[assignment]  # `why_not` refuses other forms
        query, key, value = pairs.query, pairs.key, problem.value
        if not has_short_tensors(problem) or torch.compiler.is_compiling() or functorch_active():
            return apply_kernel(problem, self)
        spans = key_spans(problem)
        weights = RowWeights(pairs.scale, problem.softcap, problem.normalizer)
        prepared = _maker(value)[1].prepare(weights, spans, query, key, value)
        if prepared.copies:
            return apply_kernel(problem, self)
        if problem.bias_requires_grad():
            problem = _with_bias_of_pairs(problem)
        terms = None
        if has_terms(problem) and (terms := _pair_terms(BatchedProblem.from_problem(problem))) is None:
            return apply_kernel(problem, self)
        if problem.sinks is not None:
            terms = PairTerms.with_sinks(terms, problem.sinks)
        if problem.requires_grad():
            return Result(attend_with_gradient(problem, prepared, spans, terms))
        hides = problem.mask is not None or hides_nonfinite(weights)
        output = attend_without_gradient(prepared, spans, query, key, value, terms, hides=hides)
        return apply_kernel(problem, self) if output is None else Result(output)

    def prepare_call(self, problem: Problem, *, bias_anew: bool = False) -> PreparedCall | None:
        """What computes a problem and all of its kind, where they are one call; None where nothing is known of it.

        bias_anew: whether its bias, which is one by distance, has other numbers in each of these calls.
        """
        pairs, value = problem.pairs, problem.value
        if not isinstance(pairs, DotPairs) or not has_short_tensors(problem):
            return None
        spans, terms, weights = key_spans(problem), None, RowWeights(pairs.scale, problem.softcap, problem.normalizer)
        along = distance_range(problem) if bias_anew and problem.queries and problem.keys else None
        if bias_anew:
            problem = replace(problem, bias=None)
        if has_terms(problem):
            if problem.queries * problem.keys > MAX_MEMO_PAIRS:
                return None
            with torch.inference_mode(False):  # an inference tensor would be of no use to a call with gradients
                terms = _pair_terms(BatchedProblem.from_problem(problem))
            if terms is None:
                return None
        prepared = _maker(value)[1].prepare(weights, spans, pairs.query, pairs.key, value)
        form = _layout_of(pairs)
        return None if prepared.copies else PreparedCall(weights, spans, prepared, terms, along, form, problem.sinks)

    def maker(self, value: Tensor) -> ShortRows:
        """Who computes short rows of values that it does not refuse."""
        return _maker(value)[1]

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        pairs: DotPairs = batched.pairs  # type: ignore[assignment]
        weights = RowWeights(pairs.scale, batched.problem.softcap, batched.problem.normalizer)
        inputs = pairs.query, pairs.key, batched.value, weights, key_spans(batched.problem)
        terms, sinks = _pair_terms(batched), batched.problem.sinks
        if sinks is not None:
            terms = PairTerms.with_sinks(terms, sinks)
        rows = _maker(batched.value)[1].forward(*inputs, terms)
        if rows is not None:
            return rows if sinks is None else SinkRows(rows)
        # Rows whose bias is the smallest number, as transformers masks them, are exact in torch.
        return (TiledAttention() if batched.problem.has_lse else RowAttention(SCORES_PER_TILE)).forward(batched)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem, in its dtype."""
        pairs: DotPairs = batched.pairs  # type: ignore[assignment]
        into = batched.zero_bias_gradients() if saved.needs_bias_grad else ()
        weights = RowWeights(pairs.scale, batched.problem.softcap, batched.problem.normalizer)
        inputs, spans = (pairs.query, pairs.key, batched.value, weights), key_spans(batched.problem)
        found = _maker(batched.value)[1].backward(*inputs, saved, spans, _pair_terms(batched))
        query, key, value, of_bias = found
        if of_bias is not None:
            _add_bias_gradient(batched, of_bias, into)
        return ProblemGradients(query, key, value, bias=into, checked=isinstance(found, CheckedGradients))


@dataclass(frozen=True, eq=False, slots=True)
class PreparedCall:
    """What is known of calls with the same shapes, strides, dtype, mask, bias and scale.

    terms: of a mask and a bias that hold the same numbers in each of these calls. distances: those of the diagonals, of
    a bias that does not. form: the layout of queries and keys, which a score may have projected. sinks: those that a
    normalizer stands for, where a call has none of its own.
    """

    weights: RowWeights
    spans: Tensor | None
    prepared: ShortPass
    terms: PairTerms | None
    distances: range | None
    form: tuple[Any, ...]
    sinks: Tensor | None

    def takes(self, pairs: PairForm) -> TypeGuard[DotPairs]:
        """Whether the pair form that a score gives is of these calls."""
        return type(pairs) is DotPairs and pairs.scale == self.weights.scale and _layout_of(pairs) == self.form

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
        """The output of such a call, differentiable if `learned`.

        None as `attend_without_gradient`, and where a bias fails or does not fit, which the long way says.
        """
        terms = self.terms
        if self.distances is not None:
            line = line_along(self.distances, cast(RelativeBias, bias), query.shape[1], query.device)
            if line is None:
                return None
            terms = PairTerms.with_line(terms, line)
            if line.requires_grad and learned and not isinstance(bias, TableBias):
                bias = table_of_line(self.distances, line)  # autograd goes on from its numbers to what they follow from
        return self.run_with(terms, query, key, value, mask, bias, sinks, learned=learned)

    def run_with(
        self,
        terms: PairTerms | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        bias: Bias | None,
        sinks: Tensor | None,
        *,
        learned: bool,
    ) -> Tensor | None:
        """`run` with the terms of a mask and a bias, which holds the same numbers where it is differentiated."""
        weights = self.weights
        sinks = self.sinks if sinks is None else sinks
        if sinks is not None:
            terms = PairTerms.with_sinks(terms, sinks)
        if learned:
            pairs = DotPairs(query, key, weights.scale)
            problem = Problem(pairs, value, mask, bias, weights.softcap, sinks, normalizer=weights.normalizer)
            return attend_with_gradient(problem, self.prepared, self.spans, terms)
        hides = mask is not None or hides_nonfinite(weights)
        return attend_without_gradient(self.prepared, self.spans, query, key, value, terms, hides=hides)

    def run_with_lse(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None, *, learned: bool
    ) -> tuple[Tensor, Tensor] | None:
        """Output and log-sum-exp of a call without sinks, differentiable if `learned`; None as for `run`."""
        weights = self.weights
        if learned:
            problem = Problem(DotPairs(query, key, weights.scale), value, mask, softcap=weights.softcap)
            inputs = (unwrap_if_dead(each) for each in (query, key, value))
            return _apply_short_rows((problem, weights, self.spans, self.terms), *inputs)
        rows = _maker(value)[1].forward(query, key, value, weights, self.spans, self.terms)
        hides = mask is not None or hides_nonfinite(weights)
        return rows if isinstance(rows, CheckedRows) or not hides else None


def _layout_of(pairs: DotPairs) -> tuple[Any, ...]:
    query, key = pairs.query, pairs.key
    return query.shape, query.stride(), query.dtype, query.device, key.shape, key.stride(), key.dtype, key.device


def _maker(value: Tensor) -> tuple[str, ShortRows]:
    """Who computes short rows of this device and dtype: the backend's name and its methods."""
    return next((each.name, each.short) for each in BACKENDS if each.short is not None and each.runs(value))


def has_short_tensors(problem: Problem) -> bool:
    """Whether tensors are read as they are, and nothing but the output is wanted."""
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    return (
        not problem.wants_lse
        and query.ndim == key.ndim == value.ndim == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
    )


def hides_nonfinite(weights: RowWeights) -> bool:
    """Whether an input that is not finite may leave no trace in the output: no weight, or the score of a softcap."""
    return weights.normalizer is not None or weights.softcap is not None


def attend_without_gradient(
    prepared: ShortPass,
    spans: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: PairTerms | None = None,
    *,
    hides: bool,
) -> Tensor | None:
    """The output in one call; None where it is not finite, though what has no weight may be all that is not.

    hides: whether keys may have no weight, by a mask or as `hides_nonfinite` says.
    """
    found = prepared.forward(spans, query, key, value, terms)
    if found is None:
        return None
    output, finite, _ = found
    return output if finite or (not hides and value.shape[2]) else None


def attend_with_gradient(
    problem: Problem, prepared: ShortPass, spans: Tensor | None, terms: PairTerms | None = None
) -> Tensor:
    """The output of a problem that `has_short_tensors`, differentiable by query, key, value, the bias and sinks."""
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    call = problem, prepared, spans, terms
    learned = _parameters(problem)
    return _apply_short(call, unwrap_if_dead(query), unwrap_if_dead(key), unwrap_if_dead(value), *learned)


def _parameters(problem: Problem) -> tuple[Tensor, ...]:
    """Those of the bias, then the sinks."""
    of_bias = () if problem.bias is None else problem.bias.parameters()
    return of_bias if problem.sinks is None else (*of_bias, problem.sinks)


class _AttendShort(torch.autograd.Function):
    """The output of a problem; its tensors with gradients are query, key, value, parameters of the bias, and sinks.

    What is not finite, or has large scores, or is differentiated twice, is computed as for all kernels by `custom_op`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Problem, ShortPass, Tensor | None, PairTerms | None],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        problem, prepared, spans, terms = ctx.call = call
        ctx.state = None if problem.mask is None else remembered_state(problem.mask)
        found = prepared.forward(spans, query, key, value, terms)
        if terms is None:
            ctx.save_for_backward(query, key, value)
        else:  # its tensors, too: that they are written to before the gradient is taken is then an error
            ctx.save_for_backward(query, key, value, *parameters, *terms.tensors())
        if found is not None:
            output, finite, precise = found
            if finite and precise:
                return output
        return compute_forward(problem, ShortKernel.name)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        problem, prepared, spans, terms = ctx.call
        query, key, value, *others = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if not torch.is_grad_enabled() and not mapped_by_autograd(grad_output):
            of_bias, of_sinks = (needed[4:], False) if problem.sinks is None else (needed[4:-1], needed[-1])
            asked = {"of_bias": True in of_bias, "of_sinks": of_sinks}
            gradients = prepared.backward(spans, query, key, value, grad_output, terms, **asked)
            if gradients is not None:  # of the spans of the forward pass, whatever the mask is now
                *of_inputs, numbers, found = gradients
                learned = _bias_gradients(problem, numbers, of_bias)
                if problem.sinks is None:
                    return None, *of_inputs, *learned
                return None, *of_inputs, *learned, None if found is None else found.to(problem.sinks.dtype)
        if ctx.state is not None and not ctx.state.is_current():
            raise modified(problem.mask)
        inputs = query, key, value, *others[: len(needed) - 4]
        return None, *_differentiate_as_others(problem, inputs, needed[1:], grad_output)


class _AttendShortRows(torch.autograd.Function):
    """Output and log-sum-exp of a problem; its tensors with gradients are query, key and value."""

    @staticmethod
    def forward(
        ctx: Any,
        call: tuple[Problem, RowWeights, Tensor | None, PairTerms | None],
        query: Tensor,
        key: Tensor,
        value: Tensor,
    ) -> tuple[Tensor, Tensor]:
        problem, weights, spans, terms = ctx.call = call
        ctx.set_materialize_grads(False)
        ctx.state = None if problem.mask is None else remembered_state(problem.mask)
        rows = _maker(value)[1].forward(query, key, value, weights, spans, terms)
        ctx.exact = isinstance(rows, CheckedRows) and within_float32(rows[1])
        output, lse = rows if ctx.exact and rows is not None else compute_forward(problem, ShortKernel.name)
        of_terms = () if terms is None else terms.tensors()  # that they are written to is then an error
        ctx.save_for_backward(query, key, value, output, lse, *of_terms)
        return output, lse

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        problem, weights, spans, terms = ctx.call
        query, key, value, output, lse, *_ = ctx.saved_tensors
        needed = ctx.needs_input_grad[1:]
        has_lse_grad = grad_lse is not None
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        if grad_lse is None:
            grad_lse = torch.zeros_like(lse)
        mapped = mapped_by_autograd(grad_output) or mapped_by_autograd(grad_lse)
        if ctx.exact and not mapped and not torch.is_grad_enabled():
            saved = Saved(output, lse, grad_output, grad_lse, False, has_lse_grad, False)
            found = _maker(value)[1].backward(query, key, value, weights, saved, spans, terms)
            if isinstance(found, CheckedGradients):  # of the spans of the forward pass, whatever the mask is now
                return None, *found[:3]
        if ctx.state is not None and not ctx.state.is_current():
            raise modified(problem.mask)
        tensors = tree_tensors(problem)
        tensors[:3], wanted = (query, key, value), (*needed, *[False] * (len(tensors) - 3))
        rows, upstream = (output, lse), (grad_output, grad_lse)
        return None, *differentiate(problem, ShortKernel.name, wanted, upstream, rows, tensors)[:3]


_apply_short_rows = super(torch.autograd.Function, _AttendShortRows).apply  # pyright: ignore[reportAttributeAccessIssue]
"""`_AttendShortRows.apply` in fewer steps, as `_apply_short`."""


def _differentiate_as_others(
    problem: Problem, inputs: Sequence[Tensor], needed: Sequence[bool], grad_output: Tensor
) -> Iterator[Tensor | None]:
    """The gradients of query, key, value, the parameters of the bias and the sinks, as for all kernels."""
    output, lse = compute_forward(problem, ShortKernel.name)
    tensors = tree_tensors(problem)
    left = list(range(3, len(tensors)))  # in the order of parameters: one tensor may be several of them
    places = [0, 1, 2]
    for parameter in _parameters(problem):
        place = next(place for place in left if tensors[place] is parameter)
        places.append(place)
        left.remove(place)
    wanted = [False] * len(tensors)
    for place, tensor, need in zip(places, inputs, needed, strict=True):
        tensors[place], wanted[place] = tensor, need
    upstream = grad_output, torch.zeros_like(lse)
    found = differentiate(problem, ShortKernel.name, tuple(wanted), upstream, (output, lse), tensors)
    return (found[place] for place in places)


def _bias_gradients(problem: Problem, of_bias: Tensor | None, needed: Sequence[bool]) -> list[Tensor | None]:
    """The gradients of the bias's parameters where they are needed, from those of its numbers; None: there are none."""
    if problem.bias is None:
        return []
    if of_bias is None:
        parameters = problem.bias.parameters()
        return [torch.zeros_like(each) if need else None for each, need in zip(parameters, needed, strict=True)]
    if isinstance(problem.bias, TensorBias) and problem.heads:
        pairs = problem.bias.pairs
        return [summed_to(of_bias, pairs.shape).to(pairs.dtype)]
    parameters = problem.bias.parameters()
    into = [
        torch.zeros_like(at_least_float32(each)) if need else None
        for each, need in zip(parameters, needed, strict=True)
    ]
    _add_bias_gradient(BatchedProblem.from_problem(problem), of_bias, into)
    return [None if own is None else own.to(each.dtype) for own, each in zip(into, parameters, strict=True)]


def _add_bias_gradient(batched: BatchedProblem, total: Tensor, into: Sequence[Tensor | None]) -> None:
    """Add the gradients of a bias's parameters, from that of its numbers by distance, or over pairs."""
    problem = batched.problem
    if problem.bias is None:
        raise AssertionError("the gradient of a bias that there is not")
    if isinstance(problem.bias, RelativeBias) and total.ndim == 2:
        add_gradient_along(problem, problem.bias, total, into)
        return
    shared = total.shape[0] == 1  # by all batches, whose axes the bias may have, of size 1
    whole = total.reshape(*[1] * len(problem.batch), *total.shape[1:]) if shared else batched.split_batch(total)
    problem.bias.accumulate(batched.grid, whole if problem.heads else whole.squeeze(-3), into)


_apply_short = super(torch.autograd.Function, _AttendShort).apply  # pyright: ignore[reportAttributeAccessIssue]
"""`_AttendShort.apply` in fewer steps: callers have excluded transforms of torch.func, for which it would look."""


def has_terms(problem: Problem) -> bool:
    """Whether scores have more than products and spans: a bias, or a mask whose rows are no spans."""
    return problem.bias is not None or (problem.mask is not None and not has_spans(problem.mask, problem))


def _with_bias_of_pairs(problem: Problem) -> Problem:
    """The problem with its bias as numbers over the pairs, which autograd differentiates, where these are few.

    To evaluate it again in the backward pass would take longer. Not of one by distance, which has few numbers, nor of
    landmarks, which C computes.
    """
    by_distance = isinstance(problem.bias, RelativeBias) and problem.shift is not None
    if by_distance or isinstance(problem.bias, TensorBias) or problem.queries * problem.keys > MAX_PAIRS_OF_BIAS:
        return problem
    if LandmarkBlocks.from_problem(problem) is not None:
        return problem
    values = problem.bias_values()
    return problem if values is None else replace(problem, bias=TensorBias(values))


def _pair_terms(batched: BatchedProblem) -> PairTerms | None:
    """What the scores of a problem have beside products and spans; None for nothing, and where there are no pairs."""
    problem, (batch, heads, queries, keys) = batched.problem, batched.shape
    if not has_terms(problem) or not queries or not keys:
        return None
    bias = along = keep = None
    landmarks = LandmarkBlocks.from_problem(problem)
    with torch.no_grad():
        if landmarks is not None:
            pass
        elif isinstance(problem.bias, RelativeBias) and problem.shift is not None:
            along = bias_along(problem, problem.bias).float()
        elif problem.bias is not None and (bias := batched.bias()) is not None:
            bias = bias.float()
        if problem.mask is not None and not has_spans(problem.mask, problem):
            found = dense_mask(problem)
            keep = None if found is None else batched.as_4d(found)
        return PairTerms.for_weights((batch, heads, queries, keys), bias, along, keep, landmarks)


@dataclass(frozen=True, slots=True)
class _TermCosts:
    """What bias and mask cost: how many of them are read for each pair, and passes and bytes of evaluating them."""

    read: int = 0
    passes: float = 0.0
    bytes: float = 0.0


def _term_costs(problem: Problem) -> _TermCosts:
    if not has_terms(problem):
        return _TermCosts()
    masks, biases = distinct_matrices(problem)
    if problem.mask is None or isinstance(problem.mask, TensorMask) or has_spans(problem.mask, problem):
        masks = 0  # of spans, or read where it is
    by_distance = isinstance(problem.bias, RelativeBias) and problem.shift is not None
    if by_distance or LandmarkBlocks.from_problem(problem) is not None:
        biases = 0  # a number for each diagonal, or none
    pairs, times = problem.queries * problem.keys, 1 if has_short_tensors(problem) else 2
    passes = pairs * (MASK * masks + bias_passes(problem) * biases)
    return _TermCosts(
        read=(problem.bias is not None) + (problem.mask is not None and not has_spans(problem.mask, problem)),
        passes=evaluated(problem, passes, times=times),
        bytes=pairs * (masks + 4.0 * biases * (not isinstance(problem.bias, TensorBias))),
    )


def _mean_columns(problem: Problem, width: int) -> float:
    """The keys that a row computes on average, in whole vectors of `width` and together with the rows beside it."""
    spans = key_spans(problem)
    if spans is None or not spans.numel():
        return -(-problem.keys // width) * width
    first, last = spans.unbind(-1)
    empty, missing = first >= last, (0, -problem.queries % ROWS_AT_ONCE)
    first = pad(first.masked_fill(empty, problem.keys), missing, value=problem.keys)
    last = pad(last.masked_fill(empty, 0), missing)
    first, last = (limit.unflatten(-1, (-1, ROWS_AT_ONCE)) for limit in (first, last))
    first, last = first.amin(-1), last.amax(-1)
    vectors = (last + width - 1) // width - first // width
    return width * float((vectors * (first < last)).float().mean())


def _attended_share(problem: Problem) -> float:
    """The share of the keys of a sequence up to the last one that any row attends to."""
    spans = key_spans(problem)
    if spans is None or not spans.numel():
        return 1.0
    return float(spans[..., 1].amax(-1).float().mean()) / max(problem.keys, 1)
