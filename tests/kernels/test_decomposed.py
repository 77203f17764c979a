"""Sparse masks by their dense parts: lengths that strides do not divide, batches, positions, and what explain says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.errors import KernelError
from regard.masks import Mask
from regard.tiles.selections import ResidueClasses, residue_classes

CAUSAL = masks.causal()
MASKS: dict[str, Mask] = {
    "strided": masks.strided(5),
    "sparse transformer": CAUSAL & (masks.window(before=4) | masks.strided(7)),
    "dilated": masks.dilated(3, step=4, after=2),
    "fixed": CAUSAL & masks.fixed(8, 2),
    "global": masks.global_tokens([0, 9]) | masks.window(2, 2),
    "documents": CAUSAL & masks.documents(torch.arange(400) // 37) & masks.strided(3),
    "padding": masks.padding(lengths=torch.tensor([30, 7])) & masks.strided(4),
    "two strides": masks.strided(4) | masks.strided(6),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bias": {"bias": biases.alibi(4)},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout_p": 0.3},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 0.0, 2.0])},
}


def inputs(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = (2, 4, queries, 16), (2, 2, keys, 16), (2, 2, keys, 8)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def results(kernel: str, tensors: list[Tensor], mask: Mask, **options: Any) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of all inputs."""
    torch.default_generator.manual_seed(3)
    output, lse = regard.attention_with_lse(*tensors, mask=mask, kernel=kernel, **options)
    weights = torch.arange(output.numel()).view(output.shape).double().sin().to(output.dtype)
    loss = (output * weights).sum() + 0.3 * lse.masked_fill(lse.isinf(), 0.0).sum()
    return [output, lse, *torch.autograd.grad(loss, tensors)]


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("sizes", [(131, 131), (13, 60), (40, 29)], ids=str)
def test_parts_make_up_the_whole(sizes: tuple[int, int], name: str, option: str):
    queries, keys = sizes
    options = dict(OPTIONS[option])
    if queries > keys and name == "documents":
        options |= {"query_positions": range(queries), "key_positions": range(keys)}
    tensors = inputs(queries, keys)
    pairs = zip(
        results("decomposed", tensors, MASKS[name], **options),
        results("reference", tensors, MASKS[name], **options),
        strict=True,
    )
    for ours, formula in pairs:
        torch.testing.assert_close(ours, formula, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("first", [0, 1, 5])
def test_positions_of_a_chunk(first: int):
    mask, tensors = MASKS["sparse transformer"], inputs(20, 64)
    positions = {"query_positions": range(30 + first, 50 + first), "key_positions": range(first, 64 + first)}
    for ours, formula in zip(
        results("decomposed", tensors, mask, **positions), results("reference", tensors, mask, **positions), strict=True
    ):
        torch.testing.assert_close(ours, formula, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype):
    mask, tensors = MASKS["sparse transformer"], inputs(70, 70, dtype)
    exact = results("reference", [tensor.detach().double().requires_grad_() for tensor in tensors], mask)
    within = 5e-2 if dtype == torch.bfloat16 else 1e-10
    for ours, formula in zip(results("decomposed", tensors, mask), exact, strict=True):
        torch.testing.assert_close(ours.double(), formula, rtol=within, atol=within)


def test_every_row_and_column_is_in_one_class():
    for queries, keys, step in ((range(11), range(11), 4), (range(5, 9), range(9), 3), (range(2), range(30), 7)):
        rows, columns = torch.zeros(len(queries)), torch.zeros(len(keys))
        for row, column in residue_classes(queries, keys, step):
            for axis, seen, positions in ((row, rows, queries), (column, columns, keys)):
                indices = _indices(axis)
                seen[indices.flatten()] += 1
                residues = (indices + positions.start) % step
                assert (residues == residues[:, :1]).all()
        assert (rows == 1).all()
        assert columns.max() == 1


def _indices(axis: ResidueClasses) -> Tensor:
    """Indices of each class: (classes, length)."""
    return axis.first + torch.arange(axis.classes)[:, None] + axis.step * torch.arange(axis.length)


@pytest.mark.usefixtures("any_processor")
def test_explain_lists_the_parts():
    plan = str(regard.explain(*torch.randn(3, 1, 2, 4096, 64), mask=CAUSAL & (masks.window(63) | masks.strided(64))))
    assert "-> decomposed" in plan
    assert "residues mod 64 of causal() & ~window(before=63), 64 × 64, by" in plan


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        (CAUSAL, "does not fall into dense parts"),
        (masks.strided(2) & masks.where(keep=torch.ones(8, 8, dtype=torch.bool)), "has a tensor over all pairs"),
    ],
)
def test_what_it_refuses(mask: Mask, reason: str):
    with pytest.raises(KernelError, match=reason):
        regard.attention(*torch.randn(3, 8, 4), mask=mask, kernel="decomposed")


def test_positions_that_are_not_consecutive_are_refused():
    with pytest.raises(KernelError, match="selected by consecutive positions"):
        regard.attention(
            *torch.randn(3, 4, 4), mask=masks.strided(2), kernel="decomposed", key_positions=torch.tensor([0, 2, 3, 9])
        )


def test_nan_in_a_masked_key_reaches_no_row_that_does_not_attend_to_it():
    query, key, value = torch.randn(3, 1, 1, 24, 4)
    key[..., 7, :] = float("nan")
    output = regard.attention(query, key, value, mask=masks.strided(6), kernel="decomposed")
    broken = output.isnan().any(-1).flatten().nonzero().flatten().tolist()
    assert broken == [1, 7, 13, 19]
