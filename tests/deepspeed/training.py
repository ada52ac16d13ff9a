"""The training that the worlds of this folder run: on DeepSpeed, and on DDP to compare with."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin


def model(seed: int = 0, width: int = 24) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 3))


def data(samples: int = 96) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.randn(samples, 3, generator=generator))


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return ((outputs.float() - targets) ** 2).mean()


def plugin(stage: int, **settings: Any) -> DeepSpeedPlugin:
    """Without clipping, which DeepSpeed else does at a norm of 1."""
    settings.setdefault("gradient_clipping", 0.0)
    return DeepSpeedPlugin(zero_stage=stage, zero3_init_flag=False, **settings)


def accelerator(stage: int | None, *, precision: str = "no", accumulate: int = 1, **settings: Any) -> Accelerator:
    """stage: None for DDP."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)  # which tells everything in a process, once it is so
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        gradient_accumulation_steps=accumulate,
        dataloader_config=DataLoaderConfiguration(exact_resume=True),
        deepspeed_plugin=None if stage is None else plugin(stage, **settings),
    )


def weights(acc: Accelerator, trained: nn.Module) -> dict[str, torch.Tensor]:
    """All weights, whole and in fp32, on every process."""
    if acc.deepspeed_plugin is None:
        return {name: p.detach().float().clone() for name, p in acc.unwrap_model(trained).named_parameters()}
    from deepspeed.utils import safe_get_full_fp32_param

    found = {}
    for name, parameter in acc.unwrap_model(trained).named_parameters():
        whole = safe_get_full_fp32_param(parameter)
        found[name] = (parameter if whole is None else whole).detach().float().clone()
    return found


def train(
    stage: int | None,
    precision: str = "no",
    accumulate: int = 1,
    clip: float | None = None,
    items: bool = False,
    steps: int = 5,
    **settings: Any,
) -> dict[str, Any]:
    """Losses, norms and weights of a short training."""
    acc = accelerator(stage, precision=precision, accumulate=accumulate, **settings)
    net = model()
    # With a large eps: else the sign alone counts of a small gradient, which a rounding may change.
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1, eps=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    loader = DataLoader(data(), batch_size=4)
    net, optimizer, scheduler, loader = acc.prepare(net, optimizer, scheduler, loader)
    losses, norms = [], []
    for count, (inputs, targets) in enumerate(loader):
        if count == steps * accumulate:
            break
        with acc.accumulate(net):
            loss = loss_of(net(inputs), targets)
            if items:
                rows = 1 + (count + acc.process_index) % 3
                loss = ((net(inputs).float() - targets)[:rows] ** 2).sum()
                acc.backward(loss, num_items=rows)
            else:
                acc.backward(loss)
            if clip is not None and acc.sync_gradients:
                norms.append(acc.clip_grad_norm_(net.parameters(), clip).item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(acc.reduce(loss.detach().float(), "mean").item())
    found = weights(acc, net)
    rate = scheduler.get_last_lr()
    acc.free_memory()
    acc.state._reset_state(reset_partial_state=False)
    return {"losses": losses, "norms": norms, "weights": found, "rate": rate}
