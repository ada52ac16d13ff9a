"""The wheel in an environment that has nothing of this checkout: what a user gets.

Only torch is not installed again: the environment sees the one of the tests.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """\
import torch
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(1, 1)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
accelerator.backward(model(torch.ones(1, 1)).sum())
optimizer.step()
accelerator.print(accelerator.num_processes, "trained")
accelerator.end_training()
"""


def run(*command: str | Path, cwd: Path) -> str:
    """What a program prints, without what this checkout would tell it."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run("make", "wheel", f"WHEELS={folder}", f"BIN={Path(sys.executable).parent}", cwd=ROOT)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the programs of a new environment."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env", cwd=folder)
    python = folder / "env" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip())
    shared = folder / "shared"
    shared.mkdir()
    for part in Path(sysconfig.get_path("purelib")).iterdir():
        if part.name in ("torch", "torchgen", "functorch") or part.name.startswith("torch-"):
            (shared / part.name).symlink_to(part)
    (site / "shared.pth").write_text(f"{shared}\n")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python)
    run(*pip, "install", "--quiet", "-c", ROOT / "constraints.txt", wheel, cwd=folder)
    return python.parent


def test_the_wheel_has_the_package_and_its_stubs(wheel: Path) -> None:
    source = ROOT / "src"
    wanted = {
        str(path.relative_to(source))
        for path in (source / "accelerate").rglob("*")
        if path.suffix in (".py", ".pyi") or path.parent.name == "web"
    }
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == wanted | {"accelerate/py.typed"}


def test_the_programs_start(environment: Path, tmp_path: Path) -> None:
    line = run(environment / "accelerate", "--version", cwd=tmp_path)
    assert line.startswith("accelerate ") and ", torch " in line
    assert run(environment / "python", "-m", "accelerate", "--version", cwd=tmp_path) == line
    assert "usage: accelerate launch" in run(environment / "accelerate-launch", "--help", cwd=tmp_path)


def test_every_public_name_is_there(environment: Path, tmp_path: Path) -> None:
    code = (
        "import accelerate, accelerate.utils\n"
        "assert 'site-packages' in accelerate.__file__, accelerate.__file__\n"
        "for module in (accelerate, accelerate.utils):\n"
        "    for name in module.__all__: getattr(module, name)\n"
        "print(len(accelerate.__all__))"
    )
    assert int(run(environment / "python", "-c", code, cwd=tmp_path)) > 20


def test_a_script_is_trained(environment: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [environment / "accelerate", "launch", "--cpu", "--num_processes", "2"]
    assert run(environment / "python", "train.py", cwd=tmp_path) == "1 trained\n"
    assert run(*launch, "train.py", cwd=tmp_path) == "2 trained\n"
