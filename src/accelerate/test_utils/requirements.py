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
require_aim = _require(available.is_aim_available, "aim")
require_bnb = _require(available.is_bnb_available, "bitsandbytes")
require_clearml = _require(available.is_clearml_available, "clearml")
require_comet_ml = _require(available.is_comet_ml_available, "comet_ml")
require_datasets = _require(available.is_datasets_available, "datasets")
require_deepspeed = _require(available.is_deepspeed_available, "deepspeed")
require_dvclive = _require(available.is_dvclive_available, "dvclive")
require_import_timer = _require(available.is_import_timer_available, "import_timer")
require_matplotlib = _require(available.is_matplotlib_available, "matplotlib")
require_mlflow = _require(available.is_mlflow_available, "mlflow")
require_pandas = _require(available.is_pandas_available, "pandas")
require_peft = _require(available.is_peft_available, "peft")
require_pippy = _require(available.is_pippy_available, "pipeline parallelism of torch")
require_schedulefree = _require(available.is_schedulefree_available, "schedulefree")
require_swanlab = _require(available.is_swanlab_available, "swanlab")
require_tensorboard = _require(available.is_tensorboard_available, "tensorboard")
require_timm = _require(available.is_timm_available, "timm")
require_torchao = _require(available.is_torchao_available, "torchao")
require_torchdata_stateful_dataloader = _require(
    available.is_torchdata_stateful_dataloader_available, "torchdata's StatefulDataLoader"
)
require_torchvision = _require(available.is_torchvision_available, "torchvision")
require_trackio = _require(available.is_trackio_available, "trackio")
require_transformer_engine = _require(available.is_transformer_engine_available, "transformer_engine")
require_transformer_engine_mxfp8 = _require(
    available.is_transformer_engine_mxfp8_available, "a GPU with the block-scaled fp8 of transformer_engine"
)
require_transformers = _require(available.is_transformers_available, "transformers")
require_triton = _require(available.is_triton_available, "triton")
require_wandb = _require(available.is_wandb_available, "wandb")
require_huggingface_suite = _require(
    lambda: available.is_transformers_available() and available.is_datasets_available(),
    "transformers and datasets",
)
require_trackers = _require(
    lambda: available.is_wandb_available() or available.is_tensorboard_available(), "wandb or tensorboard"
)

# Devices.
require_cpu = _require(lambda: torch_device == "cpu", "the CPU")
require_non_cpu = _require(lambda: torch_device != "cpu", "an accelerator")
require_cuda = _require(lambda: torch_device == "cuda", "CUDA")
require_cuda_or_hpu = _require(lambda: torch_device in ("cuda", "hpu"), "CUDA or HPU")
require_cuda_or_xpu = _require(lambda: torch_device in ("cuda", "xpu"), "CUDA or XPU")
require_mlu = _require(lambda: torch_device == "mlu", "MLU")
require_mps = _require(lambda: torch_device == "mps", "MPS")
require_musa = _require(lambda: torch_device == "musa", "MUSA")
require_neuron = _require(lambda: torch_device == "neuron", "Neuron")
require_non_hpu = _require(lambda: torch_device != "hpu", "anything but HPU")
require_non_torch_xla = _require(lambda: not available.is_torch_xla_available(), "the absence of torch_xla")
require_non_xpu = _require(lambda: torch_device != "xpu", "anything but XPU")
require_npu = _require(lambda: torch_device == "npu", "NPU")
require_sdaa = _require(lambda: torch_device == "sdaa", "SDAA")
require_tpu = _require(lambda: available.is_torch_xla_available(check_is_tpu=True), "TPU")
require_xpu = _require(lambda: torch_device == "xpu", "XPU")

require_single_device = _require(lambda: torch_device != "cpu" and device_count == 1, "exactly one accelerator")
require_single_gpu = _require(lambda: torch_device == "cuda" and device_count == 1, "exactly one GPU")
require_single_xpu = _require(lambda: torch_device == "xpu" and device_count == 1, "exactly one XPU")
require_multi_device = _require(lambda: torch_device != "cpu" and device_count > 1, "several accelerators")
require_multi_gpu = _require(lambda: torch_device == "cuda" and device_count > 1, "several GPUs")
require_multi_xpu = _require(lambda: torch_device == "xpu" and device_count > 1, "several XPUs")
require_multi_gpu_or_xpu = _require(
    lambda: torch_device in ("cuda", "xpu") and device_count > 1, "several GPUs or XPUs"
)

# Number formats and engines.
require_fp16 = _require(available.is_fp16_available, "fp16")
require_fp8 = _require(lambda: available.is_fp8_available() and not available.is_habana_gaudi1(), "fp8")
require_fsdp2 = _require(lambda: is_torch_version(">=", FSDP2_PYTORCH_VERSION), f"torch {FSDP2_PYTORCH_VERSION}")
require_tp = _require(
    lambda: (
        available.is_transformers_available()
        and compare_versions("transformers", ">=", BETA_TP_AVAILABLE_TRANSFORMERS_VERSION)
    ),
    f"transformers {BETA_TP_AVAILABLE_TRANSFORMERS_VERSION}",
)

# Others.
slow = _require(lambda: parse_flag_from_env("RUN_SLOW"), "RUN_SLOW=1, because it is slow")


def skip(test_case: Any) -> Any:
    """Skips a test always."""
    return unittest.skip("switched off")(test_case)


def run_first(test_case: Any) -> Any:
    """Asks pytest-order to run a test before all others."""
    import pytest

    return pytest.mark.order(1)(test_case)


def require_torch_min_version(test_case: Any = None, version: str | None = None) -> Any:
    """Skips a test with an older torch: `@require_torch_min_version(version="2.7")`."""
    if test_case is None:
        return functools.partial(require_torch_min_version, version=version)
    if version is None:
        raise ValueError("Say which version of torch the test needs: `require_torch_min_version(version=...)`.")
    return _require(lambda: is_torch_version(">=", version), f"torch {version}")(test_case)
