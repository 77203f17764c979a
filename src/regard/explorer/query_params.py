"""Query parameters of the explorer's requests, parsed strictly: unknown, missing, repeated or malformed ones fail."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import parse_qsl

from ..errors import ConfigurationError

LONGEST_QUERY = 500
"""The longest query string, in bytes."""

Reader = Callable[[str, str], Any]

_NUMBER = r"(?:0|[1-9][0-9]{0,11})"
_WHOLE = re.compile(_NUMBER, re.ASCII)
_SPAN = re.compile(f"({_NUMBER})-({_NUMBER})", re.ASCII)


def number(name: str, text: str) -> int:
    """A whole number of at least 0, in plain digits.

    >>> number("head", "3")
    3
    """
    if not _WHOLE.fullmatch(text):
        raise ConfigurationError(
            f"{name} is {text[:40]!r}; it needs a whole number of at least 0, in digits without leading zeros"
        )
    return int(text)


def span(name: str, text: str) -> tuple[int, int]:
    """A range START-STOP of whole numbers.

    >>> span("rows", "0-256")
    (0, 256)
    """
    found = _SPAN.fullmatch(text)
    if found is None:
        raise ConfigurationError(f"{name} is {text[:40]!r}; it needs a start and a stop, such as {name}=0-256")
    return int(found[1]), int(found[2])


def word(name: str, text: str) -> str:
    """A non-empty string.

    >>> word("side", "key")
    'key'
    """
    if not text:
        raise ConfigurationError(f"{name} is empty; it needs a word")
    return text


QUERIES: dict[str, dict[str, Reader]] = {
    "meta": {},
    "tokens": {"map": number, "side": word, "start": number, "stop": number},
    "pooled": {"map": number, "head": number, "level": number, "reduce": word},
    "overview": {"map": number, "reduce": word},
    "weights": {"map": number, "head": number, "rows": span, "columns": span},
    "profile": {"map": number, "head": number, "which": word},
}
"""The parameters of each request by its name, which is that of a method of `AtlasAPI`."""


def read_query(query: bytes, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Parse a query string whose parameters are the names of `readers`, each exactly once.

    Raises:
        ConfigurationError: it asks for anything else.

    >>> read_query(b"map=0&rows=0-16", {"map": number, "rows": span})
    {'map': 0, 'rows': (0, 16)}
    """
    return read_pairs(_pairs(query), readers)


def read_pairs(found: Mapping[str, str], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Parse parameters that were separated already; `readers` has the parser of each required name.

    Raises:
        ConfigurationError: it asks for anything else.

    >>> read_pairs({"map": "0"}, {"map": number})
    {'map': 0}
    """
    needs = f"it needs {', '.join(readers)}" if readers else "it needs none"
    for name in found:
        if name not in readers:
            raise ConfigurationError(f"there is no parameter {name[:40]!r}; {needs}")
    missing = [name for name in readers if name not in found]
    if missing:
        raise ConfigurationError(f"the parameter {missing[0]!r} is missing; {needs}")
    return {name: reader(name, found[name]) for name, reader in readers.items()}


def _pairs(query: bytes) -> dict[str, str]:
    if not query:
        return {}
    if len(query) > LONGEST_QUERY:
        raise ConfigurationError(f"the query has {len(query):,} bytes; at most {LONGEST_QUERY} are read")
    try:
        pairs = parse_qsl(
            query.decode("ascii"), keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=16
        )
    except ValueError:  # no UTF-8, no "=", or too many
        raise ConfigurationError("the query cannot be read; it needs to be NAME=VALUE&NAME=VALUE, in UTF-8") from None
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigurationError(f"the parameter {twice[:40]!r} is there more than once; it needs to be there once")
    return found
