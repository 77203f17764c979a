"""The textbooks' rules on which attention to take, each beside what this machine's rates predict."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Unpack

from ..biases import alibi
from ..kernels.validation import AttentionOptions
from ..masks import causal, window
from ..scores import Additive
from ..utils.bilingual import Wording, check_language
from ..utils.units import format_seconds
from .prices import Price, linear_price, softmax_price
from .workload import Workload

LAYER = Workload("prefill", layers=1, heads=8, head_dim=64, dtype="float32")
"""The attention layer that the rules are tried on: 8 heads of 64, causal, in float32."""
LENGTHS = tuple(2**power for power in range(5, 18))
"""Lengths at which kernels are compared: 32 to 131,072 tokens."""


@dataclass(frozen=True)
class Rule:
    """A rule of the textbooks. here: what this machine's rates predict.

    holds: whether that supports the rule; None for a rule of quality, which no time decides.
    """

    situation: str
    textbook: str
    here: str
    holds: bool | None


def decision_table(language: str = "en") -> list[Rule]:
    """The known decision table, each rule with what is predicted for this machine's CPU, in "en" or "ko".

    Raises:
        ConfigurationError: another language.

    >>> [rule.textbook for rule in decision_table()][:2]
    ['scaled dot products, multi-head', 'flash kernels']
    """
    check_language(language)
    rules = (
        _standard,
        _long,
        _fast_inference,
        _local,
        _encoder_decoder,
        _small,
        _extrapolating,
        _beyond_one_machine,
    )
    return [rule().said(language) for rule in rules]


@dataclass(frozen=True)
class _RuleWording:
    """A `Rule` in both languages."""

    situation: Wording
    textbook: Wording
    here: Wording
    holds: bool | None

    def said(self, language: str) -> Rule:
        """The rule in one language."""
        situation, textbook, here = (text.text(language) for text in (self.situation, self.textbook, self.here))
        return Rule(situation, textbook, here, self.holds)


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


def _standard() -> _RuleWording:
    dot, additive = (_price(512, score=score).seconds for score in (None, Additive(64, 64, 64)))
    return _RuleWording(
        Wording("standard Transformer", "표준 트랜스포머"),
        Wording("scaled dot products, multi-head", "스케일드 닷 프로덕트, 멀티 헤드"),
        Wording(
            f"over 512 tokens an additive score takes {additive / dot:.0f} times as long",
            f"토큰 512개에서 덧셈 스코어는 {additive / dot:.0f}배 걸립니다",
        ),
        additive > dot,
    )


def _long() -> _RuleWording:
    prices = {length: (_price(length), _price(length, kernel="reference")) for length in LENGTHS}
    faster = [length for length, (fastest, plain) in prices.items() if fastest.seconds * 1.1 < plain.seconds]
    fastest, plain = prices[2**15]
    return _RuleWording(
        Wording("more than 32,000 tokens", "토큰 32,000개 초과"),
        Wording("flash kernels", "플래시 커널"),
        Wording(
            f"faster than the formula in memory from {min(faster, default=LENGTHS[-1]):,} tokens on; at 32,768 by "
            f"{plain.seconds / fastest.seconds:.0f} times, in 1/{plain.memory / fastest.memory:,.0f} of the memory",
            f"토큰 {min(faster, default=LENGTHS[-1]):,}개부터 수식 그대로의 계산보다 빠르고, 32,768개에서는 "
            f"{plain.seconds / fastest.seconds:.0f}배 빠르며 메모리는 1/{plain.memory / fastest.memory:,.0f}입니다",
        ),
        2**15 in faster,
    )


def _fast_inference() -> _RuleWording:
    many, grouped, one = (_price(16384, "decode", key_heads).seconds for key_heads in (8, 2, 1))
    uncached = _price(16384).seconds
    return _RuleWording(
        Wording("fast inference", "빠른 추론"),
        Wording("grouped or multi-query, with a cache", "그룹 질의나 멀티 쿼리, 캐시와 함께"),
        Wording(
            f"a token after 16,384: {uncached / many:,.0f} times faster with a cache; then {many / grouped:.1f} times "
            f"with 2 key heads for 8 query heads, {many / one:.1f} times with one",
            f"토큰 16,384개 다음의 토큰: 캐시가 있으면 {uncached / many:,.0f}배 빠르고, "
            f"질의 헤드 8개에 키 헤드가 2개이면 거기서 다시 {many / grouped:.1f}배, "
            f"1개이면 {many / one:.1f}배 빠릅니다",
        ),
        many / grouped > 1.5,
    )


def _local() -> _RuleWording:
    whole = {length: _price(length).seconds for length in LENGTHS}
    near = {length: _price(length, mask=causal() & window(before=511)).seconds for length in LENGTHS}
    pays = [length for length in LENGTHS if whole[length] > 1.5 * near[length]]
    return _RuleWording(
        Wording("local patterns", "지역적인 패턴"),
        Wording("sliding window", "슬라이딩 창"),
        Wording(
            f"a window of 512 is 1.5 times faster from {min(pays, default=0):,} tokens on, at 131,072 "
            f"{whole[2**17] / near[2**17]:.0f} times",
            f"크기 512인 창은 토큰 {min(pays, default=0):,}개부터 1.5배 빠르고, 131,072개에서는 "
            f"{whole[2**17] / near[2**17]:.0f}배 빠릅니다",
        ),
        bool(pays),
    )


def _encoder_decoder() -> _RuleWording:
    price = softmax_price(replace(LAYER, architecture="translation", tokens=25, source_tokens=25), 8, 25)
    return _RuleWording(
        Wording("encoder and decoder", "인코더와 디코더"),
        Wording("cross-attention", "크로스 어텐션"),
        Wording(
            f"25 words over 25 of the source take {1e6 * price.seconds:.0f} µs a sentence ({price.kernel})",
            f"단어 25개가 원문 25개를 볼 때 한 문장에 {1e6 * price.seconds:.0f} µs입니다({price.kernel})",
        ),
        None,
    )


def _small() -> _RuleWording:
    small = replace(LAYER, architecture="translation", tokens=1, source_tokens=25, heads=1, head_dim=32)
    dot, additive = (softmax_price(small, 1, 25, score=each).seconds for each in (None, Additive(32, 32, 32)))
    return _RuleWording(
        Wording("few tokens and small dims", "적은 토큰과 작은 차원"),
        Wording("additive", "덧셈 스코어"),
        Wording(
            f"for one query over 25 keys of dim 32 it takes {additive / dot:.1f} times as long as dot products",
            f"32차원인 키 25개와 질의 하나에서 내적의 {additive / dot:.1f}배 걸립니다",
        ),
        None,
    )


def _extrapolating() -> _RuleWording:
    plain, biased = _price(4096).seconds, _price(4096, bias=alibi(8)).seconds
    return _RuleWording(
        Wording("positions", "위치"),
        Wording("rotary; ALiBi to extrapolate", "회전 위치, 더 긴 글에는 ALiBi"),
        Wording(
            f"ALiBi takes {biased / plain:.2f} times the time without it over 4,096 tokens; rotary costs a pass over "
            "queries and keys",
            f"토큰 4,096개에서 ALiBi는 없을 때의 {biased / plain:.2f}배 걸리고, 회전 위치는 질의와 키를 한 번 훑습니다",
        ),
        None,
    )


def _beyond_one_machine() -> _RuleWording:
    million = replace(LAYER, tokens=10**6)
    exact, linear = softmax_price(million, 8, 10**6, mask=causal()), linear_price(million, 64, 8)
    return _RuleWording(
        Wording("a million tokens and more", "토큰 백만 개 이상"),
        Wording("a ring of processes", "프로세스의 링"),
        Wording(
            f"a layer takes {format_seconds(exact.seconds)} and {exact.memory / 2**30:.1f} GiB in one process, "
            f"of which each in a ring of P takes 1/P; linear attention takes {format_seconds(linear.seconds)}",
            f"한 층이 프로세스 하나에서 {format_seconds(exact.seconds)}와 {exact.memory / 2**30:.1f} GiB가 들고, "
            f"프로세스 P개인 링에서는 각각 그 1/P입니다. 선형 어텐션은 {format_seconds(linear.seconds)}입니다",
        ),
        exact.seconds > 60,
    )
