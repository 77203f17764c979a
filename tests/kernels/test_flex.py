"""The flex kernel: blocks and functions that it hands to FlexAttention, its plan on CUDA, its self-check.

FlexAttention differentiates on CUDA alone when it is asked by its front door; behind that its formula runs anywhere.
Most tests replace it by the formula over all pairs, which reads the lists of blocks, as kernels do.
"""

import gc
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torchs
from torch.nn.functional import pad

import regard
from regard import biases, masks
from regard.backends.torch import flex_tiles
from regard.biases import Bias
from regard.core.batched_problem import BatchedProblem
from regard.core.grid import Grid
from regard.core.problem import Problem
from regard.errors import ConfigurationError, DeviceError, KernelError, MaskError, ShapeError
from regard.kernels import KERNELS, make_problem
from regard.kernels.flex import FlexKernel
from regard.kernels.planning import choice, self_check, signature
from regard.kernels.reference import ReferenceKernel
from regard.masks import Mask
from regard.testing import Case, assert_agrees, cases, long_cases, suite
from regard.testing.cases import AXES
from regard.tiles import memo

UNFUSED = FlexKernel(None, ("cpu",))
TRACED = FlexKernel("aot_eager", ("cpu",))
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def formula(query, key, value, score_mod, block_mask, scale, grouped) -> tuple[Tensor, Tensor]:
    """FlexAttention's result: mask_mod decides in partial blocks alone, and pairs of no block do not exist."""
    assert grouped == (query.shape[1] != key.shape[1])
    assert query.shape[-1] >= 16
    dtype = torch.promote_types(query.dtype, torch.float32)
    group = query.shape[1] // key.shape[1]
    query, key, wide = (tensor.to(dtype) for tensor in (query, key, value))
    scores = scale * (query @ key.repeat_interleave(group, 1).mT)
    sizes = torch.tensor(scores.shape).tolist()
    indices = [torch.arange(size).view([-1 if axis == at else 1 for at in range(4)]) for axis, size in enumerate(sizes)]
    if score_mod is not None:
        scores = score_mod(scores, *indices)
    if block_mask is not None:
        partial, full = (
            torchs.BlockMask.from_kv_blocks(*each, compute_q_blocks=False).to_dense().bool()
            for each in (
                (block_mask.kv_num_blocks, block_mask.kv_indices),
                (block_mask.full_kv_num_blocks, block_mask.full_kv_indices),
            )
        )
        rows, columns = (index // size for index, size in zip(indices[2:], block_mask.BLOCK_SIZE, strict=True))
        inside = partial[:, :, rows[0, 0], columns[0, 0]]
        keep = (inside & block_mask.mask_mod(*indices)) | full[:, :, rows[0, 0], columns[0, 0]]
        scores = scores.masked_fill(~keep, -torch.inf)
    empty = (scores == -torch.inf).all(-1)
    scores = scores.masked_fill(empty.unsqueeze(-1), 0.0)  # no NaN in the gradient of their log-sum-exp
    weights = scores.softmax(-1).masked_fill(empty.unsqueeze(-1), 0.0)
    output = weights @ wide.repeat_interleave(group, 1)
    return output.to(value.dtype), scores.logsumexp(-1).masked_fill(empty, -torch.inf)


@pytest.fixture
def dense(monkeypatch) -> None:
    """The formula in the place of FlexAttention."""
    monkeypatch.setattr(flex_tiles, "attend_by_flex", formula)


@pytest.fixture
def differentiable(monkeypatch) -> None:
    """FlexAttention on the CPU without its refusal of gradients, which its formula has."""
    monkeypatch.setattr(torchs, "_validate_device", lambda *_: None)


GROUPS = 8
"""Tests that share the cases of `make test-all`."""


@pytest.fixture(scope="module")
def short() -> list[tuple[FlexKernel, Case]]:
    return list(suite([UNFUSED], among=cases()))


@pytest.fixture(scope="module")
def long() -> list[tuple[FlexKernel, Case]]:
    return list(suite([UNFUSED], among=long_cases()))


@pytest.fixture(scope="module")
def divided(covering) -> Callable[[list], tuple[list, list]]:
    """Divides pairs of a kernel and a case into a few that hold every choice, and the others."""

    def divide(pairs: list[tuple[FlexKernel, Case]]) -> tuple[list, list]:
        chosen = covering([{axis: getattr(case, axis) for axis in AXES} for _, case in pairs], 1)
        return (
            [pair for index, pair in enumerate(pairs) if index in chosen],
            [pair for index, pair in enumerate(pairs) if index not in chosen],
        )

    return divide


@pytest.mark.usefixtures("dense")
class TestAgreement:
    def check(self, kernel: FlexKernel, case: Case) -> None:
        memo._memos.clear()
        assert_agrees(kernel, case)

    def test_it_agrees_with_the_oracle(self, short, divided, assert_all, monkeypatch):
        monkeypatch.setattr(flex_tiles, "BLOCK", 4)
        assert_all(self.check, divided(short)[0])

    @pytest.mark.slow
    @pytest.mark.parametrize("group", range(GROUPS))
    def test_it_agrees_with_the_oracle_on_the_other_cases(self, group: int, short, divided, assert_all, monkeypatch):
        monkeypatch.setattr(flex_tiles, "BLOCK", 4)
        assert_all(self.check, divided(short)[1][group::GROUPS])

    def test_it_agrees_over_many_blocks(self, long, divided, assert_all):
        assert_all(assert_agrees, divided(long)[0])

    @pytest.mark.slow
    def test_it_agrees_over_many_blocks_on_the_other_cases(self, long, divided, assert_all):
        assert_all(assert_agrees, divided(long)[1])

    def test_there_are_cases_of_every_mask_and_bias_but_those_that_it_refuses(self, short):
        found = [case for _, case in short]
        assert len(found) > 300
        assert {case.mask for case in found} == {case.mask for case in cases()}
        assert {case.bias for case in found} == {case.bias for case in cases()} - {"mod"}


def drawn(*shape: int, gradient: bool = False) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(gradient)


def posed(mask: Mask | None = None, bias: Bias | None = None, *, m: int = 40, n: int = 40, **options: Any) -> Problem:
    """A problem of grouped heads that all need gradients."""
    tensors = drawn(2, 4, m, 16, gradient=True), drawn(2, 2, n, 16, gradient=True), drawn(2, 2, n, 16, gradient=True)
    return regard.explain(*tensors, mask=mask, bias=bias, kernel="tiled", **options).problem


def results(kernel: FlexKernel | ReferenceKernel, problem: Problem) -> list[Tensor]:
    result = kernel.run(replace(problem, wants_lse=True))
    inputs = [problem.pairs.query, problem.pairs.key, problem.value]
    inputs += [] if problem.bias is None else [each for each in problem.bias.parameters() if each.requires_grad]
    lse = cast(Tensor, result.lse)
    total = result.output.square().sum() + lse.masked_fill(lse == -torch.inf, 0.0).sin().sum()
    return [result.output.detach(), lse.detach(), *torch.autograd.grad(total, inputs)]


def assert_equal_results(kernel: FlexKernel, problem: Problem) -> None:
    torch.testing.assert_close(
        results(kernel, problem), results(ReferenceKernel(), problem), atol=2e-5, rtol=2e-5, check_dtype=False
    )


def many(heads: int, columns: int) -> Tensor:
    return drawn(heads, columns, gradient=True)


# The bias needs a gradient, where it is learned.
EXAMPLES: dict[str, Callable[[], Problem]] = {
    "window and documents": lambda: posed(
        masks.causal() & masks.window(before=9) & masks.documents(torch.arange(40) // 13)
    ),
    "documents of heads": lambda: posed(masks.documents(torch.arange(160).view(1, 4, 40) * 7 % 11 // 4)),
    "documents of keys": lambda: posed(
        masks.documents(torch.arange(40) // 13, torch.arange(40) // 9), query_positions=range(40)
    ),
    "padding, softcap, table": lambda: posed(
        masks.padding(lengths=[11, 40]), biases.relative(many(4, 8), max_distance=20), softcap=3.0
    ),
    "gaussian of numbers": lambda: posed(
        masks.causal(), biases.gaussian(torch.tensor(7.0).requires_grad_(), torch.tensor(3.0).requires_grad_())
    ),
    "tensor of keys, more keys": lambda: posed(masks.causal(), biases.tensor(many(1, 60)), m=13, n=60),
}


@pytest.mark.usefixtures("differentiable")
@pytest.mark.parametrize("example", [pytest.param(name, id=name) for name in EXAMPLES])
class TestFlexAttention:
    """The same through FlexAttention of torch."""

    def test_it_computes_what_the_reference_does(self, example):
        assert_equal_results(UNFUSED, EXAMPLES[example]())

    @pytest.mark.slow
    def test_its_joint_graph_can_be_traced(self, example):
        assert_equal_results(TRACED, EXAMPLES[example]())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*script_method.* is deprecated:DeprecationWarning")
@pytest.mark.parametrize("example", [pytest.param(name, id=name) for name in EXAMPLES if "keys" not in name])
def test_compiled_code_computes_what_the_reference_does(example):
    """On the CPU FlexAttention compiles a forward pass without its log-sum-exp, and no table that keys alone index.

    Rows of 16 numbers are filled up with 0: without code of ours, too, what is compiled for AVX2 is wrong for such and
    40 keys (torch 2.13), and right from 64 on.
    """
    problem = EXAMPLES[example]()
    if problem.bias is not None:
        problem.bias = problem.bias.with_parameters([each.detach() for each in problem.bias.parameters()])
    batched = BatchedProblem.from_problem(problem)
    with torch.no_grad():
        # Of other lengths before, torch would compile for lengths that vary, with code that its own compiler refuses.
        output = torch.compile(torchs.flex_attention, fullgraph=True, dynamic=False)(
            *(pad(each.detach(), (0, 48)) for each in (batched.pairs.query, batched.pairs.key, batched.value)),
            flex_tiles.BiasTables(batched).score_mod(problem.bias),
            flex_tiles.block_mask(batched),
            problem.pairs.scale,  # type: ignore[union-attr]
            enable_gqa=True,
        )
    torch.testing.assert_close(output[..., :16], ReferenceKernel().run(problem).output, atol=2e-5, rtol=2e-5)
    assert not output[..., 16:].any()


@pytest.mark.slow
@pytest.mark.usefixtures("differentiable")
@pytest.mark.parametrize("kernel", [UNFUSED, TRACED], ids=lambda kernel: kernel.name)
def test_inside_code_that_is_compiled(kernel):
    """There the kernel is one operator, in which torch excludes the dispatch keys that FlexAttention needs."""
    table = drawn(2, 30)
    bias = biases.from_mod(lambda s, b, h, q, k: s + table[h, k], heads=2)

    def attended(query: Tensor) -> Tensor:
        return kernel.run(make_problem(query, query, query, mask=masks.window(3, 1), bias=bias)).output

    query = drawn(1, 2, 30, 16, gradient=True)
    gc.collect()  # functions of earlier tests that die while this one is traced would change the guards of their table
    outputs = torch.compile(attended, backend="aot_eager")(query), attended(query)
    torch.testing.assert_close(*outputs)
    torch.testing.assert_close(*(torch.autograd.grad(each.square().sum(), query) for each in outputs))


class TestCompilation:
    @pytest.fixture
    def compiled(self, monkeypatch) -> list[int]:
        """The number of graphs that were compiled."""
        from torch._dynamo.backends.registry import lookup_backend

        counted: list[int] = []

        def backend(graph, inputs):
            counted.append(len(inputs))
            return lookup_backend("eager")(graph, inputs)

        flex_tiles.compiled_flex.cache_clear()
        torch._dynamo.reset()
        self.kernel = FlexKernel(cast(str, backend), ("cpu",))
        return counted

    def test_other_lengths_and_other_tables_need_no_other_code(self, compiled):
        generator = torch.Generator().manual_seed(0)
        for length in (130, 140, 150, 201, 260, 333):
            ids = torch.randint(3, (length,), generator=generator).cumsum(-1) // 3
            query = drawn(2, 2, length, 16)
            problem = regard.explain(query, query, query, mask=masks.causal() & masks.documents(ids)).problem
            result = self.kernel.run(problem)
            torch.testing.assert_close(result.output, ReferenceKernel().run(problem).output, atol=2e-5, rtol=2e-5)
        assert 1 <= len(compiled) <= 3

    def test_many_masks_are_compiled_each(self, compiled):
        query = drawn(1, 1, 130, 16)
        for before in range(1, 11):  # torch itself compiles one function eight times at most
            problem = regard.explain(query, query, query, mask=masks.window(before=before)).problem
            result = self.kernel.run(problem)
            torch.testing.assert_close(result.output, ReferenceKernel().run(problem).output, atol=2e-5, rtol=2e-5)
        assert len(compiled) == 10


def names(problem: Problem) -> list[str]:
    return UNFUSED.why_not(problem)


class TestReasons:
    @pytest.mark.parametrize(
        ("options", "reason"),
        [
            ({"score": regard.scores.Additive(16, 16, 8)}, "FlexAttention takes finished dot products; this score is"),
            ({"dropout_p": 0.5}, "FlexAttention drops no weights"),
            ({"n": 0}, "FlexAttention takes no empty tensors"),
            (
                {"bias": biases.alibi(4), "key_positions": torch.arange(40) ** 2},
                "a bias by distance is a table of diagonals here, which needs consecutive positions",
            ),
            (
                {"bias": biases.from_mod(lambda s, b, h, q, k: s + drawn(4, 40)[h][k], heads=4)},
                "mapped over pairs, and FlexAttention's kernels compute operators alone",
            ),
        ],
        ids=["score", "dropout", "empty", "positions", "mapped"],
    )
    def test_what_it_cannot_compute(self, options, reason):
        reasons = names(posed(**options))
        assert len(reasons) == 1
        assert reason in reasons[0]

    def test_a_function_with_a_gradient(self):
        table = many(1, 40)[0]
        bias = biases.from_mod(lambda s, b, h, q, k: s + table[q] + table[k])
        assert "no gradient for a tensor that a function may index twice" in names(posed(bias=bias))[0]
        assert not flex_tiles.differentiates(biases.alibi(4) + bias)
        with torch.no_grad():
            assert names(posed(bias=bias)) == []

    def test_a_bias_of_the_users_own(self):
        class Own(Bias):
            def values(self, grid: Grid) -> Tensor:
                return torch.zeros(1, 1)

            def parameters(self):
                return ()

        reason = names(posed(bias=biases.alibi(4) + Own()))[0]
        assert reason.startswith("Own has no form as a score_mod: biases by distance, gaussian, tensors, from_mod")

    def test_of_the_device(self):
        assert FlexKernel("inductor", ("cuda",)).why_not(posed()) == [
            "FlexAttention is compiled for cuda devices alone"
        ]
        flex_kernel = next(kernel for kernel in KERNELS if kernel.name == "flex")
        assert flex_kernel.why_not(posed())[0] == "FlexAttention is compiled for cuda devices alone"

    def test_float64(self):
        query = drawn(1, 1, 4, 16).double()
        problem = regard.explain(query, query, query).problem
        assert FlexKernel("inductor", ("cpu",)).why_not(problem) == ["FlexAttention's kernels have no float64"]

    def test_tensors_that_are_too_large(self, monkeypatch):
        monkeypatch.setattr("regard.kernels.flex.MOST_NUMBERS", 100)
        problem = posed(masks.where(keep=torch.ones(40, 40, dtype=torch.bool)))
        assert names(problem) == ["FlexAttention's kernels index no tensor of more than 100 numbers"]


@pytest.mark.usefixtures("dense")
class TestErrors:
    @pytest.mark.parametrize(
        ("error", "match", "options"),
        [
            (ShapeError, "bias alibi.* has the shape .*does not broadcast", {"bias": biases.alibi(3)}),
            (ShapeError, "bias tensor.* does not fit", {"bias": biases.tensor(torch.zeros(41))}),
            (MaskError, "mask where.* has the shape", {"mask": masks.where(keep=torch.ones(3, 1, 40) > 0)}),
            (
                ConfigurationError,
                "a bias is a number that is added to the score",
                {"bias": biases.from_mod(lambda s, b, h, q, k: 2 * s)},
            ),
        ],
        ids=["heads", "keys", "mask", "function"],
    )
    def test_what_does_not_fit_is_said(self, error, match, options):
        query = drawn(2, 4, 40, 16)
        with pytest.raises(error, match=match):
            UNFUSED.run(flex_problem(query, **options))

    def test_another_device(self):
        bias = biases.tensor(torch.zeros(40, device="meta"))
        with pytest.raises(DeviceError, match="is on meta, but query, key and value are on cpu"):
            UNFUSED.run(flex_problem(drawn(2, 4, 40, 16), bias=bias))


def flex_problem(query: Tensor, **options: Any) -> Problem:
    """A problem that no kernel was asked about."""
    return replace(regard.explain(query, query, query).problem, **options)


@pytest.mark.usefixtures("dense")
def test_the_tensors_of_a_mask_are_freed_with_it():
    """What is memoized for a mask does not refer to it: a training with new documents in each batch would fill up."""
    import gc
    import weakref

    mask = masks.documents(torch.arange(40) // 7)
    known = weakref.ref(mask)
    UNFUSED.run(flex_problem(drawn(1, 1, 40, 16), mask=mask))
    assert memo.memo_of(mask).values
    del mask
    gc.collect()
    assert known() is None


def test_the_blocks_are_listed_once(monkeypatch):
    query, seen = drawn(1, 1, 400, 16), []
    listed = flex_tiles.BlockLists.from_verdicts
    monkeypatch.setattr(flex_tiles.BlockLists, "from_verdicts", lambda *given: seen.append(1) or listed(*given))
    monkeypatch.setattr(flex_tiles, "attend_by_flex", formula)
    mask = masks.causal() & masks.window(before=77)
    for _ in range(3):
        UNFUSED.run(flex_problem(query, mask=mask))
    assert len(seen) == 1


class TestPlan:
    """The choice on CUDA, by fake tensors: no device is needed, and none is asked."""

    @pytest.fixture(autouse=True)
    def fake(self, monkeypatch):
        monkeypatch.setattr("regard.kernels.flex.has_triton", lambda: True)
        with FakeTensorMode():
            yield

    def plan(self, mask: Mask | None, *, n: int = 16384, gradient: bool = False, **options: Any):
        query = torch.empty(1, 8, n, 64, device="cuda", dtype=torch.bfloat16, requires_grad=gradient)
        return regard.explain(query, query, query, mask=mask, **options)

    @pytest.mark.parametrize("gradient", [False, True])
    @pytest.mark.parametrize(
        "mask",
        [
            masks.causal() & masks.window(before=511),
            masks.causal() & masks.prefix(300),
            masks.from_mod(lambda b, h, q, k: (q // 1024 == k // 1024) & (k <= q)),
        ],
        ids=repr,
    )
    def test_a_structured_mask(self, mask, gradient):
        plan = self.plan(mask, gradient=gradient)
        assert plan.kernel.name == "flex"
        assert "-> flex         chosen: takes the least time" in str(plan)

    def test_softcap_and_log_sum_exp(self):
        assert self.plan(masks.causal() & masks.window(before=511), softcap=30.0).kernel.name == "flex"
        assert self.plan(None, softcap=30.0).kernel.name == "flex"

    @pytest.mark.parametrize("gradient", [False, True])
    @pytest.mark.parametrize("mask", [None, masks.causal()], ids=repr)
    def test_plain_cases_are_torchs(self, mask, gradient):
        assert self.plan(mask, gradient=gradient).kernel.name == "sdpa"

    def test_a_small_problem_is_not_compiled(self):
        assert self.plan(masks.causal() & masks.window(before=5), n=64).kernel.name == "sdpa"

    def test_without_triton(self, monkeypatch):
        monkeypatch.setattr("regard.kernels.flex.has_triton", lambda: False)
        plan = self.plan(masks.causal() & masks.window(before=333))
        assert plan.kernel.name != "flex"
        assert "   flex         cannot: FlexAttention is compiled by Triton, which is not installed" in str(plan)

    def test_by_name(self):
        assert self.plan(masks.causal(), kernel="flex").kernel.name == "flex"


@pytest.mark.usefixtures("dense")
class TestSelfCheck:
    @pytest.fixture(autouse=True)
    def kernel(self, tmp_path, monkeypatch) -> Iterator[FlexKernel]:
        """A kernel for the CPU in the place of that for CUDA, the fastest of all, and a cache directory of its own."""
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        kernel = FlexKernel(None, ("cpu",))
        monkeypatch.setattr(kernel, "cost", lambda problem: choice.Cost(0.0, 0.0, calls=0.0, gradient=0.0))
        kernels = tuple(kernel if each.name == "flex" else each for each in KERNELS)
        monkeypatch.setattr(choice, "KERNELS", kernels)
        monkeypatch.setattr(choice, "uncompared_kernel", lambda problem: None)  # small problems are compared, too
        monkeypatch.setattr(kernel, "name", "flex")
        monkeypatch.setitem(choice.apply_kernel.__globals__["_COMPUTATIONS"], "flex", kernel)
        signature._choices.clear()
        yield kernel
        signature._choices.clear()

    def explained(self, **options: Any):
        query = drawn(1, 4, 40, 16, gradient=options.pop("gradient", False))
        return regard.explain(query, query, query, mask=masks.causal() & masks.window(before=7), **options)

    def wrong(self, monkeypatch, factor: float) -> None:
        def scaled(*given: Any) -> tuple[torch.Tensor, torch.Tensor]:
            output, lse = formula(*given)
            return output * factor, lse

        monkeypatch.setattr(flex_tiles, "attend_by_flex", scaled)

    def test_what_agrees_is_chosen_and_stored(self, kernel, tmp_path):
        assert self.explained().kernel is kernel
        stored = json.loads((tmp_path / "regard" / "self_checks.json").read_text())
        (key,) = stored
        assert key == f"cpu, torch {torch.__version__}, float32, 16 and 16 features, few queries"
        assert 0 <= stored[key]["error"] <= stored[key]["budget"] < 1e-3

    @pytest.mark.parametrize("gradient", [False, True])
    @pytest.mark.parametrize(
        "bias", [None, biases.alibi(4), biases.alibi(many(1, 4)[0])], ids=["none", "bias", "learned"]
    )
    def test_every_class_of_features_is_compared(self, kernel, bias, gradient):
        assert self.explained(bias=bias, gradient=gradient, softcap=5.0).kernel is kernel
        assert len(kernel.self_check._agreed) == 1

    def test_it_is_compared_once(self, kernel, monkeypatch):
        assert self.explained().kernel is kernel
        monkeypatch.setattr(self_check, "compare", lambda *_: pytest.fail("it was compared again"))
        signature._choices.clear()
        assert self.explained().kernel is kernel

    def test_another_process_reads_what_agreed(self, kernel, monkeypatch):
        self.explained()
        monkeypatch.setattr(self_check, "compare", lambda *_: pytest.fail("it was compared again"))
        assert FlexKernel(None, ("cpu",)).agrees(self.explained().problem)

    def test_a_wrong_result_refuses_itself_with_the_figure(self, kernel, monkeypatch, tmp_path):
        self.wrong(monkeypatch, 1.001)
        plan = self.explained()
        assert plan.kernel is not kernel
        (line,) = (line for line in str(plan).splitlines() if "flex" in line)
        assert line.startswith("   flex         cannot: it disagrees with the reference on a small problem (cpu, torch")
        assert re.search(r"the output is wrong by 0\.000\d+, where \S+e-06 is allowed$", line)
        assert not (tmp_path / "regard" / "self_checks.json").exists()
        with pytest.raises(
            KernelError, match=r"kernel 'flex' cannot compute this: it disagrees .* where .* is allowed"
        ):
            self.explained(kernel="flex")

    def test_attention_is_right_all_the_same(self, monkeypatch):
        self.wrong(monkeypatch, 2.0)
        query = drawn(1, 2, 40, 16)
        output = regard.attention(query, query, query, mask=masks.window(3, 4))
        torch.testing.assert_close(output, ReferenceKernel().run(flex_problem(query, mask=masks.window(3, 4))).output)

    def test_other_features_are_compared_by_themselves(self, kernel, monkeypatch):
        self.wrong(monkeypatch, 2.0)
        assert self.explained().kernel is not kernel
        monkeypatch.setattr(flex_tiles, "attend_by_flex", formula)
        assert self.explained(softcap=5.0).kernel is kernel
        assert self.explained().kernel is not kernel

    def test_code_that_fails_refuses_itself(self, kernel, monkeypatch):
        def broken(*_):
            raise RuntimeError("no such instruction\nand more")

        monkeypatch.setattr(flex_tiles, "attend_by_flex", broken)
        plan = self.explained()
        assert plan.kernel is not kernel
        assert "it fails on a small problem (cpu" in str(plan)
        assert "RuntimeError: no such instruction" in str(plan)

    def test_a_wrong_gradient(self, kernel, monkeypatch):
        true = FlexKernel.backward
        monkeypatch.setattr(
            FlexKernel, "backward", lambda self, *given: replace(each := true(self, *given), key=each.key * 1.01)
        )
        plan = self.explained(gradient=True)
        assert plan.kernel is not kernel
        assert "the gradient of key is wrong by" in str(plan)

    @pytest.mark.parametrize("text", ["", "[]", "{", '{"cpu": 3}'])
    def test_a_damaged_file_is_written_anew(self, kernel, tmp_path, text):
        (tmp_path / "regard").mkdir()
        (tmp_path / "regard" / "self_checks.json").write_text(text)
        assert self.explained().kernel is kernel
        assert len(json.loads((tmp_path / "regard" / "self_checks.json").read_text())) >= 1

    def test_a_directory_that_cannot_be_written_is_no_failure(self, kernel, tmp_path):
        (tmp_path / "regard").touch()
        assert self.explained().kernel is kernel


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
class TestCuda:
    """To be run by whoever has a GPU; test_agreement.py has the cases of the oracle."""

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("gradient", [False, True])
    def test_it_is_chosen_and_agrees(self, dtype, gradient):
        query = torch.randn(1, 4, 4096, 64, device="cuda", dtype=dtype, requires_grad=gradient)
        mask = masks.causal() & masks.window(before=255)
        plan = regard.explain(query, query, query, mask=mask)
        assert plan.kernel.name == "flex", str(plan)
        expected = ReferenceKernel().run(plan.problem).output
        within = 1e-4 if dtype == torch.float32 else 3e-2
        torch.testing.assert_close(plan.run().output, expected, atol=within, rtol=within, check_dtype=False)

    @pytest.mark.parametrize("example", EXAMPLES)
    def test_examples(self, example):
        problem = EXAMPLES[example]()
        tensors = regard.utils.pytree.tree_tensors(problem)
        moved = [tensor.detach().cuda().requires_grad_(tensor.requires_grad) for tensor in tensors]
        problem = regard.utils.pytree.tree_unflatten(regard.utils.pytree.tree_flatten(problem)[1], moved)
        assert_equal_results(cast(FlexKernel, next(each for each in KERNELS if each.name == "flex")), problem)

    def test_no_memory_of_all_pairs(self):
        query = torch.randn(1, 1, 131_072, 64, device="cuda", dtype=torch.bfloat16)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        regard.attention(query, query, query, mask=masks.causal() & masks.window(before=511), kernel="flex")
        assert torch.cuda.max_memory_allocated() - before < 2**28
