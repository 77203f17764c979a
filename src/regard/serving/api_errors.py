"""Errors of requests, with their HTTP status, in the form of each interface; and bodies that are checked by a model."""

from __future__ import annotations

import json
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ..explorer.request_guard import json_response

Asked = TypeVar("Asked", bound=BaseModel)

KINDS = {400: "invalid_request_error", 404: "not_found_error", 413: "invalid_request_error", 429: "rate_limit_error"}


DISCARDED = 10_000_000
"""Bytes that are read beyond those that are taken: a client that is cut off earlier would not receive the error."""


class RequestError(Exception):
    """A request that is refused: its HTTP status, a message, and where a parameter is wrong its name."""

    def __init__(self, status: int, message: str, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.parameter = status, parameter

    def body(self, path: str) -> dict[str, Any]:
        """The error in OpenAI's form below /v1/, else in LibreTranslate's."""
        if not path.startswith("/v1/"):
            return {"error": str(self)}
        kind = KINDS.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": None}}

    def response(self, path: str) -> Response:
        """The HTTP response; one that may be tried again says when."""
        again = {"retry-after": "1"} if self.status in (429, 503) else None
        return json_response(self.body(path), self.status, again)


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request.

    Raises:
        RequestError: it is larger than the server takes.
    """
    told, size, body = request.headers.get("content-length", "0"), 0, bytearray()
    if told.isdigit() and int(told) <= most + DISCARDED:
        async for chunk in request.stream():
            size += len(chunk)
            if size <= most:
                body += chunk
            elif size > most + DISCARDED:
                break
        if size <= most:
            return bytes(body)
    raise RequestError(413, f"the request is larger than {most:,} bytes, the most that are taken")


def checked(body: bytes, form: type[Asked]) -> Asked:
    """The body of a request as what it asks for.

    Raises:
        RequestError: it is no JSON, or asks for something that is not understood.
    """
    try:
        value = json.loads(body)
        json.dumps(value, ensure_ascii=False).encode()  # half of a letter of two halves is no text
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the request is no JSON: {error}") from None
    return validated(value, form)


def validated(value: Any, form: type[Asked]) -> Asked:
    """A value of JSON as what it asks for; errors as of `checked`."""
    try:
        return form.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(str(part) for part in first["loc"] if not str(part).startswith(("list[", "str", "function-")))
        message = "it is not known here" if first["type"] == "extra_forbidden" else first["msg"]
        raise RequestError(400, f"{name or 'the request'}: {message}", name or None) from None
