"""The suite finds wrong kernels: each has one fault that a person might make."""

from dataclasses import replace

import pytest
import torch

from regard import biases, masks
from regard.kernels import Cost, Kernel, Result
from regard.kernels.reference import Reference
from regard.pairs import AdditivePairs, DotPairs
from regard.problem import Problem
from regard.testing import Case, assert_agrees, cases, make_inputs, suite, truth


class Wrong:
    """The reference, but for one thing."""

    name = "wrong"

    def why_not(self, problem: Problem) -> list[str]:
        return []

    def cost(self, problem: Problem) -> Cost:
        return Reference().cost(problem)

    def run(self, problem: Problem) -> Result:
        return Reference().run(problem)


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
        return Reference().run(replace(problem, query_positions=positions))


class AlignedToTheStart(Wrong):
    def run(self, problem: Problem) -> Result:
        if problem.query_positions is None:
            problem = replace(problem, query_positions=torch.arange(problem.queries))
        return Reference().run(problem)


class NoScale(Wrong):
    def run(self, problem: Problem) -> Result:
        if isinstance(problem.pairs, DotPairs):
            problem = replace(problem, pairs=replace(problem.pairs, scale=1.0))
        return Reference().run(problem)


class NoTanh(Wrong):
    def run(self, problem: Problem) -> Result:
        pairs = problem.pairs
        if isinstance(pairs, AdditivePairs):
            problem = replace(problem, pairs=replace(pairs, query=pairs.query * 1e-3, key=pairs.key * 1e-3))
        return Reference().run(problem)


class GroupsInterleaved(Wrong):
    """Query head h meets key head h modulo the number of key heads."""

    def run(self, problem: Problem) -> Result:
        if problem.heads:
            heads, key_heads = problem.pairs.query.shape[-3], problem.value.shape[-3]
            order = [head % key_heads for head in range(heads)]
            pairs = replace(problem.pairs, key=problem.pairs.key[..., order, :, :])
            problem = replace(problem, pairs=pairs, value=problem.value[..., order, :, :])
        return Reference().run(problem)


class NoSinks(Wrong):
    def run(self, problem: Problem) -> Result:
        return Reference().run(replace(problem, sinks=None))


class CapAfterBias(Wrong):
    def run(self, problem: Problem) -> Result:
        if problem.softcap is None or problem.bias is None:
            return Reference().run(problem)
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
            return Reference().run(problem)
        return Reference().run(replace(problem, bias=biases.tensor(bias.detach())))


class HalfGradient(Wrong):
    """The right output, half of value's gradient."""

    def run(self, problem: Problem) -> Result:
        value = problem.value
        return Reference().run(replace(problem, value=value.detach() / 2 + value / 2))


class LogBaseTwo(Wrong):
    def run(self, problem: Problem) -> Result:
        result = Reference().run(problem)
        return Result(result.output, None if result.lse is None else result.lse / 0.6931471805599453)


class ForgetsLse(Wrong):
    def run(self, problem: Problem) -> Result:
        return Result(Reference().run(problem).output)


class InHalfPrecision(Wrong):
    def run(self, problem: Problem) -> Result:
        dtype = problem.value.dtype
        if dtype == torch.float64:
            return Reference().run(problem)
        rounded = replace(problem, value=problem.value.bfloat16().to(dtype))
        return Reference().run(rounded)


def caught(kernel: Kernel) -> str | None:
    """What the suite says of a kernel that it finds wrong."""
    for _, case in suite([kernel], strength=2):
        try:
            assert_agrees(kernel, case)
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
        ByHand,
    ],
    ids=lambda kernel: kernel.__name__,
)
def test_the_suite_catches_a_wrong_kernel(kernel):
    assert str(caught(kernel())).startswith("kernel 'wrong' is wrong on the case ")


def test_a_right_kernel_passes():
    assert caught(Wrong()) is None


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


def test_the_truth_has_finite_gradients():
    for case in cases(2):
        gradients = truth(make_inputs(case), with_lse=True).gradients
        bad = [name for name, gradient in gradients.items() if not gradient.isfinite().all()]
        assert not bad or case.poison in ("query", "key", "value"), (case.id, bad)


def test_keep_of_the_inputs_is_what_the_library_masks_say():
    for case in cases(2):
        inputs = make_inputs(case)
        problem = inputs.problem()
        keep = problem.keep(problem.grid())
        if keep is not None:
            assert keep.expand(problem.weights_shape).equal(inputs.keep.reshape(problem.weights_shape)), case.id
