"""Advice: what is recommended for a task, what its numbers are, and what wrong settings get."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import regard
from regard import native
from regard.advisor import Change, Workload, advise, decision_table
from regard.advisor.advice import recommend
from regard.advisor.prices import describe_problem, linear_price, softmax_price
from regard.advisor.workload import parse_bytes
from regard.errors import ConfigurationError, DeviceError
from regard.kernels.planning.rates import ZEN_4, predicted_seconds
from regard.masks import causal, window
from regard.models import language_model as lm
from regard.nn import CacheFormat, KVCache, Packing


def names(advice):
    return [mechanism.name for mechanism in advice.mechanisms]


def test_a_price_is_that_of_explain():
    workload = Workload("prefill", 1000, layers=3, heads=4, head_dim=32, dtype="float32")
    price = softmax_price(workload, 2, 1000, mask=causal())
    plan = regard.explain(torch.randn(1, 4, 1000, 32), *torch.randn(2, 1, 2, 1000, 32), mask=causal())
    assert price.kernel == plan.kernel.name
    assert price.seconds == pytest.approx(3 * predicted_seconds(plan.kernel.cost(plan.problem), plan.problem))
    assert price.flops == pytest.approx(3 * 4 * (1000 * 1001 / 2) * 4 * 32)
    assert price.cache == 2 * 3 * 2 * 1000 * 32 * 4


def test_training_costs_five_products_more_and_stores_queries_and_outputs_of_all_layers():
    forward, training = (
        softmax_price(Workload(task, 500, layers=4, heads=2, head_dim=16, dtype="float32"), 2, 500)
        for task in ("prefill", "train")
    )
    assert training.flops == 3.5 * forward.flops
    assert 2 * forward.seconds < training.seconds < 12 * forward.seconds
    rows = 2 * 2 * 500 * 16 * 4
    assert training.memory - forward.memory == pytest.approx(3 * rows)


def test_linear_attention_on_a_gpu_does_not_depend_on_threads_of_the_cpu(monkeypatch):
    workload = Workload("prefill", 4096, device="cuda")
    seconds = []
    for threads in (1, 8):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        seconds.append(linear_price(workload, 128, 8).seconds)
    assert seconds[0] == seconds[1]


def test_a_described_problem_takes_no_memory():
    problem = describe_problem(Workload("prefill", 10**7, batch=8), 32, 10**7)
    assert problem.value.shape == (8, 32, 10**7, 128)
    assert problem.value.untyped_storage().nbytes() == 128 * 2


@pytest.mark.parametrize("mask", [None, causal(), causal() & window(before=99)])
def test_prices_of_a_million_tokens(mask):
    workload = Workload("prefill", 2**20, layers=1, heads=1, head_dim=64, dtype="float32")
    price, shorter = (
        softmax_price(replace(workload, tokens=tokens), 1, tokens, mask=mask) for tokens in (2**20, 2**17)
    )
    pairs = workload.tokens**2 * (1.0 if mask is None else mask.density(workload.tokens, workload.tokens))
    assert price.flops == pytest.approx(4 * 64 * pairs, rel=1e-9)
    assert price.cache == 8 * shorter.cache
    growth = price.seconds / shorter.seconds
    assert growth == pytest.approx(8 if mask is not None and "window" in repr(mask) else 64, rel=0.1)


def test_a_long_cache_that_does_not_fit_gets_fewer_key_heads(priced_as):
    priced_as(ZEN_4, "avx512")
    advice = advise(task="decode", tokens=131072, memory="16GB")
    assert advice.recommended.name == "grouped-query, 4 key heads"
    own = next(each for each in advice.mechanisms if each.name == "multi-head")
    assert not own.fits
    assert own.price.cache == 8 * advice.recommended.price.cache == 64 * 2**30


def test_a_short_training_stays_as_it_is():
    advice = advise(task="train", tokens=512, layers=6, heads=8, head_dim=64, dtype="float32")
    assert advice.recommended.change is Change.NOTHING
    assert "-> multi-head" in str(advice)


def test_a_million_tokens_get_a_ring_of_as_many_processes_as_memory_asks_for():
    advice = advise(task="train", tokens=10**6, memory="64GB")
    assert advice.recommended.name == "ring of processes"
    assert advice.recommended.price.memory <= 64e9
    assert "torchrun --nproc-per-node 16" in advice.recommended.code or "32" in advice.recommended.code


def test_only_exact_mechanisms_are_recommended_unless_others_are_wanted():
    exact, other = (advise(task="decode", tokens=10**6, exact=exact) for exact in (True, False))
    assert exact.recommended.change < Change.FEWER_PAIRS <= other.recommended.change
    assert sorted(names(exact)) == sorted(names(other))


def test_chosen_blocks_cost_a_window_and_keep_all_keys():
    advice = advise(task="decode", tokens=65_536, layers=2, heads=4, head_dim=64)
    found = {each.name: each.price for each in advice.mechanisms}
    chosen, near = found["blocks of 64 chosen by content, 4,096 keys"], found["window of 4,096, 4 sinks"]
    assert chosen.seconds == near.seconds
    assert chosen.cache == found["multi-head"].cache == 16 * near.cache
    assert chosen.memory - chosen.cache == near.memory - near.cache
    assert "blocks" not in " ".join(names(advise(task="decode", tokens=4096)))


def test_gated_delta_nets_have_the_state_of_linear_attention():
    for task, ratio in (("decode", 1.0), ("prefill", 1.6)):
        found = {each.name: each.price for each in advise(task=task, tokens=8192).mechanisms}
        assert found["Gated DeltaNet"].cache == found["linear attention"].cache
        assert found["Gated DeltaNet"].seconds == pytest.approx(ratio * found["linear attention"].seconds)


def test_mechanisms_of_whole_sequences_are_compared_where_they_were_measured():
    """On a CPU, and not while decoding; their times are factors of that of linear attention."""
    of_decoders, of_encoders = {"TTT-Linear", "Titans", "S4D"}, {"LARA, 49 landmarks", "SOFT, 49 landmarks"}
    settings: dict[str, Any] = {"tokens": 8192, "heads": 8, "head_dim": 64, "dtype": "float32"}
    found = {each.name: each.price for each in advise(task="prefill", **settings).mechanisms}
    assert of_decoders <= set(found)
    assert not of_encoders & set(found)
    linear = found["linear attention"]
    for name, factor in (("TTT-Linear", 7.0), ("Titans", 14.0), ("S4D", 16.0)):
        assert found[name].seconds == pytest.approx(factor * linear.seconds)
    assert found["TTT-Linear"].cache == found["S4D"].cache == linear.cache  # 64 numbers for each of 64 channels
    assert found["Titans"].cache == 2 * linear.cache  # the memory and its momentum
    encoders = {each.name: each for each in advise(task="train", architecture="encoder", **settings).mechanisms}
    assert of_encoders <= set(encoders)
    assert not of_decoders & set(encoders)
    assert encoders["LARA, 49 landmarks"].price.seconds < encoders["Performer, 256 features"].price.seconds
    assert encoders["LARA, 49 landmarks"].code == "regard.approximations.lara_attention(q, k, v, landmarks=49)"
    for told in ({"task": "decode"}, {"task": "prefill", "device": "cuda"}, {"task": "prefill", "gpu": "h100"}):
        everything: dict[str, Any] = settings | told
        assert not (of_decoders | of_encoders) & set(names(advise(**everything)))


def test_the_nearest_feasible_is_said():
    small = {"task": "decode", "memory": "4MB", "layers": 16, "heads": 8, "head_dim": 64}
    advice = advise(tokens=500_000, **small)
    assert not advice.recommended.fits
    found = re.search(
        r"nothing exact fits in 4 MB: the least is multi-query, which needs 1.91 GiB. Feasible are that much memory, "
        r"or ([\d,]+) tokens in this much. Of those that leave out pairs or approximate, (.+) fits: --any, exact=False",
        str(advice),
    )
    assert found
    tokens = int(found[1].replace(",", ""))
    for length, fits in ((tokens, True), (tokens * 101 // 100, False)):
        found = advise(tokens=length, **small)
        assert [each.fits for each in found.mechanisms if each.name == "multi-query"] == [fits]


def test_a_budget_for_not_even_a_token():
    advice = advise(task="decode", tokens=10**8, memory="1kB")
    assert not any(mechanism.fits for mechanism in advice.mechanisms)
    assert "nothing fits in 1 kB: the least is" in str(advice)
    assert "not even one token fits in this much" in str(advice)


def test_caches_of_fewer_bits_are_compared_while_decoding():
    advice = advise(task="decode", tokens=4096, dtype="float32", layers=2, heads=4, head_dim=64)
    own, eight, four = (
        next(each for each in advice.mechanisms if each.name == f"multi-head{bits}")
        for bits in ("", ", cache in 8 bits", ", cache in 4 bits")
    )
    assert eight.price.cache == own.price.cache * 8.5 / 32
    assert four.price.cache == own.price.cache * 4.5 / 32
    if native.available():  # which reads it as it is
        assert four.price.seconds < eight.price.seconds < own.price.seconds
    else:
        assert own.price.seconds < eight.price.seconds
    assert not any("bits" in name for name in names(advise(task="prefill", tokens=64)))
    assert not any("2 bits" in name for name in names(advise(task="decode", tokens=64)))


def test_bytes_of_a_cache_of_fewer_bits_are_those_that_it_has():
    advice = advise(task="decode", tokens=4096, dtype="bfloat16", layers=1, heads=2, head_dim=128)
    numbers = torch.zeros(1, 2, 4096, 128, dtype=torch.bfloat16)
    for bits, packing in ((8, Packing()), (4, Packing("int4"))):
        cache = KVCache.static(4096).packed(CacheFormat(packing, packing))
        with torch.no_grad():
            cache = cache.append(numbers, numbers)
        (found,) = [each for each in advice.mechanisms if each.name == f"multi-head, cache in {bits} bits"]
        assert found.price.cache == cache.nbytes


def test_a_cache_of_fewer_bits_is_made_as_the_advice_says():
    advice = advise(task="decode", tokens=4096, layers=2, heads=4, head_dim=128)
    layer = lm.LayerConfig(rotary=regard.positions.Rotary(8))
    attention, feed_forward = lm.AttentionConfig(num_heads=4), lm.FeedForwardConfig(32)
    model = lm.LanguageModel(lm.LanguageModelConfig(50, 32, (layer, layer), attention, feed_forward)).eval()
    for found in (each for each in advice.mechanisms if each.change is Change.FEWER_BITS):
        cache = eval(found.code, {"model": model, "CacheFormat": CacheFormat, "Packing": Packing})
        with torch.no_grad():
            _, cache = model.step(torch.zeros(1, 70, dtype=torch.int64), cache)
        stored = cache.layers[0].attention
        assert isinstance(stored, KVCache)
        assert stored.formats


@pytest.mark.parametrize(("memory", "bits"), [("4GB", ""), ("2GB", ", cache in 8 bits"), ("1GB", ", cache in 4 bits")])
def test_of_caches_that_fit_the_one_of_the_most_bits_is_recommended(memory, bits):
    advice = advise(task="decode", tokens=32768, layers=16, heads=32, key_heads=8, fixed=True, memory=memory)
    alone = [each for each in advice.mechanisms if "ring" not in each.name]
    assert recommend(alone).name == f"grouped-query{bits}"


def test_heads_that_do_not_fill_words_have_no_cache_of_fewer_bits():
    advice = advise(task="decode", tokens=4096, layers=2, heads=4, head_dim=36)
    assert [name for name in names(advice) if "bits" in name] == ["multi-head, cache in 8 bits"]


def test_a_model_keeps_its_heads(tmp_path):
    settings = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "sliding_window": 256, "dtype": "float32"}))
    advice = advise(tmp_path, task="decode", tokens=4096)
    workload = advice.workload
    assert (workload.layers, workload.heads, workload.key_heads, workload.head_dim) == (4, 8, 2, 64)
    assert (workload.window, workload.dtype) == (256, "float32")
    assert names(advice)[0] == "grouped-query, window of 256"
    assert {mechanism.change for mechanism in advice.mechanisms} == {Change.NOTHING, Change.FEWER_BITS}
    assert advice.recommended.price.cache == 2 * 4 * 2 * 256 * 64 * 4


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": ({**LLAMA, "num_key_value_heads": 2, "max_position_embeddings": 2048, "rope_theta": 1e4}, "decoder"),
    "qwen2": ({**LLAMA, "model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False}, "decoder"),
    "gpt2": ({"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 1024}, "decoder"),
    "bert": ({**LLAMA, "model_type": "bert", "is_decoder": False, "max_position_embeddings": 512}, "encoder"),
    "t5": (
        {
            "model_type": "t5",
            "is_encoder_decoder": True,
            "d_model": 32,
            "d_kv": 16,
            "num_heads": 4,
            "num_layers": 6,
            "num_decoder_layers": 2,
            "relative_attention_num_buckets": 32,
        },
        "translation",
    ),
    "marian": (
        {
            "model_type": "marian",
            "is_encoder_decoder": True,
            "d_model": 64,
            "num_hidden_layers": 6,
            "encoder_layers": 6,
            "decoder_layers": 2,
            "encoder_attention_heads": 8,
            "decoder_attention_heads": 4,
            "max_position_embeddings": 512,
        },
        "translation",
    ),
}


@pytest.mark.parametrize(
    ("name", "positions"),
    [
        ("llama", "rotary, for 2,048 tokens; 4,096 are more: it needs YaRN scaling, and some training"),
        ("qwen2", "learned"),
        ("gpt2", "learned, for 1,024 tokens; 4,096 are more: take fewer, or another model"),
        ("bert", "learned, for 512 tokens; 4,096 are more: take fewer, or another model"),
        ("t5", "learned biases by distance, of any length (biases.relative)"),
        ("marian", "sinusoidal, for 512 tokens; 4,096 are more: take fewer, or another model"),
    ],
)
def test_configurations_of_each_family(name, positions):
    settings, architecture = CONFIGS[name]
    workload = advise(settings, tokens=4096).workload
    assert (workload.layers, workload.heads, workload.head_dim) == (2, 4, 16)
    assert workload.architecture == architecture
    assert workload.window is None
    assert workload.positions == positions
    assert f"those of the model: {positions}" in str(advise(settings, tokens=4096))


def test_the_dtype_of_a_model_may_be_replaced_and_nothing_else():
    settings = {**LLAMA, "torch_dtype": "float16"}
    assert advise(settings, tokens=64).workload.dtype == "float16"
    assert advise(settings, tokens=64, dtype="float32").workload.dtype == "float32"
    assert advise({**LLAMA, "torch_dtype": "auto"}, tokens=64).workload.dtype == "bfloat16"
    assert advise(settings, tokens=64, heads=4).workload.heads == 4
    with pytest.raises(ConfigurationError, match="heads is 8, but the model has 4: leave heads out, or"):
        advise(settings, tokens=64, heads=8)


def test_a_model_of_transformers_is_read():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, num_key_value_heads=2, intermediate_size=8
    )
    assert advise(config, tokens=128).workload.key_heads == 2


def test_the_decision_table_says_what_is_predicted_here():
    rules = decision_table()
    assert len({rule.situation for rule in rules}) == len(rules) == 8
    assert all(any(letter.isdigit() for letter in rule.here) for rule in rules)


def test_a_rule_that_holds_is_said_to_hold_and_none_of_quality_is_judged_by_time():
    holds = {rule.textbook: rule.holds for rule in decision_table()}
    assert (
        holds["flash kernels"] is True
    )  # at 32,768 tokens they are faster: that they are from fewer on is no objection
    assert {name for name, verdict in holds.items() if verdict is None} == {
        "cross-attention",
        "additive",
        "rotary; ALiBi to extrapolate",
    }


def test_advice_is_json():
    found = json.loads(json.dumps(advise(tokens=64, memory="1GB").as_dict()))
    assert found["mechanisms"][0]["change"] == "nothing"
    assert found["workload"]["memory"] == 10**9


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"memory": "16"}, ConfigurationError, "memory '16' has no unit, and would be 16 bytes: write it as 16GB"),
        ({"memory": "-16GB"}, ConfigurationError, "memory '-16GB' is not a size above 0"),
        ({"tokens": -5}, ConfigurationError, "tokens is -5; it needs at least 1"),
        ({"tokens": "131k"}, ConfigurationError, "tokens needs a whole number; it is '131k'"),
        ({"task": "decode", "architecture": "encoder"}, ConfigurationError, "an encoder reads all tokens at once"),
        (
            {"model": {**LLAMA, "num_attention_heads": "4"}},
            ConfigurationError,
            "heads of the configuration needs a whole",
        ),
        ({"task": "decoding"}, ConfigurationError, "no task 'decoding'; did you mean 'decode'?"),
        ({"architecture": "gpt"}, ConfigurationError, "no architecture 'gpt'"),
        ({"dtype": "int8"}, ConfigurationError, "no dtype 'int8'"),
        ({"tokens": 0}, ConfigurationError, "tokens is 0; it needs at least 1"),
        ({"heads": 6, "key_heads": 4}, ConfigurationError, "4 key heads cannot be shared by 6 heads"),
        ({"memory": "16 apples"}, ConfigurationError, "memory '16 apples' is not a size above 0: write it as 16GB"),
        ({"memory": -1}, ConfigurationError, "memory is -1; it needs at least 1"),
        ({"source_tokens": 5}, ConfigurationError, "source_tokens is 5, but a model of architecture 'decoder'"),
        ({"device": "abacus"}, DeviceError, "there is no device 'abacus'"),
        ({"lenght": 5}, ConfigurationError, "there is no argument lenght; known: task, tokens"),
        ({"model": "no/such/folder"}, ConfigurationError, "cannot read no/such/folder"),
        ({"model": {"hidden_size": 4}}, ConfigurationError, "has no num_hidden_layers or n_layer, no num_attention"),
    ],
)
def test_wrong_settings(settings, error, message):
    with pytest.raises(error) as raised:
        advise(**settings)
    assert message in str(raised.value)


def test_sizes():
    assert [parse_bytes(text) for text in ("1KB", "1 kib", "2e3", "1.5MB")] == [1000, 1024, 2000, 1_500_000]
