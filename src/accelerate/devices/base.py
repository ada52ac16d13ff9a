"""What the package asks of hardware. The defaults suit every device that has a `torch.<name>` module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from accelerate.comm import Communicator, torch_dist
from accelerate.config.enums import DistributedType
from accelerate.devices.transfer import BlockingTransfer, Transfer
from accelerate.environments import World

# What torch takes where a device is asked for.
DeviceLike = int | str | torch.device


class Memory(NamedTuple):
    """Bytes of one device."""

    free: int
    total: int


class Device:
    """One kind of hardware.

    name: torch's name of the device type. backend: the process-group backend it talks through.
    label: what `distributed_type` reports when several processes use it. tested: whether it is part of our tests.
    """

    # What `distributed_type` reports where FSDP shards models.
    sharding_label = DistributedType.FSDP
    # Whether the memory of its tensors can be seen as bytes: files are then read into it, and written from it.
    addressable = True
    # Whether copies between it and pinned host memory go on behind the program, until the device is synchronized.
    copies_behind = False

    def __init__(
        self,
        name: str,
        *,
        backend: str,
        label: DistributedType,
        tested: bool = True,
        plugin: str | None = None,
    ) -> None:
        self.name = name
        self.backend = backend
        self.label = label
        self.tested = tested
        self.plugin = plugin  # the package that registers the device with torch, imported before it is asked for

    def __repr__(self) -> str:
        return f"Device({self.name!r})"

    @property
    def module(self) -> Any:
        """`torch.cuda` and its likes."""
        return getattr(torch, self.name)

    def available(self) -> bool:
        if not hasattr(torch, self.name) and not self._load_plugin():
            return False
        return hasattr(torch, self.name) and bool(self.module.is_available())

    def _load_plugin(self) -> bool:
        from importlib import import_module
        from importlib.util import find_spec

        # The outermost package first: looking for a.b where there is no a is an error of its own.
        if self.plugin is None or find_spec(self.plugin.partition(".")[0]) is None:
            return False
        import_module(self.plugin)
        return True

    def count(self) -> int:
        return int(self.module.device_count())

    def select(self, index: int) -> torch.device:
        """Make device `index` (modulo how many there are) the current one and return it."""
        device = torch.device(self.name, index % max(self.count(), 1))
        self.module.set_device(device)
        return device

    def pin(self, index: int) -> torch.device:
        """Make just this device, which somebody has named, the current one and return it."""
        device = torch.device(self.name, index)
        self.module.set_device(device)
        return device

    def default(self) -> torch.device:
        """The device of a single process."""
        return torch.device(self.name)

    def will_shard(self) -> None:
        """Told, before this process uses it, that FSDP will shard models."""

    def place(self, model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
        """A model on `device`, one of this kind, with the parameters that it had, and that optimizers have."""
        return model.to(device)

    def seed(self, seed: int) -> None:
        self.module.manual_seed_all(seed)

    def rng_state(self) -> torch.Tensor:
        state: torch.Tensor = self.module.get_rng_state()
        return state

    def set_rng_state(self, state: torch.Tensor) -> None:
        self.module.set_rng_state(state)

    @property
    def rng_key(self) -> str:
        """The name of its random state in checkpoints."""
        return f"torch_{self.name}_manual_seed"

    def stored_rng(self) -> Any:
        """Its random state for a checkpoint; in most cases a list, one for each device that this process sees."""
        everyone = getattr(self.module, "get_rng_state_all", None)
        return everyone() if everyone is not None else self.rng_state()

    def restore_rng(self, saved: Any) -> None:
        """Take up a state of `stored_rng`, also of a process that saw another number of devices."""
        if not isinstance(saved, (list, tuple)):
            self.set_rng_state(saved.cpu())
        elif len(saved) == self.count():
            self.module.set_rng_state_all([state.cpu() for state in saved])
        elif saved:
            self.set_rng_state(saved[0].cpu())

    def synchronize(self) -> None:
        self.module.synchronize()

    def works(self, device: torch.device) -> bool:
        """Whether `device` still has something to do; asked by another thread than the one that gives it work."""
        return False

    @property
    def close_step(self) -> Callable[[], Any]:
        """Runs what a step has collected, without waiting for it; most devices run everything at once."""
        return lambda: None

    def empty_cache(self) -> None:
        """Give memory that torch keeps for later back to the device, where torch keeps any."""
        empty = getattr(self.module, "empty_cache", None)
        if empty is not None:
            empty()

    def memory(self, index: int = 0) -> Memory:
        return Memory(*self.module.mem_get_info(index))

    def reserve(self, nbytes: int, device: torch.device) -> None:
        """Take memory of `device` for what is about to be allocated there in small parts, where that is faster."""

    def supports(self, mode: str) -> bool:
        """Whether arithmetic in `mode` ("no", "fp16", "bf16", "fp8") runs here."""
        if mode == "fp8":
            return self.lacks_fp8() is None
        return mode != "bf16" or bool(getattr(self.module, "is_bf16_supported", lambda: True)())

    def lacks_fp8(self) -> str | None:
        """What is missing here for matrix products in fp8; None where nothing is."""
        return f"it needs an NVIDIA GPU of compute capability 8.9 or more, but this device is {self.name!r}"

    def storable(self, content: Any) -> Any:
        """Nested content for a file; tensors whose memory is not `addressable` are on the host, each of them once."""
        return content

    # --- what goes to the device, and between processes ---------------------------------------------------------

    # Called with a device of this kind, and whether not to wait for copies: how the batches of an iteration get there.
    transfer: Callable[[torch.device, bool], Transfer] = BlockingTransfer

    def join(self, world: World, options: dict[str, Any], attempt: int = 0) -> torch_dist.Joined | None:
        """Join the processes of `world`; None where this one is alone.

        options: for the process group. attempt: how many groups this process has left before.
        """
        return torch_dist.join(world, self.name, self.backend, options, attempt)

    def communicator(self, device: torch.device) -> Communicator:
        """How this process, on `device`, talks to those it has joined."""
        return torch_dist.TorchDistributed(device)
