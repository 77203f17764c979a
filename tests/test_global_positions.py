"""A shard of a longer sequence, with its positions in the whole, computes what the whole computes."""

from itertools import pairwise

import pytest
import torch

import regard
from regard import biases, masks
from regard.core.symbolic_positions import Positions
from regard.errors import ConfigurationError
from regard.kernels import KERNELS
from regard.nn import Attention, Projections
from regard.tiles.memo import memoize

LENGTH, HEADS, DIM = 211, 4, 16
CUTS = (0, 64, 130, LENGTH)
SHARDS = [range(start, stop) for start, stop in pairwise(CUTS)]

MASKS = {
    "all": None,
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(before=50),
    "sinks and window": masks.causal() & (masks.window(before=20) | masks.prefix(3)),
    "strided": masks.causal() & masks.strided(7),
    "padding": masks.padding(lengths=[LENGTH, 150]),
}


def tensors(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    made = torch.randn(3, 2, HEADS, LENGTH, DIM, dtype=dtype)
    return [tensor.clone().requires_grad_() for tensor in made]


def placed(positions: range, how: str) -> range | torch.Tensor:
    return positions if how == "range" else torch.arange(positions.start, positions.stop)


def by_shards(query, key, value, how: str, **options) -> torch.Tensor:
    """Each shard of the queries attends to each shard of the keys; parts of one row are merged."""
    rows = []
    for own in SHARDS:
        parts = []
        for other in SHARDS:
            torch.manual_seed(5)  # one seed of the dropout for all shards, as a ring would have it
            parts.append(
                regard.attention_with_lse(
                    query[..., own.start : own.stop, :],
                    key[..., other.start : other.stop, :],
                    value[..., other.start : other.stop, :],
                    query_positions=placed(own, how),
                    key_positions=placed(other, how),
                    **options,
                )
            )
        rows.append(regard.merge(parts)[0])
    return torch.cat(rows, dim=-2)


@pytest.mark.parametrize("how", ["range", "tensor"])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", MASKS)
def test_shards_together_are_the_whole(name, dropout, how):
    bias = biases.alibi(HEADS)
    query, key, value = tensors()
    torch.manual_seed(5)
    whole = regard.attention(query, key, value, mask=MASKS[name], bias=bias, dropout_p=dropout)
    above = torch.randn_like(whole)
    expected = [whole, *torch.autograd.grad(whole, (query, key, value), above)]
    found = by_shards(query, key, value, how, mask=MASKS[name], bias=bias, dropout_p=dropout)
    found = [found, *torch.autograd.grad(found, (query, key, value), above)]
    for has, needs in zip(found, expected, strict=True):
        torch.testing.assert_close(has, needs, atol=3e-6, rtol=1e-5)


def able(*tensors: torch.Tensor, **options) -> list[str]:
    """The names of the kernels that can compute a problem."""
    problem = regard.explain(*tensors, **options).problem
    return [kernel.name for kernel in KERNELS if not kernel.why_not(problem)]


@pytest.mark.parametrize("kernel", [kernel.name for kernel in KERNELS])
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.causal() & masks.window(before=50)])
def test_every_kernel_with_an_offset(kernel, mask):
    """Positions far from 0 give what the reference gives, wherever they begin."""
    query, key, value = (tensor.detach() for tensor in tensors())
    options = {"mask": mask, "query_positions": range(5040, 5040 + LENGTH), "key_positions": range(5000, 5000 + LENGTH)}
    if kernel not in able(query, key, value, **options):
        pytest.skip("cannot compute dot products of a plain problem")
    expected = regard.attention(query, key, value, kernel="reference", **options)
    torch.testing.assert_close(regard.attention(query, key, value, kernel=kernel, **options), expected)


def test_consecutive_positions_are_a_range_and_others_are_not():
    query, key, value = (tensor.detach() for tensor in tensors())

    def of(positions: torch.Tensor) -> Positions | None:
        return regard.explain(query, key, value, query_positions=positions).problem.query_positions

    assert of(torch.arange(7, 7 + LENGTH)) == range(7, 7 + LENGTH)
    assert of(torch.arange(7, 7 + LENGTH, dtype=torch.int32)) == range(7, 7 + LENGTH)
    for positions in (
        torch.arange(LENGTH).flip(0),
        torch.arange(0, 2 * LENGTH, 2),
        torch.arange(LENGTH).roll(1),
        torch.arange(LENGTH).expand(2, -1),
        torch.cat([torch.zeros(1, dtype=torch.int64), torch.arange(LENGTH - 1)]),
    ):
        assert of(positions) is positions


def test_the_distance_of_a_pair():
    query, key, value = (tensor.detach() for tensor in tensors())
    problem = regard.explain(
        query[..., :5, :], key, value, query_positions=range(30, 35), key_positions=range(9, 220)
    ).problem
    distances = problem.grid().key - problem.grid().query
    assert problem.shift is not None
    i, j = 3, 100
    assert distances[i, j] == j - i - (LENGTH - 5) + problem.shift


def test_what_follows_from_the_mask_is_stored_for_each_shard():
    """A shard with an offset is as fast as one from 0: its tiles are computed once."""
    query, key, value = (tensor.detach() for tensor in tensors())
    calls = []

    def compute() -> str:
        calls.append(1)
        return "found"

    for start in (0, 0, 640, 640):
        problem = regard.explain(
            query, key, value, mask=masks.causal(), query_positions=range(start, start + LENGTH)
        ).problem
        assert memoize(problem, "a test", compute) == "found"
    assert len(calls) == 2


def test_the_offset_keeps_native_code_for_biases_by_distance():
    query, key, value = (tensor.detach() for tensor in tensors())
    options = {"mask": masks.causal(), "bias": biases.alibi(HEADS)}
    placed = {"query_positions": range(512, 512 + LENGTH), "key_positions": range(300, 300 + LENGTH)}
    assert able(query, key, value, **options, **placed) == able(query, key, value, **options)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.int16])
def test_positions_of_any_whole_dtype(dtype):
    query, key, value = (tensor.detach() for tensor in tensors())
    found = regard.attention(query, key, value, mask=masks.causal(), query_positions=torch.arange(LENGTH).to(dtype))
    torch.testing.assert_close(found, regard.attention(query, key, value, mask=masks.causal()))


def test_positions_that_would_overflow_are_refused():
    query, key, value = (tensor.detach() for tensor in tensors())
    with pytest.raises(ConfigurationError, match="key_positions is range.*; positions need to lie within ±2⁶²"):
        regard.attention(query, key, value, key_positions=range(2**63 - 2, 2**63 - 2 + LENGTH))


def test_cross_attention_does_not_compile_anew_for_each_length():
    layer = Attention(Projections(16, num_heads=2, memory_dim=16)).eval()
    frames = []

    def backend(graph, _):
        frames.append(graph)
        return graph

    compiled = torch.compile(layer, backend=backend, dynamic=True, fullgraph=True)
    memory = torch.randn(1, 20, 16)
    with torch.no_grad():
        for length in (3, 5, 7, 9, 11, 13, 15, 17, 19):
            query = torch.randn(1, length, 16)
            torch.testing.assert_close(compiled(query, memory), layer(query, memory))
    assert len(frames) <= 2


def test_one_mask_over_inputs_with_and_without_heads():
    """What is stored for a mask over (batch, length, dim) is not what (batch, heads, length, dim) needs."""
    mask = masks.where(keep=torch.rand(2, 200, 200) > 0.5)
    without, with_heads = torch.randn(2, 200, 32), torch.randn(2, 2, 200, 32)
    for tensor in (without, with_heads, without):
        expected = regard.attention(tensor, tensor, tensor, mask=mask, kernel="reference")
        torch.testing.assert_close(regard.attention(tensor, tensor, tensor, mask=mask), expected)
