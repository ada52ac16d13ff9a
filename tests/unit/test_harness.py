"""The harness itself: worlds of several processes, how they fail, and what tests may not leak."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness import WorldFailed, run_world, world_outcomes
from tests.harness.leaks import Snapshot
from tests.harness.world import Server, free_port, server

# --- functions the ranks run --------------------------------------------------------------------------------


def identity() -> dict[str, str]:
    return {**os.environ, "cwd": os.getcwd(), "threads": str(torch.get_num_threads())}


def sum_of_ranks(scale: int) -> torch.Tensor:
    dist.init_process_group("gloo")
    value = torch.full((3,), float(scale * (dist.get_rank() + 1)))
    dist.all_reduce(value)
    return value


def first_numpy_number() -> float:
    return float(np.random.rand())


def bf16_product() -> float:
    ones = torch.ones(64, 64, dtype=torch.bfloat16)
    return (ones @ ones).mean().item()


def who() -> tuple[int, int, int]:
    return os.getpid(), os.getppid(), os.getpgid(0)


def open_files() -> list[str]:
    return sorted(
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if fd.isdigit()
        if os.path.exists(f"/proc/self/fd/{fd}")
    )


def late_second_rank() -> int:
    """Rank 0 returns at once; its store must live on for the others."""
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        return 0
    time.sleep(0.5)
    store = dist.distributed_c10d._get_default_store()
    store.set("late", "1")
    return int(store.get("late"))


def second_rank_raises() -> None:
    print(f"hello from {os.environ['RANK']}")
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("the second rank had enough")
    dist.barrier()


def asserts_nonsense() -> None:
    value = torch.tensor([1, 2])
    assert value.sum() == 4


def second_rank_sleeps() -> None:
    if os.environ["RANK"] == "1":
        time.sleep(600)


def second_rank_crashes() -> None:
    if os.environ["RANK"] == "1":
        ctypes.string_at(0)
    time.sleep(600)


def second_rank_exits() -> None:
    if os.environ["RANK"] == "1":
        os._exit(3)


def calls_sys_exit() -> None:
    sys.exit("enough")


def leaves_a_process(path: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(path).write_text(str(child.pid))


def returns_a_lock() -> object:
    return threading.Lock()


def all_see(leaked: str) -> str | None:
    return os.environ.get(leaked)


# --- worlds that work ---------------------------------------------------------------------------------------


def test_ranks_are_told_who_they_are() -> None:
    ranks = run_world(identity, 3)
    assert [r["RANK"] for r in ranks] == [r["LOCAL_RANK"] for r in ranks] == ["0", "1", "2"]
    assert {r["WORLD_SIZE"] for r in ranks} == {r["LOCAL_WORLD_SIZE"] for r in ranks} == {"3"}
    assert {r["MASTER_ADDR"] for r in ranks} == {"127.0.0.1"}
    assert len({r["MASTER_PORT"] for r in ranks}) == 1
    assert {r["ACCELERATE_USE_CPU"] for r in ranks} == {"true"}
    assert {r["threads"] for r in ranks} == {"1"}
    assert len({r["cwd"] for r in ranks}) == 1 and not Path(ranks[0]["cwd"]).exists()


def test_env_adds_and_removes_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_OUTER", "seen")
    (rank,) = run_world(identity, 1, env={"HARNESS_INNER": "yes", "ACCELERATE_USE_CPU": None, "RANK": None})
    assert rank["HARNESS_OUTER"] == "seen"
    assert rank["HARNESS_INNER"] == "yes"
    assert "ACCELERATE_USE_CPU" not in rank and "RANK" not in rank


def test_cwd_can_be_given(tmp_path: Path) -> None:
    assert run_world(identity, 1, cwd=tmp_path)[0]["cwd"] == str(tmp_path)
    assert tmp_path.exists()


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_collectives_and_tensors_as_results(processes: int) -> None:
    results = run_world(sum_of_ranks, processes, 10)
    expected = torch.full((3,), 10.0 * processes * (processes + 1) / 2)
    assert len(results) == processes
    assert all(torch.equal(result, expected) for result in results)


def test_the_store_outlives_the_first_rank() -> None:
    assert run_world(late_second_rank) == [0, 1]


def test_numpy_differs_between_ranks_as_in_real_life() -> None:
    assert len(set(run_world(first_numpy_number, 3))) == 3


def test_bf16_works_here_and_in_ranks() -> None:
    assert [bf16_product(), *run_world(bf16_product)] == [64.0] * 3


def test_one_server_forks_all_worlds() -> None:
    first, second = run_world(who), run_world(who)
    assert {parent for _, parent, _ in first + second} == {server.pid}
    assert all(pid == group for pid, _, group in first)
    assert len({pid for pid, _, _ in first + second}) == 4


def test_ranks_change_nothing_for_later_worlds() -> None:
    run_world(all_see, 1, "HARNESS_X", env={"HARNESS_X": "1"})
    assert run_world(all_see, 1, "HARNESS_X") == [None]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_no_file_stays_open() -> None:
    run_world(who)
    process = psutil.Process(server.pid)
    ours, theirs, ranks = psutil.Process().num_fds(), process.num_fds(), run_world(open_files)
    for _ in range(3):
        run_world(who)
        world_outcomes(second_rank_exits)
    assert psutil.Process().num_fds() == ours
    assert process.num_fds() == theirs
    assert len(run_world(open_files)[0]) == len(ranks[0])
    assert process.children() == []


# --- worlds that fail ---------------------------------------------------------------------------------------


def test_the_failing_rank_is_the_error() -> None:
    with pytest.raises(WorldFailed) as caught:
        run_world(second_rank_raises)
    lines = str(caught.value).splitlines()
    assert lines[0] == "rank 1: Traceback (most recent call last):"
    assert "in second_rank_raises" in lines[1]  # nothing of the harness above the test's own frame
    told = lines.index("ValueError: the second rank had enough")
    assert lines[told + 1].startswith("rank 0: ")
    assert lines[told + 2 :] == [
        "--- output of rank 0 ---",
        "hello from 0",
        "--- output of rank 1 ---",
        "hello from 1",
    ]


def test_a_bare_assert_shows_the_values_around_it() -> None:
    with pytest.raises(WorldFailed) as caught:
        run_world(asserts_nonsense, 1)
    assert str(caught.value).endswith("AssertionError\n    where\n    value = tensor([1, 2])")


def test_outcomes_tell_instead_of_raising() -> None:
    first, second = world_outcomes(second_rank_raises)
    assert (second.error, second.message) == ("ValueError", "the second rank had enough")
    assert "in second_rank_raises" in second.traceback
    assert not first.ok and not second.ok
    assert second.ended < first.ended


def test_outcomes_of_a_world_that_works() -> None:
    outcomes = world_outcomes(sum_of_ranks, 2, 1)
    assert all(outcome.ok and outcome.reason == "finished" for outcome in outcomes)
    assert torch.equal(outcomes[1].value, torch.full((3,), 3.0))


def test_a_hanging_rank_shows_its_stack() -> None:
    with pytest.raises(WorldFailed) as caught:
        run_world(second_rank_sleeps, timeout=1)
    text = str(caught.value)
    assert text.startswith("the world did not finish within 1 seconds\n")
    assert "rank 1: still running when the time was up" in text
    assert "in second_rank_sleeps" in text
    assert psutil.Process(server.pid).children() == []


def test_a_crashing_rank_names_its_signal() -> None:
    first, second = world_outcomes(second_rank_crashes, grace=0.2)
    assert second.signal == "SIGSEGV" and "in second_rank_crashes" in second.traceback
    assert first.killed and first.signal == "SIGKILL"
    assert psutil.Process(server.pid).children() == []


def test_a_rank_that_leaves_without_a_result_has_failed() -> None:
    with pytest.raises(WorldFailed, match="rank 1: exited with code 3"):
        run_world(second_rank_exits)


def test_sys_exit_is_a_failure() -> None:
    (outcome,) = world_outcomes(calls_sys_exit, 1)
    assert (outcome.error, outcome.message) == ("SystemExit", "enough")


def test_a_result_that_cannot_travel_is_that_ranks_error() -> None:
    with pytest.raises(WorldFailed, match=r"(?s)rank 0: .*cannot pickle"):
        run_world(returns_a_lock, 1)


def test_a_local_function_is_refused() -> None:
    with pytest.raises(TypeError, match="use a function defined at the top of a module"):
        run_world(lambda: None)


def test_processes_left_by_a_rank_are_ended(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    run_world(leaves_a_process, 1, str(note))
    pid = int(note.read_text())
    with suppress(psutil.NoSuchProcess):
        while psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:  # what was killed takes a moment to go
            time.sleep(0.1)


def test_an_interrupted_test_ends_its_world(tmp_path: Path) -> None:
    """What Ctrl-C or the limit of a test does: the exception passes, no process stays."""
    run_world(who)
    old = psutil.Process(server.pid)

    def interrupt() -> None:
        while not old.children():
            time.sleep(0.01)
        os.kill(os.getpid(), 2)

    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            run_world(second_rank_sleeps)
        thread.join()
    finally:
        signal.signal(signal.SIGINT, before)
    assert not old.is_running()
    assert run_world(all_see, 1, "HARNESS_X") == [None]  # the next world has a new server


def test_a_server_without_worlds_stops_quietly() -> None:
    assert Server().stop() is None


def test_free_ports_can_be_bound() -> None:
    assert 20000 <= free_port() < 29000


def test_two_workers_never_choose_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = []
    for worker in (0, 1):
        monkeypatch.setattr("tests.harness.world.WORKER", (worker, 2))
        chosen.append({free_port() % 2 for _ in range(20)})
    assert chosen == [{0}, {1}]


# --- leaks --------------------------------------------------------------------------------------------------


def test_nothing_leaked() -> None:
    assert Snapshot.take().leaks() == []


def test_environment_leaks_are_named_and_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARNESS_OLD", "1")
    monkeypatch.setenv("HARNESS_GONE", "1")
    before = Snapshot.take()
    os.environ.update(HARNESS_OLD="2", HARNESS_NEW="x")
    del os.environ["HARNESS_GONE"]
    assert before.leaks() == [
        "environment variable HARNESS_NEW was set to 'x'",
        "environment variable HARNESS_GONE was removed",
        "environment variable HARNESS_OLD was changed from '1' to '2'",
    ]
    before.clean_up()
    assert before.leaks() == []


def test_a_process_group_left_up_is_a_leak() -> None:
    before = Snapshot.take()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert before.leaks() == ["the process group is still initialized: call destroy_process_group()"]
    before.clean_up()
    assert not dist.is_initialized()


def test_a_running_thread_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.harness.leaks.SETTLE_SECONDS", 0.05)
    before, end = Snapshot.take(), threading.Event()
    thread = threading.Thread(target=end.wait, name="stray")
    thread.start()
    assert before.leaks() == ["thread 'stray' is still running"]
    end.set()
    thread.join()
    assert before.leaks() == []


def test_a_thread_about_to_end_is_no_leak() -> None:
    before = Snapshot.take()
    threading.Thread(target=time.sleep, args=(0.1,)).start()
    assert before.leaks() == []


def test_a_child_process_is_a_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.harness.leaks.SETTLE_SECONDS", 0.05)
    before = Snapshot.take()
    child = subprocess.Popen(["sleep", "600"])
    assert before.leaks() == [f"child process {child.pid} is still there: sleep 600"]
    before.clean_up()
    child.wait()
    assert before.leaks() == []


def test_the_fork_server_is_no_leak() -> None:
    server.stop()
    before = Snapshot.take()
    run_world(who)
    assert before.leaks() == []


def test_every_test_starts_with_fresh_state(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import leave_nothing_behind")
    pytester.makepyfile(
        """
        import pytest
        from accelerate.state import PartialState
        @pytest.mark.parametrize("turn", [1, 2])
        def test_state(turn):
            assert PartialState._shared_state == {}
            PartialState(cpu=True)
            assert PartialState._shared_state != {}
        """
    )
    pytester.runpytest_inprocess("-p", "no:cacheprovider").assert_outcomes(passed=2)


def test_the_fixture_fails_a_leaking_test(pytester: pytest.Pytester) -> None:
    pytester.makeconftest("from tests.conftest import leave_nothing_behind")
    pytester.makepyfile(
        """
        import os
        def test_leaks(): os.environ["HARNESS_LEAK"] = "1"
        def test_clean(): assert "HARNESS_LEAK" not in os.environ
        def test_borrows(monkeypatch): monkeypatch.setenv("HARNESS_LEAK", "1")
        """
    )
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider")
    result.assert_outcomes(passed=3, errors=1)
    result.stdout.fnmatch_lines(["*this test leaks: environment variable HARNESS_LEAK was set to '1'*"])
