"""Caches: values that stay as they are, no more memory than the mask needs, and steps that equal the whole sequence."""

import math
import re
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from regard import biases, masks, scores
from regard.errors import ConfigurationError, DeviceError, DtypeError, MaskError, ShapeError
from regard.masks import Mask
from regard.nn import Attention, KVCache, ProjectedMemory, Projections
from regard.nn.caches import kv_cache
from regard.nn.caches.eviction import keys_to_retain
from regard.positions import Rotary

DIM, BATCH, LONGEST = 12, 2, 64


def double(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def token(length: int = 1, batch: int = BATCH, heads: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(batch, heads, length, 5), torch.randn(batch, heads, length, 2)


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


# Masks by which no query attends to a later key, for positions 0..LONGEST-1.
DOCUMENTS = [position // 11 for position in range(LONGEST)]
CLUSTERS = [position * 5 % 7 // 2 for position in range(LONGEST)]
CAUSAL: dict[str, Mask] = {
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(before=5),
    "one-sided window": masks.window(before=4, after=0),
    "only itself": masks.window(0, 0),
    "window and first keys": masks.causal() & (masks.window(before=3) | masks.prefix(2)),
    "window and first keys of each": masks.causal() & (masks.window(before=3) | masks.prefix([1, 4])),
    "window and global tokens": masks.causal() & (masks.window(before=2) | masks.global_tokens([0, 5, 40])),
    "strided": masks.causal() & masks.strided(3),
    "strided and window": masks.causal() & (masks.strided(7) & masks.window(before=20) | masks.window(before=2)),
    "fixed": masks.causal() & masks.fixed(6, 1),
    "blocks": masks.causal() & masks.fixed(5, 0),
    "dilated": masks.dilated(3, 4),
    "padding": masks.causal() & masks.padding(lengths=[40, 13]),
    "documents": masks.causal() & masks.documents(DOCUMENTS),
    "documents and window": masks.documents(DOCUMENTS) & masks.window(before=4, after=0),
    "clusters of heads": masks.causal() & masks.documents([[DOCUMENTS, CLUSTERS, DOCUMENTS, CLUSTERS]]),
    "clusters of heads and window": masks.documents([[DOCUMENTS, CLUSTERS] * 2]) & masks.window(before=4, after=0),
    "random blocks": masks.causal() & masks.random_blocks(LONGEST, 4, 3),
    "random blocks of heads": masks.causal() & masks.random_blocks(LONGEST, 4, 3, heads=4) & masks.window(before=9),
    "a function": masks.from_mod(lambda b, h, q, k: (k <= q) & (q - k < 6)),
    "a function of heads": masks.from_mod(lambda b, h, q, k: (k <= q) & (q - k <= 3 * h), heads=4),
    "not": ~(~masks.causal() | masks.strided(5)),
    "nothing": masks.causal() & ~masks.causal(),
}
# Those of which single keys can be told to be gone for good, the more so where the longest sequence is known.
KNOWN = {
    "window",
    "one-sided window",
    "only itself",
    "window and first keys",
    "window and first keys of each",
    "blocks",
}
KNOWN |= {"window and global tokens", "strided and window", "fixed", "dilated", "padding", "a function", "nothing"}
KNOWN |= {"a function of heads", "documents and window", "clusters of heads and window", "random blocks of heads"}

# Those of which it is told exactly.
EXACT = {"causal", "window", "one-sided window", "only itself", "window and first keys", "fixed", "blocks", "padding"}
EXACT |= {"window and first keys of each", "window and global tokens", "a function", "nothing"}


class TestValue:
    @pytest.mark.parametrize("recorded", [False, True], ids=["no_grad", "grad"])
    @pytest.mark.parametrize("start", [KVCache(), KVCache.static(40), KVCache.rolling(masks.causal())], ids=repr)
    @settings(max_examples=60, deadline=None)
    @given(moves=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 3), st.booleans()), max_size=12))
    def test_no_cache_ever_changes(self, start, recorded, moves):
        """Branches from any cache made so far: each holds what was appended on its own way, and goes on to."""
        known: list[tuple[KVCache, list[torch.Tensor], list[torch.Tensor]]] = [(start, [], [])]
        with torch.set_grad_enabled(recorded):
            for at, length, reorder in moves:
                cache, keys, values = known[at % len(known)]
                key, value = token(length)
                if reorder and cache.contents is not None:
                    rows = torch.tensor([1, 0])
                    cache, keys, values = cache.reorder(rows), [k[rows] for k in keys], [v[rows] for v in values]
                known.append((cache.append(key, value), [*keys, key], [*values, value]))
        for cache, keys, values in known[1:]:
            assert cache.keys.equal(torch.cat(keys, 2))
            assert cache.values.equal(torch.cat(values, 2))
            assert cache.positions.tolist() == list(range(len(cache)))
            assert cache.next_position == len(cache)

    def test_an_empty_cache(self):
        cache = KVCache()
        assert (len(cache), bool(cache), cache.nbytes, cache.next_position, cache.has_default_positions) == (
            0,
            True,
            0,
            0,
            True,
        )
        assert cache.next_positions(3).tolist() == [0, 1, 2]
        assert cache.reorder(torch.tensor([0])) is cache
        for name in ("keys", "values", "positions"):
            with pytest.raises(ConfigurationError, match="the cache is empty: keys, values and positions are there"):
                getattr(cache, name)

    def test_what_is_given_is_not_written_to(self):
        key, value = token(3)
        before = key.clone(), value.clone()
        with torch.no_grad():
            cache = KVCache().append(key, value)
            cache.append(*token(2))
        assert (key.equal(before[0]), value.equal(before[1])) == (True, True)
        key.zero_()
        assert cache.keys.equal(before[0])

    def test_positions_that_are_given(self):
        cache = KVCache().append(*token(3)).append(*token(2), torch.tensor([7, 9]))
        assert cache.positions.tolist() == [0, 1, 2, 7, 9]
        assert cache.next_positions(2).tolist() == [10, 11]
        assert not cache.has_default_positions
        each = cache.append(*token(2), torch.tensor([[10, 11], [20, 30]]))
        assert each.positions.tolist() == [[0, 1, 2, 7, 9, 10, 11], [0, 1, 2, 7, 9, 20, 30]]
        assert each.next_positions(2).tolist() == [[12, 13], [31, 32]]
        more = each.append(*token(1))
        assert more.positions[:, -1].tolist() == [12, 31]
        turned = more.reorder(torch.tensor([1, 1, 0]))
        assert turned.positions[:, -1].tolist() == [31, 31, 12]
        assert turned.next_positions(1).tolist() == [[32], [32], [13]]
        assert turned.append(*token(1, batch=3)).positions.shape == (3, 9)

    def test_positions_for_all_of_a_batch(self):
        cache = KVCache().append(*token(2), torch.tensor([[4, 5]]))
        assert cache.reorder(torch.tensor([1])).positions.tolist() == [[4, 5]]


class TestMemory:
    def test_growing_takes_few_copies(self):
        with torch.no_grad():
            cache, places, sizes = KVCache(), set(), []
            for _ in range(2000):
                cache = cache.append(*token())
                places.add(cache.keys.data_ptr())
                sizes.append(cache.nbytes / (len(cache) * BATCH * 3 * 7 * 4))
        assert len(places) < 15
        assert max(sizes[100:]) < 2

    def test_static_is_made_once(self):
        with torch.no_grad():
            cache, places = KVCache.static(50).append(*token(3)), set()
            size = cache.nbytes
            assert size == BATCH * 3 * 50 * 7 * 4, "consecutive positions take no memory"
            while len(cache) < 50:
                cache = cache.append(*token())
                places.add((cache.keys.data_ptr(), cache.nbytes))
        assert len(places) == 1
        assert cache.nbytes == size
        with pytest.raises(
            ShapeError, match=r"the cache is full: it was made for max_length=50 positions, has 50 and got 1 more"
        ):
            cache.append(*token())
        with pytest.raises(ShapeError, match=r"max_length=4 positions, has 0 and got 5 more"):
            KVCache.static(4).append(*token(5))

    @pytest.mark.parametrize("kind", [KVCache(), KVCache.static(60)], ids=repr)
    def test_a_step_shares_the_memory_before_it(self, kind):
        with torch.no_grad():
            first = kind.append(*token(10))
            second, branch = first.append(*token()), first.append(*token())
        assert second.keys.data_ptr() == first.keys.data_ptr()
        assert branch.keys.data_ptr() != first.keys.data_ptr()

    @pytest.mark.parametrize(
        ("mask", "most"),
        [
            (masks.causal() & masks.window(before=63), 64),
            (masks.causal() & (masks.window(before=59) | masks.prefix(4)), 64),
            (masks.causal() & (masks.window(before=60) | masks.global_tokens([0, 7, 100])), 164),
            (masks.causal() & masks.fixed(64, 0), 64),
            (masks.from_mod(lambda b, h, q, k: (k <= q) & (q - k < 64)), 64),
        ],
        ids=repr,
    )
    def test_rolling_is_constant_in_length(self, mask, most):
        layer = Attention(Projections(8, 2), mask=mask)
        cache, sizes, lengths = layer.make_cache(), [], []
        prompt = torch.randn(1, 300, 8)
        with torch.inference_mode():
            _, cache = layer.step(prompt, cache)
            for _ in range(5000 - 300):
                cache = cache.append(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
                sizes.append(cache.nbytes)
                lengths.append(len(cache))
            output, _ = layer.step(prompt[:, :1], cache)
        assert output.isfinite().all()
        assert cache.next_position == 5000
        assert max(lengths[200:]) <= 1.5 * most + 33
        assert max(sizes[200:]) <= (1.5 * most + 33) * 2 * 2 * 4 * 4 + (1.5 * most + 33) * 8
        assert max(sizes[2500:]) <= max(sizes[200:2500])

    def test_a_long_prompt_is_evicted_after_the_step(self):
        layer = Attention(Projections(8, 2), mask=masks.causal() & masks.window(before=9))
        with torch.no_grad():
            _, cache = layer.step(torch.randn(1, 1000, 8), layer.make_cache())
        assert cache.positions.tolist() == list(range(991, 1000))
        assert cache.nbytes < 60 * (2 * 8 * 4 + 8)


class TestPositionsOnTheHost:
    """Positions that follow from numbers are a range, of which no tensor is written or read."""

    MASK = masks.causal() & masks.window(before=6)

    def test_of_a_cache_that_grows_and_of_a_window(self):
        growing, window = KVCache(), KVCache.rolling(self.MASK)
        with torch.no_grad():
            for count in range(1, 120):
                growing, window = growing.append(*token()), window.append(*token())
                first = count - len(window)
                assert growing.consecutive_positions == range(count)
                assert growing.has_default_positions
                assert window.consecutive_positions == range(first, count)
                assert window.positions.tolist() == list(range(first, count))
                assert window.has_default_positions == (first == 0)
        assert len(window) < 46, "it was evicted"
        turned = window.reorder(torch.tensor([1, 1, 0]))
        assert turned.consecutive_positions == window.consecutive_positions
        assert turned.append(*token(batch=3)).positions[-1] == 119

    def test_not_where_they_are_given_or_others_lie_between(self):
        first_keys = masks.causal() & (masks.window(before=6) | masks.prefix(2))
        with torch.no_grad():
            given = KVCache().append(*token(5), positions=torch.arange(5))
            cache = KVCache.rolling(first_keys).append(*token(60)).append(*token())
        assert given.consecutive_positions is None
        assert given.append(*token()).positions.tolist() == list(range(6))
        assert cache.consecutive_positions is None
        assert cache.positions.tolist() == [0, 1, *range(54, 61)]

    @pytest.mark.parametrize("length", [1, 5, 7, 31, 53])
    def test_steps_of_a_window_are_rows_of_the_whole(self, length):
        """In float32, where native code reads the window alone; the mask of a call joins that of the layer."""
        layer = Attention(Projections(DIM, 4, num_kv_heads=2), mask=self.MASK).eval()
        x = torch.randn(BATCH, length, DIM)
        for mask in (None, masks.window(before=3), masks.padding([length, 3])):
            cache, outputs = layer.make_cache(), []
            with torch.no_grad():
                for one in x.split(1, 1):
                    output, cache = layer.step(one, cache, mask=mask)
                    outputs.append(output)
                close(torch.cat(outputs, 1), layer(x, mask=mask), 1e-5)

    def test_branches_and_beams_of_a_window(self):
        layer = Attention(Projections(DIM, 4), mask=self.MASK).eval()
        x, other = torch.randn(BATCH, 53, DIM), torch.randn(BATCH, 3, DIM)
        with torch.no_grad():
            cache = layer.make_cache()
            for one in x.split(1, 1):
                _, cache = layer.step(one, cache)
            for rows in (torch.tensor([0, 1]), torch.tensor([1, 1])):
                branch, outputs = cache.reorder(rows), []
                for one in other.split(1, 1):
                    output, branch = layer.step(one, branch)
                    outputs.append(output)
                close(torch.cat(outputs, 1), layer(torch.cat([x[rows], other], 1))[:, 53:], 1e-5)


class TestKeysToRetain:
    @pytest.mark.parametrize("max_length", [None, LONGEST])
    @pytest.mark.parametrize("name", CAUSAL)
    def test_a_key_that_any_later_query_attends_to_is_retained(self, name, max_length):
        reach = 2 * LONGEST if name in EXACT and max_length is None else LONGEST
        keep = CAUSAL[name].dense(reach, reach).reshape(-1, reach, reach).any(0)  # of all positions that may come
        dropped = 0
        for first in range(1, LONGEST):
            held = torch.arange(first)
            found = keys_to_retain(CAUSAL[name], held, first, max_length)
            truth = keep[first:, :first].any(0)
            assert not (truth & ~found).any()
            dropped += int((~found).sum())
            if name in EXACT:
                assert found.equal(truth), "nothing more than is needed"
        if name in KNOWN or (max_length is not None and "documents" in name):
            assert dropped

    def test_exactly_what_a_window_with_first_keys_needs(self):
        mask = masks.causal() & (masks.window(before=3) | masks.prefix(2))
        assert keys_to_retain(mask, torch.arange(20), 20).nonzero().flatten().tolist() == [0, 1, 17, 18, 19]

    def test_global_tokens_that_are_yet_to_come_see_all(self):
        mask = masks.causal() & (masks.window(before=3) | masks.global_tokens([0, 50]))
        assert keys_to_retain(mask, torch.arange(20), 20).all()
        assert keys_to_retain(mask, torch.arange(52), 52).nonzero().flatten().tolist() == [0, 49, 50, 51]

    def test_each_sequence_at_positions_of_its_own(self):
        mask = masks.causal() & masks.window(before=3)
        positions = torch.tensor([[0, 1, 2, 3, 4], [-2, -1, 0, 1, 2]])
        assert keys_to_retain(mask, positions, torch.tensor([5, 3])).tolist() == [False, False, True, True, True]

    def test_a_tensor_over_pairs_says_nothing_of_what_comes(self):
        mask = masks.causal() & masks.where(keep=torch.zeros(1, 8, dtype=torch.bool)) & masks.window(before=4)
        assert keys_to_retain(mask, torch.arange(8), 8).tolist() == [False] * 4 + [True] * 4
        assert keys_to_retain(mask, torch.arange(8), 8, 20).tolist() == [False] * 4 + [True] * 4
        assert keys_to_retain(masks.where(keep=torch.zeros(1, 8, dtype=torch.bool)), torch.arange(8), 8).all()

    def test_nothing_comes_any_more(self):
        assert not keys_to_retain(masks.causal(), torch.arange(8), 8, 8).any()


def layers(mask: Mask | None, variant: str) -> Attention:
    """A layer with grouped heads, and one thing more."""
    options = {
        "plain": {},
        "rotary": {"rotary": Rotary(2)},
        "alibi": {"bias": biases.alibi(4)},
        "relative": {"bias": biases.relative(nn.Parameter(torch.randn(4, 8)), max_distance=9, bidirectional=False)},
        "sinks": {"sinks": torch.randn(4)},
        "softcap": {"softcap": 0.7},
        "additive": {"score": scores.Additive(3, 3, 5)},
    }[variant]
    layer = Attention(Projections(DIM, 4, num_kv_heads=2, norm=nn.RMSNorm), mask=mask, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.5)
    return layer.double()


VARIANTS = ("plain", "rotary", "alibi", "relative", "sinks", "softcap", "additive")


def cache_of(kind: str, mask: Mask) -> KVCache:
    return {
        "growing": KVCache(),
        "static": KVCache.static(LONGEST),
        "rolling": KVCache.rolling(mask),
        "rolling with an end": KVCache.rolling(mask, LONGEST),
    }[kind]


KINDS = ("growing", "static", "rolling", "rolling with an end")


def stepped(layer: Attention, x: torch.Tensor, chunks: list[int], cache: KVCache) -> tuple[torch.Tensor, KVCache]:
    outputs = []
    for chunk in x.split(chunks, dim=1):
        output, cache = layer.step(chunk, cache)
        outputs.append(output)
    return torch.cat(outputs, 1), cache


@st.composite
def chunkings(draw) -> list[int]:
    """Lengths of chunks: a prompt and single tokens, or anything."""
    total = draw(st.integers(1, LONGEST))
    if draw(st.booleans()):
        prompt = draw(st.integers(1, total))
        return [prompt, *[1] * (total - prompt)]
    chunks = []
    while total:
        chunks.append(draw(st.integers(1, min(total, 20))))
        total -= chunks[-1]
    return chunks


class TestDecoding:
    @settings(max_examples=150, deadline=None)
    @given(
        name=st.sampled_from(sorted(CAUSAL)),
        variant=st.sampled_from(VARIANTS),
        kind=st.sampled_from(KINDS),
        chunks=chunkings(),
        spare=st.sampled_from([1, 32]),
    )
    def test_steps_equal_the_whole(self, name, variant, kind, chunks, spare):
        mask = CAUSAL[name]
        torch.manual_seed(1)
        layer, x = layers(mask, variant), double(BATCH, sum(chunks), DIM)
        # With little to spare the cache asks the mask, and drops, every few tokens.
        with torch.no_grad(), patch.object(kv_cache, "SPARE", spare):
            output, cache = stepped(layer, x, chunks, cache_of(kind, mask))
            close(output, layer(x))
        assert cache.next_position == sum(chunks)

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("name", CAUSAL)
    def test_every_mask_token_by_token(self, name, kind):
        layer, x = layers(CAUSAL[name], "rotary").float(), torch.randn(BATCH, LONGEST, DIM)
        with torch.no_grad(), patch.object(kv_cache, "SPARE", 1):
            output, cache = stepped(layer, x, [20, *[1] * (LONGEST - 20)], cache_of(kind, CAUSAL[name]))
            close(output, layer(x), 1e-5)
        if kind == "rolling" and name in KNOWN:
            assert len(cache) < LONGEST

    def test_with_the_mask_of_a_call(self):
        layer, x = layers(masks.causal(), "plain"), double(BATCH, 20, DIM)
        padding = masks.padding(lengths=[15, 20])
        outputs, cache = [], layer.make_cache()
        for chunk in x.split(4, dim=1):
            output, cache = layer.step(chunk, cache, mask=padding)
            outputs.append(output)
        close(torch.cat(outputs, 1), layer(x, mask=padding))

    def test_a_prefix_that_sees_itself_is_one_prompt(self):
        mask = masks.causal() | masks.prefix(6)
        layer, x = layers(mask, "plain"), double(BATCH, 20, DIM)
        close(stepped(layer, x, [6, *[1] * 14], layer.make_cache())[0], layer(x))

    @pytest.mark.parametrize("kind", ["growing", "rolling"])
    def test_padding_on_the_left_by_positions_below_0(self, kind):
        """Each sequence ends at the same column; what is in front of it sits at negative positions, and is masked."""
        mask = masks.causal() & masks.window(before=6) & ~masks.prefix(0)
        layer, lengths = layers(mask, "rotary"), [9, 4]
        prompt, after = double(2, 9, DIM), double(2, 40, DIM)
        positions = torch.arange(9) - (9 - torch.tensor(lengths)[:, None])
        with torch.no_grad(), patch.object(kv_cache, "SPARE", 1):
            _, cache = layer.step(prompt, cache_of(kind, mask), positions=positions)
            outputs = []
            for chunk in after.split(1, dim=1):
                output, cache = layer.step(chunk, cache)
                outputs.append(output)
        for row, length in enumerate(lengths):
            alone = torch.cat([prompt[row, 9 - length :], after[row]])[None]
            close(torch.cat(outputs, 1)[row], layer(alone)[0, length:])
        assert torch.as_tensor(cache.next_position).tolist() == [49, 44]
        assert kind == "growing" or len(cache) < 20

    def test_beams_are_reordered(self):
        layer, x = layers(masks.causal() & masks.window(before=4), "rotary"), double(3, 30, DIM)
        rows = torch.tensor([2, 2, 0, 1])
        with torch.no_grad(), patch.object(kv_cache, "SPARE", 1):
            _, cache = stepped(layer, x[:, :20], [1] * 20, layer.make_cache())
            output, _ = stepped(layer, x[rows, 20:], [1] * 10, cache.reorder(rows))
            close(output, layer(x[rows])[:, 20:])
            close(stepped(layer, x[:, 20:], [10], cache)[0], layer(x)[:, 20:])

    def test_two_continuations_of_one_cache(self):
        layer, x = layers(masks.causal(), "plain"), double(BATCH, 12, DIM)
        others = double(2, BATCH, 4, DIM)
        with torch.no_grad():
            _, cache = layer.step(x, layer.make_cache())
            for turn in (0, 1, 0):
                whole = layer(torch.cat([x, others[turn]], 1))[:, 12:]
                close(stepped(layer, others[turn], [1] * 4, cache)[0], whole)

    def test_gradients_are_those_of_the_whole(self):
        layer, x = layers(masks.causal() & masks.window(before=4), "rotary"), double(BATCH, 60, DIM).requires_grad_()
        above = double(BATCH, 60, DIM)
        output, cache = stepped(layer, x, [7, 1, 1, 20, 20, 11], layer.make_cache())
        assert len(cache) < 60
        found = torch.autograd.grad(output, [x, *layer.parameters()], above)
        for ours, expected in zip(found, torch.autograd.grad(layer(x), [x, *layer.parameters()], above), strict=True):
            close(ours, expected, 1e-10)

    def test_from_one_mode_of_torch_to_another(self):
        layer, x = layers(masks.causal(), "plain"), double(BATCH, 20, DIM)
        with torch.inference_mode():
            first, cache = layer.step(x[:, :5], layer.make_cache())
        with torch.no_grad():
            second, cache = layer.step(x[:, 5:8], cache)
        with torch.inference_mode():
            third, cache = layer.step(x[:, 8:11], cache)
        with torch.no_grad():
            fourth, after = layer.step(x[:, 11:12], cache)
            close(torch.cat([first, second, third, fourth], 1), layer(x[:, :12]))
        assert after.next_position == 12

    def test_empty_batches_and_chunks(self):
        layer = layers(masks.causal() & masks.window(before=2), "rotary")
        with torch.no_grad():
            _, cache = layer.step(double(0, 50, DIM), layer.make_cache())
            output, _ = layer.step(double(0, 1, DIM), cache)
            assert output.shape == (0, 1, DIM)
            _, cache = layer.step(double(BATCH, 0, DIM), layer.make_cache())
            x = double(BATCH, 3, DIM)
            close(layer.step(x, cache)[0], layer(x))


def message(text: str) -> str:
    return re.escape(text)


class TestErrors:
    @pytest.mark.parametrize(
        ("keys", "values", "error", "text"),
        [
            ((3, 3, 1, 5), (3, 3, 1, 2), ShapeError, "the cache has the batch size 2, and the new keys have 3"),
            ((2, 4, 1, 5), (2, 4, 1, 2), ShapeError, "the cache has 3 key heads, and the new keys have 4"),
            (
                (2, 3, 1, 6),
                (2, 3, 1, 2),
                ShapeError,
                "the cache has key dim 5, and the new keys have 6: each layer",
            ),
            ((2, 3, 1, 5), (2, 3, 1, 3), ShapeError, "the cache has value dim 2, and the new values have 3"),
            ((2, 3, 1, 5), (2, 3, 2, 2), ShapeError, "keys have the shape (2, 3, 1, 5) and values (2, 3, 2, 2)"),
            ((3, 1, 5), (3, 1, 2), ShapeError, "they need (batch, key heads, length, dim)"),
        ],
    )
    def test_shapes(self, keys, values, error, text):
        cache = KVCache().append(*token(4))
        with pytest.raises(error, match=message(text)):
            cache.append(torch.zeros(keys), torch.zeros(values))

    def test_dtype_and_device(self):
        cache, (key, value) = KVCache().append(*token(4)), token()
        with pytest.raises(
            DtypeError, match=message("the cache has keys of torch.float32, and the new keys are torch.bf")
        ):
            cache.append(key.bfloat16(), value.bfloat16())
        with pytest.raises(DtypeError, match=message("the cache has values of torch.float32, and the new values are")):
            cache.append(key, value.double())
        with pytest.raises(DeviceError, match="the cache is on cpu, and the new keys on meta"):
            cache.append(key.to("meta"), value.to("meta"))

    def test_of_a_layer(self):
        layer = Attention(Projections(DIM, 4))
        _, cache = layer.step(torch.zeros(2, 3, DIM), layer.make_cache())
        with pytest.raises(ShapeError, match="the cache has the batch size 2, and the new keys have 5"):
            layer.step(torch.zeros(5, 1, DIM), cache)
        with pytest.raises(ShapeError, match="the cache has 4 key heads, and the new keys have 2"):
            Attention(Projections(DIM, 4, num_kv_heads=2)).step(torch.zeros(2, 1, DIM), cache)
        with pytest.raises(DtypeError, match="both under autocast or neither"), torch.autocast("cpu", torch.bfloat16):
            layer.step(torch.zeros(2, 1, DIM), cache)

    def test_positions(self):
        cache = KVCache.rolling(masks.causal()).append(*token(4))
        with pytest.raises(ShapeError, match=message("positions has the shape (2,); it needs (1,) or (2, 1)")):
            cache.append(*token(), torch.arange(2))
        with pytest.raises(DtypeError, match="positions needs a tensor of whole numbers"):
            cache.append(*token(), torch.zeros(1))
        with pytest.raises(ConfigurationError, match="positions go back to 2, but a rolling cache has evicted keys"):
            cache.append(*token(), torch.tensor([2]))
        KVCache().append(*token(4)).append(*token(), torch.tensor([2]))

    def test_how_it_is_made(self):
        with pytest.raises(ConfigurationError, match="max_length is 0; it needs at least 1"):
            KVCache.static(0)
        with pytest.raises(ConfigurationError, match="max_length needs a whole number; it is 2.5"):
            KVCache.rolling(masks.causal(), 2.5)  # type: ignore[arg-type]
        with pytest.raises(MaskError, match="a mask is needed here"):
            KVCache.rolling(None)  # type: ignore[arg-type]

    def test_positions_beyond_the_end_of_a_rolling_cache(self):
        cache = KVCache.rolling(masks.causal(), 40).append(*token(38)).append(*token(2))
        with pytest.raises(ConfigurationError, match="for positions below max_length=40, and got positions up to 40"):
            cache.append(*token())
        with pytest.raises(ConfigurationError, match="for positions below max_length=40, and got positions up to 60"):
            KVCache.rolling(masks.causal(), 40).append(*token(2), torch.tensor([30, 60]))

    @pytest.mark.parametrize(
        ("rows", "error", "text"),
        [
            ([5], ShapeError, "rows are in 5..5, but the batch has the size 2: they need to be in 0..1"),
            ([0, -1], ShapeError, "rows are in -1..0, but the batch has the size 2"),
            ([[0, 1]], ShapeError, "rows have the shape (1, 2); torch.int64 rows need (count,)"),
            ([True], ShapeError, "rows have the shape (1,); torch.bool rows need (2,), as the batch has the size 2"),
            ([0.0], DtypeError, "rows need a tensor of whole numbers, torch.int64 for instance, or of bool; this is"),
            (None, DtypeError, "this is a NoneType"),
        ],
    )
    @pytest.mark.parametrize("kind", ["growing", "static", "rolling", "memory", "positions"])
    def test_rows(self, rows, error, text, kind):
        caches = {
            "growing": KVCache().append(*token(2)),
            "static": KVCache.static(4).append(*token(2)),
            "rolling": KVCache.rolling(masks.window(2, 0)).append(*token(2)),
            "memory": ProjectedMemory(*token(2)),
            "positions": ProjectedMemory(*token(2), torch.arange(4).view(2, 2)),
        }
        with pytest.raises(error, match=message(text)):
            caches[kind].reorder(rows if rows is None else torch.tensor(rows))

    @pytest.mark.parametrize("rows", [torch.tensor([True, False]), torch.tensor([0], dtype=torch.int32)])
    def test_rows_of_other_kinds(self, rows):
        keys, values = token(2)
        for cache in (KVCache().append(keys, values), ProjectedMemory(keys, values)):
            assert cache.reorder(rows).keys.equal(keys[:1])
            assert len(cache.reorder(torch.zeros(0, dtype=torch.int64)).values) == 0


def test_room_to_grow():
    assert [kv_cache.with_spare(length) for length in (0, 10, 1000)] == [32, 47, 1532]
    assert math.log(2000 / 32, 1.5) < 15  # how often a cache of 2,000 grows


@torch.no_grad()
def test_other_rows_take_little_more_memory_than_they_hold():
    """Fresh memory costs a beam search more than the copies: no room for steps that most reorderings do not see."""
    cache = KVCache().append(torch.randn(5, 3, 41, 7), torch.randn(5, 3, 41, 2))
    rows = torch.tensor([4, 0, 0, 3, 1, 2, 2])
    turned = cache.reorder(rows)
    assert turned.keys.equal(cache.keys[rows])
    assert turned.values.equal(cache.values[rows])
    held = turned.keys.nbytes + turned.values.nbytes
    assert held <= turned.nbytes < 1.2 * held < cache.nbytes * 7 / 5
    key, value = torch.randn(7, 3, 9, 7), torch.randn(7, 3, 9, 2)
    longer = turned.append(key, value)  # beyond what it has room for
    assert longer.keys.equal(torch.cat([cache.keys[rows], key], 2))
    assert turned.reorder(torch.tensor([True, False] * 3 + [False])).values.equal(cache.values[[4, 0, 1]])
