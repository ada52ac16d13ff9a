"""Calls that the released package refuses on purpose, for `behaviour.py`, which compares the classes of the errors."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

Calls = dict[str, Callable[[], Any]]


def mistakes(folder: Path) -> Calls:
    """All of them, by what is wrong."""
    return {**everyday(folder), **settings(), **training(folder), **models(folder), **launching(folder)}


def everyday(folder: Path) -> Calls:
    from accelerate import Accelerator, DataLoaderConfiguration, ParallelismConfig, big_modeling, data_loader, hooks
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.logging import get_logger
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.tracking import GeneralTracker, filter_trackers
    from accelerate.utils import (
        BnbQuantizationConfig,
        DistributedType,
        FullyShardedDataParallelPlugin,
        GradientAccumulationPlugin,
        GradScalerKwargs,
        RNGType,
        TorchDynamoPlugin,
        compare_versions,
        environment,
        memory,
        modeling,
        offload,
        operations,
        other,
        random,
    )

    def accelerator(**settings: Any) -> Any:
        return Accelerator(cpu=True, **settings)

    def config(text: str) -> Any:
        path = folder / "config.yaml"
        path.write_text(text)
        return load_config_from_file(str(path))

    def reading(variable: str, value: str, function: Callable[[], Any]) -> Any:
        os.environ[variable] = value
        return function()

    def out_of_memory(batch_size: int) -> None:
        raise RuntimeError("CUDA out of memory.")

    def own(**attributes: Any) -> Any:
        return type("Own", (GeneralTracker,), attributes)()

    samples: Any = list(range(8))
    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    valid = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: 'no'\nuse_cpu: false\n"
    fsdp, quantized = FullyShardedDataParallelPlugin, BnbQuantizationConfig
    gathered = torch.save({name: torch.ones(7) for name in two.state_dict()}, folder / "shapes.bin")
    assert gathered is None
    return {
        "an unknown precision": lambda: accelerator(mixed_precision="bogus"),
        "another precision": lambda: (accelerator(), accelerator(mixed_precision="bf16")),
        "an unknown tracker": lambda: accelerator(log_with="bogus"),
        "an unknown tracker to filter": lambda: (PartialState(), filter_trackers("bogus")),
        "a tracker that was not started": lambda: accelerator().get_tracker("bogus"),
        "no handler": lambda: accelerator(kwargs_handlers=[3]),
        "a handler twice": lambda: accelerator(kwargs_handlers=[GradScalerKwargs(), GradScalerKwargs()]),
        "a plugin of FSDP that is none": lambda: accelerator(fsdp_plugin=3),
        "accumulation twice": lambda: accelerator(
            gradient_accumulation_steps=2, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=3)
        ),
        "an unknown compiler": lambda: accelerator(dynamo_backend="bogus"),
        "an unknown compiler of a plugin": lambda: TorchDynamoPlugin(backend="bogus"),
        "an unknown argument": lambda: accelerator(bogus=1),
        "load_state without a folder": lambda: accelerator().load_state(),
        "load_state of no folder": lambda: accelerator().load_state(str(folder / "none")),
        "an object without a state": lambda: accelerator().register_for_checkpointing(3),
        "placement of something else": lambda: accelerator().prepare(two, device_placement=[True, False]),
        "a model on the meta device": lambda: accelerator().save_model(nn.Linear(2, 2, device="meta"), folder / "m"),
        "dispatching without placement": lambda: accelerator(
            device_placement=False, dataloader_config=DataLoaderConfiguration(dispatch_batches=True)
        ).prepare(DataLoader(samples)),
        "an unknown setting of loaders": lambda: DataLoaderConfiguration(bogus=1),  # type: ignore[call-arg]
        "an attribute of an Accelerator": lambda: accelerator().bogus,
        "an attribute of a state": lambda: PartialState().bogus,
        "an attribute of the other state": lambda: AcceleratorState(cpu=True).bogus,
        "a logger before the state": lambda: get_logger("a").info("b"),
        "an unknown level": lambda: get_logger("a", log_level="bogus"),
        "batches that cannot be split": lambda: data_loader.prepare_data_loader(
            DataLoader(samples, batch_size=3), num_processes=2, process_index=0, split_batches=True
        ),
        "a stream that cannot be split": lambda: data_loader.IterableDatasetShard(
            samples, batch_size=3, num_processes=2, split_batches=True
        ),
        "an unknown truth value": lambda: environment.str_to_bool("x"),
        "a variable that is no number": lambda: reading("A_B", "x", lambda: environment.get_int_from_env(["A_B"], 1)),
        "a variable that is no switch": lambda: reading("A_B", "x", lambda: environment.parse_flag_from_env("A_B")),
        "steps that are no number": lambda: reading("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "x", accelerator),
        "no device": lambda: reading("ACCELERATE_TORCH_DEVICE", "cpu:x", PartialState),
        "an unknown device": lambda: reading("ACCELERATE_TORCH_DEVICE", "bogus", PartialState),
        "an unknown unit": lambda: modeling.convert_file_size_to_int("5XB"),
        "a negative size": lambda: modeling.convert_file_size_to_int(-1),
        "an unknown dtype": lambda: modeling.dtype_byte_size("x"),
        "an unknown comparison": lambda: compare_versions("torch", "~", "1"),
        "a file that is missing": lambda: other.load(folder / "none.pt"),
        "a tensor twice in a dict": lambda: (
            lambda tensor: other.save({"a": tensor, "b": tensor}, folder / "t.safetensors", safe_serialization=True)
        )(torch.ones(2)),
        "an unknown random state": lambda: random.synchronize_rng_state("bogus"),  # type: ignore[arg-type]
        "an unknown kind of random state": lambda: RNGType("bogus"),
        "an unknown kind of run": lambda: DistributedType("bogus"),
        "no batch size at all": memory.find_executable_batch_size(out_of_memory),
        "numbers to concatenate": lambda: operations.concatenate([1, 2]),
        "text to pad": lambda: operations.pad_across_processes("x"),
        "text of a batch": lambda: operations.find_batch_size([]),
        "pickling a forward": lambda: __import__("pickle").dumps(operations.ConvertOutputsToFp32(len)),
        "an unknown way of sharding": lambda: fsdp(sharding_strategy="bogus"),
        "an unknown way to prefetch": lambda: fsdp(backward_prefetch="bogus"),
        "an unknown way to wrap": lambda: fsdp(auto_wrap_policy="bogus"),
        "no layer of that name": lambda: fsdp(
            auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Bogus"]
        ).set_auto_wrap_policy(two),
        "8 and 4 bits": lambda: quantized(load_in_8bit=True, load_in_4bit=True),
        "no bits": lambda: quantized(),
        "bits that are none": lambda: quantized(load_in_8bit="x"),  # type: ignore[arg-type]
        "an unknown kind of bits": lambda: quantized(load_in_4bit=True, bnb_4bit_quant_type="x"),
        "a negative axis": lambda: ParallelismConfig(dp_shard_size=-1),
        "two axes of a sequence": lambda: ParallelismConfig(cp_size=2, sp_size=2),
        "an unknown backend of an axis": lambda: ParallelismConfig(cp_size=2, cp_backend="bogus"),  # type: ignore[arg-type]
        "no settings of an axis": lambda: ParallelismConfig(cp_size=2, cp_handler=3),  # type: ignore[arg-type]
        "a mesh of no device": lambda: ParallelismConfig(dp_shard_size=2).get_device_mesh(),
        "a tensor that is not there": lambda: modeling.set_module_tensor_to_device(two, "bogus", "cpu"),
        "a tensor of another shape": lambda: modeling.set_module_tensor_to_device(
            two, "0.weight", "cpu", torch.ones(3)
        ),
        "a map with a gap": lambda: modeling.check_device_map(two, {"0": 0}),
        "a map with a gap, dispatched": lambda: big_modeling.dispatch_model(two, {"0": "cpu"}),
        "a map to the disk without a folder": lambda: big_modeling.dispatch_model(two, {"0": "disk", "1": "cpu"}),
        "a map to an unknown device": lambda: big_modeling.dispatch_model(two, {"0": "bogus", "1": "cpu"}),
        "an unknown map": lambda: big_modeling.load_checkpoint_and_dispatch(two, folder, device_map="bogus"),
        "a checkpoint that is missing": lambda: modeling.load_checkpoint_in_model(two, str(folder / "none")),
        "weights that are missing": lambda: modeling.load_state_dict(str(folder / "none.safetensors")),
        "weights of other shapes": lambda: modeling.load_checkpoint_in_model(two, str(folder / "shapes.bin")),
        "a loader of nothing": lambda: offload.OffloadedWeightsLoader(),
        "a hook that is none": lambda: hooks.add_hook_to_module(nn.Linear(2, 2), 3),  # type: ignore[arg-type]
        "a tracker without a name": lambda: own(requires_logging_directory=False, tracker=1),
        "a tracker without a library": lambda: own(name="own", requires_logging_directory=False),
        "no config file": lambda: load_config_from_file(str(folder / "none.yaml")),
        "an unknown key": lambda: config(valid + "bogus: 1\n"),
        "an unknown place": lambda: config(valid.replace("LOCAL_MACHINE", "BOGUS")),
    }


def settings() -> Calls:
    """Plugins, handlers and configs of the wrong kind."""
    from torch.distributed.fsdp import CPUOffload, MixedPrecision, MixedPrecisionPolicy

    from accelerate import DistributedDataParallelKwargs, ParallelismConfig, utils
    from accelerate.utils import (
        BnbQuantizationConfig,
        DeepSpeedSequenceParallelConfig,
        FP8RecipeKwargs,
        FullyShardedDataParallelPlugin,
        MSAMPRecipeKwargs,
        ProfileKwargs,
        TERecipeKwargs,
        TorchContextParallelConfig,
    )

    fsdp: Any = FullyShardedDataParallelPlugin
    bits: Any = BnbQuantizationConfig
    return {
        "a word for reshard_after_forward in version 2": lambda: fsdp(
            fsdp_version=2, reshard_after_forward="full_shard"
        ),
        "a truth value for it in version 1": lambda: fsdp(fsdp_version=1, reshard_after_forward=True),
        "offloaded activations that are not recomputed": lambda: fsdp(
            fsdp_version=2, activation_checkpointing_offload=True
        ),
        "offloaded activations in version 1": lambda: fsdp(
            fsdp_version=1, activation_checkpointing=True, activation_checkpointing_offload=True
        ),
        "a local state dict in version 2": lambda: fsdp(fsdp_version=2, state_dict_type="LOCAL_STATE_DICT"),
        "an unknown state dict": lambda: fsdp(state_dict_type="bogus"),
        "a size that is no number": lambda: fsdp(auto_wrap_policy="size_based_wrap", min_num_params="x"),
        "an unknown precision of FSDP": lambda: fsdp().set_mixed_precision("bogus"),
        "a dtype that FSDP does not take": lambda: fsdp().set_mixed_precision(torch.int8),
        "the policy of version 1 in version 2": lambda: fsdp(fsdp_version=2, mixed_precision_policy=MixedPrecision()),
        "the policy of version 2 in version 1": lambda: fsdp(
            fsdp_version=1, mixed_precision_policy=MixedPrecisionPolicy()
        ),
        "keys that a policy does not have": lambda: fsdp(mixed_precision_policy={"bogus": torch.float16}),
        "the offloading of version 1 in version 2": lambda: fsdp(fsdp_version=2, cpu_offload=CPUOffload(True)),
        "the offloading of version 2 in version 1": lambda: fsdp(fsdp_version=1, cpu_offload=3),
        "a plugin with an unknown argument": lambda: fsdp(bogus=1),
        "a handler with an unknown argument": lambda: DistributedDataParallelKwargs(bogus=1),  # type: ignore[call-arg]
        "an unknown format of fp8": lambda: TERecipeKwargs(fp8_format="bogus"),  # type: ignore[arg-type]
        "an unknown level of MS-AMP": lambda: MSAMPRecipeKwargs(opt_level="bogus"),  # type: ignore[arg-type]
        "an unknown backend of fp8": lambda: FP8RecipeKwargs(backend="bogus"),  # type: ignore[arg-type]
        "an unknown activity of a profile": lambda: ProfileKwargs(activities=["bogus"]).build(),  # type: ignore[list-item]
        "an unknown way of context parallelism": lambda: TorchContextParallelConfig(cp_comm_strategy="bogus"),  # type: ignore[arg-type]
        "a sequence without a length": lambda: DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=False),
        "an attention that cannot be cut": lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"),
        "an unknown attention": lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="bogus"),
        "no replicas": lambda: ParallelismConfig(dp_replicate_size=0),
        "no tensor-parallel processes": lambda: ParallelismConfig(tp_size=0),
        "no context-parallel processes": lambda: ParallelismConfig(cp_size=0),
        "no sequence-parallel processes": lambda: ParallelismConfig(sp_size=0),
        "an unknown backend of sequences": lambda: ParallelismConfig(sp_size=2, sp_backend="bogus"),  # type: ignore[arg-type]
        "4 bits that are none": lambda: bits(load_in_4bit="x"),
        "a threshold that is no number": lambda: bits(load_in_8bit=True, llm_int8_threshold="x"),
        "a kind of bits that is no word": lambda: bits(load_in_4bit=True, bnb_4bit_quant_type=3),
        "twice or not, as a word": lambda: bits(load_in_4bit=True, bnb_4bit_use_double_quant="x"),
        "an unknown dtype to compute in": lambda: bits(load_in_4bit=True, bnb_4bit_compute_dtype="x"),
        "a dtype to compute in that is none": lambda: bits(load_in_4bit=True, bnb_4bit_compute_dtype=3),
        "modules to skip that are no list": lambda: bits(load_in_8bit=True, skip_modules="x"),
        "modules to keep that are no list": lambda: bits(load_in_8bit=True, keep_in_fp32_modules="x"),
        "an unknown dtype of the rest": lambda: bits(load_in_8bit=True, torch_dtype="x"),
        "a dtype of the rest that is none": lambda: bits(load_in_8bit=True, torch_dtype=3),
        "a function that needs torchao": lambda: utils.imports.torchao_required(len)([]),
        "a function that needs DeepSpeed": lambda: utils.imports.deepspeed_required(len)([]),
        "an unknown member": lambda: utils.PrecisionType("bogus"),
        "an unknown logger": lambda: utils.LoggerType("bogus"),
    }


def training(folder: Path) -> Calls:
    """Accelerators, loaders and checkpoints."""
    from accelerate import Accelerator, PartialState, checkpointing, data_loader
    from accelerate.state import AcceleratorState
    from accelerate.utils import (
        ProjectConfiguration,
        TorchDynamoPlugin,
        memory,
        operations,
        send_to_device,
        tqdm,
    )

    def accelerator(**settings: Any) -> Any:
        return Accelerator(cpu=True, **settings)

    class Own:
        def __init__(self) -> None:
            self.value = 1

        def state_dict(self) -> dict[str, Any]:
            return {"value": self.value}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.value = state["value"]

    def saved_with(*objects: Own) -> Any:
        here = accelerator()
        here.register_for_checkpointing(*objects)
        here.save_state(str(folder / "state"))
        return here

    def twice() -> None:
        named = ProjectConfiguration(str(folder / "project"), automatic_checkpoint_naming=True)
        here = accelerator(project_config=named)
        here.save_state()
        here.project_configuration.iteration = 0
        here.save_state()

    class Endless(torch.optim.SGD):
        def zero_grad(self) -> None:  # type: ignore[override]
            """Takes no argument."""

    def zeroed() -> None:
        layer = nn.Linear(2, 2)
        accelerator().prepare(Endless(layer.parameters(), lr=0.1)).zero_grad(set_to_none=True)

    samples: Any = list(range(8))
    no_size: Any = [[0, 1, 2], [3, 4, 5]]
    return {
        "a compiler and its plugin": lambda: accelerator(
            dynamo_backend="eager", dynamo_plugin=TorchDynamoPlugin(backend="eager")
        ),
        "a rank among tensor-parallel processes": lambda: accelerator().tensor_parallel_rank,
        "a rank among stages": lambda: accelerator().pipeline_parallel_rank,
        "a rank among data-parallel processes": lambda: accelerator().data_parallel_rank,
        "a rank among shards": lambda: accelerator().data_parallel_shard_rank,
        "a decorator of the class": lambda: Accelerator.on_main_process(3),
        "another decorator of the class": lambda: Accelerator.on_last_process(3),
        "a decorator with a number": lambda: Accelerator.on_process(3),
        "a local decorator": lambda: Accelerator.on_local_process(3),
        "settings of loaders that are none": lambda: accelerator(dataloader_config=3),
        "a state before the Accelerator": lambda: AcceleratorState(),
        "a state with a precision, before it": lambda: AcceleratorState(mixed_precision="bf16"),
        "the state for a GPU, then for the CPU": lambda: (accelerator(), AcceleratorState(mixed_precision="fp16")),
        "a decorator before the state": lambda: PartialState._reset_state() or PartialState.on_main_process(None, len),
        "the same name twice": twice,
        "other objects than those that were saved": lambda: (
            accelerator().save_state(str(folder / "fewer")),
            saved_with(Own()).load_state(str(folder / "fewer")),
        ),
        "an object without load_state_dict": lambda: accelerator().register_for_checkpointing(
            nn.Linear(1, 1), object()
        ),
        "optimizers to an unknown place": lambda: saved_with().load_state(
            str(folder / "state"), load_kwargs={"weights_only": True}, map_location="bogus"
        ),
        "a place for optimizers": lambda: checkpointing.load_accelerator_state(
            str(folder), [], [], [], [], 0, map_location="bogus"
        ),
        "an automatic load without a folder": lambda: accelerator(
            project_config=ProjectConfiguration(str(folder / "x"), automatic_checkpoint_naming=True)
        ).load_state(),
        "zero_grad that takes no argument": zeroed,
        "a learning rate for LOMO": lambda: accelerator().lomo_backward(torch.ones(()), None),
        "an optimizer that is no LOMO": lambda: accelerator().lomo_backward(torch.ones(()), 0.1),
        "indices that cannot be split": lambda: data_loader.BatchSamplerShard(
            torch.utils.data.BatchSampler(samples, 3, False), num_processes=2, split_batches=True
        ),
        "batches without a size": lambda: data_loader.BatchSamplerShard(no_size, num_processes=2, split_batches=True),
        "a loader of them": lambda: data_loader.prepare_data_loader(
            DataLoader(samples, batch_sampler=no_size), num_processes=2, process_index=0, split_batches=True
        ),
        "dispatching without a device": lambda: data_loader.prepare_data_loader(
            DataLoader(samples), put_on_device=False, dispatch_batches=True
        ),
        "batches to skip of nothing": lambda: data_loader.skip_first_batches(None, 1),
        "a progress bar of True": lambda: tqdm(True, range(3)),
        "a batch size that was passed": lambda: memory.find_executable_batch_size(lambda batch_size: None)(8),
        "a batch size in the wrong place": lambda: memory.find_executable_batch_size(lambda: None)(),
        "other types": lambda: operations.recursively_apply(lambda x: x, "x", error_on_other_type=True),
        "a batch of text": lambda: operations.find_batch_size("x"),
        "a gather of text": lambda: operations.gather("x"),
        "a reduction of text": lambda: operations.reduce("x"),
        "a broadcast of a number": lambda: operations.broadcast(object()),
        "an unknown device for a tensor": lambda: send_to_device(torch.ones(1), "bogus"),
        "a trigger without a state": lambda: accelerator().set_trigger(1),
        "a profile that is none": lambda: accelerator().profile(3).__enter__(),
        "a hook that is no function": lambda: accelerator().register_save_state_pre_hook(3).remove(3),
        "gradients to clip without a norm": lambda: accelerator().clip_grad_norm_(nn.Linear(2, 2).parameters(), "x"),
        "a backward of nothing": lambda: accelerator().backward(None),
        "a model that is no model": lambda: accelerator().prepare_model(3),
        "a name of the checkpoint that is no folder": lambda: accelerator().load_state(__file__),
    }


def models(folder: Path) -> Calls:
    """Weights, device maps and hooks."""
    from safetensors.torch import save_file

    from accelerate import big_modeling, hooks
    from accelerate.utils import fsdp_utils, modeling, offload, other

    two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    empty = nn.Linear(2, 2, device="meta")

    def checkpoint(name: str, **files: str) -> str:
        (folder / name).mkdir(exist_ok=True)
        for file, text in files.items():
            (folder / name / file.replace("__", ".")).write_text(text)
        return str(folder / name)

    def weights(name: str, **metadata: str) -> str:
        save_file({"0.weight": torch.ones(2, 2)}, folder / name, metadata or None)
        return str(folder / name)

    def moved() -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        big_modeling.dispatch_model(model, {"0": "cpu", "1": "disk"}, offload_dir=str(folder / "off")).to("cpu")

    def limited(**memory: Any) -> None:
        modeling.infer_auto_device_map(two, max_memory=memory)

    return {
        "a meta tensor without a value": lambda: modeling.set_module_tensor_to_device(empty, "weight", "cpu"),
        "a module that is not there": lambda: modeling.set_module_tensor_to_device(two, "7.weight", "cpu"),
        "an XPU that is not there": lambda: modeling.set_module_tensor_to_device(
            nn.Linear(2, 2), "weight", "xpu:0", torch.ones(2, 2)
        ),
        "memory of an unknown device": lambda: limited(bogus=1),
        "a size of memory that is none": lambda: limited(cpu="5XB"),
        "a folder without weights": lambda: modeling.load_checkpoint_in_model(two, checkpoint("bare")),
        "a folder with two indices": lambda: modeling.load_checkpoint_in_model(
            two, checkpoint("two", a__index__json="{}", b__index__json="{}")
        ),
        "weights to the disk without a folder": lambda: modeling.load_checkpoint_in_model(
            two, weights("pt.safetensors", format="pt"), device_map={"": "disk"}
        ),
        "a map that lacks a weight": lambda: modeling.load_checkpoint_in_model(
            two, weights("pt.safetensors", format="pt"), device_map={"1": "cpu"}
        ),
        "safetensors without metadata": lambda: modeling.load_state_dict(weights("bare.safetensors")),
        "safetensors of another library": lambda: modeling.load_state_dict(weights("tf.safetensors", format="tf")),
        "safetensors of no library, into a model": lambda: modeling.load_checkpoint_in_model(
            two, weights("np.safetensors", format="np")
        ),
        "a name that is not in the model, strictly": lambda: modeling.load_checkpoint_in_model(
            nn.Linear(2, 2), weights("pt.safetensors", format="pt"), strict=True
        ),
        "an offloaded model that is moved": moved,
        "an offloaded model that is moved to a dtype": lambda: big_modeling.cpu_offload(nn.Linear(2, 2), "cpu").to(
            "bogus"
        ),
        "a dispatch of a checkpoint that is missing": lambda: big_modeling.load_checkpoint_and_dispatch(
            two, folder / "none", device_map="auto"
        ),
        "no weight of that name": lambda: offload.OffloadedWeightsLoader(state_dict={})["bogus"],
        "hooks that are none": lambda: hooks.add_hook_to_module(two, "x", append=True),  # type: ignore[arg-type]
        "a folder of shards that is none": lambda: fsdp_utils.merge_fsdp_weights(
            str(folder / "none"), str(folder / "merged")
        ),
        "a submodule that is not there": lambda: two.get_submodule("7"),
        "a module of no name": lambda: other.recursive_getattr(two, "0.bogus"),
        "a layer that is not there": lambda: modeling.find_tied_parameters(3),  # type: ignore[arg-type]
        "sizes of nothing": lambda: modeling.compute_module_sizes(3),  # type: ignore[arg-type]
        "sizes of a shard": lambda: modeling.convert_file_size_to_int("bogus"),
        "a scaler of an unknown kind": lambda: modeling.get_grad_scaler("bogus"),  # type: ignore[arg-type]
        "layers to cast that are none": lambda: big_modeling.attach_layerwise_casting_hooks(two, "x", "y"),  # type: ignore[arg-type]
        "a port that is none": lambda: other.is_port_in_use("bogus"),
        "a checkpoint of no format": lambda: other.load(folder / "x.bogus"),
    }


def launching(folder: Path) -> Calls:
    """The launchers, the commands and their files."""
    import accelerate.commands.config.update as update
    from accelerate.commands import launch as command
    from accelerate.commands import to_fsdp2
    from accelerate.commands.config import default
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.launchers import notebook_launcher
    from accelerate.utils import environment, launch

    script = folder / "script.py"
    script.write_text("")

    def parsed(*flags: str) -> argparse.Namespace:
        return command.launch_command_parser().parse_args([*flags, str(script)])

    def wrong(function: Callable[[argparse.Namespace], Any], *flags: str, **more: Any) -> Any:
        arguments = parsed(*flags)
        vars(arguments).update(more)
        return function(arguments)

    complete = {
        "num_machines": 1,
        "num_processes": 1,
        "mixed_precision": "no",
        "dynamo_backend": "no",
        "gpu_ids": "all",
        "mpirun_hostfile": None,
        "use_cpu": False,
    }

    def config(text: str) -> Any:
        (folder / "c.yaml").write_text(text)
        return load_config_from_file(str(folder / "c.yaml"))

    def converted(*flags: str) -> Any:
        (folder / "c.yaml").write_text("distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n")
        (folder / "there.yaml").write_text("")
        return to_fsdp2.to_fsdp2_command(to_fsdp2.to_fsdp2_command_parser().parse_args([*flags]))

    simple, several = launch.prepare_simple_launcher_cmd_env, launch.prepare_multi_gpu_env
    return {
        "a module and no Python": lambda: wrong(simple, "--module", "--no_python", **complete),
        "the same on several processes": lambda: wrong(several, "--module", "--no_python", **complete),
        "a precision that is none": lambda: wrong(simple, **{**complete, "mixed_precision": "bogus"}),
        "the same precision on several": lambda: wrong(several, **{**complete, "mixed_precision": "bogus"}),
        "a compiler that is none": lambda: wrong(simple, **{**complete, "dynamo_backend": "bogus"}),
        "the same compiler on several": lambda: wrong(several, **{**complete, "dynamo_backend": "bogus"}),
        "two engines at once": lambda: command.launch_command(parsed("--multi_gpu", "--tpu")),
        "axes without FSDP": lambda: command.launch_command(parsed("--use_parallelism_config")),
        "a file that is no config": lambda: command.launch_command(parsed("--config_file", str(folder / "none.yaml"))),
        "SageMaker arguments that are switches": lambda: launch._convert_nargs_to_dict(["--a", "--b", "1"]),
        "a switch at the end of them": lambda: launch._convert_nargs_to_dict(["--a", "1", "--b"]),
        "a notebook of no process": lambda: notebook_launcher(print, (), num_processes=2, node_rank=3, num_nodes=2),
        "a notebook with an Accelerator": lambda: (
            __import__("accelerate").Accelerator(cpu=True),
            notebook_launcher(print, (), num_processes=2),
        ),
        "a config of two machines of another kind": lambda: config("distributed_type: BOGUS\nmixed_precision: 'no'\n"),
        "a config that is no file": lambda: ClusterConfig.from_yaml_file(str(folder / "none.yaml")),
        "a JSON config that is no file": lambda: ClusterConfig.from_json_file(str(folder / "none.json")),
        "a basic config of an unknown precision": lambda: default.write_basic_config(
            "bogus", save_location=str(folder / "basic.yaml")
        ),
        "an update of nothing": lambda: update.update_config(argparse.Namespace(config_file=str(folder / "none.yaml"))),
        "a conversion of nothing": lambda: converted("--config_file", str(folder / "none.yaml"), "--overwrite"),
        "a conversion to nowhere": lambda: converted("--config_file", str(folder / "c.yaml")),
        "a conversion over a file": lambda: converted(
            "--config_file", str(folder / "c.yaml"), "--output_file", str(folder / "there.yaml")
        ),
        "a variable of no choice": lambda: environment.parse_choice_from_env("PATH", 3) and environment.str_to_bool(""),
    }
