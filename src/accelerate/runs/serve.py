"""A page of runs on this machine alone: for the person who knows its address, and with nothing from elsewhere."""

from __future__ import annotations

import hmac
import secrets
import sys
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock
from typing import Any
from urllib.parse import parse_qs, urlsplit

from accelerate.runs.page import FILES, MOST_POINTS, Page, file, to_json

ADDRESS = "127.0.0.1"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",  # the address holds the token
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


class Server(ThreadingHTTPServer):
    """Serves a page until it is closed. port: 0 for any that is free."""

    daemon_threads = True

    def __init__(self, page: Page, port: int = 0) -> None:
        self.page = page
        self.token: str = secrets.token_urlsafe(24)
        self.lock = Lock()  # the page keeps what it has read: one question at a time
        super().__init__((ADDRESS, port), Handler)

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        # A browser that has closed its window has not done anything wrong.
        if not isinstance(sys.exc_info()[1], (ConnectionError, TimeoutError)):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers GET alone, under the token, and asked by the name of this machine's own address."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version = "accelerate"
    sys_version = ""
    timeout = 60

    def do_GET(self) -> None:
        # A page of somebody else's whose name is made to lead here would ask by that name.
        allowed = {f"{name}:{self.server.server_port}" for name in (ADDRESS, "localhost")}
        if self.headers.get("Host", "") not in allowed:
            port = self.server.server_port
            self._refuse(HTTPStatus.FORBIDDEN, f"Ask by {ADDRESS}:{port} or localhost:{port}.")
            return
        try:
            asked = urlsplit(self.path)
        except ValueError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"The address cannot be read: {error}.")
            return
        token, _, name = asked.path.lstrip("/").partition("/")
        if not hmac.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.FORBIDDEN, "The address lacks its token: use the one that was printed.")
            return
        name = name or "index.html"
        if name in FILES:
            self._answer(FILES[name], file(name))
        elif name in _ANSWERS:
            self._answer_json(_ANSWERS[name], parse_qs(asked.query))
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "There is no such page.")

    def _answer_json(self, answer: Any, query: dict[str, list[str]]) -> None:
        try:
            with self.server.lock:
                text = to_json(answer(self.server.page, query), separators=(",", ":"))
        except (ValueError, KeyError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, f"The request cannot be read: {error}.")
        except Exception as error:  # a file that is locked or gone: the page asks again
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, str(error))
        else:
            self._answer("application/json", text)

    def _answer(self, kind: str, text: str, status: HTTPStatus = HTTPStatus.OK) -> None:
        content = text.encode()
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)

    def _refuse(self, status: HTTPStatus, text: str) -> None:
        self._answer("text/plain; charset=utf-8", text + "\n", status)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        # Python answers so what it has no method for.
        self.close_connection = True
        if code == HTTPStatus.NOT_IMPLEMENTED:
            self._refuse(HTTPStatus.METHOD_NOT_ALLOWED, "Only GET is answered here.")
        else:
            self._refuse(HTTPStatus(code), f"{HTTPStatus(code).phrase}.")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal belongs to the person who started this."""


def _overview(page: Page, query: dict[str, list[str]]) -> Any:
    return page.overview()


def _curves(page: Page, query: dict[str, list[str]]) -> Any:
    def number(name: str) -> float | None:
        return float(query[name][0]) if name in query else None

    most = min(max(int(query.get("most", [MOST_POINTS])[0]), 2), 10 * MOST_POINTS)
    numbers = [int(word) for word in query["runs"][0].split(",")]
    ask = partial(page.curves, page.recent_overview(), query["kind"][0], query.get("name", [""])[0], query["axis"][0])
    return ask(numbers, number("low"), number("high"), most)


_ANSWERS = {"overview.json": _overview, "curves.json": _curves}
