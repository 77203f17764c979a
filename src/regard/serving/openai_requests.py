"""What a client may ask in OpenAI's form: completions of a text, and answers in a conversation."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from ..models.language_model import Sampling
from .weight_report import AttentionAsked


class StreamOptions(BaseModel):
    """Of an answer that streams: whether its end says how many tokens there were."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool = False
    include_obfuscation: bool = False


class GenerationAsked(BaseModel):
    """What both kinds of requests have; what would change an answer and is not known here is refused.

    `user`, `metadata`, `store` and `service_tier` change none. `top_k` and `attention` are ours.
    """

    model_config = ConfigDict(extra="forbid")

    model: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0.0, le=2.0)
    top_p: float | None = Field(default=None, gt=0.0, le=1.0)
    top_k: int | None = Field(default=None, ge=1)
    n: int = Field(default=1, ge=1, le=16)
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    attention: AttentionAsked | None = None
    presence_penalty: float | None = Field(default=None, ge=0.0, le=0.0)
    frequency_penalty: float | None = Field(default=None, ge=0.0, le=0.0)
    user: str | None = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None

    @property
    def sampling(self) -> Sampling | None:
        """How to draw; None for the likeliest token, of temperature 0."""
        temperature = 1.0 if self.temperature is None else self.temperature
        return Sampling(temperature, self.top_k, self.top_p) if temperature else None

    @property
    def stop_words(self) -> list[str]:
        """The words that end an answer, which it does not have."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def most_new(self) -> int | None:
        """The most new tokens."""
        return self.max_tokens

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are told beside each; None where no log p is."""
        return None


class CompletionAsked(GenerationAsked):
    """A request of /v1/completions: a text, several, or their tokens."""

    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: int | None = Field(default=None, ge=0, le=20)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None

    @property
    def likeliest(self) -> int | None:
        return self.logprobs

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each text, or its tokens."""
        if isinstance(self.prompt, str) or (self.prompt and isinstance(self.prompt[0], int)):
            return [self.prompt]  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One message of a conversation."""

    model_config = ConfigDict(extra="forbid")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    def plain(self) -> dict[str, str]:
        """The message with its content as one text."""
        content = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": content}


class ChatAsked(GenerationAsked):
    """A request of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=20)

    @property
    def most_new(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None
