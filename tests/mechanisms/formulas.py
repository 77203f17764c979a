"""Formulas of mechanisms, written out with all weights: what recipes/every_mechanism.toml compares its rows with."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

INFINITY = float("inf")


def hide(scores: Tensor, keep: Tensor) -> Tensor:
    """Scores that are -inf where a query does not attend."""
    return scores.masked_fill(~keep, -INFINITY)


def softmax(scores: Tensor) -> Tensor:
    """e^s_j / Σ_k e^s_k."""
    return scores.softmax(-1)


def mixed(matrix: Tensor, pairs: Tensor) -> Tensor:
    """Σ_h matrix_gh pairs_h, over the heads."""
    return torch.einsum("gh,bhij->bgij", matrix, pairs)


def convolved(kernel: Tensor, pairs: Tensor) -> Tensor:
    """Σ_ab kernel_ab pairs_{i + a - c_q + 1, j + b - (c_k - 1) / 2}, 0 where there is none, number by number."""
    _, queries, keys = kernel.shape
    result = torch.zeros_like(pairs)
    for i, j in itertools.product(range(pairs.shape[-2]), range(pairs.shape[-1])):
        for a, b in itertools.product(range(queries), range(keys)):
            row, column = i + a - queries + 1, j + b - keys // 2
            if row >= 0 and 0 <= column < pairs.shape[-1]:
                result[..., i, j] += kernel[:, a, b] * pairs[..., row, column]
    return result


def multi_token(
    scores: Tensor, keep: Tensor, kernels: tuple[Tensor, Tensor], matrices: tuple[Tensor, Tensor]
) -> Tensor:
    """Scores convolved and mixed, their softmax, and its weights convolved and mixed."""
    near = mixed(matrices[0], convolved(kernels[0], scores.masked_fill(~keep, 0.0)))
    weights = convolved(kernels[1], softmax(hide(near, keep))).masked_fill(~keep, 0.0)
    return mixed(matrices[1], weights)


def additive_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """Σ_f weight_f tanh(query_if + key_jf)."""
    return (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh() @ weight


def entmax(scores: Tensor, alpha: float) -> Tensor:
    """max((α - 1) s - τ, 0)^(1 / (α - 1)), τ by bisection until rows sum to 1."""
    scaled = (alpha - 1) * scores
    high = scaled.amax(-1, keepdim=True)
    low = high - 1
    for _ in range(100):
        middle = (low + high) / 2
        above = (scaled - middle).clamp(min=0).pow(1 / (alpha - 1)).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return (scaled - low).clamp(min=0).pow(1 / (alpha - 1))


def stick_breaking(scores: Tensor, keep: Tensor) -> Tensor:
    """σ(s_j) Π_{k > j} (1 - σ(s_k)), one key after the other from the last."""
    taken = hide(scores, keep).sigmoid()
    left, weights = torch.ones_like(taken[..., 0]), torch.zeros_like(taken)
    for j in reversed(range(scores.shape[-1])):
        weights[..., j] = taken[..., j] * left
        left = left * (1 - taken[..., j])
    return weights


def chain_marginals(scores: Tensor, keep: Tensor, transitions: Tensor) -> Tensor:
    """p(z_j = 1) of the first keys of each row: the masses of all selections up to j, and of all behind it."""
    weights = torch.zeros_like(scores)
    for i in range(scores.shape[-2]):
        own = scores[..., i, : int(keep[i].sum())]
        masses = torch.stack([torch.ones_like(own), own.exp()], -1)  # of both states
        before, after = [masses[..., 0, :]], [torch.ones_like(masses[..., 0, :])]
        for j in range(1, own.shape[-1]):
            before.append(before[-1] @ transitions.exp() * masses[..., j, :])
            after.append((after[-1] * masses[..., -j, :]) @ transitions.exp().T)
        joint = torch.stack(before, -2) * torch.stack(after[::-1], -2)
        weights[..., i, : own.shape[-1]] = joint[..., 1] / joint.sum(-1)
    return weights


@torch.enable_grad
def projective_marginals(scores: Tensor) -> Tensor:
    """The derivatives of log Z, the sum over projective trees, where roots are the children of a token before all."""
    scores = scores.detach().requires_grad_()
    size = scores.shape[-1]
    one = torch.zeros_like(scores[..., 0, 0])
    of_left, of_right = ({(i, i): one for i in range(size + 1)} for _ in range(2))  # (first, last): of the head there
    arc_left: dict[tuple[int, int], Tensor] = {}
    arc_right: dict[tuple[int, int], Tensor] = {}

    def log_sum(terms: list[Tensor]) -> Tensor:
        return torch.stack(terms, -1).logsumexp(-1)

    for i, j in sorted(itertools.combinations(range(size + 1), 2), key=lambda span: span[1] - span[0]):
        halves = log_sum([of_left[i, k] + of_right[k + 1, j] for k in range(i, j)])
        arc_left[i, j] = halves + scores[..., j - 1, i - 1 if i else j - 1]
        of_left[i, j] = log_sum([arc_left[i, k] + of_left[k, j] for k in range(i + 1, j + 1)])
        if i:
            arc_right[i, j] = halves + scores[..., i - 1, j - 1]
            of_right[i, j] = log_sum([of_right[i, k] + arc_right[k, j] for k in range(i, j)])
    return torch.autograd.grad(of_left[0, size].sum(), scores)[0]


def tree_marginals(scores: Tensor) -> Tensor:
    """The share of trees with an arc: what the determinant of the Laplacian, the sum of all, lacks without it.

    s_ii is the score of token i as a root, of which there may be several.
    """

    def total(masses: Tensor) -> Tensor:
        return torch.linalg.det(torch.diag_embed(masses.sum(-1)) - masses.tril(-1) - masses.triu(1))

    masses = scores.softmax(-1)  # a factor of a row is one of all trees
    weights, whole = torch.zeros_like(scores), total(masses)
    for i, j in itertools.product(range(scores.shape[-2]), range(scores.shape[-1])):
        without = masses.clone()
        without[..., i, j] = 0
        weights[..., i, j] = 1 - total(without) / whole
    return weights


def monotonic(stops: Tensor) -> Tensor:
    """The probability of stopping at key j, from where the query before did; the first begins at key 0."""
    before = torch.zeros_like(stops[..., 0, :])
    before[..., 0] = 1
    rows = []
    for i in range(stops.shape[-2]):
        at = torch.zeros_like(before[..., 0])
        row = torch.zeros_like(before)
        for j in range(stops.shape[-1]):
            at = at + before[..., j]
            row[..., j] = at * stops[..., i, j]
            at = at * (1 - stops[..., i, j])
        before = row
        rows.append(row)
    return torch.stack(rows, -2)


def mocha(scores: Tensor, width: int) -> Tensor:
    """Softmax over the `width` keys up to where the query stops, over all places where it may."""
    stops, exponentials = monotonic(scores.sigmoid()), scores.exp()
    weights = torch.zeros_like(scores)
    for end in range(scores.shape[-1]):
        chunk = slice(max(end - width + 1, 0), end + 1)
        weights[..., chunk] += stops[..., end : end + 1] * softmax(exponentials[..., chunk].log())
    return weights


def added_to_values(weights: Tensor, value: Tensor, vectors: Tensor) -> Tensor:
    """Σ_j w_ij (v_j + vectors_ij), with a vector for each pair: (H, M, N, D)."""
    return (weights.unsqueeze(-1) * (value.unsqueeze(-3) + vectors)).sum(-2)


def repeated(key_heads: Tensor, group: int) -> Tensor:
    """Each key head once for each query head that it serves."""
    return key_heads.repeat_interleave(group, 1)


def landmark_weights(scores: Tensor, size: int, most: int | None = None) -> Tensor:
    """A softmax within each block, times that of its landmark among landmarks and the keys of the query's own block.

    most: the largest landmarks of earlier blocks alone.
    """
    length = scores.shape[-1]
    block = torch.arange(length) // size
    own, is_landmark = block[:, None] == block, torch.arange(length) % size == size - 1
    gates = scores.masked_fill(own | ~is_landmark, -INFINITY)
    if most is not None:
        gates = gates.masked_fill(gates < gates.topk(most, -1).values[..., -1:], -INFINITY)
    outer = softmax(torch.where(own, scores.masked_fill(is_landmark, -INFINITY), gates))
    weights = outer.masked_fill(~own, 0.0)
    for each in range(int(block.max())):  # the last block has no later queries
        inside = (block == each) & ~is_landmark
        gate = outer[..., each * size + size - 1].unsqueeze(-1).masked_fill(own[:, inside], 0.0)
        weights[..., inside] += softmax(scores[..., inside]).nan_to_num(0.0) * gate
    return weights


def reflected(query: Tensor, key: Tensor, vectors: Tensor, beta: Tensor) -> Tensor:
    """k_j · H_j+1 … H_i q_i, H_l = I - beta_l w_l w_lᵀ, with the matrices multiplied one by one."""
    outer = vectors.unsqueeze(-1) * vectors.unsqueeze(-2) * beta[..., None, None]
    matrices = torch.eye(vectors.shape[-1], dtype=vectors.dtype) - outer
    scores = torch.zeros_like(query @ key.mT)
    for i in range(query.shape[-2]):
        moved = query[..., i, :]
        for j in range(i, -1, -1):
            scores[..., i, j] = (moved * key[..., j, :]).sum(-1)
            moved = (matrices[..., j, :, :] @ moved.unsqueeze(-1)).squeeze(-1)
    return scores


def in_lists(lists: Tensor, columns: int) -> Tensor:
    """Which columns each row's list has: (..., rows, count) to booleans (..., rows, columns)."""
    return (lists.unsqueeze(-1) == torch.arange(columns)).any(-2)


def same_cluster(query: Tensor, key: Tensor) -> Tensor:
    """Whether a query's largest projection is that of a key: (..., M, clusters), (..., N, clusters) to (..., M, N)."""
    return query.argmax(-1).unsqueeze(-1) == key.argmax(-1).unsqueeze(-2)


def globals_of(tokens: list[int]) -> Tensor:
    """Pairs of which one is among the tokens."""
    marked = torch.zeros(37, dtype=torch.bool)
    marked[tokens] = True
    return marked[:, None] | marked


# --- layers: their own matrices, the rest written out


def layer_of(
    layer: Any,
    x: Tensor,
    memory: Tensor | None = None,
    keep: Tensor | None = None,
    turn: Callable[[Tensor], Tensor] = lambda heads: heads,
) -> Tensor:
    """W_o · heads of softmax(turn(W_q x) · turn(W_k m) / √d) W_v m, with 4 heads."""

    def heads(linear: Any, tokens: Tensor) -> Tensor:
        return (tokens @ linear.weight.T + linear.bias).unflatten(-1, (4, -1)).transpose(1, 2)

    own, memory = layer.projections, x if memory is None else memory
    query, key, value = turn(heads(own.query, x)), turn(heads(own.key, memory)), heads(own.value, memory)
    scores = query @ key.mT / query.shape[-1] ** 0.5
    context = softmax(scores if keep is None else hide(scores, keep)) @ value
    return context.transpose(1, 2).flatten(-2) @ own.output.weight.T + own.output.bias


def keys_of_another(reader: Any, owner: Any, x: Tensor, keep: Tensor) -> Tensor:
    """W_o · heads of softmax(W_q x · W_k' x / √d) W_v' x, with 4 heads, and W_k' and W_v' of another layer."""
    (query, _, _), (_, key, value) = projected(reader, x), projected(owner, x)
    context = softmax(hide(query @ key.mT / query.shape[-1] ** 0.5, keep)) @ value
    return output_of(reader, context)


def heavy_hitters(layer: Any, x: Tensor, heavy: int, recent: int) -> Tensor:
    """H2O, a token at a time, of 4 heads with lists of keys of their own."""
    query, key, value = projected(layer, x)
    context = torch.zeros_like(query)
    for batch, head in itertools.product(range(len(x)), range(query.shape[1])):
        kept, sums = [], torch.zeros(x.shape[1], dtype=x.dtype)
        for row in range(x.shape[1]):
            kept.append(row)
            weights = softmax(query[batch, head, row] @ key[batch, head, kept].mT / query.shape[-1] ** 0.5)
            context[batch, head, row] = weights @ value[batch, head, kept]
            sums[kept] += weights
            older = sorted(kept[:-recent], key=lambda column: float(sums[column]))[-heavy:]
            kept = sorted(older) + kept[-recent:]
    return output_of(layer, context)


def projected(layer: Any, x: Tensor) -> list[Any]:
    """Queries, keys and values of 4 heads, (batch, 4, length, ·); None of what the layer has not."""
    own = layer.projections
    linears = [getattr(own, name, None) for name in ("query", "key", "value")]
    return [
        None if each is None else (x @ each.weight.T + each.bias).unflatten(-1, (4, -1)).transpose(1, 2)
        for each in linears
    ]


def output_of(layer: Any, context: Tensor) -> Tensor:
    """W_o of the heads together."""
    output = layer.projections.output
    return context.transpose(1, 2).flatten(-2) @ output.weight.T + output.bias


def latent(layer: Any, x: Tensor, keep: Tensor) -> Tensor:
    """DeepSeek-V2's Eq. 37 to 47 without a latent of queries: 4 heads of 16, 24 latent numbers, 8 rotated."""
    own = layer.projections
    query = (x @ own.query.weight.T).unflatten(-1, (4, 24)).transpose(1, 2)
    low, shared = (x @ own.down.weight.T).split([24, 8], -1)
    low = low / (low.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    key, value = ((low @ each.weight.T).unflatten(-1, (4, 16)).transpose(1, 2) for each in (own.key, own.value))
    scores = query[..., :16] @ key.mT + rotated(query[..., 16:]) @ rotated(shared.unsqueeze(1)).mT
    context = softmax(hide(scores / 24**0.5, keep)) @ value
    return context.transpose(1, 2).flatten(-2) @ own.output.weight.T


# --- positions


def sinusoids(length: int, dim: int) -> Tensor:
    """Sin and cos of position / 10000^(2k / dim), in turn."""
    angles = torch.arange(length).double()[:, None] / 10000 ** (torch.arange(0, dim, 2).double() / dim)
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(-2)


def rotated(heads: Tensor, speed: float = 1.0) -> Tensor:
    """Pairs (x_k, x_k+D/2) turned by position · 10000^(-2k / D)."""
    half = heads.shape[-1] // 2
    angles = speed * torch.arange(heads.shape[-2]).double()[:, None] / 10000 ** (torch.arange(half).double() / half)
    first, second = heads[..., :half], heads[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def t5_bucket(relative: Tensor, buckets: int = 32, far: int = 128) -> Tensor:
    """Half of the buckets for later keys; of each half, half for one distance each, half on a logarithmic scale."""
    half = buckets // 2
    away, small = relative.abs(), half // 2
    far_away = small + (away / small).log() / math.log(far / small) * (half - small)
    bucket = torch.where(away < small, away, far_away.clamp(max=half - 1).nan_to_num(0).long())
    return bucket + half * (relative > 0)


def turned(heads: Tensor, at: Tensor) -> Tensor:
    """`rotated` where each pair has positions of its own, (length, pairs)."""
    half = heads.shape[-1] // 2
    angles = at.double() / 10000 ** (torch.arange(half).double() / half)
    first, second = heads[..., :half], heads[..., half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1)


def by_query(query: Tensor, vectors: Tensor) -> Tensor:
    """q_i · a_ij, for a vector of each pair, (heads, M, N, D)."""
    return torch.einsum("bhid,hijd->bhij", query, vectors)


def transformer_xl(
    query: Tensor, key: Tensor, maps: Tensor, of_content: Tensor, of_position: Tensor, distance: Tensor
) -> Tensor:
    """(q_i + w) · W r_{i-j} + u · k_j, for r of sines, then cosines."""
    width = maps.shape[-1]
    angles = distance[..., None] / 10000 ** (torch.arange(0, width, 2).double() / width)
    waves = torch.cat([angles.sin(), angles.cos()], -1)
    by_position = by_query(query + of_position[:, None], torch.einsum("hde,ije->hijd", maps, waves))
    return by_position + torch.einsum("hd,bhjd->bhj", of_content, key)[..., None, :]


def disentangled(query: Tensor, key: Tensor, keys: Tensor, queries: Tensor, distance: Tensor) -> Tensor:
    """q_i · K_δ + k_j · Q_δ, for 8 buckets on each side, of up to 20 positions."""
    middle, span, far = 4, 8, 20
    logarithmic = (distance.abs() / middle).log() / math.log((far - 1) / middle) * (middle - 1)
    beyond = ((logarithmic - 1e-9).ceil() + middle) * distance.sign()
    bucket = torch.where(distance.abs() <= middle, distance, beyond.nan_to_num(0).long())
    column = (bucket + span).clamp(0, 2 * span - 1)
    return by_query(query, keys[:, column]) + torch.einsum("bhjd,hijd->bhij", key, queries[:, column])


def fire(
    into: Tensor, offset: Tensor, out: Tensor, shift: Tensor, rate: Tensor, threshold: Tensor, distance: Tensor
) -> Tensor:
    """f(ψ(i - j) / ψ(max(i, L))) with ψ(x) = log(1 + c x)."""
    place = torch.arange(len(distance)).double()[:, None]
    most = torch.log1p(rate * torch.maximum(place, threshold)) + 1e-6
    share = torch.log1p(rate * distance.abs()) / most
    hidden = torch.relu(share[..., None] * into + offset)
    return torch.einsum("ijf,hf->hij", hidden, out) + shift[:, None, None]


def counted(query: Tensor, scores: Tensor, vectors: Tensor, keep: Tensor) -> Tensor:
    """q_i · e[p_ij], interpolated, for p_ij = Σ_{j <= k <= i} σ(s_ik)."""
    gates = scores.sigmoid() * keep
    places = torch.stack([gates[..., j:].sum(-1) for j in range(scores.shape[-1])], -1).clamp(max=vectors.shape[1] - 1)
    products, low = query @ vectors.mT, places.floor().long()
    below, above = products.gather(-1, low), products.gather(-1, places.ceil().long())
    return below + (places - low) * (above - below)


def at_first(scores: Tensor, from_first: Tensor, to_first: Tensor) -> Tensor:
    """The scores with numbers of their own where the query, or else the key, is the first."""
    scores = scores.clone()
    scores[..., :, 0], scores[..., 0, :] = to_first[:, None], from_first[:, None]
    return scores


# --- chosen keys


def best(scores: Tensor, count: int) -> Tensor:
    """Booleans of the `count` largest scores of each row, none of those that are -inf."""
    chosen = torch.zeros_like(scores, dtype=torch.bool)
    chosen.scatter_(-1, scores.topk(count, -1).indices, True)
    return chosen & (scores > -INFINITY)


def moba(query: Tensor, key: Tensor, size: int, count: int) -> Tensor:
    """The query's own block, and the best of the blocks before by query · mean of the block's keys."""
    blocks = -(-key.shape[-2] // size)
    means = torch.stack([key[..., size * b : size * (b + 1), :].mean(-2) for b in range(blocks)], -2)
    own = torch.arange(query.shape[-2])[:, None] // size
    block = torch.arange(blocks)
    scores = (query @ means.mT).masked_fill(block > own, -INFINITY).masked_fill(block == own, INFINITY)
    return best(scores, count).repeat_interleave(size, -1)[..., : key.shape[-2]]


def lightning(query: Tensor, key: Tensor, weights: Tensor, count: int) -> Tensor:
    """The best keys up to the query by Σ_h w_ih relu(q_ih · k_j)."""
    scores = torch.einsum("bih,bhij->bij", weights, (query @ key.unsqueeze(1).mT).relu())
    return best(scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -INFINITY), count)


def native_sparse(query: Tensor, key: Tensor, value: Tensor, compressed: Any, gates: Tensor) -> Tensor:
    """Eq. 5 to 12: compressed blocks of 8 at every 4, 4 selected blocks of 8, a window of 7; two heads share keys."""
    i, j = torch.arange(37)[:, None], torch.arange(37)
    key, value = repeated(key, 2), repeated(value, 2)
    small_key, small_value = (repeated(each, 2) for each in compressed)

    def attend(keys: Tensor, values: Tensor, keep: Tensor) -> Tensor:
        return hide(query @ keys.mT / 4, keep).softmax(-1).nan_to_num(0.0) @ values

    ended = 4 * torch.arange(8) + 7 <= i
    weights = hide(query @ small_key.mT / 4, ended).softmax(-1).nan_to_num(0.0).unflatten(1, (2, 2)).sum(2)
    importance = torch.zeros(2, 2, 37, 5, dtype=weights.dtype)
    for block in range(5):
        for m in (0, 1):
            for n in (0, 1):
                if 0 <= 2 * block + m - n < 8:
                    importance[..., block] += weights[..., 2 * block + m - n]
    block, own = torch.arange(5), i // 8
    importance = importance.masked_fill((block == 0) | (block == own) | (block == own - 1), INFINITY)
    selected = best(importance.masked_fill(block > own, -INFINITY), 4).repeat_interleave(8, -1)[..., :37]
    branches = (
        attend(small_key, small_value, ended),
        attend(key, value, repeated(selected, 2) & (j <= i)),
        attend(key, value, (j <= i) & (i - j < 7)),
    )
    return (gates.movedim(-1, 0).unsqueeze(-1) * torch.stack(branches)).sum(0)


def sinkhorn_blocks(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> Tensor:
    """Five blocks of 7, each beside a mixture of all by e^scores whose rows and columns are divided by their sums."""
    sorting = scores.exp()
    for _ in range(8):
        sorting = sorting / sorting.sum(-1, keepdim=True)
        sorting = sorting / sorting.sum(-2, keepdim=True)
    outputs = []
    for block in range(5):
        at = slice(7 * block, 7 * block + 7)
        keys, values = torch.zeros_like(key[..., at, :]), torch.zeros_like(value[..., at, :])
        for other in range(5):
            share, there = sorting[..., block, other, None, None], slice(7 * other, 7 * other + 7)
            keys, values = keys + share * key[..., there, :], values + share * value[..., there, :]
        keys, values = torch.cat([keys, key[..., at, :]], -2), torch.cat([values, value[..., at, :]], -2)
        outputs.append(softmax(query[..., at, :] @ keys.mT / 4) @ values)
    return torch.cat(outputs, -2)


def hierarchical(query: Tensor, key: Tensor, size: int, count: int) -> Tensor:
    """The pairs of the blocks that a search by halves finds, one block of queries and one chunk after the other."""
    length, pairs = query.shape[-2], torch.zeros(*query.shape[:-1], key.shape[-2], dtype=torch.bool)
    for at in itertools.product(*map(range, query.shape[:-2])):
        for first in range(0, length, size):
            rows = range(first, min(first + size, length))
            blocks = -(-rows.stop // size)
            edges = [c * blocks // (2 * count) for c in range(2 * count + 1)]
            chunks = [chunk for chunk in itertools.pairwise(edges) if chunk[0] < chunk[1]]
            while True:
                scored = []
                for start, stop in chunks:
                    middle = (start * size + min(stop * size, rows.stop) - 1) // 2
                    scored.append(
                        (max(float(query[at][i] @ key[at][middle]) for i in rows if i >= middle), start, stop)
                    )
                best = [(start, stop) for _, start, stop in sorted(scored, reverse=True)[:count]]
                if all(stop - start == 1 for start, stop in best):
                    break
                halves = [(start, (start + stop) // 2, stop) for start, stop in best]
                chunks = [half for a, b, c in halves for half in ((a, b), (b, c)) if half[0] < half[1]]
            for start, _ in best:
                pairs[at][rows.start : rows.stop, start * size : start * size + size] = True
    return pairs


# --- recurrences


def linear(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Weights q_i · k_j of the keys up to i, divided by their sum."""
    weights = (query @ key.mT).tril()
    return weights / weights.sum(-1, keepdim=True) @ value


def favor_features(favor: Any, rows: Tensor) -> Tensor:
    """e^(w · x - |x|² / 2) of x / D^(1/4), up to a factor."""
    rows = rows / rows.shape[-1] ** 0.25
    return (rows @ favor.matrix.to(rows.dtype).T - rows.square().sum(-1, keepdim=True) / 2).exp()


def soft(query: Tensor, value: Tensor, landmarks: int) -> Tensor:
    """A Gaussian kernel between queries and the means of segments, on both sides of its inverse between the means."""

    def kernel(rows: Tensor, columns: Tensor) -> Tensor:
        return (-torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist").square() / 8).exp()

    segment = torch.arange(query.shape[-2]) * landmarks // query.shape[-2]
    member = (segment == torch.arange(landmarks)[:, None]).to(query.dtype)
    means = member / member.sum(-1, keepdim=True) @ query
    near = kernel(query, means)
    return near @ torch.linalg.solve(kernel(means, means), near.mT @ value)


def lara(query: Tensor, key: Tensor, value: Tensor, landmarks: int) -> Tensor:
    """Sums over samples near the means of segments, each with its importance; the noise is that of the seed 0."""

    def density(points: Tensor, mean: Tensor | float) -> Tensor:
        return (-(points - mean).square().sum(-1) / 2).exp()

    def features(samples: Tensor, rows: Tensor) -> Tensor:
        return (samples @ rows.mT - rows.square().sum(-1).unsqueeze(-2) / 2).exp()

    query, key = query / 2, key / 2  # products of 16 numbers are divided by 4
    segment = torch.arange(query.shape[-2]) * landmarks // query.shape[-2]
    member = (segment == torch.arange(landmarks)[:, None]).to(query.dtype)
    centres = member / member.sum(-1, keepdim=True) @ query
    means = centres + member / member.sum(-1, keepdim=True) @ key
    samples = means + torch.randn(means.shape, generator=torch.Generator().manual_seed(0)).to(means)
    densities = density(samples.unsqueeze(-2), means.unsqueeze(-3))
    own = densities.diagonal(dim1=-2, dim2=-1)
    nearness = (query @ centres.mT).softmax(-1)
    chosen = (own / densities.sum(-1)).unsqueeze(-2) + nearness - 1 / landmarks
    importance = chosen.clamp(min=1e-8) * (density(samples, 0.0) / own).unsqueeze(-2)
    pairs = importance * features(samples, query).mT @ features(samples, key)
    return pairs @ value / pairs.sum(-1, keepdim=True)


def nystrom(query: Tensor, key: Tensor, value: Tensor, landmarks: int) -> Tensor:
    """Three softmaxes through the means of segments, with six iterations to the inverse of the one in the middle."""
    segment = torch.arange(query.shape[-2]) * landmarks // query.shape[-2]
    member = (segment == torch.arange(landmarks)[:, None]).to(query.dtype)
    mean = member / member.sum(-1, keepdim=True)
    left, middle, right = (
        softmax(rows @ columns.mT / query.shape[-1] ** 0.5)
        for rows, columns in ((query, mean @ key), (mean @ query, mean @ key), (mean @ query, key))
    )
    one, inverse = torch.eye(landmarks, dtype=query.dtype), middle.mT
    inverse = inverse / (middle.sum(-2).amax(-1) * middle.sum(-1).amax(-1))[..., None, None]
    for _ in range(6):
        product = middle @ inverse
        inverse = inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    return left @ inverse @ right @ value


def fourier(x: Tensor) -> Tensor:
    """Re Σ_nd e^(-2πi (an / N + bd / D)) x_nd: cosines of both less sines of both."""
    angles = []
    for size in x.shape[-2:]:
        steps = torch.arange(size, dtype=x.dtype)
        angles.append(2 * math.pi * torch.outer(steps, steps) / size)
    rows, columns = angles
    return rows.cos() @ x @ columns.cos() - rows.sin() @ x @ columns.sin()


def recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None = None, beta: Tensor | None = None
) -> Tensor:
    """S_i = e^g_i S_(i-1) + k_i u_iᵀ and o_i = S_iᵀ q_i; u_i is v_i, or β_i (v_i - (e^g_i S_(i-1))ᵀ k_i)."""
    state = key.new_zeros(*key.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for i in range(key.shape[2]):
        if decay is not None:
            state = decay[:, :, i].exp().unsqueeze(-1) * state
        written = value[:, :, i]
        if beta is not None:
            written = beta[:, :, i, None] * (written - (state.mT @ key[:, :, i, :, None]).squeeze(-1))
        state = state + key[:, :, i, :, None] * written.unsqueeze(-2)
        outputs.append((state.mT @ query[:, :, i, :, None]).squeeze(-1))
    return torch.stack(outputs, 2)


def outer(left: Tensor, right: Tensor) -> Tensor:
    """l rᵀ of each pair of rows, (..., D) to (..., D, D)."""
    return left[..., :, None] * right[..., None, :]


def removing(written: Tensor, removed: Tensor, decay: Tensor) -> Tensor:
    """(I - w rᵀ) diag(e^g) for each token, decay (..., N, 1 or D)."""
    identity = torch.eye(written.shape[-1], dtype=written.dtype)
    return (identity - outer(written, removed)) * decay.exp()[..., None, :]


def by_matrices(query: Tensor, key: Tensor, value: Tensor, matrices: Tensor) -> Tensor:
    """S_i = A_i S_{i-1} + k_i v_iᵀ read by q_i, with the matrices A (..., N, D, D)."""
    state, rows = torch.zeros_like(outer(key[:, :, 0], value[:, :, 0])), []
    for i in range(key.shape[2]):
        state = matrices[:, :, i] @ state + outer(key[:, :, i], value[:, :, i])
        rows.append(query[:, :, i, None] @ state)
    return torch.cat(rows, 2)


def two_steps(query: Tensor, keys: Any, values: Any, decay: Tensor, beta: Tensor) -> Tensor:
    """Two steps of the delta rule a token, as one matrix and one addition."""
    beta = beta[..., None]
    first, second = (removing(beta * key, key, 0 * decay[..., None]) for key in keys)
    added = second @ outer(beta * keys[0], values[0]) + outer(beta * keys[1], values[1])
    state, rows = torch.zeros_like(added[:, :, 0]), []
    for i in range(query.shape[2]):
        state = second[:, :, i] @ first[:, :, i] @ (decay[:, :, i, None, None].exp() * state) + added[:, :, i]
        rows.append(query[:, :, i, None] @ state)
    return torch.cat(rows, 2)


def with_bonus(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, bonus: Tensor) -> Tensor:
    """q_i (S_{i-1} + u k_i v_iᵀ), with u a number for each head."""
    state, rows = torch.zeros_like(outer(key[:, :, 0], value[:, :, 0])), []
    for i in range(key.shape[2]):
        added = outer(key[:, :, i], value[:, :, i])
        rows.append(query[:, :, i, None] @ (state + bonus[:, None, None] * added))
        state = decay[:, :, i, :, None].exp() * state + added
    return torch.cat(rows, 2)


def of_slots(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """softmax(K_t q_t) V_t, with the keys and values of slots for each token, (..., N, M, D)."""
    return (softmax((keys @ query.unsqueeze(-1)).mT) @ values).squeeze(-2)


def held_in_slots(rows: Tensor, keep: Tensor) -> Tensor:
    """diag(α_t) R_{t-1} + (1 - α_t) r_tᵀ for each token, rows (..., N, D) and α (..., N, M) to (..., N, M, D)."""
    written = outer(1 - keep, rows)
    memory, memories = torch.zeros_like(written[:, :, 0]), []
    for i in range(rows.shape[2]):
        memory = keep[:, :, i, :, None] * memory + written[:, :, i]
        memories.append(memory)
    return torch.stack(memories, 2)


def averaged(rows: Tensor, logits: Tensor) -> Tensor:
    """Means of the rows so far, weighed by the softmax of a slot's logits: (..., N, D) to (..., N, M, D)."""
    length = rows.shape[2]
    tril = torch.ones(length, length, dtype=torch.bool).tril()
    return (softmax(hide(logits.mT.unsqueeze(-2), tril)) @ rows.unsqueeze(2)).transpose(2, 3)


def fenwick(query: Tensor, key: Tensor, value: Tensor, levels: Tensor, decay: Tensor) -> Tensor:
    """Σ_j λ_i^(l) e^(g_{j+1} + ... + g_i) (q_i · k_j) v_j, where l is the level of the block that j is in from i."""
    length, ends = query.shape[2], decay.cumsum(-1)
    weights = (query @ key.mT) * (ends[..., :, None] - ends[..., None, :]).tril().exp().tril()
    for i in range(length):
        end, level = i, 0
        weights[:, :, i, i] *= levels[:, :, i, 0]
        while end:  # from the last block before i to the first
            size = end & -end
            level = size.bit_length()
            weights[:, :, i, end - size : end] *= levels[:, :, i, level, None]
            end -= size
    return weights @ value


def trapezoidal(query: Tensor, key: Tensor, value: Tensor, step: Tensor, decay: Tensor, blend: Tensor) -> Tensor:
    """S_i = e^g S_{i-1} + Δ_i ((1 - λ_i) e^g k_{i-1} v_{i-1}ᵀ + λ_i k_i v_iᵀ), read by q_i."""
    written = outer(key, value)
    state, before, rows = torch.zeros_like(written[:, :, 0]), torch.zeros_like(written[:, :, 0]), []
    for i in range(query.shape[2]):
        fade, size, share = (each[:, :, i, None, None] for each in (decay.exp(), step, blend))
        state = fade * state + size * ((1 - share) * fade * before + share * written[:, :, i])
        before = written[:, :, i]
        rows.append(query[:, :, i, None] @ state)
    return torch.cat(rows, 2)


def spun(rows: Tensor, turns: Tensor) -> Tensor:
    """Pairs of neighbouring dims, as complex numbers, times e^(iθ), with θ for the first of them."""
    pairs = torch.view_as_complex(rows.unflatten(-1, (-1, 2)).contiguous())
    angles = torch.zeros_like(pairs.real)
    angles[..., : turns.shape[-1]] = turns
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def standardized(rows: Tensor) -> Tensor:
    """Rows less their mean, over their deviation."""
    rows = rows - rows.mean(-1, keepdim=True)
    return rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def state_space(query: Tensor, key: Tensor, value: Tensor, step: Tensor, rates: Tensor, skip: Tensor) -> Tensor:
    """h_i = e^(Δ_i A) h_{i-1} + Δ_i x_i B_i and C_i · h_i + D x_i for each channel of x (batch, length, channels)."""
    state, rows = torch.zeros_like(rates), []
    for i in range(value.shape[1]):
        size = step[:, i, :, None]
        state = (size * rates).exp() * state + size * outer(value[:, i], key[:, i])
        rows.append((state * query[:, i, None]).sum(-1) + skip * value[:, i])
    return torch.stack(rows, 1)


def regression(query: Tensor, key: Tensor, value: Tensor, ridge: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """What the ridge regression of the values on the keys up to i, weighed by β e^g, predicts for q_i."""
    ends, rows = decay.cumsum(-1), []
    for i in range(query.shape[2]):
        weights = (beta[..., : i + 1] * (ends[..., i : i + 1] - ends[..., : i + 1]).exp()).unsqueeze(-1)
        keys = key[:, :, : i + 1]
        products = keys.mT @ (weights * keys) + torch.diag_embed(ridge)
        rows.append(query[:, :, i, None] @ torch.linalg.inv(products) @ keys.mT @ (weights * value[:, :, : i + 1]))
    return torch.cat(rows, 2)


def corrected(query: Tensor, key: Tensor, value: Tensor, beta: Tensor) -> Tensor:
    """(I + β W)⁻¹ v, with the weights W of the keys before each query."""
    before = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool).tril(-1)
    weights = softmax(hide(query @ key.mT / query.shape[-1] ** 0.5, before)).nan_to_num()
    return torch.linalg.inv(torch.eye(query.shape[2], dtype=query.dtype) + beta.unsqueeze(-1) * weights) @ value


def titans(query: Tensor, key: Tensor, value: Tensor, rate: Tensor, momentum: Tensor, decay: Tensor) -> Tensor:
    """A step with momentum and forgetting for each token, with the gradient of ½ ‖Wᵀ k - v‖² at the W before it."""
    memory = torch.zeros(*query.shape[:2], key.shape[-1], value.shape[-1], dtype=query.dtype)
    step, rows = torch.zeros_like(memory), []
    for t in range(query.shape[2]):
        k, v, numbers = key[:, :, t], value[:, :, t], [each[:, :, t, None, None] for each in (rate, momentum, decay)]
        error = torch.einsum("bhde,bhd->bhe", memory, k) - v
        step = numbers[1] * step - numbers[0] * torch.einsum("bhd,bhe->bhde", k, error)
        memory = numbers[2].exp() * memory + step
        rows.append(torch.einsum("bhde,bhd->bhe", memory, query[:, :, t]))
    return torch.stack(rows, 2)


def ttt_linear(
    query: Tensor, key: Tensor, value: Tensor, rate: Tensor, weights: Tensor, norm: tuple[Tensor, Tensor], size: int
) -> Tensor:
    """A step for each token, with the gradient of ½ ‖x + LN(Wᵀ x) - v‖² by autograd, at the W before its mini-batch."""

    def model(rows: Tensor, weights: Tensor) -> Tensor:
        inner = torch.einsum("bhde,bhd->bhe", weights, rows)
        return rows + norm[0] * torch.nn.functional.layer_norm(inner, inner.shape[-1:], eps=1e-6) + norm[1]

    weights, rows = weights.expand(len(query), *weights.shape), []
    before = weights
    for t in range(query.shape[2]):
        before = before if t % size else weights
        with torch.enable_grad():
            leaf = before.detach().requires_grad_()
            loss = (model(key[:, :, t], leaf) - value[:, :, t]).square().sum() / 2
            [gradient] = torch.autograd.grad(loss, leaf)
        weights = weights - rate[:, :, t, None, None] * gradient
        rows.append(model(query[:, :, t], weights))
    return torch.stack(rows, 2)


def s4d(x: Tensor, step: Tensor, rates: Tensor, weights: Tensor, skip: Tensor) -> Tensor:
    """Σ_l K_l x_{t-l} + D x_t with the kernel K_l = 2 Re Σ_n C_n (e^{ΔA_n} - 1) / A_n e^{lΔA_n} of each channel."""
    turns = step[:, None] * rates
    written = weights * (turns.exp() - 1) / rates
    rows = torch.zeros_like(x)
    for distance in range(x.shape[1]):
        kernel = 2 * (written * (distance * turns).exp()).sum(-1).real
        rows[:, distance:] += kernel * x[:, : x.shape[1] - distance]
    return rows + skip * x
