"""Answers in OpenAI's form, whole or in parts as they come: text, why it ended, log probabilities, and attention."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

from ..models.language_model import NewToken
from .openai_requests import GenerationAsked
from .text_codec import DecodedStream, StopWords, TextCodec


@dataclass(frozen=True)
class TokenReport:
    """What is told of one new token beside its text: log p of it and of the likeliest ones, and attention."""

    token: str
    begins: int
    log_probability: float | None
    likeliest: tuple[tuple[str, float], ...]
    attention: list[dict[str, Any]] | None


class WrittenAnswer:
    """One answer while it is written: `take` a token, and it says what has become text.

    A stop word, and what comes after it, is in none of it; nor is a token that ends a text.
    """

    def __init__(self, codec: TextCodec, asked: GenerationAsked, stop: tuple[int, ...]) -> None:
        self._codec, self._asked, self._stop = codec, asked, stop
        self._stream, self._words = DecodedStream(codec), StopWords(asked.stop_words)
        self.text, self.reason, self.count = "", None, 0
        self._new: list[TokenReport] = []

    @property
    def has_stopped(self) -> bool:
        """Whether a stop word has come."""
        return self._words.found

    def take(self, new: NewToken) -> str:
        """The text that a new token makes certain."""
        self.count += 1
        text = ""
        if new.token not in self._stop:
            text = self._words.add(self._stream.add(new.token))
            self._new.append(self._report(new))
        if self._words.found:
            self.reason = "stop"
        elif new.reason is not None:
            text += self._words.add(self._stream.end())
            self.reason = "stop" if self._words.found else new.reason
            text += self._words.end()
        self.text += text
        return text

    def reports(self) -> list[TokenReport]:
        """What is told of the tokens since the last time."""
        new, self._new = self._new, []
        return new

    def _report(self, new: NewToken) -> TokenReport:
        chances, attention = new.chances, self._asked.attention
        likeliest = () if chances is None else chances.likeliest
        return TokenReport(
            self._codec.decode([new.token]),
            len(self.text),
            None if chances is None else chances.log_probability,
            tuple((self._codec.decode([token]), chance) for token, chance in likeliest),
            None if attention is None else attention.report(new.observed),
        )


@dataclass(eq=False)
class AnswerForm(ABC):
    """The JSON of answers of one kind, to one request."""

    model: str
    asked: GenerationAsked
    prompt_tokens: list[str]
    created: int = field(init=False, default_factory=lambda: int(time.time()))
    identity: str = field(init=False, default="")

    kind = part_kind = prefix = ""

    def __post_init__(self) -> None:
        self.identity = f"{self.prefix}-{secrets.token_hex(12)}"

    def whole(self, choices: list[WrittenAnswer], prompt: int) -> dict[str, Any]:
        """The JSON of an answer that has ended; `prompt` tokens were read."""
        told = [
            {"index": index, "finish_reason": choice.reason, **self.choice(choice.text), **self._beside(choice)}
            for index, choice in enumerate(choices)
        ]
        return self._frame(self.kind, told) | {"usage": self.usage(choices, prompt)}

    def part(self, index: int, choice: WrittenAnswer, text: str, *, first: bool) -> dict[str, Any]:
        """The JSON of more text of one answer."""
        told = {"index": index, "finish_reason": choice.reason, **self.delta(text, first), **self._beside(choice)}
        return self._frame(self.part_kind, [told])

    def last(self, choices: list[WrittenAnswer], prompt: int) -> dict[str, Any]:
        """The JSON of the end of a stream that is to say how many tokens there were."""
        return self._frame(self.part_kind, []) | {"usage": self.usage(choices, prompt)}

    def usage(self, choices: list[WrittenAnswer], prompt: int) -> dict[str, int]:
        """How many tokens were read and written."""
        written = sum(choice.count for choice in choices)
        return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}

    @abstractmethod
    def choice(self, text: str) -> dict[str, Any]:
        """A whole text."""

    @abstractmethod
    def delta(self, text: str, first: bool) -> dict[str, Any]:
        """A part of a text."""

    @abstractmethod
    def log_probabilities(self, reports: list[TokenReport]) -> dict[str, Any]:
        """Those of tokens."""

    def _beside(self, choice: WrittenAnswer) -> dict[str, Any]:
        """Log probabilities and attention of the tokens that were not told yet."""
        reports, told = choice.reports(), {}
        told["logprobs"] = None if self.asked.likeliest is None else self.log_probabilities(reports)
        if self.asked.attention is not None:
            told["attention"] = [{"token": each.token, "layers": each.attention} for each in reports]
        return told

    def _frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        told = {"id": self.identity, "object": kind, "created": self.created, "model": self.model, "choices": choices}
        if self.asked.attention is not None:
            told["prompt_tokens"] = self.prompt_tokens
        return told


class CompletionForm(AnswerForm):
    """The form of /v1/completions."""

    kind = part_kind = "text_completion"
    prefix = "cmpl"

    def choice(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def delta(self, text: str, first: bool) -> dict[str, Any]:
        return {"text": text}

    def log_probabilities(self, reports: list[TokenReport]) -> dict[str, Any]:
        return {
            "tokens": [each.token for each in reports],
            "token_logprobs": [each.log_probability for each in reports],
            "top_logprobs": [dict(each.likeliest) for each in reports],
            "text_offset": [each.begins for each in reports],
        }


class ChatForm(AnswerForm):
    """The form of /v1/chat/completions."""

    kind, part_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choice(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def delta(self, text: str, first: bool) -> dict[str, Any]:
        return {"delta": {"role": "assistant", "content": text} if first else {"content": text}}

    def log_probabilities(self, reports: list[TokenReport]) -> dict[str, Any]:
        def told(token: str, chance: float | None) -> dict[str, Any]:
            return {"token": token, "logprob": chance, "bytes": list(token.encode("utf-8", "replace"))}

        return {
            "content": [
                {**told(each.token, each.log_probability), "top_logprobs": [told(*one) for one in each.likeliest]}
                for each in reports
            ],
            "refusal": None,
        }
