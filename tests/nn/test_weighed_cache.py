"""Eviction by weight, against a naive form of each policy: which keys stay step by step, and outputs over these."""

from typing import Any

import pytest
import torch

import regard
from regard import masks
from regard.biases.alibi import alibi_slopes
from regard.errors import ConfigurationError, ShapeError
from regard.lenses import Distance, Received, TopK, Weights
from regard.nn import H2O, TOVA, Attention, LatentAttention, LatentProjections, Projections, SnapKV, WeighedCache
from regard.positions import Rotary

DIM, HEADS, KEY_HEADS, HEAD_DIM = 24, 6, 2, 6
GROUP = HEADS // KEY_HEADS
POLICIES: list[Any] = [
    H2O(heavy=5, recent=3),
    H2O(1, 1),
    SnapKV(11, window=4, kernel=3),
    SnapKV(7, 2, 5),
    TOVA(7),
    TOVA(1),
]
STEPS = {
    "tokens": [1] * 31,
    "a prompt, then tokens": [23, *[1] * 11],
    "parts of all sizes": [13, 1, 5, 1, 1, 7, 2, 1, 3],
}

policies = pytest.mark.parametrize("policy", POLICIES, ids=str)


def make_layer(mask=None, **options) -> Any:
    projections = Projections(DIM, HEADS, num_kv_heads=KEY_HEADS, head_dim=HEAD_DIM)
    layer = Attention(projections, mask=masks.causal() if mask is None else mask, rotary=Rotary(4), **options)
    with torch.no_grad():
        projections.query.weight.mul_(3.0)  # weights that are far from uniform
    return layer.double().eval()


class NaiveSequence:
    """One sequence of a batch: lists of keys for each key head, each a dict of k, v, its position and its weight."""

    def __init__(self, layer, policy: Any, before=None):
        self.layer, self.before = layer, before
        self.policy: Any = policy
        self.stored = [[] for _ in range(KEY_HEADS)]
        self.next_position = 0

    def step(self, x, positions=None):
        """The outputs (M, dim) of tokens (M, dim); then keys are evicted."""
        count = len(x)
        at = list(range(self.next_position, self.next_position + count)) if positions is None else positions.tolist()
        self.next_position = max(at) + 1
        own = self.layer.projections
        keys, values = own.keys_and_values(x[None])
        queries = self.layer.rotary.rotate(own.queries(x[None]), torch.tensor(at))[0]
        keys, values = self.layer.rotary.rotate(keys, torch.tensor(at))[0], values[0]
        for head, stored in enumerate(self.stored):
            new = zip(keys[head], values[head], at, strict=True)
            stored += [{"k": k, "v": v, "at": position, "weight": 0.0} for k, v, position in new]
        asked = self.asked(count)
        received = [[0.0] * len(stored) for stored in self.stored]
        contexts = torch.zeros(count, HEADS, HEAD_DIM, dtype=x.dtype)
        for head in range(HEADS):
            stored = self.stored[head // GROUP]
            for row, position in enumerate(at):
                seen = [n for n, key in enumerate(stored) if self.sees(position, key["at"])]
                if not seen:
                    continue
                scores = torch.stack([queries[head, row] @ stored[n]["k"] for n in seen]) / HEAD_DIM**0.5
                weights = scores.softmax(0)
                contexts[row, head] = sum(weight * stored[n]["v"] for n, weight in zip(seen, weights, strict=True))
                for n, weight in zip(seen, weights.tolist(), strict=True):
                    received[head // GROUP][n] += weight if row >= count - asked else 0.0
        self.evict(received, count)
        return own.output(contexts.flatten(1))

    def sees(self, query, key):
        return key >= 0 and key <= query and (self.before is None or query - key <= self.before)

    def asked(self, count):
        return {H2O: count, SnapKV: min(count, getattr(self.policy, "window", 1)), TOVA: 1}[type(self.policy)]

    def evict(self, received, count):
        policy, kind = self.policy, type(self.policy)
        if kind is TOVA:
            received = [[sum(column) for column in zip(*received, strict=True)]] * KEY_HEADS
        for head, stored in enumerate(self.stored):
            for key, weight in zip(stored, received[head], strict=True):
                key["weight"] = weight + (key["weight"] if kind is H2O else 0.0)
            weights, chosen = [key["weight"] for key in stored], range(len(stored))
            if kind is H2O:
                last = set(chosen[-policy.recent :])
                others = self.heaviest([n for n in chosen if n not in last], weights, stored)
                chosen = last | set(others[: policy.heavy]) if len(stored) > policy.heavy + policy.recent else chosen
            elif kind is TOVA:
                chosen = self.heaviest(chosen, weights, stored)[: policy.size]
            elif count >= policy.window and len(stored) > policy.size:
                last, half = chosen[-policy.window :], policy.kernel // 2
                before = chosen[: -policy.window]
                pooled = [sum(weights[m] for m in before if abs(m - n) <= half) / policy.kernel for n in before]
                chosen = {*last, *self.heaviest(before, pooled, stored)[: policy.size - policy.window]}
            self.stored[head] = [stored[n] for n in sorted(chosen)]

    @staticmethod
    def heaviest(numbers, weights, stored):
        """The heaviest first; padding last; of equal weights the later one first."""
        return sorted(numbers, key=lambda n: (stored[n]["at"] >= 0, weights[n], n), reverse=True)

    def positions(self):
        return [[key["at"] for key in stored] for stored in self.stored]


def kept(cache, row):
    """The positions of the keys of each head."""
    positions = cache.positions[row]
    return (positions if positions.ndim == 2 else positions.expand(KEY_HEADS, -1)).tolist()


@policies
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
@torch.no_grad()
def test_keys_and_outputs_are_those_of_the_naive_form(policy, steps):
    layer, x = make_layer(), torch.randn(2, sum(steps), DIM, dtype=torch.float64)
    naive, cache = [NaiveSequence(layer, policy) for _ in range(2)], WeighedCache(policy)
    for part in x.split(steps, dim=1):
        output, cache = layer.step(part, cache)
        for row, sequence in enumerate(naive):
            torch.testing.assert_close(output[row], sequence.step(part[row]), atol=1e-9, rtol=1e-9)
            assert kept(cache, row) == sequence.positions()
    if policy.per_head and policy.capacity > 4 and not cache.has_default_positions:
        assert kept(cache, 0)[0] != kept(cache, 0)[1]


@policies
@torch.no_grad()
def test_a_window_of_the_layer_holds_too(policy):
    layer, x = make_layer(masks.causal() & masks.window(before=9)), torch.randn(1, 37, DIM, dtype=torch.float64)
    naive, cache = NaiveSequence(layer, policy, before=9), WeighedCache(policy)
    for part in x.split([13, *[1] * 24], dim=1):
        output, cache = layer.step(part, cache)
        torch.testing.assert_close(output[0], naive.step(part[0]), atol=1e-9, rtol=1e-9)
        assert kept(cache, 0) == naive.positions()


@policies
@torch.no_grad()
def test_padding_on_the_left_is_kept_last_and_never_seen(policy):
    layer, steps, lengths = make_layer(), [17, 1, 1, 3, *[1] * 9], [17, 6, 1]
    x = torch.randn(3, sum(steps), DIM, dtype=torch.float64)
    naive, cache = [NaiveSequence(layer, policy) for _ in lengths], WeighedCache(policy)
    positions = torch.arange(17) - 17 + torch.tensor(lengths)[:, None]
    for number, part in enumerate(x.split(steps, dim=1)):
        at = positions if number == 0 else None
        output, cache = layer.step(part, cache, mask=~masks.prefix(0), positions=at)
        for row, sequence in enumerate(naive):
            real = slice(17 - lengths[row] if number == 0 else 0, None)
            expected = sequence.step(part[row], None if at is None else at[row])
            torch.testing.assert_close(output[row, real], expected[real], atol=1e-9, rtol=1e-9)
            assert kept(cache, row) == sequence.positions()
    alone = WeighedCache(policy)
    if not isinstance(policy, SnapKV):  # whose prompt of 6 tokens has a window of other queries than one padded to 17
        for part in x[1:2, 11:].split([6, *steps[1:]], dim=1):
            expected, alone = layer.step(part, alone)
        torch.testing.assert_close(output[1:2], expected, atol=1e-9, rtol=1e-9)
        assert [at for at in kept(cache, 1)[0] if at >= 0] == kept(alone, 0)[0]


@policies
@torch.no_grad()
def test_memory_stays_as_it_is(policy):
    layer, cache, sizes = make_layer(), WeighedCache(policy), []
    for step in (40, *[1] * 60):
        before = cache.nbytes
        _, cache = layer.step(torch.randn(2, step, DIM, dtype=torch.float64), cache)
        sizes.append((len(cache), cache.nbytes - before))
    assert cache.next_position == 100
    grown = [len_ for len_, _ in sizes]
    if isinstance(policy, SnapKV):  # that of the prompt stays, generated keys are added
        assert grown == [policy.size + number for number in range(61)]
    else:
        assert grown == [policy.capacity] * 61
        assert {change for _, change in sizes[1:]} == {0}


@torch.no_grad()
def test_a_policy_with_room_for_all_changes_nothing():
    layer, x = make_layer(), torch.randn(2, 20, DIM, dtype=torch.float64)
    for policy in (H2O(20, 20), SnapKV(40, 4), TOVA(20)):
        cache, outputs = WeighedCache(policy), []
        for part in x.split([11, 1, 1, 7], dim=1):
            output, cache = layer.step(part, cache)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x), atol=1e-10, rtol=1e-10)
        assert cache.has_default_positions
        assert len(cache) == 20


@policies
@torch.no_grad()
def test_caches_are_values_and_rows_may_repeat(policy):
    layer = make_layer()
    _, cache = layer.step(torch.randn(2, 19, DIM, dtype=torch.float64), WeighedCache(policy))
    x = torch.randn(2, 3, DIM, dtype=torch.float64)
    (first, after), (again, _) = layer.step(x, cache), layer.step(x, cache)
    assert torch.equal(first, again)
    rows = torch.tensor([1, 1, 0])
    reordered, other = layer.step(x[rows], cache.reorder(rows))
    torch.testing.assert_close(reordered, first[rows], atol=1e-12, rtol=1e-12)
    assert torch.equal(other.positions, after.positions[rows])
    empty = WeighedCache(policy)
    assert empty.reorder(rows) is empty
    assert empty


@policies
@torch.no_grad()
def test_other_lenses_see_the_weights_of_the_step(policy):
    layer, x = make_layer(), torch.randn(2, 21, DIM, dtype=torch.float64)
    _, cache = layer.step(x[:, :17], WeighedCache(policy))
    weights, largest, received, distance = Weights(), TopK(1), Received(), Distance((1, 5))
    seen, after = layer.observe_step(x[:, 17:], cache, weights, largest, received, distance)
    output, _ = layer.step(x[:, 17:], cache)
    torch.testing.assert_close(seen.output, output, atol=1e-12, rtol=1e-12)
    found = seen[weights]
    assert found.shape == (2, HEADS, 4, len(cache) + 4)
    torch.testing.assert_close(found.sum(-1), torch.ones(2, HEADS, 4, dtype=found.dtype))
    torch.testing.assert_close(seen[received], found.sum(-2).to(seen[received].dtype), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(seen[largest].weights[..., 0], found.amax(-1).to(seen[largest].weights.dtype))
    positions = cache.positions if cache.positions.ndim == 3 else cache.positions[:, None].expand(-1, KEY_HEADS, -1)
    positions = torch.cat([positions, torch.arange(17, 21).expand(2, KEY_HEADS, 4)], 2).repeat_interleave(GROUP, 1)
    away = (torch.arange(17, 21)[:, None] - positions[:, :, None]).abs()
    torch.testing.assert_close(seen[distance].mean.double(), (found * away).sum(-1), atol=1e-4, rtol=1e-5)
    assert seen[distance].histogram.shape[:2] == (2, HEADS)
    assert after.next_position == 21


@torch.no_grad()
def test_keys_that_all_heads_keep_allow_biases_sinks_and_latents():
    sinks, bias = torch.randn(HEADS), regard.biases.alibi(HEADS)
    layer = make_layer(sinks=sinks, bias=bias)
    cache = WeighedCache(TOVA(5))
    _, cache = layer.step(torch.randn(1, 12, DIM, dtype=torch.float64), cache)
    token = torch.randn(1, 1, DIM, dtype=torch.float64)
    output, after = layer.step(token, cache)
    own, at = layer.projections, torch.tensor([12])
    keys, values = own.keys_and_values(token)
    keys = torch.cat([cache.keys, layer.rotary.rotate(keys, at)], 2).repeat_interleave(GROUP, 1)
    values = torch.cat([cache.values, values], 2).repeat_interleave(GROUP, 1)
    scores = layer.rotary.rotate(own.queries(token), at) @ keys.mT / HEAD_DIM**0.5
    slopes = alibi_slopes(HEADS).double()
    scores = scores - slopes[:, None, None] * (12 - torch.cat([cache.positions, at[None]], 1))[:, None, None]
    with_sinks = torch.cat([scores, layer.sinks.view(1, HEADS, 1, 1)], -1).softmax(-1)[..., :-1]
    torch.testing.assert_close(output, own.project_output(with_sinks @ values), atol=1e-6, rtol=1e-6)
    weights = with_sinks.sum((1, 2))[0]
    order = sorted(range(6), key=lambda n: float(weights[n]), reverse=True)[:5]
    expected = [[*cache.positions[0].tolist(), 12][n] for n in sorted(order)]
    assert after.positions.tolist() == [expected]

    latent = LatentAttention(LatentProjections(16, 4, latent_dim=6, rotary_dim=2), Rotary(2), mask=masks.causal())
    cache = WeighedCache(H2O(4, 4))
    for _ in range(20):
        output, cache = latent.eval().step(torch.randn(1, 1, 16), cache)
    assert (len(cache), output.shape) == (8, (1, 1, 16))


def test_what_heads_with_keys_of_their_own_have_not():
    x = torch.randn(1, 5, DIM, dtype=torch.float64)
    for options, name in (({"sinks": torch.zeros(HEADS)}, "sinks"), ({"bias": regard.biases.alibi(HEADS)}, "a bias")):
        with pytest.raises(ConfigurationError, match=f"has {name}, but each head of this cache keeps keys of its own"):
            make_layer(**options).step(x, WeighedCache(H2O(2, 2)))
    own = Attention(Projections(DIM, HEADS)).double()
    with pytest.raises(ConfigurationError, match="has a tensor as mask, but each head .*: TOVA keeps the same keys"):
        own.step(x, WeighedCache(SnapKV(4, 2)), mask=torch.ones(5, 5, dtype=torch.bool))


def test_numbers_out_of_range_and_other_misuse():
    for make, message in (
        (lambda: H2O(0, 1), "heavy is 0; it needs at least 1"),
        (lambda: H2O(1, 2.5), "recent needs a whole number; it is 2.5"),  # type: ignore[arg-type]
        (lambda: TOVA(0), "size is 0; it needs at least 1"),
        (lambda: SnapKV(8, kernel=4), "kernel is 4; it needs an odd number"),
        (lambda: SnapKV(32, window=32), "window is 32 of size=32 keys, which leaves none of those before"),
        (lambda: WeighedCache(TOVA(2)).keys, "the cache is empty"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make()
    layer, x = make_layer(), torch.randn(2, 5, DIM, dtype=torch.float64)
    with pytest.raises(ConfigurationError, match="keys that layers share cannot be evicted by the weights of one"):
        layer.extend(x, WeighedCache(TOVA(2)))
    _, cache = layer.step(x, WeighedCache(TOVA(2)))
    with pytest.raises(ShapeError, match="the cache has the batch size 2, and the new keys have 1"):
        layer.step(x[:1], cache)
    with pytest.raises(ShapeError, match="rows are in 0..2, but the batch has the size 2"):
        cache.reorder(torch.tensor([0, 2]))
