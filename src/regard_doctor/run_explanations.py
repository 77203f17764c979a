"""What `regard examine` finds: the name and severity of each code; run_explanations.md has the texts."""

from __future__ import annotations

from pathlib import Path

from .finding import Severity
from .mistake_texts import MistakeText, texts_in

KINDS: dict[str, tuple[str, Severity]] = {
    "RUN101": ("future leak", Severity.ERROR),
    "RUN102": ("document leak", Severity.ERROR),
    "RUN103": ("padding leak", Severity.ERROR),
    "RUN104": ("left padding changes results", Severity.ERROR),
    "RUN105": ("right padding changes results", Severity.ERROR),
    "RUN106": ("positions ignored", Severity.ERROR),
    "RUN107": ("batch leak", Severity.ERROR),
    "RUN108": ("window not applied", Severity.WARNING),
    "RUN109": ("positions that never mix", Severity.WARNING),
    "RUN110": ("row that attends to nothing", Severity.ERROR),
    "RUN111": ("saturated softmax", Severity.HINT),
    "RUN112": ("dead head", Severity.HINT),
    "RUN113": ("duplicate heads", Severity.HINT),
    "RUN114": ("sink-only head", Severity.HINT),
    "RUN115": ("scores not scaled by 1/√d", Severity.WARNING),
    "RUN116": ("rotary positions that are not relative", Severity.WARNING),
    "RUN117": ("weights that do not sum to 1", Severity.WARNING),
    "RUN118": ("mask that scores can reach", Severity.WARNING),
    "RUN119": ("softmax in half precision", Severity.WARNING),
    "RUN120": ("prefill and decode disagree", Severity.ERROR),
    "RUN121": ("backends differ", Severity.ERROR),
    "RUN122": ("training and evaluation differ", Severity.ERROR),
    "RUN123": ("random in evaluation", Severity.ERROR),
    "RUN124": ("options change results", Severity.ERROR),
    "RUN125": ("evaluation changes the model", Severity.ERROR),
    "RUN130": ("sparse mask, dense cost", Severity.HINT),
    "RUN131": ("eager attention", Severity.HINT),
}
"""By code, the name of what `regard examine` finds, and its severity."""


def run_text(code: str) -> MistakeText:
    """Why a finding of this code is a mistake, with examples where a few lines show it."""
    return texts_in(Path(__file__).with_suffix(".md"))[code]
