"""Advice: what is recommended for a task, what its numbers are, and what wrong settings get."""

import json

import pytest
import torch

import regard
from regard.advisor import Change, Workload, advise, decision_table
from regard.advisor.prices import LONGEST_COUNTED, describe_problem, linear_price, softmax_price
from regard.advisor.workload import parse_bytes
from regard.errors import ConfigurationError, DeviceError
from regard.kernels.cost_model import predicted_seconds
from regard.masks import causal, window


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
    assert training.seconds == pytest.approx(3.5 * forward.seconds)
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
def test_long_prices_lie_on_the_parabola_of_shorter_ones(mask):
    counted = Workload("prefill", LONGEST_COUNTED, layers=1, heads=1, head_dim=64, dtype="float32")
    longer = Workload("prefill", 2 * LONGEST_COUNTED, layers=1, heads=1, head_dim=64, dtype="float32")
    price = softmax_price(longer, 1, longer.tokens, mask=mask)
    pairs = longer.tokens**2 * (1.0 if mask is None else mask.density(longer.tokens, longer.tokens))
    assert price.flops == pytest.approx(4 * 64 * pairs, rel=1e-9)
    assert price.cache == 2 * softmax_price(counted, 1, counted.tokens, mask=mask).cache


def test_a_long_cache_that_does_not_fit_gets_fewer_key_heads():
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


def test_the_nearest_feasible_is_said():
    advice = advise(task="decode", tokens=10**8, memory="1MB")
    assert not any(mechanism.fits for mechanism in advice.mechanisms)
    assert "nothing fits in 977 KiB: the least is" in str(advice)


def test_a_model_keeps_its_heads(tmp_path):
    settings = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps({**settings, "sliding_window": 256, "dtype": "float32"}))
    advice = advise(tmp_path, task="decode", tokens=4096)
    workload = advice.workload
    assert (workload.layers, workload.heads, workload.key_heads, workload.head_dim) == (4, 8, 2, 64)
    assert (workload.window, workload.dtype) == (256, "float32")
    assert names(advice) == ["grouped-query, window of 256"]
    assert advice.recommended.price.cache == 2 * 4 * 2 * 256 * 64 * 4


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


def test_advice_is_json():
    found = json.loads(json.dumps(advise(tokens=64, memory="1GB").as_dict()))
    assert found["mechanisms"][0]["change"] == "nothing"
    assert found["workload"]["memory"] == 10**9


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
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
