"""A real Slurm on this machine, with two nodes of two processors; all its files are in a folder of its own.

The daemons share this machine's network, so both nodes are 127.0.0.1. On a cluster the names of nodes can be looked
up; here the daemons (and what they start) see an /etc/hosts that knows them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.harness.world import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "unshare", "setpriv")
START_SECONDS = 30.0

CONFIG = """
ClusterName=lab
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
CommunicationParameters=NoInAddrAny
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
KillWait=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=2 RealMemory=4000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=2 RealMemory=4000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    path = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    lacking = [program for program in PROGRAMS if shutil.which(program, path=path) is None]
    if lacking:
        return f"needs {', '.join(lacking)}, from the packages slurm-wlm, munge and util-linux"
    return None if os.geteuid() == 0 else "Slurm's daemons need root"


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """The variables with which srun and sbatch find the cluster, while it runs."""
    host = socket.gethostname().split(".")[0]
    for name in ("state", "spool-n1", "spool-n2"):
        (folder / name).mkdir(parents=True)
    ports = {"controller": free_port(), "first": free_port(), "second": free_port()}
    (folder / "slurm.conf").write_text(CONFIG.format(folder=folder, host=host, **ports))
    (folder / "hosts").write_text(f"127.0.0.1 localhost {host} n1 n2\n")
    key = folder / "munge.key"
    key.write_bytes(os.urandom(64))
    key.chmod(0o600)
    folder.chmod(0o755)  # munged refuses a folder that others could write to
    paths = [
        f"--{kind}={folder}/munge.{kind.split('-')[0]}" for kind in ("socket", "pid-file", "log-file", "seed-file")
    ]
    environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    environ["PATH"] = os.pathsep.join([environ.get("PATH", ""), "/usr/sbin", "/sbin"])
    with contextlib.ExitStack() as daemons:

        def run(*command: str) -> None:
            daemons.enter_context(_daemon(folder, list(command), environ))

        run("munged", "--foreground", "--force", f"--key-file={key}", *paths)
        _wait(lambda: (folder / "munge.socket").exists(), "munged has no socket", folder)
        run("slurmctld", "-D")
        for node in ("n1", "n2"):
            own_hosts = f"mount --bind {folder}/hosts /etc/hosts && exec slurmd -D -N {node}"
            run("unshare", "--mount", "sh", "-c", own_hosts)
        _wait(lambda: _idle_nodes(environ) == 2, "the nodes do not come up", folder)
        yield {"SLURM_CONF": environ["SLURM_CONF"]}


@contextlib.contextmanager
def _daemon(folder: Path, command: list[str], environ: dict[str, str]) -> Iterator[None]:
    name = command[-1].split()[-1] if command[0] == "unshare" else command[0]
    # It ends with this process, however that ends.
    command = ["setpriv", "--pdeathsig", "KILL", *command]
    with (folder / f"{name}.out").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, start_new_session=True)
    try:
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _idle_nodes(environ: dict[str, str]) -> int:
    command = ["sinfo", "--noheader", "--Node", "--format=%T"]
    return subprocess.run(command, env=environ, capture_output=True, text=True).stdout.split().count("idle")


def _wait(condition: Callable[[], bool], what: str, folder: Path) -> None:
    limit = time.monotonic() + START_SECONDS
    while not condition():
        if time.monotonic() > limit:
            logs = "\n".join(f"--- {path.name}\n{path.read_text()[-2000:]}" for path in sorted(folder.glob("*.out")))
            raise AssertionError(f"{what} after {START_SECONDS:g} seconds\n{logs}")
        time.sleep(0.1)
