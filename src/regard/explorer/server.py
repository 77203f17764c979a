"""HTTP server of the explorer on the loopback interface, and opening its page in a browser."""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import webbrowser
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import ConfigurationError, require
from .atlas import Atlas
from .collection import Collection, Rerun
from .effect_models import EffectModel
from .static_page import WebBundle
from .view_state import ViewState, opening_permalink

HOST = "127.0.0.1"
SETTINGS: dict[str, Any] = {
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
    "limit_concurrency": 64,  # connections that may be open; more are told to come back
    "timeout_keep_alive": 30,
    "timeout_graceful_shutdown": 1,
}
"""The settings of uvicorn."""


ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:\d{1,5})?|https?://\[[0-9a-fA-F:]+\](:\d{1,5})?")
"""Of a page: no path, and nothing that would be another part of a policy."""


class BoundServer:
    """An ASGI application on a port of this machine; `run` serves until Ctrl-C.

    Args:
        make_application: the application for the port that was found.
        host: the interface that it listens on.
        port: where, or 0 for any port that is free.
        settings: of uvicorn, which replace `SETTINGS`.
        open_connections: the most that may be open; those that have waited longest for a request are closed.

    Raises:
        ConfigurationError: the port is taken, or is none; there is no such interface.
        MissingExtra: starlette or uvicorn is not installed.
    """

    def __init__(
        self,
        make_application: Callable[[int], Any],
        host: str = HOST,
        port: int = 0,
        *,
        settings: Mapping[str, Any] | None = None,
        open_connections: int | None = None,
    ) -> None:
        uvicorn = require("uvicorn", extra="explorer")
        from .request_guard import limited_http

        self._socket = _bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        protocol = limited_http(open_connections)
        config = uvicorn.Config(make_application(self.port), http=protocol, **{**SETTINGS, **(settings or {})})
        self._server = uvicorn.Server(config)
        self._handle_exit = self._server.handle_exit
        self._server.handle_exit = self._interrupted

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until Ctrl-C or `stop`; `ready` is called first, when the socket accepts connections already."""
        try:
            ready()
            self._server.run(sockets=[self._socket])
        except KeyboardInterrupt:
            pass  # that is how one ends it
        finally:
            self.close()

    def stop(self) -> None:
        """Stop the server, which runs in another thread."""
        self.end_work()
        self._server.should_exit = True

    def end_work(self) -> None:
        """End what the application still computes, since the server would wait for it."""

    def _interrupted(self, *signal: Any) -> None:
        """Handle Ctrl-C."""
        self.end_work()
        self._handle_exit(*signal)

    def close(self) -> None:
        """Close the listening socket."""
        self._socket.close()


class LocalServer(BoundServer):
    """An application on the loopback interface: `address` is its URL, which has a random token in it.

    Without the token the server says nothing.

    Args:
        make_application: the application for a token, a host and a port.
        port: where, or 0 for any port that is free.
        opening: what stands behind the "#" of the address, or "".

    Raises:
        ConfigurationError: the port is taken, or is none.
        MissingExtra: starlette or uvicorn is not installed.
    """

    def __init__(self, make_application: Callable[[str, str, int], Any], port: int = 0, opening: str = "") -> None:
        token = secrets.token_urlsafe(24)
        super().__init__(lambda found: make_application(token, HOST, found), HOST, port)
        self.address = f"http://{HOST}:{self.port}/{token}/" + (f"#{opening}" if opening else "")


class ExplorerServer(LocalServer):
    """A server of atlases, bound to a port: `address` is its URL, and `run` serves until Ctrl-C.

    The address has a random token in it: without it the server says nothing. It listens on the loopback interface
    alone, and only reads, unless there is a model to run again.

    Args:
        atlases: one atlas, or several by their names: the page compares them.
        port: where, or 0 for any port that is free.
        state: what the page shows when it opens, or a permalink; it is in the address.
        rerun: what the model that made the one atlas attends to in another text; the page then asks for texts. It is
            called on a thread of its own, for one text at a time, and its atlas is kept with the one before it.
            Errors of `regard.errors` are told to the page, and so is that any other was raised.
        effects: the model whose heads the page can switch off: `TextEffects` or `TranslatorEffects` of `effect_models`.
        embedding: an origin, such as http://localhost:8000, whose pages may show this one in a frame, as slides do.

    Raises:
        AtlasError: there is no atlas, or one without a map.
        ConfigurationError: the port is taken, or is none; `rerun` with several atlases; a state that is none, or of
            something that is not there; or an embedding that is no origin.
        MissingExtra: starlette or uvicorn is not installed.
    """

    def __init__(
        self,
        atlases: Atlas | Mapping[str, Atlas],
        port: int = 0,
        *,
        state: ViewState | str | None = None,
        rerun: Rerun | None = None,
        effects: EffectModel | None = None,
        embedding: str | None = None,
    ) -> None:
        require("starlette", extra="explorer")
        from .asgi_app import application

        if embedding is not None and not ORIGIN.fullmatch(embedding):
            raise ConfigurationError(
                f"embedding is {embedding!r}; it needs to be an origin, scheme, host and port without a path, such as "
                "http://localhost:8000"
            )

        self._collection, bundle = Collection(atlases, rerun, effects), WebBundle.read()
        opening = opening_permalink(state, [atlases] if isinstance(atlases, Atlas) else list(atlases.values()))

        def make_application(token: str, host: str, port: int) -> Any:
            return application(self._collection, bundle, token=token, host=host, port=port, embedding=embedding)

        super().__init__(make_application, port, opening)

    def end_work(self) -> None:
        """Stop the model's run."""
        self._collection.end()


def _bound(host: str, port: int) -> socket.socket:
    """A listening socket on an interface of this machine.

    Raises:
        ConfigurationError: the port is taken, or is none; there is no such interface.
    """
    if not 0 <= port <= 65535:
        raise ConfigurationError(f"port is {port}; it needs to be between 0, for any that is free, and 65535")
    # By its protocol too: asyncio sends at once, without waiting for more, only on what says that it is TCP.
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    taken = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind((host, port))
        taken.listen(128)
    except OSError as error:
        taken.close()
        raise ConfigurationError(
            f"the port {port} of {host} cannot be used: {error.strerror or error}. Choose another port, or leave it "
            "out: then one that is free is taken"
        ) from None
    return taken


TEXT_BROWSERS = {"www-browser", "links", "elinks", "lynx", "w3m"}
"""Browsers without JavaScript and pictures, which run in the terminal."""


def open_browser(address: str) -> bool:
    """Open an address in the user's browser; False if there is no display or no browser, or it would not start."""
    if not _has_display():
        return False
    try:
        browser = webbrowser.get()
        if getattr(browser, "basename", getattr(browser, "name", "")) in TEXT_BROWSERS:
            return False
        return browser.open(address)
    except (webbrowser.Error, OSError):
        return False


def _has_display() -> bool:
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY") or os.environ.get("BROWSER"))
