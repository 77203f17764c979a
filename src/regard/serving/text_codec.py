"""Text to tokens and back, also token by token, for the language model of a folder."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import CheckpointError, ConfigurationError, CorpusError, require
from ..models.language_model.saved_model import read_json

BYTES = 256
"""The vocabulary of a model of bytes; more tokens, if it has some, are no text."""
HELD = 16
"""Tokens whose text may depend on those before them."""


class TextCodec(Protocol):
    """The text of tokens."""

    stop: tuple[int, ...]
    """The tokens that end a text."""

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """The tokens of a text, after the token that begins one, where there is one and `begins` asks for it."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens; what is no text yet, such as half a letter, becomes U+FFFD."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text of a conversation, to be continued by the model."""
        ...


class ByteCodec:
    """UTF-8 bytes as tokens: what `regard train` trains language models on."""

    stop: tuple[int, ...] = ()

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """The bytes of a text."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of bytes."""
        return bytes(token for token in tokens if token < BYTES).decode("utf-8", "replace")

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Refused: a model of bytes has learned no form of conversations.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError("this model has no chat template: ask for /v1/completions, which continues a text")


class TokenizerCodec:
    """The tokenizer.json of a folder, with its chat template.

    Raises:
        CheckpointError: there is no tokenizer.json, or it is damaged.
        MissingExtra: tokenizers is not installed.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json: the text of tokens is not known; save the model's tokenizer there "
                "with tokenizer.save_pretrained"
            )
        try:
            self._tokenizer = require("tokenizers", extra="serve").Tokenizer.from_file(str(path))
        except Exception as error:
            if isinstance(error, ImportError):
                raise
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        settings = _settings(folder / "tokenizer_config.json")
        self._special = {
            name: _named(settings.get(name)) for name in ("bos_token", "eos_token", "unk_token", "pad_token")
        }
        template = folder / "chat_template.jinja"
        self._template = template.read_text("utf-8") if template.is_file() else settings.get("chat_template")
        of_model = _settings(folder / "config.json").get("eos_token_id")
        ends = _settings(folder / "generation_config.json").get("eos_token_id", of_model)
        numbers = ends if isinstance(ends, list) else [] if ends is None else [ends]
        self.stop = tuple(number for number in numbers if isinstance(number, int))

    def encode(self, text: str, *, begins: bool = True) -> list[int]:
        """The tokens of a text."""
        return self._tokenizer.encode(text, add_special_tokens=begins).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, without special ones."""
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The text that the model's template makes of a conversation.

        Raises:
            ConfigurationError: there is no template.
            CorpusError: the template refuses the conversation.
        """
        if not isinstance(self._template, str):
            raise ConfigurationError("this model has no chat template: ask for /v1/completions, which continues a text")
        require("jinja2", extra="serve")
        from jinja2.exceptions import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        special = {name: token for name, token in self._special.items() if token is not None}
        try:
            return environment.from_string(self._template).render(
                messages=[dict(message) for message in messages], add_generation_prompt=True, **special
            )
        except TemplateError as error:
            raise CorpusError(f"the chat template of the model refuses the messages: {error}") from None


class DecodedStream:
    """The text of tokens that arrive one at a time: `add` returns what has become text."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec, self._tokens, self._said = codec, [], ""
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace") if isinstance(codec, ByteCodec) else None

    def add(self, token: int) -> str:
        """The text that one more token completes; "" while a letter is not whole."""
        if self._utf8 is not None:
            return self._utf8.decode(bytes([token]) if token < BYTES else b"")
        self._tokens.append(token)
        text = self._codec.decode(self._tokens)
        if text.endswith("\ufffd"):
            return ""
        new, self._said = text[len(self._said) :], text
        if len(self._tokens) > 2 * HELD:  # the last ones stay, as the text of a token may depend on those before it
            self._tokens = self._tokens[-HELD:]
            self._said = self._codec.decode(self._tokens)
        return new

    def end(self) -> str:
        """The text of what is left, half letters as U+FFFD."""
        if self._utf8 is not None:
            return self._utf8.decode(b"", True)
        return self._codec.decode(self._tokens)[len(self._said) :]


class StopWords:
    """Cut a text where one of some words begins, and hold back what may become one: `add` returns what is certain."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words, self._held = [word for word in words if word], ""
        self.found = False

    def add(self, text: str) -> str:
        """The text that no stop word can begin in any more."""
        if self.found:
            return ""
        self._held += text
        places = [place for word in self._words if (place := self._held.find(word)) >= 0]
        if places:
            self.found, certain, self._held = True, self._held[: min(places)], ""
            return certain
        keep = max((_overlap(self._held, word) for word in self._words), default=0)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain

    def end(self) -> str:
        """What was held back, now that the text has ended."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, word: str) -> int:
    """How many letters at the end of a text a word begins with."""
    return next((size for size in range(min(len(word) - 1, len(text)), 0, -1) if text.endswith(word[:size])), 0)


def _settings(path: Path) -> dict[str, Any]:
    """The settings of a file that need not be there."""
    return read_json(path) if path.is_file() else {}


def _named(token: object) -> str | None:
    """A special token, which tokenizer_config.json has as a string or as its description."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _refuse(message: str) -> None:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)
