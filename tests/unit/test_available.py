import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import parse

from accelerate import available
from accelerate.available import deepspeed_required, torchao_required
from accelerate.versions import compare_versions, is_torch_version


def test_installed_packages_are_found_without_importing_them() -> None:
    code = (
        "import sys; from accelerate import available as a\n"
        "assert a.is_tqdm_available() and a.is_pytest_available() and a.is_torchdata_available()\n"
        "assert not a.is_clearml_available()\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'tqdm', 'pytest', 'torchdata')))"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_folder_of_logs_is_no_package(tmp_path: Path) -> None:
    (tmp_path / "clearml").mkdir()
    code = "import sys; from accelerate.available import is_clearml_available as f; sys.exit(f())"
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 0
    (tmp_path / "clearml" / "__init__.py").touch()
    assert subprocess.run([sys.executable, "-c", code], cwd=tmp_path).returncode == 1


def test_every_probe_answers_yes_or_no() -> None:
    probes = [name for name in dir(available) if name.startswith("is_") and name.endswith("_available")]
    assert len(probes) > 50
    assert {type(getattr(available, name)()) for name in probes} == {bool}


def test_versions_matter() -> None:
    assert available.is_numpy_available("1.0") is True
    assert available.is_numpy_available("99.0") is False
    assert available.is_torchdata_stateful_dataloader_available() is True
    assert available.is_bnb_available("0.1") is False


def test_rich_is_used_only_when_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert available.is_rich_available() is False
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    assert available.is_rich_available() is True


def test_looking_for_cuda_leaves_the_environment_alone() -> None:
    available.is_cuda_available.cache_clear()
    before = dict(os.environ)
    assert available.is_cuda_available() in (True, False)
    assert dict(os.environ) == before


def test_xla_on_two_kinds_of_devices_at_once() -> None:
    with pytest.raises(AssertionError, match="not for both"):
        available.is_torch_xla_available(check_is_tpu=True, check_is_gpu=True)


def test_torchao_guard() -> None:
    @torchao_required
    def convert() -> int:
        return 3

    if available.is_torchao_available():
        assert convert() == 3
    else:
        with pytest.raises(ImportError, match=r"`convert` needs torchao.*pip install torchao"):
            convert()


def test_deepspeed_guard() -> None:
    from accelerate.state import AcceleratorState

    @deepspeed_required
    def partition() -> int:
        return 3

    assert partition() == 3
    AcceleratorState(cpu=True, _from_accelerator=True)
    with pytest.raises(ValueError, match=r"`partition` needs DeepSpeed.*runs as NO"):
        partition()


def test_comparing_versions() -> None:
    installed = importlib.metadata.version("torch")
    assert is_torch_version("==", installed)
    assert compare_versions("torch", ">=", "1.0")
    assert not compare_versions(parse("1.2.dev0"), ">=", "1.2")
    with pytest.raises(ValueError, match=r"'=>'.*>="):
        compare_versions("torch", "=>", "1.0")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        compare_versions("no_such_package", ">", "1.0")
