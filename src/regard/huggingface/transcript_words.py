"""The words of a transcript, from the tokens of a Whisper model."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

UNSPACED = {"zh", "ja", "th", "lo", "my", "yue"}
"""Languages written without spaces: each character, or token of several, counts as a word."""
MOST_BYTES = 4
"""Of a character in UTF-8, and so the most tokens that it can be spread over."""


@dataclass(frozen=True)
class TokenizedWord:
    """A word, or another run of characters, and the indices of its tokens in the sequence."""

    text: str
    tokens: range

    def joined(self, other: TokenizedWord) -> TokenizedWord:
        """This word with the one behind it."""
        return TokenizedWord(self.text + other.text, range(self.tokens.start, other.tokens.stop))


@dataclass(frozen=True)
class TranscriptReader:
    """Reads sequences `<|startoftranscript|> language task ... text ... <|endoftext|>`.

    Tokens from `end_of_text` on are special, and those from `first_time` on are times. languages: by token.
    """

    tokenizer: Any
    prompt_start: int
    end_of_text: int
    first_time: int | None
    languages: Mapping[int, str]

    @classmethod
    def from_model(cls, model: nn.Module, tokenizer: Any) -> TranscriptReader:
        """The reader for a `WhisperForConditionalGeneration`, whose generation_config numbers its special tokens."""
        settings: Any = model.generation_config
        ends, no_times = settings.eos_token_id, getattr(settings, "no_timestamps_token_id", None)
        languages = getattr(settings, "lang_to_id", None) or {}
        return cls(
            tokenizer=tokenizer,
            prompt_start=settings.decoder_start_token_id,
            end_of_text=min(ends) if isinstance(ends, list) else ends,
            first_time=None if no_times is None else no_times + 1,
            languages={number: name.strip("<|>") for name, number in languages.items()},
        )

    def predicting_rows(self, tokens: Sequence[int]) -> range:
        """The positions that predict the text and what follows it, up to the end: from one before its first token.

        A time at the start of the text counts as part of the prompt.
        """
        first = tokens.index(self.prompt_start) + 1
        while first < len(tokens) and tokens[first] > self.end_of_text:
            first += 1
            if self._is_time(tokens[first - 1]):
                break
        end = next((at for at in range(first, len(tokens)) if tokens[at] == self.end_of_text), len(tokens))
        return range(first - 1, end)

    def words(self, tokens: Sequence[int], rows: range) -> list[TokenizedWord]:
        """The words of a sequence, of those tokens that `rows` predict and that are text."""
        spaced = not any(self.languages.get(token) in UNSPACED for token in tokens[: rows.start + 1])
        found: list[TokenizedWord] = []
        previous: TokenizedWord | None = None
        for part in self._parts(tokens, range(rows.start + 1, rows.stop)):
            follows = previous is not None and previous.tokens.stop == part.tokens.start
            if previous is not None and follows and _continues(previous.text, part.text, spaced=spaced):
                found[-1] = found[-1].joined(part)
            else:
                found.append(part)
            previous = part
        stripped = (TokenizedWord(word.text.strip(), word.tokens) for word in found)
        return [word for word in stripped if word.text]

    def _parts(self, tokens: Sequence[int], text: range) -> Iterator[TokenizedWord]:
        """The fewest tokens that have whole characters, one after another; special tokens are left out."""
        start = text.start
        for at in text:
            if tokens[at] >= self.end_of_text:
                start = at + 1
                continue
            held = self.tokenizer.decode(list(tokens[start : at + 1]))
            unfinished = held.endswith("\N{REPLACEMENT CHARACTER}") and at + 1 - start < MOST_BYTES
            if not unfinished or at + 1 == text.stop or tokens[at + 1] >= self.end_of_text:
                yield TokenizedWord(held, range(start, at + 1))
                start = at + 1

    def _is_time(self, token: int) -> bool:
        return self.first_time is not None and token >= self.first_time


def _continues(before: str, part: str, *, spaced: bool) -> bool:
    """Whether a part belongs to the word of the part before it."""
    if spaced:
        return not part[:1].isspace()
    return _is_punctuation(part, opening=False) or _is_punctuation(before, opening=True)


def _is_punctuation(text: str, *, opening: bool) -> bool:
    """Whether a text is punctuation alone, of the kind that opens, such as a bracket, or of the others."""
    kinds = [unicodedata.category(character) for character in text.strip()]
    return bool(kinds) and all(kind[0] == "P" and (kind in ("Ps", "Pi")) == opening for kind in kinds)
