"""The explorer's server: atlases told to a page on the same machine, and to nobody else.

Requests are GET, below a random token, for this host and from this page. No part of a request is ever a path of the
file system, and every answer is a function of one atlas, named by its number, and the checked query. Where a model can
be run again, one more is taken, by POST: `running` has it.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RegardError
from .bundle import Bundle
from .queries import ASKED, number, read_query
from .replies import refusal, told
from .running import GONE, Running
from .shelf import Entry, Shelf

WORKERS = 2
"""Answers that are computed at the same time; others wait, and the server goes on listening."""

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
log = logging.getLogger("regard.explorer")


def application(shelf: Shelf, bundle: Bundle, *, token: str, port: int) -> ASGIApp:
    """The server's application, for 127.0.0.1 at a port, below /TOKEN/.

    /TOKEN/atlases lists the shelf; /TOKEN/NUMBER/meta and the like ask about one atlas; /TOKEN/rerun takes a text.
    """
    files = {
        "": (bundle.markup, "text/html; charset=utf-8"),
        "explorer.js": (bundle.script, "text/javascript; charset=utf-8"),
        "explorer.css": (bundle.styles, "text/css; charset=utf-8"),
    }
    routes = [
        *(Route(f"/{name}", partial(_file, text=text, kind=kind)) for name, (text, kind) in files.items()),
        Route("/atlases", partial(_listed, shelf=shelf)),
        Route("/{number}/{name}", Answering(shelf).answer),
    ]
    if shelf.rerun is not None:
        routes.append(Route("/rerun", Running(shelf).answer, methods=["POST"]))
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _failed})
    inner.router.redirect_slashes = False
    return Guard(inner, token, port, posts={"rerun"} if shelf.rerun is not None else set())


class Guard:
    """Lets through what asks this host, from its own page, by GET, below the token; says no to all else.

    What is in `posts` is asked by POST instead, and then only by a page that says to be this server's.
    """

    def __init__(self, inner: ASGIApp, token: str, port: int, posts: set[str]) -> None:
        self._inner, self._token, self._posts = inner, token.encode(), posts
        self._hosts = {f"127.0.0.1:{port}".encode(), f"localhost:{port}".encode()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        send = _with_headers(send)
        no = self._refusal(scope)
        if no is not None:
            await no(scope, receive, send)
            return
        path = scope["path"].split("/", 2)[2]
        below = {**scope, "path": f"/{path}", "raw_path": None, "root_path": ""}
        with suppress(Exception):  # which has been answered and logged by now: Starlette raises it again
            await self._inner(below, receive, send)

    def _refusal(self, scope: Scope) -> Response | None:
        hosts = [value for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or hosts[0].lower() not in self._hosts:
            return refusal(403, "this server answers for its own address alone: open the address that it printed")
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        if any(origin.lower() != b"http://" + hosts[0].lower() for origin in origins):
            return refusal(403, "this server answers its own page alone")
        parts = scope["path"].split("/", 2)
        method = "POST" if len(parts) == 3 and parts[2] in self._posts else "GET"
        if scope["method"] != method:
            words = f"the method is {scope['method'][:20]}; this server is asked by {method}"
            return refusal(405, words, {"allow": method})
        if method == "POST" and len(origins) != 1:
            return refusal(403, "this server runs the model for its own page alone")
        given = parts[1].encode("utf-8", "replace") if len(parts) > 1 else b""
        if not secrets.compare_digest(given, self._token) or len(parts) < 3:
            return refusal(
                404, "there is nothing here: open the address that the server printed, with all that is in it"
            )
        return None


class Answering:
    """Computes answers on a few threads; one that nobody waits for any more is left out."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._limiter: CapacityLimiter | None = None
        # An atlas does not change, nor does another get its number: number and query say which answer it is, and the
        # run of the server whose.
        self._run = secrets.token_bytes(16)

    async def answer(self, request: Request) -> Response:
        """One answer about one atlas: numbers as float32 in little-endian order, words as JSON."""
        name, entry = request.path_params["name"], self._entry(request)
        if isinstance(entry, Response):
            return entry
        try:
            asked = read_query(request.scope["query_string"], ASKED[name])
            if name == "meta":
                return told(entry.meta)
            tag = self._tag(f"{entry.number}/{name}", request.scope["query_string"])
            headers = {"etag": tag, "cache-control": "private, max-age=3600, immutable"}
            if request.headers.get("if-none-match") == tag:  # nobody can know it whom it was not given
                return Response(status_code=304, headers=headers)
            found = await self._compute(request, partial(getattr(entry.answers, name), **asked))
        except RegardError as error:
            return refusal(400, str(error))
        if found is None:
            return Response(status_code=GONE)
        if not isinstance(found, np.ndarray):
            return told(found)
        body = np.ascontiguousarray(found, dtype="<f4").tobytes()
        return Response(body, media_type="application/octet-stream", headers=headers)

    def _entry(self, request: Request) -> Entry | Response:
        """The atlas that the address names."""
        try:
            which = number("atlas", request.path_params["number"])
        except RegardError:
            raise HTTPException(404) from None
        if request.path_params["name"] not in ASKED:
            raise HTTPException(404)
        entry = self._shelf.entry(which)
        if entry is not None:
            return entry
        if self._shelf.had(which):
            return refusal(410, "this atlas is not kept any more, since the model was run again: load the page anew")
        return refusal(404, f"there is no atlas {which} here")

    async def _compute(self, request: Request, work: Callable[[], Any]) -> Any:
        """What the work gives; None if who asked has gone away before it began."""
        if self._limiter is None:
            self._limiter = CapacityLimiter(WORKERS)
        async with self._limiter:
            if await request.is_disconnected():
                return None
            return await to_thread.run_sync(work)

    def _tag(self, name: str, query: bytes) -> str:
        return f'"{hashlib.blake2b(name.encode() + b"?" + query, key=self._run, digest_size=16).hexdigest()}"'


async def _file(request: Request, text: str, kind: str) -> Response:
    return Response(text, headers={"content-type": kind, "cache-control": "no-store"})


async def _listed(request: Request, shelf: Shelf) -> Response:
    try:
        read_query(request.scope["query_string"], {})
    except RegardError as error:
        return refusal(400, str(error))
    return told(shelf.listed())


async def _refused(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = ", ".join(ASKED)
    words = f"there is no {request.scope['path'][1:41]!r} here; there are atlases, and of each, as in 0/meta, {known}"
    return refusal(status, words)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return refusal(500, "the server failed at this; where it runs it has said more")


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        with suppress(Exception):  # what came behind the request was no HTTP: nobody can be told any more
            await send(message)

    return sending
