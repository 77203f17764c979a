"""Few queries in Triton, by its interpreter: keys in parts, through the kernel that calls them and by themselves."""

import math

import pytest
import torch
from torch import Tensor

from regard.backends.triton import jit_runtime
from regard.backends.triton.triton_backend import TRITON
from regard.errors import ConfigurationError
from regard.kernels.decode import DecodeKernel
from regard.testing import Case, Expected, assert_agrees, assert_close

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of log2(0) and of NaN, where a device has none
]

from regard.backends.triton import split_keys  # noqa: E402  # where there is Triton
from regard.backends.triton.split_keys import KeySplit, Limits, key_split  # noqa: E402

INF, NAN = math.inf, math.nan
Inputs = tuple[Tensor, Tensor, Tensor]


def few_queries() -> split_keys.FewQueriesInTriton:
    found = TRITON.few_queries
    assert isinstance(found, split_keys.FewQueriesInTriton)
    return found


CASES = (
    Case(layout="grouped", lengths="5x131"),
    Case(mask="causal", layout="grouped", lengths="7x131", memory="strided", poison="masked"),
    Case(mask="causal", lengths="5x67", memory="broadcast", dtype="bfloat16"),
    Case(mask="padding", bias="alibi", layout="grouped", lengths="3x131", dtype="float16", poison="masked"),
    Case(mask="keep", variant="sinks", layout="grouped", lengths="11x67", memory="strided", poison="masked"),
    Case(mask="head-blocks&causal", layout="grouped", lengths="3x67", poison="value"),
    Case(mask="window", layout="2d", lengths="3x131", positions="scattered", poison="key"),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_the_kernel_that_calls_it(case):
    assert_agrees(DecodeKernel(), case)


@pytest.fixture
def many_parts(monkeypatch) -> None:
    """A chip with little shared memory: tiles have 16 keys, and every two of them are a part of their own."""
    monkeypatch.setattr(split_keys, "chip", lambda device: jit_runtime.Chip(6, 2**12))


def formula(
    query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, dtype: torch.dtype, scale: float = 0.3
) -> list[Tensor]:
    """Output and log-sum-exp; keys and values that no row attends to are 0."""
    scores = scale * query.to(dtype) @ key.to(dtype).mT
    scores = scores if added is None else scores + added.to(dtype)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -INF, 0.0).unsqueeze(-1))
    return [weights @ value.to(dtype), lse]


def assert_near(found: tuple[Tensor, Tensor], inputs: Inputs, added: Tensor | None = None) -> None:
    """Compare with float64, within what the same formula in float32 is off and one rounding."""
    true, plain = (formula(*inputs, added, dtype) for dtype in (torch.float64, torch.float32))
    assert_close(found[0], Expected(true[0], inputs[2].dtype, [plain[0]]), "output")
    assert_close(found[1], Expected(true[1], torch.float32, [plain[1]], magnitude=1.0), "lse")


def drawn(rows: int, keys: int, *, batch=1, heads=2, dim=24, value_dim=40, dtype=torch.float32) -> Inputs:
    sizes = (rows, dim), (keys, dim), (keys, value_dim)
    query, key, value = (torch.randn(batch, heads, *size).to(dtype) for size in sizes)
    return query, key, value


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (17, torch.bfloat16), (64, torch.float16)], ids=str)
def test_parts_are_merged(many_parts, rows, dtype):
    inputs = drawn(rows, 131, dtype=dtype)
    assert split_keys.key_split(2, rows, 24, 40, dtype.itemsize, split_keys.chip(inputs[0].device)).parts(131) > 1
    assert_near(few_queries().forward(*inputs, 0.3), inputs)


def test_views_of_caches():
    """Of any strides but in the last axis, and of batches that are one."""
    query = torch.randn(3, 5, 2, 16).transpose(1, 2)  # tokens before heads
    buffer = torch.full((3, 2, 200, 48), NAN)
    buffer[:, :, 13:84] = torch.randn(3, 2, 71, 48)
    key, value = buffer[:, :, 13:84, :16], buffer[:, :, 13:84, 16:]
    assert_near(few_queries().forward(query, key, value, 0.3), (query, key, value))
    key, value = key[:1].expand(3, -1, -1, -1), value.mT.contiguous().mT
    assert_near(few_queries().forward(query, key, value, 0.3), (query, key, value))


def test_a_query_of_another_dtype():
    query, key, value = drawn(5, 71, dtype=torch.bfloat16)
    query = torch.randn(query.shape)
    assert_near(few_queries().forward(query, key, value, 0.3), (query, key, value))


@pytest.mark.parametrize(("rows", "dtype"), [(1, torch.float32), (67, torch.bfloat16)], ids=str)
@pytest.mark.parametrize("value_dim", [256, 300])
def test_values_that_are_the_first_numbers_of_keys(many_parts, monkeypatch, rows, value_dim, dtype):
    """Latent attention: they are read once, where the first of two tiles of a key has all of them."""
    query, key, _ = drawn(rows, 131, heads=1, dim=320, dtype=dtype)
    key[:, :, 130], value = INF, key[..., :value_dim]
    read, launch = [], split_keys.launch
    monkeypatch.setattr(split_keys, "launch", lambda *given, **more: read.append(given[4]) or launch(*given, **more))
    found = few_queries().forward(query, key, value, 0.03, limits=[130])
    assert (read[0].pointer is None) == (value_dim == 256)
    true, plain = (
        formula(query, key[:, :, :130], value[:, :, :130], None, each, 0.03) for each in (torch.float64, torch.float32)
    )
    assert_close(found[0], Expected(true[0], dtype, [plain[0]]), "output")
    assert_close(found[1], Expected(true[1], torch.float32, [plain[1]], magnitude=1.0), "lse")


def test_wide_heads_and_a_nan_that_one_row_attends_to(many_parts):
    query, key, _ = drawn(2, 67, heads=1, dim=288)
    value, clean = key[..., :256], key.clone()
    key[:, :, 66, 3] = NAN
    output, _ = few_queries().forward(query, key, value, 0.3, limits=[66, 67])
    assert output[:, :, 1].isnan().all()
    true, plain = (
        formula(query[:, :, :1], clean[:, :, :66], clean[:, :, :66, :256], None, each)
        for each in (torch.float64, torch.float32)
    )
    assert_close(output[:, :, :1].contiguous(), Expected(true[0], torch.float32, [plain[0]]), "output")


@pytest.mark.parametrize("limits", [[67], [0, 0, 1, 2], [69, 70, 71, 71], [0, 0, 0, 0], [1, 2, 2, 2]], ids=str)
def test_limits(many_parts, limits):
    """Each row attends to the first keys: no other reaches it, even one that is NaN."""
    query, key, value = drawn(12, 71)
    each = torch.tensor(limits).repeat(12 // len(limits))
    key[:, :, limits[-1] :], value[:, :, limits[-1] :] = NAN, INF
    beyond = torch.arange(71) >= each[:, None]
    unread = torch.arange(71)[:, None] >= limits[-1]
    clean = query, key.masked_fill(unread, 0.0), value.masked_fill(unread, 0.0)
    found = few_queries().forward(query, key, value, 0.3, limits=limits)
    assert_near(found, clean, torch.zeros(12, 71).masked_fill(beyond, -INF))


def test_limits_that_no_causal_mask_has():
    with pytest.raises(ConfigurationError, match=r"limits are \[3, 5, 6\]; few queries need limits as a causal mask"):
        few_queries().forward(*drawn(3, 7), 0.3, limits=[3, 5, 6])
    assert Limits.of([0, 0, 1]) == (3, 0, 1)


@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=str)
def test_added_numbers(many_parts, shape):
    inputs = drawn(5, 131, batch=2)
    added = torch.randn(*shape, 5, 131)
    added[:, :, 3] = -INF
    added[:, :, :, 20:60] = -INF
    found = few_queries().forward(*inputs, 0.3, added)
    assert_near(found, inputs, added)
    assert (found[0][:, :, 3] == 0).all()


def test_one_added_number_for_all_keys():
    inputs = drawn(5, 67)
    added = torch.randn(1, 2, 5, 1).expand(-1, -1, -1, 67)
    assert_near(few_queries().forward(*inputs, 0.3, added), inputs, added)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_reaches_the_rows_that_attend_to_it(many_parts, dtype):
    """Row 2 attends to key 40 and row 3 does not: of both it is the same tile."""
    query, key, value = drawn(4, 131, dtype=dtype)
    added = torch.zeros(1, 1, 4, 131)
    added[..., [0, 1, 3], 40] = -INF
    added[..., 50] = -INF
    clean = query.clone(), key.clone(), value.clone()
    value[:, :, 40, 7], value[:, 1, 50], key[:, 0, 50] = INF, NAN, NAN
    found = few_queries().forward(query, key, value, 0.3, added)
    assert not found[0][:, :, 2, 7].isfinite().any()
    found[0][:, :, 2, 7] = formula(*clean, added, torch.float64)[0][:, :, 2, 7].to(dtype)
    assert_near(found, clean, added)
    key[:, :, 40] = NAN
    output, lse = few_queries().forward(query, key, value, 0.3, added)
    assert output.isnan().all(-1).equal(lse.isnan())
    assert lse.isnan().equal((torch.arange(4) == 2).expand(1, 2, 4))


def test_large_scores(many_parts):
    """Parts are merged by their largest scores, not by log-sum-exps, which float32 rounds by 1 here."""
    query, key, value = drawn(2, 131)
    key[:, :, 1:] = key[:, :, :1]
    output, lse = few_queries().forward(query * 1e4, key * 1e4, value, 0.3)
    torch.testing.assert_close(output, value.mean(2, keepdim=True).expand_as(output), atol=2e-6, rtol=0)
    assert lse.abs().min() > 1e5


@pytest.mark.parametrize("sizes", [(0, 7, 2), (5, 0, 2), (5, 7, 0)], ids=str)
def test_nothing(sizes):
    rows, keys, heads = sizes
    output, lse = few_queries().forward(*drawn(rows, keys, heads=heads), 0.3)
    assert output.shape == (1, heads, rows, 40)
    assert lse.shape == (1, heads, rows)
    if not keys:
        assert (output == 0).all()
        assert (lse == -INF).all()


def test_more_than_an_int32_counts(tmp_path):
    """Keys that lie 2²⁶ numbers apart, in a file of which little is on the disk."""
    with open(tmp_path / "numbers", "wb") as file:
        file.truncate(4 * 2**31)
    numbers = torch.from_file(str(tmp_path / "numbers"), shared=True, size=2 * 2**31, dtype=torch.float16)
    query, *drawn_keys = drawn(3, 40, heads=1, dim=16, value_dim=16, dtype=torch.float16)
    key, value = (numbers[start:].as_strided((1, 1, 40, 16), (0, 0, 2**26, 1)) for start in (0, 16))
    for view, own in zip((key, value), drawn_keys, strict=True):
        view.copy_(own)
    assert_near(few_queries().forward(query, key, value, 0.3), (query, key, value))


@pytest.mark.parametrize("group", [1, 3])
def test_prepared_steps(many_parts, group):
    """One query of each head, over caches that grow and move."""
    buffer = torch.randn(2, 2, 200, 40)
    query = torch.randn(2, 1, 2 * group, 24).transpose(1, 2)
    step = few_queries().prepare_step(query, buffer[:, :, :40, :24], buffer[:, :, :40, 24:], 0.3)
    assert step is not None
    for part in (slice(0, 40), slice(0, 41), slice(131, 194)):
        query = torch.randn(2, 1, 2 * group, 24).transpose(1, 2)
        key, value = buffer[:, :, part, :24], buffer[:, :, part, 24:]
        output = step.run(query, key, value)
        rows = query.reshape(2, 2, group, 24)
        true, plain = (
            formula(rows, key, value, None, dtype)[0].reshape(2, 2 * group, 1, 16)
            for dtype in (torch.float64, torch.float32)
        )
        assert_close(output, Expected(true, torch.float32, [plain]))


def test_no_step_for_other_tensors():
    query, key, value = drawn(1, 40)
    assert few_queries().prepare_step(query, key.mT.contiguous().mT, value, 0.3) is None
    assert few_queries().prepare_step(query.half(), key, value, 0.3) is None


@pytest.mark.parametrize(
    ("heads", "keys", "parts"),
    [(8, 16384, 33), (128, 16384, 2), (1, 2**20, 264), (300, 4096, 3), (5000, 4096, 1), (8, 256, 1), (8, 640, 10)],
)
def test_programs_fill_the_chip(heads, keys, parts):
    """An H100 has place for 264 programs; heads of 128 in bfloat16 have tiles of 64 keys."""
    split = key_split(heads, 4, 128, 128, 2, jit_runtime.INTERPRETED_CHIP)
    assert isinstance(split, KeySplit)
    assert split.sizes["BN"] == 64
    assert split.parts(keys) == parts
