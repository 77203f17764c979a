"""The contract of `regard.attention`; that every kernel agrees with the formula stands in test_agreement."""

import math

import pytest
import torch

import regard
from regard import biases, lenses, masks, scores
from regard.errors import ConfigurationError
from regard.kernels.validation import AttentionOptions

KERNELS = ["reference", "sdpa", "block_sparse", "tiled"]
DROPPING = ["reference", "tiled"]


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def whole(m: int = 5, n: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Query, key and value of two batches and three heads."""
    return rand(2, 3, m, 11), rand(2, 3, n, 11), rand(2, 3, n, 13)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_the_formula():
    query, key, value = whole()
    weights = (query @ key.mT / math.sqrt(11)).softmax(-1)
    close(regard.attention(query, key, value), weights @ value)
    close(regard.attention(query, key, value, scale=0.7), (0.7 * query @ key.mT).softmax(-1) @ value)


@pytest.mark.parametrize("kernel", KERNELS)
class TestLayouts:
    @pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 1, 3), (2, 3, 1, 5)])
    def test_any_leading_dims(self, kernel, leading):
        query, key, value = rand(*leading, 5, 4), rand(*leading, 7, 4), rand(*leading, 7, 6)
        expected = (query @ key.mT / 2).softmax(-1) @ value
        close(regard.attention(query, key, value, kernel=kernel), expected)
        causal = torch.ones(5, 7, dtype=torch.bool).tril(2)
        masked = (query @ key.mT / 2).masked_fill(~causal, -math.inf).softmax(-1) @ value
        close(regard.attention(query, key, value, mask=masks.causal(), kernel=kernel), masked)

    @pytest.mark.parametrize(("heads", "key_heads"), [(6, 3), (6, 2), (6, 1), (6, 6)])
    @pytest.mark.parametrize("batch", [(2,), (2, 3)])
    def test_groups_of_query_heads_share_a_key_head(self, kernel, heads, key_heads, batch):
        query, key, value = rand(*batch, heads, 5, 4), rand(*batch, key_heads, 7, 4), rand(*batch, key_heads, 7, 3)
        keys, values = (tensor.repeat_interleave(heads // key_heads, -3) for tensor in (key, value))
        close(
            regard.attention(query, key, value, kernel=kernel, mask=masks.causal()),
            regard.attention(query, keys, values, kernel=kernel, mask=masks.causal()),
        )

    def test_batches_broadcast(self, kernel):
        query, key, value = rand(2, 3, 5, 4), rand(1, 3, 7, 4), rand(2, 3, 7, 6)
        close(
            regard.attention(query, key, value, kernel=kernel),
            regard.attention(query, key.expand(2, 3, 7, 4), value, kernel=kernel),
        )

    @pytest.mark.parametrize("shape", [(0, 3, 5, 4), (2, 0, 5, 4), (2, 3, 0, 4), (0, 5, 4), (0, 4)])
    def test_empty_axes(self, kernel, shape):
        query = rand(*shape)
        assert regard.attention(query, query, query, kernel=kernel).shape == shape

    @pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)])
    def test_no_keys_give_zeros(self, kernel, leading):
        query, key = rand(*leading, 5, 4).requires_grad_(), rand(*leading, 0, 4)
        output = regard.attention(query, key, key, kernel=kernel)
        assert output.equal(torch.zeros(*leading, 5, 4))
        (gradient,) = torch.autograd.grad(output.sum(), query, allow_unused=True, materialize_grads=True)
        assert gradient.equal(torch.zeros_like(query))


@pytest.mark.parametrize("kernel", KERNELS)
class TestEmptyRowsAndPoison:
    def test_empty_rows_are_zero_and_have_no_gradient(self, kernel):
        tensors = [tensor.requires_grad_() for tensor in whole(3, 4)]
        keep = torch.tensor([[True] * 4, [False] * 4, [False, True, False, False]])
        output = regard.attention(*tensors, mask=keep, kernel=kernel)
        assert output[..., 1, :].equal(torch.zeros(2, 3, 13))
        for gradient in torch.autograd.grad(output[..., 1, :].sum(), tensors):
            assert gradient.equal(torch.zeros_like(gradient))

    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_what_is_masked_reaches_nothing(self, kernel, bad):
        clean = whole(5, 7)
        poisoned = [tensor.clone() for tensor in clean]
        poisoned[1][..., 5:, :], poisoned[2][..., 5:, :] = bad, bad
        runs = []
        for tensors in (clean, poisoned):
            tensors = [tensor.requires_grad_() for tensor in tensors]
            output = regard.attention(*tensors, mask=masks.padding(lengths=[5, 4]), kernel=kernel)
            runs.append([output, *torch.autograd.grad(output.square().sum(), tensors)])
        for one, other in zip(*runs, strict=True):
            close(one, other)

    def test_only_the_rows_that_see_nan_are_nan(self, kernel):
        query, key, value = whole(5, 5)
        expected = regard.attention(query, key, value, mask=masks.causal(), kernel=kernel)
        key[1, 2, 3, 0] = math.nan
        output = regard.attention(query, key, value, mask=masks.causal(), kernel=kernel)
        assert output[1, 2, 3:].isnan().all()
        output[1, 2, 3:] = expected[1, 2, 3:]
        close(output, expected)

    def test_nan_comes_through_a_weight_too_small_to_be_seen(self, kernel):
        query, key, value = (tensor.half() for tensor in whole(2, 3))
        value[0, 0, 1] = math.nan
        bias = torch.tensor([0.0, -200.0, 0.0]).half()
        for mask in (None, torch.ones(2, 3, dtype=torch.bool)):
            output = regard.attention(query, key, value, bias=bias, mask=mask, kernel=kernel)
            assert output[0, 0].isnan().all()
            assert output[0, 1:].isfinite().all()

    def test_a_bias_of_minus_infinity_leaves_a_row_empty(self, kernel):
        bias = torch.zeros(5, 7)
        bias[2] = -math.inf
        output = regard.attention(*whole(), bias=bias, kernel=kernel)
        assert output[..., 2, :].equal(torch.zeros(2, 3, 13))

    def test_masked_nan_reaches_no_parameter_of_a_score(self, kernel):
        score = scores.General(11, 11)
        query, key, value = whole()
        query[0] = math.nan
        regard.attention(
            query, key, value, score=score, mask=masks.padding(lengths=[0, 7]), kernel=kernel
        ).sum().backward()
        assert score.weight.grad is not None
        assert score.weight.grad.isfinite().all()
        assert score.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("kind", [scores.Additive, scores.Concat])
def test_masked_nan_reaches_no_parameter_of_an_additive_score(kind):
    score = kind(11, 11, 5)  # here, where the generator is seeded
    query, key, value = whole()
    key[..., 5:, :] = math.nan
    mask = masks.padding(lengths=[5, 3])
    output = regard.attention(query, key, value, score=score, mask=mask)
    gradients = torch.autograd.grad(output.sum(), list(score.parameters()))
    key[..., 5:, :] = 0.0
    clean = torch.autograd.grad(regard.attention(query, key, value, score=score, mask=mask).sum(), score.parameters())
    for one, other in zip(gradients, clean, strict=True):
        largest = float(other.abs().max())  # about the size of the terms that each element is a sum of
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6 * max(1.0, largest))


def test_nan_that_location_does_not_read_changes_nothing():
    query, key, value = whole()
    score = scores.Location(11, 9)
    expected = regard.attention(query, key, value, score=score, mask=masks.causal())
    assert regard.attention(query, key * math.nan, value, score=score, mask=masks.causal()).equal(expected)


class TestLse:
    def test_natural_log(self):
        query, key, value = whole()
        output, lse = regard.attention_with_lse(query, key, value)
        close(lse, (query @ key.mT / math.sqrt(11)).logsumexp(-1))
        close(output, regard.attention(query, key, value))
        assert lse.shape == (2, 3, 5)

    def test_minus_infinity_where_nothing_is_attended(self):
        _, lse = regard.attention_with_lse(*whole(3, 2), mask=masks.causal())
        assert lse[..., 0].eq(-math.inf).all()
        assert lse[..., 1:].isfinite().all()

    @pytest.mark.parametrize(
        ("dtype", "of_lse"),
        [
            (torch.bfloat16, torch.float32),
            (torch.float16, torch.float32),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        ],
    )
    def test_in_float32_at_least(self, dtype, of_lse):
        output, lse = regard.attention_with_lse(*(tensor.to(dtype) for tensor in whole()))
        assert (output.dtype, lse.dtype) == (dtype, of_lse)

    def test_gradients(self):
        query, key, value = (rand(1, 2, m, 3, dtype=torch.float64).requires_grad_() for m in (3, 4, 4))
        keep = torch.tensor([[True, True, False, True], [False] * 4, [True] * 4])

        def lse(query, key):
            return regard.attention_with_lse(query, key, value, mask=keep)[1][..., [0, 2]]

        assert torch.autograd.gradcheck(lse, (query, key))
        assert torch.autograd.gradgradcheck(lse, (query, key))

    def test_a_sink_counts(self):
        query, key, value = whole()
        sinks = rand(3)
        plain, lse = regard.attention_with_lse(query, key, value)
        output, with_sink = regard.attention_with_lse(query, key, value, sinks=sinks)
        close(with_sink, torch.logaddexp(lse, sinks[:, None]))
        close(output, plain * (lse - with_sink).exp()[..., None])

    def test_a_sink_alone(self):
        sinks = rand(3).requires_grad_()
        output, lse = regard.attention_with_lse(*whole(3, 2), mask=masks.causal(), sinks=sinks)
        assert output[..., 0, :].eq(0).all()
        close(lse[..., 0], sinks.expand(2, 3))
        (gradient,) = torch.autograd.grad(lse[..., 0].sum(), sinks)
        close(gradient, torch.full((3,), 2.0))


def test_softcap_comes_before_bias_and_mask():
    query, key, value = whole()
    bias = 5 * rand(5, 7)
    keep = torch.ones(5, 7, dtype=torch.bool).tril(2)
    logits = 1.5 * torch.tanh(query @ key.mT / math.sqrt(11) / 1.5) + bias
    expected = logits.masked_fill(~keep, -math.inf).softmax(-1) @ value
    close(regard.attention(query, key, value, softcap=1.5, bias=bias, mask=keep), expected)


def test_a_bias_is_added():
    query, key, value = whole()
    for shape in [(7,), (1, 7), (5, 1), (5, 7), (3, 5, 7), (2, 1, 5, 7), (2, 3, 1, 7)]:
        bias = rand(*shape)
        expected = (query @ key.mT / math.sqrt(11) + bias).softmax(-1) @ value
        close(regard.attention(query, key, value, bias=bias), expected)
        close(regard.attention(query, key, value, bias=biases.tensor(bias), kernel="reference"), expected)


class TestDropout:
    @pytest.mark.parametrize("kernel", DROPPING)
    def test_the_mean_over_seeds_is_the_output_without(self, kernel):
        query, key, value = rand(1, 1, 3, 4), rand(1, 1, 6, 4), rand(1, 1, 6, 2)
        many = [tensor.expand(4000, *tensor.shape[1:]) for tensor in (query, key, value)]
        dropped = regard.attention(*many, dropout_p=0.25, kernel=kernel)
        expected = regard.attention(query, key, value, kernel=kernel)
        error = dropped.std(0) / math.sqrt(4000)
        assert ((dropped.mean(0) - expected).abs() <= 5 * error).all()
        assert dropped.std(0).min() > 0.01

    @pytest.mark.parametrize("kernel", DROPPING)
    def test_the_fraction_of_dropped_weights(self, kernel):
        query, key = torch.zeros(100, 1, 10, 4), torch.zeros(100, 1, 40, 4)
        weights = regard.attention(query, key, torch.eye(40).expand(100, 1, 40, 40), dropout_p=0.3, kernel=kernel)
        dropped = weights == 0
        assert abs(dropped.float().mean() - 0.3) < 0.01
        close(weights[~dropped], torch.full_like(weights[~dropped], 1 / 40 / 0.7))

    def test_it_is_seeded_by_torch(self):
        tensors = whole()
        torch.manual_seed(5)
        one = regard.attention(*tensors, dropout_p=0.5)
        torch.manual_seed(5)
        assert regard.attention(*tensors, dropout_p=0.5).equal(one)
        assert not regard.attention(*tensors, dropout_p=0.5).equal(one)


def test_the_number_of_results_never_changes():
    tensors = whole()
    calls: list[AttentionOptions] = [
        {},
        {"sinks": rand(3)},
        {"dropout_p": 0.1},
        {"softcap": 1.0},
        {"mask": masks.causal()},
    ]
    for options in calls:
        assert isinstance(regard.attention(*tensors, **options), torch.Tensor)
        assert len(regard.attention_with_lse(*tensors, **options)) == 2


@pytest.mark.parametrize("sizes", [(2, 0, 3, 4), (0, 2, 3, 4), (0, 2, 0, 5), (0, 2, 4, 0), (0, 0, 0, 0), (2, 2, 3, 0)])
@pytest.mark.parametrize("masked", [False, True])
def test_nothing_can_be_looked_at(sizes, masked):
    batch, heads, queries, keys = sizes
    weights, spread = lenses.Weights(), lenses.Entropy()
    mask = masks.padding(lengths=torch.ones(batch, dtype=torch.int64)) & masks.window(2, 2) if masked else None
    tensors = rand(batch, heads, queries, 4), rand(batch, heads, keys, 4), rand(batch, heads, keys, 3)
    seen = regard.observe(*tensors, weights, spread, mask=mask)
    assert (seen.output.shape, seen[weights].shape) == ((batch, heads, queries, 3), sizes)
    assert (seen[spread] == 0).all()


def test_a_lens_that_was_not_looked_through_shows_nothing():
    seen = regard.observe(rand(3, 4), rand(3, 4), rand(3, 4), lenses.Entropy())
    assert torch.equal(seen[lenses.Entropy()], next(iter(seen.results.values())))  # one that equals it is it
    with pytest.raises(ConfigurationError, match=r"Received\(\) was not passed to `observe`, but Entropy\(\): pass it"):
        seen[lenses.Received()]
    with pytest.raises(ConfigurationError, match="was not passed to `observe`, but no lens"):
        regard.observe(rand(3, 4), rand(3, 4), rand(3, 4))[lenses.Entropy()]


def test_windows_with_a_bias_of_each_head_and_a_mask_of_each_window():
    """As in a Swin transformer: 49 tokens in each of many windows, some of whose rows are empty."""
    torch.manual_seed(0)
    windows, heads, tokens, dim = 37, 3, 49, 32
    query, key, value, above = (torch.randn(windows, heads, tokens, dim) for _ in range(4))
    table, keep = torch.randn(heads, tokens, tokens), torch.rand(windows, 1, tokens, tokens) < 0.6
    keep[5], keep[7, :, 3] = False, False

    def formula(dtype: torch.dtype) -> list[torch.Tensor]:
        q, k, v, bias = (each.to(dtype).requires_grad_() for each in (query, key, value, table))
        scores = q @ k.mT / dim**0.5 + bias
        weights = scores.masked_fill(~keep, -1e9).softmax(-1).where(keep, 0.0)
        output = weights @ v
        return [output.detach(), *torch.autograd.grad(output, (q, k, v, bias), above.to(dtype))]

    truth, plain = formula(torch.float64), formula(torch.float32)
    for kernel in (None, "reference", "sdpa", "tiled"):
        leaves = [each.clone().requires_grad_() for each in (query, key, value, table)]
        output = regard.attention(*leaves[:3], mask=keep, bias=leaves[3], kernel=kernel)
        found = [output.detach(), *torch.autograd.grad(output, leaves, above)]
        for has, one, other in zip(found, truth, plain, strict=True):
            assert (has - one).abs().max() <= 3 * (other - one).abs().max() + 1e-6
        with torch.no_grad():
            alone = regard.attention(query, key, value, mask=keep, bias=table, kernel=kernel)
        assert (alone - truth[0]).abs().max() <= 3 * (plain[0] - truth[0]).abs().max() + 1e-6
