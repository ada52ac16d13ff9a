"""The first thing a worker runs: ties it to its launcher, runs the script as Python would, writes down how it failed.

    python worker.py PARENT script train.py --lr 1
    python worker.py PARENT module package.train --lr 1

PARENT is the number of the process to end with; 0 is whatever started it.
Run as a file and imports nothing of the package, so that it costs next to nothing.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import time
from importlib.machinery import SourceFileLoader
from types import CodeType, ModuleType, TracebackType

# What was `__main__` before the script took its place; without a reference it would be torn down.
_kept: list[ModuleType] = []
# What this process was the first to say on the screen.
_said: set[str] = set()
# Between the end of a child and the signal that says so, at most, in seconds.
_MOMENT = 0.2


def die_with_parent(parent: int) -> None:
    """Lets the kernel kill this process when its parent is gone, however that happened."""
    if sys.platform == "linux":
        import ctypes
        import signal

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    else:
        import threading

        threading.Thread(target=_watch, args=(parent or os.getppid(),), daemon=True).start()
    if parent and os.getppid() != parent:  # it was gone before the kernel was told
        os._exit(1)


def _watch(parent: int) -> None:
    import time

    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def print_lines() -> None:
    """Lets what is printed be seen at once, but whole lines of it, which other processes cannot cut into pieces."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def run_script(path: str) -> None:
    """Does what `python path` does."""
    full = os.path.abspath(path)
    if os.path.isdir(full) or path.endswith((".zip", ".pyz")):
        import runpy

        runpy.run_path(full, run_name="__main__")  # its __main__.py
        return
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.path.dirname(os.path.realpath(full))
    main = ModuleType("__main__")
    main.__file__ = full
    main.__loader__ = SourceFileLoader("__main__", full)
    main.__dict__["__builtins__"] = __builtins__
    _kept.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    with io.open_code(full) as file:
        code: CodeType = compile(file.read(), full, "exec", dont_inherit=True)
    exec(code, main.__dict__)


def run_module(name: str) -> None:
    """Does what `python -m name` does."""
    import runpy

    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = os.getcwd()
    _kept.append(sys.modules["__main__"])
    sys.modules["__main__"] = ModuleType("__main__")
    runpy._run_module_as_main(name)  # type: ignore[attr-defined]


def record(error: BaseException, traceback: TracebackType | None, said: bool = False, said_by: str = "") -> None:
    """Writes the failure where the launcher looks for it, in the form torch elastic knows.

    said: whether its traceback is on the screen. said_by: the rank that wrote it there.
    """
    path = _record_path()
    if path is None or os.path.exists(path):
        return
    import json
    import platform
    import time
    from traceback import format_exception

    # Who ends with a code of its own has said why, if anything; only the time counts.
    text = "" if isinstance(error, SystemExit) else "".join(format_exception(type(error), error, traceback))
    now = time.time()
    extra = {
        "py_callstack": text,
        "timestamp": str(int(now)),
        "time": now,
        "rank": _rank(),
        "host": platform.node(),
        "said": said,
        "said_by": said_by,
        "alike": _what_is_alike(error, traceback),
        "on_screen": _shares_the_screen(),
        "about_others": _is_about_others(error),
        "line": _line_of_end(traceback) if isinstance(error, SystemExit) else "",
    }
    try:
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": {"message": f"{type(error).__name__}: {error}", "extraInfo": extra}}, file)
    except OSError:
        pass  # the traceback is on the screen, too


def _is_about_others(error: BaseException) -> bool:
    """Whether an error is what is left of one on another rank, as that of a lost connection."""
    lost = sys.modules.get("accelerate.state.lost")
    return lost is not None and isinstance(error, RuntimeError) and bool(lost.is_about_others(str(error)))


def _line_of_end(traceback: TracebackType | None) -> str:
    """` (train.py:7)` for the line at which a script that uses the package has ended; nothing for another one."""
    place = sys.modules.get("accelerate.diagnosis.place")
    return str(place.at_line(traceback)) if place is not None else ""


def _what_is_alike(error: BaseException, traceback: TracebackType | None) -> str:
    """What failures of several ranks have in common if they are one: the error, and the lines outside of this package.

    Inside of it, only one rank may have met the problem that all of them raise.
    """
    import re

    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    places = []
    while traceback is not None and not getattr(error, "is_of_all_ranks", False):
        file = traceback.tb_frame.f_code.co_filename
        if not file.startswith(package + os.sep):
            places.append((file, traceback.tb_lineno))
        traceback = traceback.tb_next
    text = re.sub(r"for rank \d+", "for this rank", str(error))  # as DDP says which parameters had no gradient
    return repr((type(error).__name__, text, places))


def _first_to_say(text: str, folder: str = "") -> str:
    """Which rank of this attempt was the first to say something on the screen that they share: perhaps this one.

    folder: of the launcher, where the environment does not say which.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ or not _shares_the_screen():
        return _rank()
    from hashlib import sha256

    digest = sha256(text.encode(errors="replace")).hexdigest()
    if digest in _said or len(_said) > 1000:  # what changes each time is no longer compared
        return _rank()
    name = f"said-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{digest}"
    note = os.path.join(folder, name) if folder else _in_scratch(name)
    try:
        os.symlink(_rank(), note)  # there with its content, or not at all
    except FileExistsError:
        return os.readlink(note)
    except OSError:
        pass
    _said.add(digest)
    return _rank()


def warn_once(folder: str = "") -> None:
    """Shows a warning that several processes of this run have in common once, by the first that comes to it.

    folder: see `_first_to_say`.
    """
    import warnings

    show = warnings.showwarning

    def show_if_new(message, category, filename, lineno, file=None, line=None):  # type: ignore[no-untyped-def]
        text = f"{filename}:{lineno}: {category.__name__}: {message}"
        if file is not None or _first_to_say(text, folder) == _rank():
            show(message, category, filename, lineno, file, line)

    warnings.showwarning = show_if_new


def hush_torch() -> None:
    """Warnings of torch's own, which it writes past Python, come from the first process of a machine alone."""
    if os.environ.get("LOCAL_RANK", "0") != "0" and _shares_the_screen():
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def _shares_the_screen() -> bool:
    """Whether errors go where those of the launcher go, and not to a file of this process alone."""
    try:
        return os.path.samestat(os.fstat(2), os.stat(f"/proc/{os.getppid()}/fd/2"))
    except OSError:
        return False


def _record_path() -> str | None:
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        return os.environ["TORCHELASTIC_ERROR_FILE"]
    if "ACCELERATE_FAILURES" in os.environ:
        return os.path.join(os.environ["ACCELERATE_FAILURES"], f"{_rank()}.json")
    return None


def _rank() -> str:
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
    return next((os.environ[name] for name in names if name in os.environ), "0")


def _inside(traceback: TracebackType | None) -> TracebackType | None:
    """The part of a traceback that belongs to the script."""
    here = {__file__, "<frozen runpy>"}
    while traceback is not None and traceback.tb_frame.f_code.co_filename in here:
        traceback = traceback.tb_next
    return traceback


def _line_of(error: BaseException, traceback: TracebackType | None) -> str:
    """A line that Python shows with an error: of its stack, if it has one. A script that cannot be read has none."""
    from traceback import format_exception_only

    return "Traceback (most recent call last)" if traceback is not None else format_exception_only(error)[-1].strip()


def _or_of_a_child(error: BaseException) -> BaseException:
    """The error that ended the script, or the one about a lost worker of a DataLoader that comes right behind it.

    torch raises that out of its handler of SIGCHLD, which breaks into whatever is done then: from here on that would be
    the report. The connection to such a worker may break a moment before.
    """
    if not callable(signal.getsignal(signal.SIGCHLD)):
        return error
    try:
        if isinstance(error, (OSError, EOFError)):
            time.sleep(_MOMENT)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    except RuntimeError as lost:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        return lost
    return error


def _name_the_module(error: BaseException, path: str) -> None:
    """Adds how to run a file that is part of a package to the error about its first relative import."""
    if isinstance(error, ImportError) and "attempted relative import with no known parent package" in str(error):
        module = os.path.relpath(path).removesuffix(".py").replace(os.sep, ".")
        how = "its module with `-m`" if module.startswith(".") else f"it as a module: `accelerate launch -m {module}`"
        error.msg += f"\naccelerate: a file of a package that imports others of it has to know its name: launch {how}."


def tell_recorders(code: object) -> None:
    """Lets what records this run, if anything does, know how it ends: a code is no error that Python shows."""
    if (overheard := sys.modules.get("accelerate.tracking.overheard")) is not None:
        overheard.exits(code)


def tell_others(code: object, traceback: TracebackType | None = None) -> None:
    """Lets processes that wait for this one know how it ends, and where."""
    watch = sys.modules.get("accelerate.diagnosis.watch")
    if watch is not None and (watching := watch.current()) is not None:
        watching.exits(code, traceback)
    elif not code and os.environ.get("ACCELERATE_PREEMPTION_NOTE") and os.environ.get("WORLD_SIZE", "1") != "1":
        # Without a group there is no store: those who wait for one look here (see diagnosis/arrival.py).
        with contextlib.suppress(OSError):
            open(_in_scratch(f"ended-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{_rank()}"), "w").close()


def say_attempt() -> None:
    """When all processes were started again: how often, and why."""
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if not attempt or _rank() != "0" or _was_said(attempt):
        return
    import json
    from glob import glob

    own = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    before = os.path.join(
        os.path.dirname(os.path.dirname(os.path.dirname(own))), f"attempt_{attempt - 1}", "*", "*.json"
    )
    failures = []
    for path in glob(before) if own else []:
        try:
            with open(path, encoding="utf-8") as file:
                message = json.load(file)["message"]
            if not message["extraInfo"].get("about_others"):
                failures.append(
                    (message["extraInfo"]["time"], message["extraInfo"]["rank"], _first_line(message["message"]))
                )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    if (killed := _killed(attempt - 1)) is not None:
        why = killed
    elif not failures:
        why = "a rank was lost"
    elif min(failures)[2] == "SystemExit: 75":  # config.preemption.PREEMPTED
        why = "a machine was taken away"
    else:
        why = "rank {1} failed with {2}".format(*min(failures))
    most = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", attempt)) + 1
    print(f"accelerate: attempt {attempt + 1} of {most}, after {why}", file=sys.stderr, flush=True)


def _first_line(text: str) -> str:
    return next(iter(text.splitlines()), text)


def _in_scratch(name: str) -> str:
    """A file in the folder of the launcher."""
    _, _, note = os.environ.get("ACCELERATE_PREEMPTION_NOTE", "").partition(":")
    return os.path.join(os.path.dirname(note), name)


def _killed(attempt: int) -> str | None:
    """Which rank of this machine was killed in an attempt, in words (see `elastic`)."""
    try:
        with open(_in_scratch(f"killed-{attempt}"), encoding="utf-8") as file:
            return file.read()
    except OSError:
        return None


def _was_said(attempt: int) -> bool:
    """Whether this attempt began before: when machines come and go, none is counted."""
    try:
        os.close(os.open(_in_scratch(f"attempt-{attempt}"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return True
    except OSError:
        pass
    return False


def main() -> None:
    parent, kind, target, *arguments = sys.argv[1:]
    die_with_parent(int(parent))
    print_lines()
    warn_once()
    hush_torch()
    say_attempt()
    sys.argv = [target, *arguments]
    try:
        run(kind, target)
    except KeyboardInterrupt:  # also in the middle of an error, which is then that the others have ended already
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher's: it would break into what is done at the end
        tell_recorders(130)
        sys.exit(130)


def run(kind: str, target: str) -> None:
    """The script, or module; how it ends is shown, and written down for the launcher."""
    try:
        run_module(target) if kind == "module" else run_script(target)
    except SystemExit as end:
        tell_others(end.code, end.__traceback__)
        if end.code:
            record(end, end.__traceback__)
            tell_recorders(end.code)
        raise
    except KeyboardInterrupt:
        raise
    except BaseException as raised:
        error = _or_of_a_child(raised)
        if kind == "script":
            _name_the_module(error, target)
        traceback = _inside(error.__traceback__)
        # First on the screen: whoever shows an error may add to it, as which machine was lost.
        with contextlib.redirect_stderr(io.StringIO()) as said:
            sys.excepthook(type(error), error.with_traceback(traceback), traceback)
        said_by = _first_to_say(_what_is_alike(error, traceback))
        if said_by == _rank():
            print(said.getvalue(), end="", file=sys.stderr, flush=True)
        # A script's own hook may have shown it otherwise, or not at all.
        record(error, traceback, _line_of(error, traceback) in said.getvalue(), said_by)
        failed = True
    else:
        tell_others(0)
        failed = False
    if failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
