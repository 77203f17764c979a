"""The ASGI application of a served model: its endpoints, behind limits of what is taken."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import ConfigurationError
from ..explorer.asgi_app import GONE
from ..explorer.request_guard import json_response
from ..models.language_model import ContinuousBatch, PromptLookup
from ..nn import CacheFormat
from .api_errors import RequestError
from .batch_worker import BatchWorker
from .limits import ServingLimits
from .openai_endpoints import GenerationEndpoints
from .served_metrics import ServedMetrics
from .served_model import ServedModel
from .translate_endpoints import TranslateEndpoints
from .translation_worker import TranslationWorker

log = logging.getLogger("regard.serving")

LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")


@dataclass(eq=False)
class ServedState:
    """What runs behind the endpoints: the thread of the model, counts, and whether the server ends."""

    model: ServedModel
    limits: ServingLimits
    metrics: ServedMetrics = field(default_factory=ServedMetrics)
    worker: BatchWorker | TranslationWorker | None = None
    ends: bool = False

    def others(self) -> dict[str, float]:
        """Counts of the batch."""
        if not isinstance(self.worker, BatchWorker):
            return {}
        batch = self.worker.batch
        pool, counts = batch.paged.memory.pool, batch.counts
        return {
            "regard_texts_running": len(batch.running),
            "regard_texts_waiting": len(batch.waiting),
            "regard_pages": pool.count,
            "regard_pages_free": pool.free,
            "regard_tokens_read_total": counts.read,
            "regard_tokens_found_total": counts.found,
            "regard_tokens_generated_total": counts.generated,
            "regard_tokens_drafted_total": counts.drafted,
            "regard_tokens_accepted_total": counts.accepted,
            "regard_texts_interrupted_total": counts.interrupted,
        }


def serving_application(
    model: ServedModel,
    limits: ServingLimits,
    *,
    pages: int,
    lookup: bool = False,
    cache_format: CacheFormat | None = None,
    host: str | None = None,
) -> tuple[ASGIApp, ServedState]:
    """The application that serves a model, and its state, whose worker is started.

    pages: of the memory of a language model. lookup: whether drafts are looked up in texts. cache_format: how pages
    store keys and values; without it as they are. host: what it is bound to; of this machine alone, requests have to
    name it so.
    """
    state = ServedState(model, limits)
    routes = [
        Route("/health", partial(_health, state=state)),
        Route("/metrics", partial(_metrics, state=state)),
    ]
    if model.language_model is not None and model.codec is not None:
        draft = PromptLookup() if lookup else None
        worker = BatchWorker(ContinuousBatch(model.language_model, pages, draft=draft, cache_format=cache_format))
        endpoints = GenerationEndpoints(model.name, model.language_model, model.codec, worker, limits)
        routes += [
            Route("/v1/models", endpoints.models),
            Route("/v1/completions", endpoints.completions, methods=["POST"]),
            Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        ]
    elif model.translator is not None:
        if cache_format is not None:
            raise ConfigurationError(
                "cache_format is how the pages of a language model store keys and values, and this is a translator, "
                "which has none: leave it out"
            )
        worker = TranslationWorker(model.translator)
        translate = TranslateEndpoints(model.languages, worker, limits)
        routes += [
            Route("/languages", translate.list_languages),
            Route("/translate", translate.translate, methods=["POST"]),
        ]
    else:
        raise ConfigurationError("the served model is neither a language model nor a translator")
    worker.start()
    state.worker = worker
    handlers: dict[Any, Callable[..., Any]] = {
        RequestError: _refused,
        HTTPException: partial(_no_such_path, routes=routes),
        ClientDisconnect: _disconnected,
        Exception: _failed,
    }
    inner = Starlette(routes=routes, exception_handlers=handlers)
    inner.router.redirect_slashes = False
    return Admission(inner, state, {route.path for route in routes}, host), state


class Admission:
    """Middleware that takes as many requests as the limits say, from who may ask, and counts them all.

    Pages of other origins are refused: a browser sends their Origin. So are requests for another host, where the server
    is bound to this machine alone, since a foreign name may have been pointed at it.
    """

    def __init__(self, inner: ASGIApp, state: ServedState, paths: set[str], host: str | None) -> None:
        self._inner, self._state, self._paths, self._host = inner, state, paths, host

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        metrics, began, status = self._state.metrics, time.monotonic(), GONE
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        refusal, computes = self._refusal(scope), scope["method"] == "POST"
        metrics.running += computes
        try:
            if refusal is not None:
                await refusal.response(scope["path"])(scope, receive, sending)
            else:
                with suppress(Exception):  # which has been answered and logged by now: Starlette raises it again
                    await self._inner(scope, receive, sending)
        finally:
            metrics.running -= computes
            metrics.add(path, status, time.monotonic() - began)

    def _refusal(self, scope: Scope) -> RequestError | None:
        headers = dict(scope["headers"])
        host, origin = headers.get(b"host", b"").decode("latin-1"), headers.get(b"origin", b"").decode("latin-1")
        if origin and origin.partition("://")[2] != host:
            return RequestError(403, "pages of other origins may not ask this server")
        if self._host in LOOPBACK and host.rpartition(":")[0] not in LOOPBACK and host not in LOOPBACK:
            return RequestError(403, "this server answers for this machine alone: ask 127.0.0.1 or localhost")
        if scope["method"] != "POST":
            return None
        if self._state.ends:
            return RequestError(503, "the server is about to end")
        if self._state.metrics.running >= self._state.limits.queue:
            return RequestError(429, f"{self._state.limits.queue} requests are being answered, the most that are taken")
        return None


async def _health(request: Request, state: ServedState) -> Response:
    """GET /health: 200, or 503 when the server is about to end, or its thread has."""
    alive = state.worker is not None and state.worker.is_alive() and not state.ends
    return json_response({"status": "ok" if alive else "ending", "model": state.model.name}, 200 if alive else 503)


async def _metrics(request: Request, state: ServedState) -> Response:
    return PlainTextResponse(state.metrics.text(state.others()), media_type="text/plain; version=0.0.4; charset=utf-8")


async def _refused(request: Request, error: RequestError) -> Response:
    return error.response(request.scope["path"])


async def _no_such_path(request: Request, error: HTTPException, routes: list[Route]) -> Response:
    path, known = request.scope["path"], ", ".join(route.path for route in routes)
    if error.status_code == 405:
        return RequestError(405, f"{path[:80]} is asked by another method than {request.method[:20]}").response(path)
    return RequestError(404, f"there is no {path[:80]!r} here; there are {known}").response(path)


async def _disconnected(request: Request, error: Exception) -> Response:
    return Response(status_code=GONE)


async def _failed(request: Request, error: Exception) -> Response:
    log.error("a request failed", exc_info=error)
    return RequestError(500, "the server failed at this; its log has said more").response(request.scope["path"])
