"""Lenses over sequences that are cut over processes: the results of one process."""

import numpy as np
import pytest
import torch
from lens_cases import Shuffled, all_lenses, far_below, last_queries, parts
from ring_cases import MASKS, RingCase, random_case

import regard
import regard.ring as ring
from regard import heads, lenses


def expected(
    case: RingCase, names: list[str], infinite: list[int] | None = None, below: list[int] | None = None
) -> dict[str, np.ndarray]:
    whole, options, _ = case.tensors(torch.float32)
    whole["key"][..., infinite or [], :] = float("nan")
    if below:
        far_below(whole, below)
    whole.pop("above")
    chosen = {name: lens for name, lens in all_lenses(case.length, case.seed).items() if name in names}
    torch.manual_seed(case.seed)
    with torch.no_grad():
        seen = regard.observe(whole["query"], whole["key"], whole["value"], *chosen.values(), **options)
    found = {"output": seen.output, "lse": seen.lse}
    for name, lens in chosen.items():
        by_row, others = parts(name, seen[lens])
        found |= {part: tensor for part, (tensor, _) in by_row.items()} | others
    return {name: tensor.numpy() for name, tensor in found.items()}


def names_for(case: RingCase) -> list[str]:
    names = [*all_lenses(case.length, case.seed)]
    if not case.heads or case.batch == (2, 1):
        names.remove("roles")  # tokens are those of one batch axis
    return names


def assert_columns_have_weights(columns: np.ndarray, largest: np.ndarray, weights: np.ndarray) -> None:
    """The weights in the columns are the largest ones; -1 stands where there is none, or NaN.

    A weight below the smallest normal number may round to 0, and then is none.
    """
    there, largest = columns >= 0, np.nan_to_num(largest)
    differs = there != (largest > 0)
    assert (largest[differs] < np.finfo(np.float32).tiny).all()
    assert differs.mean() < 1e-4
    of_columns = np.take_along_axis(weights, np.where(there, columns, 0), -1)
    np.testing.assert_allclose(of_columns[there], largest[there], rtol=2e-5, atol=3e-6)
    ordered = np.sort(np.where(there, columns, -1 - np.arange(columns.shape[-1])), -1)
    assert (np.diff(ordered) > 0).all()  # no column twice


def assert_same(found: list[dict[str, np.ndarray]], truth: dict[str, np.ndarray]) -> None:
    for answer in found:
        assert not isinstance(answer, str), answer
        assert answer.keys() == truth.keys()
        for name, needs in truth.items():
            if name in ("top columns", "many columns"):  # of equal weights any may come first
                assert_columns_have_weights(answer[name], truth[name.replace("columns", "weights")], truth["weights"])
            elif name in ("edges", "rows", "queries"):
                np.testing.assert_array_equal(answer[name], needs, err_msg=name)
            else:
                np.testing.assert_allclose(answer[name], needs, rtol=2e-5, atol=3e-6, err_msg=name)
    for name in truth:
        for answer in found[1:]:
            np.testing.assert_array_equal(answer[name], found[0][name], err_msg=f"{name} of all ranks")


@pytest.mark.parametrize("number", range(8))
def test_all_lenses_of_random_problems(pool, number):
    processes = 1 + number % 4
    case = random_case(100 + number, processes)
    names = names_for(case)
    assert_same(pool.run("observe", processes, case=case, names=names), expected(case, names))


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8, 60))
def test_all_lenses_of_more_random_problems(pool, number):
    test_all_lenses_of_random_problems(pool, number)


LAYOUTS = ring.Contiguous((20, 1, 39)), ring.Zigzag(), ring.Striped()


@pytest.mark.parametrize(("number", "mask"), list(enumerate(MASKS)))
def test_all_lenses_of_each_mask(pool, number, mask):
    case = RingCase(7, 60, layout=LAYOUTS[number % 3], mask=mask, heads=4, batch=(2,))
    names = names_for(case)
    assert_same(pool.run("observe", 3, case=case, names=names), expected(case, names))


@pytest.mark.parametrize(
    "options",
    [
        {"layout": ring.Zigzag(), "head_parallel": 2, "dropout": 0.3, "sinks": True},
        {"layout": ring.Striped(), "bias": "sum", "key_heads": 4},
        {"layout": ring.Zigzag(), "score": "additive", "softcap": 2.0},
        {"layout": Shuffled(), "mask": "causal window", "reach": 30},
        {"layout": ring.Zigzag(), "heads": 0, "key_heads": 0, "batch": (2,)},
        {"layout": ring.Zigzag(), "factor": 3e4, "sinks": True},
        {"layout": ring.Striped(), "factor": 1e7},
    ],
)
def test_all_lenses_with(pool, options):
    """Heads over processes, biases, scores, layouts of one's own, no head axis, log-sum-exps beyond float32."""
    case = RingCase(11, 90, **{"mask": "causal", "heads": 4, "key_heads": 2} | options)
    names = names_for(case)
    assert_same(pool.run("observe", 4, case=case, names=names), expected(case, names))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pairs_whose_score_infinity_makes_minus_infinity_count_as_masked(pool, layout):
    case = RingCase(3, 60, layout=layout, mask="causal window", reach=5)
    names = names_for(case)
    truth = expected(case, names, below=[17, 40])
    assert np.isfinite(truth["output"]).all()
    assert (truth["received"][..., [17, 40]] == 0).all()
    assert_same(pool.run("observe", 3, case=case, names=names, below=[17, 40]), truth)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_row_that_attends_to_nan_is_nan(pool, layout):
    case = RingCase(3, 60, layout=layout, mask="causal window", reach=5)
    names = names_for(case)
    truth = expected(case, names, [17, 40])
    assert np.isnan(truth["received"]).all()
    assert 0 < np.isnan(truth["entropy"]).sum() < truth["entropy"].size
    assert_same(pool.run("observe", 3, case=case, names=names, infinite=[17, 40]), truth)


def test_half_precision(pool):
    case = RingCase(5, 70, layout=ring.Zigzag(), precision=torch.bfloat16)
    names = ["entropy", "received", "sum", "weights", "top", "corner"]
    found = pool.run("observe", 2, case=case, names=names, dtype=torch.bfloat16)
    assert_same(found, {name: value for name, value in expected(case, names).items() if name != "output"})


@pytest.mark.parametrize("layout", [ring.Contiguous(), ring.Zigzag()])
def test_fewer_queries_than_keys(pool, layout):
    """The queries are at the last positions: segments, distances, cells and tokens are those of all rows."""
    answers, truth = pool.run("observe_last", 3, length=40, queries=6, layout=layout), last_queries(40, 6)
    for answer in answers:
        for name, needs in truth.items():
            np.testing.assert_allclose(answer[name], needs, rtol=2e-5, atol=3e-6, err_msg=name)


def test_a_lens_of_ones_own(pool):
    """One with a result for each row needs no more than start_shard; one without it is refused."""
    for answer in pool.run("own_lens", 2, length=9, with_shards=True):
        assert answer.tolist() == [[[1.0] * 3 + [0.0] * 6] * 2]
    for answer in pool.run("own_lens", 2, length=9, with_shards=False):
        with pytest.raises(ValueError, match=r"Coverage\(least=0.3\) has no start_shard.*there are Entropy"):
            raise ValueError(answer)


@pytest.mark.parametrize(
    ("lens", "message"),
    [
        (lenses.Entropy, r"observe needs lenses from regard.lenses, such as Entropy\(\); one is <class"),
        (lenses.Alignment(), r"Alignment follows a path through .*take TopK\(1\), whose columns"),
        (lenses.Pooled(50), r"Pooled has 50 cells for 24 rows, and each needs one at least"),
        (lenses.Mass([0] * 8), r"Mass has 8 segments for 24 queries and 24 keys"),
        (lenses.Weights(slice(0, 30)), r"Weights was asked for rows 0 to 30, and there are 24"),
        (heads.Roles(["a"] * 8), r"Roles has 8 tokens of 1 sequences, for 24 queries, 24 keys"),
    ],
)
def test_lenses_that_do_not_fit(pool, lens, message):
    for answer in pool.run("observe_lens", 3, lenses=[lens] * 3):
        with pytest.raises(ValueError, match=message):
            raise ValueError(answer)
    assert pool.run("observe_lens", 3, lenses=[lenses.Entropy()] * 3) == ["computed"] * 3  # the group goes on


@pytest.mark.parametrize(
    ("different", "message"),
    [
        (
            lenses.TopK(2),
            r"processes of the ring disagree on lenses: rank 1 has TopK\(k=2\) .* rank 0 has TopK\(k=3",
        ),
        (lenses.Weights(slice(0, 2)), r"disagree on lenses: rank 1 has Weights\(rows=slice\(0, 2, None\)"),
        ("entropy", r"rank 1 of the ring has wrong arguments: observe needs lenses .* one is 'entropy'"),
    ],
)
def test_processes_with_other_lenses(pool, different, message):
    usual = lenses.TopK(3)
    answers = pool.run("observe_lens", 3, lenses=[usual, different, usual])
    with pytest.raises(ValueError, match=message):
        raise ValueError(answers[0])


def test_equal_segments_need_equal_contents(pool):
    """Segments whose shapes agree are compared by what is in them."""
    first, other = lenses.Mass([0] * 24), lenses.Mass([0] * 23 + [1])
    answers = pool.run("observe_lens", 3, lenses=[first, other, first])
    assert all("disagree on lenses: rank 1 has Mass(" in answer for answer in answers)
    assert pool.run("observe_lens", 3, lenses=[first, lenses.Mass([0] * 24), first]) == ["computed"] * 3


def test_keys_travel_twice_and_no_more(pool):
    case = RingCase(1, 60, mask="none")
    keys, values = 2 * 20 * case.key_heads * 8 * 4, 2 * 20 * case.key_heads * 6 * 4
    for sent in pool.run("lens_traffic", 3, case=case):
        assert sent == 2 * keys + values
