"""The largest score of each head and row, against scores in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks
from regard.errors import ConfigurationError
from regard.kernels import lens_pass
from regard.kernels.validation import make_problem

HEAD, ROW = lenses.MaxLogit(), lenses.MaxLogit("row")
NORMAL = -math.log(torch.finfo(torch.float32).tiny)
OPTIONS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"mask": masks.causal()},
    "rows without keys": {"mask": masks.window(before=5) & masks.padding(lengths=[20, 53])},
    "pairs": {"mask": torch.rand(4, 37, 53, generator=torch.Generator().manual_seed(1)) < 0.2},
    "softcap and bias": {"softcap": 2.0, "bias": biases.alibi(4), "mask": masks.causal()},
    "a bias of pairs": {"bias": torch.linspace(-3, 3, 37 * 53).view(37, 53)},
    "sinks": {"sinks": torch.tensor([-4.0, 0.0, 20.0, 80.0])},
    "large": {"scale": 50.0, "mask": masks.causal()},
    "beyond float32": {"scale": 3e4},
    "dropout": {"dropout_p": 0.5},
}


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(2, 4, 37, 16), torch.randn(2, 2, 53, 16), torch.randn(2, 2, 53, 3)
    return query.to(dtype), key.to(dtype), value.to(dtype)


def scores(query: Tensor, key: Tensor, value: Tensor, dtype: torch.dtype, **options: Any) -> Tensor:
    """All scores, rounded to float32 where the formula is in float32."""
    options = {name: option for name, option in options.items() if name not in ("sinks", "dropout_p")}
    return make_problem(*(each.to(dtype) for each in (query, key, value)), **options).scores().double()


def assert_near(shown: Tensor, true: Tensor, formula: Tensor, size: Tensor) -> None:
    """As near as the formula in float32, twice over, and a few roundings of the log-sum-exp."""
    there = true.isfinite()
    assert shown.isfinite().equal(there)
    assert (shown[~there] == -math.inf).all()
    rough = (formula - true)[there].abs().max()
    assert ((shown - true)[there].abs().max()) <= 2 * rough + 4 * torch.finfo(torch.float32).eps * size.clamp(min=1.0)


@pytest.mark.parametrize("by", ["native code", "tiles"])
@pytest.mark.parametrize("name", OPTIONS)
def test_it_is_the_largest_score(name, by, monkeypatch):
    if by == "tiles":
        monkeypatch.setattr(lens_pass, "pass_over", lambda problem: None)
        monkeypatch.setattr(lens_pass, "WEIGHTS_PER_TILE", 256)
    query, key, value = inputs()
    seen = regard.observe(query, key, value, HEAD, ROW, **OPTIONS[name])
    true, formula = (scores(query, key, value, of, **OPTIONS[name]) for of in (torch.float64, torch.float32))
    assert seen.lse is not None
    size = seen.lse[seen.lse.isfinite()].abs().max()
    assert_near(seen[ROW], true.amax(-1), formula.amax(-1), size)
    assert_near(seen[HEAD], true.amax((-1, -2)), formula.amax((-1, -2)), size)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_of_other_dtypes(dtype):
    query, key, value = inputs(dtype)
    seen = regard.observe(query, key, value, HEAD, mask=masks.causal())
    assert seen[HEAD].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    true = scores(query, key, value, torch.float64, mask=masks.causal()).amax((-1, -2))
    torch.testing.assert_close(seen[HEAD].double(), true, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)


def test_a_row_that_a_sink_outweighs_counts_as_empty():
    query, key, value = inputs()
    sinks = torch.tensor([0.0, 0.0, 60.0, 200.0])
    seen = regard.observe(query, key, value, HEAD, ROW, sinks=sinks)
    true = scores(query, key, value, torch.float64).amax(-1)
    assert (seen[ROW][:, 3] == -math.inf).all()
    assert (seen[HEAD][:, 3] == -math.inf).all()
    assert ((60 - true[:, 2]) < NORMAL).all()
    torch.testing.assert_close(seen[ROW][:, :3].double(), true[:, :3], rtol=0, atol=2e-5)


def test_nan_shows_where_it_is_attended_to():
    query, key, value = inputs()
    key[0, 0, 30] = math.nan
    seen = regard.observe(query, key, value, HEAD, ROW, mask=masks.causal())
    broken = torch.zeros(2, 4, 37, dtype=torch.bool)
    broken[0, :2, 30 - 16 :] = True  # queries are the last 37 of 53
    assert seen[ROW].isnan().equal(broken)
    assert seen[HEAD].isnan().equal(broken.any(-1))
    without = regard.observe(query, key, value, HEAD, mask=masks.causal() & masks.where(keep=torch.arange(53) != 30))
    assert without[HEAD].isfinite().all()


def test_shapes_follow_the_call():
    query, key = torch.randn(37, 8), torch.randn(53, 8)
    seen = regard.observe(query, key, key, HEAD, ROW)
    assert (seen[HEAD].shape, seen[ROW].shape) == ((), (37,))
    seen = regard.observe(
        query.expand(2, 3, 4, 37, 8), key.expand(2, 3, 2, 53, 8), key.expand(2, 3, 2, 53, 8), HEAD, ROW
    )
    assert (seen[HEAD].shape, seen[ROW].shape) == ((2, 3, 4), (2, 3, 4, 37))
    empty = regard.observe(query[:0], key, key, HEAD)
    assert empty[HEAD] == -math.inf
    assert regard.observe(query, key[:0], key[:0], HEAD)[HEAD] == -math.inf


def test_what_it_does_not_show():
    with pytest.raises(ConfigurationError, match="MaxLogit needs per as 'head' or 'row'; it is 'column'"):
        lenses.MaxLogit("column")  # type: ignore[arg-type]
    query = torch.randn(1, 2, 5, 4)
    with pytest.raises(ConfigurationError, match="these are weights of linear attention, which has none"):
        regard.observe_linear_attention(query, query, query, HEAD)
