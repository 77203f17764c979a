"""Problems for each group of the backend in Triton: the configurations of its kernels that are used.

They are called on CPU tensors while launches are recorded: nothing is computed, so that memory is not looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from regard import biases, lenses, masks, normalizers, scores
from regard.backends.base import Backend, TokenRuns
from regard.backends.triton.triton_backend import TRITON
from regard.core.batched_problem import BatchedProblem, Saved
from regard.core.recurrence_problem import RecurrenceProblem
from regard.kernels.validation import make_problem
from regard.lenses.base import NativeReduction
from regard.tiles.key_lists import key_lists, list_terms

BACKEND: Backend = TRITON
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BATCH, HEADS, KEY_HEADS, LENGTH = 2, 4, 2, 192


@dataclass(frozen=True)
class LaunchedProblem:
    """A call of the backend, by name; `quick` ones are compiled by `make test` too, for these capabilities."""

    name: str
    call: Callable[[], None]
    quick: tuple[int, ...] = ()


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensors(dim: int, value_dim: int, dtype: torch.dtype, length: int = LENGTH) -> tuple[torch.Tensor, ...]:
    shapes = (BATCH, HEADS, length, dim), (BATCH, KEY_HEADS, length, dim), (BATCH, KEY_HEADS, length, value_dim)
    query, key, value = (torch.zeros(shape, dtype=dtype) for shape in shapes)
    return query, key, value


def batched(inputs: tuple[torch.Tensor, ...], **options: Any) -> BatchedProblem:
    query, key, value = inputs
    return BatchedProblem.from_problem(make_problem(query, key, value, **options))


def saved(output: torch.Tensor, lse: torch.Tensor, *, learned: bool, normalizer: bool = False) -> Saved:
    above = torch.zeros_like(output), torch.zeros_like(lse)
    return Saved(output, lse, *above, needs_bias_grad=learned, needs_normalizer_grad=normalizer and learned)


def wide_flash(dim: int, value_dim: int, dtype: torch.dtype, **options: Any) -> None:
    """Forward alone, of head dims above those that there are gradients for."""
    assert BACKEND.flash is not None
    problem = batched(tensors(dim, value_dim, dtype), **options)
    assert not BACKEND.flash.why_not(problem.problem)
    BACKEND.flash.forward(problem)


def flash(dim: int, dtype: torch.dtype, *, learned: bool = False, length: int = LENGTH, **options: Any) -> None:
    """Forward and backward; learned: with the gradient of the bias."""
    assert BACKEND.flash is not None
    problem = batched(tensors(dim, dim, dtype, length), **options)
    assert not BACKEND.flash.why_not(problem.problem)
    results = BACKEND.flash.forward(problem)
    BACKEND.flash.backward(problem, saved(*results, learned=learned, normalizer="normalizer" in options))


def flash_problems() -> Iterator[LaunchedProblem]:
    causal: dict[str, Any] = {"mask": masks.causal()}
    terms = {"bias": biases.relative(torch.zeros(HEADS, 32)), "softcap": 30.0}
    every = causal | terms | {"sinks": torch.zeros(HEADS)} | {"learned": True, "dropout_p": 0.1}
    bits = {"mask": masks.causal() & (masks.window(before=64) | masks.strided(16))}
    pairs = {"bias": torch.zeros(HEADS, LENGTH, LENGTH), "learned": True}
    table = [("causal", causal, dim, BF16) for dim in (64, 128, 256)]
    table += [("everything", every, dim, BF16) for dim in (64, 128, 256)]
    table += [("everything", every, 64, F16), ("everything", every, 64, F32), ("everything", every, 128, F32)]
    table += [("plain", {}, 128, BF16), ("dropout", causal | {"dropout_p": 0.1}, 128, BF16)]
    table += [("bits", bits, 64, BF16), ("bits", bits, 128, BF16), ("bias over pairs", pairs, 64, BF16)]
    table += [("odd lengths and dims", causal | {"length": 197}, 40, BF16)]
    sigmoid = causal | {"normalizer": normalizers.Sigmoid(torch.zeros(HEADS))}
    table += [("sigmoid", sigmoid, dim, BF16) for dim in (64, 128, 256)] + [("sigmoid", sigmoid, 128, F32)]
    table += [("sigmoid, everything", sigmoid | terms | {"learned": True, "dropout_p": 0.1}, 128, BF16)]
    quick = {("everything", 128, BF16): (90,), ("causal", 64, BF16): (80, 100), ("sigmoid", 128, BF16): (90,)}
    for name, options, dim, dtype in table:
        call, capabilities = partial(flash, dim, dtype, **options), quick.get((name, dim, dtype), ())
        yield LaunchedProblem(f"flash, {name}, {dim}, {dtype_name(dtype)}", call, capabilities)
    wide = [
        (576, 512, BF16, causal),
        (512, 512, BF16, causal),
        (512, 512, BF16, causal | terms),
        (576, 512, F32, causal),
    ]
    for dim, value_dim, dtype, options in wide:
        name = f"flash, forward{', terms' * (len(options) > 1)}, {dim} and {value_dim}, {dtype_name(dtype)}"
        yield LaunchedProblem(name, partial(wide_flash, dim, value_dim, dtype, **options))


def thresholds(dim: int, dtype: torch.dtype, *, learned: bool = False, **options: Any) -> None:
    """Sparsemax or entmax, forward and backward; learned: with the gradients of the bias and of α."""
    code, problem = BACKEND.normalizer_tiles["threshold"], batched(tensors(dim, dim, dtype), **options)
    own = isinstance(getattr(options["normalizer"], "alpha", None), torch.Tensor)
    assert not code.why_not(problem.problem)
    code.backward(problem, saved(*code.forward(problem), learned=learned, normalizer=own))


def thresholds_problems() -> Iterator[LaunchedProblem]:
    causal: dict[str, Any] = {"mask": masks.causal()}
    every = causal | {"bias": biases.relative(torch.zeros(HEADS, 32)), "softcap": 30.0, "dropout_p": 0.1}
    sparsemax, entmax = {"normalizer": normalizers.Sparsemax()}, {"normalizer": normalizers.Entmax(1.5)}
    table = [("sparsemax", causal | sparsemax, 128, BF16)]
    table += [("entmax", causal | entmax, dim, BF16) for dim in (64, 128, 256)] + [
        ("entmax", causal | entmax, 128, F32)
    ]
    table += [("everything", every | entmax | {"learned": True}, dim, BF16) for dim in (64, 128)]
    power = {"normalizer": normalizers.Entmax(torch.full((HEADS,), 1.3))}
    table += [("entmax, learned", causal | power | {"learned": True}, dim, BF16) for dim in (64, 128)]
    quick = {("entmax", 128, BF16): (90,)}
    for name, options, dim, dtype in table:
        call, capabilities = partial(thresholds, dim, dtype, **options), quick.get((name, dim, dtype), ())
        yield LaunchedProblem(f"thresholds, {name}, {dim}, {dtype_name(dtype)}", call, capabilities)


def gathered(dim: int, dtype: torch.dtype, mask: masks.Mask, **options: Any) -> None:
    """Keys of lists, forward and backward; with the gradient of a bias where there is one."""
    assert BACKEND.gathered is not None
    problem = batched(tensors(dim, dim, dtype), mask=mask, **options)
    assert not BACKEND.gathered.why_not(problem.problem)
    lists = key_lists(problem)
    terms, learned = list_terms(problem, lists), "bias" in options
    results = BACKEND.gathered.forward(problem, lists, terms)
    BACKEND.gathered.backward(problem, saved(*results, learned=learned), lists, terms, of_added=learned)


def gathered_problems() -> Iterator[LaunchedProblem]:
    def listed(rows: int, columns: int, length: int) -> masks.Mask:
        indices = torch.zeros(BATCH, KEY_HEADS, LENGTH // rows, length, dtype=torch.int32)
        return masks.blocks(indices, (rows, columns))

    every: dict[str, Any] = {"bias": biases.alibi(HEADS), "softcap": 30.0, "dropout_p": 0.1}
    each, blocks, shared = listed(1, 1, 64), listed(1, 64, 4) & masks.causal(), listed(32, 1, 64)
    table: list[tuple[str, masks.Mask, int, torch.dtype]] = [
        (name, mask, dim, BF16)
        for name, mask in (("keys of each query", each), ("blocks, causal", blocks), ("keys of 32 queries", shared))
        for dim in (64, 128, 256)
    ]
    table += [("blocks, causal", blocks, 128, F32), ("keys of 32 queries", shared, 64, F32)]
    for name, mask, dim, dtype in table:
        quick = (90,) if (name, dim, dtype) == ("blocks, causal", 128, BF16) else ()
        call = partial(gathered, dim, dtype, mask)
        yield LaunchedProblem(f"listed keys, {name}, {dim}, {dtype_name(dtype)}", call, quick)
    for dim in (64, 128):
        call = partial(gathered, dim, BF16, shared & masks.causal(), **every)
        yield LaunchedProblem(f"listed keys, everything, {dim}, bfloat16", call)


def few_queries(rows: int, dim: int, dtype: torch.dtype, *, added: bool = False, limits: bool = False) -> None:
    """Decoding over many keys; added: with a bias of each pair. limits: eight queries, causal among each other."""
    assert BACKEND.few_queries is not None
    query = torch.zeros(BATCH, KEY_HEADS, rows, dim, dtype=dtype)
    key, value = torch.zeros(2, BATCH, KEY_HEADS, 16_384, dim, dtype=dtype)
    terms = torch.zeros(BATCH, KEY_HEADS, rows, 16_384) if added else None
    BACKEND.few_queries.forward(query, key, value, 0.125, terms, range(16_377, 16_385) if limits else None)


def few_queries_problems() -> Iterator[LaunchedProblem]:
    for rows, dim, dtype in ((4, 128, BF16), (1, 64, F16), (32, 128, BF16), (64, 256, BF16), (4, 128, F32)):
        name = f"{rows} rows, {dim}, {dtype_name(dtype)}"
        quick = (80, 90, 100) if (rows, dim, dtype) == (4, 128, BF16) else ()
        yield LaunchedProblem(f"few queries, {name}", partial(few_queries, rows, dim, dtype), quick)
        yield LaunchedProblem(f"few queries, added, {name}", partial(few_queries, rows, dim, dtype, added=True))
    yield LaunchedProblem("few queries, limits, 32 rows, 128", partial(few_queries, 32, 128, BF16, limits=True))
    yield LaunchedProblem("few queries, limits, 32 rows, 512", partial(few_queries, 32, 512, BF16, limits=True))
    for rows, dtype in ((16, BF16), (128, BF16), (16, F32)):
        quick = (90,) if rows == 128 else ()
        yield LaunchedProblem(
            f"few queries, latents, {rows} rows, {dtype_name(dtype)}", partial(latent, rows, dtype), quick
        )


def latent(rows: int, dtype: torch.dtype) -> None:
    """Decoding of latent attention, whose values are the first 512 of the 576 numbers of its keys."""
    assert BACKEND.few_queries is not None
    query, key = torch.zeros(BATCH, 1, rows, 576, dtype=dtype), torch.zeros(BATCH, 1, 16_384, 576, dtype=dtype)
    BACKEND.few_queries.forward(query, key, key[..., :512], 0.07)


def paged(tokens: int, heads: int, dim: int, dtype: torch.dtype) -> None:
    """So many tokens of each of two sequences, whose keys are in pages of one memory."""
    assert BACKEND.paged is not None
    query = torch.zeros(heads, 2 * tokens, dim, dtype=dtype)
    key, value = torch.zeros(2, KEY_HEADS, 8192, dim, dtype=dtype)
    groups = [TokenRuns(0, tokens, 1000, ((0, 1000 + tokens),)), TokenRuns(tokens, tokens, 64, ((4096, 64 + tokens),))]
    BACKEND.paged.forward(query, key, value, 0.125, groups)


def paged_problems() -> Iterator[LaunchedProblem]:
    table = [(1, 8, 64, BF16), (1, 8, 128, BF16), (8, 8, 128, BF16), (1, 8, 256, BF16), (1, 8, 128, F32)]
    for tokens, heads, dim, dtype in table:
        quick = (90,) if (tokens, dim, dtype) == (8, 128, BF16) else ()
        name = f"pages, {tokens} tokens, {dim}, {dtype_name(dtype)}"
        yield LaunchedProblem(name, partial(paged, tokens, heads, dim, dtype), quick)


def additive(dim: int, dtype: torch.dtype, *, learned: bool = False, **options: Any) -> None:
    """Forward and backward."""
    assert BACKEND.additive is not None
    score = scores.Additive(dim, dim, dim).to(dtype).requires_grad_(False)
    query, key, value = tensors(dim, dim, dtype)
    problem = batched((query[:, :KEY_HEADS], key, value), score=score, **options)
    results = BACKEND.additive.forward(problem, LENGTH**2)
    BACKEND.additive.backward(problem, saved(*results, learned=learned), LENGTH**2)


def additive_problems() -> Iterator[LaunchedProblem]:
    every = {"mask": masks.causal(), "bias": biases.alibi(KEY_HEADS), "dropout_p": 0.1, "softcap": 30.0}
    for dim, dtype in ((128, F32), (64, BF16), (256, F16)):
        name, quick = f"{dim}, {dtype_name(dtype)}", (90,) if dtype is F32 else ()
        yield LaunchedProblem(f"additive, {name}", partial(additive, dim, dtype), quick)
        yield LaunchedProblem(f"additive, everything, {name}", partial(additive, dim, dtype, learned=True, **every))


def reduced(dim: int, dtype: torch.dtype, *wanted: lenses.Lens, **options: Any) -> None:
    """What lenses ask for of the weights."""
    assert BACKEND.weights is not None
    problem = batched(tensors(dim, dim, dtype), **options)
    assert BACKEND.weights.reduces(problem.problem)
    started = [reduction for lens in wanted for reduction in lens.start(problem.problem).reductions]
    able = [reduction for reduction in started if isinstance(reduction, NativeReduction)]
    forms = [form for reduction in able if (form := reduction.native()) is not None]
    assert len(forms) >= len(wanted)
    BACKEND.weights.reduce(problem, torch.zeros(problem.shape[:3]), forms)


def written(dim: int, dtype: torch.dtype, **options: Any) -> None:
    """The weights of a rectangle, for what is added up by torch."""
    assert BACKEND.weights is not None
    problem = batched(tensors(dim, dim, dtype), **options)
    writer = BACKEND.weights.writer(problem, torch.zeros(*problem.shape[:3], 1))
    assert writer is not None
    writer.tile(slice(0, 64), slice(0, 128), masked=True, terms=True)


def weights_problems() -> Iterator[LaunchedProblem]:
    causal: dict[str, Any] = {"mask": masks.causal()}
    every = causal | {"bias": biases.alibi(HEADS), "softcap": 30.0}
    pooled, largest = lenses.Pooled((16, 16)), lenses.Pooled((16, 16), "max")
    sets = {
        "map and entropy": (pooled, lenses.Entropy()),
        "four lenses": (pooled, lenses.Entropy(), lenses.TopK(8), lenses.Received()),
        "the others": (largest, lenses.Distance(), lenses.Mass(torch.arange(LENGTH) // 24), lenses.Weights()),
    }
    for name, wanted in sets.items():
        for dim, dtype in ((64, BF16), (128, BF16), (64, F32)):
            call, quick = partial(reduced, dim, dtype, *wanted, **causal), (90,) if dtype is F32 else ()
            yield LaunchedProblem(f"lenses, {name}, {dim}, {dtype_name(dtype)}", call, quick)
    yield LaunchedProblem("weights written, 64", partial(written, 64, BF16, **causal), (90,))
    yield LaunchedProblem("weights written, everything, 128", partial(written, 128, BF16, **every))
    yield LaunchedProblem("lenses, bias and softcap", partial(reduced, 128, BF16, *sets["four lenses"], **every))


def recurrence(dim: int, dtype: torch.dtype, *, decay: int = 0, beta: bool = False, **options: Any) -> None:
    """Forward and backward; decay: its number of axes, 3 for one number a token and 4 for one a feature."""
    assert BACKEND.recurrences is not None
    query, key, value = tensors(dim, dim, dtype)
    gates = torch.zeros(*key.shape[:3], *[dim] * (decay == 4)) if decay else None
    written = torch.zeros(key.shape[:3]) if beta else None
    problem = RecurrenceProblem(query, key, value, gates, written, **options)
    assert not BACKEND.recurrences.why_not(problem)
    found = BACKEND.recurrences.forward(problem, stores_borders=True)
    assert found.border_state is not None
    above = torch.zeros_like(found.output)
    more = {"output": found.output, "row_total": found.row_total, "border_total": found.border_total}
    BACKEND.recurrences.backward(problem, found.border_state, above, **(more if problem.normalize else {}))


def token(dim: int, dtype: torch.dtype, *, normalize: bool, decay: int = 0, beta: bool = False) -> None:
    """One token of decoding."""
    assert BACKEND.recurrences is not None
    query, key, value = tensors(dim, dim, dtype, 1)
    gates = torch.zeros(*key.shape[:3], *[dim] * (decay == 4)) if decay else None
    inputs = query, key, value, gates, torch.zeros(key.shape[:3]) if beta else None
    options: dict[str, Any] = {"feature_map": "elu", "normalize": normalize, "scale": 1.0, "recent_share": 0.0}
    step = BACKEND.recurrences.prepare_step(*inputs, **options)
    assert step is not None
    step.run(*inputs, torch.zeros(step.state_shape), target=torch.zeros(step.state_shape))


def recurrences_problems() -> Iterator[LaunchedProblem]:
    table: dict[str, dict[str, Any]] = {
        "elu + 1, normalised": {"feature_map": "elu", "normalize": True},
        "plain": {},
        "decay": {"decay": 3},
        "decay of features": {"decay": 4},
        "gated delta rule": {"decay": 3, "beta": True},
        "delta rule, decay of features": {"decay": 4, "beta": True},
    }
    for name, options in table.items():
        for dim, dtype in ((64, BF16), (128, BF16), (64, F32)):
            quick = (90,) if dim == 64 and dtype is BF16 and name in ("elu + 1, normalised", "gated delta rule") else ()
            call = partial(recurrence, dim, dtype, **options)
            yield LaunchedProblem(f"recurrence, {name}, {dim}, {dtype_name(dtype)}", call, quick)
    for dim, dtype in ((64, BF16), (128, F32)):
        name = f"{dim}, {dtype_name(dtype)}"
        yield LaunchedProblem(f"token, normalised, {name}", partial(token, dim, dtype, normalize=True), (90,))
        call = partial(token, dim, dtype, normalize=False, decay=4, beta=True)
        yield LaunchedProblem(f"token, gated delta rule, {name}", call)


GROUPS = {
    "flash": flash_problems,
    "normalizer_tiles": thresholds_problems,
    "gathered": gathered_problems,
    "few_queries": few_queries_problems,
    "paged": paged_problems,
    "additive": additive_problems,
    "weights": weights_problems,
    "recurrences": recurrences_problems,
}
"""The problems of each group of the backend."""


def launched_problems() -> list[LaunchedProblem]:
    """Those of the groups that the backend has."""
    there = [problems for group, problems in GROUPS.items() if getattr(BACKEND, group) is not None]
    return [problem for problems in there for problem in problems()]
