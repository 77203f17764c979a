"""The suite finds wrong kernels: each has one fault that a person might make."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from regard import biases, masks
from regard.core.problem import Problem
from regard.core.score_forms import AdditivePairs, DotPairs
from regard.kernels import Cost, Kernel, Result
from regard.kernels.nan_safety import zero_nonfinite_inputs
from regard.kernels.reference import ReferenceKernel
from regard.testing import SOFTMAX, Case, Oracle, assert_agrees, cases, long_cases, suite


class Wrong:
    """The reference, but for one thing."""

    name = "wrong"

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def cost(self, problem: Problem) -> Cost:
        return ReferenceKernel().cost(problem)

    def run(self, problem: Problem) -> Result:
        return ReferenceKernel().run(problem)


class ByHand(Wrong):
    """The formula with nothing done about empty rows or NaN: what a first attempt looks like."""

    def run(self, problem: Problem) -> Result:
        scores = problem.scores()
        value = problem.value.to(scores.dtype)
        group = scores.shape[-3] // value.shape[-3] if problem.heads else 1
        value = value.repeat_interleave(group, -3) if problem.heads else value
        output = (scores.softmax(-1) @ value).to(problem.value.dtype)
        return Result(output, scores.logsumexp(-1))


class MaskOffByOne(Wrong):
    def run(self, problem: Problem) -> Result:
        positions = problem.grid().query_positions + 1
        return ReferenceKernel().run(replace(problem, query_positions=positions))


class AlignedToTheStart(Wrong):
    def run(self, problem: Problem) -> Result:
        if problem.query_positions is None:
            problem = replace(problem, query_positions=torch.arange(problem.queries))
        return ReferenceKernel().run(problem)


class NoScale(Wrong):
    def run(self, problem: Problem) -> Result:
        if isinstance(problem.pairs, DotPairs):
            problem = replace(problem, pairs=replace(problem.pairs, scale=1.0))
        return ReferenceKernel().run(problem)


class NoTanh(Wrong):
    def run(self, problem: Problem) -> Result:
        pairs = problem.pairs
        if isinstance(pairs, AdditivePairs):
            problem = replace(problem, pairs=replace(pairs, query=pairs.query * 1e-3, key=pairs.key * 1e-3))
        return ReferenceKernel().run(problem)


class GroupsInterleaved(Wrong):
    """Query head h meets key head h modulo the number of key heads."""

    def run(self, problem: Problem) -> Result:
        if problem.heads:
            heads, key_heads = problem.pairs.query.shape[-3], problem.value.shape[-3]
            order = [head % key_heads for head in range(heads)]
            pairs = replace(problem.pairs, key=problem.pairs.key[..., order, :, :])
            problem = replace(problem, pairs=pairs, value=problem.value[..., order, :, :])
        return ReferenceKernel().run(problem)


class NoSinks(Wrong):
    def run(self, problem: Problem) -> Result:
        return ReferenceKernel().run(replace(problem, sinks=None))


class CapAfterBias(Wrong):
    def run(self, problem: Problem) -> Result:
        if problem.softcap is None or problem.bias is None:
            return ReferenceKernel().run(problem)
        capped = problem.softcap * torch.tanh(replace(problem, mask=None, softcap=None).scores() / problem.softcap)
        keep = problem.keep(problem.grid())
        if keep is not None:
            capped = capped.masked_fill(~keep, -torch.inf)
        scores = torch.cat([capped, capped.new_full((*capped.shape[:-1], 1), -1e9)], -1)
        value = torch.nn.functional.pad(problem.value, (0, 0, 0, 1)).to(scores.dtype)
        value = value.repeat_interleave(scores.shape[-3] // value.shape[-3], -3) if problem.heads else value
        return Result((scores.softmax(-1) @ value).to(problem.value.dtype), scores.logsumexp(-1))


class NoGradientForBias(Wrong):
    def run(self, problem: Problem) -> Result:
        bias = problem.bias_values(problem.grid())
        if bias is None:
            return ReferenceKernel().run(problem)
        return ReferenceKernel().run(replace(problem, bias=biases.tensor(bias.detach())))


class HalfGradient(Wrong):
    """The right output, half of value's gradient."""

    def run(self, problem: Problem) -> Result:
        value = problem.value
        return ReferenceKernel().run(replace(problem, value=value.detach() / 2 + value / 2))


class DropsOthers(Wrong):
    """Drops as many weights, but not those of the seed."""

    def run(self, problem: Problem) -> Result:
        if problem.dropout is not None:
            problem = replace(problem, dropout=replace(problem.dropout, seed=problem.dropout.seed + 1))
        return ReferenceKernel().run(problem)


class DropsWithoutScale(Wrong):
    def run(self, problem: Problem) -> Result:
        result = ReferenceKernel().run(problem)
        share = 1.0 if problem.dropout is None else 1.0 - problem.dropout.probability
        return Result(result.output * share, result.lse)


class BiasTransposed(Wrong):
    """A bias by distance with before and after taken for each other."""

    def run(self, problem: Problem) -> Result:
        if isinstance(problem.bias, biases.RelativeBias):
            at = problem.grid()
            problem = replace(problem, query_positions=-at.query_positions, key_positions=-at.key_positions, mask=None)
        return ReferenceKernel().run(problem)


class ForgetsLastKeys(Wrong):
    """Keys beyond the last whole tile are left out."""

    def run(self, problem: Problem) -> Result:
        whole = problem.keys // 64 * 64
        if whole and problem.mask is None and problem.bias is None and isinstance(problem.pairs, DotPairs):
            pairs = replace(problem.pairs, key=problem.pairs.key[..., :whole, :])
            problem = replace(problem, pairs=pairs, value=problem.value[..., :whole, :])
        return ReferenceKernel().run(problem)


class LogBaseTwo(Wrong):
    def run(self, problem: Problem) -> Result:
        result = ReferenceKernel().run(problem)
        return Result(result.output, None if result.lse is None else result.lse / 0.6931471805599453)


class ForgetsLse(Wrong):
    def run(self, problem: Problem) -> Result:
        return Result(ReferenceKernel().run(problem).output)


class InHalfPrecision(Wrong):
    def run(self, problem: Problem) -> Result:
        dtype = problem.value.dtype
        if dtype == torch.float64:
            return ReferenceKernel().run(problem)
        rounded = replace(problem, value=problem.value.bfloat16().to(dtype))
        return ReferenceKernel().run(rounded)


def caught(kernel: Kernel, among: Sequence[Case] | None = None, oracle: Oracle = SOFTMAX) -> str | None:
    """The first fault that the suite finds in a kernel."""
    for _, case in suite([kernel], strength=2, among=among):
        try:
            assert_agrees(kernel, case, oracle=oracle)
        except AssertionError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    "kernel",
    [
        MaskOffByOne,
        AlignedToTheStart,
        NoScale,
        NoTanh,
        GroupsInterleaved,
        NoSinks,
        CapAfterBias,
        NoGradientForBias,
        HalfGradient,
        LogBaseTwo,
        ForgetsLse,
        InHalfPrecision,
        DropsOthers,
        DropsWithoutScale,
        BiasTransposed,
        ByHand,
    ],
    ids=lambda kernel: kernel.__name__,
)
def test_the_suite_catches_a_wrong_kernel(kernel):
    assert str(caught(kernel())).startswith("kernel 'wrong' is wrong on the case ")


def test_a_right_kernel_passes_and_long_cases_catch_what_short_ones_do_not():
    # The reference wherever there are fewer than 64 keys: tests/test_agreement.py has all pairs of choices of that one.
    assert caught(ForgetsLastKeys(), cases(1)) is None
    assert str(caught(ForgetsLastKeys(), long_cases())).startswith("kernel 'wrong' is wrong on the case ")


def test_exponentials_that_are_not_exact_are_declared():
    class Coarse(Wrong):
        """Weights that are off by a millionth, up or down, as those of a fast exponential are."""

        def run(self, problem: Problem) -> Result:
            result = ReferenceKernel().run(problem)
            if problem.value.dtype != torch.float32:
                return result
            up_or_down = torch.randint(2, result.output.shape, generator=torch.Generator().manual_seed(1)) * 2 - 1
            return Result(result.output + (1.5e-6 * up_or_down * result.output).detach(), result.lse)

    class Declared(Coarse):
        exponential = 2.0**-20

    of_float32 = [case for case in cases(2) if case.dtype == "float32"]
    assert "is wrong on the case" in str(caught(Coarse(), of_float32))
    assert caught(Declared(), [case for case in cases(1) if case.dtype == "float32"]) is None


class ReluOracle(Oracle):
    """output = relu(S) V / Σ relu(S): no softmax, no sinks."""

    def weights(self, scores, sinks):
        positive = scores.relu()
        total = positive.sum(-1, keepdim=True)
        divisor = total.masked_fill(total == 0, 1.0)
        return positive / divisor, divisor.log().masked_fill(total == 0, -torch.inf).squeeze(-1)


class ReluAttention(Wrong):
    """The same on the library's problems, in float32 at least."""

    name = "relu"

    def why_not(self, problem: Problem) -> list[str]:
        return [] if problem.sinks is None else ["sinks are logits of a softmax"]

    def run(self, problem: Problem) -> Result:
        problem = zero_nonfinite_inputs(problem)
        scores, value = problem.scores(), problem.value
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        positive = self.positive(scores)
        total = positive.sum(-1, keepdim=True)
        divisor = total.masked_fill(total == 0, 1.0)
        weights = positive / divisor
        if problem.dropout is not None:
            kept = problem.dropout.dropout_mask(*problem.dropout_indices(problem.grid()))
            weights = weights * kept.view(weights.shape) / (1 - problem.dropout.probability)
        value = value.to(weights.dtype)
        value = value.repeat_interleave(scores.shape[-3] // value.shape[-3], -3) if problem.heads else value
        lse = divisor.log().masked_fill(total == 0, -torch.inf).squeeze(-1)
        return Result((weights @ value).to(problem.value.dtype), lse)

    def positive(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.relu()


class SoftplusAttention(ReluAttention):
    def positive(self, scores: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softplus(scores)


def test_another_normalizer_is_held_to_its_own_oracle():
    clean = [case for case in cases(2) if case.poison == "clean"]
    relu = ReluOracle()
    each_choice = [replace(case, poison="clean") for case in cases(1)]  # pairs of them: tests/core/test_normalizer.py
    assert caught(ReluAttention(), each_choice, relu) is None
    assert "kernel 'relu' is wrong on the case" in str(caught(SoftplusAttention(), clean, relu))
    assert "kernel 'relu' is wrong on the case" in str(caught(ReluAttention(), clean))


@pytest.mark.parametrize(
    ("kernel", "case", "fault"),
    [
        (ByHand(), Case(mask="nothing"), "output: 510 of 510 elements"),
        (ByHand(), Case(mask="causal", poison="key", lengths="5x5"), "gradient of query: "),
        (ByHand(), Case(mask="causal", poison="value", lengths="5x5"), "output: "),
        (MaskOffByOne(), Case(mask="causal"), "output: "),
        (LogBaseTwo(), Case(), "lse: "),
        (ForgetsLse(), Case(), "lse: there is none"),
        (HalfGradient(), Case(), "gradient of value: "),
        (NoGradientForBias(), Case(bias="pairs"), "gradient of bias: "),
    ],
    ids=lambda value: value.id if isinstance(value, Case) else None,
)
def test_the_fault_is_named(kernel, case, fault):
    with pytest.raises(AssertionError, match=fault):
        assert_agrees(kernel, case)


def test_a_kernel_is_not_asked_for_what_it_cannot():
    class Picky(Wrong):
        def why_not(self, problem: Problem) -> list[str]:
            return [] if isinstance(problem.mask, type(masks.causal())) else ["only causal masks"]

    admitted = [case for _, case in suite([Picky()], strength=2)]
    assert admitted
    assert {case.mask for case in admitted} == {"causal"}


def test_a_kernel_may_have_no_lse():
    class WithoutLse(ForgetsLse):
        def why_not(self, problem: Problem) -> list[str]:
            return ["there is no log-sum-exp here"] if problem.wants_lse else []

    for case in cases(1):
        assert_agrees(WithoutLse(), case)
