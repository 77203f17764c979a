"""Biases of a call's content against their formulas in float64: kernels, gradients, masks, heads, steps, lenses."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.nn.functional import logsigmoid

import regard
from regard import biases, lenses, masks, native
from regard.biases import distance_tables, relative_vectors
from regard.biases.base import bias_parts
from regard.biases.distance_index import ClippedDistances, EachDistance, LogBuckets
from regard.biases.distance_tables import QueryVectors
from regard.core.grid import Grid
from regard.errors import ConfigurationError, DtypeError, KernelError, ShapeError
from regard.kernels.validation import make_problem

DIM, HEADS, KEY_HEADS = 8, 4, 2


def drawn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def distances(at, has):
    """Key position - query position, (M, N)."""
    return has[None, :] - at[:, None]


@dataclass(frozen=True)
class Content:
    """One kind of bias: draws its tensors for N keys, builds the library's bias, and computes its values in float64."""

    draw: Callable[..., Any]
    build: Callable[..., Any]
    values: Callable[..., Any]  # of query, key with all heads, positions of both, scale, and the tensors


def gate_values(query, key, at, has, scale, gates):
    sums = gates.cumsum(-1)
    rows = sums[..., torch.searchsorted(has, at)]
    return rows[..., :, None] - sums[..., None, :]


def both_gate_values(query, key, at, has, scale, before, after):
    away = distances(at, has)
    backward = -gate_values(query, key, at, has, scale, after)
    return torch.where(away <= 0, gate_values(query, key, at, has, scale, before), backward)


def shaw_values(query, key, at, has, scale, vectors):
    chosen = vectors[:, distances(at, has).clamp(-5, 2) + 5]  # [H, M, N, D]
    return scale * torch.einsum("bhid,hijd->bhij", query, chosen)


def bucket_of(n, buckets, most):
    """DeBERTa's bucket of one distance, as its code has it, with the logarithm in float64."""
    middle = buckets // 2
    if abs(n) <= middle:
        return n
    share = math.log(abs(n) / middle) / math.log((most - 1) / middle) * (middle - 1)
    return int(math.copysign(math.ceil(share - 1e-9) + middle, n))


def deberta_values(query, key, at, has, scale, keys, queries):
    span = keys.shape[1] // 2
    away = distances(at, has)
    index = torch.tensor(
        [[min(max(bucket_of(-int(d), span, 20) + span, 0), 2 * span - 1) for d in row] for row in away]
    )
    by_query = torch.einsum("bhid,hijd->bhij", query, keys[:, index])
    return scale * (by_query + torch.einsum("bhjd,hijd->bhij", key, queries[:, index]))


def transformer_xl_values(query, key, at, has, scale, weight, content, position):
    width = weight.shape[-1]
    angles = -distances(at, has)[..., None] * 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    vectors = torch.einsum("hde,ije->hijd", weight, torch.cat([angles.sin(), angles.cos()], -1))
    by_query = torch.einsum("bhid,hijd->bhij", query + position[:, None], vectors)
    return scale * (by_query + torch.einsum("hd,bhjd->bhj", content, key)[..., None, :])


def sum_values(query, key, at, has, scale, vectors, gates, slopes):
    common = query, key, at, has, scale
    return (
        shaw_values(*common, vectors) + gate_values(*common, gates) - slopes[:, None, None] * distances(at, has).abs()
    )


def cope_values(query, key, at, has, scale, vectors):
    keep = has[None, :] <= at[:, None]
    counted = torch.sigmoid(scale * query @ key.mT) * keep
    places = torch.stack([counted[..., j:].sum(-1) for j in range(len(has))], -1).clamp(max=vectors.shape[1] - 1)
    table = torch.einsum("bhid,hpd->bhip", query, vectors)
    low, high = places.detach().floor().long(), places.detach().ceil().long()
    share = places - low
    return (1 - share) * table.gather(-1, low) + share * table.gather(-1, high)


def tupe_values(query, key, at, has, scale, queries, keys, from_first, to_first):
    values = scale * queries[:, at] @ keys[:, has].mT
    values = torch.where(has[None, :] == 0, to_first[:, None, None], values)
    return torch.where(at[:, None] == 0, from_first[:, None, None], values)


def landmark_values(query, key, at, has, scale):
    """As Mohtashami and Jaggi write it: a softmax in each block, times that of its landmark; as a logarithm."""
    scores = (scale * query @ key.mT).masked_fill(has[None, :] > at[:, None], -math.inf)
    own, landmark = at[:, None] // 5 == has // 5, has % 5 == 4
    outer = scores.masked_fill(~own & ~landmark | own & landmark, -math.inf).logsumexp(-1, keepdim=True)
    logs = torch.where(own & ~landmark, scores - outer, -math.inf)
    for block in range(int(has[-1]) // 5 + 1):
        inside = (has // 5 == block) & ~landmark
        if not (has // 5 == block)[landmark].any():
            continue
        gate = scores[..., has == 5 * block + 4] - outer
        within = scores - scores.masked_fill(~inside, -math.inf).logsumexp(-1, keepdim=True)
        logs = torch.where(inside & ~own & (has[None, :] <= at[:, None]), gate + within, logs)
    return logs - scores.masked_fill(has[None, :] > at[:, None], 0.0)


def path_values(query, key, at, has, scale, vectors, beta):
    """k_j · H_j+1 … H_i q_i less k_j · q_i, one reflection after the other from the query's own on."""
    moved, columns = query, []
    for j in range(len(has) - 1, -1, -1):
        columns.append(((moved - query) * key[..., j : j + 1, :]).sum(-1))
        w, strength = vectors[..., j, :].unsqueeze(-2), beta[..., j, None, None]
        w, strength = (each.repeat_interleave(HEADS // each.shape[-3], -3) for each in (w, strength))
        reflected = moved - strength * (moved * w).sum(-1, keepdim=True) * w
        moved = torch.where((has[j] <= at)[:, None], reflected, moved)
    return scale * torch.stack(columns[::-1], -1)


def reflections(keys, seed=7):
    """Unit vectors and strengths of the key heads."""
    vectors = torch.nn.functional.normalize(drawn(2, KEY_HEADS, keys, DIM, seed=seed), dim=-1)
    return [vectors, 2 * drawn(2, KEY_HEADS, keys, seed=seed + 1).sigmoid()]


def gates(keys, seed=5):
    return logsigmoid(drawn(2, HEADS, keys, seed=seed) + 1.0)


CONTENTS = {
    "gates": Content(lambda keys: [gates(keys)], biases.forget_gates, gate_values),
    "gates of both directions": Content(
        lambda keys: [gates(keys), gates(keys, 6)], biases.forget_gates, both_gate_values
    ),
    "shaw": Content(
        lambda keys: [drawn(HEADS, 8, DIM, seed=1)], lambda v: biases.shaw(v, before=5, after=2), shaw_values
    ),
    "deberta": Content(
        lambda keys: [drawn(HEADS, 16, DIM, seed=1), drawn(HEADS, 16, DIM, seed=2)],
        lambda k, q: biases.deberta(k, q, buckets=8, max_distance=20),
        deberta_values,
    ),
    "transformer-xl": Content(
        lambda keys: [drawn(HEADS, DIM, 6, seed=1), drawn(HEADS, DIM, seed=2), drawn(HEADS, DIM, seed=3)],
        biases.transformer_xl,
        transformer_xl_values,
    ),
    "cope": Content(lambda keys: [drawn(HEADS, 7, DIM, seed=1)], biases.cope, cope_values),
    "tupe": Content(
        lambda keys: [*drawn(2, HEADS, keys, DIM, seed=1).unbind(), drawn(HEADS, seed=2), drawn(HEADS, seed=3)],
        lambda q, k, f, t: biases.tupe(q, k, from_first=f, to_first=t),
        tupe_values,
    ),
    "landmarks": Content(lambda keys: [], lambda: biases.landmarks(5), landmark_values),
    "path": Content(reflections, biases.path, path_values),
    "path and gates": Content(
        lambda keys: [*reflections(keys), gates(keys)],
        lambda w, b, g: biases.path(w, b) + biases.forget_gates(g),
        lambda q, k, a, h, s, w, b, g: path_values(q, k, a, h, s, w, b) + gate_values(q, k, a, h, s, g),
    ),
    "sum": Content(
        lambda keys: [drawn(HEADS, 8, DIM, seed=1), gates(keys), drawn(HEADS, seed=4).abs()],
        lambda v, g, s: biases.shaw(v, before=5, after=2) + biases.forget_gates(g) + biases.alibi(s),
        sum_values,
    ),
}
KERNELS = ("reference", "tiled", "short", "cpu_flash")
IN_C = CONTENTS.keys() - {"gates of both directions", "cope", "tupe", "path", "path and gates"}


def inputs(queries, keys, dtype=torch.float64):
    return [
        drawn(2, HEADS, queries, DIM, seed=10).to(dtype),
        drawn(2, KEY_HEADS, keys, DIM, seed=11).to(dtype),
        drawn(2, KEY_HEADS, keys, DIM + 1, seed=12).to(dtype),
    ]


def leaves(tensors, dtype):
    return [tensor.to(dtype).requires_grad_() for tensor in tensors]


def truth(content, tensors, keep, at, has, sinks=None):
    """Output by the formula in float64."""
    query, key, value, *own = tensors
    scale = query.shape[-1] ** -0.5
    key, value = (each.repeat_interleave(HEADS // KEY_HEADS, 1) for each in (key, value))
    scores = scale * query @ key.mT + content.values(query, key, at, has, scale, *own)
    scores = scores.masked_fill(~keep, -float("inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(*scores.shape[:-1], 1)], -1)
    peak = scores.amax(-1, keepdim=True).clamp(min=-1e30)
    powers = (scores - peak).exp()
    total = powers.sum(-1, keepdim=True)
    return (powers / torch.where(total == 0, 1.0, total))[..., : value.shape[-2]] @ value


def assert_close(found, expected, dtype, what):
    error = (found.double() - expected).abs().max().item()
    allowed = 64 * torch.finfo(dtype).eps * max(expected.abs().max().item(), 1.0)
    assert error <= allowed, f"{what}: {error} above {allowed}"


def check(content, queries, keys, kernel, dtype, mask, keep, sinks=None, **options):
    plain = [*inputs(queries, keys), *content.draw(keys)]
    at = torch.arange(keys - queries, keys)
    ours, exact = leaves(plain, dtype), leaves([each.to(dtype) for each in plain], torch.float64)
    extra = [] if sinks is None else [leaves([sinks], each)[0] for each in (dtype, torch.float64)]
    output = regard.attention(
        *ours[:3], bias=content.build(*ours[3:]), mask=mask, kernel=kernel, sinks=extra[0] if extra else None, **options
    )
    expected = truth(content, exact, keep, at, torch.arange(keys), extra[1] if extra else None)
    assert_close(output, expected, dtype, "output")
    upstream = drawn(*expected.shape, seed=20)
    output.backward(upstream.to(dtype))
    expected.backward(upstream.to(dtype).double())
    for number, (mine, theirs) in enumerate(zip([*ours, *extra[:1]], [*exact, *extra[1:]], strict=True)):
        assert mine.grad is not None, number
        assert_close(mine.grad, theirs.grad, dtype, f"gradient {number}")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CONTENTS)
def test_every_kernel_computes_the_formula_and_all_gradients(name, kernel):
    if kernel in ("short", "cpu_flash") and native.why_not():
        pytest.skip(str(native.why_not()))
    if kernel == "cpu_flash" and name not in IN_C:
        pytest.skip("not in C: the test of why_not")
    keep = torch.ones(67, 131).tril(131 - 67).bool()
    check(CONTENTS[name], 67, 131, kernel, torch.float32, masks.causal(), keep)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", CONTENTS)
def test_batches_of_one_and_numbers_that_all_batches_share(name, kernel, batch):
    if kernel in ("short", "cpu_flash") and native.why_not():
        pytest.skip(str(native.why_not()))
    if kernel == "cpu_flash" and name not in IN_C:
        pytest.skip("not in C: the test of why_not")
    tensors = [each[:batch] for each in inputs(11, 11)]
    own = [each[:1] if each.shape[0] == 2 else each for each in CONTENTS[name].draw(11)]
    at, keep = torch.arange(11), torch.ones(11, 11).tril().bool()
    ours, exact = leaves([*tensors, *own], torch.float32), leaves([*tensors, *own], torch.float64)
    bias = CONTENTS[name].build(*ours[3:])
    regard.attention(*ours[:3], bias=bias, mask=masks.causal(), kernel=kernel).square().sum().backward()
    truth(CONTENTS[name], exact, keep, at, at).square().sum().backward()
    for number, (mine, theirs) in enumerate(zip(ours, exact, strict=True)):
        assert mine.grad is not None, number
        assert theirs.grad is not None, number
        assert_close(mine.grad, theirs.grad, torch.float32, f"gradient {number}")


@pytest.mark.parametrize("kernel", ["tiled", "cpu_flash"])
@pytest.mark.parametrize("name", sorted(IN_C - {"landmarks"}))  # whose numbers depend on the mask: test_landmarks.py
def test_masks_with_empty_rows_and_hidden_keys_and_sinks(name, kernel):
    if kernel == "cpu_flash" and native.why_not():
        pytest.skip(str(native.why_not()))
    keep = drawn(2, HEADS, 37, 53, seed=30) > 0.3
    keep[..., 5, :] = False
    keep[..., 7] = False
    sinks = drawn(HEADS, seed=31)
    check(CONTENTS[name], 37, 53, kernel, torch.float32, masks.where(keep=keep), keep, sinks)


def test_cope_counts_the_keys_that_any_mask_leaves():
    query, key, value, vectors = [*inputs(37, 53), drawn(HEADS, 7, DIM, seed=1)]
    keep = drawn(2, HEADS, 37, 53, seed=30) > 0.3
    keep[..., 5, :] = False
    wide = key.repeat_interleave(2, 1)
    scores = DIM**-0.5 * query @ wide.mT
    counted = scores.sigmoid() * keep
    places = torch.stack([counted[..., j:].sum(-1) for j in range(53)], -1).clamp(max=6)
    table, low = query @ vectors.mT, places.floor().long()
    added = table.gather(-1, low) + (places - low) * (table.gather(-1, (low + 1).clamp(max=6)) - table.gather(-1, low))
    weights = (scores + added).masked_fill(~keep, -math.inf).softmax(-1).nan_to_num(0.0)
    for kernel in ("reference", "tiled"):
        found = regard.attention(query, key, value, bias=biases.cope(vectors), mask=keep, kernel=kernel)
        torch.testing.assert_close(found, weights @ value.repeat_interleave(2, 1))


def test_cope_needs_keys_in_the_order_of_their_positions():
    at = torch.tensor([0, 2, 1])
    with pytest.raises(ConfigurationError, match="not in ascending order"):
        regard.attention(*inputs(3, 3), bias=biases.cope(torch.ones(1, 3, DIM)), query_positions=at, key_positions=at)


@pytest.mark.parametrize("name", CONTENTS)
def test_float64_is_exact_to_its_own_precision(name):
    keep = torch.ones(37, 53).tril(53 - 37).bool()
    check(CONTENTS[name], 37, 53, "tiled", torch.float64, masks.causal(), keep)


@pytest.mark.parametrize("name", CONTENTS)
def test_second_derivatives_are_those_of_the_formula(name):
    tensors = [*inputs(5, 7), *CONTENTS[name].draw(7)]
    build, keep = CONTENTS[name].build, masks.causal()

    def attend(query, key, value, *own):
        return regard.attention(query, key, value, bias=build(*own), mask=keep, kernel="tiled")

    assert torch.autograd.gradcheck(attend, leaves(tensors, torch.float64), fast_mode=True)
    assert torch.autograd.gradgradcheck(attend, leaves(tensors, torch.float64), fast_mode=True)


@pytest.mark.parametrize("name", CONTENTS)
@pytest.mark.parametrize("kernel", ["tiled", "cpu_flash", None])
def test_nan_and_infinity_behind_the_mask_affect_nothing(name, kernel):
    if kernel == "cpu_flash" and (native.why_not() or name not in IN_C):
        pytest.skip("not in C")
    content, keep = CONTENTS[name], torch.ones(37, 53).tril(53 - 37).bool()
    keep[:, 40:] = False
    query, key, value, *own = leaves([*inputs(37, 53), *content.draw(53)], torch.float32)
    clean = regard.attention(query, key, value, bias=content.build(*own), mask=keep, kernel=kernel)
    gradients = torch.autograd.grad(clean.square().sum(), [query, key, value, *own])
    with torch.no_grad():
        bad_key, bad_value = key.clone(), value.clone()
        bad_key[:, :, 45], bad_key[:, :, 46] = float("nan"), float("inf")
        bad_value[:, :, 47:] = float("nan")
    bad = [query, bad_key.requires_grad_(), bad_value.requires_grad_(), *own]
    output = regard.attention(*bad[:3], bias=content.build(*own), mask=keep, kernel=kernel)
    torch.testing.assert_close(output, clean)
    for mine, theirs in zip(torch.autograd.grad(output.square().sum(), bad), gradients, strict=True):
        # Of sums in another order: a few roundings of the largest, which is above 60 for some biases.
        rounding = torch.finfo(torch.float32).eps * max(theirs.abs().max().item(), 1.0)
        torch.testing.assert_close(mine, theirs, atol=8 * rounding, rtol=0)


@pytest.mark.parametrize("kernel", ["tiled", "cpu_flash"])
@pytest.mark.parametrize("name", ["transformer-xl", "shaw", "deberta", "sum"])
def test_vectors_by_distance_tile_by_tile_are_those_of_the_formula(name, kernel, monkeypatch):
    if kernel == "cpu_flash" and native.why_not():
        pytest.skip(str(native.why_not()))
    monkeypatch.setattr(relative_vectors, "MOST_COLUMNS", 0)
    monkeypatch.setattr(relative_vectors, "FEW_QUERIES", 0)
    content, keep = CONTENTS[name], torch.ones(67, 131).tril(131 - 67).bool()
    bound = make_problem(*inputs(67, 131), bias=content.build(*content.draw(131))).bias
    assert any(isinstance(part, QueryVectors) for part in bias_parts(bound))
    check(content, 67, 131, kernel, torch.float32, masks.causal(), keep)
    check(content, 131, 131, kernel, torch.float32, None, torch.ones(131, 131).bool())
    if kernel == "tiled":
        check(content, 67, 131, kernel, torch.float64, masks.causal(), keep)


def test_vectors_at_scattered_positions_equal_those_of_a_table(monkeypatch):
    vectors = drawn(1, 2000, DIM)
    query, key, value = inputs(5, 9)
    at, has = torch.tensor([3, 500, 20, 777, 4]), torch.tensor([0, 3, 9, 900, 500, 20, 1, 777, 4])
    index = EachDistance(-1000, 2000)
    scores = DIM**-0.5 * query @ key.repeat_interleave(2, 1).mT
    scores = scores + torch.einsum("bhid,ijd->bhij", query, vectors[0][has[None] - at[:, None] + 1000])
    expected = scores.softmax(-1) @ value.repeat_interleave(2, 1)
    bias = QueryVectors(query, vectors, index)
    output = regard.attention(query, key, value, bias=bias, query_positions=at, key_positions=has, kernel="tiled")
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("name", CONTENTS)
def test_steps_with_positions_are_rows_of_the_whole(name):
    content = CONTENTS[name]
    query, key, value, *own = [*inputs(23, 23), *content.draw(23)]
    whole = regard.attention(query, key, value, bias=content.build(*own), mask=masks.causal())
    last = regard.attention(query[:, :, 21:], key, value, bias=content.build(*own), mask=masks.causal())
    torch.testing.assert_close(last, whole[:, :, 21:])
    if "gates" in name or name in ("sum", "cope", "path"):
        return  # sums along the keys: those of a cache are given in their order
    order = torch.randperm(20, generator=torch.Generator().manual_seed(3))
    step = regard.attention(
        query[:, :, 17:19],
        key[:, :, order],
        value[:, :, order],
        bias=content.build(*own),
        mask=masks.causal(),
        query_positions=torch.tensor([17, 18]),
        key_positions=order,
    )
    torch.testing.assert_close(step, whole[:, :, 17:19])


def test_forget_gates_find_the_queries_by_their_positions():
    (sums,) = (gates(11),)
    query, key, value = inputs(3, 11)
    at, has = torch.tensor([4, 0, 9]), torch.arange(11)
    bias = biases.forget_gates(sums)
    keep = has <= at[:, None]
    scores = DIM**-0.5 * query @ key.repeat_interleave(2, 1).mT + gate_values(None, None, at, has, 1.0, sums)
    expected = scores.masked_fill(~keep, -math.inf).softmax(-1) @ value.repeat_interleave(2, 1)
    for positions in (at, at.expand(2, 3)):
        found = regard.attention(
            query, key, value, bias=bias, mask=masks.causal(), query_positions=positions, key_positions=has
        )
        torch.testing.assert_close(found, expected)
    with pytest.raises(ShapeError, match="at positions that none of the 11 keys has"):
        regard.attention(query, key, value, bias=bias, query_positions=torch.tensor([4, 0, 30]), key_positions=has)


@pytest.mark.parametrize("name", CONTENTS)
def test_lenses_read_the_weights_of_the_formula(name):
    content = CONTENTS[name]
    query, key, value, *own = [each.float() for each in [*inputs(37, 53), *content.draw(53)]]
    asked = lenses.Weights(), lenses.TopK(3), lenses.Entropy()
    seen = regard.observe(query, key, value, *asked, bias=content.build(*own), mask=masks.causal())
    keep = torch.ones(37, 53).tril(53 - 37).bool()
    exact = [each.double() for each in (query, key, torch.eye(53).expand(2, KEY_HEADS, 53, 53), *own)]
    weights = truth(content, exact, keep, torch.arange(16, 53), torch.arange(53))
    assert_close(seen[asked[0]], weights, torch.float32, "weights")
    assert_close(seen[asked[1]].weights, weights.topk(3, -1).values, torch.float32, "largest")
    entropy = -(weights * weights.clamp(min=1e-300).log()).sum(-1)
    assert_close(seen[asked[2]], entropy, torch.float32, "entropy")


def test_forget_gates_are_exact_at_131072_tokens():
    keys, rows = 131072, 16
    query, key, value = drawn(1, 1, rows, 16), drawn(1, 1, keys, 16, seed=1), drawn(1, 1, keys, 16, seed=2)
    own = logsigmoid(drawn(1, 1, keys, seed=3) + 2.0)
    tensors = [each.float() for each in (query, key, value, own)]
    exact = [each.double() for each in tensors]
    sums = exact[3].cumsum(-1)
    assert sums[..., -1] < -20000
    keep = torch.arange(keys) <= torch.arange(keys - rows, keys)[:, None]

    def formula(bias):
        scores = 0.25 * exact[0] @ exact[1].mT + bias
        return scores.masked_fill(~keep, -math.inf).softmax(-1) @ exact[2]

    expected = formula(sums[..., -rows:, None] - sums[..., None, :])
    for kernel in ("tiled", *(() if native.why_not() else ("cpu_flash",))):
        found = regard.attention(*tensors[:3], bias=biases.forget_gates(tensors[3]), mask=masks.causal(), kernel=kernel)
        assert (found - expected).abs().max() < 1e-6, kernel
    rounded = sums.float().double()  # what one float32 number for each sum would give
    assert (formula(rounded[..., -rows:, None] - rounded[..., None, :]) - expected).abs().max() > 1e-4


def test_constant_gates_are_alibi():
    query, key, value = inputs(37, 37)
    slopes = drawn(HEADS, seed=4).abs()
    gates = -slopes[:, None].expand(HEADS, 37)
    by_gates, by_slopes = (
        regard.attention(query, key, value, bias=bias, mask=masks.causal())
        for bias in (biases.forget_gates(gates), biases.alibi(slopes))
    )
    torch.testing.assert_close(by_gates, by_slopes)


def test_inputs_without_heads():
    query, key, value = drawn(2, 11, DIM), drawn(2, 11, DIM, seed=1), drawn(2, 11, DIM, seed=2)
    vectors, gates = drawn(1, 8, DIM, seed=3), logsigmoid(drawn(2, 11, seed=4))
    bias = biases.shaw(vectors, before=5, after=2) + biases.forget_gates(gates)
    with_heads = biases.shaw(vectors, before=5, after=2) + biases.forget_gates(gates[:, None])
    expected = regard.attention(*(each[:, None] for each in (query, key, value)), bias=with_heads)[:, 0]
    for kernel in ("reference", "tiled", None):
        torch.testing.assert_close(regard.attention(query, key, value, bias=bias, kernel=kernel), expected)


def test_several_batch_axes_and_one_table_for_all_batches():
    query, key, value = (drawn(3, 2, 4, 19, DIM, seed=seed) for seed in range(3))
    gates, vectors = logsigmoid(drawn(2, 4, 19, seed=4)), drawn(1, 8, DIM, seed=5)

    def results(kernel):
        own = leaves([query, key, value, gates, vectors], torch.float64)
        bias = biases.forget_gates(own[3]) + biases.shaw(own[4], before=5, after=2)
        output = regard.attention(*own[:3], bias=bias, mask=masks.causal(), kernel=kernel)
        return output, *torch.autograd.grad(output.square().sum(), own)

    for mine, theirs in zip(results("tiled"), results("reference"), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.skipif(bool(native.why_not()), reason="no native code")
def test_flash_refuses_by_name_what_its_code_does_not_add():
    query, key, value = inputs(67, 67, torch.float32)
    own = gates(67).float()
    for bias in (biases.forget_gates(own, own), biases.forget_gates(own) + biases.forget_gates(own)):
        with pytest.raises(KernelError, match="forget gates, tables or vectors of queries"):
            regard.attention(query, key, value, bias=bias, kernel="cpu_flash")


def test_long_windows_go_by_tiles_in_c_as_in_torch():
    if native.why_not():
        pytest.skip(str(native.why_not()))
    query, key, value = inputs(300, 300, torch.float32)
    own, mask = gates(300).float(), masks.causal() & masks.window(before=20)
    results = [
        regard.attention(query, key, value, bias=biases.forget_gates(own), mask=mask, kernel=kernel, softcap=5.0)
        for kernel in ("cpu_flash", "tiled")
    ]
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: biases.forget_gates(torch.zeros(3, dtype=torch.int64)), DtypeError, "log_gates needs floating-point"),
        (lambda: biases.shaw(torch.zeros(2, 3, 4), before=1, after=2), ShapeError, r"needs vectors \(heads, 4, D\)"),
        (lambda: biases.shaw(torch.zeros(2, 3, 4), before=-1, after=2), ConfigurationError, "distances of at least 0"),
        (
            lambda: biases.shaw(torch.zeros(2, 2, 4).long(), before=1, after=0),
            DtypeError,
            "needs floating-point vectors",
        ),
        (lambda: biases.deberta(None, None), ConfigurationError, "needs keys=, queries= or both"),
        (
            lambda: biases.deberta(torch.zeros(1, 4, 2), None, buckets=3),
            ConfigurationError,
            "buckets of an even number",
        ),
        (lambda: biases.deberta(torch.zeros(1, 4, 2), None, buckets=8), ShapeError, r"needs vectors \(heads, 16, D\)"),
        (lambda: biases.transformer_xl(torch.zeros(1, 4, 3), *[torch.zeros(1, 4)] * 2), ShapeError, "an even E"),
        (lambda: biases.cope(torch.zeros(4, 4)), ShapeError, r"needs vectors \(heads, positions, D\)"),
        (lambda: biases.tupe(torch.zeros(1, 4, 3), torch.zeros(1, 4, 2)), ShapeError, "queries and keys of one D"),
        (lambda: biases.tupe(torch.zeros(4, 3), torch.zeros(1, 4, 2)), ShapeError, r"\(heads, positions, D\)"),
        (lambda: biases.transformer_xl(torch.zeros(4, 4), *[torch.zeros(1, 4)] * 2), ShapeError, r"\(heads, D, E\)"),
    ],
)
def test_arguments_that_do_not_fit_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (biases.forget_gates(torch.zeros(HEADS, 5)), ShapeError, "one gate for each key"),
        (biases.forget_gates(torch.zeros(3, 7)), ShapeError, "one gate for each key"),
        (biases.shaw(torch.zeros(HEADS, 2, 5), before=1, after=0), ShapeError, "4 heads of 8 features"),
        (biases.shaw(torch.zeros(3, 2, DIM), before=1, after=0), ShapeError, "4 heads of 8 features, it is for 3 of 8"),
    ],
)
def test_what_does_not_fit_a_call_is_named(bias, error, message):
    with pytest.raises(error, match=message):
        regard.attention(*inputs(7, 7), bias=bias)


def test_an_additive_score_has_no_queries_to_multiply():
    query, key, value = (each.float() for each in inputs(7, 7))
    score = regard.scores.Additive(DIM, DIM, 5)
    with pytest.raises(ConfigurationError, match="the score of this call is no such product"):
        regard.attention(query, key, value, score=score, bias=biases.shaw(torch.zeros(1, 2, DIM), before=1, after=0))
    gated = regard.attention(query, key, value, score=score, bias=biases.forget_gates(gates(7).float()))
    assert gated.isfinite().all()


def test_a_bias_of_content_has_no_values_of_its_own():
    for bias in (biases.forget_gates(torch.zeros(3)), biases.shaw(torch.zeros(1, 2, DIM), before=1, after=0)):
        with pytest.raises(ConfigurationError, match="give it to regard.attention as bias="):
            bias.evaluate(Grid.from_lengths(3, 3))


@pytest.mark.parametrize(("buckets", "most"), [(8, 20), (16, 64), (4, 16), (256, 512), (64, 512)])
def test_log_buckets_are_those_of_transformers(buckets, most):
    module = pytest.importorskip("transformers.models.deberta_v2.modeling_deberta_v2")
    away = torch.arange(-3 * most, 3 * most + 1)
    theirs = module.make_log_bucket_position(-away, buckets, most).long() + buckets
    index = LogBuckets(buckets, most)
    assert torch.equal(index(away), theirs.clamp(0, 2 * buckets - 1))
    assert index.gradual == (index(away).diff().abs().max().item() <= 1)


def test_tables_with_few_columns_and_steps_of_several_are_read_as_they_are():
    if native.why_not():
        pytest.skip(str(native.why_not()))
    index = LogBuckets(8, 7)  # some buckets are empty: neighbouring distances are two columns apart
    assert not index.gradual
    query, key, value = inputs(67, 67, torch.float32)
    bias = distance_tables.QueryTable(drawn(2, HEADS, 67, index.count).float(), index)
    with pytest.raises(KernelError, match="tables or vectors of queries and keys by distance"):
        regard.attention(query, key, value, bias=bias, kernel="cpu_flash")
    assert ClippedDistances(2, 1).gradual


def test_mapped_calls_are_those_one_after_another():
    query, key, value = inputs(11, 11, torch.float32)
    own, vectors = gates(11).float(), drawn(HEADS, 8, DIM).float()

    def attend(query, own):
        bias = biases.forget_gates(own) + biases.shaw(vectors, before=5, after=2)
        return regard.attention(query[None], key[:1], value[:1], bias=bias, mask=masks.causal())[0]

    whole = torch.stack([attend(query[0], own[0]), attend(query[1], own[1])])
    torch.testing.assert_close(torch.func.vmap(attend)(query, own), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["tiled", "short", "cpu_flash"])
def test_half_precision_is_that_of_its_inputs(kernel, dtype):
    if kernel != "tiled" and native.why_not():
        pytest.skip(str(native.why_not()))
    content, keep = CONTENTS["sum"], torch.ones(67, 131).tril(131 - 67).bool()
    ours = leaves([*inputs(67, 131), *content.draw(131)], dtype)
    exact = leaves([each.detach().double() for each in ours], torch.float64)
    output = regard.attention(*ours[:3], bias=content.build(*ours[3:]), mask=masks.causal(), kernel=kernel)
    expected = truth(content, exact, keep, torch.arange(64, 131), torch.arange(131))
    upstream = drawn(*expected.shape, seed=20).to(dtype)
    found = torch.autograd.grad(output, ours, upstream)
    for mine, theirs in zip(
        (output, *found), (expected, *torch.autograd.grad(expected, exact, upstream.double())), strict=True
    ):
        assert (mine.double() - theirs).abs().max() <= 4 * torch.finfo(dtype).eps * theirs.abs().max().clamp(min=1.0)


@pytest.mark.parametrize(
    "normalizer",
    [regard.normalizers.Sigmoid(), regard.normalizers.Entmax(1.5), regard.normalizers.StickBreaking()],
    ids=lambda each: type(each).__name__,
)
def test_other_normalizers_take_the_same_scores(normalizer):
    content = CONTENTS["sum"]

    def results(kernel):
        own = leaves([*inputs(37, 53), *content.draw(53)], torch.float32)
        options = {"mask": masks.causal(), "normalizer": normalizer, "kernel": kernel}
        output = regard.attention(*own[:3], bias=content.build(*own[3:]), **options)
        return output, *torch.autograd.grad(output.square().sum(), own)

    expected = results("reference")
    for kernel in ("tiled", None):
        for mine, theirs in zip(results(kernel), expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_a_compiled_call_is_one_graph():
    query, key, value = inputs(37, 53, torch.float32)
    tensors = leaves([query, gates(53)], torch.float32)
    vectors = drawn(HEADS, 8, DIM).float()

    def attend(query, own):
        bias = biases.forget_gates(own) + biases.shaw(vectors, before=5, after=2)
        return regard.attention(query, key, value, bias=bias, mask=masks.causal())

    compiled = torch.compile(attend, backend="aot_eager", fullgraph=True)
    for mine, theirs in zip(
        torch.autograd.grad(compiled(*tensors).square().sum(), tensors),
        torch.autograd.grad(attend(*tensors).square().sum(), tensors),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mask", [masks.causal(), masks.causal() & masks.window(before=9), masks.window(4, 3)], ids=repr
)
def test_a_mask_by_distance_leaves_a_table_the_columns_that_it_reaches(mask):
    content, at = CONTENTS["deberta"], torch.arange(67)
    own = leaves([*inputs(67, 67), *content.draw(67)], torch.float64)
    away = distances(at, at)
    keep = mask.evaluate(Grid.from_lengths(67, 67)).expand(67, 67)
    bound = make_problem(*own[:3], mask=mask, bias=content.build(*own[3:])).bias
    count = len(LogBuckets(8, 20)(away[keep]).unique())
    parts: list[Any] = list(bias_parts(bound))
    assert [part.table.shape[-1] for part in parts] == [count, count]
    output = regard.attention(*own[:3], mask=mask, bias=content.build(*own[3:]), kernel="tiled")
    exact = leaves([each.detach() for each in own], torch.float64)
    expected = truth(content, exact, keep, at, at)
    torch.testing.assert_close(output, expected)
    for mine, theirs in zip(
        torch.autograd.grad(output.square().sum(), own),
        torch.autograd.grad(expected.square().sum(), exact),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("queries", "keys", "named"), [(5, 7, "queries"), (7, 5, "keys"), (0, 7, "queries")])
def test_tupe_names_the_vectors_that_it_has_and_needs(queries, keys, named):
    """By the long way, and where a call of another number of vectors is remembered."""
    query = torch.randn(1, 2, 7, 4)
    for has in ((7, 7), (7, 7), (queries, keys), (queries, keys)):
        bias = biases.tupe(torch.randn(2, has[0], 4), torch.randn(2, has[1], 4))
        if has == (7, 7):
            regard.attention(query, query, query, bias=bias)
            continue
        message = f"has {min(has)} vectors as {named}.*{named} of this call sit at positions up to 6: it needs 7"
        with pytest.raises(ConfigurationError, match=message):
            regard.attention(query, query, query, bias=bias)


def test_tupe_of_padding_on_the_left():
    """Positions below 0, that a mask hides, have no vector of their own, however many they are."""
    tables = drawn(2, 1, 4, 6)
    query, key, value = drawn(1, 1, 4, 6, seed=1), drawn(1, 1, 10, 6, seed=2), drawn(1, 1, 10, 6, seed=3)
    at = range(-6, 4)
    options = {"mask": masks.causal() & ~masks.prefix(0), "bias": biases.tupe(*tables)}
    found = regard.attention(query, key, value, query_positions=range(4), key_positions=at, **options)
    expected = regard.attention(query, key[..., 6:, :], value[..., 6:, :], mask=masks.causal(), bias=options["bias"])
    torch.testing.assert_close(found, expected)
