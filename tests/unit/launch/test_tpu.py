"""`accelerate launch --tpu`: one chip, one process for each, sharding over all, and pods."""

from __future__ import annotations

import http.server
import json
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.launch import tpu
from accelerate.launch.engines.tpu import FUNCTION, POD
from accelerate.launch.plan import LaunchPlan, plan
from accelerate.launch.resolve import resolve


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with four chips, and a network card of the same vendor."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    bus = tmp_path / "bus"
    for number, device in enumerate(["0x0063"] * 4 + ["0x0042"]):
        (bus / str(number)).mkdir(parents=True)
        (bus / str(number) / "vendor").write_text("0x1ae0\n")
        (bus / str(number) / "device").write_text(f"{device}\n")
    (bus / "other").mkdir()
    monkeypatch.setattr(tpu.chips, "__defaults__", (bus,))
    return tmp_path


def planned(*words: str, environ: dict[str, str] | None = None) -> LaunchPlan:
    args = launch_command_parser().parse_args([*words, "train.py", "--lr", "1"])
    nowhere = {"GCE_METADATA_HOST": "127.0.0.1:1"}
    return plan(resolve(args, {**nowhere, **(environ or {})}, port_in_use=lambda port: False))


def test_one_process_for_each_chip() -> None:
    found = planned("--tpu", "--mixed_precision", "bf16")
    assert found.engine == "4 processes, one per TPU device"
    assert "--nproc_per_node=4" in found.argv and found.argv[-3:] == ["train.py", "--lr", "1"]
    assert found.env.items() >= {"ACCELERATE_TORCH_DEVICE": "xla", "ACCELERATE_MIXED_PRECISION": "bf16"}.items()
    assert "ACCELERATE_DOWNCAST_BF16" not in found.env and found.becomes


def test_one_process() -> None:
    found = planned("--tpu", "--num_processes", "1", "--downcast_bf16", "--mixed_precision", "bf16")
    assert found.engine == "one process on a TPU" and found.argv == [sys.executable, "train.py", "--lr", "1"]
    assert found.env["ACCELERATE_DOWNCAST_BF16"] == "true" and found.env["ACCELERATE_TORCH_DEVICE"] == "xla"


def test_sharding_over_all_chips(tmp_path: Path) -> None:
    settings = '{"shard_param_on_dim_0": true}'
    flags = ["--use_fsdp", "--fsdp_version", "2", "--fsdp_xla_fsdp_settings", settings]
    found = planned("--tpu", *flags, "--fsdp_xla_fsdp_grad_ckpt", "yes")
    assert found.engine == "one process on all chips of a TPU"
    config = tmp_path / "config.yaml"
    config.write_text(
        "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  xla: true\n  xla_fsdp_v2: true\n"
        f"  xla_fsdp_grad_ckpt: true\n  xla_fsdp_settings: {settings}\n"
    )
    of_file = planned("--config_file", str(config))
    for each in (found, of_file):
        assert each.env["ACCELERATE_USE_FSDP"] == each.env["FSDP_XLA_FSDP_GRAD_CKPT"] == "true"
        assert json.loads(each.env["FSDP_XLA_FSDP_SETTINGS"]) == {"shard_param_on_dim_0": True}
    assert of_file.engine == found.engine


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--tpu", "--num_processes", "2"], "has 4 chips on each machine, but 2 processes .* it takes 1 or 4"),
        (["--tpu", "--use_fsdp", "--num_processes", "4"], "one process for all chips of one machine, not 4"),
        (["--tpu", "--use_fsdp", "--fsdp_xla_fsdp_v2", "no"], "works only by SPMD"),
        (["--tpu", "--use_deepspeed"], "exclude each other"),
        (["--tpu", "--no_python", "--main_training_function", "train"], "a function of a Python script"),
        (["--tpu_cluster", "--vm", "a", "--vm", "b", "--use_fsdp"], "all chips of one machine, not of a pod"),
        (["--tpu_cluster"], "Set `tpu_name` and `tpu_zone` in the config file"),
    ],
)
def test_what_does_not_fit_is_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        planned(*words)


def test_a_function_of_the_script(tmp_path: Path) -> None:
    found = planned("--tpu", "--main_training_function", "train")
    assert found.argv[-6:] == [FUNCTION, "train", "script", "train.py", "--lr", "1"]
    config = tmp_path / "config.yaml"
    config.write_text("distributed_type: XLA\nmain_training_function: main\n")  # as every file of release 1.15
    assert "train.py" in planned("--config_file", str(config)).argv[-3]
    (tmp_path / "train.py").write_text("import sys\ndef train():\n    print('trains', __name__, sys.argv[1:])\n")
    run = [sys.executable, FUNCTION, "train", "script", str(tmp_path / "train.py"), "--lr", "1"]
    assert subprocess.run(run, capture_output=True, text=True).stdout == "trains train ['--lr', '1']\n"
    run[2] = "tran"
    assert "There is no function 'tran'" in subprocess.run(run, capture_output=True, text=True).stderr


# --- pods -------------------------------------------------------------------------------------------------------


class Metadata(http.server.BaseHTTPRequestHandler):
    attributes = {"agent-worker-number": "1", "worker-network-endpoints": "a:u:10.0.0.2,b:u:10.0.0.3"}

    def do_GET(self) -> None:
        assert self.headers["Metadata-Flavor"] == "Google"
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.attributes[self.path.rpartition("/")[2]].encode())

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def metadata() -> Any:
    server = http.server.HTTPServer(("127.0.0.1", 0), Metadata)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield {"GCE_METADATA_HOST": f"127.0.0.1:{server.server_port}"}
    server.shutdown()
    thread.join()
    server.server_close()


def test_each_machine_of_a_pod_finds_the_others(metadata: dict[str, str]) -> None:
    variables = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3"}
    for environ in (metadata, variables):
        found = planned("--tpu", environ=environ)
        assert found.engine == "4 processes on each of 2 machines, one per TPU device"
        assert {"--nnodes=2", "--node_rank=1", "--nproc_per_node=4"} < set(found.argv)
        assert any("10.0.0.2:29500" in word for word in found.argv)
    alone = planned("--tpu", "--num_machines", "1", environ=metadata)
    assert alone.engine == "4 processes, one per TPU device"
    with pytest.raises(ValueError, match="it takes 4 on each of 2 machines"):
        planned("--tpu", "--num_processes", "2", environ=variables)


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        ("x", "variable TPU_WORKER_ID should be a whole number but is 'x'"),
        ("2", "variable TPU_WORKER_ID is 2, but TPU_WORKER_HOSTNAMES names 2 machines"),
    ],
)
def test_a_number_of_a_machine_that_cannot_be(number: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        planned("--tpu", environ={"TPU_WORKER_ID": number, "TPU_WORKER_HOSTNAMES": "10.0.0.2,10.0.0.3"})
    assert "\n" not in str(caught.value)


def commands(found: LaunchPlan) -> list[list[str]]:
    """What each machine of the pod runs."""
    return [shlex.split(words[-1]) for words in found.machines.values()]


def test_a_pod_that_is_started_from_here(tmp_path: Path) -> None:
    config = tmp_path / "pod.yaml"
    config.write_text(
        "distributed_type: XLA\ntpu_use_cluster: true\ntpu_name: pod\ntpu_zone: zone\nmixed_precision: bf16\n"
    )
    file = ["--config_file", str(config)]
    found = planned(*file, "--tpu_use_sudo", "--env", "A=b c", "--num_processes", "16")
    gcloud = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "pod", "--zone", "zone", "--worker"]
    assert found.engine == "all machines of a TPU pod, by gcloud"
    (everywhere,) = found.machines.values()
    assert everywhere[:-2] == [*gcloud, "all"]
    launch = ["accelerate", "launch", "--tpu", "--mixed_precision", "bf16"]
    assert commands(found) == [["sudo", "env", "A=b c", *launch, "--num_processes", "16", "train.py", "--lr", "1"]]

    found = planned(*file, "--num_machines", "2", "--main_process_ip", "10.0.0.2")
    assert found.engine == "2 machines of a TPU pod, by gcloud"
    for rank, (words, command) in enumerate(zip(found.machines.values(), commands(found), strict=True)):
        assert words[:-2] == [*gcloud, str(rank)]
        where = ["--num_machines", "2", "--machine_rank", str(rank), "--main_process_ip", "10.0.0.2"]
        assert command == [*launch, *where, "train.py", "--lr", "1"]
        # And what that does on the machine.
        args = launch_command_parser().parse_args(command[2:])
        there = plan(resolve(args, {}, port_in_use=lambda port: False))
        assert there.engine == "4 processes on each of 2 machines, one per TPU device"
        assert f"--node_rank={rank}" in there.argv

    found = planned("--tpu_cluster", "--vm", "first", "--vm", "second", "--tee", "3")
    assert [words[:2] for words in found.machines.values()] == [["ssh", "first"], ["ssh", "second"]]
    assert commands(found)[1][-9:-3] == ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "first"]
    assert commands(found)[0][3:5] == ["--tee", "3"]


def test_the_plan_shows_the_command_for_every_machine(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--dry_run", "--tpu_cluster"]
    done = subprocess.run([*launch, "--vm", "a", "--vm", "b", "x.py"], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0] == "Plan: 2 machines of a TPU pod, by ssh"
    for rank, name in enumerate("ab"):
        where = f"--num_machines 2 --machine_rank {rank} --main_process_ip a"
        assert lines[lines.index(f"For {name}") + 1] == f"  ssh {name} 'accelerate launch --tpu {where} x.py'"


def test_a_pod_ends_with_the_first_failure() -> None:
    fails = [sys.executable, "-c", "print('bad'); raise SystemExit(3)"]
    waits = [sys.executable, "-c", "import time; time.sleep(100)"]
    run = [sys.executable, POD, json.dumps(["one", *waits]), json.dumps(["two", *fails])]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 3 and "[two] bad\n" in done.stdout and "two ended with code 3" in done.stderr
    run = [sys.executable, POD, json.dumps(["one", sys.executable, "-c", "print('fine')"])]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout == "[one] fine\n"
