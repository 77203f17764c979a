"""The flex kernel: blocks and functions that it hands to FlexAttention, its plan on CUDA, its self-check.

FlexAttention differentiates on CUDA alone when it is asked by its front door; behind that its formula runs anywhere.
Most tests replace it by the formula over all pairs, which reads the lists of blocks, as kernels do.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torchs

import regard
from regard import biases, masks
from regard.biases import Bias
from regard.core.grid import Grid
from regard.core.problem import Problem
from regard.errors import ConfigurationError, DeviceError, KernelError, MaskError, ShapeError
from regard.kernels import KERNELS, dispatch, flex, mask_tiles, self_check
from regard.kernels.flex import FlexKernel
from regard.kernels.reference import ReferenceKernel
from regard.masks import Mask
from regard.testing import Case, assert_agrees, cases, long_cases, suite

UNFUSED = FlexKernel(None, ("cpu",))
TRACED = FlexKernel("aot_eager", ("cpu",))
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def formula(query, key, value, score_mod, block_mask, scale, grouped) -> tuple[Tensor, Tensor]:
    """FlexAttention's result, where mask_mod is evaluated in partial blocks alone, and no pair of other blocks exists."""
    assert grouped == (query.shape[1] != key.shape[1])
    assert query.shape[-1] >= 16
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    query, key, wide = (tensor.to(dtype) for tensor in (query, key, value))
    scores = scale * (query @ key.repeat_interleave(group, 1).mT)
    sizes = torch.tensor(scores.shape).tolist()
    indices = [torch.arange(size).view([-1 if axis == at else 1 for at in range(4)]) for axis, size in enumerate(sizes)]
    if score_mod is not None:
        scores = score_mod(scores, *indices)
    if block_mask is not None:
        partial, full = (
            torchs.BlockMask.from_kv_blocks(*each, compute_q_blocks=False).to_dense().bool()
            for each in (
                (block_mask.kv_num_blocks, block_mask.kv_indices),
                (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
            )
        )
        rows, columns = (index // size for index, size in zip(indices[2:], block_mask.BLOCK_SIZE, strict=True))
        inside = partial[:, :, rows[0, 0], columns[0, 0]]
        keep = (inside & block_mask.mask_mod(*indices)) | full[:, :, rows[0, 0], columns[0, 0]]
        scores = scores.masked_fill(~keep, -torch.inf)
    empty = (scores == -torch.inf).all(-1)
    scores = scores.masked_fill(empty.unsqueeze(-1), 0.0)  # no NaN in the gradient of their log-sum-exp
    weights = scores.softmax(-1).masked_fill(empty.unsqueeze(-1), 0.0)
    output = weights @ wide.repeat_interleave(group, 1)
    return output.to(value.dtype), scores.logsumexp(-1).masked_fill(empty, -torch.inf)


@pytest.fixture
def dense(monkeypatch) -> None:
    """The formula in the place of FlexAttention."""
    monkeypatch.setattr(flex, "_flex", formula)


@pytest.fixture
def differentiable(monkeypatch) -> None:
    """FlexAttention on the CPU without its refusal of gradients, which its formula has."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)


def admitted(among) -> list:
    return [pytest.param(case, id=case.id) for _, case in suite([UNFUSED], among=among)]


@pytest.mark.usefixtures("dense")
class TestAgreement:
    @pytest.mark.covering(strength=2)
    @pytest.mark.parametrize("case", admitted(cases()))
    def test_it_agrees_with_the_oracle(self, case: Case, monkeypatch):
        monkeypatch.setattr(flex, "BLOCK", 4)
        mask_tiles._memo_by_mask.clear()
        assert_agrees(UNFUSED, case)

    @pytest.mark.parametrize("case", admitted(long_cases()))
    def test_it_agrees_over_many_blocks(self, case: Case):
        assert_agrees(UNFUSED, case)

    def test_there_are_cases_of_every_mask_and_bias_but_those_that_it_refuses(self):
        found = [case for _, case in suite([UNFUSED], among=cases())]
        assert len(found) > 300
        assert {case.mask for case in found} == {case.mask for case in cases()}
        assert {case.bias for case in found} == {case.bias for case in cases()} - {"mod"}
