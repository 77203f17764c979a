"""The parts of NSA by themselves."""

import pytest
import torch

from regard.selection.native_sparse import EndedBlocks


@pytest.mark.parametrize("length", [1, 4, 5])
@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("shift", [0, 3, 8])
def test_the_span_of_ended_blocks_is_that_of_their_formula(length, stride, shift):
    mask, queries, keys = EndedBlocks(length, stride, shift), 29, 31
    _, stop = mask.key_span()(range(keys - queries, keys))
    assert isinstance(stop, torch.Tensor)
    torch.testing.assert_close(torch.arange(keys) < stop[:, None], mask.dense(queries, keys))
