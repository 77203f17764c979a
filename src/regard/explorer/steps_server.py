"""Server of the live page of `regard steps`, which computes the tables again for each change of the page."""

from __future__ import annotations

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConfigurationError, RegardError, require
from ..steps.live_steps import LiveSteps, StepRequest
from .server import LocalServer
from .steps_page import permalink, steps_bundle

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

    from .static_page import WebBundle

KIND = "application/json"


class StepsServer(LocalServer):
    """A server of the live page of attention step by step: `address` is its URL, and `run` serves until Ctrl-C.

    It listens on the loopback interface alone, and its address has a random token in it. Each change on the page is a
    request that is computed in Python, by the translators themselves, one at a time.

    Args:
        live: what computes the answers.
        port: where, or 0 for any port that is free.
        opening: the request that the page opens with; its first sentence by default.
        language: "en" or "ko".

    Raises:
        ConfigurationError: the port is taken, or is none.
        MissingExtra: starlette or uvicorn is not installed.
    """

    def __init__(
        self, live: LiveSteps, port: int = 0, *, opening: StepRequest | None = None, language: str = "en"
    ) -> None:
        require("starlette", extra="explorer")
        bundle = steps_bundle()

        def make_application(token: str, host: str, port: int) -> ASGIApp:
            return steps_application(live, bundle, token=token, host=host, port=port)

        super().__init__(make_application, port, permalink(opening, language))


def steps_application(live: LiveSteps, bundle: WebBundle, *, token: str, host: str, port: int) -> ASGIApp:
    """The ASGI application of the live page: below /TOKEN/ its files, `options` by GET, and `answer` by POST."""
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.routing import Route

    from .asgi_app import report_failure, send_file
    from .request_guard import RequestGuard

    files = {
        "": (bundle.markup, "text/html; charset=utf-8"),
        f"{bundle.name}.js": (bundle.script, "text/javascript; charset=utf-8"),
        f"{bundle.name}.css": (bundle.styles, "text/css; charset=utf-8"),
    }
    endpoint = StepsEndpoint(live)
    routes = [
        *(Route(f"/{name}", partial(send_file, text=text, kind=kind)) for name, (text, kind) in files.items()),
        Route("/options", endpoint.options),
        Route("/answer", endpoint.answer, methods=["POST"]),
    ]
    inner = Starlette(routes=routes, exception_handlers={HTTPException: _not_found, Exception: report_failure})
    inner.router.redirect_slashes = False
    return RequestGuard(inner, token, host, port, posts={"answer"})


class StepsEndpoint:
    """Endpoints of the live page: what it can choose from, and the tables of one request."""

    def __init__(self, live: LiveSteps) -> None:
        self._live = live
        self._limiter: Any = None

    async def options(self, request: Request) -> Response:
        """The mechanisms and worked examples."""
        from .request_guard import json_response

        return json_response(self._live.options())

    async def answer(self, request: Request) -> Response:
        """The tables of a request in JSON; 4xx with a message if it cannot be answered."""
        from anyio import CapacityLimiter
        from starlette.requests import ClientDisconnect
        from starlette.responses import Response

        from .asgi_app import GONE, compute
        from .posted_text import RequestRefused, posted_text
        from .request_guard import error_response, json_response

        if self._limiter is None:
            self._limiter = CapacityLimiter(1)
        try:
            asked = StepRequest.read(_decoded(await posted_text(request, KIND)))
            found = await compute(request, self._limiter, partial(self._live.answer, asked))
        except RequestRefused as error:
            return error_response(error.status, str(error))
        except RegardError as error:
            return error_response(400, str(error))
        except ClientDisconnect:
            return Response(status_code=GONE)
        return Response(status_code=GONE) if found is None else json_response(found)


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"the request is not JSON ({error})") from None


async def _not_found(request: Request, error: Exception) -> Response:
    from .request_guard import error_response

    status = getattr(error, "status_code", 500)
    return error_response(status, f"there is no {request.scope['path'][1:41]!r} here; there are options and answer")
