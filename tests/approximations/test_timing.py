"""Crossovers of given times, resized problems, and the memory of known tensors."""

import pytest
import torch

import regard
from regard import biases, masks
from regard.approximations import Linformer, SegmentMeans, Timings
from regard.approximations.methods import as_method
from regard.approximations.timing import measure_times, peak_memory, resized
from regard.errors import ConfigurationError
from regard.kernels.validation import make_problem
from regard.linear import Elu


@pytest.mark.parametrize(
    ("exact", "approximate", "crossover"),
    [
        ((1.0, 4.0, 16.0), (2.0, 4.0, 8.0), 200.0),
        ((1.0, 4.0, 16.0), (0.5, 1.0, 2.0), 100.0),  # faster at all
        ((1.0, 4.0, 16.0), (2.0, 5.0, 17.0), None),
        ((1.0, 4.0, 16.0), (0.5, 5.0, 17.0), None),  # faster at the shortest alone
        ((3.0, 4.0, 16.0), (2.0, 8.0, 4.0), 200 * 2 ** (1 / 3)),  # from -log 2 to log 4
        ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), None),
    ],
)
def test_crossover(exact, approximate, crossover):
    found = Timings((100, 200, 400), exact, approximate).crossover
    assert found is None if crossover is None else found == pytest.approx(crossover)


def test_resized_rows_are_spaced_or_repeated():
    rows = torch.arange(6.0)[:, None]
    problem = make_problem(rows, rows, rows)
    assert resized(problem, 3).value.flatten().tolist() == [0, 2, 4]
    assert resized(problem, 8).pairs.query.flatten().tolist() == [0, 1, 2, 3, 4, 5, 0, 1]
    fewer = make_problem(rows[:2], rows, rows)
    assert resized(fewer, 12).pairs.query.shape == (4, 1)
    assert resized(fewer, 1).pairs.query.shape == (1, 1)


def test_times_at_the_lengths_that_are_asked_for():
    query = torch.randn(1, 2, 32, 8)
    timings, remark = measure_times(
        make_problem(query, query, query, mask=masks.causal()), as_method(Elu()), [16, 64, 16]
    )
    assert timings.lengths == (16, 32, 64)
    assert min(*timings.exact, *timings.approximate) > 0
    assert remark == ""
    assert timings.speedup == tuple(a / b for a, b in zip(timings.exact, timings.approximate, strict=True))


def test_what_fits_one_length_alone_is_left_out_and_said():
    query = torch.randn(2, 2, 32, 8)
    padded = make_problem(query, query, query, mask=masks.causal() & masks.padding(lengths=[3, 32]))
    timings, remark = measure_times(padded, as_method(Elu()), [64])
    assert timings.lengths == (32, 64)
    assert remark == "other lengths are timed without padding(lengths=[3, 32])"
    biased = make_problem(query, query, query, bias=biases.tensor(torch.zeros(32, 32)))
    timings, remark = measure_times(biased, as_method(masks.window(3)), [64])
    assert timings.lengths == (32,)
    assert remark.startswith("not timed at 64 keys: ")
    short = make_problem(query, query, query)
    timings, remark = measure_times(short, Linformer(torch.rand(4, 40)), [16, 64, 128])
    assert timings.lengths == (16, 32)
    assert remark == "not timed from 64 keys on: there are 64 keys, and the projection is for at most 40"


def test_the_search_for_the_crossover_ends(monkeypatch):
    from regard.approximations import timing

    def pretend(problem, method):
        return problem.keys**2 * 1e-6, problem.keys * 1e-3

    monkeypatch.setattr(timing, "_times", pretend)
    query = torch.randn(100, 4)
    timings, _ = measure_times(make_problem(query, query, query), as_method(Elu()), None)
    assert timings.lengths == (100, 128, 256, 512, 1024)  # a call takes 1.05 s there
    assert timings.crossover == pytest.approx(1000)


@pytest.mark.parametrize("lengths", [[0], [16.0], [True], [-5]])
def test_lengths_are_whole_numbers(lengths):
    with pytest.raises(ConfigurationError, match="lengths has .* it needs whole numbers of at least 1"):
        regard.approximation(torch.zeros(5, 4), torch.zeros(5, 4), torch.zeros(5, 4), Elu(), lengths=lengths)


def test_memory_is_that_of_the_tensors_held_at_once(capfd):
    def work():
        large = torch.ones(1000, 100)
        del large
        return torch.ones(300, 100) + 1

    peak = peak_memory(work, torch.device("cpu"))
    assert peak is not None
    assert 4 * 1000 * 100 <= peak < 4 * 1000 * 110
    assert capfd.readouterr() == ("", "")
    assert peak_memory(work, torch.device("meta")) is None
    with torch.autograd.profiler.profile():
        assert peak_memory(work, torch.device("cpu")) is None


def test_memory_of_exact_attention_with_all_weights_is_seen():
    query = torch.randn(1, 1, 512, 8)
    dense = peak_memory(lambda: regard.attention(query, query, query, kernel="reference"), query.device)
    linear = peak_memory(
        lambda: as_method(Linformer(SegmentMeans(4))).run(make_problem(query, query, query)), query.device
    )
    assert dense is not None
    assert linear is not None
    assert dense >= 4 * 512 * 512 > 4 * linear
