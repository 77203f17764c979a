"""Limits on open connections: incomplete requests time out, and the oldest of them give way to new connections."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_OPEN = 48
"""Open connections. Beyond it the ones that have waited longest for a request are closed; below uvicorn's own limit."""
REQUEST_SECONDS = 10.0
"""A request, line and headers, has to arrive within so many seconds of its connection or of its first byte."""


class LimitedHTTP(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, in which a connection cannot stay open for long with part of a request.

    uvicorn counts connections that have sent nothing, or half of a header, like all others, and has no time limit on
    them: 64 of those lock everybody else out.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting_since = self.loop.time()
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def waiting(self) -> bool:
        """Whether no request is being answered on this connection."""
        return self.cycle is None or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_deadline()
        others = [other for other in self.connections if isinstance(other, LimitedHTTP) and other is not self]
        idle = sorted((other for other in others if other.waiting), key=lambda other: other._waiting_since)
        for other in idle[: max(0, len(self.connections) - MOST_OPEN)]:
            self.connections.discard(other)
            other.transport.abort()

    def data_received(self, data: bytes) -> None:
        if self.waiting and self._deadline is None:
            self._start_deadline()
        super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if not self.waiting:
            self._stop_deadline()

    def on_response_complete(self) -> None:
        self._waiting_since = self.loop.time()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_deadline()
        super().connection_lost(exc)

    def _start_deadline(self) -> None:
        self._deadline = self.loop.call_later(REQUEST_SECONDS, self._close_if_waiting)

    def _stop_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _close_if_waiting(self) -> None:
        self._deadline = None
        if self.waiting and not self.transport.is_closing():
            self.transport.abort()
