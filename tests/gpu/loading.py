"""Checkpoints onto a GPU, and the limits of real devices."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from tests.gpu.checks import check

GPU = torch.device("cuda", 0)


def network(width: int = 512, layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(layers)]
    return nn.Sequential(nn.Embedding(100, width), *parts, nn.Linear(width, 100, bias=False))


def saved(model: nn.Module, folder: Path, shards: int = 3, safe: bool = True) -> Path:
    state = {name: value.cpu().contiguous() for name, value in model.state_dict().items()}
    names, weight_map = list(state), {}
    suffix = "safetensors" if safe else "bin"
    for number in range(shards):
        part = {name: state[name] for name in names[number::shards]}
        path = folder / f"part-{number}.{suffix}"
        save_file(part, path, metadata={"format": "pt"}) if safe else torch.save(part, path)
        weight_map |= dict.fromkeys(part, path.name)
    (folder / f"model.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def equal(found: nn.Module, model: nn.Module, dtype: torch.dtype | None = None) -> None:
    expected = model.state_dict()
    for name, value in found.state_dict().items():
        wanted = expected[name].to(dtype) if dtype and expected[name].is_floating_point() else expected[name]
        assert value.dtype == wanted.dtype and torch.equal(value.cpu(), wanted.cpu()), name


@check
def loads_straight_to_the_gpu() -> None:
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model
    from accelerate.io import read_tensors
    from accelerate.utils import load_state_dict

    model = network()
    plain_piece = read_tensors.PIECE
    for safe in (True, False):
        with tempfile.TemporaryDirectory() as name:
            folder = saved(model, Path(name), safe=safe)
            # Pieces that cut tensors apart, and those that hold all of one.
            for piece in (4096 + 8, plain_piece):
                read_tensors.PIECE = piece
                try:
                    for dtype in (None, torch.bfloat16, torch.float64):
                        with init_empty_weights():
                            found = network()
                        load_checkpoint_in_model(found, folder, {"": 0}, dtype=dtype, strict=True)
                        assert all(value.device == GPU for value in found.state_dict().values())
                        equal(found, model, dtype)
                    found = network().to(GPU)
                    with torch.no_grad():
                        for parameter in found.parameters():
                            parameter.zero_()
                    before = [parameter.data_ptr() for parameter in found.parameters()]
                    load_checkpoint_in_model(found, folder)
                    assert before == [parameter.data_ptr() for parameter in found.parameters()]
                    equal(found, model)
                    # In another order of memory, and of another dtype: put there piece by piece.
                    for dtype in (torch.float32, torch.bfloat16):
                        found = network().to(GPU, dtype)
                        for parameter in found.parameters():
                            parameter.data = parameter.data.t().contiguous().t()
                        load_checkpoint_in_model(found, folder)
                        equal(found, model, dtype)
                finally:
                    read_tensors.PIECE = plain_piece
            weights = load_state_dict(next(folder.glob("part-0*")), {"": "cuda"})
            assert all(value.device == GPU for value in weights.values())
            with init_empty_weights():
                found = network()
            device_map: dict[str, Any] = {"0": 0, "1": "cpu", "2": "disk", "3": 0, "4": "cpu", "5": 0}
            found = load_checkpoint_and_dispatch(
                found, str(folder), device_map=device_map, offload_folder=str(folder / "off")
            )
            tokens = torch.arange(64, device=GPU)
            with torch.no_grad():
                assert torch.equal(found.eval()(tokens), model.eval().to(GPU)(tokens))
            model.to("cpu").train()


@check
def loads_in_every_mode() -> None:
    """Inside of `torch.inference_mode`, and where another device than the CPU is the default."""
    from accelerate import init_empty_weights, load_checkpoint_and_dispatch, load_checkpoint_in_model

    model = network()
    plans: list[dict[str, Any]] = [{"": 0}, {"0": 0, "1": "cpu", "2": "disk", "3": 0, "4": "cpu", "5": 0}]
    modes: list[Any] = [torch.inference_mode(), torch.device(GPU)]
    with tempfile.TemporaryDirectory() as name:
        folder = saved(model, Path(name))
        for mode in modes:
            for plan in plans:
                for dtype in (None, torch.bfloat16):
                    with mode:
                        with init_empty_weights():
                            found = network()
                        load_checkpoint_and_dispatch(
                            found, str(folder), device_map=plan, dtype=dtype, offload_folder=str(folder / "off")
                        )
                        found.eval()(torch.arange(64, device=GPU))
                    equal(found, model, dtype)
            with mode:
                filled = network().to(GPU)
                load_checkpoint_in_model(filled, folder)
            equal(filled, model)


@check
def loading_needs_little_host_memory() -> None:
    from accelerate import init_empty_weights, load_checkpoint_in_model

    def own() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        kinds = ("RssAnon:", "RssShmem:")
        return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(kinds))

    with tempfile.TemporaryDirectory() as name:
        folder = saved(network(4096, 16), Path(name), shards=4)  # 1 GiB
        with init_empty_weights():
            small, model = network(), network(4096, 16)
        with tempfile.TemporaryDirectory() as other:
            load_checkpoint_in_model(small, saved(network(), Path(other)), {"": 0})  # CUDA and its libraries are there
        before = own()
        load_checkpoint_in_model(model, folder, {"": 0})
        assert own() - before < 2 * 2**28, f"{(own() - before) / 2**20:.0f} MiB more for shards of 256 MiB"
        assert torch.cuda.memory_allocated() >= 2**30


@check
def knows_the_memory_of_the_gpu() -> None:
    from accelerate import infer_auto_device_map, init_empty_weights
    from accelerate.utils import get_balanced_memory, get_max_memory

    limits = get_max_memory()
    assert list(limits) == [*range(torch.cuda.device_count()), "cpu"]
    assert 0 < limits[0] <= torch.cuda.get_device_properties(0).total_memory
    with init_empty_weights():
        model = network(4096, 4)
    assert infer_auto_device_map(model, get_balanced_memory(model)) == {"": 0}
    plan = infer_auto_device_map(model, {0: "200MB", "cpu": "10GB"}, offload_buffers=True)
    assert plan["0"] == 0 and "cpu" in plan.values()
