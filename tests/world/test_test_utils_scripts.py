"""The scripts of `accelerate.test_utils`, started as their users start them; and that they fail when they should."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from accelerate import debug_launcher
from accelerate.test_utils import path_in_accelerate_package
from accelerate.test_utils.scripts import test_ops as ops_script
from accelerate.test_utils.scripts.test_script import training_check
from tests.harness import run_world, world_outcomes
from tests.harness.torch_features import spreads_transformers, traces_transformers

FOLDER = path_in_accelerate_package("test_utils", "scripts")
LAUNCH = ["-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--num_processes=2", "--main_process_port=0"]
TORCHRUN = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--rdzv_backend=c10d", "--rdzv_endpoint=127.0.0.1:0"]


def start(script: str, options: list[str], prelude: str = "") -> None:
    """What `python script options` does, in a process of the harness; the prelude breaks something first."""
    exec(prelude, {})
    sys.argv = [script, *options]
    runpy.run_path(str(FOLDER / script), run_name="__main__")


def printed(processes: int, script: str, *options: str, env: dict[str, str] | None = None) -> str:
    """What the first process prints."""
    outcomes = world_outcomes(start, processes, script, list(options), env=env)
    assert all(outcome.ok for outcome in outcomes), "\n".join(outcome.reason for outcome in outcomes)
    return outcomes[0].output


def command(*words: str, folder: Path) -> str:
    """What a command prints that has to succeed."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith("ACCELERATE_")}
    environ |= {"HF_HOME": str(folder), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    run = [sys.executable, *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=200, env=environ, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# By script, how many checks pass, and how many are skipped, on one process and on two.
CHECKED = {
    "test_ops.py": ((9, 1), (10, 0)),
    "test_sync.py": ((10, 10), (19, 1)),
    "test_merge_weights.py": ((0, 1), (5, 0)),
    "test_ddp_comm_hook.py": ((0, 10), (7, 3)),
    "test_distributed_data_loop.py": ((0, 1), (11, 0)),
    "external_deps/test_metrics.py": ((12, 0), (12, 0)),
    "external_deps/test_ds_multiple_model.py": ((0, 2), (0, 2)),
    "external_deps/test_ds_alst_ulysses_sp.py": ((0, 1), (0, 1)),
    "external_deps/test_zero3_integration.py": ((0, 1), (0, 1)),
}


def counts(text: str) -> tuple[int, int]:
    return text.count(": passed"), text.lower().count("skipped, because ")


@pytest.mark.parametrize("script", CHECKED)
def test_checks_pass(script: str) -> None:
    for processes, wanted in enumerate(CHECKED[script], start=1):
        text = printed(processes, script)
        assert counts(text) == wanted, text


@pytest.mark.parametrize("seedable", [False, True])
def test_training_on_shuffled_data(seedable: bool) -> None:
    for processes in (1, 2):
        run_world(training_check, processes, seedable)


@traces_transformers
def test_stages() -> None:
    pytest.importorskip("transformers")
    assert counts(printed(2, "external_deps/test_pippy.py")) == (2, 0)


@pytest.mark.parametrize("launcher", [LAUNCH, TORCHRUN])
def test_launchers(launcher: list[str], tmp_path: Path) -> None:
    text = command(*launcher, str(FOLDER / "test_ops.py"), folder=tmp_path)
    assert counts(text) == (10, 0), text


def test_without_a_launcher(tmp_path: Path) -> None:
    text = command(str(FOLDER / "test_cli.py"), folder=tmp_path)
    assert text.startswith("Process 0 of 1 (single) sees ")
    text = command(*LAUNCH, str(FOLDER / "test_cli.py"), folder=tmp_path)
    assert all(f"Process {rank} of 2 (torchrun)" in text for rank in range(2))


def test_main_on_processes_of_a_test() -> None:
    debug_launcher(ops_script.main)


@pytest.mark.parametrize("processes", [1, 2])
def test_notebooks(processes: int) -> None:
    # Alone, as in a notebook: the script itself starts the others.
    text = printed(1, "test_notebook.py", env={"ACCELERATE_NUM_PROCESSES": str(processes)})
    assert counts(text) == ((1, 5) if processes == 1 else (6, 0)), text


@pytest.mark.parametrize("processes", [1, 2])
def test_a_training_that_is_resumed(processes: int, tmp_path: Path) -> None:
    script, output = "external_deps/test_checkpointing.py", ["--output_dir", str(tmp_path)]
    printed(processes, script, *output, "--partial_train_epoch", "1")
    assert {path.name for path in tmp_path.iterdir()} == {"epoch_0", "state_0.json"}
    resume = [*output, "--resume_from_checkpoint", str(tmp_path / "epoch_0")]
    assert "epoch 0, loaded" in printed(processes, script, *resume)

    broken = "from accelerate import Accelerator\nAccelerator.load_state = lambda *args: None"
    assert fails(processes, script, resume, broken, "the state after loading")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_training_that_is_measured(processes: int, tmp_path: Path) -> None:
    script, output = "external_deps/test_performance.py", ["--output_dir", str(tmp_path)]
    output += ["--performance_lower_bound", "0.9"]
    printed(processes, script, *output)
    assert len(json.loads((tmp_path / "all_results.json").read_text())) == 3
    script, output = "external_deps/test_peak_memory_usage.py", ["--output_dir", str(tmp_path), "--n_train", "64"]
    printed(processes, script, *output)
    assert json.loads((tmp_path / "peak_memory_utilization.json").read_text())["epoch-0"] > 50
    assert fails(processes, script, [*output, "--peak_memory_upper_bound", "1"], "", "should be at most 1")


@spreads_transformers
def test_a_spread_model(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    options = ["--tp_plan", "auto", "--tp_size", "2", "--performance_lower_bound", "0.9"]
    text = printed(2, "external_deps/test_performance.py", "--output_dir", str(tmp_path), *options)
    assert "epoch 2: accuracy" in text


def fails(processes: int, script: str, options: list[str], prelude: str, message: str) -> bool:
    """Whether the script fails, on some process, with such a message."""
    outcomes = world_outcomes(start, processes, script, options, prelude)
    assert not any(outcome.ok for outcome in outcomes), outcomes[0].output
    return any(message in outcome.message + outcome.output for outcome in outcomes)


BROKEN = {
    "functions that run on every process": (
        "test_script.py",
        "from accelerate import Accelerator\nAccelerator.on_last_process = lambda self, function: function",
        "process_execution_check",
    ),
    "samples that go to every process": (
        "test_script.py",
        "from accelerate.data_loader import BatchSamplerShard\n"
        "BatchSamplerShard.__iter__ = lambda self: iter(self.batch_sampler)",
        "the samples of an epoch were",
    ),
    "a gather that loses the last process": (
        "test_ops.py",
        "from accelerate.comm import ops, tree\nreal = ops.gather\n"
        "ops.gather = lambda data: tree.recursively_apply(lambda one: one[: len(one) // 2], real(data))",
        "gather: tensor([1., 2., 3., 4.])",
    ),
    "a broadcast from the wrong process": (
        "test_ops.py",
        "from accelerate.comm import ops\nreal = ops.broadcast\n"
        "ops.broadcast = lambda data, from_process=0: real(data, 0)",
        "broadcast from 1",
    ),
    "a debug mode that says nothing": (
        "test_ops.py",
        "from accelerate.comm.checked import Checked\nChecked.verify = lambda self, operation, data: None",
        "DistributedOperationException",
    ),
    "gradients that come together too early": (
        "test_sync.py",
        "import contextlib\nfrom accelerate import Accelerator\n"
        "Accelerator.no_sync = lambda self, model: contextlib.nullcontext()",
        "the gradients are the same",
    ),
    "an optimizer that does not wait": (
        "test_sync.py",
        "from accelerate.scheduler import AcceleratedScheduler\n"
        "AcceleratedScheduler.step = lambda self, *args: self.scheduler.step()",
        "the learning rate",
    ),
    "a loader that gives some samples twice": (
        "external_deps/test_metrics.py",
        "from accelerate import Accelerator\nAccelerator.gather_for_metrics = Accelerator.gather",
        "on one process",
    ),
    "batches that are not evened out": (
        "test_distributed_data_loop.py",
        "from accelerate import Accelerator, data_loader\nreal = Accelerator.prepare\n"
        "def prepare(self, *parts):\n"
        "    prepared = real(self, *parts)\n"
        "    if hasattr(getattr(prepared, 'batch_sampler', None), 'even_batches'):\n"
        "        prepared.batch_sampler.even_batches = False\n"
        "    return prepared\n"
        "Accelerator.prepare = prepare",
        "the sizes of the batches",
    ),
    "shards that are merged in the wrong order": (
        "test_merge_weights.py",
        "from accelerate.checkpoint import sharded_state\nimport safetensors.torch as files\nreal = files.load_file\n"
        "files.load_file = lambda path: {name: value.flip(0) for name, value in real(path).items()}",
        "is different",
    ),
    "a hook that is left out": (
        "test_ddp_comm_hook.py",
        "from accelerate.utils import DistributedDataParallelKwargs as Settings\n"
        "Settings.register_comm_hook = lambda self, model: None",
        "did not travel",
    ),
    "a model that does not learn": (
        "external_deps/test_performance.py",
        "from accelerate.optimizer import AcceleratedOptimizer\n"
        "AcceleratedOptimizer.step = lambda self, closure=None: None",
        "the best accuracy",
    ),
    "a precision that nobody knows": (
        "test_cli.py",
        "import os\nos.environ['ACCELERATE_MIXED_PRECISION'] = 'fp7'",
        "mixed precision 'fp7'",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_checks_fail(what: str) -> None:
    script, prelude, message = BROKEN[what]
    options = ["--performance_lower_bound", "0.9"] if "performance" in script else []
    assert fails(2, script, options, prelude, message)


def test_restarts_that_are_not_made() -> None:
    prelude = (
        "import os\nos.environ['ACCELERATE_NUM_PROCESSES'] = '2'\nfrom accelerate import launchers\n"
        "real = launchers.notebook_launcher\n"
        "launchers.notebook_launcher = lambda *args, max_restarts=0, **kwargs: real(*args, **kwargs)"
    )
    assert fails(1, "test_notebook.py", [], prelude, "more attempts")
