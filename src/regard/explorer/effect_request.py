"""What a request for effects asks: the text, what is switched off, and by what it is replaced."""

from __future__ import annotations

import json
import unicodedata
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigurationError, CorpusError
from ..heads import HeadTerms

REPLACEMENTS = ("zero", "mask", "mean", "before")
FIELDS = ("text", "token", "terms", "replace", "reference")
MOST_TEXT = 20_000
"""The longest text, in characters, that is read again for each head."""


@dataclass(frozen=True)
class EffectRequest:
    """A request for effects.

    text: what the model reads. token: whose state, or next token, is compared; None for the last. terms: what is
    switched off; None for each head, one by one. replace: "zero", "mask", "mean" of the reference or the same terms
    "before", while the model reads the reference. reference: that other text.
    """

    text: str
    token: int | None
    terms: HeadTerms | None
    replace: str
    reference: str | None

    @classmethod
    def parse(cls, body: str) -> EffectRequest:
        """The request from its JSON.

        Raises:
            ConfigurationError: it is no JSON of these fields.
            CorpusError: a text that is empty, too long, or has control characters.

        >>> EffectRequest.parse('{"text": "it", "token": null, "terms": null, "replace": "zero", "reference": null}')
        EffectRequest(text='it', token=None, terms=None, replace='zero', reference=None)
        """
        try:
            given = json.loads(body)
        except ValueError as error:
            raise ConfigurationError(f"the request is no JSON: {error}") from None
        if not isinstance(given, dict) or set(given) != set(FIELDS):
            has = sorted(map(str, given))[:9] if isinstance(given, dict) else type(given).__name__
            raise ConfigurationError(f"the request has {has}; it needs {', '.join(FIELDS)}")
        token, replace, reference = given["token"], given["replace"], given["reference"]
        if token is not None and not _is_index(token):
            raise ConfigurationError(f"token is {str(token)[:40]!r}; it needs an index of at least 0, or null")
        if replace not in REPLACEMENTS:
            raise ConfigurationError(f"replace is {str(replace)[:40]!r}; it needs to be one of {REPLACEMENTS}")
        if (replace in ("mean", "before")) != (reference is not None):
            raise ConfigurationError(
                "a reference is the text of 'mean' and of 'before', which need one; others have none"
            )
        text = checked_text("text", given["text"])
        reference = None if reference is None else checked_text("reference", reference)
        return cls(text, token, _terms(given["terms"]), replace, reference)


def checked_text(name: str, text: Any) -> str:
    """A text that a model can read.

    Raises:
        CorpusError: it is none, empty, too long, or has control characters or halves of characters.
    """
    if not isinstance(text, str) or not text.strip():
        raise CorpusError(f"{name} needs to be a text of at least one word; it is {str(text)[:40]!r}")
    if len(text) > MOST_TEXT:
        raise CorpusError(f"{name} has {len(text):,} characters; at most {MOST_TEXT:,} are read again for each head")
    refuse_control_characters(name, text)
    return text


def refuse_control_characters(name: str, text: str) -> None:
    """Check that a text has no control characters but tabs and line ends, and no halves of characters.

    Raises:
        CorpusError: it has one.

    >>> refuse_control_characters("text", "one line")
    """
    for at, character in enumerate(text):
        if unicodedata.category(character) in ("Cc", "Cs") and character not in "\t\n\r":
            raise CorpusError(
                f"{name} has the control character U+{ord(character):04X} at {at + 1}: give it without, as plain text"
            )


def _terms(given: Any) -> HeadTerms | None:
    if given is None:
        return None
    names = {"module", "heads", "queries", "keys"}
    if not isinstance(given, dict) or set(given) != names:
        raise ConfigurationError(f"terms needs to be null, or an object of {', '.join(sorted(names))}, each or null")
    numbers = {name: given[name] for name in names - {"module"}}
    wrong = next((name for name, one in numbers.items() if one is not None and not isinstance(one, list)), None)
    if wrong is not None:
        raise ConfigurationError(f"{wrong} of the terms needs to be a list of whole numbers, or null")
    return HeadTerms(given["module"], **numbers)


def _is_index(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31
