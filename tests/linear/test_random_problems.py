"""Random problems of linear attention under a fixed seed, with gradients, against the definitions in float64.

`make conformance` draws three thousand, `make test` the first of them.
"""

import random
from functools import partial

import pytest
import torch

import regard
from regard import masks
from regard.linear import Elu, FavorPlus, Identity, Relu, Softmax, UnitNorm, naive
from regard.linear import recurrence as recurrence_module

COUNT, CHUNK, SEED = 3000, 50, 20_200_629
LENGTHS = (0, 1, 2, 3, 5, 17, 63, 64, 65, 97, 130)


def definition(query, key, value, *, feature_map, causal, normalize, keep, ids, decay, beta, scale):
    """Each document of each sequence by itself: steps where attention is causal, all weights at once where not."""
    output = torch.zeros(*query.shape[:3], value.shape[-1], dtype=value.dtype)
    for row in range(len(query)):
        for document in ids[row].unique() if len(ids[row]) else ids.new_zeros(1):
            here = ids[row] == document
            rows = here if query.shape[2] == key.shape[2] else torch.ones(query.shape[2], dtype=torch.bool)
            q, k, v = (t[row : row + 1, :, at] for t, at in ((query, rows), (key, here), (value, here)))
            q, k = feature_map(q * scale), feature_map(k)
            gates = [None if gate is None else gate[row : row + 1, :, here] for gate in (decay, beta)]
            output[row, :, rows] = _of_one_document(q, k, v, keep[row, here], causal, normalize, *gates)[0]
    return output


def _of_one_document(q, k, v, keep, causal, normalize, decay, beta):
    if not causal:
        return naive.quadratic(q, k, v, keep=keep, normalize=normalize)
    k = k * keep[:, None]
    if decay is not None:
        decay = decay * (keep if decay.ndim == 3 else keep[:, None])
    sums, _ = naive.step_recurrence(q, k, v, decay=decay, beta=beta)
    if not normalize:
        return sums
    total, _ = naive.step_recurrence(q, k, torch.ones_like(v[..., :1]), decay=decay, beta=beta)
    return sums / total.where(total != 0, torch.inf)


def draw(number):
    """The tensors and the options of a problem; tensors require gradients."""
    choose = random.Random(SEED + number)
    torch.manual_seed(SEED + number)
    causal, normalize, batch = choose.random() < 0.7, choose.random() < 0.5, choose.choice((1, 2, 3))
    key_heads, group, keys = choose.choice((1, 2)), choose.choice((1, 1, 3)), choose.choice(LENGTHS)
    dim, value_dim = choose.randint(1, 8), choose.randint(1, 8)
    delta = causal and not normalize and choose.random() < 0.5
    maps = [Elu(), Relu(), Softmax(), FavorPlus(dim, choose.randint(1, 9), seed=number)]
    feature_map = UnitNorm(Identity()) if delta else choose.choice(maps + [Identity()] * (not normalize))
    same_length = causal or choose.random() < 0.5
    options = {
        "feature_map": feature_map,
        "causal": causal,
        "normalize": normalize,
        "scale": choose.choice((1.0, 0.5)),
    }
    tensors = {
        "query": torch.randn(batch, key_heads * group, keys if same_length else choose.choice(LENGTHS), dim),
        "key": torch.randn(batch, key_heads, keys, dim),
        "value": torch.randn(batch, key_heads, keys, value_dim),
    }
    gates = batch, key_heads, keys
    if causal and choose.random() < 0.6:
        features = feature_map(torch.zeros(1, dim)).shape[-1]
        strength = choose.choice((0.01, 1.0, 100.0))
        tensors["decay"] = -strength * torch.rand(choose.choice((gates, (*gates, features))))
    if delta:
        tensors["beta"] = 2 * torch.rand(gates)
    keep, ids = torch.ones(batch, keys, dtype=torch.bool), torch.zeros(batch, keys, dtype=torch.long)
    mask = None
    if choose.random() < 0.4:
        lengths = torch.tensor([choose.randint(0, keys) for _ in range(batch)])
        keep = torch.arange(keys) < lengths[:, None]
        mask = masks.padding(lengths)
    if same_length and keys and choose.random() < 0.4:
        ids = torch.randint(choose.choice((1, 3, 9)), (batch, keys))
        ids = ids.sort(-1).values if choose.random() < 0.5 else ids
        mask = masks.documents(ids) if mask is None else mask & masks.documents(ids)
    return {name: tensor.double().requires_grad_() for name, tensor in tensors.items()}, options, mask, keep, ids


by_chunk = pytest.mark.parametrize(
    "first",
    [pytest.param(first, marks=[pytest.mark.conformance] if first else []) for first in range(0, COUNT, CHUNK)],
)


@by_chunk
def test_random_problems(first, monkeypatch):
    faults = []
    for number in range(first, first + CHUNK):
        tensors, options, mask, keep, ids = draw(number)
        monkeypatch.setattr(recurrence_module, "SMALLEST_SEGMENT", (256, 48)[number % 2])
        monkeypatch.setattr(recurrence_module, "SEGMENT", (2**14, 1)[number % 2])
        gates = {name: tensors.get(name) for name in ("decay", "beta")}
        first_three = [tensors[name] for name in ("query", "key", "value")]
        ours = regard.linear_attention(*first_three, mask=mask, **options, **gates)
        truth = definition(*first_three, keep=keep, ids=ids, **options, **gates)
        upstream = torch.randn_like(truth)
        found, expected = (
            torch.autograd.grad(out, list(tensors.values()), upstream, materialize_grads=True, allow_unused=True)
            if out.requires_grad
            else [torch.zeros_like(tensor) for tensor in tensors.values()]
            for out in (ours, truth)
        )
        try:
            torch.testing.assert_close(ours, truth, rtol=1e-8, atol=1e-9)
            for name, one, other in zip(tensors, found, expected, strict=True):
                scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
                torch.testing.assert_close(
                    one / scale, other / scale, rtol=1e-7, atol=1e-8, msg=lambda m, n=name: n + m
                )
        except (AssertionError, ValueError) as error:
            faults.append(f"problem {number}, {options}, mask {mask}: {error}")
    assert not faults, "\n".join(faults[:3]) + f"\n{len(faults)} of {CHUNK}"


def results(compute, tensors, dtype):
    """The output and the gradient of each tensor, all in this dtype."""
    leaves = {name: tensor.detach().to(dtype).requires_grad_() for name, tensor in tensors.items()}
    gates = {name: leaves.get(name) for name in ("decay", "beta")}
    output = compute(leaves["query"], leaves["key"], leaves["value"], **gates)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    if not output.requires_grad:
        return [output, *(torch.zeros_like(leaf) for leaf in leaves.values())]
    gradients = torch.autograd.grad(output, list(leaves.values()), upstream, materialize_grads=True, allow_unused=True)
    return [output.detach(), *gradients]


@by_chunk
def test_random_problems_in_float32(first):
    """Errors of at most twice those of the definition, and 32 roundings: the delta rule solves systems."""
    faults = []
    for number in range(first, first + CHUNK // 2):
        tensors, options, mask, keep, ids = draw(number)
        if options["normalize"] and isinstance(options["feature_map"], Relu | FavorPlus):
            continue  # totals may be almost 0, and gradients are then inaccurate in any order of the sums
        truth, plain, ours = (
            results(compute, tensors, dtype)
            for compute, dtype in (
                (partial(definition, keep=keep, ids=ids, **options), torch.float64),
                (partial(definition, keep=keep, ids=ids, **options), torch.float32),
                (partial(regard.linear_attention, mask=mask, **options), torch.float32),
            )
        )
        # A gradient that is 0, as that of a decay of nothing, is a difference of terms as large as other gradients.
        largest = [float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in truth]
        magnitudes = [largest[0], *(max(largest[1:]) for _ in largest[1:])]
        if isinstance(options["feature_map"], UnitNorm) and tensors["key"].numel() and tensors["query"].numel():
            # Its gradient is a difference of terms that are divided by the norm.
            norms = [float(tensors[name].detach().norm(dim=-1).min().clamp(1e-12, 1.0)) for name in ("query", "key")]
            magnitudes[1:3] = [magnitude / norm for magnitude, norm in zip(magnitudes[1:3], norms, strict=True)]
        for name, exact, formula, found, magnitude in zip(
            ("output", *tensors), truth, plain, ours, magnitudes, strict=True
        ):
            if exact.numel():
                error, budget = ((one - exact).abs().max().item() for one in (found, formula))
                if not error <= 2 * budget + 32 * torch.finfo(torch.float32).eps * magnitude:
                    faults.append(f"problem {number}, {name}: error {error:.2g}, of the definition {budget:.2g}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("number", [512, 1854])
def test_totals_that_underflow_leave_gradients_finite(number):
    """Behind the end of a short document, a strong decay leaves totals whose reciprocals are infinite."""
    tensors, options, mask, *_ = draw(number)
    found = results(partial(regard.linear_attention, mask=mask, **options), tensors, torch.float32)
    assert all(tensor.isfinite().all() for tensor in found)


def draw_steps(number):
    """A causal float32 problem of wide heads, and after how many positions it is decoded one by one."""
    choose = random.Random(SEED - number)
    torch.manual_seed(SEED - number)
    delta = choose.random() < 0.4
    normalize = not delta and choose.random() < 0.7
    maps = [Elu(), Elu(), Relu(), Softmax()] + [Identity()] * (not normalize)
    feature_map = UnitNorm(Identity()) if delta else choose.choice(maps)
    batch, key_heads, group, length = choose.choice((1, 2)), choose.choice((1, 2)), choose.choice((1, 1, 3)), 26
    dim, value_dim = choose.choice((1, 17, 48, 64)), choose.choice((3, 32, 65))
    tensors = {
        "query": torch.randn(batch, key_heads * group, length, dim),
        "key": torch.randn(batch, key_heads, length, dim) * dim**-0.5,
        "value": torch.randn(batch, key_heads, length, value_dim),
    }
    gates = batch, key_heads, length
    if choose.random() < 0.6:
        tensors["decay"] = -choose.choice((0.01, 1.0, 100.0)) * torch.rand(choose.choice((gates, (*gates, dim))))
    if delta:
        tensors["beta"] = 2 * torch.rand(gates)
    options = {"feature_map": feature_map, "normalize": normalize, "causal": True, "scale": choose.choice((1.0, 0.5))}
    return tensors, options, choose.randint(0, 5)


@by_chunk
def test_random_problems_in_steps(first):
    """Sequences continued token by token, with states that branch, are the definition in float64.

    Errors of at most twice those of the definition in float32: of a row whose weights are all e^-100, it has none left.
    """
    faults = []
    for number in range(first, first + CHUNK // 5):
        tensors, options, prefill = draw_steps(number)
        keep = torch.ones(len(tensors["key"]), tensors["key"].shape[2], dtype=torch.bool)
        truth, plain = (
            definition(
                *(tensors[name].to(dtype) for name in ("query", "key", "value")),
                **{name: tensors[name].to(dtype) if name in tensors else None for name in ("decay", "beta")},
                keep=keep,
                ids=keep.long(),
                **options,
            )
            for dtype in (torch.float64, torch.float32)
        )
        outputs, state = [], None
        for start in (0, *range(prefill, keep.shape[1])) if prefill else range(keep.shape[1]):
            end = prefill if start == 0 and prefill else start + 1
            part = {name: tensor[:, :, start:end] for name, tensor in tensors.items()}
            regard.linear_attention(**part | {"value": -part["value"]}, **options, state=state)  # another branch
            output, state = regard.linear_attention_with_state(**part, **options, state=state)
            outputs.append(output)
        error, budget = ((found - truth).abs().max() / truth.abs().max() for found in (torch.cat(outputs, 2), plain))
        if not error <= 1e-4 + 2 * budget:
            faults.append(f"problem {number}, {options}: error {error:.2g} of the largest number")
    assert not faults, "\n".join(faults)
