"""Checks that a model of transformers is sharded by ZeRO-3 also where a script has set up torch.distributed itself.

`accelerate launch test_zero3_integration.py`; it needs the deepspeed and transformers libraries, and GPUs.
"""

from __future__ import annotations

from typing import Any

import torch

from accelerate.available import is_transformers_available
from accelerate.test_utils.backend import torch_device
from accelerate.test_utils.checks import expect, needs, needs_deepspeed, run_checks, shared_folder

GPT2_TINY: dict[str, Any] = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def init_torch_dist_then_launch_deepspeed() -> None:
    """Sets up the processes, then names the settings, and loads a model."""
    needs_deepspeed()
    needs(is_transformers_available(), "the transformers library")
    from transformers import AutoModel, GPT2Config, GPT2Model, TrainingArguments

    backends = {"xpu": "xccl", "hpu": "hccl", "cpu": "gloo"}
    torch.distributed.init_process_group(backend=backends.get(torch_device, "nccl"))
    with shared_folder() as folder:
        if torch.distributed.get_rank() == 0:
            GPT2Model(GPT2Config(**GPT2_TINY)).save_pretrained(folder)
        torch.distributed.barrier()
        sizes = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}
        # Whoever loads a model while these arguments live has it sharded.
        arguments = TrainingArguments(str(folder), deepspeed={"zero_optimization": {"stage": 3}, **sizes})
        model = AutoModel.from_pretrained(folder)
    whole = [name for name, parameter in model.named_parameters() if not hasattr(parameter, "ds_shape")]
    expect(not whole, f"{whole} are not sharded under {arguments.deepspeed}")


def main() -> None:
    """Runs the check."""
    run_checks(init_torch_dist_then_launch_deepspeed)


if __name__ == "__main__":
    main()
