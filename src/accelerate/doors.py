"""Names that others reach through a public module, though they live elsewhere; and what is assigned there.

In the released package the modules import much from each other, and scripts import or replace it where it happens to
be: `accelerate.accelerator.torch`, `accelerate.big_modeling.infer_auto_device_map`. So each public module here is a
door to all of these names. They are looked up when they are asked for, and nothing is imported for them before.
"""

from __future__ import annotations

import importlib
import sys
from types import CodeType, ModuleType
from typing import Any

from accelerate.errors import warn

# The modules that scripts know: these, and all of three packages.
_MODULES = (
    "accelerator big_modeling checkpointing commands data_loader hooks inference launchers local_sgd logging optimizer "
    "parallelism_config scheduler state test_utils tracking utils"
)
_DOORS = {f"accelerate.{name}" for name in _MODULES.split()}
_PACKAGES = ("accelerate.commands.", "accelerate.test_utils.", "accelerate.utils.")

# Modules by the names they go by. Most go by their own.
_OWN_NAMES = (
    "accelerate argparse asyncio base64 collections contextlib copy enum functools gc importlib inspect io json "
    "logging math os pickle platform psutil random re shutil socket subprocess sys tempfile threading time torch "
    "transformers unittest warnings weakref yaml"
)
_ALIASES = {name: name for name in _OWN_NAMES.split()} | {
    "F": "torch.nn.functional",
    "dist": "torch.distributed",
    "hooks": "torch.utils.hooks",
    "mock": "unittest.mock",
    "nn": "torch.nn",
    "np": "numpy",
    "np_core": "numpy._core",
    "op": "operator",
    "optim": "torch.optim",
    "test_ops": "accelerate.test_utils.scripts.test_ops",
    "test_script": "accelerate.test_utils.scripts.test_script",
    "test_sync": "accelerate.test_utils.scripts.test_sync",
    "version": "packaging.version",
}

# Other names, by where they live; there some are called differently. What `accelerate.utils` has is not repeated.
_PLACES = {
    "__future__": "annotations",
    "abc": "ABC",
    "ast": "literal_eval",
    "codecs": "encode",
    "collections": "OrderedDict defaultdict",
    "collections.abc": "Iterable Mapping",
    "contextlib": "contextmanager nullcontext suppress",
    "copy": "deepcopy",
    "dataclasses": "dataclass field fields replace",
    "datetime": "timedelta",
    "enum": "Enum",
    "functools": "lru_cache partial update_wrapper wraps",
    "pathlib": "Path",
    "shutil": "which",
    "types": "MethodType",
    "typing": "Any Callable Literal Optional TYPE_CHECKING Union get_args",
    "huggingface_hub": "model_info",
    "huggingface_hub.errors": "EntryNotFoundError GatedRepoError RepositoryNotFoundError",
    "packaging.version": "Version parse",
    "safetensors": "safe_open",
    "safetensors.torch": "load_model safe_load_file=load_file safe_save_file=save_file",
    "torch.amp": "GradScaler",
    "torch.distributed": "ReduceOp",
    "torch.distributed.algorithms.join": "Join",
    "torch.nn": "BCEWithLogitsLoss CrossEntropyLoss MSELoss",
    "torch.optim.lr_scheduler": "LRScheduler",
    "torch.profiler": "ProfilerActivity",
    "torch.utils.data": "BatchSampler DataLoader Dataset IterableDataset RandomSampler",
    "tqdm.auto": "_tqdm=tqdm",
    "transformers": "AutoConfig AutoModel",
    "accelerate.accelerator": "Accelerator",
    "accelerate.available": "_is_package_available=has_package is_numpy_available is_torch_distributed_available "
    "is_tqdm_available check_cuda_fp8_capability",
    "accelerate.big_modeling": "dispatch_model init_empty_weights",
    "accelerate.big_modeling.dispatch": "_accelerate_added_attributes=_MOVES",
    "accelerate.checkpointing": "load_accelerator_state load_custom_state save_accelerator_state save_custom_state",
    "accelerate.commands.config": "get_config_parser",
    "accelerate.commands.config.cluster": "get_cluster_input",
    "accelerate.commands.config.config_args": "SageMakerConfig cache_dir default_config_file default_json_config_file "
    "default_yaml_config_file load_config_from_file",
    "accelerate.commands.config.sagemaker": "get_sagemaker_input",
    "accelerate.commands.env": "env_command_parser",
    "accelerate.commands.estimate": "estimate_command_parser",
    "accelerate.commands.launch": "launch_command_parser",
    "accelerate.commands.merge": "merge_command_parser",
    "accelerate.commands.test": "test_command_parser",
    "accelerate.commands.to_fsdp2": "to_fsdp2_command_parser",
    "accelerate.commands.tpu": "tpu_command_parser",
    "accelerate.config.environment": "_nvidia_smi",
    "accelerate.config.enums": "FP8BackendType",
    "accelerate.commands.utils": "CustomArgumentParser",
    "accelerate.commands.config.config_utils": "DYNAMO_BACKENDS",
    "accelerate.constants": "SAGEMAKER_PARALLEL_EC2_INSTANCES TORCH_DYNAMO_MODES",
    "accelerate.data_loader": "DataLoaderDispatcher prepare_data_loader skip_first_batches",
    "accelerate.hooks": "AlignDevicesHook CpuOffload LayerwiseCastingHook UserCpuOffloadHook add_hook_to_module "
    "attach_align_device_hook attach_align_device_hook_on_blocks",
    "accelerate.logging": "get_logger",
    "accelerate.optimizer": "AcceleratedOptimizer",
    "accelerate.per_rank": "SharedDict=ThreadLocalSharedDict",
    "accelerate.scheduler": "AcceleratedScheduler",
    "accelerate.state": "AcceleratorState GradientState PartialState",
    "accelerate.test_utils": "execute_subprocess_async path_in_accelerate_package",
    "accelerate.tracking": "GeneralTracker LOGGER_TYPE_TO_CLASS filter_trackers",
    "accelerate.utils.modeling": "get_non_persistent_buffers get_state_dict_offloaded_model",
    "accelerate.utils.dataclasses": "get_module_class_from_name",
    "accelerate.utils.tqdm": "tqdm",
    "accelerate.versions": "torch_version",
}
_ORIGINS = {
    alias: (place, name or alias)
    for place, names in _PLACES.items()
    for alias, _, name in (entry.partition("=") for entry in names.split())
}

# Names that scripts replace with effect, and the module where this package looks them up.
_REPLACED = {
    "accelerate.accelerator.fsdp2_prepare_model": "accelerate.strategies.fsdp_tools",
    "accelerate.big_modeling.check_device_map": "accelerate.big_modeling",
}
_KEPT: dict[str, Any] = {}  # as they were before
_ASSIGNED: set[str] = set()  # what follows is mostly the way back


def find(module: str, name: str) -> Any:
    """What a public module does not have itself; AttributeError for what nobody has, or is not installed."""
    try:
        if name == "logger":
            return importlib.import_module("accelerate.logging").get_logger(module)
        if name in _ALIASES:
            return importlib.import_module(_ALIASES[name])
        if name in _ORIGINS:
            place, there = _ORIGINS[name]
            if place != module:
                return getattr(importlib.import_module(place), there)
        elif module != "accelerate.utils" and not name.startswith("_"):
            public = importlib.import_module("accelerate.utils")
            if name in public.__all__:
                return getattr(public, name)
    except ModuleNotFoundError as error:
        raise AttributeError(f"module {module!r} has no attribute {name!r}: {error}") from error
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


class Package(ModuleType):
    """A package whose public modules become doors as they are imported."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        # The import system binds a module to its package when it is complete.
        if _is_submodule(self, name, value):
            open_door(value)


class Door(Package):
    """A public module: it hands out what lives elsewhere, and tells whoever replaces something in vain."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        path = f"{self.__name__}.{name}"
        if path in _REPLACED:
            return getattr(importlib.import_module(_REPLACED[path]), name)
        if "__path__" in vars(self):
            try:
                return importlib.import_module(path)
            except ModuleNotFoundError as error:
                if error.name != path:
                    raise
        return find(self.__name__, name)

    def __setattr__(self, name: str, value: Any) -> None:
        path = f"{self.__name__}.{name}"
        if path in _REPLACED:
            place = vars(importlib.import_module(_REPLACED[path]))
            _KEPT.setdefault(path, place[name])
            place[name] = value
            return
        first = not _is_submodule(self, name, value) and path not in _ASSIGNED
        in_vain = first and _is_only_shown(self, name)
        super().__setattr__(name, value)
        if first:
            _ASSIGNED.add(path)
        if in_vain:
            warn(
                f"{path} was replaced: scripts that read it there get the new one, but accelerate itself does not use "
                "it from there, so nothing else changes."
            )

    def __delattr__(self, name: str) -> None:
        path = f"{self.__name__}.{name}"
        if path in _KEPT:
            vars(importlib.import_module(_REPLACED[path]))[name] = _KEPT.pop(path)
        else:
            super().__delattr__(name)


def _is_submodule(module: ModuleType, name: str, value: Any) -> bool:
    return isinstance(value, ModuleType) and value.__name__ == f"{module.__name__}.{name}"


def _is_only_shown(module: ModuleType, name: str) -> bool:
    """Whether a name is there for scripts alone: it lives elsewhere, and no code of the module uses it."""
    if name.startswith("__") or module.__name__ == "accelerate.utils":  # there it is so in every release
        return False
    missing = object()
    value = getattr(module, name, missing)
    if value is missing or getattr(value, "__module__", None) == module.__name__:
        return False
    read: Any = getattr(module.__loader__, "get_code", None)
    if read is None:  # loaded by somebody's own importer, as pytest does with tests: nobody can tell
        return False
    code: Any = read(module.__name__)
    inside = [part for part in code.co_consts if isinstance(part, CodeType)]
    while inside:
        part = inside.pop()
        if name in part.co_names:
            return False
        inside += [inner for inner in part.co_consts if isinstance(inner, CodeType)]
    return True


def open_door(module: ModuleType) -> None:
    """Make a public module a door, with all of its own that are there already."""
    name = module.__name__
    if type(module) is ModuleType and (name in _DOORS or name.startswith(_PACKAGES)):
        module.__class__ = Door
        if "__path__" in vars(module):
            for other, child in list(sys.modules.items()):
                if other.startswith(f"{name}.") and child is not None:
                    open_door(child)
