"""Work for a client, until it is done or the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.requests import Request

Done = TypeVar("Done")


async def unless_gone(request: Request, work: Awaitable[Done]) -> Done | None:
    """The result of some work, which is cancelled when the client disconnects: None then. The body has to be read."""
    gone, done = asyncio.ensure_future(_gone(request)), asyncio.ensure_future(work)
    try:
        await asyncio.wait([gone, done], return_when=asyncio.FIRST_COMPLETED)
        return done.result() if done.done() else None
    finally:
        for task in (gone, done):
            task.cancel()


async def _gone(request: Request) -> None:
    """Return when the client has disconnected."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
