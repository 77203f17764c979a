"""Texts that join and leave a running batch are continued as each alone: by pages, in chunks, with drafts."""

import random
from typing import Any

import pytest
import torch

import regard
from regard.errors import ConfigurationError, PagesExhausted, ShapeError
from regard.lenses import Entropy, TopK, Weights
from regard.masks import causal
from regard.models.language_model import (
    AttentionConfig,
    ContinuousBatch,
    DraftModel,
    LayerConfig,
    LinearAttentionConfig,
    PagedModel,
    PromptLookup,
    Sampling,
)
from regard.nn.caches import LayerHeads, PagedMemory, RaggedStep
from regard.nn.caches.layer_pages import NumberPages
from regard.positions import DynamicNTK, Rotary

ROTARY = Rotary(8)
PLAIN = AttentionConfig(num_heads=4, num_kv_heads=2)  # whose keys native code reads in their pages
LAYERS = {
    "plain": ((LayerConfig(rotary=ROTARY),) * 2, PLAIN),
    "windows": ((LayerConfig(before=6, rotary=ROTARY), LayerConfig(rotary=ROTARY)), PLAIN),
    "windows and sinks": (
        (LayerConfig(before=9, rotary=ROTARY), LayerConfig(rotary=ROTARY)),
        AttentionConfig(num_heads=4, num_kv_heads=2, sinks=True),
    ),
    "a window and a prefix": ((LayerConfig(before=6, prefix=3, rotary=ROTARY),), PLAIN),
    "softcap": ((LayerConfig(rotary=ROTARY),), AttentionConfig(num_heads=4, softcap=20.0)),
}


def alone(model, prompt, count, sampling=None, seed=None, stop=()):
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    stream = model.generate(torch.tensor([prompt]), count, sampling=sampling, generator=generator, stop=stop)
    return [int(token) for token in stream]


def drain(batch):
    while not batch.is_empty:
        batch.step()


@pytest.fixture(params=LAYERS)
def model(request, make):
    layers, attention = LAYERS[request.param]
    torch.manual_seed(4)
    return make(layers, attention=attention)


@pytest.mark.parametrize("native", [True, False])
def test_pieces_of_many_texts_are_read_as_each_text(model, native, monkeypatch):
    """The last features of every piece, whatever is read beside it, are those of the whole text alone."""
    if not native:
        monkeypatch.setattr("regard.nn.caches.ragged_step._reader", lambda keys, values: None)
    draw, paged = random.Random(5), PagedModel(model, pages=70, size=8)
    texts = [[draw.randrange(61) for _ in range(length)] for length in (37, 131, 5, 67)]
    sequences, found = [paged.sequence(number) for number in range(4)], [[] for _ in texts]
    while any(len(sequence) < len(text) for sequence, text in zip(sequences, texts, strict=True)):
        pieces = [draw.choice([0, 1, 1, 2, 5, 40]) for _ in texts]
        parts = [
            (sequence, text[len(sequence) : len(sequence) + piece])
            for sequence, text, piece in zip(sequences, texts, pieces, strict=True)
        ]
        features = iter(paged.read(parts).split([len(tokens) for _, tokens in parts]))
        for number, rows in enumerate(features):
            found[number].append(rows)
    with torch.no_grad():
        for text, rows in zip(texts, found, strict=True):
            torch.testing.assert_close(torch.cat(rows), model.features(torch.tensor([text]))[0], atol=2e-5, rtol=2e-5)


def test_native_code_reads_pages_of_plain_layers(make, monkeypatch):
    """A step of texts with keys in several runs gathers no key."""
    model = make((LayerConfig(rotary=ROTARY),), attention=PLAIN)
    paged = PagedModel(model, pages=40, size=4)
    sequences = [paged.sequence(number) for number in range(3)]
    paged.read([(sequence, [1] * 9) for sequence in sequences])
    monkeypatch.setattr(NumberPages, "of", None)
    paged.read([(sequence, [2] * count) for sequence, count in zip(sequences, (1, 1, 3), strict=True)])


DRAFTS = {
    "none": lambda model: None,
    "lookup": lambda model: PromptLookup(2, 1),
    "itself": lambda model: DraftModel(model, 200, 8),
    "itself, in too few pages": lambda model: DraftModel(model, 12, 8),
}


@pytest.mark.parametrize(("draft", "count"), [*zip(DRAFTS, (150, 50, 50, 50), strict=True)])
def test_random_arrivals_and_cancellations(make, draft, count):
    """Hundreds of texts of any length, some drawn, some alike, some ended early, in a memory that is too small."""
    torch.manual_seed(6)
    layers = LayerConfig(before=20, rotary=ROTARY), LayerConfig(rotary=ROTARY)
    model, draw = make(layers, attention=PLAIN), random.Random(7)
    batch = ContinuousBatch(model, pages=19, size=8, most=6, chunk=40, draft=DRAFTS[draft](model))
    common = [draw.randrange(61) for _ in range(50)]
    jobs = [
        (
            common[: draw.choice([0, 0, 20, 50])] + [draw.randrange(61) for _ in range(draw.randint(1, 60))],
            draw.randint(1, 30),
            Sampling(temperature=0.8, top_k=20) if number % 3 == 1 else None,
            number,
            range(9) if number % 2 == 0 else (),
        )
        for number in range(count)
    ]
    running = []
    while jobs or not batch.is_empty:
        for _ in range(draw.choice([0, 0, 1, 3])):
            if jobs:
                prompt, most, sampling, seed, stop = job = jobs.pop()
                running.append((batch.add(prompt, most, sampling=sampling, seed=seed, stop=stop), job))
        new = batch.step()
        assert all(each.token in each.continuation.tokens for each in new)
        left = [continuation for continuation, _ in running if continuation.reason is None]
        if left and draw.random() < 0.2:
            batch.cancel(draw.choice(left))
    reasons = [continuation.reason for continuation, _ in running]
    assert len(running) == count
    assert {"stop", "length", "cancelled"} == set(reasons)
    assert batch.paged.memory.pool.free == 19
    assert not batch.paged.memory.pool.sequences
    assert batch.counts.interrupted > 0
    assert batch.counts.found > 4 * count
    for continuation, job in running:
        expected = alone(model, *job)
        if continuation.reason == "cancelled":
            expected = expected[: len(continuation.tokens)]
        assert continuation.tokens == expected


def test_a_model_that_drafts_itself_is_right(make):
    model = make((LayerConfig(rotary=ROTARY),) * 2, attention=PLAIN)
    draft = DraftModel(model, 20)
    batch = ContinuousBatch(model, pages=20, draft=draft, drafted=4)
    continuation, steps = batch.add([5, 6, 7], 41), 0
    while not batch.is_empty:
        batch.step()
        steps += 1
    assert continuation.tokens == alone(model, [5, 6, 7], 41)
    assert steps == 1 + 8  # five tokens a step, after the first
    assert batch.counts.accepted == batch.counts.drafted == 32
    assert not draft.paged.memory.pool.sequences


def test_lookup_drafts_what_followed_before():
    lookup = PromptLookup(longest=3, shortest=2)
    texts = {1: [1, 2, 3, 4, 9, 2, 3], 2: [1, 2, 3], 3: [7, 7, 7, 7], 4: [256, 1, 0, 1]}
    assert lookup.propose(texts, 2) == {1: [4, 9], 2: [], 3: [7], 4: []}
    assert PromptLookup(1, 1).propose({4: [256, 1, 0, 1]}, 5) == {4: [0, 1]}
    with pytest.raises(ConfigurationError, match="shortest is 4; it needs to be at most longest, 3"):
        PromptLookup(3, 4)


def test_prompts_are_read_in_chunks_while_others_go_on(make):
    model = make((LayerConfig(rotary=ROTARY),), attention=PLAIN)
    batch = ContinuousBatch(model, pages=40, chunk=30)
    first = batch.add([1, 2], 50)
    batch.step()
    batch.add([3] * 200, 2)
    for before in range(1, 7):
        assert len(first.tokens) == before
        assert [each.continuation for each in batch.step()] == [first]
    assert batch.counts.read == 2 + 6 * 31


def test_a_prompt_that_was_read_is_found(make):
    model = make((LayerConfig(rotary=ROTARY),), attention=PLAIN)
    batch, prompt = ContinuousBatch(model, pages=40, size=8), list(range(50))
    for question in ([51, 52], [53], [54]):
        continuation = batch.add([*prompt, *question], 3)
        drain(batch)
        assert continuation.tokens == alone(model, [*prompt, *question], 3)
    assert batch.counts.found == 2 * 48
    again = batch.add([*prompt, 53, *alone(model, [*prompt, 53], 3)[:2], 7], 3)  # and what was generated, too
    drain(batch)
    assert again.tokens == alone(model, [*again.prompt], 3)


def test_lenses_see_the_weights_of_each_new_token(make):
    model = make((LayerConfig(rotary=ROTARY), LayerConfig(before=6, rotary=ROTARY)), attention=PLAIN)
    batch, weights, spread = ContinuousBatch(model, pages=40, size=8), Weights(), Entropy()
    watched = batch.add([5, 6, 7, 8, 9, 3, 4], 4, lenses=[weights, spread], likeliest=3)
    other, new = batch.add([1, 2, 3], 4), []
    while not batch.is_empty:
        new.extend(batch.step())
    assert other.tokens == alone(model, [1, 2, 3], 4)
    own = [each for each in new if each.continuation is watched]
    assert [each.token for each in own] == watched.tokens == alone(model, [*watched.prompt], 4)
    assert not any(each.observed for each in new if each.continuation is other)
    with torch.no_grad():
        seen = model.observe(torch.tensor([watched.text[:-1]]), weights, spread)
    for number, each in enumerate(own, 6):
        chances = seen.logits[0, number].log_softmax(-1)
        assert each.chances.log_probability == pytest.approx(float(chances[each.token]), abs=1e-5)
        assert [token for token, _ in each.chances.likeliest] == chances.topk(3).indices.tolist()
        for layer, observed in enumerate(each.observed):
            expected = seen[weights][layer][0, :, number, : number + 1]
            torch.testing.assert_close(observed[weights][0, :, 0], expected, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                observed[spread][0, :, 0], seen[spread][layer][0, :, number], atol=1e-5, rtol=1e-5
            )


def test_generate_many(make):
    model = make((LayerConfig(rotary=ROTARY),), attention=PLAIN)
    texts, found = [[1, 2, 3], torch.tensor([4]), [5] * 40], {0: [], 1: [], 2: []}
    for number, token in model.generate_many(texts, 6, sampling=Sampling(2.0), seeds=[1, 2, 3], stop=7):
        found[number].append(token)
    for number, text in enumerate([[1, 2, 3], [4], [5] * 40]):
        assert found[number] == alone(model, text, 6, Sampling(2.0), number + 1, 7)
    assert len(list(model.generate_many(texts, 6, pages=1))) == 18
    with pytest.raises(ConfigurationError, match="there are 1 seeds for 3 texts"):
        model.generate_many(texts, 6, seeds=[1])
    assert list(model.generate_many([], 6)) == []


def test_bad_texts(make):
    batch = ContinuousBatch(make((LayerConfig(rotary=ROTARY),), attention=PLAIN), pages=2, size=8)
    texts: list[tuple[Any, str]] = [([], "no tokens"), ([1, 61], "61"), ([1, -1], "-1"), (["a"], "'a'")]
    for text, has in texts:
        with pytest.raises(ShapeError, match=f"the text has {has}; it needs one token at least"):
            batch.add(text, 3)
    with pytest.raises(
        PagesExhausted, match="has 10 tokens and may get 7 more, which are 3 pages of 8, but the memory has 2"
    ):
        batch.add([1] * 10, 7)
    with pytest.raises(ConfigurationError, match="max_new_tokens is 0"):
        batch.add([1], 0)
    with pytest.raises(ConfigurationError, match="stop has the token 99"):
        batch.add([1], 1, stop=99)
    assert batch.is_empty
    assert batch.step() == []


def test_a_step_that_fails_loses_nothing(make, monkeypatch):
    model = make((LayerConfig(rotary=ROTARY),), attention=PLAIN)
    batch = ContinuousBatch(model, pages=4, size=8)
    continuation = batch.add([1, 2, 3], 5)
    batch.step()
    with monkeypatch.context() as patched:
        patched.setattr(model, "next_features", lambda *args, **named: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            batch.step()
    drain(batch)
    assert continuation.tokens == alone(model, [1, 2, 3], 5)


REFUSED = {
    "linear": ((LayerConfig(linear=LinearAttentionConfig()),), "layer 0 is a LinearAttention, whose state"),
    "shared": (
        (LayerConfig(rotary=ROTARY), LayerConfig(rotary=ROTARY, keys_from=0)),
        "layer 0 shares keys with another",
    ),
    "length": ((LayerConfig(rotary=Rotary(8, scaling=DynamicNTK(2.0, 64))),), "depend on the length of its text"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_layers_without_keys_of_their_own_in_pages(make, name):
    layers, message = REFUSED[name]
    with pytest.raises(ConfigurationError, match=message):
        ContinuousBatch(make(layers, attention=PLAIN), pages=4)


def test_bfloat16_reads_its_pages(make):
    model = make((LayerConfig(rotary=ROTARY),) * 2, attention=PLAIN).bfloat16()
    paged = PagedModel(model, pages=20, size=8)
    sequences = [paged.sequence(number) for number in range(2)]
    assert paged.memory.layers[0].keys.dtype == torch.bfloat16
    texts = [[number] * 9 for number in (3, 4)]
    paged.read([(sequence, text[:-1]) for sequence, text in zip(sequences, texts, strict=True)])
    features = paged.read([(sequence, text[-1:]) for sequence, text in zip(sequences, texts, strict=True)])
    with torch.no_grad():
        for row, text in zip(features, texts, strict=True):
            expected = model.float().features(torch.tensor([text]))[0, -1]
            model.bfloat16()
            assert (row.float() - expected).norm() < 0.03 * expected.norm()


@pytest.mark.parametrize("tokens", [1, 3])
def test_a_packed_layer_is_attention_of_each_sequence(tokens):
    """All biases, masks and normalizers go by the ordinary call of each sequence, over its own keys."""
    memory, generator = PagedMemory([LayerHeads(2, 8, 5)], 30, 4), torch.Generator().manual_seed(1)
    sequences = [memory.sequence(number) for number in range(3)]
    for count in (9, 4):  # in turn, so that the pages of one are no neighbours
        for sequence in sequences:
            sequence.extend([0] * count)
    lengths = [len(sequence) for sequence in sequences]
    memory.layers[0].keys.normal_(generator=generator)
    memory.layers[0].values.normal_(generator=generator)
    step = RaggedStep.of(memory, [(sequence, tokens) for sequence in sequences])
    query = torch.randn(1, 4, 3 * tokens, 8, generator=generator)
    bias = regard.biases.alibi(4)
    calls: list[Any] = [
        {"mask": causal()},
        {"mask": causal() & regard.masks.window(before=4)},
        {"mask": causal() & regard.masks.window(before=4), "bias": bias},
        {"mask": causal(), "bias": bias},
        {"mask": causal() & (regard.masks.window(before=3) | regard.masks.prefix(2)), "softcap": 3.0},
        {"mask": causal(), "sinks": torch.tensor([0.0, 1.0, -1.0, 2.0])},
        {"mask": causal(), "normalizer": regard.normalizers.Softmax1()},
    ]
    for options in calls:
        output, _ = step.layer(0).attend((query, query, query), options)
        for number, length in enumerate(lengths):
            rows, slots = slice(number * tokens, (number + 1) * tokens), sequences[number].slots(range(length))
            keys, values = memory.layers[0].keys[:, :, slots], memory.layers[0].values[:, :, slots]
            wide = (tensor.double() for tensor in (keys, values))
            own = {name: each.double() if isinstance(each, torch.Tensor) else each for name, each in options.items()}
            expected = regard.attention(query[:, :, rows].double(), *wide, kernel="reference", **own)
            torch.testing.assert_close(output[:, :, rows].double(), expected, atol=1e-5, rtol=1e-5)


def test_top_keys_of_one_sequence(make):
    paged = PagedModel(make((LayerConfig(rotary=ROTARY),), attention=PLAIN), pages=9, size=8)
    lens = TopK(2)
    paged.read([(paged.sequence("a"), [1, 2, 3]), (paged.sequence("b"), [4, 5])], {1: [lens]})
    assert [*paged.observed] == [1]
    assert paged.observed[1][0][lens].columns.shape[-2:] == (2, 2)
