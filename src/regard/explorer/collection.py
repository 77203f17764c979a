"""The atlases that one page shows: each with a name, and with a number that no other ever has."""

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

Rerun = Callable[[str], Atlas]
"""What a model attends to in a text."""

KEPT = 2
"""Atlases that are kept where a model can be run again: the newest, and the one before it."""
MOST_BYTES = 100_000
"""The longest text that a model is run on, in UTF-8."""


class RunStopped(Exception):
    """Nobody waits any more for what a model computes."""


@dataclass(frozen=True, slots=True)
class CollectionEntry:
    """An atlas on a shelf. Its name is the text that the model read where a model can be run again.

    `meta` is what its answers tell first, which then takes no time.
    """

    number: int
    name: str
    answers: AtlasAPI
    meta: dict[str, Any]

    @classmethod
    def of(cls, number: int, name: str, atlas: Atlas) -> CollectionEntry:
        """With all that it has.

        Raises:
            AtlasError: there is no map in the atlas.
        """
        answers = AtlasAPI(atlas)
        return cls(number, name, answers, answers.meta())


class Collection:
    """One atlas or several by their names, such as the steps of a training; or one, and the model that made it.

    An atlas never changes, and numbers are not used again: whoever asks by number gets answers about that atlas or
    none. With `rerun` each run puts its atlas first, and KEPT of them stay; without, what is given is what there is.

    Args:
        atlases: one atlas, called by its title, or atlases by their names, in the order in which they are shown.
        rerun: runs the model on another text. The one atlas is then called by the text that it shows.

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

    def __init__(self, atlases: Atlas | Mapping[str, Atlas], rerun: Rerun | None = None) -> None:
        named = {atlases.title: atlases} if isinstance(atlases, Atlas) else dict(atlases)
        if not named:
            raise AtlasError("there is no atlas to show: give one, or several by their names")
        if rerun is not None and len(named) != 1:
            raise ConfigurationError(
                f"there are {len(named)} atlases and a model to run again: give the one atlas that the model made, or "
                "leave rerun out"
            )
        self.rerun = rerun
        # Replaced as a whole, never changed: requests on other threads see the old ones or the new ones.
        self.entries = tuple(CollectionEntry.of(n, name, atlas) for n, (name, atlas) in enumerate(named.items()))
        self._next = len(self.entries)
        self._running = Event()

    def listed(self) -> dict[str, Any]:
        """Numbers and names, ready for JSON, and how long a text may be; 0 where no model can be run."""
        atlases = [{"number": entry.number, "name": entry.name} for entry in self.entries]
        return {"atlases": atlases, "rerun": 0 if self.rerun is None else MOST_BYTES}

    def entry(self, number: int) -> CollectionEntry | None:
        """The atlas of a number; None where it is not kept any more, or never was."""
        return next((entry for entry in self.entries if entry.number == number), None)

    def had(self, number: int) -> bool:
        """Whether there ever was an atlas of this number."""
        return number < self._next

    def run(self, text: str, stop: Event | None = None) -> None:
        """Run the model on a text; its atlas is then the first. Where that fails, all stays as it is.

        One run at a time: whoever calls sees to that. Once `stop` is set, the next call of a module ends the run.

        Raises:
            RegardError: the text is empty, too long or no Unicode; or the model cannot read it.
            Stopped: `stop` was set before it was done.
        """
        if self.rerun is None:
            raise ConfigurationError("these atlases are records: there is no model here to run on another text")
        _check_text(text)
        self._running = stop or Event()
        with stoppable(self._running):
            made = CollectionEntry.of(self._next, text, self.rerun(text))
        self.entries = (made, *self.entries[: KEPT - 1])
        self._next += 1

    def end(self) -> None:
        """End the run that goes on, if one does."""
        self._running.set()


@contextmanager
def stoppable(stop: Event) -> Iterator[None]:
    """In the block, and on its thread, any call of a module raises Stopped once the event is set; so does its end."""
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
