"""No lens reads a value back from a device: of tensors on `meta`, which have none, each makes its state and result."""

import pytest
import torch

from regard import lenses, masks
from regard.core.problem import Problem
from regard.core.score_forms import DotPairs
from regard.lenses import NativeReduction, WeightTile
from regard.lenses.distance import DistanceResult

QUERIES, KEYS = 35, 53
ALL = (
    lenses.Entropy(),
    lenses.Received(),
    lenses.Pooled((5, 7)),
    lenses.Pooled((4, 31), "max"),
    lenses.Mass(torch.arange(QUERIES) // 9, torch.arange(KEYS) % 4),
    lenses.Mass(torch.arange(2 * QUERIES).view(2, QUERIES) % 5, torch.arange(KEYS) // 20),
    lenses.Distance(),
    lenses.Distance((3, 17)),
    lenses.TopK(4),
    lenses.MaxLogit(),
    lenses.MaxLogit("row"),
)


def on_meta(**options):
    query, key = torch.empty(2, 4, QUERIES, 16, device="meta"), torch.empty(2, 2, KEYS, 16, device="meta")
    return Problem(DotPairs(query, key, 0.25), key, **options)


@pytest.mark.parametrize("lens", ALL, ids=repr)
def test_no_value_is_read(lens):
    problem, lse = on_meta(mask=masks.causal()), torch.empty(2, 4, QUERIES, device="meta")
    state = lens.start(problem)
    for reduction in state.reductions:
        assert isinstance(reduction, NativeReduction)
        reduction.native()
        for rows, columns in ((slice(0, 16), slice(0, 32)), (slice(16, QUERIES), slice(0, KEYS, 3))):
            count = len(range(KEYS)[columns])
            weights = torch.empty(2, 4, rows.stop - rows.start, count, device="meta")
            reduction.add(WeightTile(weights, weights, slice(0, 2), rows, columns))
    found = state.finish(problem, lse)
    assert all(tensor.device.type == "meta" for tensor in (found if isinstance(found, tuple) else (found,)))


def test_positions_on_a_device_are_read_for_the_number_of_bins_alone():
    positions = torch.arange(QUERIES, device="meta") * 2
    problem = on_meta(query_positions=positions, key_positions=torch.arange(KEYS, device="meta"))
    state = lenses.Distance((3, 17)).start(problem)
    assert state.native() is not None
    state.add(WeightTile(torch.empty(2, 4, 16, 32, device="meta"), None, slice(0, 2), slice(0, 16), slice(0, 32)))
    assert isinstance(state.finish(problem, torch.empty(2, 4, QUERIES, device="meta")), DistanceResult)
    with pytest.raises(NotImplementedError, match="meta"):
        lenses.Distance().start(problem)
