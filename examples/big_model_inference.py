"""Run a model that does not fit: part of it stays in memory, and the rest is read from disk while it computes.

One process:    python examples/big_model_inference.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/big_model_inference.py

The model has 2.5 MB and is allowed a third of that. With a model of hundreds of gigabytes nothing is different but the
numbers: GPUs are filled first, then the memory of the host, then the disk.
"""

import torch
from torch import nn

from accelerate import Accelerator, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.utils import compute_module_sizes, gather_object, set_seed

WIDTH, LAYERS = 96, 8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(128, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 128)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def main(folder="runs/big_model"):
    accelerator = Accelerator()

    # Somebody has trained a model and saved it, in files of at most 1 MB, as those on the Hub come in several.
    set_seed(0)
    original = Model().to(accelerator.device)
    accelerator.save_model(original, folder, max_shard_size="1MB")
    accelerator.wait_for_everyone()

    # 1. The model without its weights. It takes no memory, however big it is, so we can ask how big it would be.
    with init_empty_weights():
        model = Model()
    size = compute_module_sizes(model)[""]

    # 2. Decide what goes where, read it, and see to it that what is not there arrives in time. `max_memory` is for the
    #    sake of the example: without it, all that is free is used. A block has a residual connection around it, so its
    #    parts have to be in one place.
    model = load_checkpoint_and_dispatch(
        model,
        folder,
        device_map="auto",
        max_memory={place: size // 3 for place in (accelerator.device.index, "cpu") if place is not None},
        no_split_module_classes=["Block"],
        offload_folder=f"{folder}/offload-{accelerator.process_index}",
    )
    accelerator.print({name: str(place) for name, place in model.hf_device_map.items()})

    # 3. Use it like any model. Each process has one, and answers its share of the questions.
    questions = list(torch.arange(24).split(4))
    with accelerator.split_between_processes(questions) as mine, torch.no_grad():
        same = [torch.allclose(model(q), original(q.to(accelerator.device)).to("cpu"), atol=1e-5) for q in mine]

    same = gather_object(same)
    in_memory = sum(p.nbytes for p in model.parameters() if not p.is_meta)
    accelerator.print(
        f"{in_memory} of {size} bytes in memory; {sum(same)} of {len(same)} answers are those of the original"
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
