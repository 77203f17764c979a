"""torch's transforms: custom operators, torch.compile, vmap and grad of torch.func, autocast."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.func import grad, vmap

import regard
from regard import biases, masks, native, scores
from regard.kernels import KERNELS, Kernel
from regard.kernels.custom_op import apply_kernel
from regard.kernels.planning import choice
from regard.kernels.tiled import TiledKernel
from regard.utils.pytree import tree_flatten

OWN = [kernel for kernel in KERNELS if kernel.name in ("decode", "block_sparse", "additive", "tiled")]
LENGTHS = (5, 7)


@pytest.fixture(autouse=True)
def compiled_anew() -> None:
    torch.compiler.reset()


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype).requires_grad_()


def tensors(m: int = 5, n: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return rand(2, 4, m, 8), rand(2, 2, n, 8), rand(2, 2, n, 6)


ROUNDINGS = 32
"""Of the largest number of a tensor, in float32: sums of some hundreds of terms in another order differ by 6."""


def close(actual: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        largest = expected.detach().abs().nan_to_num(posinf=0.0).amax().item() if expected.numel() else 0.0
        torch.testing.assert_close(actual, expected, atol=ROUNDINGS * 2.0**-24 * max(largest, 1.0), rtol=0.0)
    else:
        for own, other in zip(actual, expected, strict=True):
            close(own, other)


def window_of(reach: int) -> Callable:
    return lambda b, h, q, k: (q - k).abs() <= reach


DOCUMENTS = torch.tensor([0, 0, 1, 1, 1, 2, 2])
KEEP = torch.rand(2, 1, 5, 7, generator=torch.Generator().manual_seed(1)) < 0.7
LEARNED = torch.randn(4, 6, generator=torch.Generator().manual_seed(2)).requires_grad_()
ADDED = torch.randn(4, 5, 7, generator=torch.Generator().manual_seed(3)).requires_grad_()
SINKS = torch.randn(4, generator=torch.Generator().manual_seed(4)).requires_grad_()
CENTER = torch.randn(4, 5, generator=torch.Generator().manual_seed(5)).requires_grad_()
with torch.random.fork_rng():
    torch.manual_seed(6)
    ADDITIVE = scores.Additive(8, 8, 9)
CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.causal() & masks.window(before=2)},
    "documents": {"mask": masks.causal() & masks.documents(DOCUMENTS)},
    "padding": {"mask": masks.padding(lengths=torch.tensor([3, 7]))},
    "tensor": {"mask": KEEP},
    "blocks": {"mask": masks.random_blocks(8, 2, 2, heads=4)},
    "not": {"mask": ~(masks.strided(3) | masks.global_tokens([2]))},
    "mod": {"mask": masks.from_mod(window_of(2))},
    "alibi": {"bias": biases.alibi(4), "mask": masks.causal()},
    "bias": {"bias": ADDED},
    "relative": {"bias": biases.relative(LEARNED, max_distance=4), "mask": masks.causal()},
    "sum": {"bias": biases.tensor(ADDED) + biases.relative(LEARNED, max_distance=4)},
    "gaussian": {"bias": biases.gaussian(CENTER, 1.5)},
    "additive": {"score": ADDITIVE, "mask": masks.causal()},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": SINKS, "mask": masks.window(1, 0)},
    "dropout": {"dropout_p": 0.3},
    "positions": {
        "mask": masks.causal(),
        "query_positions": torch.tensor([6, 0, 3, 3, 1]),
        "key_positions": torch.tensor([[3, 1, 0, 6, 5, 4, 2], [0, 1, 2, 3, 4, 5, 6]]),
    },
    "everything": {
        "mask": masks.causal() & masks.where(keep=KEEP),
        "bias": biases.relative(LEARNED, max_distance=4),
        "softcap": 3.0,
        "sinks": SINKS,
        "dropout_p": 0.2,
    },
}
UNCOMPILED = ["test_schema", "test_autograd_registration", "test_faketensor"]
COMPILED = {
    "decode": ["causal"],
    "block_sparse": ["documents", "sinks"],
    "additive": ["additive"],
    "tiled": ["gaussian", "positions", "everything"],
}
"""Calls of a kernel whose compiled code `make test` checks at any shapes: each kernel, and all kinds of tensors.

TestCompile compiles every call at one shape, and compares numbers; other calls at any shapes are slow.
"""
LEAVES = [LEARNED, ADDED, SINKS, CENTER, *ADDITIVE.parameters()]


def both_and_gradients(call: Callable, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Output, log-sum-exp, and the gradients in what was given and in all that the calls hold."""
    torch.manual_seed(5)
    output, lse = call(*given)
    seen = torch.where(lse.isfinite(), lse, 0.0)
    above = torch.randn(output.shape, generator=torch.Generator().manual_seed(6), dtype=output.dtype)
    total = (output * above).sum() + seen.square().sum()
    gradients = torch.autograd.grad(total, [*given, *LEAVES], allow_unused=True, materialize_grads=True)
    return [output.detach(), lse.detach(), *gradients]


def admitted(kernel: Kernel) -> list[str]:
    """The names of the calls that the kernel computes."""
    return [name for name, call in CALLS.items() if not kernel.why_not(regard.explain(*tensors(), **call).problem)]


def opcheck(kernel: Kernel, call: str, checks: list[str]) -> None:
    """torch's checks of the operator, and of the one that computes its gradients."""
    held, form = tree_flatten(regard.explain(*tensors(), **CALLS[call]).problem)
    held = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in held]
    torch.library.opcheck(torch.ops.regard.attend.default, (held, form, kernel.name), test_utils=checks)
    output, lse = torch.ops.regard.attend(held, form, kernel.name)
    needed = [tensor.requires_grad for tensor in held]
    given = [tensor.detach() for tensor in held]
    arguments = output.detach() + 1, lse.detach() + 1, output.detach(), lse.detach(), given, needed, form
    torch.library.opcheck(torch.ops.regard.attend_backward.default, (*arguments, kernel.name), test_utils=checks)


class TestOperators:
    @pytest.mark.parametrize(
        ("kernel", "call"),
        [pytest.param(kernel, call, id=f"{kernel.name}-{call}") for kernel in OWN for call in admitted(kernel)],
    )
    def test_opcheck_of_schema_and_shapes(self, kernel, call):
        opcheck(kernel, call, UNCOMPILED)

    @pytest.mark.parametrize(
        ("kernel", "call"),
        [
            pytest.param(
                kernel,
                call,
                id=f"{kernel.name}-{call}",
                marks=[] if call in COMPILED[kernel.name] else [pytest.mark.slow],
            )
            for kernel in OWN
            for call in admitted(kernel)
        ],
    )
    def test_opcheck_of_compiled_code(self, kernel, call):
        opcheck(kernel, call, ["test_aot_dispatch_dynamic"])

    def test_a_wrong_shape_would_be_seen(self):
        problem = regard.explain(*tensors()).problem
        held, form = tree_flatten(problem)
        output, lse = torch.ops.regard.attend(held, form, "tiled")
        assert output.shape == (2, 4, 5, 6)
        assert lse.shape == (2, 4, 5)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_opcheck_of_other_dtypes(self, dtype):
        query, key, value = (tensor.detach().to(dtype).requires_grad_() for tensor in tensors())
        problem = regard.explain(query, key, value, mask=masks.causal()).problem
        for name in ("tiled", "block_sparse", "decode"):
            torch.library.opcheck(torch.ops.regard.attend.default, (*tree_flatten(problem), name))

    @pytest.mark.parametrize("call", ["bias", "relative", "sum", "gaussian", "everything"])
    def test_gradients_of_a_bias_below_autograd(self, call):
        """Where nothing records what is computed, the bias's gradient is the same: compiled code calls it so."""
        held, form = tree_flatten(regard.explain(*tensors(), **CALLS[call]).problem)
        held, needed = [tensor.detach() for tensor in held], [tensor.requires_grad for tensor in held]
        output, lse = torch.ops.regard.attend(held, form, "tiled")
        arguments = output + 1, lse + 1, output, lse, held, needed, form, "tiled"
        expected = torch.ops.regard.attend_backward(*arguments)
        with torch.inference_mode():
            close(torch.ops.regard.attend_backward(*arguments), expected)
        with torch._C._AutoDispatchBelowAutograd():
            close(torch.ops.regard.attend_backward(*arguments), expected)

    def test_the_operator_is_what_runs_uncompiled(self):
        given = tensors()
        problem = regard.explain(*given, mask=masks.causal()).problem
        output, lse = torch.ops.regard.attend(*tree_flatten(problem), "tiled")
        close((output, lse), regard.attention_with_lse(*given, mask=masks.causal(), kernel="tiled"))
        result = apply_kernel(problem, TiledKernel())
        close(result.output, output)


class TestCompile:
    @pytest.mark.parametrize("call", CALLS)
    def test_forward_and_backward(self, call):
        given = tensors()

        def attention(*of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return regard.attention_with_lse(*of, **CALLS[call])

        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        close(both_and_gradients(compiled, given), both_and_gradients(attention, given))

    def test_a_plain_problem_of_any_size_is_one_graph(self):
        query = torch.randn(1, 4, 160, 8)
        assert choice.MAX_PLAIN_PAIRS < 4 * 160 * 160
        compiled = torch.compile(regard.attention, fullgraph=True, backend="aot_eager")
        close(compiled(query, query, query), regard.attention(query, query, query))

    @pytest.mark.parametrize("kernel", ["decode", "block_sparse", "tiled", "reference"])
    def test_a_kernel_by_name(self, kernel):
        given = tensors()

        def attention(*of: torch.Tensor) -> torch.Tensor:
            return regard.attention(*of, mask=masks.causal(), kernel=kernel)

        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        close(compiled(*given), attention(*given))

    @pytest.mark.parametrize("call", ["plain", "window", "alibi", "dropout", "sinks", "softcap"])
    def test_dynamic_lengths(self, call):
        options = CALLS[call]

        def attention(*of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return regard.attention_with_lse(*of, **options)

        graphs = []

        def counting(graph: torch.fx.GraphModule, inputs: list) -> Callable:
            graphs.append(graph)
            return graph.forward

        compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend=counting)
        for m, n in ((5, 7), (6, 11), (9, 13), (4, 21)):
            given = tensors(m, n)
            torch.manual_seed(5)
            actual = compiled(*given)
            torch.manual_seed(5)
            close(actual, attention(*given))
        assert len(graphs) == 1

    @pytest.mark.parametrize("call", ["plain", "window", "dropout"])
    def test_lengths_that_turn_out_to_change(self, call):
        """torch compiles for the first lengths, then for any."""
        options = CALLS[call]

        def attention(*of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return regard.attention_with_lse(*of, **options)

        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        with torch._dynamo.config.patch(recompile_limit=2):
            for m, n in ((5, 7), (6, 11), (9, 13), (4, 21)):
                given = tensors(m, n)
                close(both_and_gradients(compiled, given), both_and_gradients(attention, given))

    def test_masks_made_within(self):
        def attention(query, key, value, lengths):
            mask = masks.causal() & masks.window(before=3) & masks.padding(lengths=lengths)
            return regard.attention(query, key, value, mask=mask)

        given, lengths = tensors(), torch.tensor([4, 7])
        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        close(compiled(*given, lengths), attention(*given, lengths))

    def test_a_function_that_was_never_seen_before(self):
        for mask in (masks.from_mod(lambda b, h, q, k: q - k < 3), masks.from_mod(lambda b, h, q, k: q >= k)):
            given = tensors()

            def attention(*of: torch.Tensor, mask=mask) -> tuple[torch.Tensor, torch.Tensor]:
                return regard.attention_with_lse(*of, mask=mask)

            compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
            close(both_and_gradients(compiled, given), both_and_gradients(attention, given))

    def test_within_a_module(self):
        class Block(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.project = torch.nn.Linear(8, 24)
                self.table = torch.nn.Parameter(torch.randn(2, 8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                query, key, value = (
                    part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.project(x).chunk(3, -1)
                )
                bias = biases.relative(self.table, max_distance=6)
                return regard.attention(query, key, value, mask=masks.causal(), bias=bias)

        block, x = Block(), torch.randn(3, 6, 8)
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
        of_compiled = torch.autograd.grad(compiled(x).sum(), list(block.parameters()))
        close(of_compiled, torch.autograd.grad(block(x).sum(), list(block.parameters())))

    def test_nan_behind_the_mask_stays_there(self):
        query, key, value = (tensor.detach() for tensor in tensors())
        key[..., 6, :], value[..., 6, :] = torch.nan, torch.inf
        mask = masks.where(ignore=torch.arange(7) == 6)
        compiled = torch.compile(
            lambda q, k, v: regard.attention(q, k, v, mask=mask), fullgraph=True, backend="aot_eager"
        )
        close(compiled(query, key, value), regard.attention(query, key[..., :6, :], value[..., :6, :]))

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:.*torch.jit.script_method")  # torch's own, when it loads
    def test_by_the_default_backend(self):
        given, options = tensors(), CALLS["everything"] | {"dropout_p": 0.0}

        def attention(*of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return regard.attention_with_lse(*of, **options)

        compiled = torch.compile(attention, fullgraph=True)
        close(both_and_gradients(compiled, given), both_and_gradients(attention, given))


MAPPED = [name for name in CALLS if name not in ("tensor", "padding", "positions", "everything")]


class TestFunctionTransforms:
    """Over the batch: each sequence by itself is what the batch is."""

    @pytest.mark.parametrize("call", [name for name in MAPPED if name != "dropout"])
    def test_vmap(self, call):
        options = CALLS[call]

        def attention(*of: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            # one sequence, with heads
            output, lse = regard.attention_with_lse(*(tensor.unsqueeze(0) for tensor in of), **options)
            return output.squeeze(0), lse.squeeze(0)

        given = tensors()
        close(vmap(attention)(*given), regard.attention_with_lse(*given, **options))

    @pytest.mark.parametrize("call", [name for name in MAPPED if name != "dropout"])
    def test_vmap_of_grad(self, call):
        options = CALLS[call]

        def loss(*of: torch.Tensor) -> torch.Tensor:
            output, lse = regard.attention_with_lse(*(tensor.unsqueeze(0) for tensor in of), **options)
            return output.sin().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()

        given = tuple(tensor.detach() for tensor in tensors())
        actual = vmap(grad(loss, (0, 1, 2)))(*given)
        each = [grad(loss, (0, 1, 2))(*(tensor[i] for tensor in given)) for i in range(2)]
        close(actual, tuple(torch.stack(parts) for parts in zip(*each, strict=True)))
        leaves = tensors()
        with torch.no_grad():
            for leaf, tensor in zip(leaves, given, strict=True):
                leaf.copy_(tensor)
        output, lse = regard.attention_with_lse(*leaves, **options)
        total = output.sin().sum() + torch.where(lse.isfinite(), lse, 0.0).sum()
        close(actual, torch.autograd.grad(total, leaves))

    @pytest.mark.parametrize("dim", [0, 1, 2])
    @pytest.mark.parametrize("options", [{}, {"mask": masks.causal()}, {"softcap": 3.0}], ids=["plain", "mask", "cap"])
    def test_vmap_over_nothing(self, options, dim):
        x = torch.randn(*(0 if axis == dim else size for axis, size in enumerate((3, 2, 5, 8))))
        mapped = [size for axis, size in enumerate(x.shape) if axis != dim]
        for function in (
            lambda q: regard.attention(q, q, q, **options),
            grad(lambda q: regard.attention(q, q, q, **options).sum()),
            lambda q: regard.linear_attention(q, q, q, causal=True),
        ):
            assert vmap(function, in_dims=dim)(x).shape == (0, *mapped)
        output, lse = vmap(lambda q: regard.attention_with_lse(q, q, q, **options), in_dims=dim)(x)
        assert (output.shape, lse.shape) == ((0, *mapped), (0, *mapped[:-1]))
        through = x.clone().requires_grad_()
        vmap(lambda q: regard.attention(q, q, q, **options), in_dims=dim)(through).sum().backward()
        assert through.grad is not None
        assert through.grad.shape == x.shape

    @pytest.mark.parametrize("mask", [None, masks.window(before=2, after=1)], ids=["plain", "window"])
    @pytest.mark.parametrize("kernel", [None, "short", "cpu_flash", "block_sparse", "sdpa", "tiled"])
    def test_many_gradients_at_once(self, kernel, mask):
        """torch.autograd.grad(..., is_grads_batched=True), by which functional.jacobian(vectorize=True) computes."""
        dtype = torch.float32 if kernel in ("short", "cpu_flash") else torch.float64
        if dtype == torch.float32 and not native.available():
            return
        q, k, v = (torch.randn(2, 4, n, 8, dtype=dtype, requires_grad=True) for n in (5, 7, 7))
        output = regard.attention(q, k, v, mask=mask, kernel=kernel)
        above = torch.randn(3, *output.shape, dtype=dtype)
        many = torch.autograd.grad(output, (q, k, v), above, is_grads_batched=True, retain_graph=True)
        each = [torch.autograd.grad(output, (q, k, v), one, retain_graph=True) for one in above]
        for found, expected in zip(many, zip(*each, strict=True), strict=True):
            assert torch.allclose(found, torch.stack(expected), atol=1e-5 if dtype == torch.float32 else 1e-12)
        (first,) = torch.autograd.grad(output, q, above, is_grads_batched=True, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), k)
        exact = [tensor.detach().double().requires_grad_() for tensor in (q, k, v)]
        output = regard.attention(*exact, mask=mask, kernel="reference")
        grads = [torch.autograd.grad(output, exact[0], one.double(), create_graph=True)[0] for one in above]
        (truth,) = torch.autograd.grad(torch.stack(grads).square().sum(), exact[1])
        assert torch.allclose(second.double(), truth, atol=1e-4 if dtype == torch.float32 else 1e-11)

    def test_vmap_of_dropout(self):
        def attention(*of: torch.Tensor) -> torch.Tensor:
            return regard.attention(*(tensor.unsqueeze(0) for tensor in of), dropout_p=0.5).squeeze(0)

        given = tuple(tensor.detach()[:1].expand(3, -1, -1, -1) for tensor in tensors())
        same = vmap(attention, randomness="same")(*given)
        close(same[1], same[0])
        different = vmap(attention, randomness="different")(*given)
        assert not torch.allclose(different[0], different[1])
        with pytest.raises(RuntimeError, match="random"):
            vmap(attention)(*given)

    def test_vmap_over_a_bias(self):
        query, key, value = (tensor.detach() for tensor in tensors())
        many = torch.randn(3, 4, 5, 7)
        mapped = vmap(lambda bias: regard.attention(query, key, value, bias=bias))(many)
        close(mapped, torch.stack([regard.attention(query, key, value, bias=bias) for bias in many]))

    def test_vmap_over_other_axes(self):
        query, key, value = (tensor.detach() for tensor in tensors())
        mapped = vmap(lambda q: regard.attention(q, key, value, mask=masks.causal()), in_dims=1, out_dims=2)
        queries = torch.stack([query, -query, query + 1], 1)
        each = [regard.attention(queries[:, i], key, value, mask=masks.causal()) for i in range(3)]
        close(mapped(queries), torch.stack(each, 2))

    def test_grad_of_grad(self):
        query, key, value = (tensor.detach().double() for tensor in tensors())

        def loss(of: torch.Tensor) -> torch.Tensor:
            return regard.attention(of, key, value, mask=masks.causal()).sin().sum()

        second = grad(lambda of: grad(loss)(of).square().sum())(query)
        leaf = query.clone().requires_grad_()
        (first,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
        close(second, torch.autograd.grad(first.square().sum(), leaf)[0])

    def test_functional_call_over_an_ensemble(self):
        ensemble = [scores.Additive(8, 8, 9) for _ in range(3)]
        parameters, _ = torch.func.stack_module_state(ensemble)
        query, key, value = (tensor.detach() for tensor in tensors())

        class Attend(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.score = ensemble[0]

            def forward(self) -> torch.Tensor:
                return regard.attention(query, key, value, score=self.score)

        attending = Attend()
        named = {f"score.{name}": parameter for name, parameter in parameters.items()}
        mapped = vmap(lambda of: torch.func.functional_call(attending, of, ()))(named)
        close(mapped, torch.stack([regard.attention(query, key, value, score=score) for score in ensemble]))


class TestAutocast:
    @pytest.mark.parametrize("kernel", ["sdpa", "decode", "block_sparse", "tiled", "reference"])
    def test_inputs_are_cast_and_gradients_come_back(self, kernel):
        given = tensors()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = regard.attention(*given, mask=masks.causal(), kernel=kernel)
        assert output.dtype == torch.bfloat16
        rounded = [tensor.detach().bfloat16().requires_grad_() for tensor in given]
        expected = regard.attention(*rounded, mask=masks.causal(), kernel=kernel)
        assert output.equal(expected)
        actual = torch.autograd.grad(output.float().sum(), given)
        wanted = torch.autograd.grad(expected.float().sum(), rounded)
        assert all(gradient.dtype == torch.float32 for gradient in actual)
        assert all(a.equal(b.float()) for a, b in zip(actual, wanted, strict=True))

    @pytest.mark.parametrize("kernel", ["additive", "tiled", "reference"])
    def test_backward_within_autocast_too(self, kernel):
        if kernel == "additive" and not native.available():
            pytest.skip(str(native.why_not()))
        given = tensors()
        options: dict[str, Any] = {"score": ADDITIVE, "mask": masks.causal()}
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output, lse = regard.attention_with_lse(*given, kernel=kernel, **options)
            gradients = torch.autograd.grad(output.float().sum() + lse.sum(), given)
        assert lse.dtype == torch.float32
        assert all(gradient.isfinite().all() for gradient in gradients)

    def test_compiled(self):
        given = tensors()

        def attention(*of: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return regard.attention(*of, mask=masks.causal(), bias=biases.alibi(4))

        compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
        assert compiled(*given).dtype == torch.bfloat16
        torch.testing.assert_close(compiled(*given), attention(*given), atol=2e-2, rtol=2e-2)
