"""Lenses of linear attention over sequences that are cut over processes: the results of one process."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from lens_cases import all_lenses, parts
from linear_cases import LinearCase, random_linear_case
from test_shard_lenses import assert_same

import regard
import regard.ring as ring
from regard import lenses, masks
from regard.linear import Identity

NONNEGATIVE = ("elu", "relu", "softmax", "favor")


def case_with_weights(number: int, processes: int) -> LinearCase:
    """A random case whose weights are shares of their row."""
    case = random_linear_case(number, processes)
    feature_map = case.feature_map if case.feature_map in NONNEGATIVE else "elu"
    return replace(
        case, feature_map=feature_map, normalize=True, delta=False, removal=False, state=False, wants_state=False
    )


def names_for(case: LinearCase) -> list[str]:
    # Shares of linear attention are no softmax of scores, of which there could be a largest one.
    names = [name for name in all_lenses(case.length, case.seed) if not name.startswith("largest score")]
    if not case.heads or case.batch == (2, 1):
        names.remove("roles")  # tokens are those of one batch axis
    return names


def expected(case: LinearCase, names: list[str]) -> dict[str, np.ndarray]:
    whole, options, _ = case.tensors(torch.float32)
    whole.pop("above")
    chosen = {name: lens for name, lens in all_lenses(case.length, case.seed).items() if name in names}
    query, key, value = (whole.pop(name) for name in ("query", "key", "value"))
    with torch.no_grad():
        seen = regard.observe_linear_attention(query, key, value, *chosen.values(), **whole, **options)
    found = {"output": seen.output, "lse": seen.lse}
    for name, lens in chosen.items():
        by_row, others = parts(name, seen[lens])
        found |= {part: tensor for part, (tensor, _) in by_row.items()} | others
    return {name: tensor.numpy() for name, tensor in found.items()}


def check(pool, case: LinearCase, processes: int, own_masks: bool = False) -> None:
    names = names_for(case)
    answers = pool.run("observe_linear", processes, case=case, names=names, own_masks=own_masks)
    assert_same(answers, expected(case, names))


@pytest.mark.parametrize(
    "number", [pytest.param(number, marks=[pytest.mark.slow] * (number >= 12)) for number in range(100)]
)
def test_random_problems(pool, number):
    """Causal and not, masks, documents, decays, heads in groups; tensors of the whole sequence or of the shard."""
    processes = 1 + number % 4
    check(pool, case_with_weights(200 + number, processes), processes, own_masks=number % 2 == 0)


@pytest.mark.parametrize("feature_map", NONNEGATIVE)
@pytest.mark.parametrize("causal", [True, False])
def test_feature_maps(pool, feature_map, causal):
    layout = ring.Contiguous((30, 1, 39)) if causal else ring.Striped()
    check(pool, LinearCase(5, 70, layout, feature_map=feature_map, causal=causal, heads=4, key_heads=2), 3)


@pytest.mark.parametrize("decay", ["head", "feature"])
@pytest.mark.parametrize("layout", [ring.Contiguous((30, 1, 39)), ring.Zigzag()])
def test_decays_over_pieces(pool, decay, layout):
    check(pool, LinearCase(6, 70, layout, decay=decay, heads=4, key_heads=2, batch=(2,)), 3)


@pytest.mark.parametrize("mask", ["padding", "keys", "long documents"])
def test_masks_of_a_shard(pool, mask):
    check(pool, LinearCase(7, 60, ring.Zigzag(), mask=mask, batch=(2,)), 2, own_masks=True)


def test_rows_that_weigh_nan_are_nan(pool):
    case = LinearCase(8, 60, ring.Zigzag(), bad=(17, 40), bad_queries=(5,))
    truth = expected(case, ["entropy"])
    assert 0 < np.isnan(truth["entropy"]).sum() < truth["entropy"].size
    check(pool, case, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([{"normalize": False}] * 2, r"lenses read weights of at least 0 that sum to 1 .* normalize=False has others"),
        ([{"feature_map": Identity()}] * 2, r"Identity\(\) has features down to -1, so that weights may be negative"),
        ([{}, {"lens": lenses.TopK(2)}], r"disagree on lenses: rank 1 has TopK\(k=2\) .* rank 0 has Received\(\)"),
        ([{"lens": lenses.Alignment()}] * 2, r"Alignment follows a path through the weights of all rows"),
        (
            [{}, {"softmax": True}],
            r"the processes of the ring disagree on operator: rank 1 has softmax, rank 0 has linear",
        ),
        ([{"mask": masks.window(before=2)}] * 2, r"window\(before=2\) is no mask for linear attention"),
    ],
)
def test_what_is_refused(pool, changes, message):
    """In every process, also where one alone has a negative feature."""
    for answer in pool.run("observe_linear_lens", 2, changes=changes):
        with pytest.raises(ValueError, match=message):
            raise ValueError(answer)
    assert pool.run("observe_linear_lens", 2, changes=[{}] * 2) == ["computed"] * 2  # the group goes on
