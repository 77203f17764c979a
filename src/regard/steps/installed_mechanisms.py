"""Mechanisms of attention with a translator that regard comes with: what each reads, and which one a sentence needs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import ConfigurationError
from ..translation.run_folder import ENGLISH_FRENCH, KOREAN_ENGLISH
from .wording import Wording


@dataclass(frozen=True)
class InstalledMechanism:
    """A mechanism, the folder of its translator, the language that it reads, and a sentence in it.

    all_heads: whether the tables have all heads of the layer, and not one.
    """

    title: Wording
    folder: Path
    reads: Literal["Korean", "English"]
    sentence: str
    all_heads: bool = False


MECHANISMS = {
    "dot": InstalledMechanism(
        Wording("Luong (dot): Korean to English", "루옹 어텐션(dot): 한국어 → 영어"),
        KOREAN_ENGLISH["dot"],
        "Korean",
        "나는 학생이다",
    ),
    "additive": InstalledMechanism(
        Wording("Bahdanau (additive): Korean to English", "바다나우 어텐션(additive): 한국어 → 영어"),
        KOREAN_ENGLISH["additive"],
        "Korean",
        "나는 학생이다",
    ),
    "scaled_dot": InstalledMechanism(
        Wording(
            "Scaled dot product (one head of a Transformer): English to French",
            "스케일드 닷 프로덕트(트랜스포머의 헤드 하나): 영어 → 프랑스어",
        ),
        ENGLISH_FRENCH,
        "English",
        "I am tired.",
    ),
    "multi_head": InstalledMechanism(
        Wording(
            "Multi-head (all heads of a layer of a Transformer): English to French",
            "멀티 헤드(트랜스포머 한 층의 모든 헤드): 영어 → 프랑스어",
        ),
        ENGLISH_FRENCH,
        "English",
        "I am tired.",
        all_heads=True,
    ),
}
"""The mechanisms by the score of their translator, and "multi_head"."""


def has_hangul(text: str) -> bool:
    """Whether a text has Korean letters: syllables or single ones.

    >>> [has_hangul(text) for text in ("나는", "ㅋ", "I am")]
    [True, True, False]
    """
    return any(
        "가" <= character <= "힣" or "\u1100" <= character <= "\u11ff" or "\u3130" <= character <= "\u318f"
        for character in text
    )


def choose_mechanism(sentence: str, name: str | None = None) -> InstalledMechanism:
    """The mechanism of that name, or the one whose translator reads the sentence: "dot" for Hangul, else "scaled_dot".

    Raises:
        ConfigurationError: there is no mechanism of that name, or its translator does not read the sentence's script.

    >>> choose_mechanism("나는 학생이다").reads
    'Korean'
    """
    korean = has_hangul(sentence)
    if name is None:
        return MECHANISMS["dot" if korean else "scaled_dot"]
    if name not in MECHANISMS:
        raise ConfigurationError(
            f"score is {name!r}; the translators that regard comes with have "
            f"{', '.join(map(repr, sorted(MECHANISMS)))}. Train another with `regard train`, and name it by "
            "--checkpoint"
        )
    chosen = MECHANISMS[name]
    if korean == (chosen.reads == "Korean") or not any(map(str.isalpha, sentence)):
        return chosen
    others = [other for other, mechanism in MECHANISMS.items() if mechanism.reads != chosen.reads]
    has = "Korean letters" if korean else "no Korean letters"
    raise ConfigurationError(
        f"the sentence {sentence[:60]!r} has {has}, and the translator with the score {name!r} reads {chosen.reads}: "
        f"write it in {chosen.reads}, such as {chosen.sentence!r}, or take the score "
        f"{' or '.join(map(repr, others))}, which reads {MECHANISMS[others[0]].reads}"
    )
