"""An attention hook is called with every problem, and changes no bit of any result."""

import itertools
from typing import Any

import pytest
import torch

import regard
from regard import biases, masks, scores
from regard.attention import Observation
from regard.kernels import KERNELS, Result
from regard.kernels.hooks import (
    AttentionSubstitute,
    active_substitute,
    attention_hook,
    current_hook,
    substitute_attention,
)
from regard.kernels.validation import make_problem
from regard.lenses import Entropy, Weights


class Recorder:
    """A hook that stores its arguments."""

    def __init__(self):
        self.calls = []

    def __call__(self, problem, lse):
        self.calls.append((problem, lse))


SIZES = [(1, 1, 1, 1, 1, 4, 4), (2, 4, 2, 7, 9, 16, 16), (2, 4, 2, 7, 90, 16, 16), (1, 2, 2, 1, 300, 32, 32)]
SIZES += [(1, 3, 3, 130, 130, 24, 24), (1, 2, 2, 5, 500, 8, 12), (2, 4, 4, 33, 2, 64, 64), (1, 8, 2, 70, 190, 16, 16)]
OPTIONS = {
    "nothing": lambda m, n: {},
    "causal": lambda m, n: {"mask": masks.causal()},
    "padding": lambda m, n: {"mask": masks.padding(lengths=torch.tensor([n // 2]))},
    "window": lambda m, n: {"mask": masks.causal() & masks.window(before=5)},
    "bias": lambda m, n: {"bias": torch.randn(m, n)},
    "softcap": lambda m, n: {"softcap": 2.0},
    "dropout": lambda m, n: {"dropout_p": 0.4},
}
LAYOUTS = ("heads first", "heads last", "no heads")


def tensors(size, dtype, layout, grad):
    batch, heads, key_heads, m, n, dim, value_dim = size

    def one(count, length, width):
        made = torch.randn(batch, length, count, width).to(dtype).transpose(1, 2)
        made = made if layout == "heads last" else made.contiguous()
        return (made[:, 0] if layout == "no heads" else made).detach().requires_grad_(grad)

    return one(heads, m, dim), one(key_heads, n, dim), one(key_heads, n, value_dim)


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("grad", [False, True])
def test_no_bit_changes(dtype, name, grad):
    for size, layout in itertools.product(SIZES if dtype == torch.float32 else SIZES[2:5], LAYOUTS):
        query, key, value = tensors(size, dtype, layout, grad)
        options = OPTIONS[name](*size[3:5])
        options = {of: part.to(dtype) if of == "bias" else part for of, part in options.items()}
        torch.manual_seed(3)
        plain = regard.attention(query, key, value, **options), torch.rand(2)
        torch.manual_seed(3)
        recorder = Recorder()
        with attention_hook(recorder):
            heard = regard.attention(query, key, value, **options), torch.rand(2)
        assert all(torch.equal(a, b) for a, b in zip(plain, heard, strict=True)), (size, layout)
        ((_, lse),) = recorder.calls
        options.pop("dropout_p", None)
        expected = regard.attention_with_lse(query, key, value, **options)[1]
        rough = dtype in (torch.float16, torch.bfloat16)
        torch.testing.assert_close(lse, expected.detach(), rtol=0, atol=2e-2 if rough else 1e-4)
        assert not lse.requires_grad


@pytest.mark.parametrize("kernel", [kernel.name for kernel in KERNELS])
def test_no_kernel_changes_a_bit(kernel):
    query = torch.randn(1, 4, 1 if kernel == "decode" else 70, 16)
    key = torch.randn(1, 2 if kernel == "decode" else 4, 90, 16)
    options: dict[str, Any] = (
        {"score": scores.Additive(16, 16, 5)} if kernel == "additive" else {"mask": masks.window(before=20)}
    )
    own = next(of for of in KERNELS if of.name == kernel)
    if reasons := own.why_not(make_problem(query, key, key, **options)):
        pytest.skip("; ".join(reasons))
    plain = regard.attention(query, key, key, kernel=kernel, **options)
    recorder = Recorder()
    with attention_hook(recorder):
        assert torch.equal(regard.attention(query, key, key, kernel=kernel, **options), plain)
    assert len(recorder.calls) == 1


@pytest.mark.parametrize("kernel", ["short", "cpu_flash", "tiled", "reference"])
def test_gradients_are_the_same(kernel):
    tensors_ = [torch.randn(1, 2, 70, 16, requires_grad=True) for _ in range(3)]
    if reasons := next(of for of in KERNELS if of.name == kernel).why_not(make_problem(*tensors_, mask=masks.causal())):
        pytest.skip("; ".join(reasons))
    plain = torch.autograd.grad(regard.attention(*tensors_, mask=masks.causal(), kernel=kernel).sum(), tensors_)
    with attention_hook(Recorder()):
        output = regard.attention(*tensors_, mask=masks.causal(), kernel=kernel)
    heard = torch.autograd.grad(output.sum(), tensors_)
    if kernel == "short":  # with the log-sum-exp it sums output times gradient, without it weights times gradients
        torch.testing.assert_close(heard, plain, rtol=1e-5, atol=1e-6)
    else:
        assert all(torch.equal(a, b) for a, b in zip(plain, heard, strict=True))


def test_every_function_calls_the_hook():
    query = torch.randn(2, 5, 8)
    recorder, whole = Recorder(), Weights()
    with attention_hook(recorder):
        regard.attention(query, query, query)
        regard.attention_with_lse(query, query, query, bias=biases.tensor(torch.zeros(5)))
        seen = regard.observe(query, query, query, Entropy(), whole)
        regard.scaled_dot_product_attention(query, query, query, is_causal=True)
        regard.explain(query, query, query)
    assert len(recorder.calls) == 4
    problem, lse = recorder.calls[2]
    torch.testing.assert_close((problem.scores() - lse[..., None]).exp(), seen[whole])


def test_nan_is_cleaned_away_and_shows_in_the_log_sum_exp():
    query, key = torch.randn(1, 1, 4, 8), torch.randn(1, 1, 4, 8)
    key[..., 3, :] = float("nan")
    recorder = Recorder()
    with attention_hook(recorder):
        regard.attention(query, key, query, mask=masks.causal())
    ((problem, lse),) = recorder.calls
    assert problem.pairs.key.isfinite().all()
    assert lse[0, 0].isnan().tolist() == [False, False, False, True]


def test_no_hook_is_called_under_compile_and_func():
    query = torch.randn(1, 2, 70, 16)
    recorder = Recorder()
    with attention_hook(recorder):
        compiled = torch.compile(regard.attention, backend="eager", fullgraph=True)(query, query, query)
        mapped = torch.func.vmap(lambda x: regard.attention(x, x, x, softcap=2.0))(query[None])
    assert recorder.calls == []
    torch.testing.assert_close(compiled, regard.attention(query, query, query))
    torch.testing.assert_close(mapped[0], regard.attention(query, query, query, softcap=2.0))


def test_a_hook_is_removed_after_the_block():
    query, recorder = torch.randn(1, 2, 5, 4), Recorder()
    with pytest.raises(KeyError), attention_hook(recorder):
        raise KeyError
    regard.attention(query, query, query)
    assert recorder.calls == []


def test_a_substitute_computes_every_attention_of_its_block():
    query = torch.randn(2, 3, 5, 8)
    expected = regard.attention(query, query, query)
    seen = []

    def compute(problem):
        seen.append(problem.weights_shape)
        return regard.attention(problem.value, problem.value, problem.value) + 1.0  # not replaced in turn

    with substitute_attention(compute):
        output = regard.attention(query, query, query)
        of_lens, lse = regard.attention_with_lse(query, query, query)
    assert seen == [(2, 3, 5, 5)] * 2
    assert torch.equal(output, expected + 1.0)
    assert torch.equal(of_lens, expected + 1.0)
    torch.testing.assert_close(lse, regard.attention_with_lse(query, query, query)[1])
    assert torch.equal(regard.attention(query, query, query), expected)


def test_a_substitute_that_calls_hooks_gets_those_of_the_block():
    """Its log-sum-exp and its observation are used; a hook around the block is passed to it by whoever makes it."""
    query, calls = torch.randn(2, 3, 5, 8), []

    def made(hook=None):
        def compute(problem):
            calls.append((hook, current_hook()))
            return Result(problem.value, problem.value[..., 0])

        def observe(problem, lenses):
            return Observation(problem.value, problem.value[..., 0], dict.fromkeys(lenses, hook))

        return AttentionSubstitute(compute, observe=observe, hook=hook, with_hook=made)

    def inner(problem, lse):
        raise AssertionError("the substitute calls it")

    with active_substitute(made()):
        assert current_hook() is None
        with attention_hook(inner):
            assert current_hook() is inner
            output, lse = regard.attention_with_lse(query, query, query)
            seen = regard.observe(query, query, query, regard.lenses.Entropy())
        assert regard.observe(query, query, query, regard.lenses.Entropy())[regard.lenses.Entropy()] is None
    assert calls == [(inner, None)]
    assert torch.equal(output, query)
    assert torch.equal(lse, query[..., 0])
    assert seen[regard.lenses.Entropy()] is inner


def test_a_substitute_leaves_a_call_to_its_kernel():
    query = torch.randn(2, 3, 5, 8)
    with substitute_attention(lambda problem: None):
        output = regard.attention(query, query, query)
        lse = regard.attention_with_lse(query, query, query)[1]
    assert torch.equal(output, regard.attention(query, query, query))
    assert torch.equal(lse, regard.attention_with_lse(query, query, query)[1])
