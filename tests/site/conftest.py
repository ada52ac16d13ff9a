"""One headless Chromium for all tests here; a console error or an external request fails the test of its page."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, Request, Response, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
HERE = {"", "127.0.0.1", "localhost", "::1"}
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
    # No request leaves the machine: other names are not even looked up.
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
]
PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
# A limit on one wait in the browser; the machine may be busy with other tests.
MILLISECONDS = 60_000

Browse = Callable[..., Page]


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """The browser of this machine; a test that wants its own page asks for `page` or `browse`."""
    program = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if program is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=program, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture(scope="session")
def training_python() -> str:
    """The Python that has torch and this package; the one that runs these tests has neither."""
    python = Path(os.environ.get("TRAINING_PYTHON", ROOT / ".venv" / "bin" / "python"))
    if not python.exists():
        pytest.skip(f"needs an environment with torch; there is none at {python}")
    return str(python)


@pytest.fixture
def problems() -> list[str]:
    """What pages complained of. A test fails on any that is still in the list at its end."""
    return []


@pytest.fixture
def browse(browser: Browser, problems: list[str]) -> Iterator[Browse]:
    """`browse(width=390, dark=True)`: a fresh page, without cookies or storage of others."""
    contexts: list[BrowserContext] = []

    def browse(width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        context = browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
        )
        contexts.append(context)
        context.set_default_timeout(MILLISECONDS)
        watch(context, problems)
        return context.new_page()

    yield browse
    for context in contexts:
        context.close()
    assert not problems, "\n".join(problems)


@pytest.fixture
def page(browse: Browse) -> Page:
    return browse()


def watch(context: BrowserContext, problems: list[str]) -> None:
    """Write down errors of every page of the context."""

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            problems.append(f"console error: {message.text} ({message.location.get('url')})")

    def on_failed(request: Request) -> None:
        # A page that is left while it loads cancels what it asked for.
        if request.failure != "net::ERR_ABORTED":
            problems.append(f"failed request: {request.url}: {request.failure}")

    def on_response(response: Response) -> None:
        if response.status >= 400:
            problems.append(f"status {response.status}: {response.url}")

    def on_request(request: Request) -> None:
        if (urlsplit(request.url).hostname or "") not in HERE:
            problems.append(f"external request: {request.url}")

    context.on("console", on_console)
    context.on("weberror", lambda error: problems.append(f"uncaught error: {error.error}"))
    context.on("requestfailed", on_failed)
    context.on("response", on_response)
    context.on("request", on_request)
