"""Caches that store codes: all formats, kinds of caches, dtypes and variants of the native code agree with float64."""

import math

import pytest
import torch

import regard
from regard import masks, native
from regard.backends.cpu import library
from regard.core.packed_rows import PackedTensor
from regard.core.packing import Packing
from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.kernels.hooks import attention_hook
from regard.nn import CacheFormat, KVCache

FORMATS = {
    "int8": CacheFormat(),
    "int4": CacheFormat(Packing("int4"), Packing("int4")),
    "int4 by channel": CacheFormat(Packing("int4", by_channel=True), Packing("int4")),
    "int8 by channel": CacheFormat(Packing("int8", by_channel=True), Packing("int8")),
    "int4 rotated": CacheFormat(Packing("int4", rotated=True), Packing("int4", rotated=True)),
    "keys int8, values int4": CacheFormat(Packing("int8"), Packing("int4")),
    "float8": CacheFormat(Packing("float8_e4m3fn"), Packing("float8_e5m2")),
    "float8 by channel": CacheFormat(Packing("float8_e5m2", by_channel=True), Packing("float8_e4m3fn", rotated=True)),
    "keys int8, values float8": CacheFormat(Packing("int8"), Packing("float8_e4m3fn")),
    "newest": CacheFormat(Packing("int4"), Packing("int4"), newest=9),
    "as it is": CacheFormat(None, None),
}
CACHES = {
    "growing": KVCache(),
    "static": KVCache.static(211),
    "rolling": KVCache.rolling(masks.causal() & masks.window(before=70)),
}
HEADS, KEY_HEADS, DIM, VALUE_DIM = 6, 2, 24, 40
VARIANTS = library.variants() or (None,)


def texts(dtype=torch.float32, length=201, heads=KEY_HEADS, seed=0):
    """Keys and values of a text, with a bias of keys and a few large dims, as those of trained models have."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(2, heads, length, DIM, generator=generator) + 4 * torch.randn(DIM, generator=generator)
    values = torch.randn(2, heads, length, VALUE_DIM, generator=generator) * torch.rand(VALUE_DIM, generator=generator)
    return keys.to(dtype), values.to(dtype)


def numbers(rows):
    """What codes stand for, as every operation of torch reads them."""
    return rows.clone()


def filled(cache, keys, values, chunks=(130, 1, 1, 37)):
    """The cache after a prompt, two tokens, a chunk, and the others one by one."""
    at = 0
    with torch.no_grad():
        for count in (*chunks, *[1] * (keys.shape[2] - sum(chunks))):
            cache = cache.append(keys[:, :, at : at + count], values[:, :, at : at + count])
            at += count
    return cache


def by_formula(query, cache, mask):
    """Attention in float64 to what the codes of a cache stand for."""
    keys, values = (numbers(rows).double() for rows in (cache.keys, cache.values))
    keys, values = (rows.repeat_interleave(HEADS // KEY_HEADS, 1) for rows in (keys, values))
    scores = query.double() @ keys.mT / math.sqrt(DIM)
    last = int(torch.as_tensor(cache.next_position).max())
    positions = torch.arange(last - query.shape[2], last)
    keep = mask.dense(query.shape[2], len(cache), query_positions=positions, key_positions=cache.positions)
    weights = scores.masked_fill(~keep, float("-inf")).softmax(-1).nan_to_num(0.0)
    return weights @ values


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_step_over_codes_agrees_with_float64(variant, name, kind, dtype, queries):
    keys, values = texts(dtype)
    cache = filled(CACHES[kind].packed(FORMATS[name]), keys, values)
    query = torch.randn(2, HEADS, queries, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    mask = masks.causal() & masks.window(before=70)
    positions = torch.arange(201 - queries, 201)
    options = {"mask": mask, "query_positions": positions, "key_positions": cache.positions}
    with torch.no_grad():
        if variant is None:
            output = regard.attention(query, cache.keys, cache.values, **options)
        else:
            with library.using(variant):
                output = regard.attention(query, cache.keys, cache.values, **options)
    exact = by_formula(query, cache, mask)
    # float32: its rounding alone; else the rounding of the output, and of what is read, to 16 bits.
    bound = 3e-6 if dtype == torch.float32 else 4 * torch.finfo(dtype).eps
    assert output.dtype == dtype
    assert (output.double() - exact).abs().max() <= bound * exact.abs().max()


@pytest.mark.skipif(not native.available(), reason="without native code nothing reads codes")
@pytest.mark.parametrize("name", [name for name in FORMATS if name != "as it is"])
def test_codes_are_read_as_they_are(name, monkeypatch):
    cache = filled(KVCache().packed(FORMATS[name]), *texts(torch.bfloat16))
    query = torch.randn(2, HEADS, 1, DIM, dtype=torch.bfloat16)
    monkeypatch.setattr(PackedTensor, "widened", property(lambda packed: pytest.fail("the codes became numbers")))
    with torch.no_grad():
        for mask in (None, masks.causal(), masks.causal() & masks.window(before=50), masks.strided(3)):
            regard.attention(query, cache.keys, cache.values, mask=mask)
        plan = regard.explain(query, cache.keys, cache.values)
    assert plan.kernel.name == "decode"


@pytest.mark.parametrize("name", FORMATS)
def test_every_way_to_fill_a_cache_stores_the_same(name):
    keys, values = texts()
    step_by_step = filled(KVCache().packed(FORMATS[name]), keys, values)
    for chunks in ((201,), (64, 137), (1, 200), (65, 63, 73)):
        at_once = filled(KVCache().packed(FORMATS[name]), keys, values, chunks)
        format_ = FORMATS[name]
        if not format_.by_blocks:
            assert torch.equal(numbers(at_once.keys), numbers(step_by_step.keys))
        error = (numbers(at_once.keys) - numbers(step_by_step.keys)).abs().max()
        assert error <= (0 if format_.newest == 0 else 2.0)
        assert torch.equal(at_once.positions, step_by_step.positions)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "as it is"])
def test_what_is_read_is_within_half_a_step_of_what_was_stored(name):
    keys, values = texts()
    cache, format_ = filled(KVCache().packed(FORMATS[name]), keys, values), FORMATS[name]
    for rows, read, packing in ((keys, cache.keys, format_.keys), (values, cache.values, format_.values)):
        assert packing is not None
        stored, again = packing.rotate(rows.double().float()), packing.rotate(numbers(read).float())
        axis = -1
        if packing.by_channel:
            stored, again = (each[:, :, :192].unflatten(2, (3, 64)) for each in (stored, again))
            axis = -2
        # The scale and the offset are bfloat16, which widen the range by 2^-7 of its ends.
        ends = stored.abs().amax(axis, keepdim=True)
        span = stored.amax(axis, keepdim=True) - stored.amin(axis, keepdim=True) + 2**-7 * ends
        step = span * (1 + 2**-7) / (2**packing.bits - 1)
        if packing.float_type is not None:  # the distance of floats: of a number's own size, or of subnormal ones
            about = torch.finfo(packing.float_type)
            step = about.eps * (stored.abs() + about.tiny / about.max * (1 + 2**-7) * ends)
        assert ((stored - again).abs() <= 0.5 * step + 1e-5 * ends).all()


def test_the_newest_stay_as_they_are():
    keys, values = texts(length=150)
    by_channel = filled(KVCache().packed(FORMATS["int4 by channel"]), keys, values, (150,))
    assert torch.equal(numbers(by_channel.keys)[:, :, 128:], keys[:, :, 128:])
    assert not torch.equal(numbers(by_channel.keys)[:, :, :128], keys[:, :, :128])
    newest = filled(KVCache().packed(CacheFormat(newest=30)), keys, values, (150,))
    assert torch.equal(numbers(newest.keys)[:, :, 64:], keys[:, :, 64:])


@pytest.mark.parametrize("name", FORMATS)
def test_branches_of_one_cache_do_not_see_each_other(name):
    keys, values = texts(length=130)
    stem = filled(KVCache().packed(FORMATS[name]), keys[:, :, :127], values[:, :, :127], (127,))
    before = numbers(stem.keys).clone(), numbers(stem.values).clone()
    with torch.no_grad():
        first = stem.append(keys[:, :, 127:], values[:, :, 127:])
        second = stem.append(keys[:, :, 127:] + 3, values[:, :, 127:] - 3)
        alone = filled(KVCache().packed(FORMATS[name]), keys, values, (127, 3))
    assert torch.equal(numbers(stem.keys), before[0])
    assert torch.equal(numbers(stem.values), before[1])
    assert torch.equal(numbers(first.keys), numbers(alone.keys))
    assert torch.equal(numbers(first.values), numbers(alone.values))
    assert not torch.equal(numbers(second.values), numbers(first.values))


@pytest.mark.parametrize("name", FORMATS)
def test_rows_of_a_batch_are_taken_with_their_codes(name):
    keys, values = texts()
    cache = filled(KVCache().packed(FORMATS[name]), keys, values)
    taken = cache.reorder(torch.tensor([1, 1, 0]))
    assert torch.equal(numbers(taken.keys), numbers(cache.keys)[[1, 1, 0]])
    with torch.no_grad():
        longer = taken.append(keys[[1, 1, 0], :, :1], values[[1, 1, 0], :, :1])
    assert torch.equal(numbers(longer.values)[:, :, :201], numbers(taken.values))


def test_a_rolling_cache_keeps_codes_as_they_are_and_stays_small():
    keys, values = texts(length=2000)
    mask = masks.causal() & masks.window(before=70)
    for name, format_ in FORMATS.items():
        cache = filled(KVCache.rolling(mask).packed(format_), keys, values, (1,))
        assert len(cache) <= 1.5 * 71 + 33 + (128 if format_.by_blocks else 0), name
        if format_.newest or format_.keys is None:
            continue
        whole = filled(KVCache().packed(format_), keys, values, (2000,))
        count = len(cache) // 64 * 64 - 64 if format_.by_blocks else len(cache)
        own = cache.positions[:count]
        if not format_.by_blocks:
            assert torch.equal(numbers(cache.keys)[:, :, :count], numbers(whole.keys)[:, :, own])


def test_a_full_cache_has_no_room_after_its_rows_are_reordered():
    """192 tokens are three whole blocks: the next one needs memory of its own."""
    keys, values = texts(length=193)
    cache = filled(KVCache().packed(FORMATS["int8"]), keys[:, :, :192], values[:, :, :192], (107,))
    assert cache.contents is not None
    assert cache.contents.buffers.capacity == 192
    turned = filled(cache.reorder(torch.tensor([1, 0])), keys[:, :, 192:], values[:, :, 192:], ())
    whole = filled(KVCache().packed(FORMATS["int8"]), keys[[1, 0]], values[[1, 0]], (193,))
    assert torch.equal(numbers(turned.keys)[:, :, :192], numbers(whole.keys)[:, :, :192])
    assert (numbers(turned.keys)[:, :, 192] - keys[:, :, 192]).abs().max() < 0.1


def test_formats_may_differ_by_head():
    keys, values = texts(heads=4)
    formats = FORMATS["int4 by channel"], FORMATS["int8"], FORMATS["as it is"], FORMATS["int8"]
    cache = filled(KVCache().packed(*formats), keys, values)
    for head, format_ in enumerate(formats):
        own = slice(head, head + 1)
        alone = filled(KVCache().packed(format_), keys[:, own], values[:, own])
        assert torch.equal(numbers(cache.keys)[:, own], numbers(alone.keys))
        assert torch.equal(numbers(cache.values)[:, own], numbers(alone.values))
    query = torch.randn(2, 8, 1, DIM)
    with torch.no_grad():
        output = regard.attention(query, cache.keys, cache.values)
        wide = regard.attention(query, numbers(cache.keys), numbers(cache.values))
    assert (output - wide).abs().max() <= 3e-6 * wide.abs().max()
    keys, values = texts(length=600, heads=4)
    kept = filled(KVCache.rolling(masks.causal() & masks.window(before=70)).packed(*formats), keys, values)
    assert len(kept) < 400


def test_lenses_and_other_kernels_read_codes_as_numbers():
    cache = filled(KVCache().packed(FORMATS["int4"]), *texts())
    query = torch.randn(2, HEADS, 1, DIM)
    weights, entropy = regard.lenses.Weights(), regard.lenses.Entropy()
    with torch.no_grad():
        seen = regard.observe(query, cache.keys, cache.values, weights, entropy)
        wide = regard.observe(query, numbers(cache.keys), numbers(cache.values), weights, entropy)
        for kernel in ("reference", "sdpa", "tiled"):
            output = regard.attention(query, cache.keys, cache.values, kernel=kernel)
            assert torch.allclose(output, wide.output, atol=1e-5), kernel
        output, lse = regard.attention_with_lse(query, cache.keys, cache.values)
    assert torch.equal(seen[weights], wide[weights])
    assert torch.equal(seen[entropy], wide[entropy])
    assert torch.allclose(output, wide.output, atol=1e-5)
    assert torch.allclose(lse, wide.lse, atol=1e-5)


def test_bias_sinks_and_gradients_of_queries():
    cache = filled(KVCache().packed(FORMATS["int4 by channel"]), *texts())
    query = torch.randn(2, HEADS, 1, DIM, requires_grad=True)
    options = {"bias": torch.randn(HEADS, 1, 201), "sinks": torch.randn(HEADS), "mask": masks.strided(5)}
    with torch.no_grad():
        output = regard.attention(query, cache.keys, cache.values, **options)
    wide = regard.attention(query, numbers(cache.keys), numbers(cache.values), **options)
    assert torch.allclose(output, wide, atol=1e-5)
    (expected,) = torch.autograd.grad(wide.sum(), query)
    (gradient,) = torch.autograd.grad(regard.attention(query, cache.keys, cache.values, **options).sum(), query)
    assert torch.allclose(gradient, expected, atol=1e-5)


@pytest.mark.parametrize("name", ["int8", "int4", "int4 rotated"])
def test_nan_of_a_masked_token_reaches_nothing_and_that_of_another_all(name):
    keys, values = texts()
    keys[0, :, 7, 3], values[1, 1, 9, 2] = float("nan"), float("inf")
    cache = filled(KVCache().packed(FORMATS[name]), keys, values)
    query = torch.randn(2, HEADS, 1, DIM)
    hidden = torch.ones(1, 201, dtype=torch.bool)
    hidden[:, [7, 9]] = False
    with torch.no_grad():
        output = regard.attention(query, cache.keys, cache.values, mask=hidden)
        seen = regard.attention(query, cache.keys, cache.values)
        nothing = regard.attention(query, cache.keys, cache.values, mask=torch.zeros(1, 201, dtype=torch.bool))
        keys[0, :, 7, 3], values[1, 1, 9, 2] = 0.0, 0.0
        clean = filled(KVCache().packed(FORMATS[name]), keys, values)
        expected = regard.attention(query, clean.keys, clean.values, mask=hidden)
    assert torch.allclose(output, expected, atol=1e-5)
    assert seen[0].isnan().all()
    assert seen[1, HEADS // 2 :].isnan().all()
    assert seen[1, : HEADS // 2].isfinite().all()
    assert (nothing == 0).all()


def test_hooks_autocast_and_torch_itself_read_codes_as_numbers():
    cache = filled(KVCache().packed(FORMATS["int4 by channel"]), *texts())
    query, problems = torch.randn(2, HEADS, 1, DIM), []
    with torch.no_grad():
        wide = regard.attention(query, numbers(cache.keys), numbers(cache.values))
        with attention_hook(lambda problem, lse: problems.append(problem)):
            hooked = regard.attention(query, cache.keys, cache.values)
        by_torch = torch.nn.functional.scaled_dot_product_attention(query, cache.keys, cache.values, enable_gqa=True)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = regard.attention(query, cache.keys, cache.values)
    assert type(problems[0].value) is torch.Tensor
    assert torch.allclose(hooked, wide, atol=1e-5)
    assert torch.allclose(by_torch, wide, atol=1e-5)
    assert rounded.dtype == torch.bfloat16
    assert torch.allclose(rounded.float(), wide, atol=0.02)


def test_a_cache_of_inference_mode_goes_on_outside_of_it():
    keys, values = texts()
    with torch.inference_mode():
        inside = KVCache().packed(CacheFormat()).append(keys[:, :, :150], values[:, :, :150])
    with torch.no_grad():
        outside = inside.append(keys[:, :, 150:], values[:, :, 150:])
    assert torch.equal(numbers(outside.keys), numbers(filled(KVCache().packed(CacheFormat()), keys, values).keys))


def test_layers_decode_with_codes():
    mask = masks.causal() & masks.window(before=40)
    layer = regard.nn.Attention(regard.nn.Projections(64, num_heads=4, num_kv_heads=2), mask=mask).eval()
    x = torch.randn(2, 131, 64)
    for format_, error in ((FORMATS["int8"], 0.02), (FORMATS["int4"], 0.3)):
        outputs, cache = [], layer.make_cache().packed(format_)
        with torch.no_grad():
            for chunk in x.split([100, *[1] * 31], 1):
                output, cache = layer.step(chunk, cache)
                outputs.append(output)
            exact = layer(x)
        difference = torch.cat(outputs, 1) - exact
        assert 0 < difference.norm() / exact.norm() < error


def test_bytes_are_those_of_the_codes():
    keys, values = torch.randn(2, 1, 2, 4096, 128).bfloat16()
    sixteen = filled(KVCache.static(4096), keys, values, (4096,)).nbytes
    for name, share in (("int8", 132 / 256), ("float8", 132 / 256), ("int4", 68 / 256), ("int4 by channel", 70 / 256)):
        cache = filled(KVCache.static(4096).packed(FORMATS[name]), keys, values, (4096,))
        assert abs(cache.nbytes - 8 * 4096 - share * (sixteen - 8 * 4096)) < 0.01 * sixteen, name


class TestBadInput:
    def test_codes_that_nothing_reads(self):
        with pytest.raises(ConfigurationError, match=r"cannot be stored as 'int3', which nothing here reads.*'int4'"):
            Packing("int3")

    @pytest.mark.parametrize("cache", [KVCache(), KVCache.static(9).packed(CacheFormat())], ids=["numbers", "codes"])
    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
    def test_numbers_that_attention_does_not_read(self, cache, dtype):
        keys = torch.ones(1, 2, 3, 8).to(dtype)
        with pytest.raises(
            DtypeError, match=rf"keys of {dtype}, which attention does not read: append .*float8_e4m3fn"
        ):
            cache.append(keys, keys)

    def test_a_rotation_by_channel(self):
        with pytest.raises(ConfigurationError, match="either by_channel or rotated"):
            Packing("int4", by_channel=True, rotated=True)

    def test_values_by_channel(self):
        with pytest.raises(ConfigurationError, match="give keys alone by_channel=True"):
            CacheFormat(Packing(), Packing(by_channel=True))

    def test_keys_alone(self):
        with pytest.raises(ConfigurationError, match="both are stored as codes, or both as they are"):
            CacheFormat(Packing(), None)

    def test_no_packing(self):
        with pytest.raises(ConfigurationError, match="keys need a Packing, such as Packing\\('int8'\\)"):
            CacheFormat("int8", "int8")  # type: ignore[arg-type]

    def test_a_negative_number_of_newest(self):
        with pytest.raises(ConfigurationError, match="newest"):
            CacheFormat(newest=-1)

    def test_no_format(self):
        with pytest.raises(ConfigurationError, match="packed needs formats such as CacheFormat"):
            KVCache().packed(torch.int8)  # type: ignore[arg-type]

    def test_a_cache_that_has_keys(self):
        with pytest.raises(ConfigurationError, match="the cache has 201 tokens, stored as they came"):
            filled(KVCache(), *texts()).packed(CacheFormat())

    def test_formats_for_other_heads(self):
        with pytest.raises(ConfigurationError, match="the cache has 3 formats, and the keys have 2 heads"):
            filled(KVCache().packed(*[CacheFormat()] * 3), *texts())

    def test_a_dim_that_does_not_fill_words(self):
        with pytest.raises(ShapeError, match="heads of dim 36; int4 codes stand in groups of 8"):
            KVCache().packed(FORMATS["int4"]).append(torch.ones(1, 1, 1, 36), torch.ones(1, 1, 1, 36))

    def test_whole_numbers(self):
        with pytest.raises(DtypeError, match="keys are torch.int8; a packed cache needs floating-point numbers"):
            CacheFormat().check(*torch.ones(2, 1, 1, 1, 8, dtype=torch.int8))

    def test_gradients(self):
        keys = torch.ones(1, 1, 1, 8, requires_grad=True)
        with pytest.raises(ConfigurationError, match="keys have a gradient, which codes do not pass on"):
            KVCache().packed(CacheFormat()).append(keys, keys)

    def test_another_dtype_than_the_cache(self):
        cache = filled(KVCache().packed(CacheFormat()), *texts())
        with pytest.raises(
            DtypeError, match="the cache has keys of torch.float32, and the new keys are torch.bfloat16"
        ):
            cache.append(*torch.ones(1, 2, KEY_HEADS, 1, DIM).bfloat16().expand(2, 2, -1, -1, -1))

    def test_a_full_static_cache(self):
        with pytest.raises(ShapeError, match="the cache is full"):
            filled(KVCache.static(130).packed(CacheFormat()), *texts())
