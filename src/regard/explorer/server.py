"""The explorer's server: an atlas told to a page on the same machine, and to nobody else.

Requests are GET, below a random token, for this host and from this page. No part of a request is ever a path of the
file system, and every answer is a function of the atlas and the checked query.
"""

from __future__ import annotations

import hashlib
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import RegardError
from .answers import Answers
from .bundle import Bundle
from .queries import Reader, number, read_query, stretch, word

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
ASKED: dict[str, dict[str, Reader]] = {
    "tokens": {"map": number, "side": word, "start": number, "stop": number},
    "pooled": {"map": number, "head": number, "level": number, "reduce": word},
    "overview": {"map": number, "reduce": word},
    "weights": {"map": number, "head": number, "rows": stretch, "columns": stretch},
    "profile": {"map": number, "head": number, "which": word},
}
"""By the name of an answer: what it is asked with."""

log = logging.getLogger("regard.explorer")


def application(answers: Answers, bundle: Bundle, *, token: str, port: int) -> ASGIApp:
    """The server's application, for 127.0.0.1 at a port, below /TOKEN/."""
    answering = Answering(answers)
    files = {
        "": (bundle.markup, "text/html; charset=utf-8"),
        "explorer.js": (bundle.script, "text/javascript; charset=utf-8"),
        "explorer.css": (bundle.styles, "text/css; charset=utf-8"),
    }
    routes = [
        *(Route(f"/{name}", partial(_file, text=text, kind=kind)) for name, (text, kind) in files.items()),
        Route("/meta", partial(_meta, text=json.dumps(answers.meta(), allow_nan=False))),
        *(Route(f"/{name}", partial(answering.answer, name=name)) for name in ASKED),
    ]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _refused, Exception: _failed})
    inner.router.redirect_slashes = False
    return Guard(inner, token, port)


class Guard:
    """Lets through what asks this host, from its own page, by GET, below the token; says no to all else."""

    def __init__(self, inner: ASGIApp, token: str, port: int) -> None:
        self._inner, self._token = inner, token.encode()
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
            return _no(403, "this server answers for its own address alone: open the address that it printed")
        origins = [value for name, value in scope["headers"] if name == b"origin"]
        if any(origin.lower() != b"http://" + hosts[0].lower() for origin in origins):
            return _no(403, "this server answers its own page alone")
        if scope["method"] != "GET":
            return _no(405, f"the method is {scope['method'][:20]}; this server is asked by GET", {"allow": "GET"})
        parts = scope["path"].split("/", 2)
        given = parts[1].encode("utf-8", "replace") if len(parts) > 1 else b""
        if not secrets.compare_digest(given, self._token) or len(parts) < 3:
            return _no(404, "there is nothing here: open the address that the server printed, with all that is in it")
        return None


class Answering:
    """Computes answers on a few threads; one that nobody waits for any more is left out."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._limiter: CapacityLimiter | None = None
        # The atlas does not change while it is served: the query says which answer it is, and the run whose.
        self._run = secrets.token_bytes(16)

    async def answer(self, request: Request, name: str) -> Response:
        """One answer: numbers as float32 in little-endian order, words as JSON."""
        try:
            asked = read_query(request.scope["query_string"], ASKED[name])
            tag = self._tag(name, request.scope["query_string"])
            headers = {"etag": tag, "cache-control": "private, max-age=3600, immutable"}
            if request.headers.get("if-none-match") == tag:  # nobody can know it whom it was not given
                return Response(status_code=304, headers=headers)
            found = await self._compute(request, partial(getattr(self._answers, name), **asked))
        except RegardError as error:
            return _no(400, str(error))
        if found is None:
            return Response(status_code=499)
        if not isinstance(found, np.ndarray):
            return JSONResponse(found, headers={"cache-control": "no-store"})
        body = np.ascontiguousarray(found, dtype="<f4").tobytes()
        return Response(body, media_type="application/octet-stream", headers=headers)

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


async def _meta(request: Request, text: str) -> Response:
    try:
        read_query(request.scope["query_string"], {})
    except RegardError as error:
        return _no(400, str(error))
    return Response(text, media_type="application/json", headers={"cache-control": "no-store"})


async def _refused(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = ", ".join(["meta", *ASKED])
    return _no(status, f"there is no {request.scope['path'][1:41]!r} here; there are {known}")


async def _failed(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return _no(500, "the server failed at this; where it runs it has said more")


def _no(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    return JSONResponse({"error": message}, status, headers={"cache-control": "no-store", **(headers or {})})


def _with_headers(send: Send) -> Callable[[Message], Awaitable[None]]:
    async def sending(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            for name, value in HEADERS.items():
                headers[name] = value
        await send(message)

    return sending
