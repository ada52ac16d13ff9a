"""Inference with a model in stages, one on each process; a batch flows through them in pieces.

Two processes:  accelerate launch --cpu --num_processes 2 examples/sharding_pipeline.py
Three:          accelerate launch --cpu --num_processes 3 examples/sharding_pipeline.py --batch_size 12
"""

import argparse

import torch
from torch import nn

from accelerate import PartialState, prepare_pippy
from accelerate.utils import set_seed


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(x)))


def infer(batch_size=8, batches=3, depth=6):
    state = PartialState()
    set_seed(0)
    model = nn.Sequential(*(Block(32) for _ in range(depth)), nn.Linear(32, 4)).eval()
    examples = [torch.randn(batch_size, 32) for _ in range(batches)]
    if state.num_processes > 1:
        # Blocks stay in one piece. All processes get the output, not only the one of the last stage.
        model = prepare_pippy(model, no_split_module_classes=["Block"], example_args=(examples[0],), gather_output=True)
        state.print(f"{state.num_processes} stages, cut before {', '.join(model.hf_split_points)}")
    else:
        model.to(state.device)
    answers = []
    with torch.no_grad():
        for batch in examples:
            answers += model(batch.to(state.device)).argmax(1).tolist()
    state.print(f"{len(answers)} answers: {answers}")
    state.destroy_process_group()
    return answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--depth", type=int, default=6)
    infer(**vars(parser.parse_args()))
