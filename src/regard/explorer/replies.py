"""What the explorer's server says in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response


def told(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """JSON in ASCII, which holds any string of Python; nobody keeps it."""
    text = json.dumps(value, allow_nan=False)
    return Response(
        text, status, media_type="application/json", headers={"cache-control": "no-store", **(headers or {})}
    )


def refusal(status: int, message: str, headers: Mapping[str, str] | None = None) -> Response:
    """Why not."""
    return told({"error": message}, status, headers)
