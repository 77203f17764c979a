"""Which weights are dropped: a known function of the seed, even, independent, and the same wherever it is asked."""

import itertools

import pytest
import torch

import regard
from regard import biases, masks, scores
from regard.core.dropout import Dropout
from regard.kernels.tiled import TiledKernel
from regard.testing import dropout_keeps

SHAPE = (2, 3, 64, 128)
ALL = slice(None)


def pattern(seed: int = 0, probability: float = 0.5, shape: tuple[int, int, int, int] = SHAPE) -> torch.Tensor:
    return Dropout(probability, torch.tensor(seed)).dropout_mask(*places(shape))


def places(shape: tuple[int, int, int, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of heads, and positions of queries and keys that both begin at 0."""
    batch, heads, queries, keys = shape
    return torch.arange(batch * heads).view(batch, heads, 1), torch.arange(queries), torch.arange(keys)


def correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1].item()


def sigmas(count: int) -> float:
    """Five standard deviations of the correlation of that many independent pairs."""
    return 5 / count**0.5


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 0x1234_5678_9ABC_DEF0])
@pytest.mark.parametrize("probability", [0.1, 0.5, 0.999, 1e-9])
def test_it_is_the_function_that_is_written_down(seed, probability):
    expected = [
        dropout_keeps(seed, head, query, key, probability)
        for head in range(6)
        for query in range(5)
        for key in range(7)
    ]
    assert pattern(seed, probability, (2, 3, 5, 7)).equal(torch.tensor(expected).view(2, 3, 5, 7).float())


@pytest.mark.parametrize("probability", [0.05, 0.1, 0.3, 0.5, 0.9])
def test_the_share_that_is_dropped(probability):
    dropped = torch.stack([1 - pattern(seed, probability) for seed in range(8)])
    deviation = (probability * (1 - probability) / dropped.numel()) ** 0.5
    assert abs(dropped.mean().item() - probability) < 5 * deviation
    each = (probability * (1 - probability)) ** 0.5
    for axis, count in ((-1, 128), (-2, 64)):  # rows and columns too
        assert (dropped.mean(axis) - probability).abs().max() < 6 * each / count**0.5


def test_the_shares_of_rows_scatter_as_chance_does():
    """Neither all alike, which a pattern would be, nor further apart than chance."""
    shares = torch.stack([pattern(seed).mean(-1) for seed in range(16)])
    variance = 0.25 / SHAPE[-1]
    assert shares.var().item() == pytest.approx(variance, rel=0.1)


@pytest.mark.parametrize("axis", [0, 1, 2, 3], ids=["batches", "heads", "rows", "columns"])
@pytest.mark.parametrize("apart", [1, 2, 3, 16])
def test_neighbours_are_independent(axis, apart):
    if apart >= SHAPE[axis]:
        pytest.skip("there are not so many")
    one = pattern().narrow(axis, 0, SHAPE[axis] - apart)
    other = pattern().narrow(axis, apart, SHAPE[axis] - apart)
    assert abs(correlation(one, other)) < sigmas(one.numel())


def test_diagonals_are_independent():
    square = pattern()[..., :64]
    for down, right in ((1, 1), (1, -1), (2, 1)):
        other = square.roll((down, right), (-2, -1))
        assert abs(correlation(square, other)) < sigmas(square.numel())


def test_four_corners_of_a_rectangle_are_independent():
    """A sum of a number of the row and one of the column alone would show here."""
    signs = pattern() * 2 - 1
    for down, right in itertools.product((1, 2, 7), repeat=2):
        corners = signs[..., :-down, :-right] * signs[..., down:, :-right] * signs[..., :-down, right:]
        product = corners * signs[..., down:, right:]
        assert abs(product.mean().item()) < sigmas(product.numel())


@pytest.mark.parametrize("other", [1, -1, 2, 3, 64, 2**32, 2**62])
def test_seeds_are_independent(other):
    assert abs(correlation(pattern(0), pattern(other))) < sigmas(pattern().numel())


def test_the_same_in_any_tile():
    whole, dropout = pattern(5, 0.3), Dropout(0.3, torch.tensor(5))
    for batch, rows, columns in ((slice(1, 2), slice(3, 9), slice(100, 128)), (ALL, slice(63, 64), slice(0, 1))):
        heads, queries, keys = places(SHAPE)
        assert dropout.dropout_mask(heads[batch], queries[rows], keys[columns]).equal(whole[batch, :, rows, columns])


def whole_call(kernel: str, **options) -> torch.Tensor:
    torch.manual_seed(3)
    query = torch.randn(2, 3, 70, 8, generator=torch.Generator().manual_seed(1))
    return regard.attention(query, query, query, mask=masks.causal(), dropout_p=0.4, kernel=kernel, **options)


def test_the_same_by_every_kernel_and_tile():
    torch.testing.assert_close(whole_call("tiled"), whole_call("reference"))
    score = scores.Additive(8, 8, 5)
    expected = whole_call("reference", score=score)
    torch.testing.assert_close(whole_call("tiled", score=score), expected)
    torch.manual_seed(3)
    query = torch.randn(2, 3, 70, 8, generator=torch.Generator().manual_seed(1))
    problem = regard.explain(query, query, query, mask=masks.causal(), dropout_p=0.4).problem
    reference = TiledKernel().run(problem).output
    for tile in (2**10, 2**13, 2**16):
        torch.testing.assert_close(TiledKernel(tile).run(problem).output, reference)
    torch.manual_seed(3)
    short = regard.explain(*[query[:, :, :19]] * 3, mask=masks.causal(), dropout_p=0.4).problem
    torch.testing.assert_close(TiledKernel(6).run(short).output, TiledKernel().run(short).output)


def test_each_call_draws_anew_and_a_seed_repeats_it():
    query = torch.randn(1, 1, 9, 8)
    torch.manual_seed(1)
    first, second = (regard.attention(query, query, query, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert first.equal(regard.attention(query, query, query, dropout_p=0.5))
    assert not first.equal(second)


def test_backward_drops_what_forward_dropped():
    """With values of ones below each other, a weight that is dropped gives its value no gradient."""
    query = torch.zeros(1, 1, 1, 4)
    value = torch.eye(50)[None, None].requires_grad_()
    key = torch.zeros(1, 1, 50, 4)
    for kernel in ("tiled", "reference"):
        output = regard.attention(query, key, value, dropout_p=0.5, kernel=kernel)
        (gradient,) = torch.autograd.grad(output.sum(), value)
        dropped = output[0, 0, 0] == 0
        assert 10 < int(dropped.sum()) < 40
        assert (gradient[0, 0].sum(-1) == 0).equal(dropped)
        torch.testing.assert_close(output[0, 0, 0][~dropped], torch.full((50 - int(dropped.sum()),), 1 / 25))


def test_the_mean_over_many_seeds_is_the_output_without_dropout():
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    expected = regard.attention(query, key, key)
    outputs = torch.stack([regard.attention(query, key, key, dropout_p=0.3, kernel="tiled") for _ in range(2000)])
    error = outputs.std(0) / 2000**0.5
    assert ((outputs.mean(0) - expected).abs() < 5 * error).all()


def test_the_log_sum_exp_has_no_dropout():
    query, key = torch.randn(1, 2, 5, 8), torch.randn(1, 2, 7, 8)
    options = {"mask": masks.window(before=3), "bias": biases.alibi(2)}
    expected = regard.attention_with_lse(query, key, key, kernel="reference", **options)[1]
    for kernel in ("tiled", "reference"):
        actual = regard.attention_with_lse(query, key, key, dropout_p=0.5, kernel=kernel, **options)[1]
        torch.testing.assert_close(actual, expected)
