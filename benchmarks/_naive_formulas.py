"""Formulas of mechanisms over all pairs, or step by step, as one writes them in torch: what benchmarks compare with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv2d, logsigmoid, one_hot, pad, rms_norm

INFINITY = float("inf")


def softmax(scores: Tensor, keep: Tensor | None = None) -> Tensor:
    """Softmax over the keys that are kept."""
    return (scores if keep is None else scores.masked_fill(~keep, -INFINITY)).softmax(-1)


def softmax_or_nothing(scores: Tensor, keep: Tensor) -> Tensor:
    """Softmax over the keys that are kept, 0 in rows without any."""
    return softmax(scores, keep).masked_fill(~keep, 0.0)


def with_one_more(scores: Tensor, more: Tensor) -> Tensor:
    """Softmax with one more score in each row, whose weight is left out."""
    return torch.cat([scores, more.expand(*scores.shape[:-1], 1)], -1).softmax(-1)[..., :-1]


def softpick(scores: Tensor, keep: Tensor) -> Tensor:
    exponentials = (scores.exp() - 1) * keep
    return exponentials.relu() / (exponentials.abs().sum(-1, keepdim=True) + 1e-9)


def squared_relu(scores: Tensor) -> Tensor:
    squares = scores.relu().square()
    return squares / squares.sum(-1, keepdim=True).clamp(min=1e-9)


def stick_breaking(scores: Tensor, keep: Tensor) -> Tensor:
    left = logsigmoid(-scores).masked_fill(~keep, 0.0)
    return (logsigmoid(scores) + left.flip(-1).cumsum(-1).flip(-1) - left).exp() * keep


def largest(scores: Tensor, count: int) -> Tensor:
    return softmax(scores, scores >= scores.topk(count, -1).values[..., -1:])


def hard(scores: Tensor) -> Tensor:
    """The largest score alone, with the gradient of softmax."""
    soft = scores.softmax(-1)
    return one_hot(scores.argmax(-1), scores.shape[-1]) + soft - soft.detach()


def monotonic(stops: Tensor) -> Tensor:
    """The authors' form: a cumulative product and sum for each query."""
    left = torch.cat([torch.ones_like(stops[..., :1]), (1 - stops[..., :-1]).cumprod(-1)], -1).clamp(min=1e-10)
    row = torch.zeros_like(stops[..., 0, :])
    row[..., 0] = 1
    rows = []
    for stop, through in zip(stops.unbind(-2), left.unbind(-2), strict=True):
        row = stop * through * (row / through).cumsum(-1)
        rows.append(row)
    return torch.stack(rows, -2)


def mocha(scores: Tensor, width: int, bias: float) -> Tensor:
    """The authors' form: moving sums of the exponentials backwards, and of their shares forwards."""
    exponentials = scores.exp()
    sums = pad(exponentials, (width - 1, 0)).unfold(-1, width, 1).sum(-1)
    return exponentials * pad(monotonic((scores + bias).sigmoid()) / sums, (0, width - 1)).unfold(-1, width, 1).sum(-1)


def mixed(matrix: Tensor, pairs: Tensor) -> Tensor:
    return torch.einsum("gh,bhij->bgij", matrix, pairs)


def convolved(kernel: Tensor, pairs: Tensor) -> Tensor:
    """Over queries up to the own and keys around, each head by itself."""
    _, queries, keys = kernel.shape
    padded = pad(pairs, (keys // 2, keys // 2, queries - 1, 0))
    return conv2d(padded, kernel.unsqueeze(1), groups=len(kernel))


def multi_token(scores: Tensor, keep: Tensor, kernels: Sequence[Tensor], matrices: Sequence[Tensor]) -> Tensor:
    near = mixed(matrices[0], convolved(kernels[0], scores.masked_fill(~keep, 0.0)))
    return mixed(matrices[1], convolved(kernels[1], softmax(near, keep)).masked_fill(~keep, 0.0))


# --- positions


def t5_bucket(relative: Tensor, buckets: int = 32, far: int = 128) -> Tensor:
    half, away = buckets // 2, relative.abs()
    small = half // 2
    logarithmic = (small + (away.clamp(min=1) / small).log() / math.log(far / small) * (half - small)).long()
    return torch.where(away < small, away, logarithmic.clamp(max=half - 1)) + half * (relative > 0)


def deberta_bucket(distance: Tensor, span: int, far: int) -> Tensor:
    middle = span // 2
    logarithmic = (distance.abs().clamp(min=1) / middle).log() / math.log((far - 1) / middle) * (middle - 1)
    beyond = ((logarithmic - 1e-6).ceil() + middle) * distance.sign()
    return (torch.where(distance.abs() <= middle, distance, beyond.long()) + span).clamp(0, 2 * span - 1)


def looked_up(products: Tensor, columns: Tensor) -> Tensor:
    """Of each row's products with the vectors those of its pairs: columns (M, N)."""
    return products.gather(-1, columns.expand(*products.shape[:-1], -1))


def waves(distance: Tensor, width: int) -> Tensor:
    angles = distance[:, None] / 10000 ** (torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], -1)


def fire(hidden: Sequence[Tensor], rate: Tensor, threshold: Tensor, distance: Tensor) -> Tensor:
    into, offset, out, shift = hidden
    place = torch.arange(len(distance))[:, None]
    share = torch.log1p(rate * distance.abs()) / (torch.log1p(rate * torch.maximum(place, threshold)) + 1e-6)
    return (torch.relu(share[..., None] * into + offset) @ out.T + shift).movedim(-1, 0)


def counted(query: Tensor, scores: Tensor, vectors: Tensor, keep: Tensor) -> Tensor:
    """CoPE, as its authors write it."""
    gates = scores.sigmoid() * keep
    places = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=vectors.shape[1] - 1)
    products, low = query @ vectors.mT, places.floor()
    below, above = products.gather(-1, low.long()), products.gather(-1, places.ceil().long())
    return below + (places - low) * (above - below)


def at_first(scores: Tensor, from_first: Tensor, to_first: Tensor) -> Tensor:
    scores = scores.clone()
    scores[..., :, 0], scores[..., 0, :] = to_first[:, None], from_first[:, None]
    return scores


def reflected(query: Tensor, key: Tensor, vectors: Tensor, beta: Tensor) -> Tensor:
    """PaTH's scores by the inverse of one triangular matrix, its Eq. of the UT transform over the whole length."""
    identity = torch.eye(query.shape[-2])
    triangle = identity + beta[..., None] * (vectors @ vectors.mT).tril(-1)
    inner = torch.linalg.solve_triangular(triangle, beta[..., None] * (vectors @ key.mT).tril(-1), upper=False)
    return query @ key.mT - (query @ vectors.mT).tril() @ inner


def turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def transformer_xl(t: Any) -> Tensor:
    """(q_i + w) · W r_{i-j} + u · k_j, over √d; the sines of 0 ... n - 1 are those of causal pairs."""
    by_place = (t.q + t.w[:, None]) @ (t.waves @ t.maps.mT).mT
    return (looked_up(by_place, t.distance.clamp(min=0)) + (t.u[:, None] * t.k).sum(-1)[..., None, :]) / 8


def disentangled(t: Any) -> Tensor:
    of_keys = looked_up(t.q @ t.of_keys.mT, t.deberta)
    return of_keys + looked_up(t.k @ t.of_queries.mT, t.deberta.T).mT


def added_to_values(weights: Tensor, value: Tensor, vectors: Tensor, columns: Tensor) -> Tensor:
    """Weights times values, and the weights of each distance times its vector."""
    sums = weights.new_zeros(*weights.shape[:-1], vectors.shape[1])
    return weights @ value + sums.scatter_add(-1, columns.expand_as(weights), weights) @ vectors


# --- chosen keys


def listed(indices: Tensor, columns: int) -> Tensor:
    """Which columns each row's list has."""
    return torch.zeros(*indices.shape[:-1], columns, dtype=torch.bool).scatter_(-1, indices, True)


def best(scores: Tensor, count: int) -> Tensor:
    return listed(scores.topk(count, -1).indices, scores.shape[-1]) & (scores > -INFINITY)


def in_blocks(keep: Tensor, size: int) -> Tensor:
    return keep.repeat_interleave(size, -1)


def moba(query: Tensor, key: Tensor, size: int, count: int) -> Tensor:
    means = key.unflatten(-2, (-1, size)).mean(-2)
    own = torch.arange(query.shape[-2])[:, None] // size
    block = torch.arange(means.shape[-2])
    scores = (query @ means.mT).masked_fill(block > own, -INFINITY).masked_fill(block == own, INFINITY)
    return in_blocks(best(scores, count), size)


def lightning(query: Tensor, key: Tensor, weights: Tensor, count: int, keep: Tensor) -> Tensor:
    scores = torch.einsum("bih,bhij->bij", weights, (query @ key.unsqueeze(1).mT).relu())
    return best(scores.masked_fill(~keep, -INFINITY), count)


def landmarks(scores: Tensor, keep: Tensor, size: int) -> Tensor:
    """A softmax within each block, times that of its landmark among landmarks and the keys of the query's own block."""
    length = scores.shape[-1]
    block = torch.arange(length) // size
    own, last = block[:, None] == block, torch.arange(length) % size == size - 1
    outer = softmax(scores, keep & (own ^ last) & ~(own & last))
    inner = softmax_or_nothing(scores.unflatten(-1, (-1, size))[..., :-1], keep.unflatten(-1, (-1, size))[..., :-1])
    gates = outer[..., last].masked_fill(own[:, last], 0.0)
    inside = (inner.nan_to_num(0.0) * gates.unsqueeze(-1)).flatten(-2)
    weights = outer.masked_fill(~own, 0.0)
    return weights.index_add(-1, torch.arange(length)[~last], inside)


def native_sparse(t: Any, sizes: dict[str, int]) -> Tensor:
    """Compressed, selected and recent keys, with groups of query heads that select together."""
    query, key, value = t.q, repeated(t.k2, t.q), repeated(t.v2, t.q)
    small_key, small_value = repeated(t.small_k, t.q), repeated(t.small_v, t.q)
    length, stride, size = sizes["length"], sizes["stride"], sizes["size"]
    i, j, starts = torch.arange(query.shape[2])[:, None], torch.arange(query.shape[2]), torch.arange(t.small_k.shape[2])
    ended = stride * starts + length <= i + 1
    weights = softmax_or_nothing(query @ small_key.mT / 8, ended)
    groups = weights.unflatten(1, (t.k2.shape[1], -1)).sum(2)
    blocks, per_block, per_length = query.shape[2] // size, size // stride, length // stride
    block = torch.arange(blocks)
    back = block[:, None] * per_block - starts  # how many strides a compressed block begins before a selected one
    shared = torch.stack([back + m == n for m in range(per_block) for n in range(per_length)]).sum(0)
    importance, own = groups @ shared.T.float(), i // size
    importance = importance.masked_fill((block == 0) | (block == own) | (block == own - 1), INFINITY)
    selected = in_blocks(best(importance.masked_fill(block > own, -INFINITY), sizes["count"]), size)
    recent = (j <= i) & (i - j < sizes["window"])
    scores = query @ key.mT / 8
    outputs = (
        weights @ small_value,
        softmax(scores, repeated(selected, query) & (j <= i)) @ value,
        softmax(scores, recent) @ value,
    )
    return (t.three_gates.movedim(-1, 0).unsqueeze(-1) * torch.stack(outputs)).sum(0)


def merged(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """A softmax over each part of the keys, and one over their log-sum-exps."""
    scores = [query @ key.mT / 8 for key in keys]
    outputs = torch.stack([part.softmax(-1) @ value for part, value in zip(scores, values, strict=True)])
    return (torch.stack([part.logsumexp(-1, keepdim=True) for part in scores]).softmax(0) * outputs).sum(0)


def repeated(key_heads: Tensor, like: Tensor) -> Tensor:
    return key_heads.repeat_interleave(like.shape[1] // key_heads.shape[1], 1)


# --- recurrences


def linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    weights = (query @ key.mT).tril()
    return weights / weights.sum(-1, keepdim=True) @ value


def favor(map_: Any, rows: Tensor) -> Tensor:
    rows = rows / rows.shape[-1] ** 0.25
    exponents = rows @ map_.matrix.T.to(rows.dtype) - rows.square().sum(-1, keepdim=True) / 2
    return (exponents - exponents.amax((-1, -2), keepdim=True)).exp()


def decayed(query: Tensor, key: Tensor, value: Tensor, decay: Tensor) -> Tensor:
    """A decay for each token, over all pairs."""
    sums = decay.cumsum(-1)
    return ((query @ key.mT) * (sums[..., :, None] - sums[..., None, :]).exp().tril()) @ value


def decayed_features(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, bonus: Tensor | None = None) -> Tensor:
    """A decay for each feature, over all pairs, as long as e^sums are no infinity; with a bonus read before it."""
    sums = decay.cumsum(-2)
    if bonus is None:
        return ((query * sums.exp()) @ (key * (-sums).exp()).mT).tril() @ value
    earlier = ((query * (sums - decay).exp()) @ (key * (-sums).exp()).mT).tril(-1) @ value
    return earlier + (query * bonus[:, None, None] * key).sum(-1, keepdim=True) * value


def delta_rule(query: Tensor, key: Tensor, value: Tensor, removal: Tensor, decay: Tensor | None) -> Tensor:
    """S_i = (I - k_i r_iᵀ) diag(e^g_i) S_(i-1) + k_i v_iᵀ, over all pairs, by one triangular system."""
    written = key
    if decay is not None:
        sums = decay.cumsum(-2)
        query, removal, written = query * sums.exp(), removal * sums.exp(), key * (-sums).exp()
    triangle = torch.eye(query.shape[-2]) + (removal @ written.mT).tril(-1)
    return (query @ written.mT).tril() @ torch.linalg.solve_triangular(triangle, value, upper=False)


def in_turn(first: Tensor, second: Tensor) -> Tensor:
    """Rows of the two, alternating."""
    return torch.stack([first, second], -2).flatten(-3, -2)


def recurrence(query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None, beta: Tensor | None) -> Tensor:
    """One step after another: S_i = e^g_i S_(i-1) + k_i u_iᵀ, u_i = v_i or β_i (v_i - (e^g_i S_(i-1))ᵀ k_i)."""
    state, outputs = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1]), []
    for i in range(key.shape[2]):
        if decay is not None:
            state = decay[:, :, i].exp().unsqueeze(-1) * state
        written = value[:, :, i, None]
        if beta is not None:
            written = beta[:, :, i, None, None] * (written - key[:, :, i, None] @ state)
        state = state + key[:, :, i, :, None] * written
        outputs.append(query[:, :, i, None] @ state)
    return torch.cat(outputs, 2)


# --- layers


def in_heads(rows: Tensor, heads: int) -> Tensor:
    return rows.unflatten(-1, (heads, -1)).transpose(1, 2)


def layer_of(
    layer: Any, x: Tensor, memory: Tensor | None = None, keep: Tensor | None = None, turn: Any = None
) -> Tensor:
    """An attention layer of eight heads of 64, by its own matrices."""
    own, memory = layer.projections, x if memory is None else memory
    query, key, value = in_heads(own.query(x), 8), in_heads(own.key(memory), 8), in_heads(own.value(memory), 8)
    if turn is not None:
        query, key = turn(query), turn(key)
    context = softmax(query @ key.mT / 8, keep) @ value
    return own.output(context.transpose(1, 2).flatten(-2))


def layer_in_steps(layer: Any, x: Tensor, reach: int) -> Tensor:
    """A token at a time over at most `reach` keys."""
    own, outputs = layer.projections, []
    keys, values = x.new_empty(1, 8, 0, 64), x.new_empty(1, 8, 0, 64)
    for token in x.split(1, 1):
        keys = torch.cat([keys, in_heads(own.key(token), 8)], 2)[:, :, -reach:]
        values = torch.cat([values, in_heads(own.value(token), 8)], 2)[:, :, -reach:]
        context = softmax(in_heads(own.query(token), 8) @ keys.mT / 8) @ values
        outputs.append(own.output(context.transpose(1, 2).flatten(-2)))
    return torch.cat(outputs, 1)


def latent(layer: Any, x: Tensor, keep: Tensor, turn: Any) -> Tensor:
    """DeepSeek-V2's Eq. 37 to 47: keys and values from a latent of 128 numbers, 32 more rotated ones for all heads."""
    own = layer.projections
    query = in_heads(own.query(x), 8)
    low, shared = own.down(x).split([128, 32], -1)
    low = rms_norm(low, (128,), own.norm.weight, 1e-6)
    key, value = in_heads(own.key(low), 8), in_heads(own.value(low), 8)
    scores = query[..., :64] @ key.mT + turn(query[..., 64:]) @ turn(shared.unsqueeze(1)).mT
    context = softmax(scores / 96**0.5, keep) @ value
    return own.output(context.transpose(1, 2).flatten(-2))


def within_spans(scores: Tensor, keep: Tensor, away: Tensor, spans: Tensor, ramp: float) -> Tensor:
    """Weights that fade where a key is farther away than the span of a head."""
    terms = scores.masked_fill(~keep, -INFINITY).exp() * ((ramp + spans[:, None, None] - away) / ramp).clamp(0, 1)
    return terms / terms.sum(-1, keepdim=True)


def linear_chain(scores: Tensor, transitions: Tensor) -> Tensor:
    """Marginals of a chain of keys by messages of both states, of all rows at once, key by key from both ends."""
    by_key = scores.movedim(-1, 0)
    states = torch.stack([torch.zeros_like(by_key), by_key], -1)  # [N, ..., M, 2]
    before, after = [states[0]], [torch.zeros_like(states[0])]
    for own in states[1:]:
        before.append(own + torch.logsumexp(before[-1].unsqueeze(-1) + transitions, -2))
    for own in states[1:].flip(0):
        after.append(torch.logsumexp(transitions + (own + after[-1]).unsqueeze(-2), -1))
    return (torch.stack(before) + torch.stack(after[::-1])).softmax(-1)[..., 1].movedim(0, -1)


def nystrom(query: Tensor, key: Tensor, value: Tensor, count: int) -> Tensor:
    """Three softmaxes over the means of `count` segments, and six steps to the pseudo-inverse of the middle one."""
    scale = query.shape[-1] ** -0.5
    few_queries, few_keys = (rows.unflatten(-2, (count, -1)).mean(-2) for rows in (query, key))
    left, middle = ((scale * rows @ few_keys.mT).softmax(-1) for rows in (query, few_queries))
    inverse, one = middle.mT / middle.sum(-2).amax(-1)[..., None, None], torch.eye(count)
    for _ in range(6):
        product = middle @ inverse
        inverse = inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    return left @ (inverse @ ((scale * few_queries @ key.mT).softmax(-1) @ value))


def sorted_blocks(query: Tensor, key: Tensor, value: Tensor, scores: Tensor, size: int) -> Tensor:
    """Keys of the own block, and of a mixture of blocks by a matrix that Sinkhorn's steps make doubly stochastic."""
    mixing = scores.exp()
    for _ in range(8):
        mixing = mixing / mixing.sum(-1, keepdim=True)
        mixing = mixing / mixing.sum(-2, keepdim=True)
    of_rows = torch.stack([torch.kron(one, torch.eye(size)) for one in mixing])
    keys, values = (torch.cat([of_rows @ rows, rows], -2) for rows in (key, value))
    own = torch.arange(query.shape[-2]) // size
    keep = (own[:, None] == own).repeat(1, 2)
    return softmax(query.shape[-1] ** -0.5 * query @ keys.mT, keep) @ values
