"""What stands between autograd and the kernels' own gradients."""

from itertools import product

import pytest
import torch

import regard
from regard import biases, masks
from regard.core.batched_problem import BatchedProblem, Saved
from regard.kernels import custom_op
from regard.kernels.tiled import TiledKernel

NAMES = ("query", "key", "value", "bias", "sinks")


def leaves(wanted: tuple[bool, ...] = (True,) * 5) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 6), (4, 5, 7), (4,)
    drawn = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return {name: t.requires_grad_(want) for name, t, want in zip(NAMES, drawn, wanted, strict=True)}


def attention(of: dict[str, torch.Tensor], kernel: str = "tiled") -> tuple[torch.Tensor, torch.Tensor]:
    return regard.attention_with_lse(
        of["query"], of["key"], of["value"], bias=of["bias"], sinks=of["sinks"], mask=masks.causal(), kernel=kernel
    )


def gradients(of: dict[str, torch.Tensor], kernel: str = "tiled") -> dict[str, torch.Tensor]:
    output, lse = attention(of, kernel)
    wanted = {name: tensor for name, tensor in of.items() if tensor.requires_grad}
    total = output.sin().sum() + lse.square().sum()
    return dict(zip(wanted, torch.autograd.grad(total, list(wanted.values())), strict=True))


@pytest.mark.parametrize("wanted", [w for w in product([True, False], repeat=5) if any(w)])
def test_any_of_the_tensors_may_need_a_gradient(wanted):
    expected = gradients(leaves(), "reference")
    actual = gradients(leaves(wanted))
    assert set(actual) == {name for name, want in zip(NAMES, wanted, strict=True) if want}
    torch.testing.assert_close(actual, {name: expected[name] for name in actual})


@pytest.mark.parametrize("only", ["output", "lse"])
def test_gradients_of_one_of_the_results(only):
    def of(kernel: str) -> tuple[torch.Tensor, ...]:
        given = leaves()
        output, lse = attention(given, kernel)
        total = output.sin().sum() if only == "output" else lse.square().sum()
        return torch.autograd.grad(total, list(given.values()), allow_unused=True, materialize_grads=True)

    torch.testing.assert_close(of("tiled"), of("reference"))


def test_a_gradient_from_above_without_memory_of_its_own():
    """A sum's gradient is one number, expanded: no kernel may take its strides for those of a whole tensor."""
    for kernel in ("tiled", "block_sparse", "decode"):
        query, key = torch.randn(2, 4, 5, 8).requires_grad_(), torch.randn(2, 4, 7, 8)
        results = [
            torch.autograd.grad(regard.attention(query, key, key, mask=masks.causal(), kernel=name).sum(), query)[0]
            for name in (kernel, "reference")
        ]
        torch.testing.assert_close(*results, atol=2e-6, rtol=1e-5)


def test_nothing_is_recorded_where_nothing_is_asked_for():
    given = leaves((False,) * 5)
    output, lse = attention(given)
    assert not output.requires_grad
    assert not lse.requires_grad
    with torch.no_grad():
        assert not attention(leaves())[0].requires_grad


def test_one_tensor_in_several_places():
    def of(kernel: str) -> torch.Tensor:
        x = leaves()["query"]
        bias = biases.tensor(x[0, :, :, :5])
        output = regard.attention(x, x, x, bias=bias + bias, kernel=kernel)
        return torch.autograd.grad(output.sin().sum(), x)[0]

    torch.testing.assert_close(of("tiled"), of("reference"))


def test_written_to_before_the_backward_pass():
    given = leaves()
    query = given["query"].clone()
    output, _ = attention({**given, "query": query})
    query.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_backward_twice_needs_its_graph_kept():
    given = leaves()
    output, _ = attention(given)
    first = torch.autograd.grad(output.sum(), given["query"], retain_graph=True)
    assert torch.autograd.grad(output.sum(), given["query"])[0].equal(first[0])


def test_the_bias_is_asked_for_its_gradient_only_where_it_has_one(monkeypatch):
    asked = []
    original = TiledKernel.backward

    def backward(self: TiledKernel, batched: BatchedProblem, saved: Saved):
        asked.append(saved.needs_bias_grad)
        return original(self, batched, saved)

    monkeypatch.setattr(TiledKernel, "backward", backward)
    query = torch.randn(1, 2, 3, 4).requires_grad_()
    for bias, wants in ((torch.zeros(3, 3), False), (torch.zeros(3, 3).requires_grad_(), True)):
        asked.clear()
        regard.attention(query, query, query, bias=bias, kernel="tiled").sum().backward()
        assert asked == [wants]


def test_without_the_log_sum_exp_there_is_none():
    query = torch.randn(1, 2, 3, 4)
    assert TiledKernel().run(regard.explain(query, query, query).problem).lse is None
    with pytest.raises(AssertionError, match="was computed without it"):
        custom_op.require_lse(None)


def test_the_share_beside_a_sink_does_not_depend_on_how_large_the_scores_are():
    output, lse = torch.ones(1, 1, 3, 1), torch.tensor([[[8000.0, 8000.0, -torch.inf]]])
    for sink, share in ((7998.0, 0.880797), (8003.0, 0.0474259), (-torch.inf, 1.0)):
        scaled, total = custom_op.add_sinks(output, lse, torch.tensor([sink]))
        torch.testing.assert_close(scaled.flatten(), torch.tensor([share, share, 0.0]), rtol=1e-5, atol=0)
        assert total[0, 0, 2] == sink
