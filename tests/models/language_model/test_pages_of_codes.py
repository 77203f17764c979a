"""Keys and values of many sequences as codes in pages: read as each sequence alone, and as float64 has them."""

from contextlib import nullcontext

import pytest
import torch

import regard
from regard import masks, native
from regard.backends.cpu import library
from regard.core.packed_rows import PackedTensor
from regard.core.packing import Packing
from regard.errors import ConfigurationError, ShapeError
from regard.lenses import Weights
from regard.models.language_model import AttentionConfig, ContinuousBatch, LayerConfig, PagedModel, PromptLookup
from regard.nn import CacheFormat
from regard.nn.caches import LayerHeads, PagedMemory, RaggedStep
from regard.positions import Rotary

FORMATS = {
    "int8": CacheFormat(),
    "int4 rotated": CacheFormat(Packing("int4", rotated=True), Packing("int4")),
    "float8": CacheFormat(Packing("float8_e4m3fn"), Packing("float8_e5m2")),
}
LENGTHS, HEADS, KEY_HEADS, DIM, VALUE_DIM = (1, 67, 200, 131), 6, 2, 24, 40
PAGES = 11  # one more than needed, so that they come as they are free
VARIANTS = library.variants() or (None,)
LAYERS = (LayerConfig(before=70, rotary=Rotary(8)), LayerConfig(rotary=Rotary(8)))


def filled(format_, dtype=torch.float32):
    """A memory whose sequences grew in turn, so that their pages are no neighbours, and what each was given."""
    memory = PagedMemory([LayerHeads(KEY_HEADS, DIM, VALUE_DIM)], PAGES, dtype=dtype, cache_format=format_)
    generator = torch.Generator().manual_seed(3)
    sequences, given = [memory.sequence(number) for number in LENGTHS], {number: [] for number in LENGTHS}
    while any(len(sequence) < length for sequence, length in zip(sequences, LENGTHS, strict=True)):
        parts = [
            (sequence, min(1 + 40 * (length % 2), length - len(sequence)))
            for sequence, length in zip(sequences, LENGTHS, strict=True)
        ]
        for sequence, count in parts:
            sequence.extend([0] * count)
        total = sum(count for _, count in parts)
        rows = [torch.randn(1, KEY_HEADS, total, dim, generator=generator).to(dtype) for dim in (DIM, VALUE_DIM)]
        RaggedStep.of(memory, parts).layer(0).append(*rows)
        at = 0
        for (_, count), own in zip(parts, given.values(), strict=True):
            own.append([each[:, :, at : at + count] for each in rows])
            at += count
    return memory, sequences, [[torch.cat(each, 2) for each in zip(*own, strict=True)] for own in given.values()]


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_each_sequence_agrees_with_float64(variant, name, dtype, tokens):
    memory, sequences, given = filled(FORMATS[name], dtype)
    parts = [(sequence, min(tokens, len(sequence))) for sequence in sequences]
    step = RaggedStep.of(memory, parts)
    query = torch.randn(1, HEADS, sum(count for _, count in parts), DIM, generator=torch.Generator().manual_seed(1))
    query, at = query.to(dtype), 0
    for mask in (masks.causal(), masks.causal() & masks.window(before=70)):
        with torch.no_grad(), library.using(variant) if variant else nullcontext():
            output, _ = step.layer(0).attend((query, query, query), {"mask": mask})
        at = 0
        for (_, count), (keys, values) in zip(parts, given, strict=True):
            wide = (each.double() for each in FORMATS[name].read(keys.float(), values.float()))
            if dtype != torch.float32:  # what is read is rounded to the dtype where it becomes numbers
                wide = (each.to(dtype).double() for each in wide)
            own = query[:, :, at : at + count].double()
            expected = regard.attention(own, *wide, mask=mask, kernel="reference")
            bound = 3e-6 if dtype == torch.float32 else 6 * torch.finfo(dtype).eps
            assert (output[:, :, at : at + count].double() - expected).abs().max() <= bound * expected.abs().max()
            at += count


@pytest.mark.skipif(not native.available(), reason="without native code nothing reads codes")
def test_codes_are_read_where_they_are(monkeypatch):
    memory, sequences, _ = filled(CacheFormat())
    assert any(len([*sequence.runs(0, len(sequence))]) > 1 for sequence in sequences)
    monkeypatch.setattr(PackedTensor, "widened", property(lambda packed: pytest.fail("the codes became numbers")))
    query = torch.randn(1, HEADS, 4, DIM)
    with torch.no_grad():
        layer = RaggedStep.of(memory, [(sequence, 1) for sequence in sequences]).layer(0)
        layer.attend((query, query, query), {"mask": masks.causal()})
    whole = PagedMemory([LayerHeads(KEY_HEADS, DIM, VALUE_DIM)], PAGES)
    assert memory.nbytes < 0.4 * whole.nbytes
    assert memory.nbytes_of(sequences[2]) == memory.nbytes * 4 // PAGES


@pytest.mark.parametrize("name", FORMATS)
def test_tokens_are_those_of_each_text_with_such_a_cache(make, name):
    torch.manual_seed(4)
    model = make(LAYERS, attention=AttentionConfig(num_heads=4, num_kv_heads=2))
    draw = torch.Generator().manual_seed(2)
    texts = [torch.randint(61, (length,), generator=draw).tolist() for length in (5, 90, 1, 140)]
    expected = []
    for text in texts:
        cache = model.make_cache().packed(FORMATS[name])
        stream = model.generate(torch.tensor([text]), 20, cache=cache)
        expected.append([int(token) for token in stream])
    for options in ({}, {"draft": PromptLookup()}, {"pages": 6}):
        found = [[] for _ in texts]
        for number, token in model.generate_many(texts, 20, cache_format=FORMATS[name], **options):
            found[number].append(token)
        assert found == expected, options


def test_a_beginning_that_is_shared_and_lenses(make):
    torch.manual_seed(4)
    model = make(LAYERS[1:], attention=AttentionConfig(num_heads=4, num_kv_heads=2))
    text, lens = list(range(60)) * 3, Weights()
    batch = ContinuousBatch(model, 12, cache_format=CacheFormat())
    first = batch.add([*text, 7], 3)
    while not batch.is_empty:
        batch.step()
    read = batch.counts.read
    second = batch.add([*text, 9], 3, lenses=[lens])
    new = []
    while not batch.is_empty:
        new += batch.step()
    assert batch.counts.read - read < 70
    assert len(first.tokens) == len(second.tokens) == 3
    stream = model.generate(torch.tensor([[*text, 9]]), 3, cache=model.make_cache().packed(CacheFormat()))
    assert second.tokens == [int(token) for token in stream]
    assert new[-1].observed is not None
    weights = new[-1].observed[0][lens]
    assert torch.allclose(weights.sum(-1), torch.ones(()), atol=1e-4)


class TestBadInput:
    def test_formats_of_blocks(self):
        for format_ in (
            CacheFormat(Packing(by_channel=True), Packing()),
            CacheFormat(newest=5),
            CacheFormat(None, None),
        ):
            with pytest.raises(ConfigurationError, match=r"pages cannot hold .*neither by_channel nor newest"):
                PagedMemory([LayerHeads(2, 8, 8)], 4, cache_format=format_)

    def test_pages_of_another_size(self, make):
        model = make(LAYERS, attention=AttentionConfig(num_heads=4))
        with pytest.raises(ConfigurationError, match="pages of codes have 64 tokens each; these have 16"):
            PagedModel(model, 4, 16, cache_format=CacheFormat())

    def test_heads_that_fill_no_word(self):
        with pytest.raises(ShapeError, match="keys have heads of dim 6; int8 codes stand in groups of 4"):
            PagedMemory([LayerHeads(2, 6, 8)], 4, cache_format=CacheFormat())
