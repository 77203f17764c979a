"""Which token of one text stands for which of another, for patches between texts of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cached_property

from ..errors import CorpusError

MOST_NAMED = 8
"""The most tokens without a partner that are named in a message."""


@dataclass(frozen=True)
class TokenAlignment:
    """Pairs (position before, position now) of the tokens of two texts, both rising; `print` it for those without one.

    before, now: the tokens of the two texts.
    """

    before: tuple[str, ...]
    now: tuple[str, ...]
    pairs: tuple[tuple[int, int], ...]

    @property
    def unaligned_before(self) -> tuple[int, ...]:
        """The positions of the earlier text that stand for no token of the present one."""
        aligned = {pair[0] for pair in self.pairs}
        return tuple(at for at in range(len(self.before)) if at not in aligned)

    @property
    def unaligned_now(self) -> tuple[int, ...]:
        """The positions of the present text without a token of the earlier one; a patch leaves them as they are."""
        return tuple(at for at in range(len(self.now)) if at not in self._before_by_now)

    def before_of(self, position: int) -> int | None:
        """The position before of a position now; None without a partner."""
        return self._before_by_now.get(position)

    @cached_property
    def _before_by_now(self) -> dict[int, int]:
        return {now: before for before, now in self.pairs}

    def __str__(self) -> str:
        told = f"{len(self.pairs)} tokens are aligned"
        for label, tokens, missing in (
            ("before", self.before, self.unaligned_before),
            ("now", self.now, self.unaligned_now),
        ):
            if missing:
                named = ", ".join(f"{at} {tokens[at]!r}" for at in missing[:MOST_NAMED])
                told += f"; {label} alone: {named}{' …' * (len(missing) > MOST_NAMED)}"
        return told


def align_tokens(before: Sequence[str], now: Sequence[str]) -> TokenAlignment:
    """Align the tokens of two texts: as many tokens one by one, else by the runs of equal tokens that they share.

    Between two such runs, tokens are aligned one by one where both texts have as many there, and not at all otherwise.

    Raises:
        CorpusError: tokens that are no list of str.

    Source: Ratcliff and Metzener 1988, the matching of `difflib.SequenceMatcher`.

    >>> print(align_tokens("the cat sat down".split(), "the old cat lay down".split()))
    4 tokens are aligned; now alone: 1 'old'
    """
    for tokens in (before, now):
        if isinstance(tokens, str) or not all(isinstance(token, str) for token in tokens):
            raise CorpusError(f"align_tokens needs two lists of tokens, each a str; one is {str(tokens)[:80]!r}")
    before, now = tuple(before), tuple(now)
    if len(before) == len(now):
        return TokenAlignment(before, now, tuple((at, at) for at in range(len(now))))
    pairs: list[tuple[int, int]] = []
    for kind, first, last, start, stop in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if kind == "equal" or (kind == "replace" and last - first == stop - start):
            pairs += zip(range(first, last), range(start, stop), strict=True)
    return TokenAlignment(before, now, tuple(pairs))
