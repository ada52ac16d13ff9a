"""Train a diffusion model of diffusers, and paint with it.

Needs:          pip install diffusers
One process:    python examples/diffusion.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/diffusion.py

Noise is added to an image, and the model learns to tell what was added. To paint, it starts with nothing but noise and
takes away a little at a time. The images are bright crosses on a dark ground, 8 by 8 pixels.
"""

from pathlib import Path

import torch
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.training_utils import EMAModel
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


def make_images(count):
    images = torch.full((count, 1, 8, 8), -1.0)
    for image, (row, column) in zip(images, torch.randint(1, 7, (count, 2)).tolist(), strict=True):
        image[0, row, :] = image[0, :, column] = 1.0
    return images


def make_model():
    return UNet2DModel(
        sample_size=8,
        in_channels=1,
        out_channels=1,
        layers_per_block=1,
        block_out_channels=(16, 32),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )


def main(epochs=3, batch_size=32, folder="runs/diffusion"):
    accelerator = Accelerator()
    set_seed(0)
    model = make_model()
    noise_schedule = DDPMScheduler(num_train_timesteps=100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(make_images(768), batch_size // accelerator.num_processes, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    # A mean over the last steps paints better than the last step. It is made of the model itself, not of its wrapper,
    # and it is the same on every process, as the weights are.
    average = EMAModel(accelerator.unwrap_model(model).parameters(), decay=0.95)
    average.to(accelerator.device)

    # Noise and times are to be different on every process.
    set_seed(1, device_specific=True)
    losses = []
    for epoch in range(epochs):
        for images in loader:
            noise = torch.randn_like(images)
            times = torch.randint(noise_schedule.config.num_train_timesteps, (len(images),), device=images.device)
            noisy = noise_schedule.add_noise(images, noise, times)
            loss = torch.nn.functional.mse_loss(model(noisy, times).sample, noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            average.step(accelerator.unwrap_model(model).parameters())
            losses.append(loss.detach())
        mean = accelerator.reduce(torch.stack(losses[-10:]).mean(), "mean").item()
        accelerator.print(f"epoch {epoch}: loss {mean:.3f}")

    first, last = accelerator.reduce((torch.stack(losses[:3]).mean(), torch.stack(losses[-10:]).mean()), "mean")

    # Nothing below talks to other processes, so one of them may do it alone.
    if accelerator.is_main_process:
        painter = accelerator.unwrap_model(model)
        average.copy_to(painter.parameters())
        pipeline = DDPMPipeline(painter, noise_schedule)
        pipeline.set_progress_bar_config(disable=True)
        pipeline.save_pretrained(folder)
        images = pipeline(batch_size=4, num_inference_steps=20, generator=torch.Generator().manual_seed(0)).images
        for number, image in enumerate(images):
            image.resize((64, 64), resample=0).save(Path(folder, f"cross_{number}.png"))
    accelerator.print(f"pictures in {folder}; loss fell from {first:.3f} to {last:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
