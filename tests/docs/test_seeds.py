"""The snippets in `seeds/snippets.txt` run as they stand there.

`accelerate config` and `accelerate test` have tests of their own among those of the command line; launches are planned
here, not started (many of them ask for GPUs). `log_with` (trackers) is passed as None.

Models that would be downloaded are replaced by a small stand-in for `transformers`.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.docs.runner import PLAIN_PROCESS
from tests.harness import run_world

DOCUMENT = (Path(__file__).parent / "seeds" / "snippets.txt").read_text(encoding="utf-8")
SNIPPETS = dict(re.findall(r"^### ([^\n]+)\n\n```python\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE))
(COMMANDS,) = re.findall(r"^```shell\n(.*?)^```$", DOCUMENT, re.DOTALL | re.MULTILINE)

# What cannot be meant as it is written: (as written, as meant).
CORRECTIONS = {
    # The object is called `accelerator` in these two; `accelerate` is not even imported.
    "a loop with the device by hand": ("accelerate.", "accelerator."),
    "a loop with the device by itself": ("accelerate.", "accelerator."),
    # An arrow at the line in question.
    "random numbers before a save": ("<<<", ""),
    "random numbers after a load": ("<<<", ""),
    # A colon at the end of an assignment.
    "autocast": ("target):", "target)"),
    "mixed precision as a diff": ("target):", "target)"),
    # The objects are assigned in `main`, so they would have to be made in it too.
    "a script with main": (
        "def main():\n",
        "def main():\n    global model, optimizer, training_dataloader, scheduler\n",
    ),
}


@dataclass
class Output:
    loss: torch.Tensor


class Model(nn.Module):
    """Answers to `model(inputs)`, and to `model(**batch)` with an object that has a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        logits = self.linear(inputs)
        return logits if labels is None else Output(nn.functional.cross_entropy(logits, labels))

    def save_pretrained(self, folder: str, is_main_process: bool, save_function: Any) -> None:
        if is_main_process:
            os.makedirs(folder)
            save_function(self.state_dict(), f"{folder}/model.bin")

    @classmethod
    def from_pretrained(cls, name: str, **kwargs: Any) -> Model:
        model = cls()
        if os.path.isdir(name):
            model.load_state_dict(torch.load(f"{name}/model.bin"))
        return model


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """The same samples as dicts."""

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        inputs, labels = self.dataset[index]
        return {"inputs": inputs, "labels": labels}


class Metric:
    def __init__(self) -> None:
        self.samples = 0

    def add_batch(self, predictions: torch.Tensor, targets: torch.Tensor) -> None:
        assert len(predictions) == len(targets)
        self.samples += len(targets)


def transformers_stand_in() -> types.ModuleType:
    module = types.ModuleType("transformers")
    module.AdamW = torch.optim.AdamW  # type: ignore[attr-defined]
    module.AutoModel = module.AutoModelForSequenceClassification = Model  # type: ignore[attr-defined]

    def get_scheduler(name: str, optimizer: Any, num_warmup_steps: int, num_training_steps: int) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=num_training_steps)

    module.get_scheduler = get_scheduler  # type: ignore[attr-defined]
    return module


def objects(rows: bool) -> dict[str, Any]:
    """What a reader has in a script already: everything under the names that the documents give it."""
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(14, 3), torch.randint(2, (14,)))
    source: Any = Rows(dataset) if rows else dataset
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=100)
    loss = nn.functional.cross_entropy
    done: list[str] = []

    def note(what: str) -> Any:
        return lambda: done.append(what)

    found: dict[str, Any] = {
        "args": types.SimpleNamespace(
            gradient_accumulation_steps=2, mixed_precision="no", report_to=None, max_train_steps=3
        ),
        "accelerator_project_config": None,
        "checkpoint": "a name on a hub",
        "clip_value": 0.5,
        "device": torch.device("cpu"),
        "done": done,
        "global_step": 3,
        "max_grad_norm": 1.0,
        "metric": Metric(),
        "num_epochs": 2,
        "os": os,
        "outputs": torch.randn(4, 2),
        "progress_bar": types.SimpleNamespace(update=lambda count: None),
        "repo": types.SimpleNamespace(push_to_hub=note("push_to_hub")),
        "save_directory": ".",
        "target": torch.randint(2, (4,)),
        "torch": torch,
        "training_function": note("trained"),
        "tqdm": lambda iterable: types.SimpleNamespace(update=lambda count: None),
    }
    found |= dict.fromkeys(("model", "my_model"), model)
    found |= dict.fromkeys(("optimizer", "my_optimizer"), optimizer)
    found |= dict.fromkeys(("scheduler", "lr_scheduler"), scheduler)
    found |= dict.fromkeys(("loss_function", "loss_func", "complex_loss_function", "my_loss_function"), loss)
    for name in ("dataloader", "train_dataloader", "training_dataloader", "my_training_dataloader"):
        found[name] = DataLoader(source, batch_size=2, shuffle=True)
    for name in ("eval_dataloader", "validation_dataloader"):
        found[name] = DataLoader(source, batch_size=4)
    for name in ("once_per_server", "once", "on_index_zero", "on_index_zero_on_each_server"):
        found[f"do_thing_{name}"] = note(name)
    return found


def as_meant(name: str) -> str:
    """A snippet as a reader would type it."""
    code = SNIPPETS[name].expandtabs(8)
    lines = code.splitlines()
    if any(line.startswith("+ ") for line in lines):
        kept = [line for line in lines if not line.startswith("-")]
        lines = [line[2:] if line.startswith(("+ ", "  ")) else line for line in kept]
    filled: list[str] = []
    for number, line in enumerate(lines):
        filled.append(line)
        if line.rstrip().endswith(":") and re.match(r" *(if|else|for|with|def)\b", line):
            inside = next((later for later in lines[number + 1 :] if later.strip() and later.strip()[0] != "#"), "")
            if indent(inside) <= indent(line):
                filled.append(" " * (indent(line) + 4) + "pass")
    code = "\n".join(filled) + "\n"
    if name in CORRECTIONS:
        written, meant = CORRECTIONS[name]
        assert written in code
        code = code.replace(written, meant)
    return code


def indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def run_snippet(name: str, before: str, rows: bool) -> dict[str, Any]:
    """On a rank: the snippet among its objects; what became of them."""
    sys.modules["transformers"] = transformers_stand_in()
    found = objects(rows) | {"__name__": "__main__"}
    if before:
        exec(before, found)
    weights = copy.deepcopy(found["model"].state_dict())
    exec(compile(as_meant(name), name, "exec"), found)
    model = found["my_model"] if "my_model" in SNIPPETS[name] else found["model"]
    if not isinstance(model, nn.Module):
        model = found["model"]
    after = [parameter.detach().flatten() for parameter in model.parameters()]
    return {
        "weights": torch.cat(after).tolist(),
        "trained": not torch.equal(torch.cat(after), torch.cat([value.flatten() for value in weights.values()])),
        "done": found["done"],
        "samples": found["metric"].samples,
        "found": {key: str(found.get(key)) for key in ("device", "loss", "validation_dataloader", "logger")},
    }


CREATED = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
PREPARED = CREATED + (
    "model, optimizer, scheduler, train_dataloader, eval_dataloader, validation_dataloader = accelerator.prepare(\n"
    "    model, optimizer, scheduler, train_dataloader, eval_dataloader, validation_dataloader\n)\n"
    "lr_scheduler = scheduler\n"
)
STEPPED = PREPARED + (
    "inputs, targets = next(iter(train_dataloader))\n"
    "accelerator.backward(loss_function(model(inputs), targets))\noptimizer.step()\n"
)
# A call of the function that the snippet decorates.
CALLED = {
    "on_local_main_process": ["once_per_server"],
    "on_main_process": ["once"],
    "on_process": ["on_index_zero"],
    "on_local_process": ["on_index_zero_on_each_server"],
}

# name: (what ran before it, whether batches are dicts)
TRAINING = {
    "a basic loop": ("", False),
    "a loop with the device by hand": ("", False),
    "a loop with the device by itself": ("", False),
    "gradient accumulation": ("from accelerate import Accelerator\n", False),
    "the loop": (PREPARED, True),
    "four lines more": ("", True),
    "accumulation as a diff": ("from accelerate import Accelerator\n", False),
    "clipping": ("", False),
    "a script with main": ("", False),
}
OTHERS = {
    "the device": CREATED,
    "an accelerator with arguments": "from accelerate import Accelerator\n",
    "main processes": CREATED,
    "a state, saved and loaded": PREPARED,
    "save as torch does": CREATED,
    "a logger": CREATED,
    "create an accelerator": "",
    "prepare for training": CREATED,
    "prepare for validation": CREATED,
    "something special on TPU": CREATED,
    "once per machine": CREATED,
    "a progress bar": CREATED,
    "once": CREATED,
    "wait for everyone": CREATED,
    "load weights into the unwrapped model": PREPARED
    + "accelerator.save(accelerator.unwrap_model(model).state_dict(), 'pytorch_model.bin')\n"
    + "accelerator.wait_for_everyone()\n",
    "autocast": PREPARED,
    "a skipped step": STEPPED,
    "create one": "",
    "prepare": CREATED,
    "mixed precision as a diff": "",
    "save_pretrained": PREPARED,
    "unwrap and load": PREPARED
    + "accelerator.save(accelerator.unwrap_model(model).state_dict(), 'pytorch_model.bin')\n"
    + "accelerator.wait_for_everyone()\n",
    "a progress bar on one process": CREATED,
    "print once per machine": CREATED,
    "wait": CREATED,
    "save a model": PREPARED,
    "save a model in shards": PREPARED,
}
# Needs no accelerator, or has a test of its own below.
ALONE = {
    "a loop without accelerate",
    "distributed evaluation",
    "upload once",
    "random numbers before a save",
    "random numbers after a load",
    "a notebook",
    "load a saved model",
    *CALLED,
}


def test_every_snippet_has_a_test() -> None:
    assert set(SNIPPETS) == {*TRAINING, *OTHERS, *ALONE}
    assert set(CORRECTIONS) <= set(SNIPPETS)


def run(name: str, processes: int, before: str, folder: Path, rows: bool = False) -> list[dict[str, Any]]:
    env = PLAIN_PROCESS if processes == 1 else None
    results: list[dict[str, Any]] = run_world(run_snippet, processes, name, before, rows, env=env, cwd=folder)
    return results


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", TRAINING)
def test_training_loops(name: str, processes: int, tmp_path: Path) -> None:
    before, rows = TRAINING[name]
    results = run(name, processes, before, tmp_path, rows)
    assert all(result["trained"] for result in results)
    assert all(result["weights"] == results[0]["weights"] for result in results)


def test_the_loop_that_is_to_be_changed(tmp_path: Path) -> None:
    (result,) = run("a loop without accelerate", 1, "", tmp_path)
    assert result["trained"]


@pytest.mark.parametrize("name", OTHERS)
def test_others(name: str, tmp_path: Path) -> None:
    (result,) = run(name, 1, OTHERS[name], tmp_path)
    assert result["found"]["device"] == "cpu"


@pytest.mark.parametrize("processes", [1, 2])
def test_evaluation_counts_every_sample_once(processes: int, tmp_path: Path) -> None:
    results = run("distributed evaluation", processes, PREPARED, tmp_path)
    assert [result["samples"] for result in results] == [14] * processes


@pytest.mark.parametrize("name", CALLED)
def test_decorated_functions_run_on_one_process(name: str, tmp_path: Path) -> None:
    # The snippet defines the function, and calling it is up to the reader.
    before = CREATED
    results = run_world(define_and_call, 2, name, before, cwd=tmp_path)
    assert results == [CALLED[name], []]


def define_and_call(name: str, before: str) -> list[str]:
    found = objects(rows=False)
    exec(before, found)
    exec(as_meant(name), found)
    found["do_my_thing"]()
    done: list[str] = found["done"]
    return done


def test_only_the_main_process_uploads(tmp_path: Path) -> None:
    results = run("upload once", 2, CREATED, tmp_path)
    assert [result["done"] for result in results] == [["push_to_hub"], []]


def test_a_loaded_state_fixes_the_random_numbers_that_follow(tmp_path: Path) -> None:
    def printed(name: str) -> list[str]:
        (output,) = run_world(what_is_printed, 1, name, env=PLAIN_PROCESS, cwd=tmp_path)
        return output.splitlines()

    printed("random numbers before a save")
    first, second = printed("random numbers after a load"), printed("random numbers after a load")
    assert first[1:] == second[1:]
    assert first[0] != second[0]
    assert len({*first, second[0]}) == 4


def what_is_printed(name: str) -> str:
    torch.seed()
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(as_meant(name), {})
    return output.getvalue()


def test_a_notebook_trains(tmp_path: Path) -> None:
    (result,) = run("a notebook", 1, "", tmp_path)
    assert result["done"] == ["trained"]


@pytest.mark.parametrize("saved", ["save a model", "save a model in shards"])
def test_a_saved_model_is_loaded(saved: str, tmp_path: Path) -> None:
    results = run_world(save_spoil_load, 2, saved, cwd=tmp_path)
    assert results == [True, True]


def save_spoil_load(saved: str) -> bool:
    found = objects(rows=False)
    exec(PREPARED, found)
    exec(as_meant(saved), found)
    weights = copy.deepcopy(found["model"].state_dict())
    with torch.no_grad():
        for parameter in found["model"].parameters():
            parameter.zero_()
    exec("from accelerate import load_checkpoint_in_model\nunwrapped_model = accelerator.unwrap_model(model)", found)
    found["accelerator"].wait_for_everyone()
    exec(as_meant("load a saved model"), found)
    return all(torch.equal(value, weights[name]) for name, value in found["model"].state_dict().items())


@pytest.mark.parametrize("command", COMMANDS.replace("\\\n", "").splitlines())
def test_launches_are_understood(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for config in (Path("path_to_config.yaml"), Path("path/to/config/my_config_file.yaml")):
        config.parent.mkdir(parents=True, exist_ok=True)
        config.write_text("compute_environment: LOCAL_MACHINE\nnum_processes: 1\nuse_cpu: true\n")
    typed = re.sub(r"[{}]", "", command.replace("{script_name.py}", "script.py")).removesuffix("...")
    for name in ("script.py", "xxx.py", "train.py", "path_to_script.py"):
        Path(name).touch()
    program = f"{sys.executable} -m accelerate.commands.accelerate_cli launch --dry_run"
    assert "accelerate launch" in typed
    planned = subprocess.run(
        ["bash", "-c", typed.replace("accelerate launch", program)], capture_output=True, text=True
    )
    assert planned.returncode == 0, planned.stderr
    script = re.search(r"\w+\.py", typed)
    assert script is None or script.group() in planned.stdout
