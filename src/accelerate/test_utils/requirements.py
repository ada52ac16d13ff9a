"""Decorators that skip a test where something it needs is missing."""

from __future__ import annotations

import functools
import unittest
from collections.abc import Callable
from typing import Any

from accelerate import available
from accelerate.config.environment import parse_flag_from_env
from accelerate.constants import BETA_TP_AVAILABLE_TRANSFORMERS_VERSION, FSDP2_PYTORCH_VERSION
from accelerate.test_utils.backend import device_count, torch_device
from accelerate.versions import compare_versions, is_torch_version

Decorator = Callable[[Any], Any]


def _require(condition: Callable[[], bool], what: str) -> Decorator:
    """Makes a decorator; its condition is asked when a test is decorated, not at import."""

    def require(test_case: Any) -> Any:
        return unittest.skipUnless(condition(), f"needs {what}")(test_case)

    return require


# Packages.
require_aim: Decorator = _require(available.is_aim_available, "aim")
require_bnb: Decorator = _require(available.is_bnb_available, "bitsandbytes")
require_clearml: Decorator = _require(available.is_clearml_available, "clearml")
require_comet_ml: Decorator = _require(available.is_comet_ml_available, "comet_ml")
require_datasets: Decorator = _require(available.is_datasets_available, "datasets")
require_deepspeed: Decorator = _require(available.is_deepspeed_available, "deepspeed")
require_dvclive: Decorator = _require(available.is_dvclive_available, "dvclive")
require_import_timer: Decorator = _require(available.is_import_timer_available, "import_timer")
require_matplotlib: Decorator = _require(available.is_matplotlib_available, "matplotlib")
require_mlflow: Decorator = _require(available.is_mlflow_available, "mlflow")
require_pandas: Decorator = _require(available.is_pandas_available, "pandas")
require_peft: Decorator = _require(available.is_peft_available, "peft")
require_pippy: Decorator = _require(available.is_pippy_available, "pipeline parallelism of torch")
require_schedulefree: Decorator = _require(available.is_schedulefree_available, "schedulefree")
require_swanlab: Decorator = _require(available.is_swanlab_available, "swanlab")
require_tensorboard: Decorator = _require(available.is_tensorboard_available, "tensorboard")
require_timm: Decorator = _require(available.is_timm_available, "timm")
require_torchao: Decorator = _require(available.is_torchao_available, "torchao")
require_torchdata_stateful_dataloader: Decorator = _require(
    available.is_torchdata_stateful_dataloader_available, "torchdata's StatefulDataLoader"
)
require_torchvision: Decorator = _require(available.is_torchvision_available, "torchvision")
require_trackio: Decorator = _require(available.is_trackio_available, "trackio")
require_transformer_engine: Decorator = _require(available.is_transformer_engine_available, "transformer_engine")
require_transformer_engine_mxfp8: Decorator = _require(
    available.is_transformer_engine_mxfp8_available, "a GPU with the block-scaled fp8 of transformer_engine"
)
require_transformers: Decorator = _require(available.is_transformers_available, "transformers")
require_triton: Decorator = _require(available.is_triton_available, "triton")
require_wandb: Decorator = _require(available.is_wandb_available, "wandb")
require_huggingface_suite: Decorator = _require(
    lambda: available.is_transformers_available() and available.is_datasets_available(),
    "transformers and datasets",
)
require_trackers: Decorator = _require(
    lambda: available.is_wandb_available() or available.is_tensorboard_available(), "wandb or tensorboard"
)

# Devices.
require_cpu: Decorator = _require(lambda: torch_device == "cpu", "the CPU")
require_non_cpu: Decorator = _require(lambda: torch_device != "cpu", "an accelerator")
require_cuda: Decorator = _require(lambda: torch_device == "cuda", "CUDA")
require_cuda_or_hpu: Decorator = _require(lambda: torch_device in ("cuda", "hpu"), "CUDA or HPU")
require_cuda_or_xpu: Decorator = _require(lambda: torch_device in ("cuda", "xpu"), "CUDA or XPU")
require_mlu: Decorator = _require(lambda: torch_device == "mlu", "MLU")
require_mps: Decorator = _require(lambda: torch_device == "mps", "MPS")
require_musa: Decorator = _require(lambda: torch_device == "musa", "MUSA")
require_neuron: Decorator = _require(lambda: torch_device == "neuron", "Neuron")
require_non_hpu: Decorator = _require(lambda: torch_device != "hpu", "anything but HPU")
require_non_torch_xla: Decorator = _require(lambda: not available.is_torch_xla_available(), "the absence of torch_xla")
require_non_xpu: Decorator = _require(lambda: torch_device != "xpu", "anything but XPU")
require_npu: Decorator = _require(lambda: torch_device == "npu", "NPU")
require_sdaa: Decorator = _require(lambda: torch_device == "sdaa", "SDAA")
require_tpu: Decorator = _require(lambda: available.is_torch_xla_available(check_is_tpu=True), "TPU")
require_xpu: Decorator = _require(lambda: torch_device == "xpu", "XPU")

require_single_device: Decorator = _require(
    lambda: torch_device != "cpu" and device_count == 1, "exactly one accelerator"
)
require_single_gpu: Decorator = _require(lambda: torch_device == "cuda" and device_count == 1, "exactly one GPU")
require_single_xpu: Decorator = _require(lambda: torch_device == "xpu" and device_count == 1, "exactly one XPU")
require_multi_device: Decorator = _require(lambda: torch_device != "cpu" and device_count > 1, "several accelerators")
require_multi_gpu: Decorator = _require(lambda: torch_device == "cuda" and device_count > 1, "several GPUs")
require_multi_xpu: Decorator = _require(lambda: torch_device == "xpu" and device_count > 1, "several XPUs")
require_multi_gpu_or_xpu: Decorator = _require(
    lambda: torch_device in ("cuda", "xpu") and device_count > 1, "several GPUs or XPUs"
)

# Number formats and engines.
require_fp16: Decorator = _require(available.is_fp16_available, "fp16")
require_fp8: Decorator = _require(lambda: available.is_fp8_available() and not available.is_habana_gaudi1(), "fp8")
require_fsdp2: Decorator = _require(
    lambda: is_torch_version(">=", FSDP2_PYTORCH_VERSION), f"torch {FSDP2_PYTORCH_VERSION}"
)
require_tp: Decorator = _require(
    lambda: (
        available.is_transformers_available()
        and compare_versions("transformers", ">=", BETA_TP_AVAILABLE_TRANSFORMERS_VERSION)
    ),
    f"transformers {BETA_TP_AVAILABLE_TRANSFORMERS_VERSION}",
)

# Others.
slow: Decorator = _require(lambda: parse_flag_from_env("RUN_SLOW"), "RUN_SLOW=1, because it is slow")


def skip(test_case: Any) -> Any:
    """Skip a test.

    Args:
        test_case: the test.
    """
    return unittest.skip("switched off")(test_case)


def run_first(test_case: Any) -> Any:
    """Run a test before all others, with pytest-order.

    Args:
        test_case: the test.
    """
    import pytest

    return pytest.mark.order(1)(test_case)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skip a test if torch is older than a version.

    Args:
        test_case: the test. Without one, a decorator is returned.
        version: the version.

    Example:
        ```python
        @require_torch_min_version(version="2.7")
        def test_something(): ...
        ```
    """
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    if version is None:
        raise ValueError("Say which version of torch the test needs: `require_torch_min_version(version=...)`.")
    return _require(lambda: is_torch_version(">=", version), f"torch {version}")(test_case)
