"""A real terminal for tests: a program behind a pseudo-terminal, what it shows, and keys for it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence

ENTER, DOWN, UP, CONTROL_C, ESCAPE = "\r", "\x1b[B", "\x1b[A", "\x03", "\x1b"
_CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b[=>]|\r")


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """Starts a program in a terminal of 200 columns: the path of a test's folder, in a table, leaves room for more."""

    def __init__(self, command: Sequence[str], env: dict[str, str]) -> None:
        self.screen, inner = pty.openpty()
        fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 200, 0, 0))
        # Those of the terminal in which the tests run: readline tells them to every process that is started.
        env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            list(command),
            stdin=inner,
            stdout=inner,
            stderr=inner,
            env={**env, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        os.close(inner)
        self.shown = ""
        self._read_up_to = 0

    def wait_for(self, text: str, limit: float = 60) -> str:
        """Reads until the text is shown after what was waited for before; returns all that came on the way."""
        end = time.monotonic() + limit
        while text not in self.shown[self._read_up_to :]:
            if time.monotonic() > end or not self._read(end):
                raise AssertionError(f"{text!r} was not shown; the terminal has:\n{self.shown}")
        begin = self._read_up_to
        self._read_up_to = self.shown.index(text, begin) + len(text)
        return self.shown[begin : self._read_up_to]

    def send(self, keys: str) -> None:
        os.write(self.screen, keys.encode())

    def end(self, limit: float = 60) -> int:
        """Reads to the end and returns the exit code."""
        end = time.monotonic() + limit
        while self._read(end):
            pass
        try:
            return self.process.wait(timeout=max(0.1, end - time.monotonic()))
        finally:
            self.close()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        os.close(self.screen)

    def _read(self, end: float) -> bool:
        ready, _, _ = select.select([self.screen], [], [], max(0.0, end - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self.screen, 65536)
        except OSError:  # the program has closed its side
            return False
        self.shown += _CODES.sub("", data.decode(errors="replace"))
        return bool(data)
