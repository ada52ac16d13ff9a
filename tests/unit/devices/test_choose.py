"""Which hardware, told from a dict and a list of devices."""

from __future__ import annotations

import os
import sys
import types

import pytest
import torch

from accelerate import Accelerator
from accelerate.config.enums import DistributedType
from accelerate.devices import CPU, DEVICES, XLA, Device, by_name, choose, copies_behind, kind_of
from accelerate.environments import World
from accelerate.errors import Unfit
from accelerate.state import PartialState
from tests.harness import run_world


class Fake(Device):
    """A device that is there, or not, as the test likes."""

    def __init__(self, name: str, there: bool) -> None:
        super().__init__(name, backend="fake", label=DistributedType.MULTI_GPU)
        self.there = there

    def available(self) -> bool:
        return self.there


def machine(**there: bool) -> list[Device]:
    return [*(Fake(name, is_there) for name, is_there in there.items()), CPU()]


def test_the_first_available_one_is_taken() -> None:
    assert choose({}, devices=machine(mps=False, cuda=True, xpu=True)).device.name == "cuda"
    assert choose({}, devices=machine(mps=False, cuda=False, xpu=True)).device.name == "xpu"
    choice = choose({}, devices=machine(mps=False, cuda=False))
    assert choice.device.name == "cpu" and choice.pinned is None and "first available" in choice.reason


def test_the_cpu_is_last_and_vendors_are_marked_untested() -> None:
    names = [device.name for device in DEVICES]
    assert names[:3] == ["xla", "mps", "cuda"] and names[-1] == "cpu" and len(set(names)) == len(names)
    assert [device.name for device in DEVICES if device.tested] == ["xla", "mps", "cuda", "cpu"]
    assert set(names[3:-1]) == {"xpu", "npu", "hpu", "mlu", "musa", "sdaa", "neuron"}
    for device in DEVICES:
        assert isinstance(device.available(), bool)  # a missing vendor's module is an answer, not an error
        assert device.label != DistributedType.NO


def test_the_script_beats_the_environment_which_beats_the_machine() -> None:
    there = machine(cuda=True)
    assert choose({"ACCELERATE_TORCH_DEVICE": "cuda:1"}, cpu=True, devices=there).device.name == "cpu"
    both = {"ACCELERATE_TORCH_DEVICE": "cuda:1", "ACCELERATE_USE_CPU": "true"}
    assert choose(both, devices=there).device.name == "cpu"


@pytest.mark.parametrize(
    ("value", "name"), [("true", "cpu"), ("1", "cpu"), ("YES", "cpu"), ("false", "cuda"), ("0", "cuda")]
)
def test_use_cpu(value: str, name: str) -> None:
    assert choose({"ACCELERATE_USE_CPU": value}, devices=machine(cuda=True)).device.name == name


def test_use_cpu_with_nonsense_names_the_variable() -> None:
    with pytest.raises(ValueError, match=r"ACCELERATE_USE_CPU.*'maybe'"):
        choose({"ACCELERATE_USE_CPU": "maybe"})


def test_torch_device() -> None:
    there = machine(cuda=True, xpu=True)
    choice = choose({"ACCELERATE_TORCH_DEVICE": "xpu"}, devices=there)
    assert (choice.device.name, choice.pinned) == ("xpu", None)
    choice = choose({"ACCELERATE_TORCH_DEVICE": "cuda:3"}, devices=there)
    assert (choice.device.name, choice.pinned) == ("cuda", 3) and "ACCELERATE_TORCH_DEVICE" in choice.reason
    assert choose({"ACCELERATE_TORCH_DEVICE": ""}, devices=there).device.name == "cuda"


@pytest.mark.parametrize(
    ("value", "message"),
    [("tpu", "'tpu'.*cuda, xpu, cpu"), ("cuda:x", "cuda:1"), ("cuda:-1", "cuda:1"), ("xpu:0", "'xpu:0', but.*no xpu")],
)
def test_torch_device_with_nonsense(value: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        choose({"ACCELERATE_TORCH_DEVICE": value}, devices=machine(cuda=True, xpu=False))


def test_the_processor() -> None:
    cpu = by_name("cpu")
    assert cpu.select(3) == cpu.default() == torch.device("cpu")
    assert cpu.count() == 1 and cpu.backend == "gloo"
    memory = cpu.memory()
    assert 0 < memory.free <= memory.total
    before = cpu.rng_state()
    drawn = torch.rand(3)
    cpu.set_rng_state(before)
    assert torch.equal(torch.rand(3), drawn)


def test_a_device_that_was_named_is_taken_index_and_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cpu:64")
    assert PartialState().device == torch.device("cpu:64")
    PartialState._reset_state()
    assert Accelerator().device == torch.device("cpu:64")


def device_of_this_rank() -> str:
    return str(PartialState().device)


def test_a_device_that_was_named_is_that_of_every_process() -> None:
    env = {"ACCELERATE_TORCH_DEVICE": "cpu:64"}  # beside ACCELERATE_USE_CPU, which says the same
    assert run_world(device_of_this_rank, 2, env=env) == ["cpu:64", "cpu:64"]


@pytest.mark.parametrize("cpu", [False, True])
def test_variables_that_cannot_be_read_are_named_on_the_cpu_too(cpu: bool) -> None:
    with pytest.raises(ValueError, match="ACCELERATE_USE_CPU cannot be read: 'perhaps'"):
        choose({"ACCELERATE_USE_CPU": "perhaps"}, cpu)
    for more in ({}, {"ACCELERATE_USE_CPU": "yes"}):
        with pytest.raises(ValueError, match=r"ACCELERATE_TORCH_DEVICE is 'foo:9': .* with one of xla, mps, cuda"):
            choose({"ACCELERATE_TORCH_DEVICE": "foo:9", **more}, cpu)


def test_torch_xla_is_used_where_somebody_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for torch_xla, which finds no TPU and then chooses the CPU itself, by a variable."""
    stand_in = types.SimpleNamespace(runtime=types.SimpleNamespace(device_type=_chooses_the_cpu))
    monkeypatch.setattr("accelerate.devices.xla.is_torch_xla_available", lambda: True)
    monkeypatch.setattr(XLA, "module", stand_in)
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert not XLA().available() and "PJRT_DEVICE" not in os.environ
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert XLA().available()
    monkeypatch.delenv("PJRT_DEVICE")
    stand_in.runtime.device_type = lambda: "TPU"
    assert XLA().available()


def without_torch_xla() -> None:
    sys.modules["torch_xla"] = None  # type: ignore[assignment]
    with pytest.raises(Unfit, match="is 'xla', but torch_xla is not installed: install it, name another device"):
        choose({"ACCELERATE_TORCH_DEVICE": "xla"})
    with pytest.warns(UserWarning, match="PJRT_DEVICE is 'TPU', but torch_xla, which it is for, is not installed"):
        assert not XLA().available()


def test_torch_xla_that_is_not_installed() -> None:
    run_world(without_torch_xla, 1, env={"PJRT_DEVICE": "TPU"})


def _chooses_the_cpu() -> str:
    os.environ["PJRT_DEVICE"] = "CPU"
    return "CPU"


def test_processes_that_do_not_fit_the_chips_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = types.SimpleNamespace(world_size=lambda: 4, is_spmd=lambda: False)
    monkeypatch.setattr(XLA, "module", types.SimpleNamespace(runtime=runtime))
    with pytest.raises(Unfit, match="one of 2 processes, but torch_xla finds 4 devices"):
        XLA().join(World(size=2), {})


def test_what_a_device_of_torch_is() -> None:
    found = {name: kind_of(torch.device(name)) for name in ("cuda", "cpu", "xpu", "meta")}
    assert {name: None if kind is None else kind.name for name, kind in found.items()} == {
        "cuda": "cuda",
        "cpu": "cpu",
        "xpu": "xpu",
        "meta": None,
    }
    assert [name for name in found if copies_behind(torch.device(name, 0))] == ["cuda"]


def test_a_device_that_cannot_be_asked_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after the error of a kernel: the thread that watches for hangs goes on."""

    class Stream:
        def query(self) -> bool:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    assert by_name("cuda").works(torch.device("cuda", 0)) is False
