"""Every kernel that can compute a problem gives what float64 gives, forward and backward, where float32 is delicate."""

import math

import pytest
import torch

import regard
from regard import lenses, masks, native
from regard.errors import ConfigurationError, KernelError
from regard.kernels.dispatch import KERNELS
from regard.scores import Additive, ScaledDot

BOTH = [(False, False), (False, True), (True, False), (True, True)]
NATIVE = "cpu_flash", "decode", "additive"
WAYS = [
    (kernel.name, variant)
    for kernel in KERNELS
    for variant in (native.variants() if kernel.name in NATIVE else ()) or (None,)
]


@pytest.fixture(params=WAYS, ids=lambda way: "-".join(filter(None, way)))
def kernel(request):
    """The name of each kernel, with each variant of native code that it may call."""
    name, variant = request.param
    if variant is None:
        yield name
    else:
        with native.using(variant):
            yield name


def attend(*tensors, kernel, **options):
    """Attention by a kernel, or the test is over where it does not compute such problems."""
    try:
        return regard.attention(*tensors, kernel=kernel, **options)
    except KernelError as error:
        pytest.skip(str(error))


def gradients(tensors, kernel, upstream=None, **options):
    """Output and the gradients of Σ upstream · output by each tensor, sinks among them."""
    tensors = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    named = dict(zip(("query", "key", "value", "sinks"), tensors, strict=False))
    try:
        output = regard.attention(**named, kernel=kernel, **options)
    except KernelError as error:
        pytest.skip(str(error))
    total = output.sum() if upstream is None else (output * upstream).sum()
    return [output.detach(), *torch.autograd.grad(total, tensors)]


def rand(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_float64(tensors):
    return [tensor.double() for tensor in tensors]


def close(results, expected, tolerance=1e-4):
    for one, other in zip(results, expected, strict=True):
        assert one.isfinite().all()
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


class TestSinks:
    @pytest.mark.parametrize(("queries", "keys"), [(5, 7), (2, 1100), (70, 130)])
    def test_a_sink_of_minus_infinity_is_none(self, kernel, queries, keys):
        tensors = rand(2, 4, queries, 8), rand(2, 2, keys, 8, seed=1), rand(2, 2, keys, 8, seed=2)
        sinks = torch.tensor([-math.inf, 0.5, -math.inf, -math.inf])
        keep = torch.rand(queries, keys, generator=torch.Generator().manual_seed(3)) > 0.3
        keep[1] = False
        results = gradients((*tensors, sinks), kernel, mask=keep)
        expected = gradients(in_float64((*tensors, sinks)), "reference", mask=keep)
        assert results[0][:, :, 1].eq(0).all()
        close(results, expected)

    def test_neither_keys_nor_sinks(self, kernel):
        tensors = rand(1, 2, 3, 4), rand(1, 2, 0, 4), rand(1, 2, 0, 4), torch.full((2,), -math.inf)
        for result in gradients(tensors, kernel):
            assert result.eq(0).all()


class TestScale:
    @pytest.mark.parametrize("scale", [0.0, -0.0, -0.7])
    @pytest.mark.parametrize("softcap", [None, 2.0])
    def test_scales_that_are_not_above_0(self, kernel, scale, softcap):
        tensors, upstream = [rand(2, 2, length, 8, seed=length) for length in (70, 90, 90)], rand(2, 2, 70, 8)
        options = {"scale": scale, "softcap": softcap}
        results = gradients(tensors, kernel, upstream, **options)
        close(results, gradients(in_float64(tensors), "reference", upstream, **options))

    @pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf])
    def test_a_scale_that_is_no_finite_number_is_refused(self, scale):
        with pytest.raises(ConfigurationError, match=f"scale is {scale}; it needs a finite number, or None for 1/√dim"):
            regard.attention(*[rand(1, 2, 3, 4)] * 3, scale=scale)
        with pytest.raises(ConfigurationError, match=f"scale is {scale}; ScaledDot needs a finite number"):
            ScaledDot(scale)


class TestSoftcap:
    @pytest.mark.parametrize("softcap", [1e-40, 1e-31, 1e31, 3.4e38])
    def test_a_softcap_that_overflows_is_refused(self, softcap):
        with pytest.raises(ConfigurationError, match=r"softcap is .*; it needs .* from 1e-30 to 1e\+30"):
            regard.attention(*[rand(1, 2, 3, 4)] * 3, softcap=softcap)

    @pytest.mark.parametrize("softcap", [1e-30, 1e30])
    def test_the_outermost_softcaps(self, kernel, softcap):
        tensors, upstream = [rand(1, 2, length, 8, seed=length) for length in (70, 90, 90)], rand(1, 2, 70, 8)
        results = gradients(tensors, kernel, upstream, softcap=softcap)
        close(results, gradients(in_float64(tensors), "reference", upstream, softcap=softcap))


class TestInfinity:
    """What the docstring of regard.attention says of a row that attends to NaN or infinity."""

    SHAPES = ((5, 40), (5, 100), (70, 100))

    @pytest.mark.parametrize(("queries", "keys"), SHAPES)
    @pytest.mark.parametrize(("masked", "gradient"), BOTH)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    def test_a_value_of_infinity_shows(self, kernel, queries, keys, masked, gradient, bad):
        query, key, value = rand(1, 2, queries, 8), rand(1, 2, keys, 8, seed=1), rand(1, 2, keys, 8, seed=2)
        value[:, :, 3, 0] = bad
        output = self.output(query, key, value, masked, gradient, kernel)
        assert not output[:, :, 1:, 0].isfinite().any()
        assert output[:, :, 1:, 1:].isfinite().all()
        assert not math.isnan(bad) or output[:, :, 1:, 0].isnan().all()

    @pytest.mark.parametrize(("queries", "keys"), SHAPES)
    @pytest.mark.parametrize(("masked", "gradient"), BOTH)
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_score_of_nan_or_infinity_is_nan(self, kernel, queries, keys, masked, gradient, bad):
        query, key, value = rand(1, 2, queries, 8).abs(), rand(1, 2, keys, 8, seed=1), rand(1, 2, keys, 8, seed=2)
        key[:, :, 3] = bad
        assert self.output(query, key, value, masked, gradient, kernel)[:, :, 1:].isnan().all()

    @pytest.mark.parametrize(("queries", "keys"), SHAPES)
    @pytest.mark.parametrize(("masked", "gradient"), BOTH)
    def test_a_score_of_minus_infinity_counts_for_nothing_or_is_nan(self, kernel, queries, keys, masked, gradient):
        query, key, value = rand(1, 2, queries, 8).abs(), rand(1, 2, keys, 8, seed=1), rand(1, 2, keys, 8, seed=2)
        there = torch.arange(keys) != 3
        expected = regard.attention(query, key[:, :, there], value[:, :, there], kernel="reference")
        key[:, :, 3] = -math.inf
        output = self.output(query, key, value, masked, gradient, kernel)
        bad = output.isnan()
        assert bad[:, :, 1:].all() or not bad.any()
        torch.testing.assert_close(output[~bad], expected[~bad], rtol=1e-4, atol=1e-5)

    def output(self, query, key, value, masked, gradient, kernel):
        """Row 0 attends to key 3 unless it is masked."""
        keep = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool)
        keep[0, 3] = False
        output = attend(query.requires_grad_(gradient), key, value, kernel=kernel, mask=keep if masked else None)
        assert not masked or output[:, :, 0].isfinite().all()
        return output.detach()


class TestHugeScores:
    """Scores beside which a float32 log-sum-exp cannot hold the sum of a row."""

    SIZES = 1e6, 1e7, 3e7, 1e8, 1e9

    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize("causal", [False, True])
    def test_weights_of_equal_keys_sum_to_1(self, kernel, size, causal):
        """Each gradient of a value is the sum of its weights; that of query and key is 0."""
        queries, keys, dim = (256, 256, 16) if causal else (7, 1100, 16)
        query, key = torch.ones(1, 2, queries, dim), torch.full((1, 2, keys, dim), size / dim)
        options = {"scale": 1.0, "mask": masks.causal() if causal else None}
        tensors = query, key, rand(1, 2, keys, 8)
        results = gradients(tensors, kernel, **options)
        expected = gradients(in_float64(tensors), "reference", **options)
        close((results[0], results[3]), (expected[0], expected[3]))
        assert math.isclose(results[3].sum().item(), 2 * queries * 8, rel_tol=1e-4)
        assert results[1].abs().max() <= 1e-4 * size
        assert results[2].isfinite().all()

    @pytest.mark.parametrize("size", [-1e7, 1e7])
    def test_a_bias(self, kernel, size):
        tensors, upstream = [rand(1, 2, length, 8, seed=length) for length in (70, 90, 90)], rand(1, 2, 70, 8)
        query, key, value = tensors
        options = {"bias": torch.full((70, 90), size)}
        results = gradients((0 * query, key, value), kernel, upstream, **options)
        close(results, gradients(in_float64((0 * query, key, value)), "reference", upstream, **options), 1e-3)

    def test_an_additive_score_with_sinks_and_dropout(self, kernel):
        score = Additive(query_dim=8, key_dim=8, hidden_dim=16)
        with torch.no_grad():
            for parameter in score.parameters():
                parameter.mul_(0.0)
            score.weight.fill_(1e6)
            query, key, value = (rand(1, 1, length, 8, seed=length) for length in (40, 90, 90))
        value.requires_grad_()
        bias = torch.full((40, 90), 1e8)
        output = attend(query, key, value, kernel=kernel, score=score, bias=bias, sinks=torch.tensor([1e8]))
        (gradient,) = torch.autograd.grad(output.sum(), value)
        torch.testing.assert_close(gradient, torch.full_like(gradient, 40 / 91), rtol=1e-4, atol=0)

    def test_rows_without_a_gradient_take_nothing_from_others(self, kernel):
        """A padded row whose bias is the smallest number, as transformers adds it, asks for no float64."""
        tensors = [rand(1, 2, 70, 8, seed=seed) for seed in range(3)]
        upstream, bias = rand(1, 2, 70, 8, seed=4), torch.zeros(70, 70)
        bias[5], upstream[:, :, 5] = torch.finfo(torch.float32).min, 0.0
        results = gradients(tensors, kernel, upstream, bias=bias)
        close(results, gradients(in_float64(tensors), "reference", upstream, bias=bias.double()))

    @pytest.mark.parametrize("size", SIZES)
    def test_lenses(self, kernel, size):
        query, key = torch.ones(1, 2, 70, 16), torch.full((1, 2, 130, 16), size / 16)
        seen = [lenses.Received(), lenses.Entropy(), lenses.TopK(3), lenses.Weights(), lenses.Weights(slice(3, 9))]
        try:
            shown = regard.observe(query, key, key, *seen, scale=1.0, kernel=kernel)
        except KernelError as error:
            pytest.skip(str(error))
        equal = torch.tensor(1 / 130)
        for values, expected in (
            (shown[seen[0]], equal * 70),
            (shown[seen[1]], equal.log().neg()),
            (shown[seen[2]].weights, equal),
            (shown[seen[3]], equal),
            (shown[seen[4]], equal),
        ):
            torch.testing.assert_close(values.double(), expected.double().expand_as(values), rtol=1e-4, atol=1e-6)


class TestLongRows:
    """Sums over very many keys of equal weights: they are made in two levels."""

    @pytest.mark.parametrize("queries", [1, 3, 100])
    def test_a_constant_stays(self, kernel, queries):
        if kernel == "sdpa" or (kernel in ("block_sparse", "reference") and queries == 1):
            pytest.skip("the sums are those of torch's own kernels")
        keys = 2**17
        query, key, value = torch.zeros(1, 1, queries, 8), torch.zeros(1, 1, keys, 8), torch.full((1, 1, keys, 8), 0.3)
        output = attend(query, key, value, kernel=kernel)
        torch.testing.assert_close(output, torch.full_like(output, 0.3), rtol=5e-5, atol=0)

    def test_an_additive_score(self, kernel):
        keys = 2**15
        query, key, value = torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, keys, 8), torch.full((1, 1, keys, 8), 0.3)
        output = attend(query, key, value, kernel=kernel, score=Additive(query_dim=8, key_dim=8, hidden_dim=4))
        torch.testing.assert_close(output, torch.full_like(output, 0.3), rtol=2e-5, atol=0)

    def test_gradients_over_many_queries(self, kernel):
        query, key, value = torch.zeros(1, 1, 2**17, 4), torch.zeros(1, 1, 70, 4), torch.full((1, 1, 70, 4), 0.3)
        if kernel in ("sdpa", "block_sparse"):
            pytest.skip("the sums are those of torch's own kernels")
        results = gradients((query, key, value), kernel)
        torch.testing.assert_close(results[3], torch.full_like(value, 2**17 / 70), rtol=5e-5, atol=0)
