"""Matrices packed in panels have every entry once, natively and by torch."""

import pytest
import torch

from regard.backends.cpu.panels import PANEL_COLUMNS, pack

pytestmark = pytest.mark.usefixtures("built")


@pytest.mark.parametrize(("terms", "columns"), [(1, 1), (5, 2 * PANEL_COLUMNS + 3), (37, 53), (131, 67)])
def test_panels_have_every_entry_once(terms, columns, variant):
    by_torch = torch.randn(terms, columns)
    natively = by_torch.T.contiguous().T
    wide = torch.nn.functional.pad(natively.T, (0, 7))[:, :terms].T
    for matrix in (by_torch, natively, wide):
        unpacked = pack(matrix).transpose(0, 1).reshape(terms, -1)
        assert torch.equal(unpacked[:, :columns], by_torch)
        assert not unpacked[:, columns:].any()
