"""Problems of one signature share a choice: no kernel may refuse one of them and compute another."""

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import biases, masks, scores
from regard.biases import Bias
from regard.core.problem import Problem
from regard.core.symbolic_positions import Positions, ResiduePositions
from regard.kernels import KERNELS, make_problem
from regard.kernels.decomposed import DecomposedKernel
from regard.kernels.flex import FlexKernel
from regard.kernels.planning import signature
from regard.kernels.planning.signature import exact_signature, memoize_choice, rounded_signature
from regard.masks import Mask
from regard.ring.block_attention import block_kernel
from regard.tiles.selections import selections

DECOMPOSED = next(kernel for kernel in KERNELS if isinstance(kernel, DecomposedKernel))
COMPARED = (*KERNELS, FlexKernel(None, ("cpu",)))
LENGTHS = ((0,), (1, 2), (5,), (63, 64), (65, 66, 68), (125, 127, 128), (129, 136), (497, 505, 512), (513, 520, 544))
"""Lengths that are rounded to the same, in most cases."""


class Draws:
    """Random choices that are mostly those of a structure, and sometimes those of one of its variants."""

    def __init__(self, structure: int, variant: int) -> None:
        self.structure, self.variant = random.Random(structure), random.Random(f"{structure} {variant}")

    def choice(self, options: Sequence[Any]) -> Any:
        chosen, other = self.structure.choice(options), self.variant.choice(options)
        return other if self.variant.random() < 0.05 else chosen

    def happens(self, probability: float) -> bool:
        return self.choice(range(20)) < 20 * probability

    def number(self, stop: int) -> int:
        """A number 0..stop-1, of the variant."""
        return self.variant.randrange(stop)


def drawn_mask(draw: Draws, queries: int, keys: int, batch: int) -> Mask | None:
    """A mask, of values of the variant: some of a kind have spans or parts, others not."""
    ids = torch.tensor([draw.number(3) for _ in range(4 * LENGTHS[-1][-1])])
    kinds: dict[str, Callable[[], Mask | None]] = {
        "none": lambda: None,
        "causal": masks.causal,
        "window": lambda: masks.causal() & masks.window(before=draw.choice((1, 2))),
        "padding": lambda: masks.padding([draw.number(keys + 1) for _ in range(draw.choice((1, batch)))]),
        "documents": lambda: masks.documents(ids.sort().values if draw.number(2) else ids) if queries <= keys else None,
        "prefixes": lambda: masks.prefix([draw.number(keys + 1)] * batch) & masks.causal(),
        "pairs": lambda: masks.where(keep=torch.rand(draw.choice((1, queries)), keys) > 0.5),
        "strided": lambda: masks.causal() & masks.strided(draw.choice((2, 16))),
        "function": lambda: masks.from_mod(allowing(draw.number(keys + 1))),
    }
    return kinds[draw.choice([*kinds, "documents"])]()


def allowing(limit: int) -> Callable[..., Tensor]:
    return lambda b, h, q, k: k <= limit


def drawn_bias(draw: Draws, heads: int, keys: int) -> Bias | None:
    def tensor(*sizes: int) -> Tensor:
        return torch.full(sizes, float(draw.number(5)), requires_grad=draw.happens(0.3))

    def scaled(factor: Tensor) -> Callable[..., Tensor]:
        return lambda score, b, h, q, k: score + factor * (q - k)

    kinds: dict[str, Callable[[], Bias | None]] = {
        "alibi": lambda: biases.alibi(tensor(heads)),
        "tensor": lambda: biases.tensor(tensor(1, keys)),
        "function": lambda: biases.from_mod(scaled(tensor())),
        "mapped": lambda: biases.from_mod(lambda score, b, h, q, k: score + torch.stack([q, k]).sum()),
    }
    if draw.happens(0.8):
        return None
    bias = kinds[draw.choice(list(kinds))]()
    return bias if bias is None or draw.happens(0.7) else bias + biases.tensor(tensor(1, 1))


def drawn_positions(draw: Draws, queries: int, keys: int) -> tuple[Positions | None, Positions | None]:
    """Positions of queries and keys as calls, shards and the parts of a mask have them."""
    kinds: dict[str, tuple[Positions | None, Positions | None]] = {
        "default": (None, None),
        "shard": (range(keys, keys + queries), None),
        "tensor": (torch.arange(queries), None),
        "residues": (ResiduePositions(0, 2, queries, 1), ResiduePositions(0, 2, keys, 1)),
        "step": (range(2 * (keys - queries), 2 * keys, 2), range(0, 2 * keys, 2)),
    }
    return kinds[draw.choice(["default", "default", *kinds])]


def drawn_problem(draw: Draws) -> Problem:
    queries, keys = (draw.variant.choice(draw.choice(LENGTHS)) for _ in range(2))
    batch, heads, group, dim = (draw.choice(each) for each in ((1, 2), (1, 2), (1, 2, 8), (4, 16)))
    dtype, learned = draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float64)), draw.happens(0.3)
    query, key, value = (
        torch.zeros(batch, count, length, dim, dtype=dtype, requires_grad=learned)
        for count, length in ((heads * group, queries), (heads, keys), (heads, keys))
    )
    sinks = torch.zeros(heads * group, requires_grad=draw.happens(0.5))
    options: dict[str, Any] = {
        "mask": drawn_mask(draw, queries, keys, batch),
        "bias": drawn_bias(draw, heads * group, keys),
        "softcap": 5.0 if draw.happens(0.05) else None,
        "dropout_p": 0.1 if draw.happens(0.05) else 0.0,
        "sinks": sinks if draw.happens(0.05) else None,
        "score": scores.Additive(dim, dim, dim).to(dtype) if group == 1 and draw.happens(0.05) else None,
    }
    problem = make_problem(query, key, value, wants_lse=draw.happens(0.05), **options)
    query_positions, key_positions = drawn_positions(draw, queries, keys)
    return replace(problem, query_positions=query_positions, key_positions=key_positions)


@pytest.mark.parametrize("signature_of", [exact_signature, rounded_signature])
def test_problems_of_one_signature_have_the_same_kernels(signature_of):
    alike: dict[Hashable, list[Problem]] = defaultdict(list)
    for structure, variant in itertools.product(range(160), range(10)):
        problem = drawn_problem(Draws(structure, variant))
        alike[signature_of(problem)].append(problem)
    several = [problems for problems in alike.values() if len(problems) > 1]
    assert len(several) > 100
    assert len(alike) > 200
    for first, *others in several:
        refused = [kernel.name for kernel in COMPARED if kernel.why_not(first)]
        for other in others:
            assert [kernel.name for kernel in COMPARED if kernel.why_not(other)] == refused, (first, other)


def test_which_part_of_a_bias_is_learned():
    """FlexAttention has the gradient of a tensor, and none of what a function reads."""
    flex, refused = FlexKernel(None, ("cpu",)), []
    for learned in (0, 1):
        factor, table = (torch.ones(1, 1024, requires_grad=at == learned) for at in (0, 1))
        function = biases.from_mod(lambda score, b, h, q, k, factor=factor: score + factor[0, k])
        problem = problem_of(bias=function + biases.tensor(table))
        refused.append((bool(flex.why_not(problem)), rounded_signature(problem)))
    assert [reasons for reasons, _ in refused] == [True, False]
    assert refused[0][1] != refused[1][1]


def problem_of(**options: Any) -> Problem:
    query, key, value = (torch.zeros(1, 2, 1024, 64) for _ in range(3))
    return make_problem(query, key, value, **options)


def on_cuda(problem: Problem) -> Problem:
    """The same problem for tensors of a GPU, without one."""
    with FakeTensorMode():
        query, key, value = (torch.zeros(1, 2, 1024, 64, device="cuda") for _ in range(3))
    return replace(problem, pairs=replace(problem.pairs, query=query, key=key), value=value)


def test_the_kernel_of_a_part_is_of_its_device(monkeypatch):
    monkeypatch.setattr(signature, "_choices", {})
    problem = problem_of(mask=masks.causal() & masks.strided(16))
    for each in (problem, on_cuda(problem), problem):
        for selection in selections(each):
            assert DECOMPOSED._kernel(selection.problem).why_not(selection.problem) == []


def test_the_kernel_of_a_part_in_training_has_a_price_of_its_own(monkeypatch):
    monkeypatch.setattr(signature, "_choices", {})
    problem = problem_of(mask=masks.causal() & masks.strided(16))
    (selection,) = selections(problem)
    DECOMPOSED._kernel(selection.problem)
    learned = replace(selection.problem, value=selection.problem.value.requires_grad_())
    DECOMPOSED._kernel(learned)
    assert len(signature._choices) == 2


def test_the_kernel_of_a_block_of_a_ring_is_of_its_device(monkeypatch):
    monkeypatch.setattr(signature, "_choices", {})
    problem = problem_of(mask=masks.causal())
    for each in (problem, on_cuda(problem), problem):
        name = block_kernel(each, None).name
        assert next(kernel for kernel in KERNELS if kernel.name == name).why_not(each) == []


def test_what_has_no_signature_is_chosen_in_each_call(monkeypatch):
    @dataclass(frozen=True)
    class Unknown(Mask):
        def keep(self, grid):
            return grid.key <= getattr(self, "limit", 3)

    monkeypatch.setattr(signature, "_choices", {})
    with pytest.raises(LookupError):
        rounded_signature(problem_of(mask=Unknown()))
    chosen = [
        memoize_choice(problem_of(mask=Unknown()), rounded_signature, "a test", lambda: object()) for _ in range(2)
    ]
    assert chosen[0] is not chosen[1]
    assert not signature._choices


def test_lengths_are_rounded_to_a_sixteenth_and_never_across_a_power_of_two():
    for length in range(1, 5000):
        rounded = signature._rounded_length(length)
        assert length * 15 / 16 <= rounded <= length
        assert (rounded - 1).bit_length() == (length - 1).bit_length()
