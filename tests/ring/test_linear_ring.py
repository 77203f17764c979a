"""Linear attention over several processes equals that of one: outputs, states and gradients, beside float64."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from linear_cases import DIM, VALUE_DIM, LinearCase, random_linear_case
from processes import MOST, Pool

import regard.ring as ring
from regard import masks
from regard.linear import LinearState, Relu

TOLERANCE = 1e-6
"""Relative to the norm of the float64 result."""
ROUNDING = 4 * torch.finfo(torch.float32).eps
"""The error of a number that is a sum of terms of size one."""


def distance(found: torch.Tensor, truth: torch.Tensor) -> float:
    """The norm of the difference; NaN has to be in the same places."""
    assert found.isnan().equal(truth.isnan())
    return float((found.double() - truth).nan_to_num().norm())


def check(pool: Pool, case: LinearCase, processes: int) -> None:
    answers = pool.run("linear", processes, case=case)
    assert isinstance(answers[0], dict), answers[0]
    truth, single = case.expected(torch.float64), case.expected(torch.float32)
    assert answers[0].keys() == truth.keys()
    # A gradient that is 0, as that of a decay of nothing, is a difference of terms as large as other gradients.
    terms = max(float(tensor.nan_to_num().abs().max()) for tensor in truth.values())
    for name, found in answers[0].items():
        size, of_one = float(truth[name].nan_to_num().norm()), 2 * distance(single[name], truth[name])
        rounding = ROUNDING * max(terms, 1.0) * truth[name].numel() ** 0.5
        error = distance(torch.from_numpy(found), truth[name])
        assert error <= max(TOLERANCE * size, rounding, of_one), (
            f"{name} of {case}: error {error:.2g} of {size:.2g}, twice that of one is {of_one:.2g}"
        )


def numbers(count: int) -> list:
    """Numbers of random problems and of processes; those after the first sixty are slow."""
    return [
        pytest.param(number, 1 + number % MOST, marks=[pytest.mark.slow] * (number >= 60)) for number in range(count)
    ]


@pytest.mark.parametrize(("number", "processes"), numbers(600))
def test_random_problems(pool, number, processes):
    check(pool, random_linear_case(number, processes), processes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("delta", [False, True])
def test_other_dtypes(pool, dtype, delta):
    options = {"decay": "head", "feature_map": "unit" if delta else "elu", "normalize": not delta, "delta": delta}
    case = LinearCase(17, 150, layout=ring.Zigzag(), heads=4, key_heads=2, **options)
    found = pool.run("linear", 4, case=case, dtype=dtype)[0]
    single = case.expected(dtype)
    # Sums are in float32 at least, so that results of half precision are rounded once, as those of one process.
    tolerance = max(2 * torch.finfo(dtype).eps, 1e-13)
    for name, tensor in single.items():
        assert distance(torch.from_numpy(found[name]), tensor.double()) <= tolerance * float(tensor.double().norm())


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("where", [(20,), (0, 39), ()], ids=str)
def test_nan_reaches_the_rows_that_attend_to_it(pool, where, documents, delta):
    options = {"feature_map": "unit" if delta else "elu", "normalize": not delta, "delta": delta}
    mask = "long documents" if documents else "none"
    case = LinearCase(3, 40, ring.Zigzag(), mask=mask, bad=where, bad_queries=(7, 31), **options)
    check(pool, case, 3)
    check(pool, replace(case, causal=False, delta=False, feature_map="relu", layout=ring.Striped()), 3)


def test_nan_in_a_single_key(pool):
    case = LinearCase(3, 4, bad=(1,), wants_state=True)
    check(pool, case, 4)
    assert case.expected(torch.float64)["final"].isnan().all()


def test_a_query_of_nan_behind_masked_keys_is_zero(pool):
    """Of rows that attend to no key in any process."""
    case = LinearCase(5, 12, mask="keys", bad_queries=(0, 5, 11), causal=True)
    check(pool, case, 4)


STATE = 2 * DIM * (VALUE_DIM + 1) * 4
"""Bytes of the state of two heads, with totals."""
MARKS = 2 * 2 * 4
"""Bytes of what is known of NaN and of masked keys."""


@pytest.mark.parametrize("length", [64, 2048])
@pytest.mark.parametrize("backward", [False, True])
def test_a_state_travels_to_each_process_with_later_positions(pool, length, backward):
    answers = pool.run("linear_traffic", 4, case=LinearCase(1, length), backward=backward)
    for rank, (sent, summed, peers) in enumerate(answers):
        assert summed == 0
        assert sent == (STATE + MARKS) * ((3 - rank) + rank * backward)  # gradients travel the other way
        assert peers == [peer for peer in range(4) if peer > rank or (backward and peer != rank)]


@pytest.mark.parametrize(
    ("options", "transition"),
    [
        ({"decay": "head"}, 1),
        ({"decay": "feature"}, DIM),
        ({"delta": True, "normalize": False, "feature_map": "unit"}, DIM * DIM),
    ],
)
def test_transitions_travel_with_states(pool, options, transition):
    case = LinearCase(1, 256, **options)
    state = STATE if case.normalize else 2 * DIM * VALUE_DIM * 4
    answers = pool.run("linear_traffic", 3, case=case, backward=False)
    assert [sent for sent, *_ in answers] == [(state + 2 * 4 * transition + MARKS) * (2 - rank) for rank in range(3)]


def test_in_zigzag_each_process_sends_the_states_of_both_pieces(pool):
    answers = pool.run("linear_traffic", 3, case=LinearCase(1, 60, ring.Zigzag()), backward=False)
    # Piece r is read by both others; piece 5 - r, by those before r, whose second piece is later. Of process 2 both
    # pieces are one range.
    assert [sent // (STATE + MARKS) for sent, *_ in answers] == [2, 3, 2]


def test_documents_travel_only_where_they_go_on(pool):
    case = LinearCase(1, 90, mask="long documents")
    answers = pool.run("linear_traffic", 3, case=case, backward=False)  # three documents, one in each process
    assert [sent for sent, *_ in answers] == [0, 0, 0]
    answers = pool.run("linear_traffic", 2, case=case, backward=False)
    assert [sent for sent, *_ in answers] == [STATE + MARKS, 0]


@pytest.mark.parametrize("length", [64, 2048])
def test_one_sum_where_attention_is_not_causal(pool, length):
    answers = pool.run("linear_traffic", 4, case=LinearCase(1, length, causal=False), backward=True)
    assert answers == [(0, 2 * (STATE + MARKS), [])] * 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"normalize": True}, r"disagree on normalize: rank 1 has True, rank 0 has False"),
        ({"causal": False}, r"disagree on mask: rank 1 has None, rank 0 has causal\(\)"),
        ({"mask": masks.padding([20])}, r"disagree on mask: rank 1 has causal\(\) & padding\(lengths=\[20\]\)"),
        ({"feature_map": Relu()}, r"disagree on feature_map: rank 1 has Relu\(\), rank 0 has None"),
        ({"decay": -torch.ones(1, 2, 8)}, r"disagree on decay: rank 1 has one for each head, rank 0 has None"),
        ({"beta": torch.ones(1, 2, 8)}, r"disagree on beta: rank 1 has one for each key, rank 0 has None"),
        ({"scale": 0.5}, r"disagree on scale: rank 1 has 0.5, rank 0 has None"),
        ({"state": LinearState(torch.ones(1, 2, 8, 8))}, r"disagree on state: rank 1 has sums \w+, rank 0 has None"),
        ({"layout": ring.Zigzag()}, r"disagree on layout: rank 1 has Zigzag\(\), rank 0 has Contiguous\("),
        ({"dtype": "float64"}, r"disagree on dtype: rank 1 has float64, rank 0 has float32"),
        ({"shape": (1, 4, 8, 8)}, r"disagree on query shape: rank 1 has \(1, 4, ·, 8\), rank 0 has \(1, 2, ·, 8\)"),
        ({"requires_grad": True}, r"disagree on requires_grad: rank 1 has "),
        ({"with_state": True}, r"disagree on operator: rank 1 has linear with state, rank 0 has linear"),
        ({"softmax": True}, r"disagree on operator: rank 1 has softmax, rank 0 has linear"),
        ({"shape": (1, 2, 9, 8)}, r"rank 0 has 8 keys, but Contiguous\(lengths=None\) gives it 9 of 25 positions"),
    ],
)
def test_processes_that_disagree(pool, change, message):
    answers = pool.run("differing_linear", 3, rank=1, change=change)
    assert len(set(answers)) == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(answers[0])


def test_a_wrong_argument_of_one_process_is_reported_by_all(pool):
    answers = pool.run("differing_linear", 3, rank=2, change={"mask": masks.window(before=3)})
    assert answers[2].startswith("MaskError: window(before=3) is no mask for linear attention")
    for answer in answers[:2]:
        assert answer.startswith("RingError: rank 2 of the ring has wrong arguments: window(before=3) is no mask")


def test_wrong_values_of_one_process_are_reported_by_all(pool):
    """Only the process that has the decay can see that it is above 0."""
    answers = pool.run("differing_linear", 3, rank=2, change={"decay": torch.ones(1, 2, 8)})
    assert answers[0].startswith("RingError: the processes of the ring disagree on decay")
    answers = pool.run("bad_decay", 3, rank=2)
    assert answers[2].startswith("ConfigurationError: decay has values up to 1")
    for answer in answers[:2]:
        assert answer.startswith("RingError: rank 2 of the ring has wrong arguments: decay has values up to 1")


def test_a_lost_process_ends_in_an_error_everywhere(program, tmp_path: Path):
    with Pool(program, tmp_path, 3, timeout=3.0) as started:
        answers = started.run("lose_linear", 3, victim=1)
    assert answers[1] == "done"
    for rank in (0, 2):
        assert answers[rank].startswith(f"RingError: rank {rank} of 3: in a message")


def test_second_derivatives_are_refused(pool):
    for causal in (True, False):
        for answer in pool.run("linear_twice", 2, causal=causal):
            assert "linear attention in a ring has no second derivatives" in answer
