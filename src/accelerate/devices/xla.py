"""TPUs, and whatever else torch_xla compiles for.

Operations are collected, and run as one graph when it is closed: at the next batch, after an optimizer's step, or where
somebody asks for a value. A graph that looks like an earlier one is not compiled again.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from accelerate.available import has_package, is_torch_xla_available
from accelerate.comm import Communicator, torch_dist
from accelerate.comm.tree import recursively_apply, send_to_device
from accelerate.config.enums import DistributedType
from accelerate.devices.base import Device, Memory
from accelerate.devices.cpu import CPU
from accelerate.devices.transfer import Transfer
from accelerate.environments import World
from accelerate.environments.base import DEFAULT_PORT, integer
from accelerate.errors import Unfit, warn

if TYPE_CHECKING:
    from accelerate.devices.spmd import Sharding

_PJRT_DEVICE = "PJRT_DEVICE"  # what torch_xla compiles for: TPU, CPU, ...


class XLA(Device):
    addressable = False
    sharding_label = DistributedType.XLA

    def __init__(self) -> None:
        super().__init__("xla", backend="xla", label=DistributedType.XLA, plugin="torch_xla")

    @property
    def module(self) -> Any:
        return importlib.import_module("torch_xla")

    @property
    def _model(self) -> Any:
        return importlib.import_module("torch_xla.core.xla_model")

    def available(self) -> bool:
        """Whether there is a TPU, or the environment names another device for torch_xla.

        That torch_xla is merely installed is not enough: without a TPU it would compute on the CPU, beside a GPU too.
        """
        if not is_torch_xla_available():
            if _PJRT_DEVICE in os.environ and not has_package("torch_xla"):
                warn(
                    f"{_PJRT_DEVICE} is {os.environ[_PJRT_DEVICE]!r}, but torch_xla, which it is for, is not "
                    "installed: install the release with the same version number as torch, or unset the variable."
                )
            return False
        if _PJRT_DEVICE in os.environ:
            return True
        found = self.module.runtime.device_type()
        if found != "TPU":
            os.environ.pop(_PJRT_DEVICE, None)  # torch_xla's own choice, which is nobody's wish
        return bool(found == "TPU")

    def count(self) -> int:
        return int(self.module.device_count())

    def select(self, index: int) -> torch.device:
        return self.default()

    def pin(self, index: int) -> torch.device:
        device: torch.device = self.module.device(index)
        return device

    def default(self) -> torch.device:
        device: torch.device = self.module.device()
        return device

    def seed(self, seed: int) -> None:
        self._model.set_rng_state(seed)

    @property
    def rng_key(self) -> str:
        return "xm_seed"

    def stored_rng(self) -> int:
        return int(self._model.get_rng_state())

    def restore_rng(self, saved: int) -> None:
        self._model.set_rng_state(saved)

    def rng_state(self) -> torch.Tensor:
        return torch.tensor([self._model.get_rng_state()], dtype=torch.uint64)

    def set_rng_state(self, state: torch.Tensor) -> None:
        self._model.set_rng_state(int(state[0]))

    def synchronize(self) -> None:
        self.module.sync(wait=True)

    @property
    def close_step(self) -> Callable[[], Any]:
        sync: Callable[[], Any] = self.module.sync
        return sync

    def empty_cache(self) -> None:
        """There is none."""

    def memory(self, index: int = 0) -> Memory:
        try:
            used = self._model.get_memory_info(self.pin(index))
        except RuntimeError:  # it cannot tell for the CPU
            return CPU().memory()
        return Memory(used["bytes_limit"] - used["bytes_used"], used["bytes_limit"])

    def supports(self, mode: str) -> bool:
        return mode in ("no", "bf16")

    def will_shard(self) -> None:
        from accelerate.devices import spmd

        spmd.begin()

    def place(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        # Otherwise a parameter would become another object on its way: tied ones would become several, and an optimizer
        # that was made before would keep those on the host.
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            return super().place(model, device)
        finally:
            torch.__future__.set_swap_module_params_on_conversion(swaps)

    def storable(self, content: Any) -> Any:
        from accelerate.torch_internals.xla import tensor_id

        copies: dict[int, torch.Tensor] = {}

        def on_host(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.device.type != self.name:
                return tensor
            number = tensor_id(tensor)
            if number not in copies:
                copies[number] = tensor.detach().cpu()
            return copies[number]

        return recursively_apply(on_host, content)

    def transfer(self, device: torch.device, non_blocking: bool) -> Transfer:
        from accelerate.devices.spmd import Sharding

        return XLATransfer(self, device, Sharding.in_use())

    def join(self, world: World, options: dict[str, Any], attempt: int = 0) -> torch_dist.Joined | None:
        """Take a chip, and meet the processes that have the others.

        Which rank this is, is for torch_xla to say: it numbers the chips by where they are, and not as a launcher does.
        """
        from accelerate.torch_internals.xla import take_a_chip

        runtime = self.module.runtime
        if world.local_size > 1 and not runtime.is_spmd():
            take_a_chip(world.local_rank, world.local_size)
        ours = self._world_of_chips(world)
        if ours.size == 1:
            return torch_dist.Joined(ours, self.backend)
        os.environ.update(ours.variables())
        torch_dist.join(ours, "cpu", "gloo", options, attempt)
        return torch_dist.Joined(ours, self.backend)

    def _world_of_chips(self, world: World) -> World:
        """Who this process is as torch_xla counts; `world` is what its launcher says, if there is one."""
        runtime = self.module.runtime
        spmd = bool(runtime.is_spmd())
        size = int(runtime.process_count() if spmd else runtime.world_size())
        if world.size not in (1, size):
            raise Unfit(
                f"This is one of {world.size} processes, but torch_xla finds {size} "
                f"{'processes' if spmd else 'devices'}: start one process for each chip of the TPU (`accelerate launch "
                "--tpu` counts them), or one for each machine to shard models over its chips with FSDP."
            )
        if size == 1:
            return world
        if not spmd and runtime.addressable_device_count() > 1:
            raise Unfit(
                f"Each process of this TPU has {runtime.addressable_device_count()} cores, as on TPU v2 and v3, and "
                "cores are not supported as ranks: use one process, and FSDP to shard models over all of its cores."
            )
        rank = int(runtime.process_index() if spmd else runtime.global_ordinal())
        if world.size == size:
            return replace(world, rank=rank)
        # The script has started the processes, by torch_xla's own launcher.
        address = os.environ.get("MASTER_ADDR") or (
            runtime.get_master_ip() if runtime.device_type() == "TPU" else "127.0.0.1"
        )
        return World(
            rank,
            size,
            local_rank=0 if spmd else int(runtime.local_ordinal()),
            local_size=int(runtime.local_process_count()),
            address=address,
            port=integer(os.environ, ["MASTER_PORT"], DEFAULT_PORT) or DEFAULT_PORT,
            started_by="torch_xla",
            reason=f"torch_xla counts {size} processes",
        )

    def communicator(self, device: torch.device) -> Communicator:
        from accelerate.comm.xla import XLACommunicator

        return XLACommunicator(device) if torch_dist.has_group() else Communicator()


class XLATransfer(Transfer):
    """Batches are on their way one ahead of the loop, and each begins a graph of its own.

    sharding: how they are cut for several devices.
    """

    def __init__(self, kind: XLA, device: torch.device, sharding: Sharding | None) -> None:
        self.device = device
        self._sharding = sharding
        self._close_step = kind.close_step

    def start(self, batch: Any, late: bool = False) -> Any:
        if self._sharding is not None:
            batch = recursively_apply(self._send, batch)
        return send_to_device(batch, self.device)

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        assert self._sharding is not None
        return self._sharding.send(tensor, self.device) if tensor.device.type == "cpu" else tensor

    def finish(self, batch: Any) -> Any:
        self._close_step()
        return batch
