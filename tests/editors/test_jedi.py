"""What jedi knows, which completes in IPython, notebooks and many editors."""

from __future__ import annotations

import inspect
from pathlib import Path
from types import ModuleType

import jedi
import pytest
from jedi.api.environment import InterpreterEnvironment

import accelerate
import accelerate.big_modeling
import accelerate.utils
from accelerate import Accelerator

SOURCE = Path(accelerate.__file__).parent


def script(code: str) -> jedi.Script:
    return jedi.Script(code, environment=InterpreterEnvironment(), project=jedi.Project(str(SOURCE.parent)))


def offered(code: str) -> set[str]:
    return {completion.name for completion in script(code).complete()}


def public(kind: type) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def test_everything_an_accelerator_has_is_offered() -> None:
    names = offered("from accelerate import Accelerator\nAccelerator().")
    assert public(Accelerator) <= names
    assert {"state", "gradient_state", "device", "project_configuration"} <= names, "attributes, too"


@pytest.mark.parametrize("module", [accelerate, accelerate.utils, accelerate.big_modeling, accelerate.utils.modeling])
def test_names_are_offered(module: ModuleType) -> None:
    assert set(module.__all__) <= offered(f"from {module.__name__} import ")
    assert set(module.__all__) <= offered(f"import {module.__name__}\n{module.__name__}.")


def test_submodules_are_offered() -> None:
    assert {"utils", "state", "tracking", "big_modeling"} <= offered("import accelerate\naccelerate.")
    assert {"PartialState", "AcceleratorState"} <= offered("import accelerate\naccelerate.state.")


@pytest.mark.parametrize("module", [accelerate, accelerate.utils])
def test_every_name_leads_to_its_definition(module: ModuleType) -> None:
    start = f"from {module.__name__} import "
    asked = script("".join(f"{start}{name}\n" for name in module.__all__))
    for line, name in enumerate(module.__all__, 1):
        (found,) = asked.goto(line, len(start), follow_imports=True)
        place = found.module_path
        assert place is not None and SOURCE in place.parents and place.suffix == ".py", f"{name}: {place}"
        assert found.line is not None and name in place.read_text().splitlines()[found.line - 1], name


def test_signatures_and_documents() -> None:
    (made,) = script("from accelerate import Accelerator\nAccelerator(").get_signatures()
    assert [parameter.name for parameter in made.params] == list(inspect.signature(Accelerator).parameters)
    prepared = script("from accelerate import Accelerator\nAccelerator().prepare(").get_signatures()
    assert len(prepared) == 7, "one for each number of objects up to six, and one for more"
    (called,) = script("from accelerate.utils import set_seed\nset_seed(").get_signatures()
    assert [parameter.name for parameter in called.params] == ["seed", "device_specific", "deterministic"]
    for code, kind in (
        ("from accelerate import Accelerator\nAccelerator", Accelerator),
        ("from accelerate import Accelerator\nAccelerator().backward", Accelerator.backward),
        ("from accelerate.utils import gather\ngather", accelerate.utils.gather),
    ):
        line = code.splitlines()[1]
        (found,) = script(code).help(2, len(line))
        assert (inspect.getdoc(kind) or "nothing").splitlines()[0] in found.docstring()


def test_what_is_prepared_keeps_its_type() -> None:
    code = (
        "import torch\nfrom accelerate import Accelerator\n"
        "model, optimizer = Accelerator().prepare(torch.nn.Linear(1, 1), torch.optim.SGD([]))\n"
    )
    assert [name.full_name for name in script(code + "model").infer(4, 1)] == ["torch.nn.modules.linear.Linear"]
    assert {"in_features", "state_dict"} <= offered(code + "model.")
    assert {"step", "zero_grad"} <= offered(code + "optimizer.")
