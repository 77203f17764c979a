import math

import pytest
import torch
from torch import Tensor

from regard.backends.cpu.library import DTYPES
from regard.backends.cpu.write_weights import write_weights
from regard.errors import DeviceError, DtypeError, ShapeError

pytestmark = pytest.mark.usefixtures("built")

SIZES = [  # batch, heads, key heads, queries, keys, dim
    (1, 2, 2, 64, 64, 64),
    (2, 4, 2, 131, 257, 32),
    (1, 3, 1, 67, 61, 23),
    (2, 2, 2, 1, 130, 16),
    (1, 1, 1, 200, 1, 5),
    (3, 1, 1, 1, 1, 1),
]


def formula(
    query: Tensor, key: Tensor, lse: Tensor, keep: Tensor | None = None, softcap: float | None = None
) -> Tensor:
    scores = 0.3 * (query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.exp(scores - lse[..., None])
    return weights if keep is None else weights.where(keep, 0.0)


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, shared, queries, keys, dim = shape
    query, key = torch.randn(batch, heads, queries, dim).to(dtype), torch.randn(batch, shared, keys, dim).to(dtype)
    scores = 0.3 * (query.double() @ key.double().repeat_interleave(heads // shared, 1).mT)
    return query, key, scores.logsumexp(-1).float()


def room(query: Tensor, key: Tensor) -> Tensor:
    """Memory that nothing was written to, inside more of it."""
    return torch.full((*query.shape[:3], key.shape[2] + 3), math.nan)[..., 1:-2]


def agrees(query: Tensor, key: Tensor, lse: Tensor, keep: Tensor | None = None, softcap: float | None = None) -> bool:
    weights, terms = room(query, key), room(query, key)
    write_weights(query, key, 0.3, lse, weights, entropy_terms=terms, keep=keep, softcap=softcap)
    true = formula(query.double(), key.double(), lse.double(), keep, softcap)
    plain = formula(query.float(), key.float(), lse, keep, softcap)
    eps = torch.finfo(torch.float32).eps
    allowed = 5 * (plain - true).abs().amax() + 4 * eps * true.abs().amax()
    assert (weights - true).abs().le(allowed).all()
    assert (terms - torch.xlogy(true, true) / math.log(2)).abs().le(20 * allowed + 20 * eps).all()
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES)
def test_they_are_the_formula(variant, shape, dtype):
    assert agrees(*inputs(shape, dtype))
    assert agrees(*inputs(shape, dtype), softcap=1.5)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("alike", [(), (0,), (1,), (0, 1), (0, 1, 2), (0, 1, 3)], ids=str)
def test_a_mask(variant, shape, alike):
    batch, heads, _, queries, keys, _ = shape
    size = [1 if axis in alike else length for axis, length in enumerate((batch, heads, queries, keys))]
    assert agrees(*inputs(shape), keep=torch.rand(size) < 0.5)


def test_nothing_comes_from_where_there_is_no_pair(variant):
    query, key, lse = inputs((1, 2, 1, 70, 130, 16))
    key[:, :, 100] = math.nan
    keep = torch.ones(1, 1, 1, 130, dtype=torch.bool)
    keep[..., 100] = False
    weights = write_weights(query, key, 0.3, lse, room(query, key), keep=keep)
    assert (weights[..., 100] == 0).all()
    assert weights.isfinite().all()


def test_rows_that_take_no_part(variant):
    query, key, lse = inputs((1, 2, 2, 70, 130, 16))
    lse[..., 3] = math.inf
    weights, terms = room(query, key), room(query, key)
    write_weights(query, key, 0.3, lse, weights, entropy_terms=terms)
    assert (weights[..., 3, :] == 0).all()
    assert (terms[..., 3, :] == 0).all()


def test_rows_that_attend_to_nan(variant):
    query, key, lse = inputs((1, 2, 2, 70, 130, 16))
    lse[..., 3] = math.nan
    weights = write_weights(query, key, 0.3, lse, room(query, key), keep=torch.rand(70, 130)[None, None] < 0.5)
    assert weights[..., 3, :].isnan().all()
    assert weights.isnan().any(-1).sum() == 2


def test_strides():
    query, key, lse = inputs((2, 4, 2, 70, 130, 32))
    expected = write_weights(query, key, 0.3, lse, room(query, key))
    apart = query.transpose(1, 2).contiguous().transpose(1, 2), key.mT.contiguous().mT
    into = torch.empty(2, 70, 4, 130).transpose(1, 2)
    assert torch.equal(write_weights(*apart, 0.3, lse.mT.contiguous().mT, into), expected)


def test_nothing_at_all():
    query, key, lse = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 5)
    assert write_weights(query, key, 1.0, lse, torch.empty(1, 2, 5, 0)).shape == (1, 2, 5, 0)


class TestErrors:
    def test_shapes(self):
        query, key, lse = inputs((1, 4, 2, 5, 7, 8))
        with pytest.raises(ShapeError, match=r"weights has shape \(1, 4, 5, 6\); it needs \(1, 4, 5, 7\)"):
            write_weights(query, key, 1.0, lse, torch.empty(1, 4, 5, 6))
        with pytest.raises(ShapeError, match="key has 2 heads; they need to divide the 3 query heads"):
            write_weights(query[:, 1:], key, 1.0, lse[:, 1:], torch.empty(1, 3, 5, 7))
        with pytest.raises(ShapeError, match="weights needs its last axis contiguous"):
            write_weights(query, key, 1.0, lse, torch.empty(1, 4, 7, 5).mT)

    def test_dtypes(self):
        query, key, lse = inputs((1, 2, 2, 5, 7, 8))
        with pytest.raises(DtypeError, match="native code takes both as float32, bfloat16 or float16"):
            write_weights(query.double(), key.double(), 1.0, lse, room(query, key))
        with pytest.raises(DtypeError, match="lse is torch.float64; native code takes torch.float32"):
            write_weights(query, key, 1.0, lse.double(), room(query, key))

    def test_devices(self):
        query, key, lse = inputs((1, 2, 2, 5, 7, 8))
        with pytest.raises(DeviceError, match=r"key is on meta; native code runs on the CPU: pass key.cpu\(\)"):
            write_weights(query, key.to("meta"), 1.0, lse, room(query, key))
