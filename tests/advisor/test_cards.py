"""Advice for a graphics card that need not be here: beside what was measured on an H200, and what its output says."""

import re

import pytest

from regard.advisor import Change, Workload, advise
from regard.advisor.cards import CARDS, card_named
from regard.advisor.prices import linear_price, softmax_price
from regard.errors import ConfigurationError
from regard.masks import causal, window
from regard.scores import Additive


def on_h200(task, tokens, batch, heads, head_dim, **settings):
    return Workload(task, tokens, batch=batch, heads=heads, head_dim=head_dim, layers=1, gpu="h200", **settings)


def price(workload, keys=None, **options):
    return softmax_price(workload, workload.key_heads or workload.heads, keys or workload.keys, **options)


CAUSAL, NEAR = causal(), causal() & window(before=511)
MEASURED = [  # docs/gpu.md, the peers' column: an H200, bfloat16; seconds
    ("causal, forward", on_h200("prefill", 4096, 8, 16, 128), CAUSAL, 0.975e-3),
    ("causal, with gradients", on_h200("train", 4096, 8, 16, 128), CAUSAL, 3.66e-3),
    ("causal of 512, forward", on_h200("prefill", 512, 64, 16, 128), CAUSAL, 0.187e-3),
    ("window of 512, forward", on_h200("prefill", 16384, 1, 16, 128), NEAR, 0.292e-3),
    ("window of 512, with gradients", on_h200("train", 16384, 1, 16, 128), NEAR, 1.063e-3),
    ("one query", on_h200("decode", 16384, 1, 32, 128, key_heads=8), None, 0.033e-3),
    ("16 single queries", on_h200("decode", 16384, 16, 32, 128, key_heads=8), None, 0.249e-3),
]


@pytest.mark.parametrize(("workload", "mask", "seconds"), [case[1:] for case in MEASURED], ids=[c[0] for c in MEASURED])
def test_predictions_beside_what_was_measured(workload, mask, seconds):
    assert 0.85 < price(workload, mask=mask).seconds / seconds < 1.15


def test_additive_scores_take_as_long_as_the_compiled_formula():
    workload = on_h200("prefill", 1024, 8, 1, 128, architecture="translation", dtype="float32")
    assert price(workload, score=Additive(128, 128, 128)).seconds == pytest.approx(1.29e-3, rel=0.05)
    assert price(workload).seconds < 0.2e-3


def test_the_gated_delta_rule_beside_a_published_figure():
    # 8,192 and 32,768 tokens of 16 heads of 128 in 0.316 and 1.241 ms (flash-linear-attention on an H200)
    for tokens, seconds in ((8192, 0.316e-3), (32768, 1.241e-3)):
        found = 1.6 * linear_price(on_h200("prefill", tokens, 1, 16, 128), 128, 16).seconds
        assert 0.85 < found / seconds < 1.15


def mechanism(advice, name):
    (found,) = (each for each in advice.mechanisms if each.name == name)
    return found


@pytest.mark.parametrize("gpu", sorted(CARDS))
def test_a_cache_of_fewer_bits_is_read_faster(gpu):
    advice = advise(task="decode", tokens=16384, gpu=gpu, key_heads=8)
    own, eight, four = (
        mechanism(advice, f"grouped-query{bits}") for bits in ("", ", cache in 8 bits", ", cache in 4 bits")
    )
    assert four.price.seconds < eight.price.seconds < own.price.seconds
    converted = re.search(r"those of regard convert a layer at a time back on a GPU, ([\d.]+) (ms|µs|s)$", eight.reason)
    assert converted
    assert float(converted[1]) * {"s": 1, "ms": 1e-3, "µs": 1e-6}[converted[2]] > own.price.seconds


def test_a_device_that_nobody_measured_is_the_card_that_was():
    assert advise(task="decode", tokens=64, device="cuda").workload.card is CARDS["h200"]
    assert advise(task="decode", tokens=64, device="cuda").workload.memory is None


def test_prefill_reaches_what_was_reached_of_the_peak():
    for gpu in ("h100", "a100", "l4"):
        found = advise(task="prefill", tokens=8192, gpu=gpu).recommended.price
        assert found.flops / found.seconds / card_named(gpu).half / 1e12 == pytest.approx(0.59, abs=0.02)


def test_a_window_costs_what_flex_attention_costs():
    advice = advise(task="prefill", tokens=8192, gpu="h200")
    near, whole = mechanism(advice, "window of 4,096, 4 sinks"), mechanism(advice, "multi-head")
    assert near.price.flops == pytest.approx(0.75 * whole.price.flops, rel=0.01)
    assert near.price.seconds < 1.6 * whole.price.seconds
    longer = advise(task="prefill", tokens=65536, gpu="h200")
    near, whole = mechanism(longer, "window of 4,096, 4 sinks"), mechanism(longer, "multi-head")
    assert near.price.seconds < 0.3 * whole.price.seconds
    few = mechanism(longer, "window of 4,096 in 5 of 6 layers")
    assert few.price.seconds == pytest.approx((5 * near.price.seconds + whole.price.seconds) / 6)


@pytest.mark.parametrize("gpu", ["h100", "h200", "a100", "l4"])
@pytest.mark.parametrize("tokens", [2048, 8192, 32768])
def test_one_key_head_is_not_preferred_to_eight_by_a_hair(gpu, tokens):
    advice = advise(task="decode", tokens=tokens, gpu=gpu, heads=64, layers=16)
    assert "multi-query" not in advice.recommended.name
    assert advise(task="decode", tokens=8192, gpu=gpu, heads=64, key_heads=8).recommended.name == "grouped-query"


def test_a_local_pattern_gets_a_window_of_its_width():
    advice = advise(task="prefill", tokens=131072, gpu="h100", local=512)
    assert advice.recommended.name == "window of 512"
    assert advice.recommended.change is Change.NOTHING
    assert advice.recommended.code == "mask=causal() & window(before=511)"
    assert mechanism(advice, "multi-head").price.seconds > 10 * advice.recommended.price.seconds
    assert "window" not in advise(task="prefill", tokens=512, local=512).recommended.name
    both = advise(task="prefill", tokens=8192, gpu="h100", local=64, architecture="encoder").recommended
    assert both.code == "mask=window(63, 63)"


def test_the_memory_of_a_card_is_the_limit_unless_another_is_set():
    assert advise(task="decode", tokens=64, gpu="L4").workload.memory == 24 * 10**9
    assert advise(task="decode", tokens=64, gpu="l4", memory="1GB").workload.memory == 10**9
    advice = advise(task="decode", tokens=131072, gpu="l4")
    assert not mechanism(advice, "multi-head").fits
    assert advice.recommended.fits


def test_hours_are_hours_and_rates_are_words():
    advice = advise(task="train", tokens=2**20, batch=8, gpu="l4", memory="100TB")
    text = str(advice)
    assert re.search(r"ring of processes +sdpa, 8 processes .* [\d.]+ h +nothing", text)
    assert "predicted from the data sheet of the NVIDIA L4: 0.3 TB/s, 121 TFLOP/s in bfloat16" in text
    for device in ("cuda", "cpu"):
        assert "Rates(" not in str(advise(tokens=64, device=device)) + text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"gpu": "v100"}, "there is no card 'v100'; did you mean 'h100'?"),
        ({"gpu": "abacus"}, "`regard bench --calibrate --device cuda` measures the rates where it is"),
        ({"local": 5, "window": 7}, "local is 5, the positions that a token needs, and window is set too"),
        ({"local": 5, "architecture": "translation"}, "and architecture='translation' is set too: leave one out"),
        ({"local": 0}, "local is 0; it needs at least 1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ConfigurationError) as raised:
        advise(**settings)
    assert message in str(raised.value)
