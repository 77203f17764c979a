"""Shapes that broadcast: the same as torch's, and its errors."""

import itertools

import pytest
import torch

from regard.core.broadcasting import broadcast_shapes

SHAPES = [(), (1,), (0,), (3,), (2, 3), (1, 3), (2, 1), (5, 1, 3), (5, 2, 1)]


def found_by(function, shapes):
    try:
        return function(*shapes)
    except RuntimeError as error:
        return str(error)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_it_is_what_torch_says(count):
    for shapes in itertools.product(SHAPES, repeat=count):
        found = found_by(broadcast_shapes, shapes)
        assert found == found_by(torch.broadcast_shapes, shapes), shapes
        assert type(found) in (torch.Size, str)
    assert "broadcast" in found_by(broadcast_shapes, [(2, 3), (3, 2)])
