"""Landmark attention against its two softmaxes in float64: masks, blocks that are retrieved, positions, errors."""

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks, scores, selection
from regard.errors import ConfigurationError, ShapeError

HEADS, KEY_HEADS, DIM, SIZE = 4, 2, 8, 5


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def inputs(queries: int, keys: int) -> list[Tensor]:
    return [drawn(2, heads, n, DIM) for heads, n in ((HEADS, queries), (KEY_HEADS, keys), (KEY_HEADS, keys))]


def formula(query: Tensor, key: Tensor, keep: Tensor, at: Tensor, has: Tensor, sinks: Tensor | None = None) -> Tensor:
    """The weights, row by row and block by block; keep (..., M, N), at (M,) and has (N,)."""
    products = query @ key.repeat_interleave(HEADS // KEY_HEADS, 1).mT / DIM**0.5
    landmark, own = has % SIZE == SIZE - 1, at[:, None] // SIZE == has // SIZE
    same = (has[:, None] // SIZE == has // SIZE) & ~landmark[:, None]
    outer = keep & (own ^ landmark) & (own | (keep.double() @ same.double() > 0))  # with other keys that are seen
    exponentials = products.exp()
    total = (exponentials * outer).sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks.exp()[:, None, None]
    weights = exponentials * (outer & own) / total.where(total > 0, 1.0)
    for block in (has // SIZE).unique():
        inside = keep & (has // SIZE == block) & ~landmark & ~own
        gate = (exponentials * (outer & ~own & (has // SIZE == block))).sum(-1, keepdim=True)
        within = (exponentials * inside).sum(-1, keepdim=True)
        share = gate / total.where(total > 0, 1.0) / within.where(within > 0, 1.0)
        weights = weights + exponentials * inside * share
    return weights


@pytest.mark.parametrize("kernel", ["reference", "tiled"])
def test_any_mask_empty_rows_hidden_landmarks_and_sinks(kernel):
    query, key, value = leaves = inputs(37, 53)
    keep, sinks = torch.rand(2, HEADS, 37, 53) > 0.4, drawn(HEADS)
    keep[..., 3, :], keep[..., 7], keep[..., 14] = False, False, False  # 14 is a landmark
    keep[..., 25:29] = False  # a block without other keys than its landmark
    weights = formula(query, key, keep, torch.arange(16, 53), torch.arange(53), sinks)
    expected = weights @ value.repeat_interleave(2, 1)
    found = regard.attention(query, key, value, mask=keep, bias=biases.landmarks(SIZE), sinks=sinks, kernel=kernel)
    torch.testing.assert_close(found, expected)
    above = torch.randn_like(expected)
    gradients = (torch.autograd.grad(each, [*leaves, sinks], above) for each in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("order", [False, True])
def test_keys_anywhere_in_any_order(order):
    query, key, value = leaves = inputs(5, 23)
    has = 100 + torch.cat([torch.arange(4, 19), torch.arange(30, 38)])
    if order:
        has = has[torch.randperm(23)]
    at = torch.tensor([104, 137, 118, 119, 137])
    keep = has <= at[:, None]
    expected = formula(query, key, keep, at, has) @ value.repeat_interleave(2, 1)
    options = {"mask": masks.causal(), "bias": biases.landmarks(SIZE)}
    for positions in (at, at.expand(2, 5)):
        found = regard.attention(query, key, value, query_positions=positions, key_positions=has, **options)
        torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(each.square().sum(), leaves) for each in (found, expected))
    torch.testing.assert_close(*gradients)


def test_a_shard_far_from_the_start_is_that_of_the_whole():
    query, key, value = inputs(23, 23)
    options = {"mask": masks.causal(), "bias": biases.landmarks(SIZE)}
    at = torch.arange(1003, 1026)
    spread = regard.attention(query, key, value, query_positions=at, key_positions=at, **options)
    as_range = range(1003, 1026)
    found = regard.attention(query, key, value, query_positions=as_range, key_positions=as_range, **options)
    torch.testing.assert_close(found, spread)


@pytest.mark.parametrize("count", [1, 3, 20])
def test_blocks_that_are_retrieved(count):
    query, key, value = leaves = inputs(37, 53)
    found = selection.landmark_blocks(query, key, size=SIZE, count=count)
    assert found.shape == (2, HEADS, 37, min(count, 11))
    at, has = torch.arange(16, 53), torch.arange(53)
    gates = (query @ key.repeat_interleave(2, 1).mT)[..., SIZE - 1 :: SIZE]
    earlier = torch.arange(10) < at[:, None] // SIZE
    ranks = gates.masked_fill(~earlier, -torch.inf).argsort(-1, descending=True).argsort(-1)
    chosen = (earlier & (ranks < count - 1)).repeat_interleave(SIZE, -1)
    chosen = torch.cat([chosen, torch.zeros(2, HEADS, 37, 3).bool()], -1)
    keep = (has <= at[:, None]) & (chosen | (at[:, None] // SIZE == has // SIZE))
    expected = formula(query, key, keep, at, has) @ value.repeat_interleave(2, 1)
    mask = masks.causal() & masks.blocks(found, (1, SIZE))
    output = regard.attention(query, key, value, mask=mask, bias=biases.landmarks(SIZE))
    torch.testing.assert_close(output, expected)
    gradients = (torch.autograd.grad(each.square().sum(), leaves) for each in (output, expected))
    torch.testing.assert_close(*gradients)


def test_a_layer_with_rotary_embeddings_step_by_step():
    layer = regard.nn.Attention(
        regard.nn.Projections(32, HEADS, num_kv_heads=KEY_HEADS),
        mask=masks.causal(),
        bias=biases.landmarks(SIZE),
        rotary=regard.positions.Rotary(DIM),
    ).double()
    x, cache, outputs = torch.randn(2, 17, 32, dtype=torch.float64), layer.make_cache(), []
    for token in x.split([1, 1, 4, 1, 6, 1, 1, 1, 1], 1):
        output, cache = layer.step(token, cache)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x))


def test_what_does_not_fit_is_named():
    query, key, value = inputs(5, 7)
    for size in (1, 2.0, True):
        with pytest.raises(ConfigurationError, match=r"at least 2 with the landmark; size is"):
            biases.landmarks(size)  # type: ignore[reportArgumentType]
    bias = biases.landmarks(SIZE)
    for options, words in (
        ({"softcap": 2.0}, "the call has softcap: leave it out"),
        ({"normalizer": regard.normalizers.Sigmoid()}, "the call has normalizer"),
        ({"bias": bias + biases.alibi(HEADS)}, "the call has another bias.*rotary"),
        ({"score": scores.Additive(DIM, DIM, 3).double()}, "leave score out"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            regard.attention(query, key, value, **{"bias": bias, **options})
    with pytest.raises(ShapeError, match="landmark_blocks"):
        selection.landmark_blocks(query[..., :3], key, size=SIZE, count=1)
    with pytest.raises(ConfigurationError, match="landmark_blocks's size is 0"):
        selection.landmark_blocks(query, key, size=0, count=1)


@pytest.mark.parametrize("positions", [None, torch.arange(23)], ids=["range", "tensor"])
def test_it_is_compiled_as_a_whole(positions):
    query, key, value = leaves = inputs(23, 23)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        options = {"query_positions": positions, "key_positions": positions, "mask": masks.causal()}
        return regard.attention(query, key, value, bias=biases.landmarks(SIZE), **options)

    torch.compiler.reset()
    outputs = attend(query, key, value), torch.compile(attend, backend="aot_eager", fullgraph=True)(query, key, value)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(output.square().sum(), leaves) for output in outputs))
