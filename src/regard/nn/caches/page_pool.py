"""Pages of a memory that sequences share: which are free, which sequence holds which, and the tokens that they hold."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ...errors import ConfigurationError, PagesExhausted
from ...utils.numbers import whole_number

START = 0
"""What comes before the first page of a text; contents are numbered from 1."""
MOST_NAMED = 8
"""Holders that an error lists, those of the most pages."""


class PagePool:
    """Numbers of pages, each with memory for `size` tokens: who holds them, and which full ones have which tokens.

    A page is held by as many sequences as begin with its tokens and those before it. One that nobody holds keeps them
    until the memory is needed, so that a text that begins alike finds it; the one unused for longest is taken first.

    Args:
        count: of pages.
        size: tokens of a page.

    Raises:
        ConfigurationError: a number that is no integer of at least 1.

    >>> pool = PagePool(count=8, size=4)
    >>> first = pool.sequence("a")
    >>> first.extend([5, 6, 7, 8, 9])
    >>> first.share()
    >>> second = pool.sequence("b")
    >>> second.adopt([5, 6, 7, 8, 1]), second.pages == first.pages[:1], pool.free
    (4, True, 6)
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = whole_number("count", count), whole_number("size", size)
        self.sequences: set[PagedSequence] = set()
        self._is_free = bytearray(b"\1" * self.count)
        self._holders = [0] * self.count
        self._found: dict[tuple[int, tuple[int, ...]], NamedPage] = {}
        self._named: dict[int, tuple[int, tuple[int, ...]]] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._contents = START

    @property
    def free(self) -> int:
        """How many pages can be taken: those that nobody holds."""
        return self._is_free.count(1) + len(self._idle)

    def sequence(self, name: object) -> PagedSequence:
        """A sequence without tokens; errors say how many pages the sequence of a name holds."""
        sequence = PagedSequence(self, name)
        self.sequences.add(sequence)
        return sequence

    def pages_for(self, length: int) -> int:
        """The pages of a sequence of this length."""
        return -(-length // self.size)

    def take(self, count: int, after: int | None = None) -> list[int]:
        """Pages that nobody held: those behind `after` where they are free, else from the middle of the longest gap.

        Neighbouring pages are read as one; the sequences on both sides of a gap can grow into it.

        Raises:
            PagesExhausted: there are not so many; nothing was taken.
        """
        if count > self.free:
            raise PagesExhausted(self._exhausted(count))
        while self._is_free.count(1) < count:
            self._forget(self._idle.popitem(last=False)[0])
        pages: list[int] = []
        while len(pages) < count:
            missing = count - len(pages)
            first = self._place(missing, pages[-1] if pages else after)
            room = re.compile(b"\1+").match(self._is_free, first)
            stop = min(first + missing, self.count if room is None else room.end())
            pages.extend(range(first, stop))
            self._is_free[first:stop] = bytes(stop - first)
        for page in pages:
            self._holders[page] = 1
        return pages

    def find(self, before: int, tokens: Sequence[int]) -> NamedPage | None:
        """The page with these tokens behind the content `before`; it is held once more."""
        named = self._found.get((before, tuple(tokens)))
        if named is not None:
            self._holders[named.page] += 1
            self._idle.pop(named.page, None)
        return named

    def name(self, page: int, before: int, tokens: Sequence[int]) -> int:
        """Let a full page be found by its tokens and those before it, unless another has them; the content's number."""
        key = before, tuple(tokens)
        if key not in self._found:
            self._contents += 1
            self._found[key] = NamedPage(page, self._contents)
            self._named[page] = key
        return self._found[key].content

    def release(self, pages: Sequence[int]) -> None:
        """Hold pages of a sequence once less; those at its end are taken by others first."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page]:
                continue
            if page in self._named:
                self._idle[page] = None
            else:
                self._is_free[page] = 1

    def _forget(self, page: int) -> None:
        del self._found[self._named.pop(page)]
        self._is_free[page] = 1

    def _place(self, count: int, after: int | None) -> int:
        """Where to take pages: behind `after`, else in the longest gap, so that as many are free on both sides."""
        if after is not None and after + 1 < self.count and self._is_free[after + 1]:
            return after + 1
        longest = max(re.finditer(b"\1+", self._is_free), key=lambda gap: gap.end() - gap.start())
        return longest.start() + max(longest.end() - longest.start() - count, 0) // 2

    def _exhausted(self, count: int) -> str:
        held = sorted(((len(each.pages), str(each.name)) for each in self.sequences if each.pages), reverse=True)
        listed = ", ".join(f"{name!r} {pages}" for pages, name in held[:MOST_NAMED])
        more = f" and {len(held) - MOST_NAMED} more sequences" if len(held) > MOST_NAMED else ""
        return (
            f"{count} more pages of {self.size} tokens are needed, and {self.free} of the {self.count} are free; held "
            f"are, with what sequences share counted for each: {listed or 'none'}{more}. Nothing was lost: release a "
            "sequence, wait until one ends, or make the memory with more pages"
        )


@dataclass(frozen=True)
class NamedPage:
    """A full page, and the number of its content: its tokens and all before them."""

    page: int
    content: int


@dataclass(eq=False)
class PagedSequence:
    """The pages of one sequence, whose keys are at positions 0..length-1; made by `PagePool.sequence`."""

    pool: PagePool
    name: object
    pages: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    _contents: list[int] = field(default_factory=list, repr=False)  # of the pages that can be found

    def __len__(self) -> int:
        return len(self.tokens)

    def __bool__(self) -> bool:
        return True

    def adopt(self, tokens: Sequence[int]) -> int:
        """Go on with pages of others that have the next tokens of a text, and say how many tokens these are.

        One token at least is left: what follows a text is computed from its last token. Nothing is adopted where the
        sequence ends within a page.

        tokens: the whole text, which begins with those that the sequence has.
        """
        size, before = self.pool.size, len(self)
        self.share()
        while len(self._contents) == len(self.pages) and len(self) + size < len(tokens):
            part = tokens[len(self) : len(self) + size]
            found = self.pool.find(self._contents[-1] if self._contents else START, part)
            if found is None:
                break
            self.pages.append(found.page)
            self._contents.append(found.content)
            self.tokens.extend(part)
        return len(self) - before

    def extend(self, tokens: Sequence[int]) -> None:
        """Take memory for more tokens.

        Raises:
            PagesExhausted: there is none; the sequence is as it was.
        """
        missing = self.pool.pages_for(len(self) + len(tokens)) - len(self.pages)
        if missing > 0:
            self.pages.extend(self.pool.take(missing, self.pages[-1] if self.pages else None))
        self.tokens.extend(tokens)

    def share(self) -> None:
        """Let others find the pages that are full."""
        size = self.pool.size
        for number in range(len(self._contents), len(self) // size):
            before = self._contents[-1] if self._contents else START
            part = self.tokens[number * size : (number + 1) * size]
            self._contents.append(self.pool.name(self.pages[number], before, part))

    def truncate(self, length: int) -> None:
        """Forget the tokens from `length` on, as those that a draft has proposed in vain.

        Raises:
            ConfigurationError: others may read pages of them.
        """
        least = len(self._contents) * self.pool.size
        if not least <= length <= len(self):
            raise ConfigurationError(
                f"the sequence has {len(self)} tokens, of which others can find {least}: it can be cut to a length of "
                f"{least}..{len(self)}, not {length}"
            )
        kept = self.pool.pages_for(length)
        self.pool.release(self.pages[kept:])
        del self.pages[kept:], self.tokens[length:]

    def release(self) -> None:
        """Give all pages back; the sequence has no tokens then, and can begin again."""
        self.pool.release(self.pages)
        self.pages, self.tokens, self._contents = [], [], []

    def end(self) -> None:
        """Give all pages back, for good."""
        self.release()
        self.pool.sequences.discard(self)

    def slots(self, positions: range) -> list[int]:
        """Where the memory has the keys at some positions."""
        size = self.pool.size
        return [self.pages[position // size] * size + position % size for position in positions]

    def runs(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """The keys of positions begin..end-1 as runs in the memory: (first, count), of neighbouring pages as one."""
        size, first, count = self.pool.size, 0, 0
        while begin < end:
            slot, here = self.pages[begin // size] * size + begin % size, min(size - begin % size, end - begin)
            if count and slot != first + count:
                yield first, count
                count = 0
            first, count = (first if count else slot), count + here
            begin += here
        if count:
            yield first, count
