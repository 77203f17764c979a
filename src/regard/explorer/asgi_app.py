"""The ASGI application of the explorer: a page and read-only atlases on one machine, behind a random token.

`request_guard.RequestGuard` passes requests of the page alone. No part of a request is ever a path of the file system,
and every answer is a function of one atlas, named by its number, and the checked query. Where a model can be run on
another text, `RerunEndpoint` takes the text by POST, one run at a time.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any

import numpy as np
from anyio import CapacityLimiter, create_task_group, get_cancelled_exc_class, to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from ..errors import AtlasError, RegardError
from .api import CHANGES, QUERIES, AtlasAPI, number, read_query
from .collection import Collection, CollectionEntry, RunStopped
from .effects_endpoint import EffectsEndpoint
from .posted_text import RequestRefused, posted_text
from .request_guard import GONE, RequestGuard, error_response, json_response, log, model_failed
from .static_page import WebBundle


class RerunEndpoint:
    """POST endpoint: run the model on a UTF-8 text, and list the atlases of the collection afterwards.

    A second request meanwhile is refused. A run ends when whoever asked for it goes away: then all stays as it was, and
    the next one waits until the model has let go.
    """

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._stop: Event | None = None
        self._limiter: CapacityLimiter | None = None

    async def answer(self, request: Request) -> Response:
        """Run the model; respond with the atlases, 4xx if the text cannot be read, 5xx if the model fails."""
        try:
            text = await posted_text(request)
        except RequestRefused as error:
            return error_response(error.status, str(error))
        except ClientDisconnect:
            return Response(status_code=GONE)
        if self._stop is not None and not self._stop.is_set():
            return error_response(
                409, "the model is running on another text already: wait until it is done, or cancel that"
            )
        stop = self._stop = Event()
        try:
            return await self._run(request, text, stop)
        except get_cancelled_exc_class():  # the server ends, and a model must not keep it
            return error_response(503, "the server has ended")
        finally:
            stop.set()

    async def _run(self, request: Request, text: str, stop: Event) -> Response:
        if self._limiter is None:
            self._limiter = CapacityLimiter(1)
        async with create_task_group() as group:
            group.start_soon(_watch, request, stop)
            try:
                await to_thread.run_sync(partial(self._collection.run, text, stop), limiter=self._limiter)
                reply = json_response(self._collection.listed())
            except RunStopped:
                reply = Response(status_code=GONE)
            except RegardError as error:
                reply = error_response(400, str(error))
            except Exception as error:
                reply = model_failed(error)
            group.cancel_scope.cancel()
        return reply


async def _watch(request: Request, stop: Event) -> None:
    """Set `stop` when the client disconnects."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
    stop.set()


WORKERS = 2
"""Requests that are computed at the same time; others wait, while the server accepts more."""


def application(
    collection: Collection, bundle: WebBundle, *, token: str, host: str, port: int, embedding: str | None = None
) -> ASGIApp:
    """The ASGI application for host:port; all paths are below /TOKEN/. Pages of `embedding` may show it in a frame.

    /TOKEN/atlases lists the collection; /TOKEN/NUMBER/meta and the like ask about one atlas; /TOKEN/rerun takes a text,
    /TOKEN/effects and /TOKEN/effects_cost what is to be switched off.
    """
    files = {
        "": (bundle.markup, "text/html; charset=utf-8"),
        "explorer.js": (bundle.script, "text/javascript; charset=utf-8"),
        "explorer.css": (bundle.styles, "text/css; charset=utf-8"),
    }
    routes = [
        *(Route(f"/{name}", partial(send_file, text=text, kind=kind)) for name, (text, kind) in files.items()),
        Route("/atlases", partial(_listed, collection=collection)),
        Route("/{number}/{name}", AtlasEndpoint(collection).answer),
    ]
    posts = {}
    if collection.rerun is not None:
        posts["rerun"] = RerunEndpoint(collection).answer
    if collection.effects is not None:
        effects = EffectsEndpoint(collection, collection.effects)
        posts |= {"effects": effects.answer, "effects_cost": effects.cost}
    routes += [Route(f"/{name}", answer, methods=["POST"]) for name, answer in posts.items()]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _not_found, Exception: report_failure})
    inner.router.redirect_slashes = False
    return RequestGuard(inner, token, host, port, set(posts), embedding)


class AtlasEndpoint:
    """GET endpoint of one atlas: answers are computed on a few threads, unless the client has disconnected."""

    def __init__(self, collection: Collection) -> None:
        self._collection = collection
        self._limiter: CapacityLimiter | None = None
        # An atlas does not change, nor does another get its number: number and query say which answer it is, and the
        # run of the server whose.
        self._run = secrets.token_bytes(16)

    async def answer(self, request: Request) -> Response:
        """Answer one request: arrays as little-endian float32, everything else as JSON."""
        name, entry = request.path_params["name"], self._entry(request)
        if isinstance(entry, Response):
            return entry
        try:
            asked = read_query(request.scope["query_string"], CHANGES if name == "changes" else QUERIES[name])
            if name == "meta":
                return json_response(entry.meta)
            if name == "changes":
                asked["other"] = self._other(asked["other"])
            tag = self._tag(f"{entry.number}/{name}", request.scope["query_string"])
            headers = {"etag": tag, "cache-control": "private, max-age=3600, immutable"}
            if request.headers.get("if-none-match") == tag:  # nobody can know it whom it was not given
                return Response(status_code=304, headers=headers)
            if self._limiter is None:
                self._limiter = CapacityLimiter(WORKERS)
            found = await compute(request, self._limiter, partial(getattr(entry.answers, name), **asked))
        except RegardError as error:
            return error_response(400, str(error))
        if found is None:
            return Response(status_code=GONE)
        if not isinstance(found, np.ndarray):
            return json_response(found)
        body = np.ascontiguousarray(found, dtype="<f4").tobytes()
        return Response(body, media_type="application/octet-stream", headers=headers)

    def _entry(self, request: Request) -> CollectionEntry | Response:
        """The entry of the collection that the path names, or an error response."""
        try:
            which = number("atlas", request.path_params["number"])
        except RegardError:
            raise HTTPException(404) from None
        if request.path_params["name"] not in {*QUERIES, "changes"}:
            raise HTTPException(404)
        entry = self._collection.entry(which)
        if entry is not None:
            return entry
        if self._collection.existed(which):
            return error_response(
                410, "this atlas is not kept any more, since the model was run again: load the page anew"
            )
        return error_response(404, f"there is no atlas {which} here")

    def _other(self, which: int) -> AtlasAPI:
        other = self._collection.entry(which)
        if other is None:
            raise AtlasError(f"there is no atlas {which} here to compare with")
        return other.answers

    def _tag(self, name: str, query: bytes) -> str:
        return f'"{hashlib.blake2b(name.encode() + b"?" + query, key=self._run, digest_size=16).hexdigest()}"'


async def compute(request: Request, limiter: CapacityLimiter, work: Callable[[], Any]) -> Any:
    """Run `work` on a worker thread; None if the client disconnected before it began."""
    async with limiter:
        if await request.is_disconnected():
            return None
        return await to_thread.run_sync(work)


async def send_file(request: Request, text: str, kind: str) -> Response:
    """A file of the page, not cached."""
    return Response(text, headers={"content-type": kind, "cache-control": "no-store"})


async def _listed(request: Request, collection: Collection) -> Response:
    try:
        read_query(request.scope["query_string"], {})
    except RegardError as error:
        return error_response(400, str(error))
    return json_response(collection.listed())


async def _not_found(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    known = ", ".join(QUERIES)
    words = f"there is no {request.scope['path'][1:41]!r} here; there are atlases, and of each, as in 0/meta, {known}"
    return error_response(status, words)


async def report_failure(request: Request, error: Exception) -> Response:
    """Log an error that was not foreseen, and answer without its words."""
    log.error("a request failed", exc_info=error)
    return error_response(500, "the server failed at this; where it runs it has said more")
