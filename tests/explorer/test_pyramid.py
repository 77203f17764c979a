"""Which cells have a pair: against all pairs of the mask, one by one."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.core.grid import Blocks, Grid
from regard.core.intervals import EMPTY, FULL
from regard.errors import AtlasError
from regard.explorer import Atlas, record
from regard.explorer.atlas import pyramid
from regard.explorer.atlas.mask_json import tiled
from regard.explorer.atlas.pyramid import PyramidLevels, UnmaskedCells

B, H, D = 2, 3, 8


class Asker(nn.Module):
    def forward(self, *tensors, **options):
        return regard.attention(*tensors, **options)


def each_head(n):
    """Pairs that each head of each sequence has for itself."""
    return torch.rand(B, H, n, n) < torch.tensor([0.001, 0.02, 0.5])[:, None, None]


MASKS = {
    "everything": lambda n: None,
    "causal": lambda n: masks.causal(),
    "window": lambda n: masks.window(before=5, after=3),
    "not causal": lambda n: ~masks.causal(),
    "documents": lambda n: masks.documents(ids=torch.arange(n) // 37) & masks.causal(),
    "padded": lambda n: masks.padding(lengths=torch.tensor([n, n // 3])) & masks.causal(),
    "stripes": lambda n: masks.dilated(3, step=7),
    "two halves that do not meet": lambda n: (
        masks.from_mod(lambda b, h, q, k: (q + k) % 2 == 0) & masks.from_mod(lambda b, h, q, k: (q + k) % 2 == 1)
    ),
    "a function": lambda n: masks.from_mod(lambda b, h, q, k: (q * q - 3 * k) % 61 == 0),
    "pairs of their own": lambda n: masks.where(keep=each_head(n)),
    "nothing": lambda n: masks.causal() & masks.window(before=0, after=9) & ~masks.window(before=0, after=0),
}
SIZES = [9, 64, 65, 150, 700]


def dense(mask, n):
    return torch.ones(B, H, n, n).bool() if mask is None else mask.dense(n, n).expand(B, H, n, n)


def cells_that_exist(pairs: np.ndarray, cell: tuple[int, int]) -> Any:
    high, wide = cell
    *leading, m, n = pairs.shape
    padded = np.zeros((*leading, -(-m // high) * high, -(-n // wide) * wide), dtype=bool)
    padded[..., :m, :n] = pairs
    return padded.reshape(*leading, padded.shape[-2] // high, high, -1, wide).any((-3, -1))


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("sharpness", [1.0, 300.0])  # of the second nearly all weights are too small to be told from 0
def test_a_cell_without_a_pair_is_no_number_and_others_are(name, n, sharpness, tmp_path):
    mask = MASKS[name](n)
    query = sharpness * torch.randn(B, H, n, D)
    with record(Asker(), dtype="keep") as recording:
        recording.model(query, query, query, mask=mask)
    recording.atlas().save(tmp_path / "a.atlas")
    pairs = dense(mask, n).numpy()
    for shown in Atlas.open(tmp_path / "a.atlas").maps:
        for head in range(H):
            of_head = pairs[shown.sequence, head]
            for level in range(len(shown.levels)):
                expected = cells_that_exist(of_head, shown.cell(level))
                for reduce in ("max", "mean"):
                    cells = shown.pooled(head, level, reduce)
                    np.testing.assert_array_equal(np.isfinite(cells), expected)
            everything = slice(0, n), slice(0, n)
            np.testing.assert_array_equal(shown.exists(head, *everything), of_head)


@pytest.mark.parametrize("cells", [1, 4096])
@pytest.mark.parametrize("pairs", [1, 3000])
def test_strips_make_no_difference(cells, pairs, monkeypatch):
    monkeypatch.setattr(pyramid, "CELLS", cells)
    monkeypatch.setattr(pyramid, "PAIRS", pairs)
    m, n = 263, 67  # more rows than the 256 that are evaluated at once
    kept = torch.rand(B, H, m, n) < torch.tensor([0.001, 0.02, 0.5])[:, None, None]
    mask, grid, levels = masks.where(keep=kept), Grid.from_lengths(m, n), PyramidLevels.fitting(m, n, 1e9)
    assert len(levels.shapes) > 1
    nothing_shown = torch.zeros(B, H, *levels.shapes[0])
    found = UnmaskedCells.evaluate(mask, grid, levels, nothing_shown)
    for level, shape in enumerate(levels.shapes):
        told = found.level(level, torch.Size((B, H, *shape)))
        assert told is not None
        for sequence in range(B):
            for head in range(H):
                expected = cells_that_exist(kept[sequence, head].numpy(), levels.cell(level))
                np.testing.assert_array_equal(told[sequence, head], expected)


def test_a_mask_that_knows_is_not_looked_into(monkeypatch):
    monkeypatch.setattr(
        pyramid, "_decide_unknown", lambda mask, grid, levels, start, exists, unknown: unknown.sum() == 0 or 1 / 0
    )
    n = 4096
    levels = PyramidLevels.fitting(n, n, 1e9)
    shown = torch.zeros(1, 1, *levels.shapes[0])
    shown[..., torch.arange(1024), torch.arange(1024)] = 1e-30  # on the diagonal cells, of which causal() has a part
    found = UnmaskedCells.evaluate(masks.causal(), Grid.from_lengths(n, n), levels, shown)
    assert int(found.levels[0].sum()) == 1024 * 1025 // 2


@pytest.mark.parametrize("size", [(1, 4), (2, 8), (32, 128), (128, 64), (256, 512), (1024, 2), (3, 3), (200, 128)])
@pytest.mark.parametrize("name", ["a function", "causal", "pairs of their own", "nothing"])
def test_tiles_of_a_mask_that_is_made_of_tiles(name, size):
    n = 300
    mask, grid = MASKS[name](n), Grid.from_lengths(n, n)
    made = tiled(mask, grid)
    verdicts = made.verdicts(Blocks.from_grid(grid, size)).numpy()
    pairs = mask.dense(n, n).expand(*verdicts.shape[:-2], n, n).numpy()
    has_pairs, has_all = cells_that_exist(pairs, size), ~cells_that_exist(~pairs, size)
    assert verdicts.shape == has_pairs.shape
    assert not has_pairs[verdicts == EMPTY].any()
    assert has_all[verdicts == FULL].all()
    if size not in [(3, 3), (200, 128)]:  # sizes of levels are powers of two: of these EMPTY is always told
        assert ((verdicts == EMPTY) == ~has_pairs).all()


def test_tiles_of_a_part_of_it():
    n = 700
    mask, grid = MASKS["a function"](n), Grid.from_lengths(n, n)
    made = tiled(mask, grid)
    part = grid.tile(slice(256, 600), slice(None))
    whole = made.verdicts(Blocks.from_grid(grid, 64))
    assert torch.equal(made.verdicts(Blocks.from_grid(part, 64))[:5], whole[4:9])
    assert (
        made.verdicts(Blocks.from_grid(grid.tile(slice(100, 600), slice(None)), 64)) == 1
    ).all()  # begins within a tile


def test_given_weights_have_all_pairs():
    atlas = Atlas.from_weights([torch.eye(90)[None]])
    assert np.isfinite(atlas.maps[0].pooled(0, 0)).all()
    assert atlas.maps[0].pooled(0, 0, "max")[0, 3] == 0


def rows(largest):
    return [float(value) for value in largest]


def test_the_largest_weight_of_each_row(tmp_path):
    n = 300
    query = torch.randn(B, H, n, D)
    mask = masks.causal() & ~masks.prefix(20)  # the first rows attend to nothing
    with record(Asker(), dtype="keep") as recording:
        recording.model(query, query, query, mask=mask)
    recording.atlas().save(tmp_path / "a.atlas")
    for shown in Atlas.open(tmp_path / "a.atlas").maps:
        assert shown.profiles == ("entropy", "received", "largest")
        for head in range(H):
            weights = shown.weights(head, slice(0, n), slice(0, n))
            np.testing.assert_allclose(shown.largest(head), weights.max(1), rtol=1e-5)
            assert rows(shown.largest(head)[:20]) == [0.0] * 20
            assert shown.largest(head).mean() * n / (n - 20) == pytest.approx(shown.metrics["top1"][head], rel=1e-4)
    with pytest.raises(AtlasError, match="there is no head 3"):
        shown.largest(3)
