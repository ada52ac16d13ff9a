"""ParallelismConfig: over how many processes each axis goes, and the device mesh they form."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from accelerate.config.parallel import (
    PREFIX,
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accelerate.errors import a_kind_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# From the outside in: neighbors on the last axis are neighbors on the machine, and talk most.
MESH_ORDER = ("dp_replicate", "dp_shard", "cp", "sp", "tp")

_AXES = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
_BACKENDS = {"cp": "torch", "sp": "deepspeed"}
_HANDLERS = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
}


@dataclass
class ParallelismConfig:
    """Choose how a run is parallelized: the axes of its device mesh.

    An axis of size 1 is left out. Settings that are not given are read from the `PARALLELISM_CONFIG_*` variables.

    Args:
        dp_replicate_size: the number of replicas of the model.
        dp_shard_size: the number of ranks that share one replica (FSDP).
        tp_size: the number of ranks that share each layer.
        cp_size: the number of ranks that share each sequence (context parallelism).
        cp_backend: "torch".
        sp_size: the number of ranks that share each sequence (DeepSpeed's sequence parallelism).
        sp_backend: "deepspeed".
        tp_handler: more settings of tensor parallelism.
        cp_handler: more settings of context parallelism.
        sp_handler: more settings of sequence parallelism.

    Example:
        ```python
        accelerator = Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=4, tp_size=2))
        ```
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: Literal["torch"] = None  # type: ignore[assignment]
    sp_size: int | None = None
    sp_backend: Literal["deepspeed"] = None  # type: ignore[assignment]

    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None

    device_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for axis in _AXES:
            setattr(self, f"{axis}_size", _size(axis, getattr(self, f"{axis}_size")))
        for axis, only in _BACKENDS.items():
            name = f"{axis}_backend"
            value = getattr(self, name) or os.environ.get(PREFIX + name.upper(), only)
            if value != only:
                raise ValueError(f"{name} is {value!r}: there is only {only!r}.")
            setattr(self, name, value)
        for axis, kind in _HANDLERS.items():
            name = f"{axis}_handler"
            handler = getattr(self, name)
            if handler is None and self._sizes[axis] > 1:
                setattr(self, name, kind())
            elif handler is not None and not isinstance(handler, kind):
                raise ValueError(f"{name} is {a_kind_of(handler)}: pass a {kind.__name__}.")
        self._check_combination()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}_size={self._sizes[axis]}" for axis in _AXES)
        return f"ParallelismConfig({sizes}, total_size={self.total_size})"

    def _check_combination(self) -> None:
        sizes = self._sizes
        if sizes["cp"] > 1 and sizes["sp"] > 1:
            raise ValueError(
                f"cp_size={sizes['cp']} and sp_size={sizes['sp']} both split the sequence: leave one of them at 1."
            )
        split = [f"{axis}_size={sizes[axis]}" for axis in ("tp", "cp") if sizes[axis] > 1]
        if split and sizes["dp_replicate"] > 1 and sizes["dp_shard"] == 1:
            raise ValueError(
                f"{' and '.join(split)} cannot be combined with whole copies of the model "
                f"(dp_replicate_size={sizes['dp_replicate']}, dp_shard_size=1): share each copy with dp_shard_size of "
                "2 or more, or leave dp_replicate_size at 1."
            )

    @property
    def _sizes(self) -> dict[str, int]:
        # Read each time: sizes are assigned to by scripts that learn them from a model.
        return {axis: getattr(self, f"{axis}_size") for axis in _AXES}

    # --- which axes there are -----------------------------------------------------------------------------------

    def _present(self, *axes: str) -> list[str]:
        return [axis for axis in axes if self._sizes[axis] > 1]

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes that are larger than 1."""
        return self.dp_dim_names + self.non_dp_dim_names

    @property
    def dp_dim_names(self) -> list[str]:
        """The axes along which processes get different data."""
        return self._present("dp_replicate", "dp_shard")

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The axes along which processes work on the same data."""
        return self._present("tp", "cp", "sp")

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """The axes that parameters are sharded over, which `dp_shard_cp` joins."""
        return self._present("dp_shard", "cp")

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The axes that a loss is averaged over, which `dp_cp` joins."""
        return self._present("dp_replicate", "dp_shard", "cp")

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The axes that FSDP is given: copies, if there are any, and shards."""
        return [*self._present("dp_replicate"), "dp_shard_cp"]

    # --- how large ----------------------------------------------------------------------------------------------

    @property
    def total_size(self) -> int:
        """How many processes the mesh has."""
        return math.prod(self._sizes.values())

    @property
    def data_parallel_size(self) -> int:
        """How many processes (or groups of them) get different data."""
        return self._sizes["dp_replicate"] * self._sizes["dp_shard"]

    @property
    def non_data_parallel_size(self) -> int:
        """How many processes work on the same data."""
        return self._sizes["tp"] * self._sizes["cp"] * self._sizes["sp"]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several replicas of the model."""
        return self._sizes["dp_replicate"] > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether replicas are sharded (FSDP)."""
        return self._sizes["dp_shard"] > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are split (tensor parallelism)."""
        return self._sizes["tp"] > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split (context parallelism)."""
        return self._sizes["cp"] > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split (DeepSpeed's sequence parallelism)."""
        return self._sizes["sp"] > 1

    # --- the mesh -----------------------------------------------------------------------------------------------

    def _get_mesh(self) -> tuple[tuple[str, ...], tuple[int, ...]] | tuple[()]:
        """The axes of the mesh from the outside in, and their sizes; nothing where there are none."""
        axes = self._present(*MESH_ORDER)
        return (tuple(axes), tuple(self._sizes[axis] for axis in axes)) if axes else ()

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Build the device mesh of these axes, with the combined ones (`dp`, `dp_shard_cp`, `dp_cp`).

        Args:
            device_type: the type of the device, such as "cuda".

        Returns:
            The mesh, or None if all axes have size 1.
        """
        axes_and_sizes = self._get_mesh()
        if not axes_and_sizes:
            return None
        from torch.distributed.device_mesh import init_device_mesh

        from accelerate.torch_internals.mesh import join_axes

        axes, sizes = axes_and_sizes
        mesh = init_device_mesh(device_type, sizes, mesh_dim_names=axes)
        joined = {"dp": self.dp_dim_names, "dp_shard_cp": self.dp_shard_cp_dim_names, "dp_cp": self.dp_cp_dim_names}
        for name, parts in joined.items():
            if parts:  # names in a list will do as well as in a tuple
                join_axes(mesh[parts], name)  # type: ignore[index]
        return mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the device mesh, which the first call builds.

        Args:
            device_type: the type of the device; required by the first call.
        """
        if self.device_mesh is None:
            if device_type is None:
                raise ValueError("The device mesh is not built yet: pass the kind of device, as in 'cuda' or 'cpu'.")
            self.device_mesh = self.build_device_mesh(device_type)
        return self.device_mesh

    def to_json(self) -> Any:
        """Return the settings as plain data."""
        handlers = {f"{axis}_handler": getattr(self, f"{axis}_handler") for axis in _HANDLERS}
        return {
            **{f"{axis}_size": size for axis, size in self._sizes.items()},
            "cp_backend": self.cp_backend,
            "sp_backend": self.sp_backend,
            **{name: None if value is None else dict(vars(value)) for name, value in handlers.items()},
        }


def _size(axis: str, asked: Any) -> int:
    name = f"{axis}_size"
    variable = PREFIX + name.upper()
    value = os.environ.get(variable, "1") if asked is None else asked
    try:
        size = int(str(value))
    except ValueError:
        size = 0
    if size < 1:
        where = variable if asked is None else name
        raise ValueError(f"{where} is {value!r}: give the number of processes along this axis, at least 1.")
    return size
