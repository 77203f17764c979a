"""The HTTP server of a model: bound to a port, until Ctrl-C or SIGTERM, when it answers what it has begun."""

from __future__ import annotations

from typing import Any

from ..errors import require
from ..explorer.server import HOST, BoundServer
from ..nn import CacheFormat
from .limits import ServingLimits
from .served_model import ServedModel

SPARE = 64
"""Connections that may be open beside those of requests that are answered: of clients that keep theirs, and metrics."""
PAGES = 1024
"""Pages of the memory of a language model, of 64 tokens each: what is not used costs no memory."""


class ModelServer(BoundServer):
    """A model behind HTTP; `address` is its URL, and `run` serves until Ctrl-C, or SIGTERM.

    A language model answers /v1/completions, /v1/chat/completions and /v1/models in OpenAI's form, a translator
    /translate and /languages in LibreTranslate's; both /health and /metrics. A request with `"attention": {...}` is
    told what its tokens attended to.

    At its end it takes no more requests, answers those that it has begun, and waits `limits.seconds` for them at most.

    Args:
        model: what is served.
        host: the interface; of 127.0.0.1 only this machine can ask. There is no encryption and no password: any other
            belongs behind a proxy that has them.
        port: where, or 0 for any port that is free.
        limits: what is taken at most.
        pages: of the memory of a language model.
        lookup: whether drafts of next tokens are looked up in each text.
        cache_format: how the pages store keys and values, as `regard.nn.CacheFormat()` in 8 bits; without it as they
            are.

    Raises:
        ConfigurationError: the port is taken, or is none; the model cannot continue many texts in one batch; a format
            with which tokens are not stored each by itself, or one for a translator.
        ShapeError: heads that the format cannot store.
        MissingExtra: starlette or uvicorn is not installed.
    """

    def __init__(
        self,
        model: ServedModel,
        host: str = HOST,
        port: int = 0,
        *,
        limits: ServingLimits | None = None,
        pages: int = PAGES,
        lookup: bool = False,
        cache_format: CacheFormat | None = None,
    ) -> None:
        require("starlette", extra="serve")
        from .serving_app import serving_application

        limits = limits or ServingLimits()
        application, self.state = serving_application(
            model, limits, pages=pages, lookup=lookup, cache_format=cache_format, host=host
        )
        most = limits.queue + SPARE
        settings: dict[str, Any] = {
            "limit_concurrency": 2 * most,
            "timeout_graceful_shutdown": max(1, round(limits.seconds)),
        }
        super().__init__(lambda _: application, host, port, settings=settings, open_connections=most)
        self.address = f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def end_work(self) -> None:
        """Take no more requests."""
        self.state.ends = True

    def close(self) -> None:
        """Close the socket, and end the thread of the model."""
        super().close()
        if self.state.worker is not None:
            self.state.worker.stop()
