"""Train a GAN: two models, two optimizers, and which gradients each step needs.

One process:    python examples/gan.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/gan.py

The data are points of a spiral in the plane. A generator turns noise into points, and a discriminator tells them from
real ones. How close the generator comes is measured by the energy distance of the two clouds, which is 0 if they are
distributed alike.
"""

import math

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator
from accelerate.utils import set_seed

NOISE = 8


def spiral(count):
    turn = torch.rand(count, 1) * 3 * math.pi + math.pi / 2
    return torch.cat([turn.cos(), turn.sin()], dim=1) * turn / 5 + 0.05 * torch.randn(count, 2)


def network(inputs, outputs):
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def distance(a, b):
    between = torch.cdist(a, b).mean()
    return (2 * between - torch.cdist(a, a).mean() - torch.cdist(b, b).mean()).item()


def main(epochs=8, batch_size=128):
    accelerator = Accelerator()
    set_seed(0)
    real_points = spiral(4096)
    loader = DataLoader(TensorDataset(real_points), batch_size // accelerator.num_processes, shuffle=True)
    generator, discriminator = network(NOISE, 2), network(2, 1)
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    for_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.99))
    generator, discriminator, for_generator, for_discriminator, loader = accelerator.prepare(
        generator, discriminator, for_generator, for_discriminator, loader
    )

    # From here on each process draws noise of its own: the same on all of them would be fewer different points.
    set_seed(1, device_specific=True)

    @torch.no_grad()
    def how_far():
        fake = generator(torch.randn(512, NOISE, device=accelerator.device))
        # All processes' points against all real ones; `gather` gives every process the same cloud.
        return distance(accelerator.gather(fake), real_points.to(accelerator.device))

    untrained = how_far()
    for epoch in range(epochs):
        for (real,) in loader:
            noise = torch.randn(len(real), NOISE, device=accelerator.device)

            # The discriminator's step. Real and fake points go through it in one call: several calls before one
            # backward are something that distributed training does not like. `detach`, as the generator learns nothing
            # from this loss.
            fake = generator(noise)
            scores = discriminator(torch.cat([real, fake.detach()]))
            labels = torch.cat([torch.ones(len(real), 1), torch.zeros(len(fake), 1)]).to(scores.device)
            loss_discriminator = nn.functional.binary_cross_entropy_with_logits(scores, labels)
            accelerator.backward(loss_discriminator)
            for_discriminator.step()
            for_discriminator.zero_grad()

            # The generator's step. Its loss flows back through the discriminator, which gets gradients that nobody
            # wants: `no_sync` keeps the processes from averaging them, and `zero_grad` throws them away.
            with accelerator.no_sync(discriminator):
                scores = discriminator(fake)
                loss_generator = nn.functional.binary_cross_entropy_with_logits(scores, torch.ones_like(scores))
                accelerator.backward(loss_generator)
            for_generator.step()
            for_generator.zero_grad()
            for_discriminator.zero_grad()
        if epoch % 4 == 3:
            accelerator.print(f"epoch {epoch}: distance to the spiral {how_far():.4f}")

    accelerator.print(f"distance fell from {untrained:.4f} to {how_far():.4f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
