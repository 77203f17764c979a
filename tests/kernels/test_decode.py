"""The grouped kernel: few queries over many keys, read once and in parts."""

from dataclasses import replace

import pytest
import torch

import regard
from regard import biases, masks, native
from regard.backends.cpu.few_queries import attend_few_queries
from regard.backends.cpu.library import DTYPES
from regard.backends.torch.dense_block import Rectangle
from regard.kernels.decode import PART, DecodeKernel
from regard.kernels.reference import ReferenceKernel


@pytest.fixture
def shapes(monkeypatch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Query and key of each rectangle that is computed."""
    seen = []
    original = Rectangle.forward

    def forward(self: Rectangle):
        seen.append((tuple(self.query.shape), tuple(self.key.shape)))
        return original(self)

    monkeypatch.setattr(Rectangle, "forward", forward)
    return seen


def run(kernel: DecodeKernel | ReferenceKernel, heads: int, m: int, n: int, **options) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    given = [
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((2, heads, m, 8), (2, 2, n, 8), (2, 2, n, 6))
    ]
    result = kernel.run(replace(regard.explain(*given, **options).problem, wants_lse=True))
    assert result.lse is not None
    total = result.output.sin().sum() + torch.where(result.lse.isfinite(), result.lse, 0.0).sum()
    return [result.output.detach(), result.lse.detach(), *torch.autograd.grad(total, given)]


def agrees(kernel: DecodeKernel, *sizes: int, **options) -> None:
    expected = run(ReferenceKernel(), *sizes, **options)
    torch.testing.assert_close(run(kernel, *sizes, **options), expected, atol=3e-6, rtol=1e-5)


def test_heads_of_a_group_are_rows_and_parts_are_heads(shapes):
    agrees(DecodeKernel(8), 6, 1, 35)
    # four parts beside each other, and the three keys that are left
    assert shapes == [((2, 8, 3, 8), (2, 8, 8, 8)), ((2, 2, 3, 8), (2, 2, 3, 8))]


def test_few_keys_are_one_part(shapes):
    agrees(DecodeKernel(PART), 2, 3, 100)
    assert shapes == [((2, 2, 3, 8), (2, 2, 100, 8))]


def test_keys_that_the_mask_leaves_out_are_not_read(shapes):
    keys = 4 * PART
    agrees(DecodeKernel(PART), 4, 1, keys, mask=masks.window(before=99))
    assert sum(key[1] // 2 * key[2] for _, key in shapes) <= 100 + PART // 4


@pytest.mark.parametrize("part", [1, 2, 7, 16, 100])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask": masks.causal()},
        {"mask": masks.window(before=5)},
        {"mask": masks.padding(lengths=[0, 20])},
        {"mask": masks.where(ignore=torch.arange(37) % 3 == 0)},
        {"bias": biases.alibi(4), "mask": masks.causal()},
        {"sinks": torch.tensor([0.3, -1.0, 2.0, 0.0])},
        {"mask": torch.zeros(3, 37).bool()},
        {"mask": masks.causal(), "query_positions": torch.tensor([30, 2, 11])},
    ],
    ids=lambda options: "-".join(f"{name}={value!r}"[:30] for name, value in options.items()) or "plain",
)
def test_any_part(part, options):
    agrees(DecodeKernel(part), 4, 3, 37, **options)


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.parametrize("queries", [2, 5, 12])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"query_positions": range(20, 60)},
        {"query_positions": range(-1, 37), "key_positions": range(37)},
        {"query_positions": range(36, 60), "key_positions": range(20, 57)},
        {"bias": biases.alibi(4)},
    ],
    ids=lambda options: "-".join(f"{name}={value!r}"[:30] for name, value in options.items()) or "default",
)
def test_a_causal_mask_is_a_limit_of_each_query(monkeypatch, queries, options):
    """Native code gets no matrix of pairs for it."""
    seen = []

    def attend(query, key, value, scale, bias=None, limits=None):
        seen.append((bias, limits))
        return original(query, key, value, scale, bias, limits)

    original = attend_few_queries
    monkeypatch.setattr("regard.backends.cpu.few_queries.attend_few_queries", attend)
    options = {
        name: range(given.start, given.start + queries) if name == "query_positions" else given
        for name, given in options.items()
    }
    agrees(DecodeKernel(), 4, queries, 37, mask=masks.causal(), **options)
    ((bias, limits),) = seen
    assert (bias is None) == ("bias" not in options)
    assert limits.tolist() == 2 * limits[:queries].tolist()
    assert len(set(limits[:queries].tolist())) > 1


@pytest.mark.parametrize("n", [PART - 1, PART, PART + 1, 3 * PART, 3 * PART + 5])
@pytest.mark.parametrize("part", [PART, None])
def test_borders_of_parts(n, part):
    agrees(DecodeKernel(part), 4, 2, n, mask=masks.causal())


STEP_MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(before=5),
    "padding": masks.padding([0, 20, 37]),
    "heads": masks.where(keep=torch.arange(4 * 3 * 37).reshape(1, 4, 3, 37) % 5 != 0),
    "nothing": torch.zeros(3, 37).bool(),
}


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.parametrize("name", STEP_MASKS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_one_native_call(monkeypatch, name, dtype):
    """Grouped heads and strided keys; no problem in another shape is made, and what is masked reaches nothing."""
    query, key, value = (
        torch.randn(3, 4, 3, 8),
        torch.randn(3, 37, 2, 8).mT.mT.transpose(1, 2),
        torch.randn(3, 2, 37, 6),
    )
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    problem = regard.explain(query, key, value, mask=STEP_MASKS[name]).problem
    expected = ReferenceKernel().run(regard.explain(query, key, value, mask=STEP_MASKS[name]).problem).output
    monkeypatch.setattr("regard.kernels.decode.apply_kernel", None)
    output = DecodeKernel().run(problem).output
    assert output.dtype is dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(output, expected, atol=max(8 * eps, 3e-6), rtol=2 * eps)


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_that_a_step_does_not_attend_to_reaches_nothing(bad):
    query, key, value = torch.randn(2, 4, 1, 8), torch.randn(2, 2, 37, 8), torch.randn(2, 2, 37, 6)
    mask = masks.padding([36, 37])
    expected = ReferenceKernel().run(regard.explain(query, key, value, mask=mask).problem).output
    value[:, :, 36], key[:, :, 36] = bad, bad
    output = DecodeKernel().run(regard.explain(query, key, value, mask=mask).problem).output
    torch.testing.assert_close(output[0], expected[0])
    assert not output[1].isfinite().any()


def test_a_key_of_nan_is_seen_in_the_smallest_part():
    """torch's flash kernel takes the maximum over few numbers without looking at NaN."""
    for bad in range(5):
        query, key, value = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
        key[:, :, bad] = torch.nan
        for part in (1, 2, 3, 5):
            output = DecodeKernel(part).run(regard.explain(query, key, value).problem).output
            assert output.isnan().all(), (bad, part)
        masked = masks.where(ignore=torch.arange(5) == bad)
        output = DecodeKernel(2).run(regard.explain(query, key, value, mask=masked).problem).output
        assert output.isfinite().all()
