"""Machines that come and go: a run on two of them goes on with one, and with two again."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.chaos import history
from tests.chaos.cluster import TRAIN, Host, ended_afterwards, running, wait_for
from tests.chaos.train import BATCH, SAMPLES
from tests.harness import netns
from tests.harness.world import free_port

pytestmark = pytest.mark.skipif(netns.missing() is not None, reason=str(netns.missing()))


@pytest.mark.timeout(600)  # no matter how busy the machine is; the waits below have limits of their own
def test_from_two_machines_to_one_and_back(tmp_path: Path) -> None:
    log, project, enough = tmp_path / "log", tmp_path / "project", tmp_path / "enough"
    log.mkdir()
    with netns.two_machines() as machines:
        port = free_port()
        words = ["--cpu", "--nnodes", "1:2", "--num_processes", "2", "--main_process_ip", machines[0].address]
        words += ["--main_process_port", str(port), "--max_restarts", "9", "--preemption", "save", "--resume", "auto"]
        words += ["--rdzv_conf", "last_call_timeout=2,keep_alive_interval=2"]
        script = [str(TRAIN), str(project), str(log), "--epochs", "100000", "--until", str(enough)]
        script += ["--pause", "0.03", "--patience", "60"]
        hosts = [Host(machine, [*words, *script], tmp_path) for machine in machines]
        first, second = hosts

        def trains_on(processes: int) -> bool:
            """Whether the newest start is one of so many processes, and has come beyond its first steps."""
            starts = history.read(log).starts
            return bool(starts) and starts[-1][1] == processes and history.newest_step(log) > starts[-1][0] + 3

        def both_ended() -> bool:
            for host in hosts:
                host.ended()
            return [len(host.codes) for host in hosts] == [1, 2]

        with ended_afterwards(tmp_path, hosts):
            for host in hosts:
                host.start()
            wait_for("both train", 100, hosts, lambda: trains_on(2))
            assert second.launcher is not None
            second.launcher.send_signal(signal.SIGTERM)
            wait_for("the second has ended", 100, hosts, lambda: second.ended() is not None)
            assert second.codes == [75], second.output.read_text()
            wait_for("one goes on", 100, hosts, lambda: trains_on(1))
            second.start()
            wait_for("both train again", 100, hosts, lambda: trains_on(2))
            enough.touch()  # however fast the machines are, the run lasts until all this was seen
            wait_for("both have ended", 100, hosts, both_ended)
            said = first.output.read_text()
            assert [host.codes for host in hosts] == [[0], [75, 0]], said
            wait_for("nothing is left", 20, hosts, lambda: not running(tmp_path))
    seen = history.read(log)
    epochs = seen.epochs()
    assert list(epochs) == list(range(len(epochs)))
    for epoch, ids in epochs.items():
        assert set(ids) == set(range(SAMPLES)), f"epoch {epoch} misses samples"
        # The one process may have left an odd number of batches to two: then one of them is repeated (`even_batches`).
        assert len(ids) - SAMPLES in (0, BATCH), f"epoch {epoch} has {len(ids)} samples"
    assert (
        "continues, after 2, on 1 of at most 2 machines." in said and "after 1, on 2 of at most 2 machines." in said
    ), said
    assert "The machines of the run change: the run was saved to" in said, said
