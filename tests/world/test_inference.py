"""Models in stages: the output is that of the whole model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate import PartialState, inference, prepare_pippy
from accelerate.inference import find_pippy_batch_size, generate_device_map
from tests.harness import run_world, world_outcomes
from tests.harness.torch_features import stages_take_several_tensors


class Net(nn.Module):
    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(layers))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        x = x * scale
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return {"logits": self.head(x)}


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(size)
    return torch.randn(size, 4), torch.rand(size, 4)


def _check(gather: bool, points: Any, chunks: int | None) -> Any:
    plain = Net().eval()
    model = prepare_pippy(Net(), points, example_args=batch(4), num_chunks=chunks, gather_output=gather)
    state = PartialState()
    with torch.no_grad():
        for size in (4, 4, 3, 9, 1):
            x, scale = batch(size)
            output = model(x, scale)
            if gather or state.process_index == state.num_processes - 1:
                torch.testing.assert_close(output["logits"], plain(x, scale)["logits"])
            else:
                assert output is None
    return model.hf_split_points


def test_two_stages() -> None:
    points = run_world(_check, 2, True, "auto", None)
    assert points[0] == points[1] and len(points[0]) == 1


def test_where_and_in_how_many_pieces() -> None:
    assert run_world(_check, 2, False, "layers.1", 4) == [["layers.1"]] * 2


def test_three_stages() -> None:
    assert len(run_world(_check, 3, True, "auto", None)[0]) == 2


def _too_many() -> None:
    with pytest.raises(ValueError, match="cannot be traced without an input"):
        prepare_pippy(Net(), ["layers.1"])
    prepare_pippy(Net(), ["layers.1", "layers.2"], example_args=batch(4))


def test_too_many_points() -> None:
    for outcome in world_outcomes(_too_many, 2):
        assert "has 3 stages, but there are 2 processes" in outcome.message


class Several(Net):
    def __init__(self, kind: str) -> None:
        super().__init__(2)
        self.kind = kind

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> Any:
        hidden = self.layers[0](x * scale)
        x = self.layers[1](hidden)
        kinds = {"none": (x, None), "twice": {"a": x, "b": [x, x + 1, 5]}, "hidden": (x, hidden)}
        return {**kinds, "input": {"x": x, "scale": scale}, "sum": (x, x.sum())}[self.kind]


class Late(Net):
    """The second stage needs an input of the model."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers[1](self.layers[0](x))
        return hidden * scale


def _late_input() -> None:
    prepare_pippy(Late(2), "layers.1", example_args=batch(4))


def test_an_input_that_a_later_stage_needs() -> None:
    for outcome in world_outcomes(_late_input, 2):
        assert "Stage 1 of this Late needs scale, but only the first stage gets the inputs" in outcome.message


class Turned(nn.Module):
    """Hands on what lies in memory in another order, and with gaps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        turned, some = x.transpose(1, 2), x[:, :, :3]
        return self.second(turned)[:, ::2] + some.sum(1, keepdim=True)


def _turned() -> None:
    x = torch.randn(4, 5, 4, generator=torch.Generator().manual_seed(0))
    plain = Turned().eval()
    model = prepare_pippy(Turned(), ["second"], example_args=(x,), gather_output=True)
    with torch.no_grad():
        for given in (x, x.transpose(0, 1).contiguous().transpose(0, 1)):
            torch.testing.assert_close(model(given), plain(given))


@stages_take_several_tensors
def test_stages_hand_on_tensors_of_any_strides() -> None:
    run_world(_turned, 2)


def _several_tensors() -> None:
    inference.waits_for_every_tensor = lambda: False  # as in torch 2.6
    prepare_pippy(Turned(), ["second"], example_args=(torch.ones(4, 5, 4),))


def test_several_tensors_where_torch_waits_for_one() -> None:
    for outcome in world_outcomes(_several_tensors, 2):
        assert "Stage 1 of this Turned receives 2 tensors, but torch" in outcome.message


def _outputs() -> None:
    for kind in ("none", "twice"):
        model = prepare_pippy(Several(kind), "layers.1", example_args=batch(4), gather_output=True)
        for size in (4, 9):
            with torch.no_grad():
                torch.testing.assert_close(model(*batch(size)), Several(kind)(*batch(size)))
    for kind, message in (
        ("hidden", "Output 1 of this Several is computed before the last stage"),
        ("input", "Output 1 of this Several is computed before the last stage"),
        ("sum", "Output 1 of this Several is a single number"),
    ):
        with pytest.raises(ValueError, match=message):
            prepare_pippy(Several(kind), "layers.1", example_args=batch(4))
    with pytest.raises(ValueError, match=r"'layer\.1' is not a module of this Net: .* such as layers\.1, "):
        prepare_pippy(Net(), "layer.1", example_args=batch(4))
    with pytest.raises(ValueError, match=r"has 1 parts that can be separated \(0\), but there are 2 processes: start"):
        prepare_pippy(nn.Sequential(nn.Linear(4, 4)), example_args=batch(4)[:1])


def test_outputs_of_every_kind_and_models_that_cannot_be_cut() -> None:
    run_world(_outputs, 2)


def test_one_process() -> None:
    assert run_world(_check, 1, False, "auto", None) == [[]]


def test_even_shares() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    found = generate_device_map(model, 4)
    assert [list(found.values()).count(i) for i in range(4)] == [2, 2, 2, 2]
    uneven = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400), nn.Linear(400, 4), nn.Linear(4, 4))
    assert set(generate_device_map(uneven, 2).values()) == {0, 1}
    assert set(generate_device_map(model, 2, max_memory={0: 200, 1: 10000}).values()) == {0, 1}


def test_batch_sizes() -> None:
    assert find_pippy_batch_size((1, torch.ones(3, 2)), {}) == 3
    assert find_pippy_batch_size((), {"a": None, "b": torch.ones(4)}) == 4
    assert find_pippy_batch_size(None, None) is None
