import ctypes
import itertools
import math
import mmap

import numpy as np
import pytest
import torch
from torch import Tensor

from regard import native
from regard.backends.cpu import flash_tiles, library
from regard.backends.cpu.flash_tiles import FlashProblem
from regard.backends.cpu.library import DTYPES
from regard.core.dropout import Dropout, DropoutHashes
from regard.core.finite import CheckedGradients, CheckedRows
from regard.errors import DeviceError, DtypeError, ShapeError
from regard.tiles.tile_bits import BLOCK, TileBits

pytestmark = pytest.mark.usefixtures("built")


def packed_tiles(keep: np.ndarray) -> TileBits:
    """The tiles of (B or 1, H or 1, M, N) pairs: one without any pair is left out, one with all has no bits."""
    queries, keys = keep.shape[-2:]
    padded = np.pad(keep, ((0, 0), (0, 0), (0, -queries % BLOCK), (0, -keys % BLOCK)))
    exists = np.pad(np.ones((queries, keys), dtype=bool), ((0, -queries % BLOCK), (0, -keys % BLOCK)))
    first, runs, bits = [0], [], []
    for row in range(0, queries, BLOCK):
        for column in range(0, keys, BLOCK):
            here = np.s_[row : row + BLOCK, column : column + BLOCK]
            tile, there = padded[(..., *here)], exists[here]
            if not tile.any():
                continue
            whole = tile[..., there].all()
            runs.append((column, min(column + BLOCK, keys), -1 if whole else len(bits)))
            if not whole:
                bits.append(np.packbits(tile, axis=-1, bitorder="little").view("<u8")[..., 0])
        first.append(len(runs))
    words = np.stack(bits, axis=2) if bits else np.zeros((1, 1, 1, BLOCK), dtype=np.uint64)
    return TileBits(np.array(first), np.array(runs, dtype=np.int64).reshape(-1, 3), np.ascontiguousarray(words))


@pytest.mark.parametrize("variant", native.variants())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (37, 37), (70, 70), (5, 1)])
def test_the_weight_of_one_key_is_one(variant, dtype, softcap, queries, keys):
    """The gradient of a value that is a row's only one is that of the output, to the last bit: lse is its score."""
    query, key, value = (3 * torch.randn(2, 4, length, 20).to(dtype) for length in (queries, keys, keys))
    above = torch.randn(2, 4, queries, 20).to(dtype)
    if queries > keys:  # whose sum is exact
        above = torch.randint(-8, 9, above.shape).to(dtype)
    pairs = np.eye(queries, dtype=bool)[None, None] if queries == keys else everything(queries, keys)
    with library.using(variant):
        problem = FlashProblem(query, key, value, 0.3, packed_tiles(pairs), softcap)
        output, lse = problem.forward()
        gradient = problem.backward(output, lse, above, None)[2]
    assert torch.equal(output, value.expand_as(output))
    assert torch.equal(gradient, above.float() if queries == keys else above.float().sum(2, keepdim=True))


def everything(queries: int, keys: int) -> np.ndarray:
    return np.ones((1, 1, queries, keys), dtype=bool)


def formula(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: np.ndarray,
    softcap: float | None = None,
    relative_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = 0.3 * (query @ key.mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if relative_bias is not None:
        scores = scores + relative_bias.unfold(-1, keep.shape[-1], 1).flip(-2)
    scores = scores.masked_fill(~torch.from_numpy(keep), -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return weights @ value, lse


def inputs(
    batch: int, heads: int, shared: int, queries: int, keys: int, dim: int, value_dim: int, dtype=torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (heads, queries, dim), (shared, keys, dim), (shared, keys, value_dim)
    query, key, value = (torch.randn(batch, *size).to(dtype) for size in sizes)
    return query, key, value


def near(has: Tensor, true: Tensor, plain: Tensor, *, times: float = 5.0) -> bool:
    """As near to the truth as the formula in float32 is, some times over, and a few roundings of what it adds up."""
    assert has.shape == true.shape
    finite = true.isfinite()
    assert torch.equal(has[~finite].double(), true[~finite])
    if finite.any():
        error = (plain[finite] - true[finite]).abs().amax()
        rounding = 4 * torch.finfo(has.dtype).eps * true[finite].abs().amax().clamp(min=1.0)
        assert (has[finite].double() - true[finite]).abs().le(times * error + rounding).all()
    return True


def agrees(
    tensors: tuple[Tensor, Tensor, Tensor],
    keep: np.ndarray,
    *,
    relative_bias: Tensor | None = None,
    softcap: float | None = None,
) -> bool:
    """Output, log-sum-exp and all gradients."""
    problem = FlashProblem(*tensors, 0.3, packed_tiles(keep), softcap, relative_bias)
    output, lse = problem.forward()
    above = torch.randn(output.shape).to(output.dtype)
    above_lse = torch.randn(lse.shape)
    asked = (*tensors, *([] if relative_bias is None else [relative_bias]))

    def by_formula(dtype: torch.dtype) -> list[Tensor]:
        held = [tensor.to(dtype).requires_grad_() for tensor in asked]
        query, key, value, *added = held
        found = formula(query, key, value, keep, softcap, added[0] if added else None)
        kept = found[1].isfinite()
        total = (found[0] * above.to(dtype)).sum() + (found[1][kept] * above_lse.to(dtype)[kept]).sum()
        return [*(tensor.detach() for tensor in found), *torch.autograd.grad(total, held)]

    true, plain = by_formula(torch.float64), by_formula(torch.float32)
    assert near(output, true[0], plain[0])
    assert near(lse, true[1], plain[1])
    taking_part = lse.masked_fill(lse == -math.inf, math.inf)
    above_lse = above_lse.masked_fill(lse == -math.inf, 0.0)
    rounded = true[0].to(output.dtype)  # what is asked here is the gradient, not how the output was rounded
    gradients = problem.backward(rounded, taking_part, above, above_lse, wants_relative_bias=relative_bias is not None)
    for has, one, other in zip(gradients, true[2:], plain[2:], strict=False):
        assert has is not None
        has = has.sum_to_size(one.shape)  # of each head, where they share a line
        assert near(has, one, other, times=8.0 if output.dtype == torch.float32 else 2e5)
    return True


SIZES = [  # batch, heads, key heads, queries, keys, dim, value dim
    (1, 2, 2, 64, 64, 64, 64),
    (2, 4, 2, 131, 257, 32, 32),
    (1, 3, 1, 67, 61, 23, 37),
    (2, 2, 2, 1, 130, 16, 3),
    (1, 1, 1, 200, 3, 5, 129),
    (1, 2, 1, 513, 97, 80, 48),
    (3, 1, 1, 1, 1, 1, 1),
    (1, 2, 1, 70, 401, 24, 40),  # more keys than the forward pass takes at once
]


@pytest.mark.parametrize("shape", SIZES)
def test_it_is_the_formula(variant, shape):
    assert agrees(inputs(*shape), everything(shape[3], shape[4]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SIZES)
def test_half_precision_is_read_and_written(variant, shape, dtype):
    assert agrees(inputs(*shape, dtype=dtype), everything(shape[3], shape[4]))


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("leading", ["alike", "each batch", "each head"])
def test_a_mask(variant, shape, leading):
    batch, heads = shape[0] if leading == "each batch" else 1, shape[1] if leading == "each head" else 1
    keep = torch.rand(batch, heads, shape[3], shape[4]) < 0.4
    keep[..., ::5, :] = False  # rows that attend to nothing
    assert agrees(inputs(*shape), keep.numpy())


def test_tiles_without_pairs_and_groups_of_rows_without_any(variant):
    keep = np.zeros((1, 1, 300, 300), dtype=bool)
    for at in range(0, 300, 7):
        keep[..., at, max(at - 90, 0) : at - 3] = True
    assert agrees(inputs(1, 2, 2, 300, 300, 32, 32), keep)


@pytest.mark.parametrize(("queries", "none"), [(150, 75), (330, 200)])
def test_blocks_of_rows_without_any_pair_before_those_with_some(variant, queries, none):
    keep = np.tri(queries, dtype=bool) & ~np.tri(queries, k=-60, dtype=bool)
    keep[:none], keep[:, :none] = False, False
    assert agrees(inputs(1, 2, 1, queries, queries, 32, 32), keep[None, None])


@pytest.mark.parametrize("shape", SIZES)
def test_a_line_and_a_softcap(variant, shape):
    _, heads, _, queries, keys, *_ = shape
    keep = (torch.rand(1, 1, queries, keys) < 0.7).numpy()
    line = torch.randn(heads, queries + keys - 1)
    assert agrees(inputs(*shape), keep, relative_bias=line)
    assert agrees(inputs(*shape), keep, relative_bias=line[:1], softcap=1.5)


@pytest.mark.parametrize("shape", SIZES)
def test_dropped_weights(variant, shape):
    """Those that the dropout itself names, forward and backward."""
    batch, heads, _, queries, keys, *_ = shape
    tensors, dropout = inputs(*shape), Dropout(0.3, torch.tensor(7))
    whole = torch.arange(batch * heads).view(batch, heads, 1), torch.arange(queries), torch.arange(keys)
    keep = (torch.rand(1, 1, queries, keys) < 0.7).numpy()
    problem = FlashProblem(
        *tensors, 0.3, packed_tiles(keep), dropout=DropoutHashes(*dropout.hashes(*whole), dropout.threshold, 0.7)
    )
    output, lse = problem.forward()
    above = torch.randn(output.shape)
    found = problem.backward(output, lse.masked_fill(lse == -math.inf, math.inf), above, None)

    def by_formula(dtype: torch.dtype) -> list[Tensor]:
        query, key, value = held = [tensor.to(dtype).requires_grad_() for tensor in tensors]
        each = torch.eye(keys, dtype=dtype).expand(batch, key.shape[1], -1, -1)
        weights, true_lse = formula(query, key, each, keep)
        used = weights * dropout.dropout_mask(*whole).to(dtype) / (1 - 0.3)
        true = used @ value.repeat_interleave(heads // key.shape[1], 1)
        return [true.detach(), true_lse.detach(), *torch.autograd.grad(true, held, above.to(dtype))]

    for has, true, plain in zip(
        (output, lse, *found), by_formula(torch.float64), by_formula(torch.float32), strict=False
    ):
        assert has is not None
        assert near(has, true, plain, times=8.0)


def test_scores_far_apart(variant):
    query, key, value = inputs(1, 1, 1, 70, 200, 16, 16)
    assert agrees((query * 60, key, value), everything(70, 200))
    keep = everything(70, 200)
    output, lse = FlashProblem(query * 1e4, key, value, 0.3, packed_tiles(keep)).forward()
    true, true_lse = formula(query.double() * 1e4, key.double(), value.double(), keep)
    assert torch.allclose(output.double(), true, atol=2e-2)
    assert torch.allclose(lse.double(), true_lse, rtol=1e-6)


def test_what_is_not_a_number_shows():
    keep = everything(70, 200)
    for number, place in ((0, (0, 0, 3, 1)), (1, (0, 0, 150, 1)), (2, (0, 0, 150, 1))):
        tensors = inputs(1, 1, 1, 70, 200, 16, 16)
        tensors[number][place] = math.nan
        output, lse = FlashProblem(*tensors, 0.3, packed_tiles(keep)).forward()
        assert output[0, 0, 3].isnan().any()
        assert lse[0, 0, 3].isnan() == (number < 2)
        assert output.isnan().any(-1).sum() == (1 if number == 0 else 70)


def test_masked_numbers_reach_no_score():
    keep = everything(70, 200)
    keep[..., 150] = False
    query, key, value = inputs(1, 1, 1, 70, 200, 16, 16)
    tiles = packed_tiles(keep)
    expected = FlashProblem(query, key, value, 0.3, tiles).forward()
    key[:, :, 150] = math.nan
    for has, before in zip(FlashProblem(query, key, value, 0.3, tiles).forward(), expected, strict=True):
        assert torch.equal(has, before)


def test_strides(variant):
    shape = (2, 4, 2, 70, 130, 32, 32)
    query, key, value = inputs(*shape)
    apart = tuple(tensor.transpose(1, 2).contiguous().transpose(1, 2) for tensor in (query, key, value))
    turned = tuple(tensor.mT.contiguous().mT for tensor in (query, key, value))
    tiles = packed_tiles(everything(70, 130))
    expected = FlashProblem(query, key, value, 0.3, tiles).forward()
    for other in (apart, turned):
        found = FlashProblem(other[0], other[1], other[2], 0.3, tiles).forward()
        for has, before in zip(found, expected, strict=True):
            assert torch.equal(has, before)
    shared = key[:, :1].expand(-1, 2, -1, -1)
    one = FlashProblem(query, shared, value, 0.3, tiles).forward()
    assert torch.equal(one[0], FlashProblem(query, shared.contiguous(), value, 0.3, tiles).forward()[0])


def banded(queries: int, keys: int, before: int, after: int = 0) -> np.ndarray:
    distance = np.arange(keys) - np.arange(queries)[:, None]
    return ((-before <= distance) & (distance <= after))[None, None]


WIDTHS = {  # rows that take all their keys at once, rows that take them block by block, and both in one call
    "few keys": banded(400, 400, 64),
    "one key": banded(131, 131, 0),
    "keys on both sides": banded(300, 330, 30, 50),
    "many keys": banded(400, 460, 390),
    "few keys, then many": banded(700, 700, 700),
    "two stretches of keys": banded(500, 500, 40) | (np.arange(500) < 3),
    "rows without keys": banded(400, 150, 64),
}


@pytest.mark.parametrize("name", WIDTHS)
def test_few_keys_and_many(variant, name):
    keep = WIDTHS[name]
    queries, keys = keep.shape[-2:]
    assert agrees(inputs(1, 2, 1, queries, keys, 24, 40), keep)
    if name != "one key":  # where weights are 1 whatever the bias is, its gradient is but what rounding leaves
        assert agrees(inputs(1, 2, 2, queries, keys, 64, 64), keep, relative_bias=torch.randn(2, queries + keys - 1))


@pytest.mark.parametrize("name", WIDTHS)
def test_parts_of_the_keys_merged(variant, name):
    keep = WIDTHS[name]
    queries, keys = keep.shape[-2:]
    tensors = inputs(2, 2, 1, queries, keys, 64, 33)
    chosen = np.random.default_rng(0).random(keep.shape) < 0.5
    query, key, value = tensors
    merged = FlashProblem(query, key, value, 0.3, packed_tiles(keep & chosen)).forward()
    FlashProblem(query, key, value, 0.3, packed_tiles(keep & ~chosen)).forward(merged, accumulate=True)
    true, plain = (
        formula(query.to(dtype), key.to(dtype), value.to(dtype), keep) for dtype in (torch.float64, torch.float32)
    )
    for has, exact, rounded in zip(merged, true, plain, strict=True):
        assert near(has, exact, rounded)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", WIDTHS)
def test_rows_of_batches_that_alternate(variant, name, threads, monkeypatch):
    monkeypatch.setattr(flash_tiles, "thread_count", lambda work, least: threads)
    keep = WIDTHS[name]
    queries, keys = keep.shape[-2:]
    query, key, value = (
        tensor.transpose(0, 2).contiguous().transpose(0, 2) for tensor in inputs(3, 2, 2, queries, keys, 16, 16)
    )
    assert query.stride(0) < query.stride(2)
    alternating = FlashProblem(query, key, value, 0.3, packed_tiles(keep)).forward()
    query, key, value = (tensor.contiguous() for tensor in (query, key, value))
    one_by_one = FlashProblem(query, key, value, 0.3, packed_tiles(keep)).forward()
    for has, wanted in zip(alternating, one_by_one, strict=True):
        torch.testing.assert_close(has, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", WIDTHS)
def test_gradients_of_batches_that_alternate(variant, name, threads, accumulate, monkeypatch):
    """Into tensors of any strides, in strips of rows of all batches: those of one batch after another."""
    monkeypatch.setattr(flash_tiles, "thread_count", lambda work, least: threads)
    keep = WIDTHS[name]
    queries, keys = keep.shape[-2:]
    tensors = inputs(5, 4, 2, queries, keys, 16, 24)
    plain = FlashProblem(*tensors, 0.3, packed_tiles(keep))
    output, lse = plain.forward()
    lse, above, above_lse = lse.masked_fill(lse == -math.inf, math.inf), torch.randn_like(output), torch.randn_like(lse)
    expected = plain.backward(output, lse, above, above_lse)[:3]
    query, key, value, output, above = (
        tensor.transpose(0, 2).contiguous().transpose(0, 2) for tensor in (*tensors, output, above)
    )
    stale = 0.5 if accumulate else math.nan
    into = torch.full_like(query, stale), torch.full_like(key, stale), torch.full_like(value, stale)
    assert into[0].stride(0) < into[0].stride(2)
    turned = FlashProblem(query, key, value, 0.3, packed_tiles(keep))
    turned.backward(output, lse, above, above_lse, into=into, accumulate=accumulate)
    for has, wanted in zip(into, expected, strict=True):
        torch.testing.assert_close(has, wanted + 0.5 * accumulate, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_work(threads, monkeypatch):
    """One head for several threads: parts of the keys add up; the forward pass is the same to the bit."""
    monkeypatch.setattr(flash_tiles, "LEAST_WORK", 1)
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    keep = (torch.rand(1, 1, 300, 500) < 0.5).numpy()
    torch.manual_seed(0)
    assert agrees(inputs(1, 2, 1, 300, 500, 16, 16), keep, relative_bias=torch.randn(2, 799))


@pytest.mark.parametrize(
    ("keys", "used", "dim", "value_dim"), [(131, 131, 19, 21), (144, 128, 64, 64), (150, 128, 64, 32)]
)
def test_nothing_is_read_or_written_beyond_the_tensors(variant, keys, used, dim, value_dim):
    """Each tensor ends where memory that may not be touched begins."""
    keep = everything(67, keys) & (np.arange(keys) < used)
    page = mmap.PAGESIZE
    kept = []

    def at_the_end(tensor: Tensor) -> Tensor:
        size = tensor.numel() * 4
        pages = -(-size // page) + 1
        area = mmap.mmap(-1, pages * page)
        address = ctypes.addressof(ctypes.c_char.from_buffer(area))
        protect = ctypes.CDLL(None).mprotect
        assert protect(ctypes.c_void_p(address + (pages - 1) * page), page, 0) == 0
        kept.append((area, address + (pages - 1) * page, protect))
        there = torch.frombuffer(area, dtype=torch.float32, count=tensor.numel(), offset=(pages - 1) * page - size)
        return there.view(tensor.shape).copy_(tensor)

    query, key, value = (at_the_end(tensor) for tensor in inputs(1, 2, 1, 67, keys, dim, value_dim))
    line = at_the_end(torch.randn(2, 67 + keys - 1))
    problem = FlashProblem(query, key, value, 0.3, packed_tiles(keep), None, line)
    output, lse = problem.forward()
    above = at_the_end(torch.randn(output.shape))
    found = problem.backward(at_the_end(output), at_the_end(lse), above, None, wants_relative_bias=True)
    assert all(tensor is not None and tensor.isfinite().all() for tensor in found)
    for _, address, protect in kept:
        protect(ctypes.c_void_p(address), page, mmap.PROT_READ | mmap.PROT_WRITE)


def test_nothing_at_all():
    empty = TileBits(
        np.zeros(2, dtype=np.int64), np.zeros((0, 3), dtype=np.int64), np.zeros((1, 1, 1, BLOCK), np.uint64)
    )
    query, key, value = inputs(1, 2, 2, 5, 0, 4, 3)
    output, lse = FlashProblem(query, key, value, 1.0, empty).forward()
    assert torch.equal(output, torch.zeros(1, 2, 5, 3))
    assert (lse == -math.inf).all()
    none = inputs(0, 2, 2, 5, 4, 4, 3)
    assert FlashProblem(*none, 1.0, packed_tiles(everything(5, 4))).forward()[0].shape == (0, 2, 5, 3)


class TestErrors:
    def test_shapes(self):
        query, key, value = inputs(1, 4, 2, 5, 7, 8, 6)
        tiles = packed_tiles(everything(5, 7))
        with pytest.raises(ShapeError, match="needs four axes: batch, heads, length, dim"):
            FlashProblem(query[0], key, value, 1.0, tiles)
        with pytest.raises(ShapeError, match=r"key has shape \(1, 2, 6, 8\); beside query .* it needs \(1, 2, 7, 8\)"):
            FlashProblem(query, key[:, :, 1:], value, 1.0, tiles)
        with pytest.raises(ShapeError, match="with key heads that divide the 3 query heads"):
            FlashProblem(query[:, 1:], key, value, 1.0, tiles)
        with pytest.raises(ShapeError, match=r"relative_bias has shape \(4, 10\); 5 queries and 7 keys need \(4, 11\)"):
            FlashProblem(query, key, value, 1.0, tiles, relative_bias=torch.zeros(4, 10))

    def test_dtypes(self):
        query, key, value = inputs(1, 2, 2, 5, 7, 8, 6)
        with pytest.raises(DtypeError, match="native code takes all as float32, bfloat16 or float16"):
            FlashProblem(query, key.bfloat16(), value, 1.0, packed_tiles(everything(5, 7)))

    def test_devices(self):
        query, key, value = inputs(1, 2, 2, 5, 7, 8, 6)
        with pytest.raises(DeviceError, match=r"key is on meta; native code runs on the CPU: pass key.cpu\(\)"):
            FlashProblem(query, key.to("meta"), value, 1.0, packed_tiles(everything(5, 7)))

    def test_no_memory_is_an_error(self, monkeypatch):
        class Failing:
            @staticmethod
            def flash(work: object) -> None:
                work._obj.failed = 1  # type: ignore[attr-defined]

        monkeypatch.setattr("regard.backends.cpu.library.current", lambda: Failing)
        with pytest.raises(MemoryError, match="found no memory for the blocks"):
            FlashProblem(*inputs(1, 1, 1, 2, 2, 2, 2), 1.0, packed_tiles(everything(2, 2))).forward()


def test_the_library_knows_its_blocks():
    assert native.available()
    text = (flash_tiles.library.FOLDER / "flash.h").read_text()
    assert f"BLOCK = {BLOCK} " in text
    assert f"MOST_BLOCKS = {flash_tiles.MOST_BLOCKS} " in text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["few keys", "many keys"])
def test_a_pass_finds_whether_it_wrote_finite_numbers(variant, name, dtype, monkeypatch):
    """Of whichever thread, row and column: one entry that is not finite is enough, and without one none is found."""
    monkeypatch.setattr(flash_tiles, "LEAST_WORK", 1)
    distance = np.arange(450)[:, None] - np.arange(450)
    keep = (abs(distance) < (20 if name == "few keys" else 400))[None, None]
    clean = (*inputs(1, 2, 1, 450, 450, 19, 21, dtype), torch.randn(1, 2, 450, 21).to(dtype))
    tiles = packed_tiles(keep)
    for number, bad in itertools.product(range(5), (math.nan, math.inf)):
        for place in (0, 130, 449):
            tensors = [tensor.clone() for tensor in clean]
            if number < 4:
                tensors[number][0, 0, place, -1] = bad
            query, key, value, above = tensors
            problem = FlashProblem(query, key, value, 0.3, tiles)
            rows = problem.forward()
            assert isinstance(rows, CheckedRows) == bool(rows[0].isfinite().all())
            assert number < 4 or isinstance(rows, CheckedRows)
            gradients = problem.backward(*rows, above, None)
            assert isinstance(gradients, CheckedGradients) == all(bool(each.isfinite().all()) for each in gradients[:3])
            assert (number == 4) == isinstance(gradients, CheckedGradients)
