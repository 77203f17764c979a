import math

import pytest
import torch
from torch.func import vmap

from regard.errors import ConfigurationError, DtypeError
from regard.positions import Sinusoidal, SplitSinusoidal, Tensor2TensorSinusoidal

BOTH = [Sinusoidal, SplitSinusoidal, Tensor2TensorSinusoidal]
FAR = [0, 1, 2, 31, 1000, 99_999, 100_000, -7, -100_000]


def published(position, dim, base):
    """The formula of the paper, one number after the other."""
    return [
        (math.sin if feature % 2 == 0 else math.cos)(position / base ** ((feature - feature % 2) / dim))
        for feature in range(dim)
    ]


def split(position, dim, base):
    """The formula of the paper, the sines first."""
    numbers = published(position, dim, base)
    return numbers[::2] + numbers[1::2]


def released(position, dim, base):
    """Tensor2Tensor's rule, one number after the other."""
    waves = dim // 2
    times = [math.exp(-wave * math.log(base) / max(waves - 1, 1)) for wave in range(waves)]
    return [math.sin(position * time) for time in times] + [math.cos(position * time) for time in times]


@pytest.mark.parametrize(
    ("kind", "formula"),
    [(Sinusoidal, published), (SplitSinusoidal, split), (Tensor2TensorSinusoidal, released)],
)
@pytest.mark.parametrize(("dim", "base"), [(2, 10000.0), (6, 10000.0), (14, 500.0), (512, 10000.0)])
def test_the_formula(kind, formula, dim, base):
    expected = torch.tensor([formula(position, dim, base) for position in FAR], dtype=torch.float64)
    exact = kind(dim, base)(torch.tensor(FAR), dtype=torch.float64)
    torch.testing.assert_close(exact, expected, atol=1e-9, rtol=0)
    # Rounded once to float32, numbers of [-1, 1] are off by at most 2⁻²⁵.
    torch.testing.assert_close(kind(dim, base)(torch.tensor(FAR)).double(), expected, atol=2**-25 + 1e-9, rtol=0)


def test_angles_of_float32_would_be_far_off():
    """That the tolerance above holds for doubles alone."""
    narrow = torch.tensor([100_000.0]) * torch.tensor([10000.0]).pow(-torch.arange(0, 512, 2) / 512)
    assert (narrow.sin() - Sinusoidal(512)(torch.tensor([100_000]))[0, ::2]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
def test_shapes(kind, shape):
    assert kind(6)(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, 6)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_roundings_of_the_same_numbers(kind, dtype):
    positions = torch.arange(50)
    assert kind(8)(positions, dtype=dtype).equal(kind(8)(positions, dtype=torch.float64).to(dtype))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32])
def test_narrow_positions(kind, dtype):
    assert kind(8)(torch.tensor([0, 3, 200 % 128], dtype=dtype)).equal(kind(8)(torch.tensor([0, 3, 72])))


@pytest.mark.parametrize("kind", BOTH)
def test_positions_are_data(kind):
    positions = torch.tensor([[3, 9, 9], [0, 2, 1]])
    whole = kind(10)(torch.arange(10))
    assert kind(10)(positions).equal(whole[positions])
    assert kind(10)(positions.T).equal(whole[positions.T])


@pytest.mark.parametrize("kind", BOTH)
def test_no_parameters_and_nothing_kept(kind):
    module = kind(4)
    before = set(vars(module))
    module(torch.arange(5))
    assert set(vars(module)) == before
    assert not list(module.parameters())
    assert not module.state_dict()


@pytest.mark.parametrize("kind", BOTH)
def test_autocast_changes_nothing(kind):
    positions = torch.tensor([100_000])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = kind(8)(positions)
    assert under.dtype == torch.float32
    assert under.equal(kind(8)(positions))


@pytest.mark.parametrize("kind", BOTH)
def test_compiled_and_mapped(kind):
    torch.compiler.reset()
    module, positions = kind(8), torch.arange(12).view(3, 4)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(positions), module(positions), atol=2**-24, rtol=0)
    assert vmap(module)(positions).equal(module(positions))


def test_repr():
    assert repr(Sinusoidal(8)) == "Sinusoidal(dim=8, base=10000.0)"
    assert repr(Tensor2TensorSinusoidal(8, base=5.0)) == "Tensor2TensorSinusoidal(dim=8, base=5.0)"


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dim", [0, -2, 1, 7, True, 4.0])
def test_dim_is_even(kind, dim):
    match = f"^{kind.__name__} needs an even dim of 2 or more, as features come in pairs; it is {dim!r}$"
    with pytest.raises(ConfigurationError, match=match):
        kind(dim)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("base", [1, 0.5, -10.0, math.inf, math.nan])
def test_base_is_above_one(kind, base):
    match = f"{kind.__name__} needs a finite base above 1, published is 10000; it is {base!r}"
    with pytest.raises(ConfigurationError, match=match):
        kind(4, base)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
def test_positions_are_whole_numbers(kind, dtype):
    match = rf"needs positions that are whole numbers; they are {dtype}: call .long\(\)"
    with pytest.raises(DtypeError, match=match):
        kind(4)(torch.zeros(3, dtype=dtype))


@pytest.mark.parametrize("kind", BOTH)
def test_positions_are_a_tensor(kind):
    with pytest.raises(DtypeError, match="as a torch.Tensor of whole numbers; they are a list: torch.as_tensor makes"):
        kind(4)([0, 1, 2])


@pytest.mark.parametrize("kind", BOTH)
def test_the_result_is_floating_point(kind):
    with pytest.raises(DtypeError, match="gives floating-point numbers, torch.float32 for instance; dtype is torch.i"):
        kind(4)(torch.arange(3), dtype=torch.int64)


def test_a_first_position_is_what_others_call_zero():
    positions = torch.tensor([[0, 5, 41]])
    shifted = Tensor2TensorSinusoidal(8, first=2)
    assert torch.equal(shifted(positions), Tensor2TensorSinusoidal(8)(positions + 2))
    assert "first=2" in repr(shifted)
    for first in (-1, 0.5, True):
        with pytest.raises(ConfigurationError, match="needs a first of 0 or more"):
            Tensor2TensorSinusoidal(8, first=first)  # type: ignore[arg-type]
