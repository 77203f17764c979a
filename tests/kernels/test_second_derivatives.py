"""First and second derivatives of every kernel by finite differences, with every feature that it admits."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

import regard
from regard import biases, masks, native, scores
from regard.errors import KernelError
from regard.kernels import Kernel, custom_op
from regard.kernels.block_sparse import BlockSparseKernel
from regard.kernels.decode import DecodeKernel
from regard.kernels.reference import ReferenceKernel
from regard.kernels.sdpa import SdpaKernel
from regard.kernels.tiled import TiledKernel

KERNELS: list[Kernel] = [DecodeKernel(2), BlockSparseKernel((2, 2), 2), TiledKernel(8), ReferenceKernel()]
IN_ONE_TILE: list[Kernel] = [DecodeKernel(), BlockSparseKernel(), TiledKernel()]
"""The same loops over a single tile; tests/test_agreement.py has their first derivatives with each feature."""


# The second derivatives along random directions, which shows what all directions would.
CHECKS = {"first": gradcheck, "second": partial(gradgradcheck, fast_mode=True)}


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


KEEP = torch.tensor([[True, False, True], [False] * 3])
# What is added to a call, and the tensors that it makes of others: (*batch, heads, M, N) = (1, 2, 2, 3).
FEATURES: dict[str, tuple[list[torch.Size], Callable[..., dict[str, Any]]]] = {
    "plain": ([], dict),
    "causal": ([], lambda: {"mask": masks.causal()}),
    "from the start": ([], lambda: {"mask": masks.causal(), "query_positions": torch.arange(2)}),
    "window": ([], lambda: {"mask": masks.window(before=1, after=0)}),
    "empty row": ([], lambda: {"mask": KEEP}),
    "nothing": ([], lambda: {"mask": torch.zeros(2, 3).bool()}),
    "softcap": ([], lambda: {"softcap": 1.3, "mask": KEEP}),
    "dropout": ([], lambda: {"dropout_p": 0.4, "mask": masks.window(before=2)}),
    "sinks": ([torch.Size([2])], lambda sinks: {"sinks": sinks, "mask": KEEP}),
    "bias": ([torch.Size([2, 1, 3])], lambda bias: {"bias": bias, "mask": masks.causal()}),
    "relative": ([torch.Size([2, 4])], lambda table: {"bias": biases.relative(table, max_distance=3), "mask": KEEP}),
    "constant": ([], lambda: {"bias": biases.alibi(2), "mask": masks.causal()}),
    "scattered": ([], lambda: {"mask": masks.causal(), "query_positions": torch.tensor([2, 0])}),
    "everything": (
        [torch.Size([2]), torch.Size([2, 2, 3]), torch.Size([2, 4])],
        lambda sinks, bias, table: {
            "sinks": sinks,
            "bias": biases.tensor(bias) + biases.clipped(table, before=2, after=1),
            "softcap": 2.0,
            "dropout_p": 0.2,
            "mask": masks.causal() & masks.where(keep=KEEP),
        },
    ),
}


def admits(kernel: Kernel, feature: str) -> bool:
    shapes, options = FEATURES[feature]
    problem = regard.explain(
        rand(1, 2, 2, 2), rand(1, 1, 3, 2), rand(1, 1, 3, 1), **options(*(rand(*shape) for shape in shapes))
    ).problem
    return not kernel.why_not(problem)


def check(checking: Callable, kernel: Kernel, feature: str, score: regard.scores.Score | None = None) -> None:
    """Derivatives of output and log-sum-exp in everything that a call is made of."""
    shapes, options = FEATURES[feature]
    tensors = rand(1, 2, 2, 2), rand(1, 1, 3, 2), rand(1, 1, 3, 1), *(rand(*shape) for shape in shapes)

    def attend(*given: torch.Tensor) -> Sequence[torch.Tensor]:
        torch.manual_seed(7)
        plan = regard.explain(*given[:3], score=score, **options(*given[3:]))
        result = kernel.run(replace(plan.problem, wants_lse=True))
        assert result.lse is not None
        # A row that attends to nothing has a log-sum-exp of -inf, which no difference is finite for.
        return result.output, result.lse.masked_fill(result.lse == -torch.inf, 0.0)

    assert checking(attend, tensors)


def admitted(kernels: Sequence[Kernel]) -> list[Any]:
    """Each of the kernels with each feature that it computes."""
    return [
        pytest.param(kernel, feature, id=f"{kernel.name}-{feature}")
        for kernel in kernels
        for feature in FEATURES
        if admits(kernel, feature)
    ]


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("order", CHECKS)
@pytest.mark.parametrize(("kernel", "feature"), admitted(KERNELS))
def test_derivatives(order, kernel, feature):
    check(CHECKS[order], kernel, feature)


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("order", CHECKS)
@pytest.mark.parametrize(("kernel", "feature"), admitted(IN_ONE_TILE))
def test_derivatives_in_one_tile(order, kernel, feature):
    check(CHECKS[order], kernel, feature)


def test_every_feature_is_checked_for_every_kernel_that_has_it():
    own = {
        kernel.name: [feature for feature in FEATURES if admits(kernel, feature)] for kernel in KERNELS + IN_ONE_TILE
    }
    assert own["tiled"] == own["tiled(8)"] == own["reference"] == list(FEATURES)
    dense = [name for name in FEATURES if name not in ("softcap", "dropout", "bias", "relative", "everything")]
    assert own["block_sparse"] == own["decode"] == dense


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("order", CHECKS)
@pytest.mark.parametrize("kernel", [TiledKernel(), TiledKernel(8), ReferenceKernel()], ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("feature", ["empty row", "softcap", "dropout"])
def test_derivatives_of_additive_scores(order, kernel, feature):
    check(CHECKS[order], kernel, feature, scores.Additive(2, 2, 3).double())


@pytest.mark.parametrize("order", CHECKS)
@pytest.mark.parametrize(
    "score", [scores.Additive(2, 2, 3), scores.General(2, 2)], ids=lambda score: type(score).__name__
)
def test_derivatives_of_parameters(order, score):
    query, key, value = rand(1, 2, 2, 2), rand(1, 2, 3, 2), rand(1, 2, 3, 1)
    score = score.double()
    names = [name for name, _ in score.named_parameters()]

    class Given(torch.nn.Module):
        def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
            super().__init__()
            self.score, self.given = score, {f"score.{n}": p for n, p in zip(names, parameters, strict=True)}

        def forward(self, query: torch.Tensor, key: torch.Tensor) -> Any:
            return self.score.pairs(query, key)

        def pairs(self, query: torch.Tensor, key: torch.Tensor) -> Any:
            return torch.func.functional_call(self, self.given, (query, key))

    def attend(*parameters: torch.Tensor) -> torch.Tensor:
        return regard.attention(query, key, value, score=Given(parameters), mask=KEEP, kernel="tiled")

    assert CHECKS[order](attend, tuple(parameter.detach().clone().requires_grad_() for parameter in score.parameters()))


@pytest.mark.parametrize("feature", ["plain", "causal", "constant"])
def test_derivatives_of_fused(feature):
    check_without_lse = SdpaKernel()
    _, options = FEATURES[feature]

    def attend(*given: torch.Tensor) -> torch.Tensor:
        return check_without_lse.run(regard.explain(*given, **options()).problem).output

    assert gradcheck(attend, (rand(1, 2, 2, 2), rand(1, 1, 3, 2), rand(1, 1, 3, 1)))


@pytest.mark.parametrize("mask", [None, masks.causal(), KEEP], ids=["none", "causal", "tensor"])
@pytest.mark.parametrize("dims", [(2, 2), (2, 3)], ids=["equal dims", "unequal dims"])
def test_a_kernel_that_was_not_asked_for_by_name_has_second_derivatives(mask, dims):
    tensors = rand(1, 2, 2, dims[0]), rand(1, 2, 3, dims[0]), rand(1, 2, 3, dims[1])
    assert gradgradcheck(lambda *given: regard.attention(*given, mask=mask), tensors)


def second_derivatives(kernel: str, masked: float, attended: float | None = None) -> list[torch.Tensor]:
    """Gradients of a function of the first gradients, where the last key and value are `masked`.

    attended: a number in the key that the last row alone attends to, which the loss leaves out.
    """
    torch.manual_seed(3)
    query, key, value = torch.randn(3, 1, 2, 5, 4).unbind()
    key[..., -1, :], value[..., -1, :] = masked, masked
    if attended is not None:
        key[..., 3, 0] = attended
    tensors = [tensor.requires_grad_() for tensor in (query, key, value)]
    keep = masks.causal() & masks.padding(lengths=[4])
    rows = slice(None) if attended is None else slice(0, 3)
    output = regard.attention(*tensors, mask=keep, kernel=kernel)[:, :, rows]
    first = torch.autograd.grad(output.square().sum(), tensors, create_graph=True)
    total = torch.stack([gradient.square().sum() for gradient in first]).sum()
    return list(torch.autograd.grad(total, tensors))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("kernel", ["sdpa", "decode", "cpu_flash", "block_sparse", "tiled", "reference"])
def test_nan_in_a_masked_position_reaches_no_second_derivative(kernel, bad):
    if kernel == "cpu_flash" and not native.available():
        pytest.skip(native.why_not() or "")
    found, expected = second_derivatives(kernel, bad), second_derivatives("reference", 0.0)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kernel", ["decode", "block_sparse", "tiled"])
def test_rows_that_attend_to_nan_have_no_second_derivatives(kernel):
    found = second_derivatives(kernel, 0.0, attended=float("nan"))
    torch.testing.assert_close(found, second_derivatives("reference", 0.0, attended=float("nan")))
    assert all(bool(gradient.isfinite().all()) for gradient in found)


class TestLimit:
    @staticmethod
    def first(kernel: str, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        query, key = rand(2, 3, 4, 8), rand(2, 3, 5, 8)
        output = regard.attention(query, key, key, mask=masks.causal(), kernel=kernel, **options)
        return query, torch.autograd.grad(output.square().sum(), query, create_graph=True)[0]

    @pytest.mark.parametrize("kernel", ["decode", "block_sparse", "tiled"])
    def test_above_it_an_error_names_the_way_out(self, kernel, monkeypatch):
        monkeypatch.setattr(custom_op, "MAX_SECOND_DERIVATIVE_PAIRS", 2 * 3 * 4 * 5 - 1)
        query, gradient = self.first(kernel)
        with pytest.raises(
            KernelError,
            match=r"a second derivative holds all 120 query-key pairs of the weights \(2, 3, 4, 5\) in memory several "
            r"times over, and is refused above 119; take it over shorter sequences or fewer heads at a time, or ask "
            r"for kernel='reference', which has no such limit",
        ):
            torch.autograd.grad(gradient.sum(), query)

    @pytest.mark.parametrize("kernel", ["decode", "block_sparse", "tiled"])
    def test_up_to_it_there_is_none(self, kernel, monkeypatch):
        monkeypatch.setattr(custom_op, "MAX_SECOND_DERIVATIVE_PAIRS", 2 * 3 * 4 * 5)
        query, gradient = self.first(kernel)
        assert torch.autograd.grad(gradient.sum(), query)[0].isfinite().all()

    def test_the_way_out_is_one(self, monkeypatch):
        monkeypatch.setattr(custom_op, "MAX_SECOND_DERIVATIVE_PAIRS", 1)
        query, gradient = self.first("reference")
        assert torch.autograd.grad(gradient.sum(), query)[0].isfinite().all()

    def test_the_first_derivative_has_none(self, monkeypatch):
        monkeypatch.setattr(custom_op, "MAX_SECOND_DERIVATIVE_PAIRS", 1)
        assert self.first("tiled")[1].isfinite().all()
