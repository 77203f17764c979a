"""A browser is opened where there is one, and nowhere else."""

import webbrowser

import pytest

from regard.explorer.server import open_browser


class Browser:
    def __init__(self, name, works: bool | None = True):
        self.name, self.works, self.seen = name, works, []

    def open(self, address):
        self.seen.append(address)
        if self.works is None:
            raise OSError("gone")
        return self.works


@pytest.fixture
def machine(monkeypatch):
    """A Linux machine with these variables and this browser, or none."""

    def make(browser=None, **variables):
        def get():
            if browser is None:
                raise webbrowser.Error("no browser")
            return browser

        monkeypatch.setattr("sys.platform", "linux")
        monkeypatch.setattr(webbrowser, "get", get)
        for name in ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return make


@pytest.mark.parametrize("variables", [{"DISPLAY": ":0"}, {"WAYLAND_DISPLAY": "wayland-0"}, {"BROWSER": "wslview"}])
def test_a_browser_gets_the_address(machine, variables):
    browser = Browser("firefox")
    machine(browser, **variables)
    assert open_browser("http://127.0.0.1:1/token/")
    assert browser.seen == ["http://127.0.0.1:1/token/"]


def test_without_a_display_nothing_is_opened(machine):
    browser = Browser("firefox")
    machine(browser)
    assert not open_browser("http://127.0.0.1:1/token/")
    assert browser.seen == []


def test_a_browser_of_the_terminal_is_left_alone(machine):
    browser = Browser("lynx")
    machine(browser, DISPLAY=":0")
    assert not open_browser("http://127.0.0.1:1/token/")
    assert browser.seen == []


@pytest.mark.parametrize("browser", [None, Browser("firefox", works=False), Browser("firefox", works=None)])
def test_a_browser_that_does_not_start_is_no_error(machine, browser):
    machine(browser, DISPLAY=":0")
    assert not open_browser("http://127.0.0.1:1/token/")
