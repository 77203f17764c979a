import math

import pytest
import torch
from torch.func import vmap

from regard.errors import ConfigurationError, DeviceError, DtypeError, RegardError, ShapeError
from regard.positions import Learned


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (2, 0, 3)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_rows_of_the_table(shape, dtype):
    learned = Learned(7, 5)
    positions = torch.randint(0, 7, shape).to(dtype)
    assert learned(positions).shape == (*shape, 5)
    assert learned(positions).equal(learned.weight[positions.long()])


def test_gradient():
    learned = Learned(4, 2)
    learned(torch.tensor([[0, 3], [3, 3]])).sum().backward()
    assert learned.weight.grad is not None
    assert learned.weight.grad.tolist() == [[1, 1], [0, 0], [0, 0], [3, 3]]


def test_the_table_starts_small_and_has_the_name_that_checkpoints_use():
    weight = Learned(300, 200).weight
    # Mean and deviation of n normal numbers: within five standard errors.
    n = weight.numel()
    assert abs(weight.mean().item()) < 5 * 0.02 / math.sqrt(n)
    assert weight.std().item() == pytest.approx(0.02, rel=5 / math.sqrt(2 * n))
    assert Learned(4, 2).load_state_dict(torch.nn.Embedding(4, 2).state_dict()).missing_keys == []


def test_the_dtype_is_that_of_the_table():
    assert Learned(4, 2).bfloat16()(torch.arange(3)).dtype == torch.bfloat16


def test_positions_are_data():
    learned = Learned(6, 3)
    positions = torch.tensor([[5, 0, 2], [1, 1, 4]])
    assert learned(positions.T).equal(learned(positions).transpose(0, 1))


@pytest.mark.parametrize(("given", "first"), [([7], 7), ([0, 9, 3], 9), ([[0, 1], [2, 10**9]], 10**9)])
def test_positions_beyond_the_table(given, first):
    match = (
        rf"^position {first} lies beyond the table of Learned\(length=7, dim=5\), whose last row is 6: shorten the "
        "sequence, or make the table longer; Sinusoidal and Rotary have no last position$"
    )
    with pytest.raises(ShapeError, match=match):
        Learned(7, 5)(torch.tensor(given))


def test_positions_before_the_table():
    with pytest.raises(
        ShapeError, match=r"^position -2 is negative, but the table of Learned\(length=7, dim=5\) count"
    ):
        Learned(7, 5)(torch.tensor([0, -1, -2]))


def test_the_ends_of_the_table_are_in_it():
    learned = Learned(7, 5)
    assert learned(torch.tensor([0, 6])).equal(learned.weight[[0, 6]])


@pytest.mark.parametrize("wrong", [-1, 7])
def test_compiled_and_mapped_code_reads_no_other_row(wrong):
    torch.compiler.reset()
    learned, positions = Learned(7, 5), torch.tensor([[0, 6], [3, 2]])
    positions_off = torch.tensor([[0, 6], [3, wrong]])
    for function in (torch.compile(learned, fullgraph=True, backend="aot_eager"), vmap(learned)):
        assert function(positions).equal(learned(positions))
        with pytest.raises((IndexError, RuntimeError)) as error:
            function(positions_off)
        assert not isinstance(error.value, RegardError)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch's own, when it loads
@pytest.mark.parametrize("wrong", [-1, 7])
def test_code_compiled_by_the_default_backend_reads_no_other_row(wrong):
    torch.compiler.reset()
    learned = Learned(7, 5)
    compiled = torch.compile(learned, fullgraph=True)
    assert compiled(torch.tensor([0, 6])).equal(learned(torch.tensor([0, 6])))
    with pytest.raises((IndexError, RuntimeError)):
        compiled(torch.tensor([3, wrong]))


def test_repr():
    assert repr(Learned(7, 5)) == "Learned(length=7, dim=5)"


@pytest.mark.parametrize(
    ("length", "dim", "name"), [(0, 4, "length"), (4, 0, "dim"), (-1, 4, "length"), (4, 2.0, "dim")]
)
def test_a_table_has_rows(length, dim, name):
    wrong = length if name == "length" else dim
    with pytest.raises(ConfigurationError, match=f"^Learned needs a {name} of 1 or more; it is {wrong!r}$"):
        Learned(length, dim)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_positions_are_whole_numbers(dtype):
    with pytest.raises(DtypeError, match=rf"Learned\(length=7, dim=5\) needs positions that .* they are {dtype}: call"):
        Learned(7, 5)(torch.zeros(3, dtype=dtype))


def test_positions_are_where_the_table_is():
    match = r"positions are on meta, but the table of Learned\(length=7, dim=5\) is on cpu: move one of them with .to"
    with pytest.raises(DeviceError, match=match):
        Learned(7, 5)(torch.arange(3, device="meta"))
