"""The naive forms of flash-linear-attention (MIT), in float32, beside ours in float64 and float32."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import regard
from regard import biases, linear, masks

from .repositories import file_of

REPOSITORY = "flash-linear-attention"
BATCH, HEADS, KEY_HEADS, LENGTH, DIM, WIDTH = 2, 4, 2, 67, 16, 12
ROUNDINGS = 64
"""Theirs is in float32, whatever the inputs: differences are roundings of the largest number."""
PLAIN = {"feature_map": linear.Identity(), "normalize": False, "causal": True}

Named = dict[str, Tensor]


def drawn() -> Named:
    """Inputs as (batch, heads, length, ·), in float64 with the digits of float32."""
    torch.manual_seed(0)

    def of(*shape: int) -> Tensor:
        return torch.randn(BATCH, *shape).double()

    named = {"q": of(HEADS, LENGTH, DIM), "k": of(KEY_HEADS, LENGTH, DIM), "v": of(KEY_HEADS, LENGTH, DIM)}
    named |= {"K": normalize(of(HEADS, LENGTH, DIM), dim=-1), "V": of(HEADS, LENGTH, WIDTH)}
    named |= {"P": normalize(of(HEADS, LENGTH, DIM), dim=-1), "gate": logsigmoid(of(HEADS, LENGTH) + 1)}
    named |= {"w": normalize(of(KEY_HEADS, LENGTH, DIM), dim=-1), "strength": 2 * of(KEY_HEADS, LENGTH).sigmoid()}
    named |= {"beta": of(HEADS, LENGTH).sigmoid(), "decay": logsigmoid(of(HEADS, LENGTH, DIM) + 2)}
    named |= {"erase": of(HEADS, LENGTH, DIM).sigmoid(), "write": of(HEADS, LENGTH, WIDTH).sigmoid()}
    named |= {"sinks": torch.randn(HEADS).double(), "bonus": torch.randn(HEADS, DIM).double()}
    named |= {"K2": normalize(of(HEADS, LENGTH, 2, DIM), dim=-1), "V2": of(HEADS, LENGTH, 2, WIDTH)}
    named |= {"slot_gates": of(HEADS, LENGTH, 9).sigmoid(), "slot_logits": of(HEADS, LENGTH, 9)}
    named |= {"levels": of(HEADS, LENGTH, 8).sigmoid(), "ridge": torch.rand(HEADS, DIM) + 0.25}
    return {name: each.float().double() for name, each in named.items()} | {"beta2": of(HEADS, LENGTH, 2).sigmoid()}


def swapped(*tensors: Tensor) -> list[Tensor]:
    """(batch, heads, length, ...) as (batch, length, heads, ...), and the other way round."""
    return [each.transpose(1, 2) for each in tensors]


def steps(tensor: Tensor) -> Tensor:
    """(batch, heads, length, steps, ...) as (batch, length · steps, heads, ...)."""
    return tensor.movedim(1, 3).flatten(1, 2)


def taylor(rows: Tensor) -> Tensor:
    pairs = (rows.unsqueeze(-1) * rows.unsqueeze(-2)).flatten(-2) / 2**0.5
    return torch.cat([torch.ones_like(rows[..., :1]), rows, pairs], -1)


def products(rows: Tensor) -> Tensor:
    return (rows.unsqueeze(-1) * rows.unsqueeze(-2)).flatten(-2)


def first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    return result if isinstance(result, Tensor) else result[0]


# Each: the file, what it is called with, the axes of heads and lengths of its result, and ours.
Case = tuple[str, str, Callable[[Callable, Named], Tensor], Callable[[Named], Tensor]]
CASES: dict[str, Case] = {
    "attention": (
        "attn",
        "naive_parallel_attn",
        lambda f, n: first(f(*swapped(n["q"], n["k"], n["v"]))).transpose(1, 2),
        lambda n: regard.attention(n["q"], n["k"], n["v"], mask=masks.causal()),
    ),
    "window, sinks and gates": (
        "attn",
        "naive_parallel_attn",
        lambda f, n: first(
            f(*swapped(n["q"], n["k"], n["v"]), window_size=9, g=n["gate"].mT, sink_bias=n["sinks"])
        ).transpose(1, 2),
        lambda n: regard.attention(
            *(n["q"], n["k"], n["v"]),
            mask=masks.causal() & masks.window(before=8),
            bias=biases.forget_gates(n["gate"]),
            sinks=n["sinks"],
        ),
    ),
    "forget gates": (
        "forgetting_attn",
        "naive_forgetting_attn",
        lambda f, n: f(*swapped(n["q"], n["k"], n["v"]), n["gate"].mT).transpose(1, 2),
        lambda n: regard.attention(n["q"], n["k"], n["v"], mask=masks.causal(), bias=biases.forget_gates(n["gate"])),
    ),
    "PaTH with forget gates": (
        "path_attn",
        "naive_path_attn",
        lambda f, n: f(
            *swapped(n["q"], n["k"], n["v"], n["w"]), n["strength"].mT, n["gate"].mT, DIM**-0.5, chunk_size=16
        ).transpose(1, 2),
        lambda n: regard.attention(
            *(n["q"], n["k"], n["v"]),
            mask=masks.causal(),
            bias=biases.path(n["w"], n["strength"]) + biases.forget_gates(n["gate"] * DIM**-0.5),  # scaled there
        ),
    ),
    "delta rule": (
        "delta_rule",
        "delta_rule_recurrence",
        lambda f, n: first(f(n["q"], n["K"], n["V"], n["beta"])),
        lambda n: regard.linear_attention(n["q"], n["K"], n["V"], beta=n["beta"], **PLAIN),
    ),
    "gated delta rule": (
        "gated_delta_rule",
        "naive_recurrent_gated_delta_rule",
        lambda f, n: first(f(*swapped(n["q"], n["K"], n["V"]), n["beta"].mT, n["gate"].mT)).transpose(1, 2),
        lambda n: regard.linear_attention(n["q"], n["K"], n["V"], beta=n["beta"], decay=n["gate"], **PLAIN),
    ),
    "gated linear attention": (
        "gla",
        "naive_recurrent_gla",
        lambda f, n: first(f(*swapped(n["q"], n["K"], n["V"], n["decay"]))).transpose(1, 2),
        lambda n: regard.linear_attention(n["q"], n["K"], n["V"], decay=n["decay"], **PLAIN),
    ),
    "simple gated linear attention": (
        "simple_gla",
        "naive_recurrent_simple_gla",
        lambda f, n: first(f(*swapped(n["q"], n["K"], n["V"]), n["gate"].mT)).transpose(1, 2),
        lambda n: regard.linear_attention(n["q"], n["K"], n["V"], decay=n["gate"], **PLAIN),
    ),
    "Kimi delta attention": (
        "kda",
        "naive_recurrent_kda",
        lambda f, n: first(f(*swapped(n["q"], n["K"], n["V"], n["decay"]), n["beta"].mT)).transpose(1, 2),
        lambda n: regard.linear_attention(n["q"], n["K"], n["V"], beta=n["beta"], decay=n["decay"], **PLAIN),
    ),
    "retention": (
        "retention",
        "naive_retention",
        lambda f, n: f(n["q"], n["K"], n["V"]),
        lambda n: regard.linear_attention(
            *(n["q"], n["K"], n["V"]),
            decay=(1 - 2.0 ** (-5 - torch.arange(HEADS, dtype=n["q"].dtype)))
            .log()[:, None]
            .expand(BATCH, HEADS, LENGTH),
            **PLAIN,
        ),
    ),
    "delta product": (
        "gated_delta_product",
        "naive_recurrent_gated_delta_product",
        lambda f, n: (
            first(
                f(
                    *(n["q"].transpose(1, 2), steps(n["K2"]), steps(n["V2"]), n["gate"].mT, steps(n["beta2"])),
                    *(1.0, None),
                    num_householder=2,
                )
            ).transpose(1, 2)
            / DIM**0.5
        ),  # its scale is not used there
        lambda n: linear.delta_product(n["q"], n["K2"], n["V2"], beta=n["beta2"], decay=n["gate"]),
    ),
    "Comba": (
        "comba",
        "naive_recurrent_comba",
        lambda f, n: first(f(*swapped(n["q"], n["K"], n["V"], n["P"]), n["beta"].mT, n["gate"].mT)).transpose(1, 2),
        lambda n: regard.linear_attention(
            *(n["q"], n["K"], n["beta"].unsqueeze(-1) * n["V"]),
            removal=n["beta"].unsqueeze(-1) * n["P"],
            decay=n["gate"],
            **PLAIN,
        ),
    ),
    "Gated DeltaNet-2": (
        "gdn2",
        "naive_recurrent_gdn2",
        lambda f, n: first(f(*swapped(n["q"], n["K"], n["V"], n["decay"], n["erase"], n["write"]))).transpose(1, 2),
        lambda n: regard.linear_attention(
            *(n["q"], n["K"], n["write"] * n["V"]), removal=n["erase"] * n["K"], decay=n["decay"], **PLAIN
        ),
    ),
    "diagonal plus low rank (RWKV-7)": (
        "generalized_delta_rule/dplr",
        "dplr_recurrence",
        lambda f, n: first(f(n["q"], n["K"], n["V"], -n["P"], n["erase"] * n["P"] / 2, n["decay"])),
        lambda n: linear.delta_product(
            n["q"],
            torch.stack([n["erase"] * n["P"] / 2, n["K"]], -2),
            torch.stack([0 * n["V"], n["V"]], -2),
            removal=torch.stack([n["P"] / n["decay"].exp(), 0 * n["P"]], -2),
            decay=n["decay"],
        ),
    ),
    "RWKV-6": (
        "rwkv6",
        "naive_recurrent_rwkv6",
        lambda f, n: first(f(n["q"], n["K"], n["V"], n["decay"], n["bonus"])),
        lambda n: regard.linear_attention(
            n["q"], n["K"], n["V"], decay=n["decay"], bonus=n["bonus"][None, :, None], **PLAIN
        ),
    ),
    "identity plus low rank": (
        "generalized_delta_rule/iplr",
        "iplr_recurrence",
        lambda f, n: first(f(n["q"], n["K"], n["V"], -n["P"], n["erase"] * n["P"] / 2)),
        lambda n: linear.delta_product(
            n["q"],
            torch.stack([n["erase"] * n["P"] / 2, n["K"]], -2),
            torch.stack([0 * n["V"], n["V"]], -2),
            removal=torch.stack([n["P"], 0 * n["P"]], -2),
        ),
    ),
    "gated slot attention": (
        "gsa",
        "naive_recurrent_gsa",
        lambda f, n: first(
            f(*swapped(n["q"], n["k"], n["v"], 1 - n["slot_gates"][:, :2], n["slot_gates"][:, :2].log()))
        ).transpose(1, 2),
        lambda n: linear.slot_attention(
            *(n["q"], n["k"], n["v"], 1 - n["slot_gates"][:, :2], n["slot_gates"][:, :2].log())
        ),
    ),
    "attention with bounded-memory control": (
        "abc",
        "naive_cumsum_abc",
        lambda f, n: first(f(n["q"], n["K"], n["V"], n["slot_logits"])),
        lambda n: linear.slot_attention(n["q"], n["K"], n["V"], *linear.running_softmax(n["slot_logits"])),
    ),
    "log-linear attention": (
        "log_linear_attn",
        "naive_log_linear_attn",
        lambda f, n: f(*swapped(n["q"], n["K"], n["V"]), n["gate"].mT, n["levels"].transpose(1, 2)).transpose(1, 2),
        lambda n: linear.log_linear_attention(n["q"], n["K"], n["V"], levels=n["levels"], decay=n["gate"], scale=1.0),
    ),
    "MesaNet": (
        "mesa_net",
        "naive_mesa_net_exact",
        lambda f, n: first(f(*swapped(n["q"], n["K"], n["q"]), n["gate"].mT, n["ridge"], n["beta"].mT)).transpose(1, 2),
        lambda n: linear.mesa_attention(n["q"], n["K"], n["q"], ridge=n["ridge"], beta=n["beta"], decay=n["gate"]),
    ),
    "DeltaFormer": (
        "deltaformer",
        "naive_deltaformer_attn",
        lambda f, n: f(*swapped(n["q"], n["K"], n["q"]), n["beta"].mT).transpose(1, 2),
        lambda n: linear.delta_former(n["q"], n["K"], n["q"], beta=n["beta"]),
    ),
    "linear attention": (
        "linear_attn",
        "naive_recurrent_linear_attn",
        lambda f, n: first(f(*swapped(n["q"].exp(), n["K"].exp(), n["V"]), normalize=True)).transpose(1, 2),
        lambda n: regard.linear_attention(
            n["q"].exp(), n["K"].exp(), n["V"], feature_map=linear.Identity(), causal=True
        ),
    ),
    "ReBased": (
        "rebased",
        "naive_parallel_rebased",
        lambda f, n: f(n["q"].exp(), n["K"].exp(), n["V"]),
        lambda n: regard.linear_attention(
            products(n["q"].exp()), products(n["K"].exp()), n["V"], feature_map=linear.Identity(), causal=True
        ),
    ),
    "Based": (
        "based",
        "naive_parallel_based",
        lambda f, n: f(n["q"], n["K"], n["V"]),
        lambda n: regard.linear_attention(
            taylor(n["q"] * DIM**-0.5), taylor(n["K"]), n["V"], feature_map=linear.Identity(), causal=True
        ),
    ),
}
FILES = {"rwkv6": "recurrent_naive"}


@pytest.mark.parametrize("name", CASES)
def test_ours_is_theirs(name: str, record_property: Callable) -> None:
    folder, function, call, ours = CASES[name]
    module = file_of(REPOSITORY, f"fla/ops/{folder}/{FILES.get(folder, 'naive')}.py")
    named = drawn()
    low = {key: each.float() for key, each in named.items()}
    theirs = call(getattr(module, function), low)
    for inputs in (named, low):
        found = ours(inputs)
        assert found.shape == theirs.shape
        difference = ((found - theirs).abs().max() / theirs.abs().max()).item()
        assert difference < ROUNDINGS * torch.finfo(torch.float32).eps, difference
    record_property("difference", difference)
    assert math.isfinite(difference)


@pytest.mark.parametrize(("name", "used"), [("PaTH with forget gates", "qkvw"), ("forget gates", "qkv")])
def test_gradients_are_theirs(name: str, used: str, record_property: Callable) -> None:
    folder, function, call, ours = CASES[name]
    theirs = getattr(file_of(REPOSITORY, f"fla/ops/{folder}/naive.py"), function)
    named = {key: each.float() for key, each in drawn().items()}
    leaves = [named[key].requires_grad_() for key in (*used, "gate", *(["strength"] if "w" in used else []))]
    found, expected = ours(named), call(theirs, named)
    upstream = torch.randn_like(found)
    for mine, other in zip(*(torch.autograd.grad(each, leaves, upstream) for each in (found, expected)), strict=True):
        difference = ((mine - other).abs().max() / other.abs().max()).item()
        record_property("difference", difference)
        assert difference < ROUNDINGS * torch.finfo(torch.float32).eps


def test_the_lightning_indexer_and_its_attention(record_property: Callable) -> None:
    theirs, named = file_of(REPOSITORY, "fla/ops/dsa/naive.py"), drawn()
    query, key, value = (named[name].float() for name in "qkv")
    small_query, small_key = torch.randn(BATCH, 3, LENGTH, 8), torch.randn(BATCH, LENGTH, 8)
    weights = torch.rand(BATCH, LENGTH, 3)
    found = regard.selection.lightning_indices(small_query, small_key, weights, count=9)
    expected = theirs.naive_dsa_indexer(
        small_query.transpose(1, 2), small_key, weights, topk=9, scale=1.0, activation="relu"
    )
    assert torch.equal(found.sort(-1).values, expected.sort(-1).values)
    ours = regard.attention(query, key, value, mask=masks.chosen(found.unsqueeze(1)))
    of_theirs = theirs.naive_dsa(*swapped(query, key, value), None, None, indices=expected)
    difference = ((ours - of_theirs.transpose(1, 2)).abs().max() / of_theirs.abs().max()).item()
    record_property("difference", difference)
    assert difference < ROUNDINGS * torch.finfo(torch.float32).eps
