"""The one request that changes anything: the model is run on another text, one run at a time."""

from __future__ import annotations

import logging
from functools import partial
from threading import Event

from anyio import CapacityLimiter, create_task_group, get_cancelled_exc_class, to_thread
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..errors import RegardError
from .replies import refusal, told
from .shelf import MOST_BYTES, Shelf, Stopped

MOST_READ = 10_000_000
"""Of a text that is too long so much is read, so that its sender comes to hear that it is."""
KIND = "text/plain"
GONE = 499
"""The status of what nobody waits for any more."""

log = logging.getLogger("regard.explorer")


class Refused(Exception):
    """The request cannot be taken: a status, and why."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Running:
    """Runs the model of a shelf for whoever asks by POST with a text in UTF-8, and tells which atlases there are then.

    A second request meanwhile is refused. A run ends when whoever asked for it goes away: then all stays as it was, and
    the next one waits until the model has let go.
    """

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._stop: Event | None = None
        self._limiter: CapacityLimiter | None = None

    async def answer(self, request: Request) -> Response:
        """The atlases after the run; 4xx where the text cannot be read, 5xx where the model fails at it."""
        try:
            text = await _text(request)
        except Refused as error:
            return refusal(error.status, str(error))
        except ClientDisconnect:
            return Response(status_code=GONE)
        if self._stop is not None and not self._stop.is_set():
            return refusal(409, "the model is running on another text already: wait until it is done, or cancel that")
        stop = self._stop = Event()
        try:
            return await self._run(request, text, stop)
        except get_cancelled_exc_class():  # the server ends, and a model must not keep it
            return refusal(503, "the server has ended")
        finally:
            stop.set()

    async def _run(self, request: Request, text: str, stop: Event) -> Response:
        if self._limiter is None:
            self._limiter = CapacityLimiter(1)
        async with create_task_group() as group:
            group.start_soon(_watch, request, stop)
            try:
                await to_thread.run_sync(partial(self._shelf.run, text, stop), limiter=self._limiter)
                reply = told(self._shelf.listed())
            except Stopped:
                reply = Response(status_code=GONE)
            except RegardError as error:
                reply = refusal(400, str(error))
            except Exception as error:
                log.error("the model failed at a text", exc_info=error)
                reply = refusal(500, "the model failed at this text; where the server runs it has said more")
            group.cancel_scope.cancel()
        return reply


async def _watch(request: Request, stop: Event) -> None:
    """Set `stop` when whoever asked goes away."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stop.set()


async def _text(request: Request) -> str:
    if request.headers.get("content-type", "").split(";")[0].strip().lower() != KIND:
        raise Refused(415, f"a text is taken as {KIND} in UTF-8")
    if request.scope["query_string"]:
        raise Refused(400, "this is asked without a query: the text is what is sent")
    size, body = 0, bytearray()
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MOST_BYTES:
            body += chunk
        elif size > MOST_READ:
            break
    if size > MOST_BYTES:
        raise Refused(413, f"the text has more than {MOST_BYTES:,} bytes, the most that are read; give a shorter one")
    try:
        return body.decode()
    except UnicodeDecodeError as error:
        raise Refused(400, f"the text is not UTF-8: byte 0x{body[error.start]:02x} at {error.start + 1}") from None
