"""Small things that scripts rely on, asked of this package and of the released one: the answers are the same.

Usage: python tests/peer/behaviour.py PATH_TO_THE_PYTHON_OF_THE_RELEASED_PACKAGE
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import subprocess
import sys
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from refusals import mistakes
from torch import nn
from torch.utils.data import DataLoader

QUESTIONS: dict[str, Callable[[Path], Any]] = {}


def question(function: Callable[[Path], Any]) -> Callable[[Path], Any]:
    QUESTIONS[function.__name__.replace("_", " ")] = function
    return function


def records(level: str = "WARNING") -> io.StringIO:
    """What is logged from here on, as names of loggers and levels."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s %(levelname)s"))
    logging.root.addHandler(handler)
    logging.root.setLevel(level)
    return stream


@question
def an_index_that_is_the_map_alone(folder: Path) -> Any:
    from safetensors.torch import save_file

    from accelerate import load_checkpoint_in_model

    for name in ("weight", "bias"):
        save_file(
            {name: torch.ones((2, 2) if name == "weight" else 2)}, folder / f"{name}.safetensors", {"format": "pt"}
        )
    index = {name: f"{name}.safetensors" for name in ("weight", "bias")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    model = nn.Linear(2, 2)
    load_checkpoint_in_model(model, str(folder))
    return [model.weight.tolist(), model.bias.tolist()]


@question
def no_without_quotes_in_a_config_file(folder: Path) -> Any:
    from accelerate.commands.config.config_args import load_config_from_file

    found = []
    for more in (
        "compute_environment: LOCAL_MACHINE",
        "compute_environment: AMAZON_SAGEMAKER\nec2_instance_type: a\niam_role_name: b",
    ):
        path = folder / "config.yaml"
        path.write_text(f"{more}\ndistributed_type: NO\nmixed_precision: no\nuse_cpu: false\ndebug: false\n")
        config = load_config_from_file(str(path))
        # The released package keeps the false that YAML reads; here it is the word.
        words = [config.distributed_type, config.mixed_precision]
        found.append([type(config).__name__, *(str(getattr(word, "value", word) or "no").lower() for word in words)])
    return found


@question
def a_device_is_named_index_and_all(folder: Path) -> Any:
    from accelerate import Accelerator, PartialState

    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu:64"
    return [str(PartialState().device), str(Accelerator().device)]


@question
def adapters_around_loggers_report_their_caller(folder: Path) -> Any:
    from accelerate import PartialState
    from accelerate.logging import get_logger

    PartialState(cpu=True)
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(filename)s %(funcName)s"))
    logging.root.addHandler(handler)
    logger = get_logger("question", log_level="INFO")

    class Around(logging.LoggerAdapter):
        def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
            self.logger.log(level, msg, *args, **{**kwargs, "stacklevel": 3})

    def wrapped() -> None:
        Around(logger, {}).info("one")

    def direct() -> None:
        logger.info("two")
        logger.info("three", stacklevel=2)

    wrapped()
    direct()
    return stream.getvalue().splitlines()


@question
def skipping_leaves_the_epoch_as_it_is(folder: Path) -> Any:
    from accelerate import skip_first_batches
    from accelerate.data_loader import SeedableRandomSampler

    data: Any = list(range(8))
    sampler = SeedableRandomSampler(data, generator=torch.Generator(), data_seed=1)
    found = []
    for batch in skip_first_batches(DataLoader(data, batch_size=2, sampler=sampler), 2):
        found.append([sampler.epoch, batch.tolist()])
    return [*found, sampler.epoch]


@question
def a_tied_group_is_counted_once(folder: Path) -> Any:
    from accelerate.utils.modeling import get_module_size_with_ties

    layers = nn.ModuleList([nn.Linear(10, 10) for _ in range(15)])
    for layer in layers:
        layer.weight = layers[0].weight
    sizes = {str(number): 440 for number in range(15)} | {f"{number}.weight": 400 for number in range(15)}
    tied = sorted(f"{number}.weight" for number in range(1, 15))
    size, names, modules = get_module_size_with_ties(tied, 440, sizes, list(layers.named_children()))
    return [size, names, len(modules)]


@question
def the_state_dict_of_an_offloaded_model_is_on_the_cpu(folder: Path) -> Any:
    from accelerate import cpu_offload
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = cpu_offload(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), device)
    return sorted((name, value.device.type) for name, value in get_state_dict_offloaded_model(model).items())


@question
def ties_in_a_state_dict_are_dropped_with_a_warning(folder: Path) -> Any:
    from safetensors.torch import load_file

    from accelerate.utils import save

    logged, tensor = records(), torch.ones(2)
    save(OrderedDict(a=tensor, b=tensor), folder / "x.safetensors", safe_serialization=True)
    return [sorted(load_file(folder / "x.safetensors")), logged.getvalue().splitlines()]


@question
def one_item_is_concatenated_as_it_is(folder: Path) -> Any:
    from accelerate.utils import concatenate

    thing = object()
    return [concatenate([thing]) is thing, concatenate([5]), concatenate([{"a": "x", "b": [1]}])]


@question
def a_nested_tensor_cannot_be_padded(folder: Path) -> Any:
    from accelerate.utils import pad_across_processes

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ragged = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])
        caught.clear()
        same = pad_across_processes(ragged) is ragged
    return [same, [warning.category.__name__ for warning in caught]]


@question
def variables_that_cannot_be_written_are_told(folder: Path) -> Any:
    from accelerate.utils.environment import convert_dict_to_env_variables

    logged = records()
    return [convert_dict_to_env_variables({"A": "1", "B": "x;y", "C": "x\ny"}), logged.getvalue().splitlines()]


@question
def empty_weights_with_buffers_leave_torch_alone(folder: Path) -> Any:
    from accelerate import init_empty_weights

    before = nn.Module.register_parameter, nn.Module.register_buffer
    with init_empty_weights(include_buffers=True):
        same = (nn.Module.register_parameter, nn.Module.register_buffer) == before
        layer = nn.BatchNorm1d(2)
    return [same, layer.weight.device.type, layer.running_mean.device.type]  # type: ignore[union-attr]


@question
def launch_helpers_take_what_they_read(folder: Path) -> Any:
    from accelerate.utils import launch

    dynamo = {f"dynamo_use_{name}": False for name in ("fullgraph", "dynamic", "regional_compilation")}
    common = {"dynamo_backend": "no", "dynamo_mode": "default", **dynamo, "debug": False, "enable_cpu_affinity": False}
    common |= {"mixed_precision": "bf16", "num_machines": 1, "module": False, "no_python": False}
    common |= {"num_cpu_threads_per_process": 1}
    several = {"num_processes": 2, "main_process_ip": None, "main_process_port": 0}
    several |= {"use_fsdp": False, "use_megatron_lm": False, "use_parallelism_config": False}
    one = {"mpirun_hostfile": None, "training_script": "x.py", "training_script_args": ["--lr", "1"]}
    one |= {"cpu": True, "use_cpu": True, "gpu_ids": None}
    command, alone = launch.prepare_simple_launcher_cmd_env(argparse.Namespace(**common, **one))
    together = launch.prepare_multi_gpu_env(argparse.Namespace(**common, **several))

    def told(env: dict[str, str]) -> dict[str, str]:
        return {name: value for name, value in sorted(env.items()) if name.startswith("ACCELERATE_")}

    fp8 = launch.setup_fp8_env(argparse.Namespace(fp8_margin=3), {})
    return [command[1:], told(alone), told(together), fp8]


@question
def the_mesh_of_a_parallelism_config(folder: Path) -> Any:
    from accelerate import ParallelismConfig

    class Mesh:
        joined: list[Any]

        def __init__(self, *made: Any, **more: Any) -> None:
            self.made, self.joined = [*made, more], []

        def __getitem__(self, axes: Any) -> Any:
            return SimpleNamespace(_flatten=lambda name: self.joined.append([type(axes).__name__, list(axes), name]))

    torch.distributed.device_mesh.init_device_mesh = Mesh  # type: ignore[assignment]
    found: list[Any] = [ParallelismConfig()._get_mesh()]
    for sizes in ({"dp_shard_size": 4}, {"dp_replicate_size": 2, "dp_shard_size": 3, "cp_size": 4}):
        config = ParallelismConfig(**sizes)  # type: ignore[arg-type]
        mesh: Any = config.build_device_mesh("cpu")
        names = [config.dp_dim_names, config.dp_shard_cp_dim_names, config.dp_cp_dim_names, config.fsdp_dim_names]
        found.append([config._get_mesh(), names, mesh.made, mesh.joined])
    return found


@question
def trackers_that_are_registered(folder: Path) -> Any:
    from accelerate.tracking import GeneralTracker, register_tracker_class

    def attempt(**attributes: Any) -> str:
        return refusal(lambda: register_tracker_class(type("Own", (GeneralTracker,), attributes)))[0]

    whole = {"name": "own", "requires_logging_directory": False}
    return [attempt(**{key: value for key, value in whole.items() if key != left_out}) for left_out in (*whole, None)]


def refusal(function: Callable[[], Any]) -> list[str]:
    """The classes of the error that a call ends with, the narrowest first."""
    try:
        function()
    except Exception as error:
        return [kind.__name__ for kind in type(error).__mro__]
    return ["no error"]


@question
def errors_keep_their_class(folder: Path) -> Any:
    found = {}
    for name, mistake in mistakes(folder).items():
        found[name] = in_a_child(lambda mistake=mistake: refusal(mistake))
    return found


def in_a_child(function: Callable[[], Any]) -> Any:
    """What a function returns in a fork of this process, so that it leaves nothing behind."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            with os.fdopen(writing, "w") as file:
                json.dump(function(), file, default=str)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else "no answer"


def answers() -> dict[str, Any]:
    import accelerate.utils  # noqa: F401  (once, for all children)

    found = {}
    for name, ask_it in QUESTIONS.items():
        with tempfile.TemporaryDirectory() as folder:
            found[name] = in_a_child(lambda ask_it=ask_it, folder=folder: ask_it(Path(folder)))
    return found


def ask(python: str) -> dict[str, Any]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ACCELERATE_", "PYTHON"))}
    # The package that runs this file, also where it is on the path by hand.
    path = {"PYTHONPATH": os.environ["PYTHONPATH"]} if python == sys.executable and "PYTHONPATH" in os.environ else {}
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [python, os.path.abspath(__file__), "--answer"],
            cwd=folder,
            env=kept | path | {"OMP_NUM_THREADS": "1", "HF_HOME": folder, "PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
            timeout=300,
        )
    if result.returncode != 0:
        raise SystemExit(result.stderr)
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def errors_that_differ(ours: dict[str, list[str]], theirs: dict[str, list[str]]) -> list[str]:
    """Ours may be narrower: whoever catches the released package's error catches ours."""
    return [
        f"{name}: here {ours[name][0]}, released {theirs[name][0]}"
        for name in ours
        if theirs[name][0] not in ours[name]
    ]


def main(peer: str) -> None:
    ours, theirs = ask(sys.executable), ask(os.path.abspath(peer))
    different = 0
    for name, mine in ours.items():
        other = theirs[name]
        if isinstance(mine, dict) and isinstance(other, dict):
            lines = errors_that_differ(mine, other)
        else:
            lines = [] if mine == other != "no answer" else [f"here     {mine}", f"released {other}"]
        print(
            f"{name:55} {'differs' if lines else 'same'}" + (f" ({len(mine)} errors)" if isinstance(mine, dict) else "")
        )
        for line in lines:
            print(f"    {line}")
        different += bool(lines)
    print(f"{len(ours)} questions: {different} answered differently")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    if sys.argv[1] == "--answer":
        print(json.dumps(answers()))
    else:
        main(sys.argv[1])
