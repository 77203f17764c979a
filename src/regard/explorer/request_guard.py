"""The guard of the explorer's server: hosts, origins, methods and the token of requests, and slow connections.

Requests are GET, or POST for a few paths, with an Origin; all below the token, for this host and from no other page.
Incomplete requests time out, and the oldest of them give way to new connections.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors "
)
"""Behind it stands who may show the page in a frame."""
SECURITY_HEADERS = {
    "content-security-policy": POLICY + "'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


GONE = 499
"""The status where the client has disconnected."""

log = logging.getLogger("regard.explorer")


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response in ASCII, which holds any string of Python; not cached."""
    text = json.dumps(value, allow_nan=False)
    return Response(
        text, status, media_type="application/json", headers={"cache-control": "no-store", **(headers or {})}
    )


def error_response(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response {"error": message}."""
    return json_response({"error": message}, status, headers)


def model_failed(error: Exception) -> Response:
    """Log what a model raised at a text; the response does not tell it."""
    log.error("the model failed at a text", exc_info=error)
    return error_response(500, "the model failed at this text; where the server runs it has said more")


class RequestGuard:
    """Middleware that passes requests to this host, below the token and from no other page; all else is refused.

    Requests are GET; paths in `posts` take POST instead. An Origin header, if there is one, must be this server's, and
    POST requires one. Pages of `embedding`, an origin, may show this server's in a frame.
    """

    def __init__(
        self, inner: ASGIApp, token: str, host: str, port: int, posts: set[str], embedding: str | None = None
    ) -> None:
        self._inner, self._token, self._posts = inner, token.encode(), posts
        self._hosts = {f"{host}:{port}".encode(), f"localhost:{port}".encode()}
        self._headers = SECURITY_HEADERS | {"content-security-policy": POLICY + (embedding or "'none'")}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = _with_headers(send, self._headers)
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        path = scope["path"].split("/", 2)[2]
        below = {**scope, "path": f"/{path}", "raw_path": None, "root_path": ""}
        with suppress(Exception):  # which has been answered and logged by now: Starlette raises it again
            await self._inner(below, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        """The checks of a request: Host, Origin, method, an Origin of every POST, then the token; None if all pass."""
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return error_response(
                403, "this server answers for its own address alone: open the address that it printed"
            )
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        if any(origin.lower() != b"http://" + hosts[0].lower() for origin in origins):
            return error_response(403, "this server answers its own page alone")
        parts = scope["path"].split("/", 2)
        method = "POST" if len(parts) == 3 and parts[2] in self._posts else "GET"
        if scope["method"] != method:
            words = f"the method is {scope['method'][:20]}; this server is asked by {method}"
            return error_response(405, words, {"allow": method})
        if method == "POST" and len(origins) != 1:
            return error_response(403, "this server runs the model for its own page alone")
        given = parts[1].encode("utf-8", "replace") if len(parts) > 1 else b""
        if not secrets.compare_digest(given, self._token) or len(parts) < 3:
            return error_response(
                404, "there is nothing here: open the address that the server printed, with all that is in it"
            )
        return None


def _with_headers(send: Send, added: Mapping[str, str]) -> Callable[[Message], Awaitable[None]]:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in added.items():
                headers[name] = value
        with suppress(Exception):  # what came behind the request was no HTTP: nobody can be told any more
            await send(message)

    return sending


MOST_OPEN = 48
"""Open connections. Beyond it the ones that have waited longest for a request are closed; below uvicorn's own limit."""
REQUEST_SECONDS = 10.0
"""A request, line and headers, has to arrive within so many seconds of its connection or of its first byte."""


class LimitedHTTP(H11Protocol):
    """uvicorn's HTTP/1.1 protocol, in which a connection cannot stay open for long with part of a request.

    uvicorn counts connections that have sent nothing, or half of a header, like all others, and has no time limit on
    them: 64 of those lock everybody else out.
    """

    most_open = MOST_OPEN

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
        if len(self.connections) > self.most_open:
            self._close_idle(len(self.connections) - self.most_open)

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

    def _close_idle(self, count: int) -> None:
        """Close as many other connections, of those without a request the ones that have waited longest."""
        others = [other for other in self.connections if isinstance(other, LimitedHTTP) and other is not self]
        idle = sorted((other for other in others if other.waiting), key=lambda other: other._waiting_since)
        for other in idle[:count]:
            self.connections.discard(other)
            other.transport.abort()

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


def limited_http(most_open: int | None) -> type[LimitedHTTP]:
    """The protocol with another number of connections that may be open."""
    return LimitedHTTP if most_open is None else type("LimitedHTTP", (LimitedHTTP,), {"most_open": most_open})
