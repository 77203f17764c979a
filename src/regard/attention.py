"""The functions of the library: `attention`, its log-sum-exp, `merge`, `observe`, `explain`, and torch's SDPA."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor

from .biases import Bias
from .core.grid import from_zero
from .core.log_sum_exp import merge_softmax
from .core.normalizer import Normalizer
from .core.problem import Problem
from .core.score_forms import at_least_float32
from .core.torch_modes import functorch_active, generator_restored, is_causal_bias, under_transform
from .errors import ConfigurationError, MaskError, ShapeError
from .kernels import Plan, Result, choose, finite_problem, readable
from .kernels.hooks import CURRENT_HOOK, current_substitute, run_with_hook
from .kernels.lens_pass import run_reductions, start_lenses
from .kernels.packed_inputs import widened
from .kernels.validation import AttentionOptions, ScoreLike, check_tensors, draw_dropout, drops_nothing, make_problem
from .lenses import Lens
from .lenses.base import Result as LensResult
from .masks import Mask, causal, where
from .masks.convert.torch_tensors import read_causal_bias
from .nested import attend_nested
from .small_calls import repeated_calls, repeated_calls_with_lse
from .tiles import attended_keys
from .utils.numbers import truth_value
from .utils.other_types import name_type


@repeated_calls
def attention(
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
    kernel: str | None = None,
) -> Tensor:
    """softmax( f(Q, K) + B, where M ) · V, by the kernel with the lowest predicted time.

    Only the tiles of query-key pairs that the mask keeps are computed, and memory is linear in the lengths, forward
    and backward, unless all pairs are few; `explain` reports the kernel and the reasons.

    Shapes:
        query (..., heads, M, Dq), key (..., key heads, N, Dk), value (..., key heads, N, Dv); the output is
        (..., heads, M, Dv). Key heads divide query heads, nothing is repeated in memory. Input with three dimensions
        is (batch, length, dim), with two (length, dim): one head. Batch dimensions broadcast; any length may be 0.
        Nested tensors of torch, jagged or strided, hold sequences of their own lengths; each is computed by itself,
        with masks and biases by distance.

    Args:
        query: (..., heads, M, Dq).
        key: (..., key heads, N, Dk).
        value: (..., key heads, N, Dv).
        score: f, from `regard.scores`; without one q · k / √dim (Vaswani et al. 2017, arXiv 1706.03762, Eq. 1).
        mask: M, which keys each query attends to: from `regard.masks`, or a bool tensor that broadcasts to
            (..., heads, M, N), where True = attend. NaN or infinity in a masked position reaches nothing. A row that
            attends to NaN has output NaN; one that attends to infinity has no finite output, but for pairs that
            infinity in query or key scores -infinity: they have weight 0, and no part in a gradient. (With another
            normalizer than softmax, under torch.func and off the CPU such pairs may make row or gradients NaN.) With a
            softcap or an additive score, whose tanh is finite at infinity, a row that attends to infinity in a query or
            key has output NaN.
        bias: B, added to the scores: from `regard.biases`, or a floating-point tensor that broadcasts likewise.
        scale: instead of 1/√dim, for the default score.
        softcap: c · tanh(score / c) before bias and mask (Gemma 2, arXiv 2408.00118, section 2).
        sinks: (heads,), a logit per head that takes weight and has no value (Xiao et al. 2024, arXiv 2309.17453,
            learned as in gpt-oss); it counts in the log-sum-exp.
        dropout_p: the probability with which a weight is dropped, in [0, 1); applied in evaluation too. Which
            weights are dropped depends on torch's seed, batch, head and the two positions, and not on the kernel.
        query_positions: (M,) or (*batch, M), whole numbers, or a range; without them the last M of the keys'.
        key_positions: (N,) or (*batch, N), whole numbers, or a range; without them 0..N-1. Mask, bias and dropout are
            functions of these: a shard of a longer sequence computes what the whole would, as fast as one from 0 where
            the positions are consecutive.
        normalizer: what takes the place of softmax, from `regard.normalizers`; None for softmax.
        kernel: the name of the kernel to use, never another: "sdpa", "short", "cpu_flash", "decode",
            "block_sparse", "flex", "decomposed", "gathered", "additive", "tiled" or "reference".

    A row that may attend to nothing has output 0 and gradient 0. Sums are in float32 at least.

    Raises:
        ShapeError, DtypeError, DeviceError: tensors that do not fit; the message has their shapes and the mend.
        MaskError: a mask that is not bool, or does not broadcast to the weights.
        ConfigurationError: a number out of its range; what has no meaning with a normalizer; a call under
            `torch.jit.trace`, which would record the choices made for one input.
        KernelError: the named kernel cannot compute this.

    >>> import torch, regard
    >>> q, k = torch.eye(2), torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    >>> v = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    >>> regard.attention(q, k, v, score=regard.scores.Dot())
    tensor([[2.4621, 3.4621],
            [1.5379, 2.5379]])
    """
    options: AttentionOptions = {
        "score": score,
        "mask": mask,
        "bias": bias,
        "scale": scale,
        "softcap": softcap,
        "sinks": sinks,
        "dropout_p": dropout_p,
        "query_positions": query_positions,
        "key_positions": key_positions,
        "normalizer": normalizer,
    }
    if getattr(query, "is_nested", False):
        return attend_nested(attention, query, key, value, kernel=kernel, **options)
    return run_problem(make_problem(query, key, value, **options), kernel).output


def run_problem(problem: Problem, kernel: str | None = None) -> Result:
    """The result of a problem, by the kernel of that name or the fastest.

    The current attention hook is called, if there is one.
    """
    if torch.compiler.is_compiling():  # which cannot trace the look-up of the hook
        return choose(problem, kernel).run(problem)
    if (hook := CURRENT_HOOK.get()) is None or functorch_active():
        if problem.keys > attended_keys.MANY:
            problem = attended_keys.attended_part(problem)
        problem = readable(problem, kernel)
        return choose(problem, kernel).run(problem)
    problem = widened(problem)
    return run_with_hook(problem, choose(problem, kernel), hook)


@repeated_calls_with_lse
def attention_with_lse(
    query: Tensor, key: Tensor, value: Tensor, *, kernel: str | None = None, **options: Unpack[AttentionOptions]
) -> tuple[Tensor, Tensor]:
    """`attention` and the log-sum-exp of each row's scores: log Σ_j exp(score_ij) over the keys it attends to.

    Shapes: (..., heads, M, Dv) and (..., heads, M). The natural log, in float32 at least; -inf where a row attends to
    nothing. Both have gradients. Arguments and errors are those of `attention`.

    >>> import torch, regard
    >>> out, lse = regard.attention_with_lse(torch.zeros(1, 4), torch.zeros(3, 4), torch.ones(3, 2))
    >>> lse.exp()
    tensor([3.])
    """
    return _run_with_lse(make_problem(query, key, value, wants_lse=True, **options), kernel)


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint sets of keys: lse = log Σ_p exp(lse_p), output = Σ_p exp(lse_p - lse) · output_p.

    Each part is the result of `attention_with_lse` for some of the keys; merged, they are its result for all of them.
    A sink may be in one part only. Of the normalizers, those with a log-sum-exp are merged so: `Softpick`, `ReLU` and
    `Softmax1`, whose 1 is a sink and counts once in each part. Outputs of `Sigmoid` are added, with one bias for all.

    Shapes: outputs (..., M, Dv), log-sum-exps (..., M), the same in all parts.

    Raises:
        ShapeError: no parts, or parts of different shapes.
        ConfigurationError: a part without log-sum-exp, or what is no part.

    Source: Milakov and Gimelshein 2018 (arXiv 1805.02867), the online softmax.

    >>> import torch, regard
    >>> q, k, v = torch.randn(3, 4), torch.randn(6, 4), torch.randn(6, 4)
    >>> parts = [regard.attention_with_lse(q, k[s], v[s]) for s in (slice(0, 2), slice(2, 6))]
    >>> torch.allclose(regard.merge(parts)[0], regard.attention(q, k, v), atol=1e-6)
    True
    """
    parts = _checked_parts(parts)
    first = parts[0][0].shape
    for index, (output, lse) in enumerate(parts):
        if lse is None:
            raise ConfigurationError(
                f"part {index} has no log-sum-exp: its normalizer gives none, and parts are merged by it. Outputs of "
                "normalizers.Sigmoid are added; others need all keys at once"
            )
        if output.shape != first or lse.shape != output.shape[:-1]:
            raise ShapeError(
                f"part {index} has the output {tuple(output.shape)} and the lse {tuple(lse.shape)}; the first output "
                f"is {tuple(first)}: all outputs need that shape, and each lse {tuple(first[:-1])}"
            )
    outputs = torch.stack([at_least_float32(output) for output, _ in parts])  # [P, ..., M, Dv]
    output, lse = merge_softmax(outputs, torch.stack([lse for _, lse in parts]), dim=0)
    return output.to(parts[0][0].dtype), lse


def _checked_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Parts for `merge`: one at least, pairs of tensors, of which the second may be None."""
    if not isinstance(parts, Iterable):
        raise ConfigurationError(f"parts is {parts!r}; merge needs a list of (output, lse) pairs of attention_with_lse")
    pairs = list(parts)
    if not pairs:
        raise ShapeError("merge needs at least one (output, lse) pair; it was given none")
    for index, pair in enumerate(pairs):
        is_pair = isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[0], Tensor)
        if not is_pair or not isinstance(pair[1], Tensor | None):
            raise ConfigurationError(
                f"part {index} is a {type(pair).__name__}; merge needs (output, lse) pairs of tensors, as "
                "attention_with_lse returns them"
            )
    return pairs


def explain(
    query: Tensor, key: Tensor, value: Tensor, *, kernel: str | None = None, **options: Unpack[AttentionOptions]
) -> Plan:
    """Report the kernel that `attention` would choose, its predicted cost, and why each other kernel is not chosen.

    Arguments and errors are those of `attention`. No generator is advanced: with dropout, `plan.run()` computes what
    the next call of `attention` would.

    >>> import torch, regard
    >>> q = torch.zeros(1, 2, 1, 8)
    >>> regard.explain(q, q, q).kernel.name in ("decode", "sdpa")  # with native code, and without
    True
    """
    dropout_p = options.pop("dropout_p", 0.0)
    problem = make_problem(query, key, value, **options)
    if not drops_nothing(dropout_p):
        with generator_restored(problem.value.device):
            problem = replace(problem, dropout=draw_dropout(dropout_p, problem.value.device))
    if problem.keys > attended_keys.MANY:
        problem = attended_keys.attended_part(problem)
    problem = readable(problem, kernel)
    return Plan(problem, choose(problem, kernel), asked=kernel is not None)


@dataclass(frozen=True, eq=False)
class Observation:
    """The result of `observe`: the output, the log-sum-exp and the result of each lens.

    A normalizer without log-sum-exp gives another number for each row in its place: see `regard.normalizers`.
    """

    output: Tensor
    lse: Tensor
    results: Mapping[Lens, Any]

    def __getitem__(self, lens: Lens[LensResult]) -> LensResult:
        """The result of a lens; an equal lens is the same key.

        Raises:
            ConfigurationError: `observe` was not given that lens.
        """
        if lens not in self.results:
            had = ", ".join(map(repr, self.results)) or "no lens"
            raise ConfigurationError(f"{lens!r} was not passed to `observe`, but {had}: pass it there")
        return self.results[lens]


def observe(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *lenses: Lens,
    kernel: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Observation:
    """`attention`, with results of lenses from `regard.lenses` over its weights: `seen.output`, `seen[lens]`.

    The weights are computed a second time, exp(scores - lse), tile by tile where the mask leaves any, and once for all
    lenses together: memory is linear in the lengths, and what the lenses show. With dropout they show the weights
    before it. `Weights` has gradients, the other lenses look without autograd.

    Arguments and errors are those of `attention`, and:

    Raises:
        ConfigurationError: what is no lens; a lens that does not fit the problem, before anything is computed.

    >>> import torch, regard
    >>> weights, spread = regard.lenses.Weights(), regard.lenses.Entropy()
    >>> seen = regard.observe(torch.zeros(1, 4), torch.zeros(2, 4), torch.ones(2, 3), weights, spread)
    >>> seen[weights], seen[spread]
    (tensor([[0.5000, 0.5000]]), tensor([0.6931]))
    """
    return observe_problem(make_problem(query, key, value, **options), lenses, kernel)


def observe_problem(problem: Problem, lenses: Sequence[Lens], kernel: str | None = None) -> Observation:
    """Output, log-sum-exp and the results of lenses for a problem.

    Raises:
        ConfigurationError, KernelError: as `observe`.
    """
    problem = replace(widened(problem), wants_lse=True)
    substitute = None if under_transform() else current_substitute()
    if substitute is not None and substitute.observe is not None:
        return substitute.observe(problem, lenses)
    looks = start_lenses(problem, lenses)
    output, lse = _run_with_lse(problem, kernel)
    problem = finite_problem(problem)  # rows that attend to NaN show it through their log-sum-exp
    run_reductions(problem, lse, (reduction for look in looks.values() for reduction in look.reductions))
    return Observation(output, lse, {lens: look.finish(problem, lse) for lens, look in looks.items()})


def _run_with_lse(problem: Problem, kernel: str | None) -> tuple[Tensor, Tensor]:
    """Run attention and return output and log-sum-exp."""
    result = run_problem(problem, kernel)
    if result.lse is None:
        raise AssertionError("a kernel chosen for a problem that wants the log-sum-exp gave none")
    return result.output, result.lse


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q Kᵀ · scale + attn_mask) · V: torch's function of this name and arguments, on regard's kernels.

    Conventions, all torch's: a bool `attn_mask` has True = attend, a floating-point one is added to the scores, a
    `torch.nn.attention.bias.CausalBias` is the mask that it names; `is_causal` is aligned to the start (query i attends
    to keys 0..i, also where lengths differ), `scale` is 1/√dim unless given, axes in front of the lengths broadcast,
    fewer key heads than query heads, but more than 1, need `enable_gqa=True`, and `dropout_p=1.0` gives zeros. Where
    torch leaves the case open or refuses it: `is_causal` together with a mask means both, and a row that may attend to
    nothing gives 0.

    Shapes: query (..., heads, M, D), key (..., heads, N, D), value (..., heads, N, Dv); or nested tensors, jagged or
    strided, of (batch, heads, length, dim) or (batch, length, dim), without `attn_mask`.

    Raises:
        ShapeError: heads differ without `enable_gqa`, or shapes do not fit.
        MaskError: a `CausalBias` for other lengths.
        ConfigurationError: `is_causal` or `enable_gqa` that is neither True nor False.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 3, 4)
    >>> ours = regard.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> bool(torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)))
    True
    """
    is_causal, enable_gqa = truth_value("is_causal", is_causal), truth_value("enable_gqa", enable_gqa)
    if getattr(query, "is_nested", False):
        mask = causal() if is_causal and attn_mask is None else attn_mask
        options: AttentionOptions = {"mask": mask, "scale": scale, "dropout_p": dropout_p}
        return attend_nested(attention, query, key, value, from_start=True, groups=enable_gqa, **options)
    if not type(query) is type(key) is type(value) is Tensor or query.is_nested or key.is_nested or value.is_nested:
        check_tensors(query=query, key=key, value=value)
    if torch.compiler.is_compiling() or not query.shape == key.shape == value.shape:
        query, key, value = _broadcast_heads(query, key, value, enable_gqa)
    mask = bias = positions = None
    if attn_mask is None:
        pass
    elif is_causal_bias(attn_mask):
        mask, is_causal = _resolve_causal_bias(attn_mask, is_causal, query, key)
    elif not isinstance(attn_mask, Tensor):
        raise MaskError(
            f"attn_mask needs a bool tensor (True = attend), or numbers that are added to the scores; it is "
            f"{name_type('attn_mask', attn_mask)}. Masks of regard.masks go to regard.attention(mask=...)"
        )
    elif attn_mask.dtype == torch.bool:
        mask = where(keep=attn_mask)
    else:
        bias = attn_mask
    if is_causal:
        mask = causal() if mask is None else causal() & mask
        if query.ndim >= 2 and query.shape[-2] != key.shape[-2]:
            positions = from_zero(query.shape[-2], query.device)
    if isinstance(dropout_p, float | int) and dropout_p == 1.0:  # every weight is dropped
        return 0.0 * attention(query, key, value, mask=mask, bias=bias, scale=scale, query_positions=positions)
    return attention(
        query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, query_positions=positions
    )


def _broadcast_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Broadcast the leading axes of query, key and value by torch's rules to the layout that `attention` takes."""
    axes = max(query.ndim, key.ndim, value.ndim)
    if min(query.ndim, key.ndim, value.ndim) < 2:
        return query, key, value  # refused by `attention`
    query, key, value = (tensor[(None,) * (axes - tensor.ndim)] for tensor in (query, key, value))
    if axes < 4:
        return query, key, value
    heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    if enable_gqa:
        if key_heads != value_heads and key_heads and value_heads and not (heads % key_heads or heads % value_heads):
            key, value = (tensor.repeat_interleave(heads // tensor.shape[-3], -3) for tensor in (key, value))
        return query, key, value
    most = max(heads, key_heads, value_heads)
    if {heads, key_heads, value_heads} - {1, most}:
        mend = "pass enable_gqa=True to let groups of query heads share a key head"
        if key_heads != value_heads or not key_heads or heads % key_heads:
            mend = "they need to be the same, or 1"
        raise ShapeError(f"query has {heads} heads and key {key_heads}, value {value_heads}: {mend}")
    if heads != most:
        query = query.expand(*query.shape[:-3], most, *query.shape[-2:])
    if key_heads != value_heads:
        key, value = (tensor.expand(*tensor.shape[:-3], most, *tensor.shape[-2:]) for tensor in (key, value))
    return query, key, value


def _resolve_causal_bias(bias: Tensor, is_causal: bool, query: Tensor, key: Tensor) -> tuple[Mask | None, bool]:
    """Convert torch's `CausalBias` and `is_causal` to a mask aligned to the end, or to `is_causal` alone.

    Of the two alignments, the one that is contained in the other stands for both: that to the start unless M > N.
    """
    queries, keys = query.shape[-2], key.shape[-2]
    mask = read_causal_bias(bias, queries, keys)
    to_start = bias.variant.name == "UPPER_LEFT" or (is_causal and queries <= keys)  # type: ignore[attr-defined]
    return (None, True) if to_start else (mask, False)
