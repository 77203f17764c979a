"""Pictures of masks: the state of each cell; large masks are drawn from tiles, not from single pairs."""

import subprocess
import sys
import time
from typing import Any

import numpy
import pytest
import torch

from regard import masks, plots
from regard.core.intervals import EMPTY, FULL, PARTIAL
from regard.errors import MaskError, MissingExtra, ShapeError

LONG = 131_072


def cells(text: str) -> list[str]:
    """The rows of a drawing, without title, labels and legend."""
    lines = text.splitlines()
    column = lines[3].rindex(" ") + 1
    return [line[column:] for line in lines[3:-1]]


def shown(figure: Any) -> numpy.ndarray:
    return figure.axes[0].collections[0].get_array().reshape(-1)


class TestText:
    def test_one_sign_for_each_pair(self):
        drawing = (masks.causal() & masks.window(before=1)).draw(3, 5)
        assert str(drawing) == (
            "causal() & window(before=1)\n"
            "3 × 5 pairs; 40 % exist\n"
            "     keys 0   4\n"
            "queries 2 ·██··\n"
            "          ··██·\n"
            "          ···██\n"
            "█ exists  · does not exist"
        )
        assert repr(drawing) == str(drawing)

    @pytest.mark.parametrize(
        "mask",
        [
            masks.causal(),
            masks.from_mod(lambda b, h, q, k: (q == torch.tensor([3, 17])).any()),
            masks.where(keep=torch.rand(20, 41) < 0.5),
        ],
        ids=repr,
    )
    def test_every_pair(self, mask):
        dense = mask.dense(20, 41)
        assert cells(str(mask.draw(20, 41))) == ["".join("·█"[pair] for pair in row) for row in dense.tolist()]

    def test_one_sign_for_each_tile(self):
        mask = masks.causal()
        drawing = str(mask.draw(1000, 1000))
        assert cells(drawing) == [
            "".join("·▒█"[tile] for tile in row) for row in mask.tiles(1000, 1000, (32, 16)).tolist()
        ]
        assert "1,000 × 1,000 pairs; a cell is 32 × 16; 50 % exist" in drawing
        assert drawing.endswith("█ full  ▒ partial  · empty")

    def test_small_masks_are_looked_at_pair_by_pair(self):
        nothing = masks.strided(2) & ~masks.strided(2)  # of which interval arithmetic knows nothing
        assert (nothing.tiles(200, 200, (8, 4)) == PARTIAL).all()
        assert set("".join(cells(str(nothing.draw(200, 200))))) == {"·"}

    def test_positions(self):
        drawing = str(
            masks.causal().draw(2, 3, query_positions=torch.tensor([7, 9]), key_positions=torch.tensor([8, 6, 9]))
        )
        assert cells(drawing) == ["·█·", "███"]
        assert "keys 8" in drawing
        assert "queries 7" in drawing

    @pytest.mark.parametrize("size", [(1, 1), (1, 70), (70, 1), (33, 65), (5, LONG), (LONG, LONG), (10**6, 10**6)])
    def test_it_fits_80_columns(self, size):
        mask = masks.causal() & (masks.window(before=511) | masks.global_tokens(list(range(64))))
        at = {"query_positions": torch.arange(size[0]), "key_positions": torch.arange(size[1])}
        lines = str(mask.draw(*size, **at)).splitlines()
        assert max(map(len, lines)) <= 80
        assert len(lines) <= 36
        assert lines[0].endswith("…")


class TestChoice:
    mask = masks.padding(lengths=[1, 3]) & masks.random_blocks(4, 2, 1, heads=3, seed=1)

    def test_batch_and_head(self):
        dense = self.mask.dense(4, 4)
        for batch in range(2):
            for head in range(3):
                drawing = str(self.mask.draw(4, 4, batch=batch, head=head))
                assert cells(drawing) == ["".join("·█"[pair] for pair in row) for row in dense[batch, head].tolist()]
                assert drawing.splitlines()[0].endswith(f", batch {batch} of 2, head {head} of 3")

    def test_the_first_unless_told(self):
        assert str(self.mask.draw(4, 4)) == str(self.mask.draw(4, 4, batch=0, head=0))

    def test_masks_that_are_the_same_for_all_do_not_ask(self):
        assert str(masks.causal().draw(4, 4, batch=7, head=9)) == str(masks.causal().draw(4, 4))

    def test_positions_of_a_batch(self):
        drawing = str(masks.causal().draw(1, 4, batch=1, query_positions=torch.tensor([[0], [2]])))
        assert cells(drawing) == ["███·"]
        assert drawing.startswith("causal(), batch 1 of 2\n")

    @pytest.mark.parametrize("length", [4, LONG])
    def test_out_of_range(self, length):
        per_head = masks.from_mod(lambda b, h, q, k: (q == torch.tensor([1, 2]) + h).any(), heads=3)
        with pytest.raises(MaskError, match="draw's head is 3, but the mask has 3, numbered from 0: head 0 to 2"):
            per_head.draw(length, length, head=3)
        with pytest.raises(MaskError, match="draw's batch is 2, but the mask has 2, numbered from 0: batch 0 to 1"):
            masks.padding(lengths=[1, 3]).draw(length, length, batch=2)
        with pytest.raises(MaskError, match="draw's batch is -1; it needs at least 0"):
            masks.causal().draw(length, length, batch=-1)


class TestDensity:
    @pytest.mark.parametrize(
        ("mask", "length", "share"),
        [
            (masks.causal(), 4, "62.5 %"),
            (masks.window(), 5, "100 %"),
            (masks.prefix(0), 5, "0 %"),
            (masks.causal(), 4096, "50 %"),
            (masks.prefix(1024), 4096, "25 %"),
            (masks.padding(lengths=[1024, 4096]), 4096, "25 %"),
            (masks.causal() & masks.window(before=511), 4096, f"{100 * (512 * 4096 - 511 * 256) / 4096**2:.3g} %"),
        ],
        ids=repr,
    )
    def test_exact(self, mask, length, share):
        assert mask.draw(length, length).density() == share

    @pytest.mark.parametrize(
        ("mask", "share"),
        [(masks.strided(64), 1 / 64), (masks.causal() & masks.window(before=511), 511.5 / LONG)],
        ids=repr,
    )
    def test_about(self, mask, share):
        about, number, _ = mask.draw(LONG, LONG).density().split()
        assert about == "about"
        assert float(number) == pytest.approx(100 * share, rel=0.1)


class TestFigure:
    def test_cells(self):
        mask = masks.causal() & masks.window(before=99)
        figure: Any = mask.draw(1000, 1000).figure()
        assert shown(figure).tolist() == mask.tiles(1000, 1000, 4).flatten().tolist()
        axes = figure.axes[0]
        assert axes.get_xlim() == (0, 1000)
        assert axes.get_ylim() == (1000, 0)  # the first query is on top
        assert figure.get_suptitle() == "causal() & window(before=99)"
        legend = figure.legends[0]
        assert legend.get_title().get_text() == mask.draw(1000, 1000).subtitle((4, 4))
        assert [text.get_text() for text in legend.get_texts()] == ["full", "partial", "empty"]

    def test_axes_tell_positions(self):
        figure = masks.causal().draw(3, 20).figure()
        axes = figure.axes[0]
        assert [label.get_text() for label in axes.get_yticklabels()] == ["17", "18", "19"]
        assert [label.get_text() for label in axes.get_xticklabels()] == ["0", "4", "8", "12", "16"]
        assert axes.get_yticks().tolist() == [0.5, 1.5, 2.5]
        assert [text.get_text() for text in figure.legends[0].get_texts()] == ["exists", "does not exist"]

    @pytest.mark.parametrize("size", [(1, 1), (1, 5000), (5000, 1), (7, 40), (300, 100), (2048, 2048)])
    def test_every_size_makes_a_page(self, size, tmp_path):
        at = {"query_positions": torch.arange(size[0]), "key_positions": torch.arange(size[1])}
        figure = masks.causal().draw(*size, **at).figure()
        assert (figure.get_size_inches() <= 8).all()
        figure.savefig(tmp_path / "mask.png")
        figure.savefig(tmp_path / "mask.svg")
        assert (tmp_path / "mask.png").read_bytes().startswith(b"\x89PNG")

    def test_notebooks(self, monkeypatch):
        drawing = masks.causal().draw(5, 5)
        assert (drawing._repr_png_() or b"").startswith(b"\x89PNG")
        for module in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, "matplotlib", None)
        assert drawing._repr_png_() is None
        with pytest.raises(MissingExtra, match=r"pip install 'regard\[plots\]'"):
            drawing.figure()

    def test_a_mask_with_a_dollar_is_no_formula(self):
        figure: Any = plots.tiles(torch.tensor([[2]]), 1, query_positions=[0], key_positions=[0], title="$x$")
        assert not figure._suptitle.get_parse_math()

    @pytest.mark.parametrize("shape", [(2, 3), (3, 2), (2,), (0, 0)])
    def test_tiles_that_do_not_cover_the_pairs(self, shape):
        verdicts = torch.full(shape, EMPTY)
        match = r"4 queries and 3 keys in tiles of 2 × 2 need \(2, 2\), and at least one"
        with pytest.raises(ShapeError, match=match):
            plots.tiles(verdicts, 2, query_positions=range(4), key_positions=range(3))
        with pytest.raises(ShapeError, match="0 queries and 3 keys"):
            plots.tiles(torch.zeros(0, 2), 2, query_positions=[], key_positions=range(3))


@pytest.mark.parametrize(
    "mask",
    [
        masks.causal(),
        masks.causal() & masks.window(before=511),
        masks.strided(512) | masks.window(512, 512),
        pytest.param(
            masks.from_mod(lambda b, h, q, k: (q == torch.tensor([3, 17])).any()), marks=pytest.mark.slow
        ),  # all of its tiles are looked into
        masks.documents(torch.arange(LONG) // 5000),
    ],
    ids=repr,
)
def test_long_masks_are_drawn_from_tiles(mask):
    drawing = mask.draw(LONG, LONG)
    drawing.figure()  # the first of them loads matplotlib
    began = time.perf_counter()
    assert len(cells(str(drawing))) == 32
    between = time.perf_counter()
    figure = drawing.figure()
    assert between - began < 20  # all pairs would take minutes, and 17 GB
    assert time.perf_counter() - between < 20
    assert len(shown(figure)) == 256 * 256


def test_nothing_to_draw():
    with pytest.raises(ShapeError, match="draw: 0 queries × 3 keys are no pairs; there is nothing to draw"):
        masks.causal().draw(0, 3)


def test_a_tensor_that_does_not_fit():
    with pytest.raises(ShapeError, match="there are 3 queries and 3 keys"):
        masks.where(keep=torch.ones(2, 2).bool()).draw(3, 3)


def test_text_needs_no_matplotlib():
    script = "import sys, regard; print(regard.masks.causal().draw(3, 3)); print('matplotlib' in sys.modules)"
    run = subprocess.run([sys.executable, "-X", "utf8", "-c", script], capture_output=True, text=True, encoding="utf-8")
    assert run.stdout.endswith("False\n"), run.stderr


def test_full_and_empty_are_the_ends_of_the_colours():
    figure: Any = plots.tiles(torch.tensor([[EMPTY, PARTIAL, FULL]]), 1, query_positions=[0], key_positions=range(3))
    figure.draw_without_rendering()
    lightness = figure.axes[0].collections[0].get_facecolors()[:, :3].sum(-1)
    assert (numpy.diff(lightness) < -0.3).all()
