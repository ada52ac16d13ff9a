import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import pytest

import accelerate
import accelerate.utils
from accelerate import machine, modules, text

PUBLIC = [accelerate, accelerate.utils]


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_something_behind_it(package: ModuleType) -> None:
    assert package.__all__ == sorted(package.__all__)
    for name in package.__all__:
        assert getattr(package, name) is not None, name
        assert name in dir(package)


@pytest.mark.parametrize("package", PUBLIC)
def test_unknown_names(package: ModuleType) -> None:
    assert not hasattr(package, "no_such_name")
    with pytest.raises(AttributeError, match="no_such_name"):
        package.no_such_name  # noqa: B018


def test_submodules_list_only_what_they_have() -> None:
    for module in pkgutil.iter_modules(accelerate.utils.__path__):
        loaded = importlib.import_module(f"accelerate.utils.{module.name}")
        for name in loaded.__all__:
            assert getattr(loaded, name) is not None, f"{module.name}.{name}"


def test_importing_costs_no_torch() -> None:
    code = (
        "import sys, accelerate, accelerate.utils, accelerate.logging\n"
        "from accelerate.utils import ProjectConfiguration, is_rich_available, tqdm, patch_environment\n"
        "print('torch' in sys.modules)"
    )
    assert python(code) == "False"


def test_submodules_are_reached_without_importing_them() -> None:
    assert python("import accelerate; print(accelerate.state.PartialState.__name__)") == "PartialState"
    assert python("import accelerate; print(accelerate.utils.memory.release_memory())") == "[]"


def test_a_missing_dependency_is_not_taken_for_a_missing_name() -> None:
    code = (
        "import sys, accelerate\nsys.modules['torch'] = None\n"
        "try: accelerate.state\nexcept ModuleNotFoundError as error: print(error.name)"
    )
    assert python(code) == "torch"


def test_tqdm_stays_a_function() -> None:
    code = "import accelerate.utils.tqdm; from accelerate.utils import tqdm; print(callable(tqdm))"
    assert python(code) == "True"
    assert python("from accelerate.utils import tqdm; print(callable(tqdm))") == "True"
    assert python("from accelerate.utils.tqdm import tqdm; print(callable(tqdm))") == "True"


def test_collectives_know_about_the_processes() -> None:
    assert python("import sys; from accelerate.utils import gather; print('accelerate.state' in sys.modules)") == "True"


def test_text() -> None:
    assert [text.convert_bytes(n) for n in (0, 1023, 1024, 1500, 3.5 * 1024**2)] == [
        "0 bytes",
        "1023 bytes",
        "1.0 KB",
        "1.46 KB",
        "3.5 MB",
    ]
    assert text.convert_bytes(1024**6) == "1024.0 PB"
    assert text.get_pretty_name(text.merge_dicts) == "merge_dicts"
    assert text.get_pretty_name(3) == "int"
    destination = {"a": {"d": 3}, "c": {"x": 1}}
    assert text.merge_dicts({"a": {"b": 1}, "c": 2}, destination) is destination
    assert destination == {"a": {"d": 3, "b": 1}, "c": 2}
    assert text.recursive_getattr(text, "convert_bytes.__name__") == "convert_bytes"


def test_ports() -> None:
    import socket

    port = machine.get_free_port()
    assert not machine.is_port_in_use(port)
    with socket.create_server(("localhost", port)):
        assert machine.is_port_in_use(port)


@pytest.mark.parametrize(("release", "warned"), [("5.4.0-generic", True), ("5.5.0", False), ("6.1", False)])
def test_old_kernels(
    release: str, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("platform.release", lambda: release)
    machine.check_os_kernel()
    assert bool(caplog.messages) is warned


def test_modules() -> None:
    from torch import nn

    model = nn.Sequential(nn.ReLU(), nn.Sequential(nn.Tanh()))
    assert [name for name, _ in modules.get_module_children_bottom_up(model, return_fqns=True)] == [
        "0",
        "1.0",
        "1",
        "",
    ]
    assert modules.get_module_children_bottom_up(model)[-1] is model
    assert modules.get_module_class_from_name(model, "Tanh") is nn.Tanh
    assert modules.get_module_class_from_name(model, "GELU") is None
    assert not modules.model_has_dtensor(model)
    assert modules.get_model_tp_size(model) is None
    model.tp_size = 4
    assert modules.get_model_tp_size(model) == 4
    assert modules.is_peft_model(model) is False


def test_layers_constant() -> None:
    from torch import nn

    from accelerate.utils.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING

    assert nn.Linear in SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING
