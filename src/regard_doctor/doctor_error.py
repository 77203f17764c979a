"""The error that the doctor raises for bad input.

A message says what was wrong, what it has, what it needs, and the mend.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DoctorError(ValueError):
    """A path, a code or a setting that the doctor cannot use."""


def nearest(word: str, known: Iterable[str]) -> str:
    """List the known words, the closest first, for the end of an "unknown ..." message.

    >>> nearest("ATT1O1", ["ATT101", "ATT310"])
    "did you mean 'ATT101'? Known: 'ATT101', 'ATT310'"
    """
    names = sorted(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}Known: {', '.join(repr(name) for name in names)}"
