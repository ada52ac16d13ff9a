"""Small models that the tests of this folder share."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from accelerate.checkpoint.model_weights import clean_state_dict_for_safetensors


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.first(x).relu())


class Net(nn.Module):
    """An embedding, blocks, a norm with buffers, and an output that is tied to the embedding."""

    def __init__(self, blocks: int = 3, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 8, bias=False)
        self.register_buffer("scale", torch.tensor([2.0]), persistent=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def saved(model: nn.Module, folder: Path, safe: bool = True, shards: int = 1) -> Path:
    """Writes the weights of a model, each once, in one file or several with an index; returns the folder."""
    folder.mkdir(exist_ok=True, parents=True)
    state = clean_state_dict_for_safetensors(model.state_dict())
    names = list(state)
    stem, suffix = ("model", "safetensors") if safe else ("pytorch_model", "bin")

    def write(part: list[str], path: Path) -> None:
        tensors = {name: state[name] for name in part}
        save_file(tensors, path, metadata={"format": "pt"}) if safe else torch.save(tensors, path)

    if shards == 1:
        write(names, folder / f"{stem}.{suffix}")
        return folder
    weight_map = {}
    for number in range(shards):
        part = names[number::shards]
        file = f"{stem}-{number}.{suffix}"
        write(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
