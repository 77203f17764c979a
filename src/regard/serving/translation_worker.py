"""The thread that translates the lines of all requests, those that wait together in one batch."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Condition, Thread

from ..errors import RegardError
from ..translation.translated_line import Translation
from ..translation.translator import AlignedPair, Translator
from .batch_worker import ModelFailed

log = logging.getLogger("regard.serving")

LINES = 128
"""Lines of waiting requests that are taken together: those of one request are never parted."""


@dataclass(frozen=True, eq=False)
class TranslatedLine:
    """The translation of a line, and where it was asked for its alignment with the best candidate."""

    translation: Translation
    aligned: AlignedPair | None


@dataclass(frozen=True, eq=False)
class LinesToTranslate:
    """The lines of one request, how many candidates of each, and whether aligned with the best; who waits for them."""

    lines: Sequence[str]
    candidates: int
    align: bool
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[list[TranslatedLine]]


class TranslationWorker(Thread):
    """A thread that takes what waits, as long as it is asked for alike, and translates it together."""

    def __init__(self, translator: Translator) -> None:
        super().__init__(name="regard-translation", daemon=True)
        self.translator = translator
        self._wake, self._waiting, self._stops = Condition(), deque[LinesToTranslate](), False

    def translate(self, lines: Sequence[str], candidates: int, *, align: bool) -> asyncio.Future[list[TranslatedLine]]:
        """The translations, to be awaited on the event loop of the caller; cancelled ones are not begun.

        Raises, when it is awaited:
            RegardError: a line that the model does not take.
            ModelFailed: the model raised.
        """
        loop = asyncio.get_running_loop()
        asked = LinesToTranslate(lines, candidates, align, loop, loop.create_future())
        with self._wake:
            self._waiting.append(asked)
            self._wake.notify()
        return asked.future

    def stop(self) -> None:
        """End the thread after what it is at."""
        with self._wake:
            self._stops = True
            self._wake.notify()

    def run(self) -> None:
        """Translate until `stop`."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stops or self._waiting)
                if self._stops:
                    return
                asked = self._together()
            if asked:
                self._translate(asked)

    def _together(self) -> list[LinesToTranslate]:
        """Those that have waited longest and are asked for as the first is, until they fill a batch."""
        first, taken, count = self._waiting[0], [], 0
        while self._waiting and count < LINES:
            each = self._waiting[0]
            if (each.candidates, each.align) != (first.candidates, first.align):
                break
            self._waiting.popleft()
            if not each.future.cancelled():
                taken.append(each)
                count += len(each.lines)
        return taken

    def _translate(self, asked: list[LinesToTranslate]) -> None:
        try:
            found = iter(self._translations([line for each in asked for line in each.lines], asked[0]))
        except RegardError as error:
            if len(asked) == 1:
                _tell(asked[0], error)
                return
            for each in asked:  # one of them is to be refused, not all
                self._translate([each])
            return
        except Exception as error:
            log.error("the translator failed", exc_info=error)
            for each in asked:
                _tell(each, ModelFailed())
            return
        for each in asked:
            _tell(each, [next(found) for _ in each.lines])

    def _translations(self, lines: list[str], asked: LinesToTranslate) -> list[TranslatedLine]:
        translator, count = self.translator, asked.candidates
        search = translator.search.model_copy(update={"n_best": count, "beam": max(count, translator.search.beam)})
        above = translator.longest_trained
        found = translator.translate(lines, search=search, observe=False, split_above=above)
        aligned: list[AlignedPair | None] = [None] * len(lines)
        if asked.align:
            aligned = [*translator.align(lines, [each.text for each in found])]
        return [TranslatedLine(*both) for both in zip(found, aligned, strict=True)]


def _tell(asked: LinesToTranslate, result: list[TranslatedLine] | BaseException) -> None:
    def tell() -> None:
        if asked.future.cancelled():
            return
        if isinstance(result, BaseException):
            asked.future.set_exception(result)
        else:
            asked.future.set_result(result)

    if not asked.loop.is_closed():
        asked.loop.call_soon_threadsafe(tell)
