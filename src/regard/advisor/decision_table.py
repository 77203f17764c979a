"""The textbooks' rules on which attention to take, each beside what this machine's rates predict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

from ..biases import alibi
from ..kernels.validation import AttentionOptions
from ..masks import causal, window
from ..scores import Additive
from ..utils.units import format_seconds
from .prices import Price, linear_price, softmax_price
from .workload import Workload

LAYER = Workload("prefill", layers=1, heads=8, head_dim=64, dtype="float32")
"""The attention layer that the rules are tried on: 8 heads of 64, causal, in float32."""
LENGTHS = tuple(2**power for power in range(5, 18))
"""Lengths at which kernels are compared: 32 to 131,072 tokens."""


@dataclass(frozen=True)
class Rule:
    """A rule of the textbooks. here: what this machine's rates predict. holds: whether that supports the rule."""

    situation: str
    textbook: str
    here: str
    holds: bool


def decision_table() -> list[Rule]:
    """The known decision table, each rule with what is predicted for this machine's CPU.

    >>> [rule.textbook for rule in decision_table()][:2]
    ['scaled dot products, multi-head', 'flash kernels']
    """
    return [
        _standard(),
        _long(),
        _fast_inference(),
        _local(),
        _encoder_decoder(),
        _small(),
        _extrapolating(),
        _beyond_one_machine(),
    ]


def _price(
    tokens: int,
    task: str = "prefill",
    key_heads: int = 8,
    *,
    kernel: str | None = None,
    **options: Unpack[AttentionOptions],
) -> Price:
    """The price of the layer at a length."""
    workload = replace(LAYER, tokens=tokens, task=task)
    options.setdefault("mask", causal() if workload.causal else None)
    return softmax_price(workload, key_heads, tokens, kernel=kernel, **options)


def _standard() -> Rule:
    dot, additive = (_price(512, score=score).seconds for score in (None, Additive(64, 64, 64)))
    return Rule(
        "standard Transformer",
        "scaled dot products, multi-head",
        f"over 512 tokens an additive score takes {additive / dot:.0f} times as long",
        additive > dot,
    )


def _long() -> Rule:
    prices = {length: (_price(length), _price(length, kernel="reference")) for length in LENGTHS}
    faster = [length for length, (fastest, plain) in prices.items() if fastest.seconds * 1.1 < plain.seconds]
    fastest, plain = prices[2**15]
    return Rule(
        "more than 32,000 tokens",
        "flash kernels",
        f"faster than the formula in memory from {min(faster, default=LENGTHS[-1]):,} tokens on; at 32,768 by "
        f"{plain.seconds / fastest.seconds:.0f} times, in 1/{plain.memory / fastest.memory:,.0f} of the memory",
        min(faster, default=LENGTHS[-1]) >= 2**14,
    )


def _fast_inference() -> Rule:
    many, grouped, one = (_price(16384, "decode", key_heads).seconds for key_heads in (8, 2, 1))
    uncached = _price(16384).seconds
    return Rule(
        "fast inference",
        "grouped or multi-query, with a cache",
        f"a token after 16,384: {uncached / many:,.0f} times faster with a cache; then {many / grouped:.1f} times with "
        f"2 key heads for 8 query heads, {many / one:.1f} times with one",
        many / grouped > 1.5,
    )


def _local() -> Rule:
    whole = {length: _price(length).seconds for length in LENGTHS}
    near = {length: _price(length, mask=causal() & window(before=511)).seconds for length in LENGTHS}
    pays = [length for length in LENGTHS if whole[length] > 1.5 * near[length]]
    return Rule(
        "local patterns",
        "sliding window",
        f"a window of 512 is 1.5 times faster from {min(pays, default=0):,} tokens on, at 131,072 "
        f"{whole[2**17] / near[2**17]:.0f} times",
        bool(pays),
    )


def _encoder_decoder() -> Rule:
    price = softmax_price(replace(LAYER, architecture="translation", tokens=25, source_tokens=25), 8, 25)
    return Rule(
        "encoder and decoder",
        "cross-attention",
        f"25 words over 25 of the source take {1e6 * price.seconds:.0f} µs a sentence ({price.kernel})",
        True,
    )


def _small() -> Rule:
    small = replace(LAYER, architecture="translation", tokens=1, source_tokens=25, heads=1, head_dim=32)
    dot, additive = (softmax_price(small, 1, 25, score=each).seconds for each in (None, Additive(32, 32, 32)))
    return Rule(
        "few tokens and small dims",
        "additive",
        f"for one query over 25 keys of dim 32 it takes {additive / dot:.1f} times as long as dot products",
        additive < 1.5 * dot,
    )


def _extrapolating() -> Rule:
    plain, biased = _price(4096).seconds, _price(4096, bias=alibi(8)).seconds
    return Rule(
        "positions",
        "rotary; ALiBi to extrapolate",
        f"ALiBi takes {biased / plain:.2f} times the time without it over 4,096 tokens; rotary costs a pass over "
        "queries and keys",
        biased < 1.5 * plain,
    )


def _beyond_one_machine() -> Rule:
    million = replace(LAYER, tokens=10**6)
    exact, linear = softmax_price(million, 8, 10**6, mask=causal()), linear_price(million, 64, 8)
    return Rule(
        "a million tokens and more",
        "a ring of processes",
        f"a layer takes {format_seconds(exact.seconds)} and {exact.memory / 2**30:.1f} GiB in one process, of which "
        f"each in a ring of P takes 1/P; linear attention takes {format_seconds(linear.seconds)}",
        exact.seconds > 60,
    )
