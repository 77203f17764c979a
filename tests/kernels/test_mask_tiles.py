"""What is remembered of masks, and which batches go together."""

import gc
import weakref

import pytest
import torch

import regard
from regard import masks
from regard.core.problem import Problem
from regard.masks import Mask
from regard.tiles import mask_tiles, memo

SIZE = (2, 2)


@pytest.fixture
def counted(monkeypatch) -> list[Mask]:
    """The masks whose tiles are asked for."""
    asked: list[Mask] = []
    original = Mask.verdicts

    def verdicts(self: Mask, blocks):
        asked.append(self)
        return original(self, blocks)

    monkeypatch.setattr(Mask, "verdicts", verdicts)
    return asked


def problem(mask: Mask | None, m: int = 6, n: int = 8, batch: tuple[int, ...] = (2,), **options) -> Problem:
    query, key = torch.zeros(*batch, 3, m, 4), torch.zeros(*batch, 3, n, 4)
    return regard.explain(query, key, key, mask=mask, kernel="reference", **options).problem


def layout(mask: Mask | None, **options) -> mask_tiles.TileLayout:
    return mask_tiles.union_layout(problem(mask, **options), SIZE, 1)


def test_equal_masks_share(counted):
    one = layout(masks.window(before=91) & masks.causal())
    assert layout(masks.window(before=91) & masks.causal()) is one
    assert len(counted) == 1


def test_each_size_shape_and_apart_has_its_own(counted):
    mask = masks.window(before=92)
    first = layout(mask)
    assert layout(mask, m=5) != first
    assert layout(mask, n=9) != first
    assert mask_tiles.union_layout(problem(mask), (3, 2), 1) != first
    assert mask_tiles.union_layout(problem(mask), SIZE, 6) is not first
    assert len(counted) == 4  # of one size the verdicts are the same
    assert layout(mask) is first
    assert len(counted) == 4


def test_a_tensor_that_is_written_to_is_seen(counted):
    keep = torch.zeros(6, 8, dtype=torch.bool)
    mask = masks.where(keep=keep)
    assert layout(mask).visited_pairs == 0
    keep[0, 0] = True
    assert layout(mask).visited_pairs == 4
    keep.fill_(True)
    assert layout(mask).visited_pairs == 48
    assert layout(mask).masked_pairs == 0
    assert len(counted) == 3


def test_lengths_that_are_written_to_are_seen():
    lengths = torch.tensor([2, 2])
    mask = masks.padding(lengths=lengths)
    assert layout(mask).visited_pairs == 6 * 2
    lengths += 3
    assert layout(mask).visited_pairs == 6 * 6
    query, value = torch.zeros(2, 3, 6, 4), torch.eye(8).expand(2, 3, 8, 8)
    for kernel in ("block_sparse", "tiled"):
        lengths.fill_(4)
        attended = regard.attention(query, query.new_zeros(2, 3, 8, 4), value, mask=mask, kernel=kernel)
        assert attended[0, 0, 0].gt(0).tolist() == [True] * 4 + [False] * 4
        lengths.fill_(7)
        attended = regard.attention(query, query.new_zeros(2, 3, 8, 4), value, mask=mask, kernel=kernel)
        assert attended[0, 0, 0].gt(0).tolist() == [True] * 7 + [False]


def test_inference_tensors_are_not_remembered(counted):
    with torch.inference_mode():
        keep = torch.zeros(6, 8, dtype=torch.bool)
        mask = masks.where(keep=keep)
        assert layout(mask).visited_pairs == 0
        keep.fill_(True)
        assert layout(mask).visited_pairs == 48
    assert len(counted) == 2


def test_positions_are_not_remembered(counted):
    mask = masks.window(before=0, after=0)
    at = torch.arange(6)
    assert layout(mask, query_positions=at).visited_pairs == 3 * 4
    assert layout(mask, query_positions=at * 0 + 3).visited_pairs == 3 * 4
    assert layout(mask, query_positions=at + 20).visited_pairs == 0
    assert layout(mask).visited_pairs == 3 * 4
    assert len(counted) == 4


def test_a_mask_with_tensors_is_forgotten_with_it():
    mask = masks.where(keep=torch.ones(6, 8, dtype=torch.bool))
    layout(mask)
    gone = weakref.ref(mask)
    assert memo.memo_of(mask).values
    del mask
    gc.collect()
    assert gone() is None


def test_few_masks_without_tensors_are_kept():
    for before in range(70_000, 70_000 + 2 * memo.MAX_MASKS):
        layout(masks.window(before=before))
    gc.collect()
    alive = [mask for mask in list(memo._memos) if "window(before=70" in repr(mask)]
    assert len(alive) == memo.MAX_MASKS


def test_no_mask_is_one_run():
    whole = layout(None)
    assert whole.visited_pairs == 48
    assert whole.masked_pairs == 0
    assert len(whole.rows) == 3


@pytest.mark.parametrize(("m", "n"), [(0, 8), (6, 0), (0, 0)])
def test_no_pairs(m, n):
    for mask in (None, masks.causal(), masks.padding(lengths=[1, 2])):
        assert layout(mask, m=m, n=n).visited_pairs == 0
        assert mask_tiles.count_visited_pairs(problem(mask, m=m, n=n)) == 0


class TestParts:
    LENGTHS = (2, 2, 8, 8, 2)

    def parts(self, mask: Mask, **options) -> list[tuple[slice, int]]:
        found = mask_tiles.batch_layouts(problem(mask, batch=(5,), **options), SIZE, 1)
        return [(part.batch, part.layout.visited_pairs) for part in found]

    def test_neighbours_that_see_the_same_go_together(self, monkeypatch):
        monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 0)
        mask = masks.padding(lengths=self.LENGTHS)
        assert self.parts(mask) == [(slice(0, 2), 12), (slice(2, 4), 48), (slice(4, 5), 12)]
        assert mask_tiles.count_visited_pairs(problem(mask, batch=(5,)), SIZE) == 3 * 12 + 2 * 48

    def test_others_too_where_it_costs_little(self, monkeypatch):
        mask = masks.padding(lengths=self.LENGTHS)
        assert self.parts(mask) == [(slice(0, 5), 48)]
        mask = masks.padding(lengths=self.LENGTHS)
        monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 3 * 36)
        assert self.parts(mask) == [(slice(0, 2), 12), (slice(2, 5), 48)]

    def test_masks_that_are_the_same_for_all_are_one(self, monkeypatch):
        monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 0)
        assert self.parts(masks.causal()) == [(slice(0, 5), layout(masks.causal()).visited_pairs)]
        assert len(self.parts(masks.random_blocks(8, 2, 1, heads=3))) == 1

    def test_heads_that_differ_are_visited_together(self):
        mask = masks.from_mod(lambda b, h, q, k: k // 2 == h, heads=3)
        whole = layout(mask)
        assert whole.visited_pairs == 6 * 6
        assert whole.masked_pairs == 6 * 6

    def test_batches_of_several_axes(self, monkeypatch):
        monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 0)
        mask = masks.padding(lengths=torch.tensor([[2, 8, 8], [8, 2, 2]]))
        found = mask_tiles.batch_layouts(problem(mask, batch=(2, 3)), SIZE, 1)
        assert [part.batch for part in found] == [slice(0, 1), slice(1, 4), slice(4, 6)]
        of_first = masks.padding(lengths=torch.tensor([[2], [8]]))
        found = mask_tiles.batch_layouts(problem(of_first, batch=(2, 3)), SIZE, 1)
        assert [part.batch for part in found] == [slice(0, 3), slice(3, 6)]

    def test_together_is_what_any_of_them_sees(self, monkeypatch):
        monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 0)
        mask = masks.padding(lengths=self.LENGTHS)
        whole = mask_tiles.union_layout(problem(mask, batch=(5,)), SIZE, 1)
        assert (whole.visited_pairs, whole.masked_pairs) == (48, 36)


def test_a_mask_that_does_not_fit_is_named():
    query = torch.zeros(2, 3, 6, 4)
    for kernel in ("block_sparse", "tiled", "decode"):
        with pytest.raises(regard.errors.MaskError, match=r"mask padding\(lengths=\[1, 2, 3\]\) has the shape"):
            regard.attention(query, query, query, mask=masks.padding(lengths=[1, 2, 3]), kernel=kernel)


class TestSampledLayouts:
    """Prices of masks over many tiles come from an even sample of block rows."""

    @pytest.fixture
    def few(self, monkeypatch):
        monkeypatch.setattr(mask_tiles, "MAX_COUNTED_TILES", 256)
        monkeypatch.setattr(mask_tiles, "MIN_SAMPLED_ROWS", 16)

    @pytest.mark.usefixtures("few")
    @pytest.mark.parametrize(
        ("mask", "tolerance"),
        [
            (masks.causal(), 0.01),
            (masks.window(before=300, after=20), 0.02),
            (masks.causal() & masks.window(before=511), 0.05),
            (masks.causal() & (masks.window(before=511) | masks.prefix(4)), 0.05),
            (masks.causal() & masks.documents(torch.arange(8192) // 700), 0.2),
        ],
        ids=repr,
    )
    def test_a_sample_is_about_the_whole(self, mask, tolerance):
        posed = problem(mask, 8192, 8192, batch=(1,))
        share, sampled = mask_tiles.sampled_layouts(posed, (64, 64), 1)
        whole = mask_tiles.batch_layouts(posed, (64, 64), 1)[0].layout
        assert share == 8192 / (16 * 64)
        assert len(sampled[0].layout.rows) == 16
        assert share * sampled[0].layout.visited_pairs == pytest.approx(whole.visited_pairs, rel=tolerance)
        assert share * sampled[0].layout.masked_pairs == pytest.approx(whole.masked_pairs, rel=2 * tolerance)

    @pytest.mark.usefixtures("few")
    def test_queries_of_a_shard_are_sampled_where_they_are(self):
        posed = problem(masks.causal(), 4096, 16384, batch=(1,), query_positions=range(8192, 12288))
        share, sampled = mask_tiles.sampled_layouts(posed, (64, 64), 1)
        visited = mask_tiles.batch_layouts(posed, (64, 64), 1)[0].layout.visited_pairs
        assert len(sampled[0].layout.rows) == 16
        assert share * sampled[0].layout.visited_pairs == pytest.approx(visited, rel=0.01)

    @pytest.mark.usefixtures("few")
    def test_what_positions_do_not_decide_is_counted_whole(self):
        for mask, options in (
            (masks.where(keep=torch.ones(4096, 4096, dtype=torch.bool).tril()), {}),
            (masks.causal(), {"query_positions": 2 * torch.arange(4096)}),
            (None, {}),
        ):
            posed = problem(mask, 4096, 4096, batch=(1,), **options)
            assert mask_tiles.sampled_layouts(posed, (64, 64), 1)[0] == 1.0

    def test_a_choice_over_a_million_tokens_evaluates_few_tiles(self, monkeypatch):
        tiles = []
        original = Mask.verdicts

        def verdicts(self: Mask, blocks):
            tiles.append(blocks.shape[0] * blocks.shape[1])
            return original(self, blocks)

        monkeypatch.setattr(Mask, "verdicts", verdicts)
        query = torch.zeros(1).expand(1, 4, 2**20, 64)
        window = masks.causal() & masks.window(before=4095)
        plan = regard.explain(query, query, query, mask=window)
        assert plan.kernel.name in ("cpu_flash", "block_sparse")
        assert 0 < sum(tiles) < 2**22
