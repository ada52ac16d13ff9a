"""The Accelerator, by what a user is doing: set up (base), prepare, step, collect, save, stop, report."""

import inspect
from types import FunctionType

from accelerate.accelerator.collect import Collecting
from accelerate.accelerator.preemption import Preempting
from accelerate.accelerator.prepare import Preparing
from accelerate.accelerator.step import Stepping

__all__ = ["Accelerator"]


class Accelerator(Preparing, Stepping, Collecting, Preempting):
    """Runs a plain PyTorch loop on whatever this process was started for.

    Create one, pass models, optimizers, loaders and schedulers through `prepare`, call `backward(loss)` in place of
    `loss.backward()`: the same script then runs on one CPU, one GPU, or many processes on many machines.

    Args:
        device_placement: put prepared objects, and every batch, on the device.
        split_batches: deprecated place of `DataLoaderConfiguration(split_batches=...)`.
        mixed_precision: "no", "fp16", "bf16" or "fp8"; by default what the launcher was told.
        gradient_accumulation_steps: how many micro-batches make one optimizer step (see `accumulate`).
        cpu: use the CPU even where there is something better.
        dataloader_config: how loaders are spread over processes.
        rng_types: random states that follow rank 0 at the start of each epoch (default: the sampler's generator).
        log_with: the trackers to log to: names, "all", or objects (see `init_trackers`).
        project_dir: where a run keeps its files.
        project_config: the same, with names and limits of checkpoints.
        gradient_accumulation_plugin: finer settings of accumulation.
        step_scheduler_with_optimizer: step schedulers only when the optimizer stepped, once per process.
        kwargs_handlers: arguments for DDP, the process group, autocast, the gradient scaler and the profiler.
        dynamo_backend: compile models with `torch.compile`.
        dynamo_plugin: the same, with all settings of compilation.
        fsdp_plugin: shard models over the processes with FSDP.
        parallelism_config: the axes of a device mesh: copies, shards, split layers, cut sequences.
        torch_tp_plugin: split layers only; `parallelism_config` says the same.
        deepspeed_plugin: train with DeepSpeed; or several plugins by name (see `state.select_deepspeed_plugin`).
        deepspeed_plugins: the same as `deepspeed_plugin`.
        preemption: "save": save the run and end it, when a signal says that the machines are taken away.
        nonfinite: "skip" leaves out steps whose gradients are not finite; "stop" ends the run at the first one, and
            says from which rank, samples and module it came.
        megatron_lm_plugin: train with Megatron-LM, which splits tensors and layers over processes.
    """


def _name_methods_after(kind: type) -> None:
    """Give methods the name that Python says when arguments do not fit: of the class that users know."""
    for part in kind.__mro__:
        if part.__module__.startswith(__name__):
            for name, method in vars(part).items():
                function = inspect.unwrap(getattr(method, "__func__", method))
                if isinstance(function, FunctionType):
                    function.__qualname__ = f"{kind.__name__}.{name}"


_name_methods_after(Accelerator)
