"""Check the arguments of `regard.attention` and turn them into a Problem.

Checked elsewhere: whether a mask or a bias fits, which is known once it is asked about its pairs (`Problem.keep` and
`Problem.bias_values` in core/problem.py); what a formula of a user's returns (`Mask.evaluate`, `Bias.evaluate`); what
may be a bias (`biases.base.as_bias`); the whole numbers of masks (masks/index_checks.py); the name of a kernel
(`planning.choice.choose`).
"""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from ..biases import Bias, as_bias
from ..core.broadcasting import broadcast_shapes
from ..core.dropout import Dropout
from ..core.finite import all_finite, waits
from ..core.normalizer import Normalizer
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, DotPairs, PairForm, zero_nonfinite
from ..core.torch_modes import is_causal_bias, under_transform
from ..errors import ConfigurationError, DeviceError, DtypeError, MaskError, RegardError, ShapeError
from ..masks import Mask, where
from ..masks.convert.torch_tensors import read_causal_bias
from ..utils.numbers import lies_between
from ..utils.other_types import name_type, needs_tensor

SMALLEST_SOFTCAP, LARGEST_SOFTCAP = 1e-30, 1e30
"""Beyond these the quotient score / softcap, or its product with softcap, overflows or vanishes in float32."""
LARGEST_POSITION = 2**62
"""Positions beyond would overflow where they are subtracted."""

PAIR_FORMS = (DotPairs, AdditivePairs)
FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class ScoreLike(Protocol):
    """The interface of a score: it turns query and key into a pair form."""

    def pairs(self, query: Tensor, key: Tensor) -> PairForm:
        """The pair form over query and key."""
        ...


class AttentionOptions(TypedDict, total=False):
    """The keyword arguments of `regard.attention`, which documents them."""

    score: ScoreLike | None
    mask: Mask | Tensor | None
    bias: Bias | Tensor | None
    scale: float | None
    softcap: float | None
    sinks: Tensor | None
    dropout_p: float
    query_positions: Tensor | range | None
    key_positions: Tensor | range | None
    normalizer: Normalizer | None


def make_problem(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    score: ScoreLike | None = None,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    query_positions: Tensor | range | None = None,
    key_positions: Tensor | range | None = None,
    normalizer: Normalizer | None = None,
    wants_lse: bool = False,
) -> Problem:
    """Check the arguments of `regard.attention` and return the Problem."""
    if torch._C._get_tracing_state() is not None:
        raise ConfigurationError(
            "attention is traced by torch.jit.trace, which would keep the mask, the bias and the kernel of this one "
            "input, and compute others wrongly: use torch.export.export or torch.compile, which are right for all"
        )
    query, key, value = check_same_kind(query, key, value)
    # What is all alike fits; but an exported program would be for lengths that are alike, or that differ, alone.
    if torch.compiler.is_compiling() or not query.shape == key.shape == value.shape or query.ndim < 2:
        check_shapes(query, key, value)
    if (isinstance(mask, Tensor) and is_causal_bias(mask)) or (isinstance(bias, Tensor) and is_causal_bias(bias)):
        mask, bias = _read_causal_biases(mask, bias, query, key, query_positions is None and key_positions is None)
    problem = Problem(
        pairs=_scaled_dot(query, key, scale)
        if score is None
        else scored_pairs(score, query, key, scale, masked=mask is not None),
        value=value,
        mask=None if mask is None else _read_mask(mask),
        bias=None if bias is None else as_bias(bias),
        softcap=softcap,
        sinks=sinks,
        dropout=None if drops_nothing(dropout_p) else draw_dropout(dropout_p, value.device),
        wants_lse=wants_lse,
    )
    if softcap is not None or sinks is not None:
        _check_variants(problem)
    if normalizer is not None:
        problem = _normalized_by(problem, normalizer)
    if query_positions is not None or key_positions is not None:
        if query_positions is None and problem.queries > problem.keys:
            problem = replace(problem, key_positions=key_positions)
            problem.grid()  # raises: there are not as many keys for the queries to sit at
        problem = replace(
            problem,
            query_positions=_check_positions("query_positions", query_positions, problem.queries, value.device),
            key_positions=_check_positions("key_positions", key_positions, problem.keys, value.device),
        )
    if problem.bias is not None:
        problem.bias = problem.bias.bound(problem)
    return problem


def check_tensors(**named: object) -> None:
    """Check that arguments are tensors with all their numbers in memory, of one length each."""
    for name, tensor in named.items():
        if refused := needs_tensor(name, tensor):
            raise DtypeError(refused)
        if isinstance(tensor, Tensor) and tensor.is_nested:
            raise ShapeError(
                f"{name} is a nested tensor of the layout {tensor.layout}; it needs rows of one length: pass "
                f"torch.nested.to_padded_tensor({name}, 0.0), and mask=masks.padding(lengths=...) for the keys. "
                "regard.attention and scaled_dot_product_attention alone take nested tensors, as query, key and value"
            )


def check_same_kind(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Check that all are floating-point tensors of one dtype on one device; cast under autocast."""
    if (
        type(query) is type(key) is type(value) is Tensor
        and query.dtype is key.dtype is value.dtype
        and query.dtype in FLOATING
        and query.device == key.device == value.device
        and query.layout is key.layout is value.layout is torch.strided
        and not (query.is_meta or query.is_nested or key.is_nested or value.is_nested)
        and not torch.is_autocast_enabled(query.device.type)
    ):
        return query, key, value  # as nearly every call has it: nothing to refuse, nothing to cast
    check_tensors(query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dtype not in FLOATING:
            raise DtypeError(
                f"{name} needs floating-point numbers of 16, 32 or 64 bits; it is {tensor.dtype}: call {name}.float()"
            )
    device = value.device
    if not query.device == key.device == device:
        raise DeviceError(
            f"query is on {query.device}, key on {key.device}, value on {device}: they need one device; "
            "move them with .to(device)"
        )
    if value.is_meta:
        raise DeviceError(
            "query, key and value are on meta, where there are no numbers to attend with: give the model numbers with "
            ".to_empty(device=...) and load_state_dict, or take shapes from a FakeTensorMode"
        )
    if torch.is_autocast_enabled(device.type) and value.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(device.type)
        return query.to(dtype), key.to(dtype), value.to(dtype)
    if not query.dtype is key.dtype is value.dtype:
        raise DtypeError(
            f"query is {query.dtype}, key {key.dtype}, value {value.dtype}: they need one dtype; "
            "convert with .to(dtype)"
        )
    return query, key, value


def check_shapes(query: Tensor, key: Tensor, value: Tensor) -> None:
    """Check that the shapes are (..., heads, length, dim), (batch, length, dim) or (length, dim), and fit."""
    of_query, of_key, of_value = query.shape, key.shape, value.shape
    if (
        len(of_query) == len(of_key) == len(of_value) == 4
        and of_query[0] == of_key[0] == of_value[0]
        and of_key[1] == of_value[1] > 0 == of_query[1] % of_key[1]
        and of_key[2] == of_value[2]
    ):
        return  # as nearly every call has them
    tensors = query, key, value
    if not query.ndim == key.ndim == value.ndim or query.ndim < 2:
        raise ShapeError(
            f"{_shapes(*tensors)}: they need the same number of dimensions, two at least: (length, dim), "
            "(batch, length, dim) or (..., heads, length, dim)"
        )
    if key.shape[-2] != value.shape[-2]:
        raise ShapeError(
            f"key has {key.shape[-2]} positions and value {value.shape[-2]} ({_shapes(*tensors)}): each key needs one "
            "value"
        )
    if query.ndim >= 4:
        heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
        if key_heads != value_heads or (heads % key_heads if key_heads else heads):
            raise ShapeError(
                f"query has {heads} heads, key {key_heads}, value {value_heads} ({_shapes(*tensors)}; heads are the "
                "third dimension from the end): key and value need the same number, and it must divide the query's"
            )
    batch = -3 if query.ndim >= 4 else -2
    batches = query.shape[:batch], key.shape[:batch], value.shape[:batch]
    if not batches[0] == batches[1] == batches[2]:
        try:
            broadcast_shapes(*batches)
        except RuntimeError:
            hint = " Three-dimensional input is (batch, length, dim); heads need a fourth." if query.ndim == 3 else ""
            raise ShapeError(
                f"{_shapes(*tensors)}: the batch dimensions do not broadcast. Each needs to be the same in all three, "
                f"or 1: repeat what several share with .repeat_interleave(times, 0).{hint}"
            ) from None


def _shapes(query: Tensor, key: Tensor, value: Tensor) -> str:
    """The three shapes, for messages."""
    return f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"


def _scaled_dot(query: Tensor, key: Tensor, scale: float | None) -> DotPairs:
    """The default score, without the cost of a module: scores.ScaledDot."""
    dim = operator.index(query.shape[-1])  # a number also where torch.compile lets it vary: the scale depends on it
    if dim != key.shape[-1]:
        raise ShapeError(
            f"query has the dim {dim} and key {key.shape[-1]} (query {tuple(query.shape)}, key {tuple(key.shape)}): a "
            f"dot product needs equal dims; score=scores.General({dim}, {key.shape[-1]}) learns a matrix between them"
        )
    if scale is None:
        return DotPairs(query, key, max(dim, 1) ** -0.5)
    if not lies_between(-math.inf, scale, math.inf):
        raise ConfigurationError(f"scale is {scale!r}; it needs a finite number, or None for 1/√dim")
    return DotPairs(query, key, scale)


def scored_pairs(score: ScoreLike, query: Tensor, key: Tensor, scale: float | None, *, masked: bool) -> PairForm:
    """Check a score and return its pair form."""
    check_score(score)
    if scale is not None:
        raise ConfigurationError(
            f"scale={scale} goes with the default score; {score} has a scale of its own: give "
            "score=scores.ScaledDot(scale=...) or leave scale out"
        )
    if (
        torch.is_grad_enabled()
        and (masked or not key.shape[-2] or not query.shape[-2])
        and (under_transform() or waits(query) or not all_finite(query, key))
    ):
        return _pairs_with_finite_gradients(score, query, key)
    return _pair_form(score, query, key)


def check_score(score: object) -> None:
    """Check that a score is one.

    Raises:
        ConfigurationError: it is a class, or has no pair form.
    """
    if isinstance(score, type) or not hasattr(score, "pairs"):
        raise ConfigurationError(
            f"score needs a score such as scores.Additive(...); it is {score!r}. Scores have parameters of their own, "
            "so they are made before the call"
        )


def _pair_form(score: ScoreLike, query: Tensor, key: Tensor) -> PairForm:
    """The pair form of a score, after a check that kernels support its type."""
    try:
        pairs = score.pairs(query, key)
    except (RegardError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a score may be the user's, and raise anything
        raise ConfigurationError(
            f"score {score} fails for query {tuple(query.shape)} and key {tuple(key.shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(pairs, PAIR_FORMS):
        raise ConfigurationError(
            f"score {score} gives a {type(pairs).__name__}, which no kernel computes: its `form` needs to return "
            "scores.DotPairs(query, key, scale) or scores.AdditivePairs(query, key, weight). Other functions of a pair "
            "may be written as one of these, or as a bias added to them"
        )
    return pairs


def _pairs_with_finite_gradients(score: ScoreLike, query: Tensor, key: Tensor) -> PairForm:
    """The pair form whose NaN and infinity reach no gradient of the score's parameters.

    The gradient of a projection is a sum over all positions, the masked ones too, and 0 times NaN is NaN. So what is
    projected with a gradient is finite; what the score makes of the rest is put back without one.
    """
    with torch.no_grad():
        with_nonfinite = _pair_form(score, query, key)
    clean = _pair_form(score, zero_nonfinite(query), zero_nonfinite(key))
    return replace(
        clean,
        query=torch.where(with_nonfinite.query.isfinite(), clean.query, with_nonfinite.query),
        key=torch.where(with_nonfinite.key.isfinite(), clean.key, with_nonfinite.key),
    )


def _read_mask(mask: Mask | Tensor) -> Mask:
    """The mask of an argument: a `Mask`, or a bool tensor where True = attend; floats are refused: they are a bias."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return where(keep=mask)
    if isinstance(mask, Tensor) and mask.is_floating_point():
        raise MaskError(
            f"mask is a {mask.dtype} tensor {tuple(mask.shape)}, but a mask is bool (True = attend). Numbers that are "
            "added to the scores (0 and -inf among them) go to bias=; 0/1 numbers become a mask by .bool()"
        )
    has = name_type("mask", mask, of_function="masks.from_mod(mask)")
    raise MaskError(f"mask needs a mask such as masks.causal(), or a bool tensor (True = attend); it is {has}")


def _read_causal_biases(
    mask: Mask | Tensor | None, bias: Bias | Tensor | None, query: Tensor, key: Tensor, by_rows: bool
) -> tuple[Mask | None, Bias | Tensor | None]:
    """Convert torch's `CausalBias`, passed as mask, bias or both, to a mask; return it and the remaining bias."""
    if not by_rows:
        raise MaskError(
            "a CausalBias of torch counts rows and columns, not positions: leave query_positions and key_positions "
            "out, or give masks.causal(), which compares positions"
        )
    read = [read_causal_bias(given, query.shape[-2], key.shape[-2]) for given in (mask, bias) if is_causal_bias(given)]
    if mask is not None and not is_causal_bias(mask):
        read.append(_read_mask(mask))
    return reduce(and_, read), None if is_causal_bias(bias) else bias


def check_softcap(softcap: float | None) -> None:
    """Check the cap of scores.

    Raises:
        ConfigurationError: it is no number that float32 can hold, above 0.
    """
    try:
        fits = softcap is None or (SMALLEST_SOFTCAP <= softcap <= LARGEST_SOFTCAP and not isinstance(softcap, bool))
    except (TypeError, ValueError, RuntimeError):  # no number
        fits = False
    if not fits:
        raise ConfigurationError(
            f"softcap is {softcap!r}; it needs a finite number above 0, from {SMALLEST_SOFTCAP:g} to "
            f"{LARGEST_SOFTCAP:g} for what float32 can hold, or None for no cap"
        )


def _check_variants(problem: Problem) -> None:
    """Check softcap and sinks."""
    softcap, sinks = problem.softcap, problem.sinks
    check_softcap(softcap)
    if sinks is not None:
        heads = problem.pairs.query.shape[-3] if problem.heads else 0
        if not isinstance(sinks, Tensor) or not sinks.is_floating_point() or tuple(sinks.shape) != (heads,):
            has = f"{sinks.dtype} {tuple(sinks.shape)}" if isinstance(sinks, Tensor) else type(sinks).__name__
            raise ShapeError(
                f"sinks is {has}; it needs one floating-point logit per query head, ({heads},)"
                + ("" if problem.heads else ", and input with a head axis: (batch, heads, length, dim)")
            )
        check_device("sinks", sinks, problem.value.device)


def _normalized_by(problem: Problem, normalizer: Normalizer) -> Problem:
    """The problem with a normalizer, which fits it and has a meaning for all that is asked."""
    if isinstance(normalizer, type) or not isinstance(normalizer, Normalizer):
        raise ConfigurationError(
            f"normalizer needs one from regard.normalizers, such as normalizers.Sigmoid(), or None for softmax; it is "
            f"{normalizer!r}"
        )
    if (name := normalizer.refused(problem)) is not None:
        raise ConfigurationError(
            f"{name} has no meaning with normalizer={normalizer!r}: {normalizer.refuses[name]}. Leave {name} out"
        )
    if problem.wants_lse and not normalizer.has_lse:
        raise ConfigurationError(
            f"normalizer={normalizer!r} has no log-sum-exp: a row is not divided by a sum of exponentials. Call "
            "regard.attention for the output alone, or regard.observe with lenses"
        )
    return normalizer.for_problem(problem)


def drops_nothing(probability: object) -> bool:
    """Whether a probability of dropout is 0, or None; False for what is no number, which `draw_dropout` refuses."""
    try:
        return not probability
    except (ValueError, RuntimeError):  # an array or a tensor of several numbers
        return False


def draw_dropout(probability: float, device: torch.device) -> Dropout:
    """Dropout with a seed drawn for this call from the device's default generator."""
    if not lies_between(0.0, probability, 1.0):
        raise ConfigurationError(f"dropout_p is {probability!r}; it needs a probability in [0, 1)")
    return Dropout(probability, torch.randint(-(2**63), 2**63 - 1, (), device=device))


def check_device(name: str, tensor: Tensor, device: torch.device) -> None:
    """Check that all tensors are on one device."""
    if tensor.device != device:
        raise DeviceError(
            f"{name} is on {tensor.device}, but query, key and value are on {device}: move it with .to({str(device)!r})"
        )


def _check_positions(
    name: str, positions: Tensor | range | None, length: int, device: torch.device
) -> Tensor | range | None:
    """Check that positions are whole numbers, one per query or key; return consecutive ones as a range."""
    if positions is None:
        return None
    if isinstance(positions, range):
        if len(positions) != length or positions.step != 1:
            raise ShapeError(
                f"{name} is {positions}; it needs {length} consecutive positions, range(start, start + {length})"
            )
        if max(abs(positions.start), abs(positions.stop)) > LARGEST_POSITION:
            raise ConfigurationError(f"{name} is {positions}; positions need to lie within ±2⁶²")
        return positions
    if not isinstance(positions, Tensor) or positions.is_floating_point() or positions.dtype == torch.bool:
        has = positions.dtype if isinstance(positions, Tensor) else f"a {type(positions).__name__}"
        raise DtypeError(f"{name} needs a tensor of whole numbers, or a range; it is {has}")
    if positions.ndim < 1 or positions.shape[-1] != length:
        raise ShapeError(
            f"{name} has the shape {tuple(positions.shape)}; it needs ({length},) or (batch, {length}), one position "
            f"for each of the {length} {'queries' if name.startswith('query') else 'keys'}"
        )
    check_device(name, positions, device)
    return _as_range(positions)


def _as_range(positions: Tensor) -> Tensor | range:
    """Positions as a range where they are consecutive, and reading them does not wait for a device."""
    if under_transform():  # first: `len` would fix a number that varies under torch.export
        return positions
    if positions.ndim != 1 or not len(positions) or not positions.is_cpu or type(positions) is not Tensor:
        return positions
    whole = positions.long()  # unsigned numbers have no differences
    first, last = int(whole[0]), int(whole[-1])
    if last - first != len(positions) - 1 or (len(positions) > 2 and not bool((whole.diff() == 1).all())):
        return positions
    return range(first, last + 1)
