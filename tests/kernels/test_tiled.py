"""The tiled kernel: memory linear in the lengths, whatever the problem has; and where tiles end."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard
from regard import biases, masks, native, scores
from regard.backends.torch import tile_loop
from regard.kernels import tiled as tiled_module
from regard.kernels.tiled import TiledKernel
from regard.tiles.tile_size import (
    MIN_TILE_SIDE,
    SCORES_PER_TILE,
    batches_per_tile,
    scores_on_gpu,
    scores_per_tile,
    tile_size,
)

LONG = 2048


class Largest(TorchDispatchMode):
    """The most numbers that one tensor held which an operator gave back."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {id(leaf.untyped_storage()) for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and id(leaf.untyped_storage()) not in given:
                self.numbers = max(self.numbers, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


@contextmanager
def at_most(numbers: int) -> Iterator[None]:
    with Largest() as largest:
        yield
    assert 0 < largest.numbers <= numbers


def train(kernel: str, **options) -> None:
    """Forward and backward of one head of long sequences."""
    query, key, value = (torch.randn(1, 1, LONG, 8).requires_grad_() for _ in range(3))
    held = [table for name, table in options.items() if name == "table"]
    if held:
        options = {name: option for name, option in options.items() if name != "table"}
    output, lse = regard.attention_with_lse(query, key, value, kernel=kernel, **options)
    torch.autograd.grad(output.sum() + lse.sum(), [query, key, value, *held])


def test_the_largest_tensor_is_seen():
    with pytest.raises(AssertionError), at_most(LONG**2 // 2):
        train("reference", mask=masks.window(before=64))
    with pytest.raises(AssertionError), at_most(LONG**2 // 2):
        torch.ones(1, LONG).expand(LONG, LONG).contiguous()
    with at_most(LONG):
        torch.ones(1, LONG).expand(LONG, LONG)


@pytest.mark.parametrize("kernel", ["tiled", "block_sparse"])
@pytest.mark.parametrize(
    "mask",
    [
        masks.causal() & masks.window(before=255),
        masks.window(before=100, after=100),
        masks.causal() & masks.documents(torch.arange(LONG) // 300),
        masks.causal() & masks.window(before=100) & masks.padding(lengths=[LONG - 100]),
    ],
    ids=repr,
)
def test_a_structured_mask(kernel, mask):
    # a block of rows and the keys in sight of it, with room for a wide block: far from the 4,194,304 of all pairs
    with at_most(512 * 1024):
        train(kernel, mask=mask)


def test_spans_of_a_constant_bias():
    with at_most(512 * 1024):
        train("block_sparse", mask=masks.causal() & masks.window(before=255), bias=biases.alibi(1))


def test_tiles_of_everything_at_once():
    table = torch.randn(1, 32).requires_grad_()
    with at_most(2 * SCORES_PER_TILE):
        train(
            "tiled",
            mask=masks.causal() & masks.window(before=1023),
            bias=biases.relative(table, max_distance=512),
            dropout_p=0.1,
            softcap=5.0,
            table=table,
        )


@pytest.mark.parametrize("option", ["none", "dropout", "softcap"])
def test_tiles_of_all_pairs(option):
    options = {"none": {}, "dropout": {"dropout_p": 0.1}, "softcap": {"softcap": 5.0}}[option]
    with at_most(2 * SCORES_PER_TILE):
        train("tiled", **options)


@pytest.mark.parametrize("kernel", ["tiled", "additive"])
def test_additive_scores(kernel):
    """Neither a number for each pair, nor one for each feature of many pairs."""
    if kernel == "additive" and not native.available():
        pytest.skip(str(native.why_not()))
    with at_most(4 * SCORES_PER_TILE):
        train(kernel, score=scores.Additive(8, 8, 16), mask=masks.window(before=200))


@pytest.mark.parametrize(
    "bias",
    [
        biases.cope(torch.randn(1, 9, 8)),
        biases.landmarks(64),
        biases.path(torch.randn(1, 1, LONG, 8) / 8, torch.rand(1, 1, LONG)),
    ],
    ids=repr,
)
def test_biases_of_whole_rows(bias):
    """Of 256 rows at a time, and what moves them from chunk to chunk."""
    with at_most(256 * LONG):
        train("tiled", mask=masks.causal(), bias=bias)


@pytest.mark.parametrize("leading", [(1, 1), (2, 3), (16, 8), (64, 16), (0, 3)])
@pytest.mark.parametrize("tile", [1, 4, 1000, MIN_TILE_SIDE**2, 2**14, SCORES_PER_TILE, 2**22])
def test_tile_sizes(leading, tile):
    query = torch.zeros(*leading, 1, 4).expand(*leading, 5, 4)
    problem = regard.explain(query, query, query).problem
    rows, columns = tile_size(problem, tile)
    together = max(min(leading[0], batches_per_tile(problem, tile)) * leading[1], 1)
    least = MIN_TILE_SIDE if tile >= MIN_TILE_SIDE**2 else 1
    assert rows >= least
    assert columns >= least
    assert together * rows * columns <= max(tile, together * least**2)


@pytest.mark.parametrize(
    ("multiprocessors", "gigabytes", "scores"),
    [(132, 80, 2**22), (108, 40, 2**21), (128, 24, 2**22), (20, 4, 2**19), (132, 2, 2**20), (1, 1, 2**18)],
)
def test_scores_of_a_tile_on_gpus(multiprocessors, gigabytes, scores):
    """By the number of multiprocessors, or by a sixty-fourth of the memory, and no fewer than on a CPU."""
    memory = gigabytes * 2**30
    assert scores_on_gpu(multiprocessors, memory) == scores
    assert scores == SCORES_PER_TILE or 32 * scores <= memory / 64
    assert scores == SCORES_PER_TILE or scores <= 2**15 * multiprocessors


def test_a_device_has_its_own_size_of_tiles(monkeypatch):
    """Of a device that is there its properties are asked, and of the CPU none."""

    class Properties:
        multi_processor_count, total_memory = 132, 80 * 2**30

    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: asked.append(device) or Properties)
    scores_per_tile.cache_clear()
    try:
        assert scores_per_tile(torch.device("cpu")) == SCORES_PER_TILE
        assert not asked
        assert scores_per_tile(torch.device("cuda", 3)) == scores_per_tile(torch.device("cuda", 3)) == 2**22
        assert asked == [torch.device("cuda", 3)]
    finally:
        scores_per_tile.cache_clear()


def test_a_kernel_computes_tiles_of_the_size_of_the_device(monkeypatch):
    """One tile of all pairs where it has room for them, two where it has not; the same numbers."""
    query, made = torch.randn(1, 1, 512, 4), []

    def counted(scores: int) -> torch.Tensor:
        monkeypatch.setattr(tiled_module, "scores_per_tile", lambda device: scores)
        monkeypatch.setattr(tile_loop.ScoredTiles, "in_row", lambda self, row: listed(in_row(self, row)))
        return TiledKernel().run(regard.explain(query, query, query).problem).output

    def listed(tiles):
        found = list(tiles)
        made.extend(found)
        return found

    in_row = tile_loop.ScoredTiles.in_row
    outputs = [counted(SCORES_PER_TILE), counted(2**20)]
    assert len(made) == 2 + 1
    torch.testing.assert_close(*outputs)


@pytest.mark.parametrize("tile", [50, 2**12, 2**14])
@pytest.mark.parametrize("m", [1, 63, 64, 65, 129])
def test_borders(tile, m):
    query, key = torch.randn(1, 2, m, 4).double(), torch.randn(1, 2, 67, 4).double()
    for mask in (None, masks.causal(), masks.window(before=3)):
        problem = regard.explain(query, key, key, mask=mask).problem
        expected = regard.attention(query, key, key, mask=mask, kernel="reference")
        torch.testing.assert_close(TiledKernel(tile).run(problem).output, expected)


def test_large_scores():
    """Neither overflow, nor anything lost where a tile's scores are far below those of another."""
    query = torch.tensor([[1e4], [-1e4]])[None, None]
    key = torch.linspace(-1, 1, 200)[None, None, :, None]
    value = torch.arange(200.0)[None, None, :, None].clone()
    problem = regard.explain(query, key, value, scale=1.0).problem
    for tile in (8, 64, SCORES_PER_TILE):
        result = TiledKernel(tile).run(problem)
        assert result.output.flatten().tolist() == pytest.approx([199.0, 0.0], abs=1e-30)


def test_a_later_tile_may_be_the_first_with_keys():
    query, key = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 9, 4)
    mask = masks.where(ignore=torch.arange(9) < 7)
    problem = regard.explain(query, key, key, mask=mask).problem
    expected = regard.attention(query, key[:, :, 7:], key[:, :, 7:], kernel="reference")
    for tile in (1, 4, 9):
        torch.testing.assert_close(TiledKernel(tile).run(problem).output, expected)
