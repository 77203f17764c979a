"""Numbers become codes in C as by the formula in core/packing.py: the same words and parameters, to the last bit."""

import itertools

import pytest
import torch

from regard.backends.cpu import library
from regard.backends.cpu.code_writing import write_codes
from regard.core.packed_rows import KeyCodes, ValueCodes
from regard.core.packing import Packing

pytestmark = pytest.mark.usefixtures("built")

FLOATS = [Packing("float8_e4m3fn"), Packing("float8_e5m2")]
BY_TOKEN = [Packing(), Packing("int4"), Packing("int4", rotated=True), *FLOATS]
BY_CHANNEL = [Packing(by_channel=True), Packing("int4", by_channel=True), Packing("float8_e5m2", by_channel=True)]
KINDS = [*itertools.product((KeyCodes, ValueCodes), BY_TOKEN), *itertools.product((KeyCodes,), BY_CHANNEL)]


def numbers(tokens, dim, dtype):
    """Rows with large dims, constant ones, NaN, infinities, zeros, and numbers at the ends of float32."""
    rows = torch.randn(2, 3, tokens, dim) * torch.randn(dim).exp()
    rows[0, 0, :, 1] = 7.3
    rows[0, 1, 5 % tokens] = -0.1
    rows[1, 0, 6 % tokens, 2], rows[1, 0, 7 % tokens, 3], rows[1, 1, 8 % tokens, 0] = (
        float(each) for each in ("nan", "inf", "-inf")
    )
    rows[1, 2, 9 % tokens] = 0.0
    rows[1, 2, 10 % tokens, :2] = torch.tensor([3e38, -3e38]) if dtype == torch.float32 else torch.tensor([6e4, -6e4])
    rows[1, 2, 11 % tokens] = 1e-40
    return rows.to(dtype)


@pytest.mark.parametrize(("kind", "packing"), KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("variant", library.variants() or (None,))
def test_words_and_parameters(variant, dtype, kind, packing):
    parts = (64, 128) if packing.by_channel else (1, 36, 1, 3, 70)
    for dim in (24, 104):
        rows = numbers(sum(parts), dim, dtype)
        by_formula, in_c = (kind.allocate(packing, rows, sum(parts)) for _ in range(2))
        in_c.words.fill_(-1)  # what stands in memory before does not count
        with library.using(variant):
            for first, end in itertools.pairwise((0, *itertools.accumulate(parts))):
                by_formula.write(first, rows[:, :, first:end])
                write_codes(in_c, first, rows[:, :, first:end])
        assert torch.equal(in_c.parameters, by_formula.parameters)
        a, b = (each.read_codes().flatten(2, 3)[:, :, : sum(parts)] for each in (in_c, by_formula))
        assert torch.equal(a, b)


@pytest.mark.parametrize("packing", FLOATS, ids=str)
@pytest.mark.parametrize("variant", library.variants() or (None,))
def test_every_float_of_8_bits(variant, packing):
    """Those of torch, halves between neighbours, which go to the even one, and the float32 numbers beside halves."""
    every = torch.arange(256, dtype=torch.uint8).view(packing.float_type).float()
    every = every[every.isfinite()].unique()
    halves = (every[1:] + every[:-1]) / 2
    beside = torch.cat([torch.nextafter(halves, halves + side) for side in (-1, 1)])
    rows = torch.cat([every, halves, beside, torch.tensor([-0.0])])
    rows = torch.nn.functional.pad(rows, (0, -len(rows) % 7)).unflatten(0, (-1, 7))
    scaling = torch.full((len(rows), 1), packing.largest)  # whose scale is 1
    rows = torch.cat([rows, scaling], 1)[None, None]
    in_c = KeyCodes.allocate(packing, rows, rows.shape[2])
    with library.using(variant):
        write_codes(in_c, 0, rows)
    expected = rows.to(packing.float_type).view(torch.uint8)
    assert torch.equal(in_c.read_codes().flatten(2, 3)[:, :, : rows.shape[2]], expected)
