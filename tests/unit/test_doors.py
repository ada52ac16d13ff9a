"""Names that scripts reach through public modules, and what they assign there."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from unittest import mock

import pytest
import torch

import accelerate
from accelerate import hooks as own_hooks
from accelerate.config.dynamo import TorchDynamoPlugin
from accelerate.data_loader.prepare import prepare_data_loader


def test_names_that_packages_import_resolve() -> None:
    assert accelerate.accelerator.torch is torch
    assert accelerate.accelerator.TorchDynamoPlugin is TorchDynamoPlugin
    assert accelerate.accelerator.prepare_data_loader is prepare_data_loader
    assert accelerate.big_modeling.infer_auto_device_map is accelerate.infer_auto_device_map
    assert accelerate.utils.launch.which("python3") is not None
    assert accelerate.hooks is own_hooks
    assert accelerate.utils.modeling.logger.logger.name == "accelerate.utils.modeling"
    assert "to" in accelerate.hooks._accelerate_added_attributes


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"accelerate\.accelerator.*no_such_name"):
        accelerate.accelerator.no_such_name  # noqa: B018
    with pytest.raises(ImportError):
        from accelerate.state import no_such_name  # noqa: F401
    assert not hasattr(accelerate, "json"), "the package itself has the names of the release alone"


def test_submodules_of_a_public_package_resolve() -> None:
    code = "import accelerate.commands as c; print(c.config.__name__, c.launch.__name__)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["accelerate.commands.config", "accelerate.commands.launch"]


def test_a_door_imports_nothing_before_it_is_used() -> None:
    code = "import sys, accelerate.utils.launch; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_replacing_what_is_not_used_there_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match=r"accelerate\.accelerator\.get_grad_scaler was replaced"):
        monkeypatch.setattr("accelerate.accelerator.get_grad_scaler", lambda: "another")
    assert accelerate.accelerator.get_grad_scaler() == "another"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        monkeypatch.undo()
        accelerate.accelerator.get_grad_scaler = None  # type: ignore[attr-defined]
        del accelerate.accelerator.get_grad_scaler


def test_replacing_a_module_s_own_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.accelerator.Accelerator", object)
    monkeypatch.setattr("accelerate.optimizer.recursively_apply", lambda *args: None)  # read by functions there
    monkeypatch.setattr("accelerate.utils.gather", None)  # in no release does anything but scripts read it there
    monkeypatch.setattr("accelerate.accelerator.something_new", 1, raising=False)


def test_a_replaced_function_is_put_back() -> None:
    tools = importlib.import_module("accelerate.strategies.fsdp_tools")
    own = accelerate.accelerator.fsdp2_prepare_model
    with mock.patch("accelerate.accelerator.fsdp2_prepare_model") as other:
        assert tools.fsdp2_prepare_model is other
        assert accelerate.accelerator.fsdp2_prepare_model is other
    assert tools.fsdp2_prepare_model is own
