"""A browser for an address, where there is one."""

from __future__ import annotations

import os
import sys
import webbrowser

TEXT_BROWSERS = {"www-browser", "links", "elinks", "lynx", "w3m"}
"""They run in the terminal, and show no picture."""


def opened(address: str) -> bool:
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
