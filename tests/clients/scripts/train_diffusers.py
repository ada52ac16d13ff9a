"""Train a small diffusion model with a loop of one's own, as one does with diffusers: accumulation, an average of the
weights, hooks that save and load with diffusers' functions; then a second run that goes on from the last checkpoint.

`train_diffusers.py LOG.json ARGUMENTS`
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import torch
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed

STEPS = 8


def unet() -> UNet2DModel:
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    )


def add_hooks(accelerator: Accelerator, ema: EMAModel) -> None:
    def save(models: list[Any], weights: list[Any], folder: str) -> None:
        if not accelerator.is_main_process:
            return
        ema.save_pretrained(os.path.join(folder, "unet_ema"))
        for model in models:
            accelerator.unwrap_model(model).save_pretrained(os.path.join(folder, "unet"))
            weights.pop()  # so that it is not written a second time

    def load(models: list[Any], folder: str) -> None:
        loaded = EMAModel.from_pretrained(os.path.join(folder, "unet_ema"), UNet2DModel)
        ema.load_state_dict(loaded.state_dict())
        for _ in range(len(models)):
            model = models.pop()
            saved = UNet2DModel.from_pretrained(folder, subfolder="unet")
            accelerator.unwrap_model(model).load_state_dict(saved.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)


def run(folder: str, told: dict[str, Any], resume: bool) -> list[float]:
    config = ProjectConfiguration(folder, total_limit=2)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, project_config=config, **told)
    set_seed(0)
    model = unet()
    ema = EMAModel(model.parameters(), model_cls=UNet2DModel, model_config=model.config)
    add_hooks(accelerator, ema)
    noise_scheduler = DDPMScheduler(num_train_timesteps=50)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(TensorDataset(torch.rand(96, 1, 8, 8)), batch_size=4, shuffle=True)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=STEPS)
    model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
    done, losses = 0, []
    if resume:
        newest = max((name for name in os.listdir(folder) if name.startswith("checkpoint-")), key=lambda n: int(n[11:]))
        accelerator.load_state(os.path.join(folder, newest))
        done = int(newest[11:])
    while done < STEPS:
        for (images,) in loader:
            noise = torch.randn_like(images)
            times = torch.randint(0, 50, (len(images),))
            with accelerator.accumulate(model):
                found = model(noise_scheduler.add_noise(images, noise, times), times).sample
                loss = torch.nn.functional.mse_loss(found.float(), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(model.parameters())
                done += 1
                losses.append(round(accelerator.gather(loss.detach().repeat(4)).mean().item(), 5))
                if done % 3 == 0:
                    accelerator.save_state(os.path.join(folder, f"checkpoint-{done}"))
            if done >= STEPS:
                break
    accelerator.wait_for_everyone()
    losses.append(round(float(sum(p.abs().sum() for p in ema.shadow_params)), 3))
    accelerator.free_memory()
    return losses


def main(file: str, told: str) -> None:
    logs = {
        name: [{"loss": loss} for loss in run(f"{file}.out", json.loads(told), resume=name == "resumed")]
        for name in ("whole", "resumed")
    }
    if int(os.environ.get("RANK", "0")) == 0:
        with open(file, "w") as lines:
            json.dump(logs, lines)


if __name__ == "__main__":
    main(*sys.argv[1:])
