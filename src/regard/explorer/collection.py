"""The atlases of one page, by name and by a number that is never reused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, get_ident
from typing import Any

from torch import nn

from ..errors import AtlasError, ConfigurationError, CorpusError
from .api import AtlasAPI
from .atlas import Atlas
from .effect_models import EffectModel

Rerun = Callable[[str], Atlas]
"""The function that runs the model on a text and returns its atlas."""

LEAST_KEPT = 2
"""The atlases that stay in memory where a model can be run again, however large: the newest, and the one before it."""
MOST_KEPT = 16
"""The most atlases that stay, so that pages in several tabs each have theirs,"""
MOST_ROWS = 2**21
"""while all of them have at most so many queries and keys, over all heads: some 300 MB of heads of 64."""
MOST_BYTES = 100_000
"""The longest text that a model is run on, in UTF-8."""


class RunStopped(Exception):
    """Raised inside a run of the model that was cancelled because no client waits for its result."""


@dataclass(frozen=True, slots=True)
class CollectionEntry:
    """One atlas of a collection; its name is the text that was read where a model can be run again.

    `meta` is computed once, since it is what a page requests first.
    """

    number: int
    name: str
    answers: AtlasAPI
    meta: dict[str, Any]

    @property
    def rows(self) -> int:
        """Queries and keys of all heads: what the size of an atlas is proportional to."""
        return sum(of["heads"] * (of["queries"] + of["keys"]) for of in self.meta["maps"])

    @classmethod
    def create(cls, number: int, name: str, atlas: Atlas) -> CollectionEntry:
        """Make an entry and compute its metadata.

        Raises:
            AtlasError: there is no map in the atlas.
        """
        answers = AtlasAPI(atlas)
        return cls(number, name, answers, answers.meta())


class Collection:
    """One atlas, several by name (such as training steps), or one with the model that can be run on other texts.

    An atlas never changes, and numbers are not used again: a request by number gets answers about that atlas or none.
    With `rerun` each run puts its atlas first, and the last ones stay, a store by their texts: a text that is there is
    not read again. Without, the atlases do not change.

    Args:
        atlases: one atlas, called by its title, or atlases by their names, in the order in which they are shown.
        rerun: runs the model on another text. The one atlas is then called by the text that it shows.
        effects: the model whose heads can be switched off, if it is here.

    Raises:
        AtlasError: there is no atlas, or one without a map.
        ConfigurationError: `rerun` with several atlases.

    >>> import torch
    >>> def run(text):
    ...     words = text.split()
    ...     return Atlas.from_weights([torch.eye(len(words))[None]], tokens=words)
    >>> shelf = Collection({"It is late.": run("It is late.")}, rerun=run)
    >>> shelf.run("It is not late.")
    >>> shelf.listed()["atlases"]
    [{'number': 1, 'name': 'It is not late.'}, {'number': 0, 'name': 'It is late.'}]
    """

    def __init__(
        self, atlases: Atlas | Mapping[str, Atlas], rerun: Rerun | None = None, effects: EffectModel | None = None
    ) -> None:
        named = {atlases.title: atlases} if isinstance(atlases, Atlas) else dict(atlases)
        if not named:
            raise AtlasError("there is no atlas to show: give one, or several by their names")
        if rerun is not None and len(named) != 1:
            raise ConfigurationError(
                f"there are {len(named)} atlases and a model to run again: give the one atlas that the model made, or "
                "leave rerun out"
            )
        self.rerun, self.effects = rerun, effects
        # Replaced as a whole, never changed: requests on other threads see the old ones or the new ones.
        self.entries = tuple(CollectionEntry.create(n, name, atlas) for n, (name, atlas) in enumerate(named.items()))
        self._next = len(self.entries)
        self._running, self._measuring = Event(), Event()

    def listed(self) -> dict[str, Any]:
        """Numbers and names as JSON, the longest text that a model can read, 0 without a model, and what it has."""
        atlases = [{"number": entry.number, "name": entry.name} for entry in self.entries]
        known = self.effects and {
            "kind": self.effects.kind,
            "modules": [{"name": name, "heads": heads} for name, heads in self.effects.modules().items()],
        }
        return {"atlases": atlases, "rerun": 0 if self.rerun is None else MOST_BYTES, "effects": known}

    def entry(self, number: int) -> CollectionEntry | None:
        """The entry of a number; None if it was dropped or never existed."""
        return next((entry for entry in self.entries if entry.number == number), None)

    def existed(self, number: int) -> bool:
        """Whether an atlas ever had this number."""
        return number < self._next

    def run(self, text: str, stop: Event | None = None) -> None:
        """Run the model on a text, unless its atlas is there, and put that first; if it fails, nothing changes.

        One run at a time: whoever calls sees to that. Once `stop` is set, the next call of a module ends the run.

        Raises:
            RegardError: the text is empty, too long or no Unicode; or the model cannot read it.
            RunStopped: `stop` was set before it was done.
        """
        if self.rerun is None:
            raise ConfigurationError("these atlases are records: there is no model here to run on another text")
        _check_text(text)
        entry = next((entry for entry in self.entries if entry.name == text), None)
        if entry is None:
            self._running = stop or Event()
            with stoppable(self._running):
                entry = CollectionEntry.create(self._next, text, self.rerun(text))
            self._next += 1
        self.entries = _kept(entry, *(other for other in self.entries if other is not entry))

    def measuring(self) -> Event:
        """An event that ends the measuring of effects which begins now, once it is set."""
        self._measuring = Event()
        return self._measuring

    def end(self) -> None:
        """Stop the current run and the measuring of effects, if there is any."""
        self._running.set()
        self._measuring.set()


def _kept(*entries: CollectionEntry) -> tuple[CollectionEntry, ...]:
    """The entries that stay in memory, the newest first."""
    kept, rows = list(entries[:LEAST_KEPT]), sum(entry.rows for entry in entries[:LEAST_KEPT])
    for entry in entries[LEAST_KEPT:MOST_KEPT]:
        rows += entry.rows
        if rows > MOST_ROWS:
            break
        kept.append(entry)
    return tuple(kept)


@contextmanager
def stoppable(stop: Event) -> Iterator[None]:
    """Raise RunStopped once the event is set: at a module's next call on this thread, or at the end of the block."""
    thread = get_ident()

    def check(*_: Any) -> None:
        if stop.is_set() and get_ident() == thread:
            raise RunStopped

    hook = nn.modules.module.register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()
    if stop.is_set():
        raise RunStopped


def _check_text(text: str) -> None:
    if not text.strip():
        raise CorpusError("the text is empty; it needs at least one word for the model to read")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise CorpusError("the text has half of a character in it, a surrogate without its other half") from None
    if size > MOST_BYTES:
        raise CorpusError(f"the text has {size:,} bytes, and at most {MOST_BYTES:,} are read; give a shorter one")
