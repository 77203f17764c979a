"""Rotary positions against complex numbers, by their laws, in every shape and dtype."""

import cmath
import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from regard.positions import NTK, DynamicNTK, LinearScaling, Llama3, LongRoPE, Rotary, YaRN

LAYOUTS = ("half", "interleaved")
SCALINGS = [
    None,
    LinearScaling(3.0),
    NTK(3.0),
    DynamicNTK(2.0, 16),
    YaRN(4.0, 16),
    Llama3(8.0, 64),
    LongRoPE((1.0, 1.5, 2.0), (3.0, 4.0, 7.0), 8, 2.0),
]
thorough = settings(max_examples=100, deadline=None, derandomize=True)
layouts = st.sampled_from(LAYOUTS)
dims = st.integers(1, 8).map(lambda half: 2 * half)
places = st.integers(-5000, 5000)
bases = st.floats(1.5, 1e6)


def rand(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=dtype)


def seeded(seed, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_complex_numbers(vector, position, dim, base, layout):
    """One vector turned: each pair is a complex number, times e^(i · position · frequency)."""
    turned = list(vector)
    for pair in range(dim // 2):
        x, y = (pair, pair + dim // 2) if layout == "half" else (2 * pair, 2 * pair + 1)
        number = complex(vector[x], vector[y]) * cmath.exp(1j * position * base ** (-2 * pair / dim))
        turned[x], turned[y] = number.real, number.imag
    return turned


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dim", "head_dim", "base"), [(2, 2, 10000.0), (6, 6, 500.0), (6, 11, 10000.0), (10, 12, 7.0)])
def test_complex_numbers(layout, dim, head_dim, base):
    tensor, positions = rand(3, 5, head_dim), torch.tensor([0, 1, -3, 1234, 100_000])
    turned = Rotary(dim, base, layout).rotate(tensor, positions)
    expected = [
        [by_complex_numbers(vector, int(p), dim, base, layout) for vector, p in zip(head, positions, strict=True)]
        for head in tensor.tolist()
    ]
    torch.testing.assert_close(turned, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)
    assert turned[..., dim:].equal(tensor[..., dim:])


@thorough
@given(layout=layouts, dim=dims, base=bases, at=st.tuples(places, places), moved=places, seed=st.integers(0, 99))
def test_only_the_difference_of_positions_matters(layout, dim, base, at, moved, seed):
    rotary, (query, key) = Rotary(dim, base, layout), seeded(seed, 2, 1, dim)
    there, elsewhere = (
        rotary.rotate(query, torch.tensor([at[0] + by])) @ rotary.rotate(key, torch.tensor([at[1] + by])).T
        for by in (0, moved)
    )
    # Angles of up to 10,000 in double precision are exact to 10,000 · 2⁻⁵³.
    bound = 1e-10 * query.norm() * key.norm()
    assert (there - elsewhere).abs() <= bound
    # And it is their difference that matters: with one moved, another product, but where a turn is a whole one.
    alone = rotary.rotate(query, torch.tensor([at[0] + 1])) @ rotary.rotate(key, torch.tensor([at[1]])).T
    assert (alone - there).abs() > bound


@thorough
@given(layout=layouts, dim=dims, base=bases, at=places, seed=st.integers(0, 99))
def test_norms_are_kept(layout, dim, base, at, seed):
    tensor = seeded(seed, 1, dim + 3)
    turned = Rotary(dim, base, layout).rotate(tensor, torch.tensor([at]))
    torch.testing.assert_close(turned.norm(), tensor.norm(), atol=0, rtol=1e-12)


@thorough
@given(dim=dims, base=bases, at=st.lists(places, min_size=1, max_size=5), seed=st.integers(0, 99))
def test_layouts_are_one_rotation_of_permuted_features(dim, base, at, seed):
    tensor, positions = seeded(seed, len(at), dim + 1), torch.tensor(at)
    evens_first = torch.tensor([*range(0, dim, 2), *range(1, dim, 2), dim])
    half = Rotary(dim, base, "half").rotate(tensor[:, evens_first], positions)
    assert half.equal(Rotary(dim, base, "interleaved").rotate(tensor, positions)[:, evens_first])


@thorough
@given(layout=layouts, dim=dims, base=bases, one=places, other=places, seed=st.integers(0, 99))
def test_rotations_add_up(layout, dim, base, one, other, seed):
    rotary, tensor = Rotary(dim, base, layout), seeded(seed, 1, dim)
    twice = rotary.rotate(rotary.rotate(tensor, torch.tensor([one])), torch.tensor([other]))
    torch.testing.assert_close(twice, rotary.rotate(tensor, torch.tensor([one + other])), atol=1e-10, rtol=0)


def test_rotaries_share_nothing():
    """Same dim, dtype and positions, but another base, layout or scaling: a table kept for one would spoil the next."""
    tensor, positions = rand(5, 8), torch.arange(5)
    rotaries = [
        Rotary(8, base, layout, scaling)
        for base in (100.0, 10000.0)
        for layout in LAYOUTS
        for scaling in (None, LinearScaling(2.0), NTK(2.0))
    ]
    turned = [rotary.rotate(tensor, positions) for rotary in rotaries]
    assert all(one.equal(rotary.rotate(tensor, positions)) for one, rotary in zip(turned, rotaries, strict=True))
    assert not any(one.equal(other) for one, other in itertools.combinations(turned, 2))


def test_position_zero_changes_nothing():
    tensor = rand(2, 4, 1, 8)
    for layout in LAYOUTS:
        assert Rotary(6, layout=layout).rotate(tensor, torch.tensor([0])).equal(tensor)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
class TestWays:
    """The same numbers whatever way they are asked for."""

    def rotary(self, layout, scaling):
        return Rotary(6, 100.0, layout, scaling)

    def test_positions_of_each_sequence(self, layout, scaling):
        rotary, tensor = self.rotary(layout, scaling), rand(2, 3, 5, 7)
        positions = torch.tensor([[0, 1, 2, 3, 4], [40, 7, 0, 7, -2]])
        turned = rotary.rotate(tensor, positions)
        if isinstance(scaling, DynamicNTK | LongRoPE):  # the longest sequence of the batch says how long they are
            rotary = self.rotary(layout, scaling.for_length(41) if isinstance(scaling, DynamicNTK) else long(scaling))
        for sequence in range(2):
            for head in range(3):
                alone = rotary.rotate(tensor[sequence, head], positions[sequence])
                torch.testing.assert_close(turned[sequence, head], alone, atol=1e-12, rtol=0)

    def test_one_rotation_of_many_tensors(self, layout, scaling):
        rotary, positions = self.rotary(layout, scaling), torch.arange(3, 8)
        query, key = rand(2, 4, 5, 7, dtype=torch.float32), rand(2, 2, 5, 6, dtype=torch.float32)
        rotation = rotary.rotation(positions)
        assert rotation.rotate(query).equal(rotary.rotate(query, positions))
        assert rotation.rotate(key).equal(rotary.rotate(key, positions))

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_half_precision_is_rounded_once(self, layout, scaling, dtype):
        rotary, positions = self.rotary(layout, scaling), torch.arange(5) + 4000
        tensor = rand(2, 3, 5, 7).to(dtype)
        turned = rotary.rotate(tensor, positions)
        assert turned.dtype == dtype
        assert turned.equal(rotary.rotate(tensor.float(), positions).to(dtype))

    def test_float32_is_near_float64(self, layout, scaling):
        rotary, positions = self.rotary(layout, scaling), torch.arange(5) + 100_000
        tensor = rand(2, 3, 5, 7, dtype=torch.float32)
        exact = rotary.rotate(tensor.double(), positions)
        # Four roundings to float32: of the cosine, of two products and of their sum.
        budget = 4 * 2**-24 * 2 * tensor.abs().max().item() * 1.5
        torch.testing.assert_close(rotary.rotate(tensor, positions).double(), exact, atol=budget, rtol=0)

    def test_autocast(self, layout, scaling):
        rotary, positions, tensor = self.rotary(layout, scaling), torch.arange(5) + 4000, rand(2, 3, 5, 7).bfloat16()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rotation = rotary.rotation(positions)
            turned = rotation.rotate(tensor)
        assert rotation.cos.dtype == rotation.sin.dtype == torch.float32
        assert rotation.cos.equal(rotary.rotation(positions).cos)
        assert turned.equal(rotary.rotate(tensor, positions))

    def test_gradient(self, layout, scaling):
        rotary, positions = self.rotary(layout, scaling), torch.tensor([[4, 0, 2]])
        tensor = rand(2, 2, 3, 7).requires_grad_()
        assert torch.autograd.gradcheck(lambda t: rotary.rotate(t, positions), tensor)

    def test_vmap(self, layout, scaling):
        rotary, tensor = self.rotary(layout, scaling), rand(3, 2, 5, 7)
        positions = torch.tensor([0, 2, 3, 9, 20])
        over_batch = vmap(rotary.rotate, in_dims=(0, None))(tensor, positions)
        assert over_batch.equal(rotary.rotate(tensor, positions))
        each = torch.stack([positions, positions + 1, positions * 2])
        expected = torch.stack([rotary.rotate(one, at) for one, at in zip(tensor, each, strict=True)])
        torch.testing.assert_close(vmap(rotary.rotate)(tensor, each), expected, atol=1e-12, rtol=0)

    def test_vmap_of_grad(self, layout, scaling):
        rotary, tensor, positions = self.rotary(layout, scaling), rand(3, 2, 5, 7), torch.arange(5)
        direction = rand(2, 5, 7)
        gradients = vmap(grad(lambda t: (rotary.rotate(t, positions) * direction).sum()))(tensor)
        # A rotation is linear: one gradient for all, which the transposed rotation gives.
        leaf = tensor[0].clone().requires_grad_()
        (gradient,) = torch.autograd.grad((rotary.rotate(leaf, positions) * direction).sum(), leaf)
        torch.testing.assert_close(gradients, gradient.expand(3, 2, 5, 7), atol=1e-12, rtol=0)

    def test_a_value(self, layout, scaling):
        rotary = self.rotary(layout, scaling)
        assert rotary == self.rotary(layout, scaling)
        assert hash(rotary) == hash(self.rotary(layout, scaling))
        assert repr(rotary) == f"Rotary(dim=6, base=100.0, layout={layout!r}, scaling={scaling!r}, sections=None)"
        assert eval(repr(rotary)) == rotary


def long(scaling):
    """LongRoPE as it is for sequences longer than the original."""
    return LongRoPE(scaling.long_factors, scaling.long_factors, scaling.original_length, scaling.factor)


# Of "half" only what depends on the length is compiled differently; the other scalings change constants.
@pytest.mark.parametrize(
    ("layout", "scaling"),
    [
        ("interleaved", None),
        *(
            pytest.param(
                "half", scaling, marks=[] if isinstance(scaling, DynamicNTK | LongRoPE) else [pytest.mark.slow]
            )
            for scaling in SCALINGS
        ),
    ],
    ids=repr,
)
def test_compiled(layout, scaling):
    torch.compiler.reset()
    rotary = Rotary(6, 100.0, layout, scaling)

    def both(query, key, positions):
        rotation = rotary.rotation(positions)
        return rotation.rotate(query), rotation.rotate(key)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    for length in (5, 6):  # the second time for any length
        given = rand(2, 4, length, 7), rand(2, 2, length, 7), torch.arange(length) + 10
        torch.testing.assert_close(compiled(*given), both(*given), atol=1e-6, rtol=0)


def test_a_rotation_goes_through_the_door_of_compiled_code():
    torch.compiler.reset()
    rotary, query = Rotary(4), rand(2, 3, 5, 6, dtype=torch.float32)
    make = torch.compile(rotary.rotation, fullgraph=True, backend="aot_eager")
    turn = torch.compile(lambda rotation, tensor: rotation.rotate(tensor), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(turn(make(torch.arange(5)), query), rotary.rotate(query, torch.arange(5)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch's own, when it loads
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_by_the_default_backend(layout):
    torch.compiler.reset()
    rotary, positions = Rotary(6, layout=layout, scaling=YaRN(4.0, 512)), torch.arange(5) + 100_000
    query = rand(2, 3, 5, 7, dtype=torch.float32).requires_grad_()
    turned = torch.compile(rotary.rotate, fullgraph=True)(query, positions)
    expected = rotary.rotate(query, positions)
    torch.testing.assert_close(turned, expected, atol=2e-6, rtol=0)
    gradients = [torch.autograd.grad(result.sin().sum(), query)[0] for result in (turned, expected)]
    torch.testing.assert_close(*gradients, atol=2e-6, rtol=0)


def test_far_positions_are_exact():
    """At position 100,000 angles of float32 would be off by 0.004."""
    rotation = Rotary(128).rotation(torch.tensor([100_000]))
    for pair, (cosine, sine) in enumerate(zip(rotation.cos[0].tolist(), rotation.sin[0].tolist(), strict=True)):
        angle = 100_000 * 10000 ** (-2 * pair / 128)
        assert cosine == pytest.approx(math.cos(angle), abs=2**-25 + 1e-9)
        assert sine == pytest.approx(math.sin(angle), abs=2**-25 + 1e-9)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32])
@pytest.mark.parametrize("scaling", SCALINGS, ids=repr)
def test_narrow_positions(dtype, scaling):
    rotary, tensor = Rotary(6, scaling=scaling), rand(3, 6)
    positions = torch.tensor([0, 100, 255])  # 255 + 1 does not fit a byte
    assert rotary.rotate(tensor, positions.to(dtype)).equal(rotary.rotate(tensor, positions))


def test_positions_and_tensors_need_not_be_contiguous():
    tensor, positions = rand(3, 5, 2, 8), torch.arange(20).view(5, 4)
    strided = tensor.permute(2, 0, 1, 3)[..., ::2]
    for layout in LAYOUTS:
        turned = Rotary(4, layout=layout).rotate(strided, positions[:, 1])
        assert turned.equal(Rotary(4, layout=layout).rotate(strided.contiguous(), torch.tensor([1, 5, 9, 13, 17])))


@pytest.mark.parametrize(
    ("shape", "positions"),
    [
        ((5, 6), (5,)),
        ((3, 5, 6), (5,)),
        ((3, 5, 6), (3, 5)),
        ((3, 5, 6), (1, 5)),
        ((2, 3, 5, 6), (5,)),
        ((2, 3, 5, 6), (2, 5)),
        ((2, 3, 5, 6), (1, 5)),
        ((4, 2, 3, 5, 6), (2, 5)),
        ((4, 2, 3, 5, 6), (4, 2, 5)),
        ((4, 2, 3, 5, 6), (4, 1, 5)),
        ((2, 3, 0, 6), (0,)),
        ((2, 3, 0, 6), (2, 0)),
        ((0, 3, 5, 6), (5,)),
        ((0, 3, 5, 6), (0, 5)),
    ],
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("scaling", [None, DynamicNTK(2.0, 16)])
def test_shapes(shape, positions, layout, scaling):
    tensor, at = rand(*shape), torch.randint(-9, 9, positions)
    turned = Rotary(6, layout=layout, scaling=scaling).rotate(tensor, at)
    assert turned.shape == shape
    if tensor.ndim >= 4:
        at = at.unsqueeze(-2)  # heads share their positions
    for place in itertools.product(*map(range, shape[:-1])):
        position = int(at.expand(shape[:-1])[place])
        expected = by_complex_numbers(tensor[place].tolist(), position, 6, 10000.0, layout)
        torch.testing.assert_close(turned[place].tolist(), expected, atol=1e-12, rtol=0)
