import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

from accelerate.config.accumulation import GradientAccumulationPlugin
from accelerate.config.data import DataLoaderConfiguration
from accelerate.config.dynamo import TorchDynamoPlugin
from accelerate.config.enums import DynamoBackend
from accelerate.config.environment import patch_environment
from accelerate.config.project import ProjectConfiguration


def test_settings_import_no_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, accelerate.config as c\n"
        "for m in pkgutil.iter_modules(c.__path__): importlib.import_module('accelerate.config.' + m.name)\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_accumulation() -> None:
    assert GradientAccumulationPlugin(num_steps=3).to_kwargs() == {"num_steps": 3}


def test_loader_fields_can_be_assigned() -> None:
    configuration = DataLoaderConfiguration()
    configuration.dispatch_batches = True
    configuration.data_seed = 3
    assert configuration == DataLoaderConfiguration(dispatch_batches=True, data_seed=3)


def test_project_folders() -> None:
    project = ProjectConfiguration("a")
    assert (project.project_dir, project.logging_dir) == ("a", "a")
    project.set_directories("b")
    assert (project.project_dir, project.logging_dir) == ("b", "a")
    assert ProjectConfiguration(Path("a"), logging_dir="l").logging_dir == "l"
    late = ProjectConfiguration()
    assert late.logging_dir is None
    late.set_directories("c")
    assert late.logging_dir == "c"


@pytest.mark.parametrize(
    ("limit", "kind", "sentence"),
    [
        ("3", TypeError, "total_limit is '3', a str: pass the number of checkpoints to keep, or None to keep all."),
        (2.0, TypeError, "total_limit is 2.0, a float: pass the number of checkpoints to keep, or None to keep all."),
        (
            0,
            ValueError,
            "total_limit is 0, and the newest checkpoint is always kept: pass 1 to keep only that one",
        ),
        (-1, ValueError, "total_limit is -1, and the newest checkpoint is always kept: pass 1 to keep only that one"),
    ],
)
def test_a_limit_of_checkpoints_that_cannot_be_is_refused_at_once(limit: Any, kind: type, sentence: str) -> None:
    with pytest.raises(kind) as refused:
        ProjectConfiguration("a", total_limit=limit)
    assert str(refused.value).startswith(sentence)


def test_a_limit_of_checkpoints_is_any_whole_number_from_one_on() -> None:
    for limit in (None, 1, numpy.int64(3)):
        assert ProjectConfiguration("a", total_limit=limit).total_limit == limit


@pytest.mark.parametrize("wrong", [3, b"runs", ["runs"]])
def test_a_folder_of_a_project_that_is_no_path_is_refused(wrong: Any) -> None:
    with pytest.raises(TypeError) as refused:
        ProjectConfiguration(wrong)
    kind = {int: "an int", bytes: "a bytes", list: "a list"}[type(wrong)]
    assert (
        str(refused.value)
        == f"project_dir is {wrong!r}, {kind}: pass a path, as a str or a Path, or None for no folder."
    )
    with pytest.raises(TypeError, match="logging_dir is "):
        ProjectConfiguration("a", logging_dir=wrong)
    project = ProjectConfiguration("a")
    with pytest.raises(TypeError, match="project_dir is "):
        project.set_directories(wrong)
    assert (project.project_dir, project.logging_dir) == ("a", "a")


def test_dynamo_defaults() -> None:
    plugin = TorchDynamoPlugin()
    assert plugin.backend is DynamoBackend.NO
    assert (plugin.mode, plugin.fullgraph, plugin.dynamic) == ("default", False, None)
    assert plugin.to_kwargs() == {}


def test_dynamo_reads_the_environment() -> None:
    with patch_environment(
        accelerate_dynamo_backend="inductor",
        accelerate_dynamo_mode="reduce-overhead",
        accelerate_dynamo_use_fullgraph="true",
        accelerate_dynamo_use_dynamic="0",
        accelerate_dynamo_use_regional_compilation="1",
    ):
        plugin = TorchDynamoPlugin()
        assert TorchDynamoPlugin(backend="eager", mode="default").to_kwargs() == {
            "backend": "eager",
            "fullgraph": True,
            "dynamic": False,
        }
        # Inside, too: what came from the environment is passed on.
        assert plugin.to_kwargs() == {
            "backend": "inductor",
            "mode": "reduce-overhead",
            "fullgraph": True,
            "dynamic": False,
        }
    assert plugin.use_regional_compilation is True
    assert plugin.to_dict()["backend"] == "inductor"


def test_unknown_compiler() -> None:
    with pytest.raises(ValueError, match="'bogus': choose one of no, eager"):
        TorchDynamoPlugin(backend="bogus")
