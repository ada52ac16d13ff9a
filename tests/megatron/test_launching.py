"""`accelerate launch --use_megatron_lm` starts a training whose script knows nothing of a plugin."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--cpu", "--use_megatron_lm"]

SCRIPT = """
import json, pathlib, sys
from tests.megatron import on_cpu, training
on_cpu.install()
from accelerate import Accelerator

accelerator = Accelerator()
plugin = accelerator.state.megatron_lm_plugin
net, optimizer, loader = accelerator.prepare(*training.objects(accelerator, plugin.num_micro_batches))
losses = [net(**batch).loss.item() for batch, _ in zip(loader, range(3))]
if accelerator.is_main_process:
    told = [accelerator.distributed_type.value, plugin.tp_degree, plugin.pp_degree, plugin.gradient_clipping]
    pathlib.Path(sys.argv[1]).write_text(json.dumps([told, losses]))
accelerator.end_training()
"""


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(SCRIPT)
    path = os.pathsep.join([str(folder), str(ROOT / "src"), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": path, "HF_HOME": "/nonexistent", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=200)


def launched(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return run(folder, *LAUNCH, "--main_process_port", "0", *words, "script.py", "said")


def test_a_script_without_a_plugin(tmp_path: Path) -> None:
    words = ["--num_processes", "2", "--megatron_lm_pp_degree", "2", "--megatron_lm_num_micro_batches", "2"]
    result = launched(tmp_path, *words, "--megatron_lm_gradient_clipping", "0.5")
    assert result.returncode == 0, result.stderr
    told, losses = json.loads((tmp_path / "said").read_text())
    assert told == ["MEGATRON_LM", 1, 2, 0.5]
    assert losses == sorted(losses, reverse=True) and len(losses) == 3


def test_processes_that_do_not_fit(tmp_path: Path) -> None:
    result = launched(tmp_path, "--num_processes", "3", "--megatron_lm_tp_degree", "2")
    assert result.returncode != 0
    assert "take a multiple of 2 processes, but there are 3" in result.stderr
    assert "Traceback" not in result.stderr
    planned = launched(tmp_path, "--num_processes", "3", "--megatron_lm_tp_degree", "2", "--dry_run")
    assert planned.returncode == 0, planned.stderr
    assert "take a multiple of 2 processes, but there are 3" in " ".join(planned.stdout.split())


ALONE = """
from accelerate import Accelerator
from accelerate.utils import MegatronLMPlugin

Accelerator(cpu=True, megatron_lm_plugin=MegatronLMPlugin())
"""


def test_megatron_core_that_is_not_installed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['megatron'] = None\n")
    result = launched(tmp_path, "--num_processes", "2")
    assert result.returncode != 0
    assert result.stderr == "accelerate launch: `--use_megatron_lm` needs Megatron-LM: pip install megatron-core\n"
    alone = run(tmp_path, sys.executable, "-c", ALONE)
    last = "ImportError: Megatron-LM was requested but is not installed: pip install megatron-core"
    assert alone.stderr.splitlines()[-1] == last


def test_a_machine_without_gpus(tmp_path: Path) -> None:
    alone = run(tmp_path, sys.executable, "-c", ALONE)
    said = "Megatron-LM runs on GPUs that are devices of `torch.cuda`, but rank 0 is on cpu: start it on such GPUs"
    assert said in alone.stderr.splitlines()[-1]


def test_megatron_core_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "__init__.py").touch()
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("raise RuntimeError('made for another torch')\n")
    alone = run(tmp_path, sys.executable, "-c", ALONE)
    said = (
        "ImportError: megatron-core is installed but cannot be imported (RuntimeError: made for another torch): install"
    )
    assert alone.stderr.splitlines()[-1].startswith(said)
