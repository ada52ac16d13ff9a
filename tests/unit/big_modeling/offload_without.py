"""Offloads models as if torch had lost a private name, for each of the names given, in a process of its own.

`python -m tests.unit.big_modeling.offload_without FOLDER NAME...` writes to FOLDER/NAME what came out, in JSON: outputs
or a traceback. "nothing" hides nothing. Forked from a process that has imported torch, and nothing of accelerate.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import numpy
import safetensors.torch
import torch
from torch import nn

__all__ = ["numpy"]  # imported so that each process need not


class Net(nn.Module):
    """A buffer that is saved and one that is not, an RNN, and a parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 4, bias=False)
        self.again = nn.Linear(4, 4, bias=False)
        self.again.weight = self.out.weight
        self.register_buffer("share", torch.tensor(0.5), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.rnn(x[:, None])[0][:, 0])
        return self.share * (self.out(hidden) + self.again(hidden)) + x @ self.out.weight.T


def build() -> Net:
    torch.manual_seed(0)
    return Net().eval()


@torch.no_grad()
def offload(folder: Path) -> list[Any]:
    """Outputs, most of which are the same: whichever way the weights come in."""
    from accelerate import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch
    from accelerate.hooks import remove_hook_from_submodules

    x = torch.linspace(-1, 1, 8).view(2, 4)
    found: list[torch.Tensor] = [build()(x)]
    for kind in ("memory", "disk"):
        net = cpu_offload(build(), "cpu") if kind == "memory" else disk_offload(build(), folder / "weights", "cpu")
        found += [net(x), net(x)]
        assert all(parameter.is_meta for parameter in net.parameters())
        state = {name: value.clone() for name, value in net.state_dict().items()}
        plain = build()
        plain.load_state_dict(state)
        found.append(plain(x))
        net.double()
        found.append(net(x.double()).float())
        net.float()
        remove_hook_from_submodules(net)
        found.append(net(x))
    net = cpu_offload(build(), "cpu", offload_buffers=True)
    net.load_state_dict({name: value * 0 for name, value in net.state_dict().items()})
    assert net(x).abs().max() == 0
    net.load_state_dict(build().state_dict())
    found.append(net(x))
    nn.init.orthogonal_(net.get_parameter("out.weight"))
    assert not torch.equal(net(x), found[0])
    safetensors.torch.save_file(
        {name: value for name, value in build().state_dict().items() if name != "again.weight"},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    for places in ({"": "cpu"}, {"rnn": "cpu", "norm": "cpu", "out": "disk", "again": "disk"}):
        with init_empty_weights():
            net = Net()
        net.eval()
        net.share = torch.tensor(0.5)
        given: dict[str, Any] = dict(places)
        net = load_checkpoint_and_dispatch(
            net, folder / "model.safetensors", given, offload_folder=folder / "more", offload_buffers=True
        )
        found += [net(x), net(x)]
    return [output.tolist() for output in found]


def outcome(name: str) -> Any:
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    try:
        from tests.unit.torch_names import Hiding

        if name != "nothing":
            Hiding(name).install()
        with tempfile.TemporaryDirectory() as folder:
            return offload(Path(folder))
    except BaseException:
        return traceback.format_exc()


def main(folder: Path, names: list[str]) -> None:
    gc.freeze()  # what is there already: no process need look at it again
    for number, name in enumerate(names):
        if number >= 2:
            os.wait()
        if os.fork() == 0:
            (folder / name).write_text(json.dumps(outcome(name)))
            os._exit(0)
    for _ in names[:2]:
        os.wait()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
