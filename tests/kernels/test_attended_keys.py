"""Of very many keys those alone are computed that the mask leaves: the same results, and nothing of the size of all."""

from typing import Any

import pytest
import torch

import regard
from regard import masks
from regard.tiles import attended_keys

MANY = 2**31 + 8  # more than an int32 counts; their positions alone would take 16 GiB
MASKS = {
    "window": masks.window(before=3, after=2),
    "causal window": masks.causal() & masks.window(before=2),
    "ahead": masks.window(before=0, after=4),
    "padding": masks.padding([4, 9]),
    "causal padding": masks.causal() & masks.padding([4, 9]),
    "nothing": masks.padding([0, 0]),
    "documents": masks.documents([0] * 4 + [1] * 9 + [2] * 17),
}


@pytest.mark.parametrize("mask", [masks.window(10, 0), masks.causal() & masks.window(before=10)], ids=repr)
def test_a_window_over_expanded_keys(mask):
    key, value = torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 5)
    query = torch.randn(1, 2, 3, 8)
    many = key.expand(1, 2, MANY, 8), value.expand(1, 2, MANY, 5)
    plan = regard.explain(query, *many, mask=mask)
    assert plan.problem.keys == 13
    output, lse = regard.attention_with_lse(query, *many, mask=mask)
    scores = (query.double() @ key.double().mT)[..., 0] * 8**-0.5
    for found in (output, regard.attention(query, *many, mask=mask), plan.run().output):
        assert torch.allclose(found, value.expand_as(output), atol=1e-6)
    assert torch.allclose(lse.double(), scores + torch.tensor(11.0).double().log(), atol=1e-6)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("positions", [None, (range(4, 9), range(2, 15)), (range(5), range(13)), (range(20, 25), None)])
def test_results_are_those_of_all_keys(monkeypatch, name, positions):
    shapes = (2, 4, 5, 7), (2, 2, 13, 7), (2, 2, 13, 3)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    options: dict[str, Any] = {"mask": MASKS[name], "sinks": torch.randn(4, dtype=torch.float64), "softcap": 3.0}
    if positions is not None:
        options |= {"query_positions": positions[0], "key_positions": positions[1]}
    found = []
    for many in (2**24, 0):
        monkeypatch.setattr(attended_keys, "MANY", many)
        torch.manual_seed(3)
        dropped = regard.attention(*inputs, dropout_p=0.3, **options)
        output, lse = regard.attention_with_lse(*inputs, **options)
        loss = output.square().sum() + torch.where(lse.isfinite(), lse, 0.0).sum() + dropped.sum()
        found.append([output, lse, dropped, *torch.autograd.grad(loss, inputs)])
    for all_keys, part in zip(*found, strict=True):
        assert torch.allclose(all_keys, part, atol=1e-12)
