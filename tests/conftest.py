"""Every test starts with fresh state and leaves nothing behind."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest

# Both before torch is imported, here and in the processes that inherit them.
# Compile in this process: inductor's pool of workers would outlive the test.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
# Some virtual machines announce AMX and then die of it in the first bf16 product.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

from tests.harness.leaks import Snapshot
from tests.harness.seeds import seed_test
from tests.harness.state import reset_state
from tests.harness.world import server


def pytest_configure() -> None:
    """A job in the background inherits that SIGINT is ignored: tests that interrupt need what a terminal gives."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """Whatever is imported by now stays: no test that collects garbage need look through torch for it."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    server.stop()


@pytest.fixture(autouse=True)
def same_random_numbers_every_time() -> None:
    """What a test draws without a seed of its own is the same in every run, so that a failure can be repeated."""
    seed_test()


@pytest.fixture(autouse=True)
def leave_nothing_behind() -> Iterator[None]:
    """Fail a test that leaks environment variables, a process group, threads or child processes."""
    reset_state()
    before = Snapshot.take()
    yield
    leaks = before.leaks()
    before.clean_up()
    reset_state()
    if leaks:
        pytest.fail("this test leaks: " + "; ".join(leaks), pytrace=False)
