"""Inputs of any strides: rows that overlap, expanded, transposed and strided ones, through every kernel.

Results and gradients are made "like" the inputs, which for rows that begin one number apart torch does with the axes in
another order; memory that overlaps must not be written to.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, linear, masks, nn
from regard.kernels import KERNELS, make_problem
from regard.scores import Additive

BATCH, HEADS, KEY_HEADS, QUERIES, KEYS, DIM = 2, 4, 2, 5, 7, 17  # fewer rows than dims
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64) / 2


def overlapping(*shape: int, step: int = 1) -> Tensor:
    """Windows over a signal, each `step` numbers after the last."""
    *leading, length, dim = shape
    return normal(*leading, step * (length - 1) + dim).unfold(-1, dim, step)


MEMORIES: dict[str, Callable[..., Tensor]] = {
    "windows": overlapping,
    "windows two apart": lambda *shape: overlapping(*shape, step=2),
    "windows on all axes": lambda *shape: normal(sum(shape)).as_strided(shape, (1,) * len(shape)),
    "expanded batch": lambda b, *rest: normal(1, *rest).expand(b, *rest),
    "expanded heads": lambda b, h, *rest: normal(b, 1, *rest).expand(b, h, *rest),
    "expanded rows": lambda *shape: normal(*shape[:-2], 1, shape[-1]).expand(shape),
    "expanded dims": lambda *shape: normal(*shape[:-1], 1).expand(shape),
    "one number": lambda *shape: normal(1).expand(shape),
    "transposed": lambda *shape: normal(*shape[:-2], shape[-1], shape[-2]).mT,
    "heads inside": lambda b, h, n, d: normal(b, n, h, d).transpose(1, 2),
    "reversed axes": lambda *shape: normal(*reversed(shape)).permute(*reversed(range(len(shape)))),
    "every other number": lambda *shape: normal(*shape[:-1], 2 * shape[-1])[..., ::2],
    "flipped": lambda *shape: normal(*shape).flip(-1, -2),
}


def to(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The tensor in a dtype, with its strides, which `tensor.to` does not keep."""
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).to(dtype)
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def plain(tensor: Tensor) -> Tensor:
    """The same numbers in float64, one row after another."""
    return tensor.detach().double().clone(memory_format=torch.contiguous_format)


def options(dtype: torch.dtype) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Names, and options for a call with overlapping masks and biases and for the call that it is compared with."""
    keep = torch.tensor([True, False, True, True, False] * 3)[: QUERIES + KEYS - 1].unfold(0, KEYS, 1)
    added = to(overlapping(QUERIES, KEYS), dtype)
    yield "all pairs", {}, {}
    yield "causal", {"mask": masks.causal()}, {"mask": masks.causal()}
    yield "strided mask", {"mask": masks.strided(2)}, {"mask": masks.strided(2)}
    yield "overlapping mask", {"mask": keep}, {"mask": keep.contiguous()}
    yield "overlapping bias", {"bias": added}, {"bias": plain(added)}
    yield "alibi", {"bias": biases.alibi(HEADS)}, {"bias": biases.alibi(HEADS)}
    if dtype == torch.float32:
        score = Additive(DIM, DIM, 11)
        exact = Additive(DIM, DIM, 11).double()
        exact.load_state_dict(score.state_dict())
        yield "additive", {"score": score}, {"score": exact}


def draw(memory: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = (
        to(MEMORIES[memory](BATCH, heads, length, DIM), dtype)
        for heads, length in ((HEADS, QUERIES), (KEY_HEADS, KEYS), (KEY_HEADS, KEYS))
    )
    return query, key, value


def compute(inputs: Iterable[Tensor], above: dict[str, Tensor], with_lse: bool, **settings: Any) -> dict[str, Tensor]:
    """Output, log-sum-exp and gradients of attention, and the output where none has a gradient."""
    query, key, value = inputs
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    if with_lse:
        results = dict(zip(above, regard.attention_with_lse(*leaves, **settings), strict=True))
    else:
        results = {"output": regard.attention(*leaves, **settings)}
    gradients = torch.autograd.grad(list(results.values()), leaves, [above[name] for name in results])
    without = regard.attention(query, key, value, **settings).detach()
    found = {name: result.detach() for name, result in results.items()}
    return found | dict(zip(("query", "key", "value", "without gradients"), (*gradients, without), strict=True))


def faults(found: dict[str, Tensor], truth: dict[str, Tensor], dtype: torch.dtype) -> Iterator[str]:
    # Torch's flash kernel has exponentials of 20 bits, whose errors enter a gradient four times. A gradient may cancel:
    # its terms are as large as the other results.
    share = max(8 * torch.finfo(dtype).eps, 0.0 if dtype == torch.float64 else 2.0**-17)
    size = max(float(exact[exact.isfinite()].abs().max()) for exact in truth.values())
    for name, exact in truth.items():
        finite = exact.isfinite()
        error = float((found[name].double() - exact)[finite].abs().max())
        if not torch.equal(found[name].isfinite(), finite) or not error <= share * size:
            yield f"{name} is off by {error:.2g} of {size:.2g}"


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_every_kernel(dtype, memory):
    found, inputs = [], draw(memory, dtype)
    output, lse = MEMORIES[memory](BATCH, HEADS, QUERIES, DIM), overlapping(BATCH, HEADS, QUERIES)
    above = {"output": to(output, dtype), "lse": to(lse, torch.promote_types(dtype, torch.float32))}
    exact_above = {name: plain(tensor) for name, tensor in above.items()}
    for option, own, exact in options(dtype):
        for with_lse in (False, True):
            problem = make_problem(*inputs, wants_lse=with_lse, **own)
            truth = compute(map(plain, inputs), exact_above, with_lse, kernel="reference", **exact)
            for kernel in KERNELS:
                if not kernel.why_not(problem):
                    mine = compute(inputs, above, with_lse, kernel=kernel.name, **own)
                    found += [f"{kernel.name}, {option}: {text}" for text in faults(mine, truth, dtype)]
    assert not found, "\n".join(found)


LINEAR: dict[str, dict[str, Any]] = {
    "whole": {},
    "causal": {"causal": True},
    "decay": {"causal": True, "decay": (KEYS,)},
    "decay of features": {"causal": True, "decay": (KEYS, DIM)},
    "delta rule": {"causal": True, "beta": (KEYS,), "feature_map": linear.Identity(), "normalize": False},
    "softmax": {"feature_map": linear.Softmax()},
    "favor": {"feature_map": linear.FavorPlus(DIM, num_features=8, seed=0)},
}


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
def test_linear_attention(dtype, memory):
    """Recurrences in native code and in torch, with gates of any strides too."""
    found, (_, key, value) = [], draw(memory, dtype)
    query = to(MEMORIES[memory](BATCH, HEADS, KEYS, DIM), dtype)
    above = to(MEMORIES[memory](BATCH, HEADS, KEYS, DIM), dtype)
    for name, own in LINEAR.items():
        gates = {}
        for gate in own.keys() & {"decay", "beta"}:
            drawn = MEMORIES[memory](BATCH, KEY_HEADS, KEYS, DIM)
            gate_memory = torch.empty(0, dtype=torch.float64).set_(drawn.untyped_storage())
            gate_memory.abs_().clamp_(max=1.0).mul_(-0.3 if gate == "decay" else 0.3)
            drawn = to(drawn, dtype if dtype == torch.float64 else torch.float32)
            gates[gate] = drawn if len(own[gate]) == 2 else drawn[..., 0]
        settings = {option: value for option, value in own.items() if option not in gates}
        results = []
        for tensors, gradient in (
            ((query, key, value, *gates.values()), above),
            (tuple(map(plain, (query, key, value, *gates.values()))), plain(above)),
        ):
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            named = dict(zip(gates, leaves[3:], strict=True))
            output = regard.linear_attention(*leaves[:3], **settings, **named)
            gradients = torch.autograd.grad(output, leaves, gradient)
            names = "output", "query", "key", "value", *gates
            results.append(dict(zip(names, (output.detach(), *gradients), strict=True)))
        mine, truth = results
        found += [f"{name}: {text}" for text in faults(mine, truth, dtype)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("memory", MEMORIES)
def test_lenses(memory):
    query, key, value = draw(memory, torch.float32)
    shown = lenses.Weights(), lenses.Entropy(), lenses.Received(), lenses.Pooled((2, 3))
    seen = regard.observe(query, key, value, *shown, mask=masks.causal())
    exact = regard.observe(plain(query), plain(key), plain(value), *shown, mask=masks.causal())
    for lens in shown:
        assert (seen[lens] - exact[lens]).abs().max() <= 1e-5, lens


@pytest.mark.parametrize("memory", MEMORIES)
def test_a_cache(memory):
    """What is appended is copied; the results of a step are those of the whole."""
    _, key, value = draw(memory, torch.float32)
    cache = nn.KVCache()
    for at in range(KEYS):
        cache = cache.append(key[:, :, at : at + 1], value[:, :, at : at + 1])
    assert torch.equal(cache.keys, key)
    assert torch.equal(cache.values, value)
