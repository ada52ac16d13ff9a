from __future__ import annotations

import copy
import inspect
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import accelerate.big_modeling
from accelerate import cpu_offload, disk_offload, dispatch_model, init_empty_weights, load_checkpoint_and_dispatch
from accelerate.hooks import AlignDevicesHook, attach_align_device_hook_on_blocks, remove_hook_from_submodules
from tests.unit.big_modeling.toys import TOKENS, Model, model

ALL_CPU = {"scale": "cpu", "embed": "cpu", "layers": "cpu", "head": "cpu", "unused": "cpu"}


def test_one_device_needs_no_hooks() -> None:
    made = dispatch_model(model(), {"": "cpu"})
    assert made.hf_device_map == {"": "cpu"}  # type: ignore[comparison-overlap]
    assert not any(hasattr(module, "_hf_hook") for module in made.modules())
    assert torch.equal(made(TOKENS), model()(TOKENS))
    made.to("cpu")


def test_hooks_on_one_device() -> None:
    made = dispatch_model(model(), {"": "cpu"}, force_hooks=True)
    assert all(isinstance(module._hf_hook, AlignDevicesHook) for module in made.modules() if list(module.parameters()))
    assert made._hf_hook.io_same_device  # type: ignore[union-attr]
    assert made.head.weight is made.embed.weight  # type: ignore[union-attr]
    assert torch.equal(made(TOKENS), model()(TOKENS))


def test_mixed_places(tmp_path: Path) -> None:
    places = {**ALL_CPU, "layers": "disk", "unused": "disk"}
    made = dispatch_model(model(), places, offload_dir=tmp_path)
    assert made.hf_device_map == places  # type: ignore[comparison-overlap]
    gone = {name for name, parameter in made.named_parameters() if parameter.is_meta}
    assert gone and all(name.startswith(("layers.", "unused.")) for name in gone)
    assert {path.name.split(".")[0] for path in tmp_path.glob("*.dat")} == {"layers", "unused"}
    for _ in range(2):
        assert torch.equal(made(TOKENS), model()(TOKENS))


def test_tied_weights_on_disk_and_not(tmp_path: Path) -> None:
    made = dispatch_model(model(), {**ALL_CPU, "head": "disk"}, offload_dir=tmp_path)
    assert made.head.weight is made.embed.weight  # type: ignore[union-attr]
    assert not made.head.weight.is_meta  # type: ignore[union-attr]
    assert torch.equal(made(TOKENS), model()(TOKENS))


class WithViews(nn.Module):
    """Views of a tied weight that begin at its address: a part of it as a parameter, and all of it as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.tied = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
        self.tied.weight = self.embed.weight
        self.part = nn.Linear(4, 2, bias=False)
        self.part.weight = nn.Parameter(self.embed.weight.data[:2])
        self.seen = nn.Module()
        self.seen.register_buffer("all", self.embed.weight.data)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return torch.cat([self.tied(x), self.part(x), x @ self.seen.all.T], -1)


@pytest.mark.parametrize("place", ["cpu:0", "cpu"], ids=["in place", "offloaded"])
def test_views_of_tied_weights_are_no_ties(place: str) -> None:
    """`cpu:0` stands for a GPU."""
    torch.manual_seed(0)
    made, tokens = WithViews(), torch.arange(8)
    expected = made(tokens)
    places = {"embed": "cpu:0", "tied": "cpu:0", "part": place, "seen": place}
    made = dispatch_model(made, places, main_device="cpu:0", force_hooks=True, offload_buffers=True)
    assert torch.equal(made(tokens), expected)
    assert made.tied.weight is made.embed.weight  # type: ignore[union-attr]
    assert [name for name, _ in made.named_parameters()] == ["embed.weight", "part.weight"]
    assert [name for name, _ in made.named_buffers()] == ["seen.all"]
    assert made.part.weight.shape == (2, 4)  # type: ignore[union-attr]


def test_a_tied_weight_that_is_there_is_not_read_again() -> None:
    class Counted(dict[str, torch.Tensor]):
        reads = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            self.reads += 1
            return super().__getitem__(name)

    made = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    made[1].weight = made[0].weight
    weights = Counted(made.state_dict())
    attach_align_device_hook_on_blocks(
        made,
        execution_device={"0": "cpu:0", "1": "cpu:0"},
        offload={"0": False, "1": True},
        weights_map=weights,
        tied_params_map={made[0].weight.data_ptr(): {}},
    )
    before = weights.reads
    for _ in range(3):
        made(torch.ones(1, 4))
    assert weights.reads == before


@pytest.mark.parametrize("places", [{"": "disk"}, dict.fromkeys(ALL_CPU, "disk")], ids=["one entry", "several"])
def test_a_whole_model_on_disk(places: dict[str, str], tmp_path: Path) -> None:
    made = dispatch_model(model(), places, offload_dir=tmp_path)
    assert made.hf_device_map == places  # type: ignore[comparison-overlap]
    assert all(parameter.is_meta for parameter in made.parameters())
    for _ in range(2):
        assert torch.equal(made(TOKENS), model()(TOKENS))


def test_a_map_without_room_in_memory(tmp_path: Path) -> None:
    save_file(nest().state_dict(), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with init_empty_weights():
        empty = nest()
    made = load_checkpoint_and_dispatch(
        empty, tmp_path, device_map="auto", max_memory={"cpu": 1}, offload_folder=tmp_path / "offload"
    )
    assert set(made.hf_device_map.values()) == {"disk"}  # type: ignore[union-attr,operator]
    x = torch.rand(2, 4)
    assert torch.equal(made(x), nest()(x))


def test_a_model_without_tensors() -> None:
    assert dispatch_model(nn.Identity(), {}).hf_device_map == {}  # type: ignore[comparison-overlap]


def test_no_folder() -> None:
    with pytest.raises(
        ValueError, match=r"puts layers, unused on disk, but there is no folder for it: pass offload_dir"
    ):
        dispatch_model(model(), {**ALL_CPU, "layers": "disk", "unused": "disk"})
    with pytest.raises(ValueError, match="puts the whole model on disk, but there is no folder"):
        dispatch_model(model(), {"": "disk"})


def test_gaps_in_the_map() -> None:
    with pytest.raises(ValueError, match="no device for scale"):
        dispatch_model(model(), {"embed": "cpu", "layers": "meta", "head": "cpu", "unused": "cpu"})


def test_clients_may_replace_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers does so for models with tensors that are in no map."""
    calls: list[Any] = []
    monkeypatch.setattr(accelerate.big_modeling, "check_device_map", lambda *args: calls.append(args))
    dispatch_model(model(), {"embed": "cpu"})
    assert len(calls) == 1


def test_moving_says_why_not(tmp_path: Path) -> None:
    made = dispatch_model(model(), {**ALL_CPU, "layers": "disk"}, offload_dir=tmp_path)
    for move in (lambda: made.to("cpu"), lambda: made.to(device="cpu", dtype=torch.half), lambda: made.cpu()):
        with pytest.raises(RuntimeError, match="This Model cannot be moved by"):
            move()
    made.to(torch.float64)
    assert torch.equal(made(TOKENS), model().double()(TOKENS))
    with pytest.raises(RuntimeError, match="cannot be moved"):
        copy.deepcopy(made).to("cpu")
    remove_hook_from_submodules(made)
    assert made.to("cpu") is made
    assert torch.equal(made(TOKENS), model().double()(TOKENS))


def test_after_another_way_of_offloading(tmp_path: Path) -> None:
    places = {**ALL_CPU, "layers": "disk", "scale": "disk"}
    for number, made in enumerate((cpu_offload(model(), "cpu", offload_buffers=True), model())):
        made = dispatch_model(made, places, offload_dir=tmp_path / str(number))
        again = disk_offload(made, tmp_path / "again", "cpu")
        for _ in range(2):
            assert torch.equal(again(TOKENS), model()(TOKENS))


def test_an_index_that_lacks_weights(tmp_path: Path) -> None:
    places = {**ALL_CPU, "layers": "disk"}
    file = tmp_path / "model.safetensors"
    state = {name: value for name, value in model().state_dict().items() if name.startswith("layers.0.linear")}
    save_file(state, file)
    index = {name: {"safetensors_file": str(file), "weight_name": name, "dtype": "float32"} for name in state}
    made = dispatch_model(model(), places, offload_index=index)
    assert torch.equal(made(TOKENS), model()(TOKENS)), "the model has the others"
    with init_empty_weights():
        empty = Model()
    with pytest.raises(ValueError, match=r"no value for layers\.0\.norm\.weight, layers\.0\.norm\.bias, layers\.1\."):
        dispatch_model(empty, places, offload_index=index)
    assert not any(hasattr(module, "_hf_hook") for module in empty.modules())


def test_moving_a_model_that_is_spread(caplog: pytest.LogCaptureFixture) -> None:
    made = dispatch_model(model(), {"": "cpu"}, force_hooks=True)
    with caplog.at_level(logging.WARNING):
        made.to("cpu")
    assert "spread over devices" in caplog.text


def test_signatures_that_clients_probe() -> None:
    names = set(inspect.signature(dispatch_model).parameters)
    assert {"skip_keys", "force_hooks", "offload_index", "offload_dir", "offload_buffers"} <= names


def test_a_second_dispatch(tmp_path: Path) -> None:
    """peft takes the hooks off and dispatches again, after it has put modules into the model."""
    made = dispatch_model(model(), {**ALL_CPU, "layers": "disk"}, offload_dir=tmp_path / "a")
    remove_hook_from_submodules(made)
    made.extra = nn.Linear(2, 2)
    places = {**ALL_CPU, "extra": "cpu", "unused": "disk", "layers": "disk"}
    again = dispatch_model(made, places, offload_dir=tmp_path / "b")
    assert torch.equal(again(TOKENS), model()(TOKENS))


def test_skipped_keys() -> None:
    class Keyed(Model):
        def forward(self, tokens: torch.Tensor, memo: Any = None) -> Any:
            return {"output": super().forward(tokens), "memo": memo}

    torch.manual_seed(0)
    made = dispatch_model(Keyed().eval(), {"": "cpu"}, force_hooks=True, skip_keys="memo")
    memo = torch.ones(1, device="meta")
    assert made(TOKENS, memo=memo)["memo"] is memo


def test_from_a_checkpoint_to_a_running_model(tmp_path: Path) -> None:
    """Weights on disk stay in the checkpoint's own files, ties hold, and what is not in a state dict is kept."""
    plain = model()
    shards: list[dict[str, torch.Tensor]] = [{}, {}]
    for number, (name, value) in enumerate(plain.state_dict().items()):
        if name != "head.weight":  # tied: stored once
            shards[number % 2][name] = value
    names = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (tmp_path / "checkpoint").mkdir()
    for file, shard in zip(names, shards, strict=True):
        save_file(shard, tmp_path / "checkpoint" / file)
    weight_map = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
    index = tmp_path / "checkpoint" / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    torch.manual_seed(1)
    with init_empty_weights(include_buffers=False):
        empty = Model()
    for layer, filled in zip(empty.layers, plain.layers, strict=True):
        layer.shift = filled.shift.clone()
    places = {**ALL_CPU, "layers": "disk", "unused": "disk"}
    made = load_checkpoint_and_dispatch(
        empty, tmp_path / "checkpoint", device_map=places, offload_folder=tmp_path / "offload"
    ).eval()
    assert made.hf_device_map == places  # type: ignore[comparison-overlap]
    assert [path.name for path in (tmp_path / "offload").iterdir()] == ["index.json"]
    assert made.head.weight is made.embed.weight  # type: ignore[union-attr]
    for _ in range(2):
        assert torch.equal(made(TOKENS), plain(TOKENS))
    found = made.state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())


def test_a_map_that_is_found(tmp_path: Path) -> None:
    plain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    save_file(plain.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    made = load_checkpoint_and_dispatch(
        empty, tmp_path, device_map="auto", max_memory={"cpu": 3600}, offload_folder=tmp_path / "offload"
    )
    assert set(made.hf_device_map.values()) == {"cpu", "disk"}  # type: ignore[union-attr,operator]
    x = torch.ones(1, 16)
    assert torch.equal(made(x), plain(x))
    with pytest.raises(ValueError, match="device_map is 'best'"):
        load_checkpoint_and_dispatch(empty, tmp_path, device_map="best")
    loaded = load_checkpoint_and_dispatch(nn.Sequential(*(nn.Linear(16, 16) for _ in range(4))), tmp_path)
    assert torch.equal(loaded(x), plain(x)) and not hasattr(loaded, "hf_device_map")


class Gain(nn.Module):
    """A module with modules inside, and with tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(4))
        self.register_buffer("shift", torch.rand(4))
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) * self.gain + self.shift


def nest() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Gain(), Gain())


NESTED: list[tuple[dict[str, str], set[str]]] = [
    ({"": "cpu", "1": "disk"}, {"1.gain", "1.shift", "1.a", "1.b"}),
    ({"": "disk", "0": "cpu"}, {"1.gain", "1.shift", "1.a", "1.b"}),
    ({"": "cpu", "0": "disk", "0.a": "cpu"}, {"0.gain", "0.shift", "0.b"}),
    ({"": "disk", "0.gain": "cpu", "0.shift": "cpu", "1": "cpu"}, {"0.a", "0.b"}),
    ({"0.gain": "disk", "0.shift": "cpu", "0.a": "cpu", "0.b": "disk", "1": "cpu"}, {"0.gain", "0.b"}),
]


@pytest.mark.parametrize("places, on_disk", NESTED, ids=lambda value: str(value) if isinstance(value, dict) else "")
def test_entries_inside_of_others_and_for_single_tensors(
    places: dict[str, str], on_disk: set[str], tmp_path: Path
) -> None:
    x = torch.rand(2, 4)
    expected = nest()(x)
    save_file(nest().state_dict(), tmp_path / "weights.safetensors", metadata={"format": "pt"})
    with init_empty_weights():
        empty = nest()
    loaded = load_checkpoint_and_dispatch(
        empty, tmp_path / "weights.safetensors", places, offload_folder=tmp_path / "a", offload_buffers=True
    )
    dispatched = dispatch_model(nest(), places, offload_dir=tmp_path / "b", offload_buffers=True)
    for made in (loaded, dispatched):
        gone = {name for name, tensor in (*made.named_parameters(), *made.named_buffers()) if tensor.is_meta}
        assert {name.removesuffix(".weight").removesuffix(".bias") for name in gone} == on_disk
        for _ in range(2):
            assert torch.equal(made(x), expected)
    written = {path.name.removesuffix(".dat") for path in (tmp_path / "b").glob("*.dat")}
    assert {name.removesuffix(".weight").removesuffix(".bias") for name in written} == on_disk


def test_a_single_tensor_goes_where_its_entry_says() -> None:
    made = nest()
    places = {"0.gain": "meta", "0.a": "cpu"}
    attach_align_device_hook_on_blocks(made, execution_device=places, offload=dict.fromkeys(places, False))
    assert made.get_parameter("0.gain").is_meta and not made.get_parameter("1.gain").is_meta


@pytest.mark.parametrize(("device", "near"), [("cup", "cpu"), ("Disk", "disk"), ("cdua:0", "cuda"), ("nowhere", None)])
def test_devices_that_are_misspelt(device: str, near: str | None) -> None:
    meant = "" if near is None else rf" \(did you mean `{near}`\?\)"
    words = rf"'{device}', which cannot be used here \(there is no such device{meant}\): give one .*, or 'disk'\.$"
    with pytest.raises(ValueError, match=words):
        dispatch_model(nn.Linear(2, 2), {"": device})


@pytest.mark.parametrize("device", [0, "cuda:7", "nowhere", torch.device("cuda", 7)])
@pytest.mark.parametrize("others", [{}, {"2": "cpu"}])
def test_devices_that_there_are_not(device: Any, others: dict[str, Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there may be such a device")
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    with pytest.raises(
        ValueError, match=f"names the device {re.escape(repr(device))}, which cannot be used here \\(.*\\): give one"
    ):
        dispatch_model(net, {"": device, **others})
    assert not any(hasattr(part, "_hf_hook") for part in net.modules())


def test_what_is_no_map_or_has_no_values() -> None:
    with pytest.raises(ValueError, match="device_map is 'auto': pass a device map"):
        dispatch_model(nn.Linear(2, 2), "auto")  # type: ignore[arg-type]
    with init_empty_weights():
        net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    net[0].bias = nn.Parameter(torch.ones(2))
    with pytest.raises(ValueError, match=r"This Sequential has no values \(meta device\) for 0.weight, 1.weight: load"):
        dispatch_model(net, {"": "cpu"})
    assert dispatch_model(net, {"": "meta"}) is net
