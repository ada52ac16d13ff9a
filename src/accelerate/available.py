"""What this machine has: packages, devices, number formats. Each answer is looked up once.

Nothing is imported to find out about a package; torch is imported only by the probes that ask it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate.config.environment import parse_flag_from_env, patch_environment
from accelerate.versions import compare_versions, is_torch_version

F = TypeVar("F", bound=Callable[..., Any])

USE_TORCH_XLA = parse_flag_from_env("USE_TORCH_XLA", default=True)


@functools.cache
def has_package(name: str) -> bool:
    """Tell whether a package can be imported; a mere folder of that name, as `wandb/` with logs, is none."""
    try:
        spec = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        return False
    return spec is not None and spec.origin is not None


def _package(name: str) -> Callable[[], bool]:
    def available() -> bool:
        return has_package(name)

    available.__doc__ = f"Says whether `{name}` is installed."
    return available


is_amdsmi_available: Callable[[], bool] = _package("amdsmi")
is_boto3_available: Callable[[], bool] = _package("boto3")
is_clearml_available: Callable[[], bool] = _package("clearml")
is_comet_ml_available: Callable[[], bool] = _package("comet_ml")
is_datasets_available: Callable[[], bool] = _package("datasets")
is_deepspeed_available: Callable[[], bool] = _package("deepspeed")
is_dvclive_available: Callable[[], bool] = _package("dvclive")
is_import_timer_available: Callable[[], bool] = _package("import_timer")
is_lomo_available: Callable[[], bool] = _package("lomo_optim")
is_matplotlib_available: Callable[[], bool] = _package("matplotlib")
is_mlflow_available: Callable[[], bool] = _package("mlflow")
is_msamp_available: Callable[[], bool] = _package("msamp")
is_pandas_available: Callable[[], bool] = _package("pandas")
is_peft_available: Callable[[], bool] = _package("peft")
is_pynvml_available: Callable[[], bool] = _package("pynvml")
is_pytest_available: Callable[[], bool] = _package("pytest")
is_sagemaker_available: Callable[[], bool] = _package("sagemaker")
is_schedulefree_available: Callable[[], bool] = _package("schedulefree")
is_swanlab_available: Callable[[], bool] = _package("swanlab")
is_timm_available: Callable[[], bool] = _package("timm")
is_torchdata_available: Callable[[], bool] = _package("torchdata")
is_torchvision_available: Callable[[], bool] = _package("torchvision")
is_tqdm_available: Callable[[], bool] = _package("tqdm")
is_trackio_available: Callable[[], bool] = _package("trackio")
is_transformer_engine_available: Callable[[], bool] = _package("transformer_engine")
is_transformers_available: Callable[[], bool] = _package("transformers")
is_triton_available: Callable[[], bool] = _package("triton")
is_wandb_available: Callable[[], bool] = _package("wandb")


def is_tensorboard_available() -> bool:
    """Tell whether `tensorboard` or `tensorboardX` is installed."""
    return has_package("tensorboard") or has_package("tensorboardX")


def is_rich_available() -> bool:
    """Tell whether `rich` is installed and enabled by `ACCELERATE_ENABLE_RICH`."""
    return has_package("rich") and parse_flag_from_env("ACCELERATE_ENABLE_RICH")


def is_megatron_lm_available() -> bool:
    """Tell whether Megatron-LM is installed and enabled by `ACCELERATE_USE_MEGATRON_LM`."""
    return parse_flag_from_env("ACCELERATE_USE_MEGATRON_LM") and has_package("megatron.core")


@functools.cache
def _has_version(name: str, operation: str, version: str) -> bool:
    try:
        return has_package(name) and compare_versions(name, operation, version)
    except importlib.metadata.PackageNotFoundError:
        return False


def is_aim_available() -> bool:
    """Tell whether an `aim` below version 4 is installed."""
    return _has_version("aim", "<", "4.0.0")


def is_numpy_available(min_version: str = "1.25.0") -> bool:
    """Tell whether `numpy` is installed.

    Args:
        min_version: the oldest version that counts.
    """
    return _has_version("numpy", ">=", min_version)


# The first in which recipes have names, which fp8 uses; is_torchao_available answers as it always has.
TORCHAO_RELEASE = "0.9"


def is_torchao_available() -> bool:
    """Tell whether a `torchao` of at least 0.6.1 is installed."""
    return _has_version("torchao", ">=", "0.6.1")


def is_torchdata_stateful_dataloader_available() -> bool:
    """Tell whether `torchdata` is installed and new enough for its StatefulDataLoader."""
    return _has_version("torchdata", ">=", "0.8.0")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Tell whether `bitsandbytes` is installed.

    Args:
        min_version: the oldest version that counts.
    """
    if min_version is None:
        return has_package("bitsandbytes")
    return _has_version("bitsandbytes", ">=", min_version)


def is_8bit_bnb_available() -> bool:
    """Tell whether `bitsandbytes` with 8-bit layers is installed."""
    return is_bnb_available(min_version="0.37.2")


def is_4bit_bnb_available() -> bool:
    """Tell whether `bitsandbytes` with 4-bit layers is installed."""
    return is_bnb_available(min_version="0.39.0")


@functools.cache
def is_bitsandbytes_multi_backend_available() -> bool:
    """Tell whether `bitsandbytes` runs on more than NVIDIA GPUs."""
    if not is_bnb_available():
        return False
    return "multi_backend" in getattr(importlib.import_module("bitsandbytes"), "features", set())


# What torch itself says.


def is_torch_distributed_available() -> bool:
    """Tell whether torch was built with `torch.distributed`."""
    import torch

    return torch.distributed.is_available()


def known_backends() -> list[str]:
    """Return what torch can communicate with: its own backends, and those that were registered with it."""
    import torch

    backends: list[str] = torch.distributed.Backend.backend_list if is_torch_distributed_available() else []
    return backends


def is_pippy_available() -> bool:
    """Tell whether torch has pipeline parallelism."""
    return is_torch_version(">=", "2.4.0")


def is_weights_only_available() -> bool:
    """Tell whether `torch.load(weights_only=True)` takes a list of allowed classes."""
    return is_torch_version(">=", "2.4.0")


@functools.cache
def is_xccl_available() -> bool:
    """Tell whether torch itself can communicate between Intel GPUs."""
    import torch

    probe = getattr(torch.distributed, "is_xccl_available", None)
    return probe is not None and bool(probe())


@functools.cache
def is_cuda_available() -> bool:
    """Tell whether there is a GPU for `torch.cuda`, without starting CUDA, so that fork still works."""
    import torch

    with patch_environment(pytorch_nvml_based_cuda_check="1"):
        return torch.cuda.is_available()


def is_rocm_available() -> bool:
    """Tell whether that GPU is from AMD."""
    import torch

    return is_cuda_available() and torch.version.hip is not None


def is_mps_available(min_version: str = "1.12") -> bool:
    """Tell whether there is an Apple GPU that torch can use.

    Args:
        min_version: the oldest version of torch that counts.
    """
    import torch

    return is_torch_version(">=", min_version) and torch.backends.mps.is_available()


def _device(name: str, package: str | None) -> Callable[..., bool]:
    @functools.cache
    def available(check_device: bool = False) -> bool:
        if package is not None:
            if not has_package(package):
                return False
            importlib.import_module(package)
        import torch

        module = getattr(torch, name, None)
        if module is None:
            return False
        if not check_device:
            return bool(module.is_available())
        try:
            return module.device_count() > 0 and bool(module.is_available())
        except RuntimeError:
            return False

    available.__wrapped__.__doc__ = f"Says whether there is a device for `torch.{name}`."
    return available


is_mlu_available: Callable[..., bool] = _device("mlu", "torch_mlu")
is_musa_available: Callable[..., bool] = _device("musa", "torch_musa")
is_neuron_available: Callable[..., bool] = _device("neuron", "torch_neuronx")
is_npu_available: Callable[..., bool] = _device("npu", "torch_npu")
is_sdaa_available: Callable[..., bool] = _device("sdaa", "torch_sdaa")
is_xpu_available: Callable[..., bool] = _device("xpu", None)


@functools.cache
def is_hpu_available(init_hccl: bool = False) -> bool:
    """Tell whether there is an Intel Gaudi.

    Args:
        init_hccl: also load the library by which its ranks communicate.
    """
    if not has_package("habana_frameworks.torch"):
        return False
    importlib.import_module("habana_frameworks.torch")
    if init_hccl:
        importlib.import_module("habana_frameworks.torch.distributed.hccl")
    import torch

    return hasattr(torch, "hpu") and bool(torch.hpu.is_available())


def is_habana_gaudi1() -> bool:
    """Tell whether that Gaudi is of the first generation, which has no fp16."""
    if not is_hpu_available():
        return False
    experimental = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(experimental._get_device_type() == experimental.synDeviceType.synDeviceGaudi)


@functools.cache
def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Tell whether `torch_xla` is installed.

    Args:
        check_is_tpu: and runs on a TPU.
        check_is_gpu: and runs on a GPU.
    """
    if check_is_tpu and check_is_gpu:
        raise AssertionError("Ask for a TPU (`check_is_tpu`) or for a GPU (`check_is_gpu`), not for both at once.")
    if not USE_TORCH_XLA or not has_package("torch_xla"):
        return False
    if not check_is_tpu and not check_is_gpu:
        return True
    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("GPU", "CUDA")


# Number formats.


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Tell whether the device of this machine computes in bf16.

    Args:
        ignore_tpu: do not count a TPU.
    """
    import torch

    if is_torch_xla_available(check_is_tpu=True):
        return not ignore_tpu
    for name, available in (
        ("cuda", is_cuda_available),
        ("mlu", is_mlu_available),
        ("xpu", is_xpu_available),
    ):
        if available():
            return bool(getattr(torch, name).is_bf16_supported())
    if is_mps_available():
        return torch.backends.mps.is_macos_or_newer(14, 0)
    return True


def is_fp16_available() -> bool:
    """Tell whether the device of this machine computes in fp16."""
    return not is_habana_gaudi1()


def is_fp8_available() -> bool:
    """Tell whether a package that computes in fp8 is installed."""
    return is_msamp_available() or is_transformer_engine_available() or is_torchao_available()


def lacks_fp8_package(backend: str | None = None) -> str | None:
    """A sentence where no library to compute in fp8 is installed. backend: the one to ask for ("ao", "te", "msamp")."""
    libraries = {
        "ao": (f"torchao {TORCHAO_RELEASE} or newer (`pip install torchao`)", is_torchao_available),
        "te": ("Transformer Engine (`pip install transformer-engine[pytorch]`)", is_transformer_engine_available),
        "msamp": ("MS-AMP", is_msamp_available),
    }
    asked = [libraries[backend]] if backend in libraries else list(libraries.values())
    if any(found() for _, found in asked):
        return None
    names = ", or ".join(name for name, _ in asked)
    none = "it is not installed" if len(asked) == 1 else "none of them is installed"
    return f"Training in fp8 needs {names}; {none} here: install one, or use bf16."


def check_cuda_fp8_capability() -> bool:
    """Tell whether the GPU of this process computes in fp8."""
    import torch

    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


@functools.cache
def is_transformer_engine_mxfp8_available() -> bool:
    """Tell whether the GPU computes in the block-scaled fp8 of Transformer Engine."""
    if not is_transformer_engine_available():
        return False
    return bool(importlib.import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


# Guards for functions.


def deepspeed_required(func: F) -> F:
    """Decorate a function that can be called only while the `Accelerator` uses DeepSpeed.

    Args:
        func: the function.
    """

    @functools.wraps(func)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        # Asked of what is already imported: without that module there is no Accelerator to be wrong.
        state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
        if state is not None and state._shared_state and getattr(state(), "deepspeed_plugin", None) is None:
            label = state().distributed_type.value
            raise ValueError(
                f"`{func.__name__}` needs DeepSpeed, but the Accelerator runs as {label}; "
                "give it a `deepspeed_plugin` or launch with `--use_deepspeed`."
            )
        return func(*args, **kwargs)

    return guarded  # type: ignore[return-value]


def torchao_required(func: F) -> F:
    """Decorate a function that can be called only if `torchao` is installed.

    Args:
        func: the function.
    """

    @functools.wraps(func)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        if not is_torchao_available():
            raise ImportError(f"`{func.__name__}` needs torchao {TORCHAO_RELEASE} or newer: `pip install torchao`.")
        return func(*args, **kwargs)

    return guarded  # type: ignore[return-value]
