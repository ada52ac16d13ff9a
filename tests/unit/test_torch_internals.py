"""Private names of torch are used in one package only, and training goes on when any of them is gone.

Where `dist.*` and `torch.cuda.*` may be used is written here as well.
"""

from __future__ import annotations

import ast
import importlib
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.torch_names import (
    OUTSIDE,
    ROOT,
    attributes_of,
    by_variable,
    defined_in,
    hidden_names,
    is_private,
    near,
    private_arguments,
    private_imports,
    private_texts,
    private_uses,
    tree_of,
)

# Private names that are not torch's, by whose they are.
OF_OTHERS = {
    "Python": "_exit _getframe _current_frames _run_module_as_main _register_atexit _asdict _fields _make",
    "argparse": "_AppendAction _ArgumentGroup _StoreAction _StoreFalseAction _StoreTrueAction _SubParsersAction "
    "_action_groups _actions _current_section _format_args _get_default_metavar_for_optional _option_string_actions",
    "mlflow": "_active_run_stack _last_active_run_id",
    "swanlab": "_handle_atexit _is_main_thread",
    "Habana": "_get_device_type",
    "DeepSpeed": "_SEQUENCE_DATA_PARALLEL_GROUP _SEQUENCE_PARALLEL_GROUP _swappable_optimizer_subgroup "
    "_config _consolidated_16bit_state_dict _get_all_ckpt_names _get_ckpt_name _get_norm_groups "
    "_get_sequence_parallel_group _get_zero_ckpt_name _get_zero_param_shapes _hp_mapping _param_slice_mappings",
    "transformers": "_attn_implementation _no_split_modules _tie_weights _tp_plan _tp_size",
    "accelerate, on objects of others": "_accelerate_aside _accelerate_flat _accelerate_same _accelerate_syncs "
    "_hf_hook _is_accelerate_prepared _old_forward _original_call _original_forward",
}
KNOWN = {name for names in OF_OTHERS.values() for name in names.split()}
DEFINED = {path: defined_in(tree_of(path)) for path in OUTSIDE}
OURS = {name for names in DEFINED.values() for name in names}
# Private names of ours that are used far from where they are written, by the file that has them.
FAR = {
    "accelerator/base.py": "_dataloaders _models _optimizers _schedulers _stops_at_nonfinite _strategy",
    "config/deepspeed.py": "_accelerate_kind",
    "data_loader/shard.py": "_shard",
    "config/fsdp.py": "_has_met_a_model",
    "optimizer.py": "_backwards_seen _has_gradients",
    "state/gradient.py": "_set_sync_gradients",
    "state/partial.py": "_shared_state",
}
FAR_NAMES = {name for names in FAR.values() for name in names.split()}
OF_TORCH = set(hidden_names())

# Engines that have an environment of their own: their files cannot be imported in this one.
OPTIONAL = {"deepspeed", "megatron"}

# Who may talk to other processes by torch's own functions, and why.
DISTRIBUTED = {
    "comm": "the communicator",
    "parallel": "groups of a device mesh",
    "strategies": "engines exchange what they spread",
    "engines/megatron": "the groups of Megatron-LM",
    "state": "begins and ends with the process group",
    "available.py": "asks whether torch has it",
    "launch/meeting.py": "the port where the processes of a launch meet",
    "checkpoint/sharded_state.py": "runs torch.distributed.checkpoint, with a group or without",
    "test_utils/scripts": "scripts as users write them",
}

# Who may talk to CUDA, and why.
CUDA = {
    "devices": "the devices",
    "available.py": "asks whether there is one",
    "offload/cuda_copier.py": "copies weights on a stream of their own",
    "config/environment.py": "finds the processors near a GPU; stands below the devices",
    "test_utils/backend.py": "says how to measure memory, for tests of other projects",
    "test_utils/scripts": "scripts as users write them",
}


# Who may ask whether a device is CUDA, instead of asking the Device, and why.
ASKS_FOR_CUDA = {
    "devices": "the devices",
    "commands/config": "asks questions, without torch",
    "launch": "starts processes, without torch",
    "test_utils": "tests of other projects name the devices that they need",
    "comm/torch_dist.py": "NCCL wants to know the device of a barrier; stands below the devices",
    "step_timer/hints.py": "advice on what torch has for CUDA alone",
}

# Who may look up a name in torch that is only known when the program runs, and why.
BY_VARIABLE = {
    "devices/base.py": "the module of a device",
    "available.py": "the module of a device",
    "launch/machine.py": "the module of a device",
    "quantization/bnb.py": "the module of a device",
    "step_timer/clocks.py": "the module of a device",
    "tracking/outbox.py": "the module of a device",
    "test_utils": "the module of a device, and a dtype",
    "big_modeling/sizes.py": "a dtype",
    "checkpoint/sharded_state.py": "a dtype",
    "config/fsdp_values.py": "a dtype",
    "config/quantization.py": "a dtype",
    "offload/module_tensors.py": "a dtype",
    "offload/offloaded_weights.py": "a dtype",
    "config/fsdp.py": "the classes of a kind of state dict, from a table",
    "config/wrap_policy.py": "a public policy, from a table",
    "strategies/deepspeed_checks.py": "a public optimizer, by its name in a config",
    "offload/placeholder.py": "public attributes of tensors and functions of nn.init, from tables",
}


def place(path: Path, line: int, name: str) -> str:
    return f"{path.relative_to(ROOT)}:{line} {name}"


def places_of(path: Path) -> set[str]:
    """A file, and the folders that it is in."""
    relative = path.relative_to(ROOT)
    return {str(relative), *map(str, relative.parents)}


def strangers(path: Path) -> Iterator[str]:
    tree = tree_of(path)
    yield from (place(path, *found) for found in private_imports(tree))
    for line, name in (*private_uses(tree, of_self=True), *private_arguments(tree)):
        if name not in OURS | KNOWN:
            yield place(path, line, name)
    # A name of torch may also be one that some file here uses for something else.
    ours = KNOWN | FAR_NAMES | {name for other in near(path) for name in DEFINED.get(other, ())}
    yield from (place(path, *found) for found in private_uses(tree, of_self=False) if found[1] not in ours)
    # Names that are ours, too: only on objects of our own.
    yield from (place(path, *found) for found in private_uses(tree, of_self=False) if found[1] in OF_TORCH)
    yield from (place(path, *found) for found in private_texts(tree) if found[1] in OF_TORCH - OURS)


def test_private_names_of_torch_are_used_in_one_package() -> None:
    assert [found for path in OUTSIDE for found in strangers(path)] == []


def test_what_would_be_found(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "import torch\n"
        "import torch._dynamo\n"
        "from torch.utils._pytree import tree_map\n"
        "class Own:\n"
        "    def __init__(self): self._mine = torch._foreach_norm\n"
        "    def use(self): return self._mine, self._theirs, model._parameters, getattr(x, '_y'), f(_z=1)\n"
        "table = vars(model)['_buffers']\n"
        "a, b = module.__dict__['_modules'], own[0]['_not_an_attribute']\n"
        "c = operator.attrgetter('_hooks')(model), object.__getattribute__(model, '_impl')\n"
    )
    tree = tree_of(file)
    assert [name for _, name in private_imports(tree)] == ["_dynamo", "_pytree"]
    uses = {name for _, name in private_uses(tree, of_self=True)} - defined_in(tree)
    by_text = {"_y", "_buffers", "_modules", "_hooks", "_impl"}
    assert uses == {"_foreach_norm", "_theirs", "_parameters", *by_text}
    assert [name for _, name in private_arguments(tree)] == ["_z"]
    assert {name for _, name in private_texts(tree)} == {*by_text, "_not_an_attribute"}
    assert {"_parameters", "_unscale_grads_", "_dynamo", "_generate_state", "_internal", "_orig_mod"} <= OF_TORCH


def test_nothing_private_of_torch_is_overridden_elsewhere() -> None:
    found = []
    for path in (path for path in OUTSIDE if "test_utils/scripts" not in places_of(path)):
        parts = [part for part in path.relative_to(ROOT).with_suffix("").parts if part != "__init__"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that a module has another place now
            try:
                module = importlib.import_module(".".join(["accelerate", *parts]))
            except ModuleNotFoundError as error:
                assert (error.name or "").partition(".")[0] in OPTIONAL
                continue
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == module.__name__:
                theirs = {name for base in kind.__mro__ if _is_of_torch(base) for name in vars(base)}
                own = set(filter(is_private, vars(kind))) - {"_abc_impl"}  # which Python gives to abstract classes
                found += [f"{kind.__module__}.{kind.__name__}.{name}" for name in own & theirs]
    assert found == []


def _is_of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "torchdata")


def _others(module: str, allowed: dict[str, str]) -> Iterator[str]:
    for path in OUTSIDE:
        if not allowed.keys() & places_of(path):
            yield from (place(path, line, f"{module}.{name}") for line, name in attributes_of(tree_of(path), module))


def test_who_talks_to_other_processes() -> None:
    assert list(_others("torch.distributed", DISTRIBUTED)) == []


def test_who_talks_to_cuda() -> None:
    assert list(_others("torch.cuda", CUDA)) == []


def test_who_asks_whether_a_device_is_cuda() -> None:
    compared = {
        path: [
            place(path, node.lineno, ast.unparse(node))
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Compare) and "'cuda'" in ast.unparse(node)
        ]
        for path in OUTSIDE
    }
    strange = [use for path, uses in compared.items() if not ASKS_FOR_CUDA.keys() & places_of(path) for use in uses]
    assert strange == []
    assert set(ASKS_FOR_CUDA) - {entry for path, uses in compared.items() if uses for entry in places_of(path)} == set()


def test_who_looks_up_names_that_are_not_written_out() -> None:
    found = {path: list(by_variable(tree_of(path))) for path in OUTSIDE}
    strange = [
        place(path, *use) for path, uses in found.items() if not BY_VARIABLE.keys() & places_of(path) for use in uses
    ]
    assert strange == []
    assert set(BY_VARIABLE) - {entry for path, uses in found.items() if uses for entry in places_of(path)} == set()


def test_names_that_are_used_far_away_are_ours() -> None:
    assert [name for file, names in FAR.items() for name in names.split() if name not in DEFINED[ROOT / file]] == []


def test_what_would_be_found_of_modules(tmp_path: Path) -> None:
    file = tmp_path / "sample.py"
    file.write_text(
        "import torch, importlib\n"
        "import torch.distributed as dist\n"
        "c = torch.cuda\n"
        "c.Stream()\n"
        "use(torch.cuda)\n"
        "getattr(torch.cuda, 'Event')\n"
        "getattr(torch, 'cuda')\n"
        "importlib.import_module('torch.cuda')\n"
        "again = c\n"
        "again.synchronize()\n"
        "getattr(torch, name)\n"
        "dist.all_reduce(x)\n"
        "torch.cuda.amp.autocast()\n"
        "dist.distributed_c10d.barrier()\n"
    )
    tree = tree_of(file)
    assert {line for line, _ in attributes_of(tree, "torch.cuda")} == {3, 4, 5, 6, 7, 8, 10}
    assert list(attributes_of(tree, "torch.distributed")) == [(12, "all_reduce"), (14, "barrier")]
    assert list(by_variable(tree)) == [(11, "torch")]


@pytest.mark.parametrize(("module", "allowed"), [("torch.distributed", DISTRIBUTED), ("torch.cuda", CUDA)])
def test_all_who_may_do(module: str, allowed: dict[str, str]) -> None:
    """The tables have no entry that is not needed any more."""
    used = {entry for path in OUTSIDE if any(attributes_of(tree_of(path), module)) for entry in places_of(path)}
    assert set(allowed) - used == set()


def test_training_goes_on_without_any_of_them(tmp_path: Path) -> None:
    names = hidden_names()
    subprocess.run([sys.executable, "-m", "tests.unit.train_without", str(tmp_path), "nothing", *names], check=True)
    outcomes = {name: json.loads((tmp_path / name).read_text()) for name in ("nothing", *names)}
    usual = outcomes["nothing"]
    assert isinstance(usual, list), usual
    lost = {name: outcome for name, outcome in outcomes.items() if outcome != usual}
    assert not lost, "\n".join(f"without {name}: {outcome}" for name, outcome in lost.items())
