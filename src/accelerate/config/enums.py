"""The fixed sets of names a setting may take."""

from __future__ import annotations

import enum
from typing import Any


class EnumWithContains(enum.EnumMeta):
    """Allow `"fp16" in PrecisionType`, which Python itself does only from 3.12 on."""

    def __contains__(cls, item: object) -> bool:
        try:
            cls(item)
        except ValueError:
            return False
        return True


class BaseEnum(enum.Enum, metaclass=EnumWithContains):
    """An enumeration whose members print as their value."""

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def list(cls) -> list[Any]:
        """Return all values, in the order they are declared."""
        return [member.value for member in cls]


class _Label(str, enum.Enum):
    """A text that prints as the name of its member."""

    # Versions of Python differ in what an f-string prints for a str enumeration; here it is always the name.
    __str__ = enum.Enum.__str__
    __format__ = enum.Enum.__format__


class _WithOldNames(enum.EnumMeta):
    """Answers `DistributedType.TPU`, what XLA was called in older scripts, with a hint."""

    def __getattr__(cls, name: str) -> Any:
        if name == "TPU":
            return cls("TPU")
        raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")

    def __getitem__(cls, name: str) -> Any:
        return cls("TPU") if name == "TPU" else super().__getitem__(name)


class DistributedType(_Label, metaclass=_WithOldNames):
    """Labels of how the processes of a run work together."""

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"

    @classmethod
    def _missing_(cls, value: object) -> DistributedType | None:
        if value != "TPU":
            return None
        import warnings

        warnings.warn(
            "`DistributedType.TPU` is called `DistributedType.XLA` now: write that, which is the same.",
            FutureWarning,
            stacklevel=5,  # the line that has the name
        )
        return cls.XLA


class SageMakerDistributedType(_Label):
    """How a SageMaker job spreads its work."""

    NO = "NO"
    DATA_PARALLEL = "DATA_PARALLEL"
    MODEL_PARALLEL = "MODEL_PARALLEL"


class ComputeEnvironment(_Label):
    """Where the processes run."""

    LOCAL_MACHINE = "LOCAL_MACHINE"
    AMAZON_SAGEMAKER = "AMAZON_SAGEMAKER"


class FP8BackendType(_Label):
    """The library that computes in 8-bit floating point."""

    NO = "NO"
    TE = "TE"
    MSAMP = "MSAMP"
    AO = "AO"


class DynamoBackend(str, BaseEnum):
    """The compiler behind `torch.compile`."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"
    NEURON = "NEURON"


class PrecisionType(str, BaseEnum):
    """Number formats of the forward pass; `no` is that of the model."""

    NO = "no"
    FP8 = "fp8"
    FP16 = "fp16"
    BF16 = "bf16"


class LoggerType(BaseEnum):
    """Experiment trackers that are known by name."""

    ALL = "all"
    AIM = "aim"
    TENSORBOARD = "tensorboard"
    WANDB = "wandb"
    TRACKIO = "trackio"
    COMETML = "comet_ml"
    MLFLOW = "mlflow"
    CLEARML = "clearml"
    DVCLIVE = "dvclive"
    SWANLAB = "swanlab"
    LOCAL = "local"


class RNGType(BaseEnum):
    """Random number generators that can be synchronized between ranks."""

    TORCH = "torch"
    CUDA = "cuda"
    MLU = "mlu"
    SDAA = "sdaa"
    MUSA = "musa"
    NPU = "npu"
    XLA = "xla"
    XPU = "xpu"
    HPU = "hpu"
    NEURON = "neuron"
    GENERATOR = "generator"


class CustomDtype(enum.Enum):
    """Sizes of weights for which torch has no dtype."""

    FP8 = "fp8"
    INT4 = "int4"
    INT2 = "int2"


class DDPCommunicationHookType(BaseEnum):
    """How DDP compresses gradients before it averages them."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"
