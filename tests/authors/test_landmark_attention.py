"""The grouped softmax of landmark-attention (Apache), as its own layer calls it, beside biases.landmarks."""

import ast

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks

from .repositories import clone

REPOSITORY = "landmark-attention"
FILE = clone(REPOSITORY) / "lm_benchmark/models/landmark.py"
NAMES = "LandmarkGroupedSoftmaxFunction", "landmark_grouped_softmax"
HEADS, LENGTH, DIM = 4, 59, 16


@pytest.fixture(name="grouped_softmax")
def fixture_grouped_softmax():
    """The function out of its file, whose other imports are those of a whole experiment."""
    tree = ast.parse(FILE.read_text("utf-8"))
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in NAMES]
    found: dict = {"torch": torch}
    exec(compile(tree, str(FILE), "exec"), found)
    return found[NAMES[1]]


def theirs(grouped_softmax, query: Tensor, key: Tensor, value: Tensor, size: int) -> Tensor:
    """Attention as `CausalSelfAttention` there computes it from the scores."""
    at = torch.arange(LENGTH)
    hidden = at > at[:, None]
    landmark, own = at % size == size - 1, at[:, None] // size == at // size
    own_block = own & ~hidden & ~landmark
    hidden = hidden | (own & landmark)
    shape = (query.shape[0], HEADS, LENGTH, LENGTH)
    own_block, hidden, is_landmark = (each.expand(shape) for each in (own_block, hidden, landmark & ~hidden))
    scores = (query @ key.mT / DIM**0.5).masked_fill(hidden, -torch.inf)
    weights, _ = grouped_softmax(
        scores,
        dim=-1,
        is_mem=is_landmark,
        attn_mask=hidden,
        last_section_mask=own_block,
        return_group_prob=False,
        max_mem_cnt=LENGTH // size + 4,
    )
    return weights @ value


@pytest.mark.parametrize("size", [4, 8, 20])
def test_ours_is_theirs_with_gradients(size, grouped_softmax, record_property):
    torch.manual_seed(0)
    leaves = [torch.randn(2, HEADS, LENGTH, DIM, requires_grad=True) for _ in range(3)]
    query, key, value = leaves
    ours = regard.attention(query, key, value, mask=masks.causal(), bias=biases.landmarks(size))
    found = theirs(grouped_softmax, query, key, value, size)
    above = torch.randn_like(found)
    largest = 0.0
    for mine, other in zip(
        *([output, *torch.autograd.grad(output, leaves, above)] for output in (ours, found)), strict=True
    ):
        largest = max(largest, ((mine - other).abs().max() / other.abs().max()).item())
    record_property("difference", largest)
    assert largest < 16 * torch.finfo(torch.float32).eps
