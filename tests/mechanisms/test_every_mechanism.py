"""Each row of recipes/every_mechanism.toml: what it says of regard runs, and equals its formula."""

import runpy
import tomllib
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import native

from . import formulas
from .inputs import namespace

ROOT = Path(__file__).parents[2]
DATA = tomllib.loads((ROOT / "recipes" / "every_mechanism.toml").read_text(encoding="utf-8"))
ROWS = DATA["mechanism"]
RECIPE = runpy.run_path(str(ROOT / "recipes" / "every_mechanism.py"))
HERE = [row for row in ROWS if "check" in row]
NATIVE = {"additive", "cpu_flash", "decode", "mixed_heads", "short", "threshold"}
EXACT, ROUNDINGS = 1e-10, 64
"""The error of results in float64, as a share of the largest number; in float32 so many roundings of it."""


def by_name(row: dict[str, Any]) -> str:
    return row["name"][0]


def layer_of(row: dict[str, Any], names: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The names with the row's layer, if it has one, with the same numbers in any dtype."""
    if "layer" not in row:
        return names
    torch.manual_seed(1)
    layer = eval(row["layer"], names).to(dtype)
    return {**names, "layer": layer}


@torch.no_grad()
def of_formula(row: dict[str, Any]) -> Tensor:
    names = layer_of(row, namespace(torch.float64), torch.float64) | vars(formulas)
    names |= {"s": names["q"] @ names["k"].mT / 4, "tril": torch.ones(37, 37, dtype=torch.bool).tril()}
    return eval(row["check"], names)


@torch.no_grad()
def of_regard(row: dict[str, Any], dtype: torch.dtype) -> Tensor:
    return eval(row.get("here", row.get("call", "layer(x)")), layer_of(row, namespace(dtype), dtype))


@pytest.mark.parametrize("row", HERE, ids=by_name)
def test_it_equals_its_formula(row):
    truth = of_formula(row)
    largest = truth.abs().max().item()
    bounds = {torch.float32: ROUNDINGS * torch.finfo(torch.float32).eps}
    if row.get("exact", True):
        bounds[torch.float64] = EXACT
    for dtype, bound in bounds.items():
        found = of_regard(row, dtype)
        assert (found.dtype, found.shape) == (dtype, truth.shape)
        assert (found - truth).abs().max().item() < bound * largest, dtype


@pytest.mark.parametrize("row", [row for row in HERE if "kernel" in row and "here" in row], ids=by_name)
def test_its_kernel_computes_it(row):
    if row["kernel"] in NATIVE and not native.available():
        pytest.skip("there is no native code")
    names = namespace(torch.float32)
    names["regard"] = SimpleNamespace(**{**vars(regard), "attention": partial(regard.attention, kernel=row["kernel"])})
    assert torch.allclose(eval(row["here"], names), of_formula(row).float(), atol=1e-4)


def test_rows_say_what_readers_need():
    for row in ROWS:
        assert row["section"] in RECIPE["SECTIONS"]
        assert len(row["name"]) == 2
        assert row["paper"]
        assert ("check" in row) == ("here" in row or "layer" in row)
        assert "check" in row or "tested_by" in row or len(row["missing"]) == 2
        if "tested_by" in row:
            assert (ROOT / row["tested_by"]).exists()
    assert len({row["name"][0] for row in ROWS}) == len(ROWS)


def test_code_of_authors_is_named_with_its_test():
    for peer in DATA["peer"]:
        assert len(peer["compared"]) == 2
        assert peer["url"].startswith("https://github.com/")
        assert 0 < peer["difference"] < 2e-6
        assert (ROOT / peer["tested_by"]).exists()


@pytest.mark.parametrize(("language", "page"), [*enumerate(RECIPE["PAGES"])])
def test_the_pages_are_those_of_the_rows(language, page):
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    assert text == RECIPE["page"](ROWS, DATA["peer"], language), "run python recipes/every_mechanism.py"
