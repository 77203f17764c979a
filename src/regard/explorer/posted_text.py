"""The text in the body of a request, checked before anything reads it."""

from __future__ import annotations

from email.message import Message

from starlette.requests import Request

from ..errors import CorpusError
from .collection import MOST_BYTES
from .effect_request import refuse_control_characters

MOST_READ = 10_000_000
"""Bytes read of a text that is too long: a client that is cut off earlier would not receive the error."""
KIND = "text/plain"


class RequestRefused(Exception):
    """A request that is refused, with its HTTP status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


async def posted_text(request: Request, kind: str = KIND) -> str:
    """The text in the body of a request, checked: its type and charset, its size, UTF-8, no control characters.

    Raises:
        RequestRefused: it is of another type or charset, too long, not UTF-8, or has control characters other than tabs
            and line ends.
        ClientDisconnect: the client has gone.
    """
    told = Message()
    told["content-type"] = request.headers.get("content-type", "")
    if told.get_content_type() != kind or not request.headers.get("content-type"):
        raise RequestRefused(415, f"a text is taken as {kind} in UTF-8")
    charset = told.get_content_charset("utf-8")
    if charset not in ("utf-8", "utf8"):
        raise RequestRefused(400, f"the text is said to be in {charset[:40]!r}; it needs to be in UTF-8")
    if request.scope["query_string"]:
        raise RequestRefused(400, "this address takes no query: send the text as the body of the request")
    size, body = 0, bytearray()
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MOST_BYTES:
            body += chunk
        elif size > MOST_READ:
            break
    if size > MOST_BYTES:
        raise RequestRefused(
            413, f"the text has more than {MOST_BYTES:,} bytes, the most that are read; give a shorter one"
        )
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RequestRefused(
            400, f"the text is not UTF-8: byte 0x{body[error.start]:02x} at {error.start + 1}"
        ) from None
    try:
        refuse_control_characters("the text", text)
    except CorpusError as error:
        raise RequestRefused(400, str(error)) from None
    return text
