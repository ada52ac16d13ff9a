"""What type checkers know: mypy, and basedpyright, which is what editors with a language server ask."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import accelerate

ROOT = Path(__file__).resolve().parents[2]
BASEDPYRIGHT = Path(os.environ.get("BASEDPYRIGHT", ROOT / ".venv-editors" / "bin" / "basedpyright")).absolute()
# What is called on an Accelerator, and the type of what comes back.
REVEALED = {
    "prepare(model)": "Linear",
    "prepare(model, optimizer)": "tuple[Linear, SGD]",
    "prepare(model, optimizer, loader)": "tuple[Linear, SGD, DataLoader[Tensor]]",
    "prepare(loader, scheduler, None, 1)": "tuple[DataLoader[Tensor], LRScheduler, None, int]",
    "prepare(model, optimizer, model, model, model)": "tuple[Linear, SGD, Linear, Linear, Linear]",
    "prepare(model, optimizer, model, model, model, model)": "tuple[Linear, SGD, Linear, Linear, Linear, Linear]",
    "prepare(model, optimizer, model, optimizer, model, optimizer, model)": "Any",
    "prepare_model(model)": "Linear",
    "unwrap_model(model)": "Linear",
    "gather({'a': torch.ones(1)})": "dict[str, Tensor]",
}
MISTAKES = (
    "from accelerate import Acelerator",
    "from accelerate.utils import gathr",
    "from accelerate.utils.operations import brodcast",
    "from accelerate.big_modeling import init_empty_weight",
    "accelerator.prepar(model)",
    "Accelerator(gradient_acumulation_steps=2)",
    "accelerate.utils.set_sed(1)",
)
SCRIPT = """\
import accelerate
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import gather, set_seed, tqdm
from accelerate.utils.constants import SUPPORTED_PYTORCH_LAYERS_FOR_UPCASTING


def use(model: torch.nn.Linear, optimizer: torch.optim.SGD, loader: DataLoader[torch.Tensor], scheduler: LRScheduler):
    accelerator = Accelerator(gradient_accumulation_steps=2)
    accelerate.utils.set_seed(accelerate.state.PartialState().process_index)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    place = tmp_path / "script.py"
    lines = [f"reveal_type(accelerator.{line})" for line in REVEALED] + list(MISTAKES)
    place.write_text(SCRIPT + "".join(f"    {line}\n" for line in lines))
    return place


def plain(revealed: str) -> str:
    """A type without the modules of its names."""
    return re.sub(r"(?:\w+\.)+(\w+)", r"\1", revealed)


def expected_lines() -> tuple[int, int]:
    first = len(SCRIPT.splitlines()) + 1
    return first, first + len(REVEALED)


def check(revealed: dict[int, str], errors: set[int]) -> None:
    first, mistakes = expected_lines()
    assert [plain(revealed[first + number]) for number in range(len(REVEALED))] == list(REVEALED.values())
    assert errors == set(range(mistakes, mistakes + len(MISTAKES)))


def test_mypy(script: Path) -> None:
    command = [sys.executable, "-m", "mypy", "--no-color-output", "--no-pretty", str(script)]
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True)
    notes = re.findall(r'script\.py:(\d+): note: Revealed type is "(.*)"', done.stdout)
    errors = re.findall(r"script\.py:(\d+): error: ", done.stdout)
    assert notes, done.stdout + done.stderr
    # A function without types in its signature would not be looked into, and `use` has none for what it returns.
    check({int(line): text for line, text in notes}, {int(line) for line in errors} - {_line_of("def use")})


def test_basedpyright(script: Path) -> None:
    (script.parent / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    answer = basedpyright("--project", str(script.parent), "--outputjson")
    notes, errors = {}, set()
    for found in answer["generalDiagnostics"]:
        line = found["range"]["start"]["line"] + 1
        if found["severity"] == "error":
            errors.add(line)
        elif match := re.search(r'is "(.*)"$', found["message"]):
            notes[line] = match[1]
    check(notes, errors)


def test_types_are_complete() -> None:
    answer = basedpyright("--verifytypes", "accelerate", "--ignoreexternal", "--outputjson")["typeCompleteness"]
    assert Path(answer["pyTypedPath"]).parent == Path(accelerate.__file__).parent
    known = {symbol["name"]: symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"] for symbol in answer["symbols"]}
    unknown = "\n".join(name for name, is_known in known.items() if not is_known)
    assert answer["completenessScore"] >= 0.95, f"Give these a type:\n{unknown}"
    assert known["accelerate.Accelerator"] and known["accelerate.PartialState"], unknown


def basedpyright(*arguments: str) -> Any:
    if not BASEDPYRIGHT.exists():
        pytest.skip(f"{BASEDPYRIGHT} is not there: `make editors` installs it")
    done = subprocess.run([str(BASEDPYRIGHT), *arguments], env=_environment(), capture_output=True, text=True)
    assert done.stdout.lstrip().startswith("{"), done.stdout + done.stderr
    return json.loads(done.stdout)


def _environment() -> dict[str, str]:
    """With the Python of the tests first on the path: its packages are those that a checker sees."""
    return {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def _line_of(start: str) -> int:
    return next(number for number, line in enumerate(SCRIPT.splitlines(), 1) if line.startswith(start))
