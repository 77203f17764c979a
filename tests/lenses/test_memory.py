"""Results larger than the memory are refused before anything is computed, with advice."""

import pytest
import torch

import regard
from regard import lenses
from regard.errors import ConfigurationError
from regard.kernels.validation import make_problem
from regard.lenses import base as memory_module


def start(lens: lenses.Lens, queries: int):
    """The state of a lens for that many queries and keys."""
    query = torch.zeros(queries, 4)
    return lens.start(make_problem(query, query, query))


@pytest.mark.parametrize("lens", [lenses.Weights(), lenses.Alignment()])
def test_what_cannot_fit_says_what_it_needs_and_what_fits(lens):
    """Before anything is computed: the attention itself would take hours."""
    many = torch.zeros(1, 1, 8).expand(16, 2_000_003, 8)
    with pytest.raises(ConfigurationError, match=f"{type(lens).__name__} of 2,000,003 × 2,000,003 pairs and 16 heads"):
        regard.observe(many, many, many, lens)


def test_the_message_of_what_cannot_fit(monkeypatch):
    monkeypatch.setattr(memory_module, "device_memory", lambda device: 10**9)
    with pytest.raises(
        ConfigurationError,
        match=r"Weights of 20,000 × 20,000 pairs and 1 heads in all needs 1\.6 GB, and cpu has 1\.0 GB: look at a "
        r"smaller rectangle, such as Weights\(slice\(0, 256\), slice\(0, 256\)\), at Pooled\(\(256, 256\)\), or at",
    ):
        start(lenses.Weights(), 20_000)


@pytest.mark.parametrize(
    ("lens", "said"),
    [
        (lenses.Pooled(10_000), r"Pooled of 10,000 × 10,000 cells and 1 heads in all needs 1\.2 GB.*1\.0 GB: ask for"),
        (lenses.Pooled(20_000, "max"), r"Pooled of 20,000 × 20,000 cells.*1\.6 GB.*fewer cells, such as Pooled\(\(256"),
        (lenses.TopK(5_000), r"TopK of 20,000 × 5,000 weights.*1\.2 GB.*ask for fewer of each row, such as TopK\(8\)"),
        (lenses.Mass(torch.arange(20_000) // 2 % 8192), r"Mass of 8,192 × 8,192 segments.*0\.8 GB.*0\.5 GB: make the"),
    ],
    ids=repr,
)
def test_every_table_that_cannot_fit_says_so(monkeypatch, lens, said):
    """Also of lenses with results smaller than all weights."""
    monkeypatch.setattr(
        memory_module, "device_memory", lambda device: 5 * 10**8 if isinstance(lens, lenses.Mass) else 10**9
    )
    with pytest.raises(ConfigurationError, match=said):
        start(lens, 20_000)


@pytest.mark.parametrize("lens", [lenses.Pooled(60), lenses.Pooled(60, "max"), lenses.TopK(60), lenses.Mass(range(60))])
def test_what_is_said_to_be_needed_is_what_the_tables_take(monkeypatch, lens):
    made = []
    for name in ("zeros", "full"):
        make = getattr(torch, name)
        monkeypatch.setattr(
            torch, name, lambda *sizes, make=make, **kinds: made.append(make(*sizes, **kinds)) or made[-1]
        )
    monkeypatch.setattr(memory_module, "device_memory", lambda device: None)
    query = torch.randn(2, 3, 60, 4)
    lens.start(make_problem(query, query, query))
    tables = sum(table.nbytes for table in made if table.numel() == 2 * 3 * 60 * 60)
    assert tables >= 4 * 2 * 3 * 60 * 60
    monkeypatch.setattr(memory_module, "device_memory", lambda device: tables - 1)
    with pytest.raises(ConfigurationError, match="6 heads in all needs"):
        lens.start(make_problem(query, query, query))
