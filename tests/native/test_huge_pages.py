"""Large results in huge pages: which are asked for, how many are free, and results that stay the same."""

import mmap

import pytest
import torch

from regard import native
from regard.native import huge_pages, library

PAGE = 2**21
BLOCKS = """Node 0, zone      DMA      0      0      0      0      0      0      0      0      1      1      3
Node 0, zone   Normal   3763   2259   3062   1115    810   1634   2142   1231    483      5      2
"""


@pytest.fixture
def requests(monkeypatch, tmp_path):
    """What is asked of the system, with 2-MiB pages of which 1 + 2 * 3 + 5 + 2 * 2 = 16 are free."""
    asked = []
    (tmp_path / "buddyinfo").write_text(BLOCKS, "utf-8")
    monkeypatch.setattr(huge_pages, "FREE_BLOCKS", tmp_path / "buddyinfo")
    monkeypatch.setattr(huge_pages, "_page_size", lambda: PAGE)
    monkeypatch.setattr(huge_pages, "_advise", lambda: lambda *arguments: asked.append(arguments))
    return asked


def test_free_blocks_are_counted_in_huge_pages(requests, monkeypatch, tmp_path):
    if mmap.PAGESIZE == 4096:
        assert huge_pages._free_pages(PAGE) == 16
    for content in ("", "no zones\n", "Node 0, zone Normal x y\n"):
        (tmp_path / "buddyinfo").write_text(content, "utf-8")
        assert huge_pages._free_pages(PAGE) == 0
    monkeypatch.setattr(huge_pages, "FREE_BLOCKS", tmp_path / "missing")
    assert huge_pages._free_pages(PAGE) == 0


@pytest.mark.skipif(mmap.PAGESIZE != 4096, reason="the blocks above are counted for pages of 4 KiB")
@pytest.mark.parametrize(("pages", "expected"), [(7, True), (15, False)])
def test_pages_are_asked_for_where_twice_as_many_are_free(requests, monkeypatch, pages, expected):
    monkeypatch.setattr(library, "LARGE_BYTES", 2**20)
    made = library.new_large(torch.zeros(1), pages + 1, PAGE // 4)
    assert bool(requests) == expected
    for begin, size, advice in requests:
        assert begin % PAGE == size % PAGE == 0
        assert made.data_ptr() <= begin < begin + size <= made.data_ptr() + made.nbytes
        assert advice == mmap.MADV_HUGEPAGE


def test_small_results_and_systems_without_huge_pages_ask_for_none(requests, monkeypatch):
    library.new_large(torch.zeros(1), 2, PAGE // 4)
    monkeypatch.setattr(library, "LARGE_BYTES", 2**20)
    monkeypatch.setattr(huge_pages, "_page_size", lambda: 0)
    library.new_large(torch.zeros(1), 3, PAGE // 4)
    monkeypatch.setattr(huge_pages, "_advise", lambda: None)
    library.new_large(torch.zeros(1), 3, PAGE // 4)
    assert requests == []


@pytest.mark.skipif(not native.available(), reason="there is no native code")
def test_results_are_the_same_in_huge_pages(monkeypatch):
    torch.manual_seed(0)
    inputs = torch.randn(3, 1, 2, 20_000, 64).unbind()
    expected = native.RecurrenceProblem(*inputs, feature_map="elu", normalize=True).forward()
    monkeypatch.setattr(library, "LARGE_BYTES", 2**20)
    monkeypatch.setattr(huge_pages, "FREE_SHARE", 0)
    found = native.RecurrenceProblem(*inputs, feature_map="elu", normalize=True).forward()
    assert torch.equal(found.output, expected.output)
    assert torch.equal(found.state, expected.state)
