"""What is kept beside queries and keys: the pyramid, profiles and metrics, against the dense weights."""

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.explorer import Atlas, record
from regard.explorer.atlas.pyramid import PyramidLevels, packed, unpacked
from regard.explorer.atlas.summary import NEAR
from regard.lenses import Weights

B, H, D = 2, 3, 16
CASES = {
    "causal": lambda m, n: {"mask": masks.causal()},
    "everything": lambda m, n: {},
    "window": lambda m, n: {"mask": masks.window(before=5, after=3)},
    "empty rows": lambda m, n: {"mask": masks.causal() & ~masks.prefix(n - m // 2)},
    "padded": lambda m, n: {"mask": masks.padding(lengths=torch.tensor([n, n // 3]))},
    "positions": lambda m, n: {
        "mask": masks.causal(),
        "query_positions": torch.arange(m) * 3,
        "key_positions": torch.arange(n) * 2,
    },
}
SIZES = [(9, 9), (150, 150), (70, 700), (1, 300), (513, 513)]


class Asker(nn.Module):
    def forward(self, *tensors, memory=None, **options):  # without a memory it looks at its own sequence
        return regard.attention(*tensors, **options)


def dense_and_maps(case, m, n):
    query, key = torch.randn(B, H, m, D), torch.randn(B, H, n, D)
    options = CASES[case](m, n)
    seen = regard.observe(query, key, key, Weights(), **options)[Weights()].double()
    with record(Asker(), dtype="keep") as recording:
        recording.model(query, key, key, **options)
    return seen, recording.atlas().maps


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("m", "n"), SIZES)
def test_cells_are_the_mean_and_the_largest_of_their_weights(case, m, n):
    dense, maps = dense_and_maps(case, m, n)
    for shown in maps:
        assert max(shown.levels[-1]) <= 64
        for level, (rows, columns) in enumerate(shown.levels):
            high, wide = shown.cell(level)
            assert (rows, columns) == (-(-m // high), -(-n // wide))
            if level:
                assert shown.levels[level] == tuple(-(-cells // 2) for cells in shown.levels[level - 1])
            for head in range(H):
                weights = dense[shown.sequence, head].numpy()
                edges = range(0, m, high), range(0, n, wide)
                sizes = [np.diff([*of, end]) for of, end in zip(edges, (m, n), strict=True)]
                for reduce in ("max", "mean"):
                    over = np.maximum if reduce == "max" else np.add
                    expected = over.reduceat(over.reduceat(weights, edges[0], 0), edges[1], 1)
                    if reduce == "mean":
                        expected = expected / np.outer(*sizes)
                    cells = shown.pooled(head, level, reduce)
                    top = expected.max() or 1.0
                    error = top * (np.sqrt(expected / top) / 254 + 4e-6)
                    known = np.isfinite(cells)
                    assert (np.abs(cells - expected)[known] <= error[known] * 1.01 + 1e-7).all()
                    assert (expected[~known] == 0).all()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("m", "n"), SIZES)
def test_profiles_and_metrics(case, m, n):
    dense, maps = dense_and_maps(case, m, n)
    options = CASES[case](m, n)
    queries = options.get("query_positions", torch.arange(n - m, n))
    keys = options.get("key_positions", torch.arange(n))
    away = queries[:, None] - keys
    for shown in maps:
        weights = dense[shown.sequence]
        entropy, attending = torch.special.entr(weights).sum(-1), weights.sum(-1) > 0
        count = attending.sum(-1)  # metrics of a head without such a row are NaN
        first = int((weights.sum((0, 1)) > 0).double().argmax())

        def mean(rows, attending=attending, count=count):
            return (rows * attending).sum(-1) / count

        expected = {
            "entropy": mean(entropy),
            "effective_keys": mean(entropy.exp()),
            "top1": mean(weights.amax(-1)),
            "sink": weights[..., first].sum(-1) / count,
            "distance": mean((weights * away.abs()).sum(-1)),
            "local": mean((weights * (away.abs() <= NEAR)).sum(-1)),
            "self": mean((weights * (away == 0)).sum(-1)),
            "previous": mean((weights * (away == 1)).sum(-1)),
            "next": mean((weights * (away == -1)).sum(-1)),
        }
        assert list(shown.metrics) == list(expected)
        for name, values in expected.items():
            np.testing.assert_allclose(shown.metrics[name], values, rtol=1e-4, atol=1e-6, err_msg=name)
        for head in range(H):
            np.testing.assert_allclose(shown.entropy(head), entropy[head], rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(shown.received(head), weights[head].sum(0), rtol=1e-4, atol=1e-5)


def test_cross_attention_has_no_distances():
    query, key = torch.randn(1, H, 9, D), torch.randn(1, H, 5, D)
    with record(Asker()) as recording:
        recording.model(query, key, key)
    (shown,) = recording.atlas().maps
    assert shown.kind == "cross"
    assert list(shown.metrics) == ["entropy", "effective_keys", "top1", "sink"]


@pytest.mark.parametrize(
    ("queries", "keys", "room", "first", "last"),
    [
        (64, 64, 0, (64, 64), (64, 64)),
        (65, 65, 1e9, (33, 33), (33, 33)),
        (512, 512, 1e9, (256, 256), (64, 64)),
        (100_000, 100_000, 1e9, (782, 782), (49, 49)),
        (4096, 4096, 1.5 * 2**20, (512, 512), (64, 64)),
        (20, 5000, 1e9, (20, 625), (2, 40)),
        (1, 10**9, 1e9, (1, 954), (1, 60)),
    ],
)
def test_levels(queries, keys, room, first, last):
    levels = PyramidLevels.fitting(queries, keys, room)
    assert levels.shapes[0] == first
    assert levels.shapes[-1] == last


def test_a_byte_keeps_small_numbers_well():
    numbers = torch.rand(2, 3, 40, 40) ** 8
    bytes_, top = packed(numbers)
    read = unpacked(bytes_, top)
    largest = numbers.amax((-2, -1), keepdim=True)
    assert ((read - numbers).abs() <= largest * ((numbers / largest).sqrt() / 254 + 1 / 508**2) + 1e-7).all()
    assert unpacked(*packed(torch.zeros(1, 1, 2, 2))).sum() == 0


def test_dense_weights_are_looked_at_alike():
    query = torch.randn(B, H, 700, D)
    weights = regard.observe(query, query, query, Weights(), mask=masks.causal())[Weights()]
    with record(Asker(), dtype="keep") as recording:
        recording.model(query, query, query, mask=masks.causal())
    given = Atlas.from_weights({"one": weights})
    for one, other in zip(given.maps, recording.atlas().maps, strict=True):
        for name, values in other.metrics.items():
            np.testing.assert_allclose(one.metrics[name], values, rtol=2e-3, atol=1e-4)
        np.testing.assert_allclose(one.received(1), other.received(1), rtol=2e-3, atol=1e-4)
        tile = slice(600, 650), slice(3, 9)
        np.testing.assert_allclose(one.weights(2, *tile), other.weights(2, *tile), rtol=1e-3, atol=1e-6)
