"""Megatron-LM on one GPU, with nothing that stands in for CUDA: a world of one process over NCCL.

With megatron-core and transformers on the path: `PYTHONPATH=src python3 -m tests.gpu.megatron [name ...]`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tests.gpu.checks import CHECKS, check, reset
from tests.megatron import training

# How far losses may be from those of plain PyTorch in fp32.
CLOSE = {"no": 1e-3, "bf16": 5e-2, "fp16": 1e-2}


class Training:
    """What a script makes of the small GPT-2 of the tests."""

    def __init__(self, precision: str = "no", micro_batches: int = 1, **settings: Any) -> None:
        from accelerate import Accelerator, DataLoaderConfiguration
        from accelerate.utils import MegatronLMDummyScheduler, MegatronLMPlugin

        reset()
        self.accelerator = Accelerator(
            mixed_precision=precision,
            dataloader_config=DataLoaderConfiguration(exact_resume=True),
            megatron_lm_plugin=MegatronLMPlugin(num_micro_batches=micro_batches, **settings),
        )
        net = training.model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=training.LR, weight_decay=0.1)
        loader = DataLoader(training.Tokens(), batch_size=training.BATCH // micro_batches)
        objects = [net, optimizer, loader]
        if settings.get("lr_decay_style") is not None:
            objects.append(MegatronLMDummyScheduler(optimizer, total_num_steps=40))
        self.model, self.optimizer, self.loader = self.accelerator.prepare(*objects)[:3]
        self.batches = iter(self.loader)

    def steps(self, count: int) -> list[float]:
        losses = []
        for _ in range(count):
            loss = self.model(**next(self.batches)).loss
            self.accelerator.backward(loss)
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.detach().clone() for name, value in self.model.named_parameters()}


def _far(found: list[float], wanted: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(found, wanted, strict=True))


@check
def megatron_trains_like_plain_pytorch() -> None:
    wanted = training.plain()
    for settings in (
        {},
        {"micro_batches": 4},
        {"use_distributed_optimizer": True},
        {"recompute_granularity": "selective"},
        {"precision": "bf16"},
        {"precision": "bf16", "use_distributed_optimizer": True, "micro_batches": 2},
        {"precision": "fp16", "other_megatron_args": {"initial_loss_scale": 1024.0}},
    ):
        run = Training(**settings)
        far = _far(run.steps(20), wanted)
        dtype = {parameter.dtype for parameter in run.model.parameters()}
        print(f"  {settings}: losses are {far:.2e} from plain PyTorch, parameters are {dtype}")
        assert far < CLOSE[settings.get("precision", "no")], settings


@check
def megatron_goes_on_exactly() -> None:
    dropout = {"attention_dropout": 0.1, "hidden_dropout": 0.1, "lr_decay_style": "cosine"}
    for settings in ({}, {"precision": "bf16", "use_distributed_optimizer": True}):
        with tempfile.TemporaryDirectory() as folder:
            first = Training(**settings, **dropout)
            first.steps(3)
            first.accelerator.save_state(folder, async_save=True)
            wanted = first.steps(3)
            first.accelerator.wait_for_checkpoint()
            weights = first.weights()
            second = Training(**settings, **dropout)
            second.steps(1)
            second.accelerator.load_state(folder)
            second.batches = iter(second.loader)
            assert second.steps(3) == wanted, settings
            assert all(torch.equal(value, weights[name]) for name, value in second.weights().items()), settings


@check
def megatron_gives_models_of_transformers() -> None:
    from safetensors.torch import load_file

    run = Training(return_logits=True)
    run.steps(5)
    run.model.eval()
    batch = next(run.batches)
    logits = run.model(**batch).logits
    net = training.model()
    with tempfile.TemporaryDirectory() as folder:
        run.accelerator.save_model(run.model, folder)
        net.load_state_dict(load_file(Path(folder, "model.safetensors")), strict=False)
    net.tie_weights()
    net = net.to(logits.device).eval()
    with torch.no_grad():
        torch.testing.assert_close(logits, net(batch["input_ids"]).logits, rtol=1e-3, atol=1e-3)
        prompts = batch["input_ids"][:, :6]
        wanted = net.generate(prompts, max_new_tokens=6, do_sample=False, pad_token_id=0)
        found = run.model.megatron_generate(prompts, max_new_tokens=6)
    assert torch.equal(found[:, : wanted.shape[1]], wanted)


def main() -> int:
    from tests.gpu import run
    from tests.gpu.sharding import launched

    own = [one.__name__ for one in CHECKS if one.__module__ == __name__]
    with launched():
        return run.main(sys.argv[1:] or own)


if __name__ == "__main__":
    sys.exit(main())
