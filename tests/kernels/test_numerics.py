"""Every kernel that can compute a problem gives what float64 gives, forward and backward, where float32 is delicate."""

import functools
import inspect
import math
import re
from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import pytest
import torch

import regard
from regard import biases, lenses, masks, native
from regard.core.problem import Problem
from regard.errors import ConfigurationError, KernelError
from regard.kernels.planning.choice import KERNELS
from regard.scores import Additive, ScaledDot

BOTH = [(False, False), (False, True), (True, False), (True, True)]
NATIVE = "cpu_flash", "decode", "additive"
WAYS = [
    (kernel.name, variant)
    for kernel in KERNELS
    for variant in (native.variants() if kernel.name in NATIVE else ()) or (None,)
]


def by_every_kernel(test: Callable) -> Callable:
    """One test that calls `test` with the name of each kernel, with each variant of native code that it may call.

    A kernel whose call ends in `pytest.skip` does not compute such problems; a general kernel always does. One test, as
    thousands that are skipped take longer than those that compute. Each error says in a note which kernel is wrong.
    """

    @functools.wraps(test)
    def test_all(*arguments, **parameters):
        computed, errors = set(), []
        for name, variant in WAYS:
            torch.default_generator.manual_seed(0)
            try:
                with native.using(variant) if variant else nullcontext():
                    test(*arguments, kernel=name, **parameters)
            except pytest.skip.Exception:
                continue
            except Exception as error:
                error.add_note(f"with the kernel {name!r}" + (f" and native code {variant!r}" if variant else ""))
                errors.append(error)
            computed.add(name)
        if errors:
            raise ExceptionGroup("wrong kernels", errors)
        assert computed & {"tiled", "reference"}

    signature = inspect.signature(test)
    others = [parameter for name, parameter in signature.parameters.items() if name != "kernel"]
    vars(test_all)["__signature__"] = signature.replace(parameters=others)
    return test_all


def attend(*tensors, kernel, **options):
    """Attention by a kernel, or the call is over where it does not compute such problems."""
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
    @by_every_kernel
    def test_a_sink_of_minus_infinity_is_none(self, kernel, queries, keys):
        tensors = rand(2, 4, queries, 8), rand(2, 2, keys, 8, seed=1), rand(2, 2, keys, 8, seed=2)
        sinks = torch.tensor([-math.inf, 0.5, -math.inf, -math.inf])
        keep = torch.rand(queries, keys, generator=torch.Generator().manual_seed(3)) > 0.3
        keep[1] = False
        results = gradients((*tensors, sinks), kernel, mask=keep)
        expected = gradients(in_float64((*tensors, sinks)), "reference", mask=keep)
        assert results[0][:, :, 1].eq(0).all()
        close(results, expected)

    @by_every_kernel
    def test_neither_keys_nor_sinks(self, kernel):
        tensors = rand(1, 2, 3, 4), rand(1, 2, 0, 4), rand(1, 2, 0, 4), torch.full((2,), -math.inf)
        for result in gradients(tensors, kernel):
            assert result.eq(0).all()


class TestScale:
    @pytest.mark.parametrize("scale", [0.0, -0.0, -0.7])
    @pytest.mark.parametrize("softcap", [None, 2.0])
    @by_every_kernel
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

    @pytest.mark.parametrize("scale", ["0.5", [0.5], 0.5j, np.array([0.5, 0.5])])
    def test_a_scale_that_is_no_number_is_refused(self, scale):
        refused = f"^scale is {re.escape(repr(scale))}; it needs a finite number"
        for length in (3, 40):  # of small calls, those of fewer queries are not memoized
            with pytest.raises(ConfigurationError, match=refused):
                regard.attention(*[rand(1, 2, length, 4)] * 3, scale=scale)
        with pytest.raises(ConfigurationError, match=refused):
            regard.linear_attention(*[rand(1, 2, 3, 4)] * 3, scale=scale)
        with pytest.raises(ConfigurationError, match="; ScaledDot needs a finite number"):
            ScaledDot(scale)

    @pytest.mark.parametrize("scale", [torch.tensor(0.5), np.float32(0.5)])
    def test_a_scale_may_be_a_number_of_torch_or_numpy(self, scale):
        tensors = [rand(1, 2, 40, 4, seed=number) for number in range(3)]
        close(regard.attention(*tensors, scale=scale), regard.attention(*tensors, scale=0.5))


class TestSoftcap:
    @pytest.mark.parametrize("softcap", [1e-40, 1e-31, 1e31, 3.4e38])
    def test_a_softcap_that_overflows_is_refused(self, softcap):
        with pytest.raises(ConfigurationError, match=r"softcap is .*; it needs .* from 1e-30 to 1e\+30"):
            regard.attention(*[rand(1, 2, 3, 4)] * 3, softcap=softcap)

    @pytest.mark.parametrize("softcap", [1e-30, 1e30])
    @by_every_kernel
    def test_the_outermost_softcaps(self, kernel, softcap):
        tensors, upstream = [rand(1, 2, length, 8, seed=length) for length in (70, 90, 90)], rand(1, 2, 70, 8)
        results = gradients(tensors, kernel, upstream, softcap=softcap)
        close(results, gradients(in_float64(tensors), "reference", upstream, softcap=softcap))


class TestMaskedNan:
    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    @pytest.mark.parametrize("where", [1, 2])
    @pytest.mark.parametrize("trained", ["weight", "bias", "sinks"])
    @by_every_kernel
    def test_a_parameter_trained_alone(self, kernel, trained, where, bad):
        """The gradient of a parameter, where query, key and value have none."""
        tensors = [rand(2, 2, length, 8, seed=seed) for seed, length in enumerate((5, 70, 70))]
        tensors[where][:, :, 3] = bad
        keep = torch.ones(5, 70, dtype=torch.bool)
        keep[:, 3] = False
        parameter, options = torch.zeros(2), {}
        if trained == "weight":
            options["score"] = Additive(8, 8, 4)
            for name, each in options["score"].named_parameters():
                parameter = each if name == "weight" else parameter
                each.requires_grad_(name == "weight")
        elif trained == "bias":
            parameter = options["bias"] = torch.zeros(5, 70)
        else:
            options["sinks"] = parameter
        parameter.requires_grad_()
        output = attend(*tensors, kernel=kernel, mask=keep, **options)
        (gradient,) = torch.autograd.grad((output * rand(*output.shape, seed=3)).sum(), parameter)
        assert gradient.isfinite().all()
        assert gradient.any()


class TestInfinity:
    """What the docstring of regard.attention says of a row that attends to NaN or infinity."""

    SHAPES = ((5, 40), (5, 100), (70, 100))

    @pytest.mark.parametrize(("queries", "keys"), SHAPES)
    @pytest.mark.parametrize(("masked", "gradient"), BOTH)
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @by_every_kernel
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
    @by_every_kernel
    def test_a_score_of_nan_or_infinity_is_nan(self, kernel, queries, keys, masked, gradient, bad):
        query, key, value = rand(1, 2, queries, 8).abs(), rand(1, 2, keys, 8, seed=1), rand(1, 2, keys, 8, seed=2)
        key[:, :, 3] = bad
        assert self.output(query, key, value, masked, gradient, kernel)[:, :, 1:].isnan().all()

    @pytest.mark.parametrize(("queries", "keys"), SHAPES)
    @pytest.mark.parametrize(("masked", "gradient"), BOTH)
    @by_every_kernel
    def test_a_score_of_minus_infinity_counts_for_nothing_or_is_nan(self, kernel, queries, keys, masked, gradient):
        query, key, value = rand(1, 2, queries, 8).abs(), rand(1, 2, keys, 8, seed=1), rand(1, 2, keys, 8, seed=2)
        there = torch.arange(keys) != 3
        expected = regard.attention(query, key[:, :, there], value[:, :, there], kernel="reference")
        key[:, :, 3] = -math.inf
        output = self.output(query, key, value, masked, gradient, kernel)
        bad = output.isnan()
        assert bad[:, :, 1:].all() or not bad.any()
        torch.testing.assert_close(output[~bad], expected[~bad], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(("queries", "keys"), SHAPES)
    @pytest.mark.parametrize("masked", [False, True])
    @pytest.mark.parametrize("where", ["query", "key"])
    @pytest.mark.parametrize("score", ["softcap", "additive"])
    @pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
    @by_every_kernel
    def test_infinity_under_a_tanh_is_nan(self, kernel, queries, keys, masked, where, score, bad):
        """A tanh would make infinity a finite score; gradients are those of the other rows."""
        query, key, value = rand(1, 2, queries, 8), rand(1, 2, keys, 8, seed=1), rand(1, 2, keys, 8, seed=2)
        keep = torch.ones(queries, keys, dtype=torch.bool)
        keep[0, 3] = False
        options = {"softcap": 2.0} if score == "softcap" else {"score": Additive(8, 8, 4)}
        (query[:, :, 1] if where == "query" else key[:, :, 3])[..., 5] = bad
        rows = slice(1, 2) if where == "query" else slice(1 if masked else 0, None)
        tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
        output = attend(*tensors, kernel=kernel, mask=keep if masked else None, **options)
        shown = torch.zeros(queries, dtype=torch.bool)
        shown[rows] = True
        assert output[:, :, shown].isnan().all()
        assert output[:, :, ~shown].isfinite().all()
        for gradient in torch.autograd.grad(output[:, :, ~shown].sum(), tensors):
            assert gradient.isfinite().all()

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
    @by_every_kernel
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
    @by_every_kernel
    def test_a_bias(self, kernel, size):
        tensors, upstream = [rand(1, 2, length, 8, seed=length) for length in (70, 90, 90)], rand(1, 2, 70, 8)
        query, key, value = tensors
        options = {"bias": torch.full((70, 90), size)}
        results = gradients((0 * query, key, value), kernel, upstream, **options)
        close(results, gradients(in_float64((0 * query, key, value)), "reference", upstream, **options), 1e-3)

    @by_every_kernel
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

    @by_every_kernel
    def test_rows_without_a_gradient_take_nothing_from_others(self, kernel):
        """A padded row whose bias is the smallest number, as transformers adds it, asks for no float64."""
        tensors = [rand(1, 2, 70, 8, seed=seed) for seed in range(3)]
        upstream, bias = rand(1, 2, 70, 8, seed=4), torch.zeros(70, 70)
        bias[5], upstream[:, :, 5] = torch.finfo(torch.float32).min, 0.0
        results = gradients(tensors, kernel, upstream, bias=bias)
        close(results, gradients(in_float64(tensors), "reference", upstream, bias=bias.double()))

    @pytest.mark.parametrize("queries", [9, 70])
    @pytest.mark.parametrize("by", ["query", "bias"])
    @pytest.mark.parametrize(
        "feature", ["plain", "bias", "alibi", "sinks", "dropout", "softcap", "mask", "causal", "3d"]
    )
    @by_every_kernel
    def test_a_few_rows(self, kernel, feature, by, queries):
        """Some rows of one batch have huge scores: each tensor has its gradient from these and from the others."""
        results = []
        for dtype, name in ((torch.float32, kernel), (torch.float64, "reference")):
            sizes = (2, 4, queries, 8), (2, 2, 90, 8), (1, 2, 90, 6)
            tensors = [rand(*size, seed=seed).to(dtype) for seed, size in enumerate(sizes)]
            if feature == "3d":
                tensors = [tensor[:, 0] for tensor in tensors]
            options = self.feature(feature, queries, dtype)
            trained = [options["sinks"]] if feature == "sinks" else []
            if by == "query":
                tensors[0][1, ..., 2:5, :] *= 1e6
            else:
                huge = torch.zeros(2, *(() if feature == "3d" else (1,)), queries, 1, dtype=dtype)
                huge[1, ..., 2:5, :], huge[1, ..., 7, :] = 1e7, -3e38
                options["bias"] = biases.tensor(huge) + options["bias"] if "bias" in options else biases.tensor(huge)
            trained += [] if "bias" not in options or feature == "plain" else list(options["bias"].parameters())
            leaves = [tensor.requires_grad_() for tensor in (*tensors, *trained)]
            torch.manual_seed(0)  # the same weights are dropped
            if by == "bias" and kernel == "reference":
                pytest.skip("autograd differentiates the scores that float32 rounded")
            try:
                output, lse = regard.attention_with_lse(*tensors, kernel=name, **options)
            except KernelError as error:
                pytest.skip(str(error))
            upstream, above = rand(*output.shape, seed=5).to(dtype), rand(*lse.shape, seed=6).to(dtype)
            results.append(torch.autograd.grad((output * upstream).sum() + (lse * above).sum(), leaves))
        for one, other in zip(*results, strict=True):
            scale = max(other.abs().max().item(), 1.0)
            torch.testing.assert_close(one.double() / scale, other.double() / scale, rtol=1e-4, atol=1e-5)

    @staticmethod
    def feature(name, queries, dtype):
        keep = torch.rand(2, 1, queries, 90, generator=torch.Generator().manual_seed(3)) > 0.3
        return {
            "bias": {"bias": biases.tensor(rand(4, queries, 90).to(dtype))},
            "alibi": {"bias": biases.alibi(4)},
            "sinks": {"sinks": torch.tensor([0.5, 1e7, -1.0, 0.0], dtype=dtype)},
            "dropout": {"dropout_p": 0.4},
            "softcap": {"softcap": 3.0, "mask": keep},
            "mask": {"mask": keep},
            "causal": {"mask": masks.causal() & masks.window(40, 0)},
        }.get(name, {})

    @by_every_kernel
    def test_a_huge_sink_without_keys(self, kernel):
        tensors = rand(1, 2, 3, 4), rand(1, 2, 0, 4), rand(1, 2, 0, 4), torch.tensor([1e7, 0.5])
        for result in gradients(tensors, kernel):
            assert result.eq(0).all()

    def test_other_rows_stay_in_float32(self, monkeypatch):
        """The work in float64 is that of the rows that need it."""
        rows, complete = [], Problem.complete_scores

        def counted(problem, scores, grid):
            rows.append(scores.shape[-2])
            return complete(problem, scores, grid)

        monkeypatch.setattr(Problem, "complete_scores", counted)
        query, key, value = (rand(2, 2, 300, 8, seed=seed).requires_grad_() for seed in range(3))
        bias = torch.zeros(2, 1, 300, 300)
        bias[0, :, 290:], bias[1, :, 295:] = torch.finfo(torch.float32).min, torch.finfo(torch.float32).min
        regard.attention(query, key, value, bias=bias, kernel="block_sparse").sum().backward()
        assert rows == [10]

    @pytest.mark.parametrize("size", SIZES)
    @by_every_kernel
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


BY_PRODUCTS = ("reference", "sdpa", "block_sparse")
"""The kernels that sum over keys by torch's own products."""


class TestLargeScores:
    @by_every_kernel
    def test_the_weights_of_the_backward_pass_are_off_by_one_rounding_of_the_log_sum_exp(self, kernel):
        """They are exp(score - lse), and float32 numbers from 4,096 to 8,192 are 2⁻¹¹ apart."""
        query, ones = torch.linspace(4100, 8180, 400).reshape(400, 1, 1, 1), torch.ones(400, 1, 3, 1)
        _, _, _, weights = gradients((query, ones, ones), kernel, scale=1.0)
        assert (weights.sum(2) - 1).abs().max() < 1.1 * 2**-12


def error_of_product(terms: int, rows: int = 1) -> float:
    """The relative error of torch's own product over equal terms: MKL sums in blocks on some processors only."""
    products = torch.full((rows, terms), 1 / terms) @ torch.full((terms, 8), 0.3)
    return float((products / 0.3 - 1).abs().max())


class TestLongRows:
    """Sums over very many keys of equal weights: they are made in two levels, but those of torch's own products."""

    @pytest.mark.parametrize("queries", [1, 3, 100])
    @by_every_kernel
    def test_a_constant_stays(self, kernel, queries):
        keys = 2**17
        query, key, value = torch.zeros(1, 1, queries, 8), torch.zeros(1, 1, keys, 8), torch.full((1, 1, keys, 8), 0.3)
        output = attend(query, key, value, kernel=kernel)
        rtol = 5e-5 + 2 * error_of_product(keys, queries) * (kernel in BY_PRODUCTS)
        torch.testing.assert_close(output, torch.full_like(output, 0.3), rtol=rtol, atol=0)

    @pytest.mark.parametrize("group", [1, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("feature", ["plain", "mask", "bias", "window", "dropout", "3d"])
    @by_every_kernel
    def test_a_single_row(self, kernel, feature, dtype, group):
        keys = 5003
        tensors = rand(2, 2 * group, 1, 8), rand(2, 2, keys, 8, seed=1), rand(2, 2, keys, 6, seed=2)
        if feature == "3d":
            tensors = [tensor[:, 0] for tensor in tensors]
        keep = torch.rand(2, 1, 1, keys, generator=torch.Generator().manual_seed(3)) > 0.3
        options = {
            "mask": {"mask": keep},
            "bias": {"bias": rand(2 * group, 1, keys)},
            "window": {"mask": masks.causal() & masks.window(4500, 0), "query_positions": range(4900, 4901)},
            "dropout": {"dropout_p": 0.5},
        }.get(feature, {})
        tensors = [tensor.to(dtype) for tensor in tensors]
        torch.manual_seed(0)
        output = attend(*tensors, kernel=kernel, **options)
        torch.manual_seed(0)
        expected = regard.attention(*in_float64(tensors), kernel="tiled", **options)
        assert output.dtype == dtype
        tolerance = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)

    @by_every_kernel
    def test_an_additive_score(self, kernel):
        keys = 2**15
        query, key, value = torch.zeros(1, 1, 3, 8), torch.zeros(1, 1, keys, 8), torch.full((1, 1, keys, 8), 0.3)
        output = attend(query, key, value, kernel=kernel, score=Additive(query_dim=8, key_dim=8, hidden_dim=4))
        rtol = 2e-5 + 2 * error_of_product(keys, 3) * (kernel in BY_PRODUCTS)
        torch.testing.assert_close(output, torch.full_like(output, 0.3), rtol=rtol, atol=0)

    @by_every_kernel
    def test_gradients_over_many_queries(self, kernel):
        query, key, value = torch.zeros(1, 1, 2**17, 4), torch.zeros(1, 1, 70, 4), torch.full((1, 1, 70, 4), 0.3)
        if kernel in ("sdpa", "block_sparse"):
            pytest.skip("the sums are those of torch's own kernels")
        results = gradients((query, key, value), kernel)
        rtol = 5e-5 + 2 * error_of_product(2**17, 70) * (kernel in BY_PRODUCTS)
        torch.testing.assert_close(results[3], torch.full_like(value, 2**17 / 70), rtol=rtol, atol=0)
