"""With the default rates the chosen kernel is about the fastest, for each variant of the native code and for none.

The times were measured on one thread of an Intel Cascade Lake processor, and are those of the thread alone; those of
decode over 1,024 keys and more are later ones, scaled so that sdpa, measured beside them, has its earlier time.
"""

import pytest
import torch

from regard import biases, masks, native
from regard.kernels.planning.choice import KERNELS
from regard.kernels.planning.rates import ZEN_4, default_rates
from regard.kernels.validation import make_problem

TOLERATED = 1.4
"""Times the fastest kernel's time that the chosen one may take."""

# Milliseconds of each kernel, and of each variant of native code where it calls any.
MEASURED = {
    "256": {
        "sdpa": 7.45,
        "cpu_flash-avx512": 7.64,
        "cpu_flash-avx2": 11.6,
        "cpu_flash-plain": 36.5,
        "block_sparse": 10.8,
        "tiled": 19.3,
    },
    "1024": {
        "sdpa": 26.4,
        "cpu_flash-avx512": 25.2,
        "cpu_flash-avx2": 43.1,
        "cpu_flash-plain": 140,
        "block_sparse": 38.8,
        "tiled": 57.9,
    },
    "2048 d128": {
        "sdpa": 85.6,
        "cpu_flash-avx512": 96.5,
        "cpu_flash-avx2": 165,
        "cpu_flash-plain": 539,
        "block_sparse": 104,
        "tiled": 155,
    },
    "256 causal": {
        "sdpa": 8.18,
        "cpu_flash-avx512": 5.59,
        "cpu_flash-avx2": 7.54,
        "cpu_flash-plain": 20.3,
        "block_sparse": 8.97,
        "tiled": 17.1,
    },
    "1024 causal": {
        "sdpa": 21,
        "cpu_flash-avx512": 14.4,
        "cpu_flash-avx2": 22.7,
        "cpu_flash-plain": 71.4,
        "block_sparse": 22,
        "tiled": 40.2,
    },
    "2048 causal": {
        "sdpa": 33.2,
        "cpu_flash-avx512": 27.5,
        "cpu_flash-avx2": 46.2,
        "cpu_flash-plain": 141,
        "block_sparse": 33.5,
        "tiled": 63.7,
    },
    "2048 window": {
        "sdpa": 105,
        "cpu_flash-avx512": 8.46,
        "cpu_flash-avx2": 12.2,
        "cpu_flash-plain": 35.6,
        "block_sparse": 17.7,
        "tiled": 37.7,
    },
    "4096 window": {
        "sdpa": 322,
        "cpu_flash-avx512": 5.91,
        "cpu_flash-avx2": 7.99,
        "cpu_flash-plain": 21.2,
        "block_sparse": 19.6,
        "tiled": 40.5,
    },
    "1024 docs": {
        "sdpa": 34.9,
        "cpu_flash-avx512": 4.12,
        "cpu_flash-avx2": 5.04,
        "cpu_flash-plain": 11.8,
        "block_sparse": 16.1,
        "tiled": 14.5,
    },
    "256 padding": {
        "sdpa": 8.42,
        "cpu_flash-avx512": 7.71,
        "cpu_flash-avx2": 9.9,
        "cpu_flash-plain": 26.4,
        "block_sparse": 14.5,
        "tiled": 19.2,
    },
    "64 padding": {
        "sdpa": 3.94,
        "cpu_flash-avx512": 3.43,
        "cpu_flash-avx2": 4.13,
        "cpu_flash-plain": 8.99,
        "block_sparse": 4.91,
        "tiled": 12.2,
    },
    "1024 gqa causal": {
        "sdpa": 41.6,
        "cpu_flash-avx512": 28.9,
        "cpu_flash-avx2": 45.3,
        "cpu_flash-plain": 151,
        "block_sparse": 43,
        "tiled": 75.9,
    },
    "1024 bf16": {
        "sdpa": 29.1,
        "cpu_flash-avx512": 27.7,
        "cpu_flash-avx2": 46.9,
        "cpu_flash-plain": 127,
        "block_sparse": 38.8,
        "tiled": 52.9,
    },
    "1024 bf16 causal": {
        "sdpa": 22.6,
        "cpu_flash-avx512": 16.3,
        "cpu_flash-avx2": 26.4,
        "cpu_flash-plain": 66.2,
        "block_sparse": 22.6,
        "tiled": 39.2,
    },
    "1024 alibi": {
        "sdpa": 188,
        "cpu_flash-avx512": 14.5,
        "cpu_flash-avx2": 23.6,
        "cpu_flash-plain": 70,
        "block_sparse": 29.6,
        "tiled": 62.6,
    },
    "1024 softcap": {"cpu_flash-avx512": 16.8, "cpu_flash-avx2": 29.5, "cpu_flash-plain": 89.5, "tiled": 49.7},
    "512 dropout": {"cpu_flash-avx512": 8.17, "cpu_flash-avx2": 12.7, "cpu_flash-plain": 38.9, "tiled": 29.5},
    "decode 1024": {
        "sdpa": 0.332,
        "decode-avx512": 0.405,
        "decode-avx2": 0.453,
        "decode-plain": 0.555,
        "cpu_flash-avx512": 0.848,
        "cpu_flash-avx2": 0.972,
        "cpu_flash-plain": 2.01,
        "block_sparse": 0.611,
        "tiled": 1.7,
    },
    "decode 8192": {
        "sdpa": 4.54,
        "decode-avx512": 2.77,
        "decode-avx2": 3.23,
        "decode-plain": 4.16,
        "cpu_flash-avx512": 7.7,
        "cpu_flash-avx2": 8.48,
        "cpu_flash-plain": 14.9,
        "block_sparse": 5.05,
        "tiled": 12.6,
    },
    "few 8x2048 causal": {
        "sdpa": 1.83,
        "decode-avx512": 2.16,
        "decode-avx2": 2.5,
        "decode-plain": 4.59,
        "cpu_flash-avx512": 2.2,
        "cpu_flash-avx2": 2.48,
        "cpu_flash-plain": 4.23,
        "block_sparse": 2.55,
        "tiled": 4.58,
    },
    "few 16x4096": {
        "sdpa": 3.72,
        "decode-avx512": 3.58,
        "decode-avx2": 5.13,
        "decode-plain": 13.2,
        "cpu_flash-avx512": 4.82,
        "cpu_flash-avx2": 5.56,
        "cpu_flash-plain": 11.9,
        "block_sparse": 4.3,
        "tiled": 8.22,
    },
    "cross 64x1024": {
        "sdpa": 4.52,
        "decode-avx512": 4.15,
        "decode-avx2": 6.99,
        "decode-plain": 18.2,
        "cpu_flash-avx512": 4.96,
        "cpu_flash-avx2": 6.9,
        "cpu_flash-plain": 19.1,
        "block_sparse": 4.96,
        "tiled": 8.97,
    },
    "256 train": {
        "sdpa": 29.3,
        "cpu_flash-avx512": 28.1,
        "cpu_flash-avx2": 42.9,
        "cpu_flash-plain": 124,
        "block_sparse": 46.3,
        "tiled": 52.7,
    },
    "1024 train causal": {
        "sdpa": 77.6,
        "cpu_flash-avx512": 51.2,
        "cpu_flash-avx2": 84.6,
        "cpu_flash-plain": 247,
        "block_sparse": 79.7,
        "tiled": 110,
    },
    "1024 train window": {
        "sdpa": 118,
        "cpu_flash-avx512": 20.4,
        "cpu_flash-avx2": 29.3,
        "cpu_flash-plain": 73.5,
        "block_sparse": 44.4,
        "tiled": 57.9,
    },
}

# The same on one thread of Zen 4: of few queries over keys that no cache holds, and of few sequences under ALiBi.
MEASURED_ZEN_4 = {
    "decode 8192 d32": {
        "sdpa": 2.48,
        "decode-avx2": 0.96,
        "cpu_flash-avx2": 4.9,
        "block_sparse": 2.36,
        "reference": 2.61,
    },
    "few 4x4096 d128": {
        "sdpa": 10.7,
        "decode-avx2": 3.63,
        "cpu_flash-avx2": 11.8,
        "block_sparse": 11.7,
        "reference": 11.6,
    },
    "128 alibi": {
        "sdpa": 0.27,
        "cpu_flash-plain": 0.37,
        "reference": 0.42,
        "block_sparse": 0.54,
        "tiled": 0.72,
    },
    "16 alibi train": {
        "sdpa": 0.78,
        "cpu_flash-plain": 0.85,
        "reference": 0.56,
        "block_sparse": 1.01,
    },
}


def tensors(batch, heads, queries, keys, dim, *, key_heads=None, dtype=torch.float32, grad=False):
    """Query, key and value, whose numbers nothing reads."""
    shapes = (heads, queries), (key_heads or heads, keys), (key_heads or heads, keys)
    return [torch.zeros(batch, *shape, dim, dtype=dtype, requires_grad=grad) for shape in shapes]


def windowed(before):
    return masks.causal() & masks.window(before=before)


def problem(name):
    """The problem of that name."""
    causal, bfloat16 = {"mask": masks.causal()}, torch.bfloat16
    documents = {"mask": masks.causal() & masks.documents(torch.arange(1024) // 128)}
    made = {
        "256": lambda: (tensors(4, 8, 256, 256, 64), {}),
        "1024": lambda: (tensors(1, 8, 1024, 1024, 64), {}),
        "2048 d128": lambda: (tensors(1, 4, 2048, 2048, 128), {}),
        "256 causal": lambda: (tensors(4, 8, 256, 256, 64), causal),
        "1024 causal": lambda: (tensors(1, 8, 1024, 1024, 64), causal),
        "2048 causal": lambda: (tensors(1, 4, 2048, 2048, 64), causal),
        "2048 window": lambda: (tensors(1, 4, 2048, 2048, 64), {"mask": windowed(255)}),
        "4096 window": lambda: (tensors(1, 2, 4096, 4096, 64), {"mask": windowed(127)}),
        "1024 docs": lambda: (tensors(1, 8, 1024, 1024, 64), documents),
        "256 padding": lambda: (tensors(4, 8, 256, 256, 64), {"mask": masks.padding(lengths=[256, 200, 130, 90])}),
        "64 padding": lambda: (tensors(16, 8, 64, 64, 64), {"mask": masks.padding(lengths=[64, 50, 40, 30] * 4)}),
        "1024 gqa causal": lambda: (tensors(1, 16, 1024, 1024, 64, key_heads=4), causal),
        "1024 bf16": lambda: (tensors(1, 8, 1024, 1024, 64, dtype=bfloat16), {}),
        "1024 bf16 causal": lambda: (tensors(1, 8, 1024, 1024, 64, dtype=bfloat16), causal),
        "1024 alibi": lambda: (tensors(1, 8, 1024, 1024, 64), causal | {"bias": biases.alibi(8)}),
        "1024 softcap": lambda: (tensors(1, 8, 1024, 1024, 64), causal | {"softcap": 20.0}),
        "512 dropout": lambda: (tensors(1, 8, 512, 512, 64), {"dropout_p": 0.1}),
        "decode 1024": lambda: (tensors(1, 8, 1, 1024, 64), {}),
        "decode 8192": lambda: (tensors(1, 8, 1, 8192, 64), {}),
        "few 8x2048 causal": lambda: (tensors(1, 8, 8, 2048, 64), causal),
        "few 16x4096": lambda: (tensors(1, 8, 16, 4096, 64), {}),
        "cross 64x1024": lambda: (tensors(2, 8, 64, 1024, 64), {}),
        "256 train": lambda: (tensors(4, 8, 256, 256, 64, grad=True), {}),
        "1024 train causal": lambda: (tensors(1, 8, 1024, 1024, 64, grad=True), causal),
        "decode 8192 d32": lambda: (tensors(1, 12, 1, 8192, 32), {}),
        "few 4x4096 d128": lambda: (tensors(16, 1, 4, 4096, 128), {}),
        "128 alibi": lambda: (tensors(1, 1, 128, 128, 64), {"bias": biases.alibi(1)}),
        "16 alibi train": lambda: (tensors(1, 4, 16, 16, 32, grad=True), {"bias": biases.alibi(4)}),
        "1024 train window": lambda: (tensors(1, 8, 1024, 1024, 64, grad=True), {"mask": windowed(127)}),
    }
    given, options = made[name]()
    return make_problem(*given, **options)


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def check(name, variant, measured=MEASURED, processor="AVX512"):
    """The chosen kernel takes at most TOLERATED times as long as the fastest, of those that were measured."""
    times = {
        kernel: milliseconds
        for key, milliseconds in measured[name].items()
        for kernel, _, measured_variant in [key.partition("-")]
        if measured_variant in ("", variant)
    }
    rates, posed = default_rates("cpu", variant or None, processor), problem(name)
    training = posed.inputs_require_grad()
    predicted = {
        kernel.name: rates.seconds(kernel.cost(posed), posed.value.dtype, training=training)
        for kernel in KERNELS
        if kernel.name in times
    }
    chosen = min(predicted, key=lambda kernel: predicted[kernel])
    assert times[chosen] <= TOLERATED * min(times.values()), (chosen, times, predicted)


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.parametrize("variant", ["avx512", "avx2", "plain"])
@pytest.mark.usefixtures("one_thread")
def test_the_choice_with_native_code(name, variant):
    if variant not in native.variants():
        pytest.skip(f"this processor does not run the variant {variant}")
    with native.using(variant):
        check(name, variant)


@pytest.mark.parametrize("name", MEASURED)
@pytest.mark.usefixtures("one_thread")
def test_the_choice_without_native_code(name, monkeypatch):
    monkeypatch.setattr("regard.backends.cpu.library._found", "it is switched off")
    check(name, "")


@pytest.mark.parametrize("name", MEASURED_ZEN_4)
@pytest.mark.usefixtures("one_thread")
def test_the_choice_on_zen_4(name):
    variant = next(variant for key in MEASURED_ZEN_4[name] for _, _, variant in [key.partition("-")] if variant)
    if variant not in native.variants():
        pytest.skip(f"this processor does not run the variant {variant}")
    with native.using(variant):
        check(name, variant, MEASURED_ZEN_4, ZEN_4)


def test_each_kind_of_device_has_rates():
    for device in ("cpu", "cuda", "mps"):
        for variant in ("avx512", "avx2", "neon", "plain", None):
            assert default_rates(device, variant).seconds(KERNELS[0].cost(problem("256")), torch.float32) > 0
    assert default_rates("cpu", None, "AVX2").flops < default_rates("cpu", None, "AVX512").flops
    assert default_rates("cuda").flops > default_rates("cpu", "avx512").flops
