"""Masks of positions and numbers against definitions in plain Python; their `repr` and errors."""

from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch

from regard import masks
from regard.core.grid import Grid
from regard.errors import MaskError
from regard.masks import Mask

anything: Any = masks  # whose functions take whatever a user may give them


def rows(keep: torch.Tensor) -> list[str]:
    return ["".join("x" if kept else "." for kept in row) for row in keep.tolist()]


def defined(rule: Callable[[int, int], bool], queries: list[int], keys: list[int]) -> torch.Tensor:
    """A mask in plain Python: one pair of positions after the other."""
    pairs = [bool(rule(query, key)) for query in queries for key in keys]
    return torch.tensor(pairs, dtype=torch.bool).view(len(queries), len(keys))


LAST, SCATTERED = list(range(9)), [4, 0, 11, 3, 3, 8]


class TestDefinitions:
    @pytest.mark.parametrize(
        ("mask", "rule"),
        [
            (masks.causal(), lambda q, k: k <= q),
            (masks.window(), lambda q, k: True),
            (masks.window(before=2), lambda q, k: q - k <= 2),
            (masks.window(after=0), lambda q, k: k - q <= 0),
            (masks.window(3, 1), lambda q, k: k in range(q - 3, q + 2)),
            (masks.window(0, 0), lambda q, k: k == q),
            (masks.prefix(0), lambda q, k: False),
            (masks.prefix(4), lambda q, k: k in range(4)),
            (masks.strided(1), lambda q, k: True),
            (masks.strided(3), lambda q, k: k in range(q % 3, 99, 3)),
            (masks.fixed(4, 0), lambda q, k: q // 4 == k // 4),
            (masks.fixed(4, 1), lambda q, k: q // 4 == k // 4 or k in (3, 7, 11)),
            (masks.fixed(3, 2), lambda q, k: q // 3 == k // 3 or k % 3 in (1, 2)),
            (masks.dilated(2, 3), lambda q, k: k in (q, q - 3, q - 6)),
            (masks.dilated(1, 2, after=2), lambda q, k: k in (q - 2, q, q + 2, q + 4)),
            (masks.dilated(2, 1, 1), lambda q, k: k in (q - 2, q - 1, q, q + 1)),
            (masks.global_tokens([3, 8]), lambda q, k: q in (3, 8) or k in (3, 8)),
            (masks.global_tokens([]), lambda q, k: False),
            (
                masks.documents([5, 5, 1, 1, 1, 5, 2, 2, 2, 2, 2, 7]),
                lambda q, k: "551115222227"[q] == "551115222227"[k],
            ),
            (masks.from_mod(lambda b, h, q, k: k * 2 <= q), lambda q, k: k * 2 <= q),
        ],
        ids=lambda value: repr(value) if isinstance(value, Mask) else "rule",
    )
    def test_pair_by_pair(self, mask, rule):
        assert mask.dense(9, 9).equal(defined(rule, LAST, LAST))
        assert mask.dense(4, 9).equal(defined(rule, LAST[-4:], LAST))
        at = torch.tensor(SCATTERED)
        assert mask.dense(6, 9, query_positions=at).equal(defined(rule, SCATTERED, LAST))
        assert mask.dense(6, 6, query_positions=at, key_positions=at.flip(0)).equal(
            defined(rule, SCATTERED, SCATTERED[::-1])
        )
        per_batch = mask.dense(3, 9, query_positions=at.view(2, 3)).expand(2, 1, 3, 9)
        assert per_batch[1, 0].equal(defined(rule, SCATTERED[3:], LAST))
        small = at.to(torch.uint8)
        assert mask.dense(6, 6, query_positions=small, key_positions=small).equal(defined(rule, SCATTERED, SCATTERED))

    def test_negative_positions(self):
        at = list(range(-7, 3))
        for mask, rule in (
            (masks.strided(3), lambda q, k: (q - k) % 3 == 0),
            (masks.fixed(4, 1), lambda q, k: q // 4 == k // 4 or k % 4 == 3),
            (masks.dilated(2, 2), lambda q, k: q - k in (0, 2, 4)),
        ):
            positions = torch.tensor(at)
            dense = mask.dense(10, 10, query_positions=positions, key_positions=positions)
            assert dense.equal(defined(rule, at, at))

    def test_per_batch(self):
        dense = masks.prefix(torch.tensor([1, 0, 3])).dense(2, 3)
        assert [rows(batch[0])[1] for batch in dense] == ["x..", "...", "xxx"]
        dense = masks.documents([[0, 0, 1], [0, 1, 1]]).dense(2, 3)
        assert [rows(batch[0]) for batch in dense] == [["xx.", "..x"], [".xx", ".xx"]]
        at = torch.tensor([[2], [0]])
        dense = masks.documents([[0, 0, 1], [0, 1, 1]]).dense(1, 3, query_positions=at)
        assert [rows(batch[0]) for batch in dense] == [["..x"], ["x.."]]

    def test_documents_per_head(self):
        ids = torch.tensor([[[0, 0, 1], [0, 1, 0]], [[2, 2, 2], [0, 1, 2]]])
        dense = masks.documents(ids).dense(2, 3)
        assert [[rows(head) for head in batch] for batch in dense] == [
            [["xx.", "..x"], [".x.", "x.x"]],
            [["xxx", "xxx"], [".x.", "..x"]],
        ]
        at = torch.tensor([[2], [0]])
        dense = masks.documents(ids).dense(1, 3, query_positions=at)
        assert [[rows(head) for head in batch] for batch in dense] == [[["..x"], ["x.x"]], [["xxx"], ["x.."]]]
        assert masks.documents(ids[:, :1]).dense(2, 3).equal(masks.documents(ids[:, 0]).dense(2, 3))

    def test_documents_of_queries_and_of_keys(self):
        mask, at = masks.documents([4, 7, 7, 9], [7, 4, 4, 8, 7]), range(4)
        assert rows(mask.dense(4, 5, query_positions=at)) == [".xx..", "x...x", "x...x", "....."]
        assert rows(mask.dense(2, 3, query_positions=range(2), key_positions=torch.tensor([4, 2, 1]))) == [".xx", "x.."]
        per_key_head = masks.documents([[0, 1], [1, 1]], [[[0, 1, 1], [1, 0, 1]], [[0, 0, 0], [1, 1, 1]]])
        dense = per_key_head.dense(2, 3, query_positions=range(2))
        assert [[rows(head) for head in batch] for batch in dense] == [
            [["x..", ".xx"], [".x.", "x.x"]],
            [["...", "..."], ["xxx", "xxx"]],
        ]

    def test_without_a_head_axis(self):
        grid = Grid.from_lengths(3, 3, heads=False)
        assert masks.documents([[0, 0, 1], [0, 1, 1]]).keep(grid).shape == (2, 3, 3)
        assert masks.from_mod(lambda b, h, q, k: k <= b, batch=2).keep(grid).shape == (2, 1, 3)
        for mask in (
            masks.documents([[[0, 0, 1], [0, 1, 1]]]),
            masks.documents([0, 0, 1], [[[0, 0, 1], [0, 1, 1]]]),
            masks.random_blocks(3, 1, 1, heads=2),
            masks.from_mod(lambda b, h, q, k: k <= h, heads=2),
        ):
            with pytest.raises(MaskError, match=r"differs between heads, but query, key and value have no head axis"):
                mask.keep(grid)


class TestRandomBlocks:
    def test_each_block_of_queries_gets_its_count(self):
        dense = masks.random_blocks(20, 4, 2, heads=3).dense(20, 20)
        assert dense.shape == (3, 20, 20)
        blocks = dense[:, ::4, ::4]
        assert blocks.repeat_interleave(4, -1).repeat_interleave(4, -2).equal(dense)
        assert (blocks.sum(-1) == 2).all()
        assert not blocks[0].equal(blocks[1])

    def test_the_last_block_may_be_short(self):
        dense = masks.random_blocks(7, 3, 3).dense(7, 7)
        assert dense.all()
        assert masks.random_blocks(7, 3, 0).dense(7, 7).any().logical_not()
        assert masks.random_blocks(0, 3, 0).dense(0, 0).shape == (0, 0)

    def test_seeds(self):
        def dense(seed: int) -> torch.Tensor:
            return masks.random_blocks(64, 4, 3, seed=seed).dense(64, 64)

        assert dense(0).equal(masks.random_blocks(64, 4, 3).dense(64, 64))
        assert dense(7).equal(dense(7))
        assert not dense(7).equal(dense(8))

    def test_positions_of_a_cache(self):
        mask = masks.random_blocks(12, 4, 1)
        at = torch.tensor([[9, 0], [5, 11]])
        whole = mask.dense(12, 12)
        assert mask.dense(2, 12, query_positions=at).equal(whole[at].unsqueeze(1))


@pytest.mark.parametrize(
    ("mask", "written"),
    [
        (masks.window(), "window()"),
        (masks.window(3), "window(before=3)"),
        (masks.window(after=0), "window(after=0)"),
        (masks.window(3, 0), "window(before=3, after=0)"),
        (masks.prefix(4), "prefix(4)"),
        (masks.prefix([4, 0]), "prefix([4, 0])"),
        (masks.documents([0, 0, 1]), "documents(<int64 (3,)>)"),
        (masks.documents([0, 1], [[[0], [2]]]), "documents(<int64 (2,)>, <int64 (1, 2, 1)>)"),
        (masks.strided(3), "strided(3)"),
        (masks.fixed(8, 2), "fixed(8, 2)"),
        (masks.dilated(2, 3), "dilated(2, 3)"),
        (masks.dilated(2, 3, after=1), "dilated(2, 3, after=1)"),
        (masks.global_tokens([0, 5]), "global_tokens([0, 5])"),
        (masks.random_blocks(16, 4, 2), "random_blocks(16, 4, 2)"),
        (masks.random_blocks(16, 4, 2, seed=3, heads=2), "random_blocks(16, 4, 2, seed=3, heads=2)"),
        (masks.causal() & (masks.window(before=8) | masks.prefix(4)), "causal() & (window(before=8) | prefix(4))"),
    ],
)
def test_repr(mask, written):
    assert repr(mask) == written


@pytest.mark.parametrize(
    "make",
    [
        lambda: masks.window(3, 1),
        lambda: masks.prefix(4),
        lambda: masks.strided(3),
        lambda: masks.fixed(8, 2),
        lambda: masks.dilated(2, 3),
        lambda: masks.global_tokens([0, 5]),
        lambda: masks.random_blocks(16, 4, 2, seed=3),
        lambda: masks.causal() & ~masks.window(3) | masks.prefix(2),
    ],
)
def test_masks_without_tensors_are_equal_by_value(make):
    assert make() == make()
    assert len({make(), make(), masks.causal()}) == 2


def test_masks_with_tensors_are_equal_to_themselves_alone():
    mask = masks.documents([0, 1])
    assert mask != masks.documents([0, 1])
    assert len({mask, mask & masks.causal(), mask & masks.causal()}) == 2


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: anything.window(before=-1), "window's before is -1; it needs at least 0"),
        (lambda: anything.window(after=-3), "window's after is -3; it needs at least 0"),
        (lambda: anything.window(before=1.5), "window's before needs a whole number; it is 1.5"),
        (lambda: anything.window(before=True), "window's before needs a whole number; it is True"),
        (lambda: anything.prefix(-1), "prefix's length is -1; it needs at least 0"),
        (lambda: anything.prefix("4"), "prefix needs whole numbers as lengths; it was given '4'"),
        (lambda: anything.prefix(True), "prefix's length needs a whole number; it is True"),
        (lambda: anything.prefix(1.5), "prefix needs whole numbers as lengths; these are torch.float32"),
        (lambda: anything.prefix([4, -2]), "prefix needs lengths of at least 0; the smallest here is -2"),
        (lambda: anything.prefix([4.0]), "prefix needs whole numbers as lengths; these are torch.float32"),
        (lambda: anything.documents([0.5]), "documents needs whole numbers as ids; these are torch.float32"),
        (lambda: anything.documents(torch.tensor(3)), r"documents needs one id for each position.*\(L,\)"),
        (lambda: anything.documents([True]), "documents needs whole numbers as ids; these are torch.bool"),
        (lambda: anything.documents([0.5], [1]), "documents needs whole numbers as query ids; these are torch.float32"),
        (lambda: anything.documents([1], ["a"]), r"documents needs whole numbers as key_ids; it was given \['a'\]"),
        (lambda: anything.documents([1], 3), r"one id for each position, key_ids of shape \(L,\), \(batch, L\) or"),
        (lambda: anything.strided(0), "strided's stride is 0; it needs at least 1"),
        (lambda: anything.fixed(0, 0), "fixed's block is 0; it needs at least 1"),
        (lambda: anything.fixed(4, 5), "fixed's summary is 5, more than the 4 positions of a block: it needs 0 to 4"),
        (lambda: anything.fixed(4, -1), "fixed's summary is -1; it needs at least 0"),
        (lambda: anything.dilated(-1, 2), "dilated's before is -1; it needs at least 0"),
        (lambda: anything.dilated(1, 0), "dilated's step is 0; it needs at least 1"),
        (lambda: anything.dilated(1, 1, after=-1), "dilated's after is -1; it needs at least 0"),
        (lambda: anything.global_tokens([[0]]), r"indices of shape \(G,\); these have the shape \(1, 1\)"),
        (lambda: anything.global_tokens([-1]), "positions of at least 0; the smallest here is -1. The last of n"),
        (
            lambda: anything.global_tokens([0.0]),
            "global_tokens needs whole numbers as indices; these are torch.float32",
        ),
        (lambda: anything.random_blocks(8, 4, 3), "count is 3, but 8 positions make 2 blocks of 4: it needs 0 to 2"),
        (lambda: anything.random_blocks(8, 0, 1), "random_blocks' block is 0; it needs at least 1"),
        (lambda: anything.random_blocks(-8, 4, 1), "random_blocks' length is -8; it needs at least 0"),
        (lambda: anything.random_blocks(8, 4, -1), "random_blocks' count is -1; it needs at least 0"),
        (lambda: anything.random_blocks(8, 4, 1, heads=0), "random_blocks' heads is 0; it needs at least 1"),
        (lambda: anything.random_blocks(8, 4, 1, seed=-1), "random_blocks' seed is -1; it needs at least 0"),
    ],
)
def test_refused(make, match):
    with pytest.raises(MaskError, match=match):
        make()


@pytest.mark.parametrize("mask", [masks.documents(torch.zeros(8).int()), masks.random_blocks(8, 4, 1)], ids=repr)
def test_positions_beyond_the_length(mask: Mask):
    name = repr(mask).split("(")[0]
    for sizes, at in (((9, 9), "0 to 8"), ((3, 2), "-1 to 1")):
        for ask in (mask.dense, mask.tiles, mask.density):
            with pytest.raises(MaskError, match=rf"{name}\(.* is for 8 positions, from 0, but .* sit at {at}: pass"):
                ask(*sizes)


def test_query_ids_without_query_positions():
    mask = masks.documents([0, 0, 1], [0, 1, 1, 2, 2])
    message = (
        r"documents\(<int64 \(3,\)>, <int64 \(5,\)>\) is for 3 positions, .* sit at 2 to 4: query_ids are for the "
    )
    message += r"query positions 0..2: give the queries these, as query_positions=range\(3\)"
    for ask in (mask.dense, mask.tiles, mask.density):
        with pytest.raises(MaskError, match=message):
            ask(3, 5)
    with pytest.raises(MaskError, match="is for 5 positions, .* sit at 0 to 5: pass .* one id in key_ids for each key"):
        mask.dense(3, 6, query_positions=range(3))


def test_documents_of_heads_in_another_batch():
    mask = masks.documents(torch.zeros(3, 2, 4).long())
    message = (
        r"has the batch and heads \(3, 2\), but positions have the batch and heads \(2, 1\): they need to broadcast"
    )
    with pytest.raises(MaskError, match=message):
        mask.dense(1, 2, query_positions=torch.zeros(2, 1).long())


def test_documents_of_another_batch():
    mask = masks.documents([[0, 1], [1, 1], [0, 0]])
    at = torch.zeros(2, 1).long()
    with pytest.raises(
        MaskError, match=r"<int64 \(3, 2\)>\) has the batch \(3,\), but positions have the batch \(2,\)"
    ):
        mask.dense(1, 2, query_positions=at)


def test_whole_numbers_of_any_kind():
    assert masks.window(numpy.int64(3)) == masks.window(3)  # type: ignore[arg-type]
    assert masks.strided(torch.tensor(3)) == masks.strided(3)  # type: ignore[arg-type]
    assert masks.prefix(numpy.array([1, 2])).dense(2, 2).shape == (2, 1, 2, 2)  # type: ignore[arg-type]
