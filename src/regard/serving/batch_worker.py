"""The thread that continues the texts of all requests in one batch."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from threading import Condition, Thread

from ..errors import RegardError
from ..lenses import Lens
from ..models.language_model import Continuation, ContinuousBatch, NewToken, Sampling

log = logging.getLogger("regard.serving")


@dataclass(frozen=True, eq=False)
class TextToContinue:
    """One text of a request, and how it is continued: arguments of `ContinuousBatch.add`."""

    tokens: Sequence[int]
    max_new_tokens: int
    sampling: Sampling | None = None
    stop: tuple[int, ...] = ()
    seed: int | None = None
    lenses: tuple[Lens, ...] = ()
    likeliest: int | None = None


class ModelFailed(Exception):
    """The model raised at a step; the log has more."""

    def __init__(self) -> None:
        super().__init__("the model failed at this text; the log of the server has said more")


@dataclass(eq=False)
class TextJob:
    """The texts of one request in the batch; iterate over it for (number of the text, new token).

    The iteration ends when all texts have ended, and raises what ended them otherwise, or TimeoutError at the deadline,
    a time of the loop. `cancel` ends those that are left; it may be called at any time, and has to be at the end.
    """

    worker: BatchWorker
    texts: Sequence[TextToContinue]
    loop: asyncio.AbstractEventLoop
    deadline: float
    events: asyncio.Queue = field(default_factory=asyncio.Queue)
    continuations: list[Continuation] = field(default_factory=list)
    is_cancelled: bool = False

    async def __aiter__(self) -> AsyncIterator[tuple[int, NewToken]]:
        left = set(range(len(self.texts)))
        while left:
            async with asyncio.timeout_at(self.deadline):
                event = await self.events.get()
            if isinstance(event, BaseException):
                raise event
            number, new = event
            if number not in left:
                continue  # it was ended here, and the batch had one token more
            if new.reason is not None:
                left.discard(number)
            yield number, new
            left -= self._ended

    def __post_init__(self) -> None:
        self._ended: set[int] = set()

    def end(self, number: int) -> None:
        """End one text, as its stop word has come."""
        self._ended.add(number)
        self.worker.end(self, [number])

    def cancel(self) -> None:
        """End all texts, and give their pages back."""
        self.is_cancelled = True
        self.worker.end(self, range(len(self.texts)))

    def tell(self, event: object) -> None:
        """Called by the thread of the worker: pass an event on to whoever iterates."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)


class BatchWorker(Thread):
    """A thread that steps a batch while there are texts in it."""

    def __init__(self, batch: ContinuousBatch) -> None:
        super().__init__(name="regard-batch", daemon=True)
        self.batch = batch
        self._wake = Condition()
        self._commands: list[tuple[str, TextJob, Sequence[int]]] = []
        self._jobs: dict[int, tuple[TextJob, int]] = {}
        self._stops = False

    def add(self, texts: Sequence[TextToContinue], seconds: float) -> TextJob:
        """Continue the texts of a request for so many seconds at most; called on the thread of an event loop."""
        loop = asyncio.get_running_loop()
        job = TextJob(self, texts, loop, loop.time() + seconds)
        self._command("add", job, ())
        return job

    def end(self, job: TextJob, numbers: Sequence[int]) -> None:
        """End some texts of a job; those that have ended stay as they are."""
        self._command("end", job, numbers)

    def stop(self) -> None:
        """End the thread after the step that it is at."""
        with self._wake:
            self._stops = True
            self._wake.notify()

    def run(self) -> None:
        """Step until `stop`."""
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._stops or self._commands or not self.batch.is_empty)
                if self._stops:
                    return
                commands, self._commands = self._commands, []
            for command in commands:
                self._obey(*command)
            self._step()

    def _command(self, kind: str, job: TextJob, numbers: Sequence[int]) -> None:
        with self._wake:
            self._commands.append((kind, job, numbers))
            self._wake.notify()

    def _obey(self, kind: str, job: TextJob, numbers: Sequence[int]) -> None:
        if kind == "end":
            for continuation in (job.continuations[number] for number in numbers if number < len(job.continuations)):
                self.batch.cancel(continuation)
                self._jobs.pop(continuation.number, None)
            return
        if job.is_cancelled:
            return
        try:
            for number, text in enumerate(job.texts):
                added = self.batch.add(
                    text.tokens,
                    text.max_new_tokens,
                    sampling=text.sampling,
                    stop=text.stop,
                    seed=text.seed,
                    lenses=text.lenses,
                    likeliest=text.likeliest,
                )
                job.continuations.append(added)
                self._jobs[added.number] = job, number
        except RegardError as error:
            self._obey("end", job, range(len(job.continuations)))
            job.tell(error)

    def _step(self) -> None:
        try:
            for new in self.batch.step():
                job, number = self._jobs[new.continuation.number]
                if new.reason is not None:
                    del self._jobs[new.continuation.number]
                job.tell((number, new))
        except Exception as error:
            log.error("the model failed at a step", exc_info=error)
            for job, number in list(self._jobs.values()):
                self._obey("end", job, [number])
                job.tell(ModelFailed())
