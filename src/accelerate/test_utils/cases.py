"""Test cases to derive from, and things to check in them."""

from __future__ import annotations

import io
import shutil
import tempfile
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from accelerate.comm.ops import gather
from accelerate.state import AcceleratorState, PartialState


class TempDirTestCase(unittest.TestCase):
    """Provide a folder `tmpdir`, emptied before each test unless `clear_on_setup` is False."""

    clear_on_setup = True
    tmpdir: Path

    @classmethod
    def setUpClass(cls) -> None:
        """Create the folder."""
        cls.tmpdir = Path(tempfile.mkdtemp())

    @classmethod
    def tearDownClass(cls) -> None:
        """Remove the folder."""
        shutil.rmtree(cls.tmpdir, ignore_errors=True)

    def setUp(self) -> None:
        """Empty the folder."""
        if self.clear_on_setup:
            for path in self.tmpdir.iterdir():
                shutil.rmtree(path) if path.is_dir() else path.unlink()


class AccelerateTestCase(unittest.TestCase):
    """Reset the state of the process after each test."""

    def tearDown(self) -> None:
        """Reset the state."""
        super().tearDown()
        AcceleratorState._reset_state()
        PartialState._reset_state()


class MockingTestCase(unittest.TestCase):
    """Stop mocks at the end of the test that added them."""

    def add_mocks(self, mocks: Any) -> None:
        """Start one mock or several.

        Args:
            mocks: the mocks.
        """
        self.mocks: list[Any] = list(mocks) if isinstance(mocks, (list, tuple)) else [mocks]
        for patch in self.mocks:
            patch.start()
            self.addCleanup(patch.stop)


def are_the_same_tensors(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is the same on every rank.

    Args:
        tensor: the tensor of this rank.
    """
    ours = tensor[None].clone().to(PartialState().device)
    return all(torch.equal(ours[0].cpu(), other) for other in gather(ours).cpu())


@contextmanager
def assert_exception(exception_class: type[BaseException], msg: str | None = None) -> Iterator[None]:
    """Check that a `with` block raises an exception.

    Args:
        exception_class: its class.
        msg: text that its message contains.
    """
    try:
        yield
    except Exception as error:
        if not isinstance(error, exception_class):
            raise AssertionError(f"expected {exception_class.__name__}, but {error!r} was raised") from error
        if msg is not None and msg not in str(error):
            raise AssertionError(f"expected {msg!r} in the message, which is {str(error)!r}") from error
    else:
        raise AssertionError(f"expected {exception_class.__name__}, but nothing was raised")


def capture_call_output(func: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """Call a function and return what it printed.

    Args:
        func: the function.
        *args: its positional arguments.
        **kwargs: its keyword arguments.
    """
    printed = io.StringIO()
    with redirect_stdout(printed):
        func(*args, **kwargs)
    return printed.getvalue()
