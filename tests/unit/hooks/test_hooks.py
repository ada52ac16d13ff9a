from __future__ import annotations

import copy
import dataclasses
import inspect
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

import accelerate
from accelerate import cpu_offload
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    LayerwiseCastingHook,
    ModelHook,
    SequentialHook,
    UserCpuOffloadHook,
    add_hook_to_module,
    attach_align_device_hook,
    attach_align_device_hook_on_blocks,
    attach_execution_device_hook,
    remove_hook_from_module,
    remove_hook_from_submodules,
)
from accelerate.hooks.casting import attach_layerwise_casting_hooks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1 = nn.Linear(3, 4)
        self.batchnorm = nn.BatchNorm1d(4)
        self.linear2 = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear2(self.batchnorm(self.linear1(x)))


class Plus(ModelHook):
    """Adds to the input before and to the output after."""

    def __init__(self, before: float = 0, after: float = 0) -> None:
        self.before = before
        self.after = after

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return (args[0] + self.before, *args[1:]), kwargs

    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return output + self.after


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


X = torch.arange(6.0).view(2, 3)


def test_a_hook_that_puts_another_module_in_place(net: Net) -> None:
    class Replace(Plus):
        def init_hook(self, module: nn.Module) -> nn.Module:
            return nn.Identity()

    made = add_hook_to_module(net, Replace(after=1))
    assert isinstance(made, nn.Identity) and made(torch.ones(1)) == 2
    assert not hasattr(net, "_old_forward")
    assert remove_hook_from_module(made)(torch.ones(1)) == 1


def test_a_hook_is_put_on_and_taken_off(net: Net) -> None:
    hook = Plus()
    assert add_hook_to_module(net, hook) is net
    assert net._hf_hook is hook  # type: ignore[comparison-overlap]
    assert net.forward.__name__ == "forward"
    assert list(inspect.signature(net.forward).parameters) == ["x"]
    assert net._old_forward(X) is not None  # type: ignore[operator]
    assert remove_hook_from_module(net) is net
    assert not hasattr(net, "_hf_hook") and not hasattr(net, "_old_forward")
    assert "forward" not in net.__dict__


def test_before_and_after(net: Net) -> None:
    expected = net(X + 1) + 2
    add_hook_to_module(net, Plus(1, 2))
    assert torch.equal(net(X), expected)
    # Another one takes its place.
    plain = net._old_forward(X + 3)  # type: ignore[operator]
    add_hook_to_module(net, Plus(3))
    assert torch.equal(net(X), plain)


def test_several_hooks(net: Net) -> None:
    expected = net(X + 1 + 10) + 2 + 20
    add_hook_to_module(net, Plus(1, 2))
    add_hook_to_module(net, Plus(10, 20), append=True)
    assert isinstance(net._hf_hook, SequentialHook) and len(net._hf_hook.hooks) == 2
    assert torch.equal(net(X), expected)
    remove_hook_from_module(net)
    assert torch.equal(net(X + 1 + 10) + 2 + 20, expected)
    assert not torch.equal(net(X), expected)


def test_without_gradients(net: Net) -> None:
    hook = ModelHook()
    hook.no_grad = True
    add_hook_to_module(net, hook)
    assert not net(X).requires_grad
    add_hook_to_module(net, Plus(), append=True)
    assert not net(X).requires_grad


def test_init_and_detach() -> None:
    calls = []

    class Noted(ModelHook):
        def init_hook(self, module: nn.Module) -> nn.Module:
            calls.append("init")
            return module

        def detach_hook(self, module: nn.Module) -> nn.Module:
            calls.append("detach")
            return module

    layer = nn.Linear(1, 1)
    add_hook_to_module(layer, SequentialHook(Noted(), Noted()))
    remove_hook_from_module(layer)
    assert calls == ["init", "init", "detach", "detach"]


def test_recursion(net: Net) -> None:
    for module in net.modules():
        add_hook_to_module(module, Plus())
    remove_hook_from_module(net.linear1)
    assert hasattr(net.batchnorm, "_hf_hook")
    remove_hook_from_submodules(net)
    assert not any(hasattr(module, "_hf_hook") for module in net.modules())


def test_a_forward_of_the_object_is_put_back(net: Net) -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    net.forward = forward  # type: ignore[method-assign]
    add_hook_to_module(net, Plus(1))
    assert torch.equal(net(X), (X + 1) * 2)
    remove_hook_from_module(net)
    assert net.forward is forward


def test_copies_call_their_own_modules(net: Net) -> None:
    add_hook_to_module(net, Plus(1))
    other = copy.deepcopy(net)
    with torch.no_grad():
        other.linear2.weight.zero_()
        other.linear2.bias.zero_()
    assert other(X).abs().sum() == 0
    assert net(X).abs().sum() > 0


def test_traced_modules(net: Net) -> None:
    graph = torch.fx.symbolic_trace(net)
    expected = graph(X + 1)
    add_hook_to_module(graph, Plus(1))
    assert torch.equal(graph(X), expected)
    remove_hook_from_module(graph)
    assert torch.equal(graph(X + 1), expected)


HOOKS: list[tuple[type[Any], dict[str, Any]]] = [
    (
        AlignDevicesHook,
        {
            "execution_device": "cpu",
            "offload": True,
            "io_same_device": True,
            "weights_map": {},
            "offload_buffers": True,
            "place_submodules": True,
            "skip_keys": ["a"],
            "tied_params_map": {},
        },
    ),
    (CpuOffload, {"execution_device": "cpu", "prev_module_hook": None}),
    (LayerwiseCastingHook, {"storage_dtype": torch.half, "compute_dtype": torch.float, "non_blocking": True}),
]


@pytest.mark.parametrize(("kind", "arguments"), HOOKS)
def test_clients_can_make_a_hook_anew(kind: type[Any], arguments: dict[str, Any]) -> None:
    """transformers and diffusers find the class by its name and its arguments among the attributes."""
    old = kind(**arguments)
    found = getattr(accelerate.hooks, type(old).__name__)
    parameters = inspect.signature(found.__init__).parameters
    assert {name: value for name, value in vars(old).items() if name in parameters} == arguments
    found(**{name: value for name, value in vars(old).items() if name in parameters})


def test_no_compiler_is_loaded() -> None:
    code = "import sys, accelerate.hooks; print('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


def test_submodules_are_found_without_an_import() -> None:
    code = "import accelerate; print(accelerate.hooks.AlignDevicesHook.__name__)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "AlignDevicesHook\n"


def test_align_keeps_and_returns_weights(net: Net) -> None:
    expected, weight = net(X), net.linear1.weight.detach().clone()
    hook = AlignDevicesHook(execution_device="cpu", offload=True)
    add_hook_to_module(net.linear1, hook)
    assert net.linear1.weight.is_meta and net.linear1.bias.is_meta
    assert hook.original_devices == {"weight": torch.device("cpu"), "bias": torch.device("cpu")}
    assert torch.equal(net(X), expected)
    assert net.linear1.weight.is_meta
    remove_hook_from_module(net.linear1)
    assert type(net.linear1.weight) is nn.Parameter and torch.equal(net.linear1.weight, weight)
    assert torch.equal(net(X), expected)


def test_clients_call_a_hook_themselves(net: Net) -> None:
    """Around code that uses the weights of a child; the child itself may be called inside."""
    add_hook_to_module(net.linear1, AlignDevicesHook(execution_device="cpu", offload=True))
    hook: Any = net.linear1._hf_hook
    assert hook.pre_forward(net.linear1) == ((), {})
    assert not net.linear1.weight.is_meta
    net.linear1(X)
    assert not net.linear1.weight.is_meta
    hook.post_forward(net.linear1, ())
    assert net.linear1.weight.is_meta


def test_buffers_stay_or_go(net: Net) -> None:
    expected = net(X)
    attach_align_device_hook(net, execution_device="cpu", offload=True)
    assert net.batchnorm.weight.is_meta and not net.batchnorm.running_mean.is_meta  # type: ignore[union-attr]
    assert torch.equal(net(X), expected)
    remove_hook_from_submodules(net)
    attach_align_device_hook(net, execution_device="cpu", offload=True, offload_buffers=True)
    assert net.batchnorm.running_mean.is_meta  # type: ignore[union-attr]
    assert torch.equal(net(X), expected)


def test_attach_with_a_mapping_of_weights(net: Net) -> None:
    expected, weights = net(X), dict(net.state_dict())
    attach_align_device_hook(net, execution_device="cpu", offload=True, weights_map=weights)
    hook: Any = net.linear2._hf_hook
    assert hook.weights_map.dataset is weights and hook.weights_map.prefix == "linear2."
    assert torch.equal(net(X), expected)
    weights["linear2.bias"] = weights["linear2.bias"] + 1  # clients exchange weights like this
    torch.testing.assert_close(net(X), expected + 1)


def test_preloaded_classes() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.again = nn.Linear(3, 3, bias=False)
            self.again.weight = self.inner.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert not self.inner.weight.is_meta and not self.again.weight.is_meta
            return x @ self.inner.weight + x @ self.again.weight

    model = nn.Sequential(Bare())
    expected = model(X)
    attach_align_device_hook(model, "cpu", offload=True, preload_module_classes=["Bare"])
    assert not hasattr(model[0].inner, "_hf_hook")
    assert model[0].inner.weight.is_meta and model[0].again.weight.is_meta
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert torch.equal(model(X), expected)


def test_execution_device_hooks(net: Net) -> None:
    attach_execution_device_hook(net, "cpu")
    kinds = {name: getattr(module, "_hf_hook", None) for name, module in net.named_modules()}
    assert all(isinstance(hook, AlignDevicesHook) and hook.execution_device == "cpu" for hook in kinds.values())
    before = net._hf_hook
    attach_execution_device_hook(net, "meta")
    assert net._hf_hook is before


@pytest.mark.parametrize("offload", [{"": True}, {"linear1": True, "batchnorm": False, "linear2": True}, True, False])
def test_on_blocks(net: Net, offload: Any) -> None:
    expected, weights = net(X), dict(net.state_dict())
    names = offload if isinstance(offload, dict) else [""]
    devices: Any = dict.fromkeys(names, "cpu") if isinstance(offload, dict) else "cpu"
    attach_align_device_hook_on_blocks(net, devices, offload, weights)
    assert torch.equal(net(X), expected)
    gone = {name for name, parameter in net.named_parameters() if parameter.is_meta}
    wanted = {"": set(weights), True: set(weights), False: set()}
    if isinstance(offload, dict) and "linear1" in offload:
        assert gone == {"linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias"}
    else:
        key = "" if isinstance(offload, dict) else offload
        assert gone == wanted[key] & {name for name, _ in net.named_parameters()}
    remove_hook_from_submodules(net)
    assert torch.equal(net(X), expected)


def test_skipped_keys_and_devices_of_outputs() -> None:
    class Echo(nn.Module):
        def forward(self, x: torch.Tensor, cache: torch.Tensor | None = None) -> Any:
            return {"x": x, "cache": cache}

    model = Echo()
    add_hook_to_module(model, AlignDevicesHook("meta", io_same_device=False, skip_keys=["cache"]))
    output = model(torch.ones(1), cache=torch.ones(1))
    assert output["x"].is_meta and not output["cache"].is_meta


def test_an_exception_does_not_break_the_next_forward(net: Net) -> None:
    from accelerate import cpu_offload

    expected = net(X)
    cpu_offload(net, "cpu")
    with pytest.raises(RuntimeError):
        net(torch.ones(2, 7))
    assert torch.equal(net(X), expected)
    assert all(parameter.is_meta for parameter in net.parameters())


def test_cpu_offload_hooks(net: Net) -> None:
    from accelerate import cpu_offload_with_hook

    first, first_hook = cpu_offload_with_hook(nn.Linear(3, 3), "cpu")
    model, hook = cpu_offload_with_hook(net, torch.device("cpu"), prev_module_hook=first_hook)
    assert isinstance(hook, UserCpuOffloadHook) and hook.model is model and isinstance(hook.hook, CpuOffload)
    assert hook.hook.prev_module_hook is first_hook
    assert model(X).device.type == "cpu"
    hook.offload()
    hook.remove()
    assert not hasattr(model, "_hf_hook") and hasattr(first, "_hf_hook")


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu")])
def test_a_model_that_is_there_is_not_moved_again(device: Any) -> None:
    from accelerate import cpu_offload_with_hook

    moves = []

    class Counted(nn.Linear):
        def _apply(self, *args: Any, **kwargs: Any) -> Any:
            moves.append(self)
            return super()._apply(*args, **kwargs)

    model, hook = cpu_offload_with_hook(Counted(3, 3), device)
    before = len(moves)
    for _ in range(3):
        model(torch.ones(1, 3))
    assert len(moves) == before
    hook.offload()
    assert len(moves) == before + 1


def test_layerwise_casting(net: Net) -> None:
    from accelerate.big_modeling import attach_layerwise_casting_hooks

    model = nn.Sequential(net, nn.Linear(5, 5), nn.Linear(5, 5))
    attach_layerwise_casting_hooks(
        model, torch.bfloat16, torch.float32, skip_modules_pattern="^1$", skip_modules_classes=(nn.BatchNorm1d,)
    )
    assert net.linear1.weight.dtype == torch.bfloat16 and model[2].weight.dtype == torch.bfloat16
    assert model[1].weight.dtype == torch.float32 and net.batchnorm.weight.dtype == torch.float32
    output = model(X)
    assert output.dtype == torch.float32
    assert net.linear1.weight.dtype == torch.bfloat16
    with pytest.raises(RuntimeError, match="shapes"):
        net.linear1(torch.ones(1, 99))
    assert net.linear1.weight.dtype == torch.bfloat16, "also after an error"


@pytest.mark.parametrize("first", ["cast", "offload"])
def test_weights_that_are_offloaded_and_kept_in_a_small_dtype(first: str) -> None:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.ones(1, 4)
    expected = copy.deepcopy(made).to(torch.bfloat16).float()(x)
    for step in (first, "offload" if first == "cast" else "cast"):
        if step == "cast":
            attach_layerwise_casting_hooks(made, torch.bfloat16, torch.float32)
        else:
            cpu_offload(made, "cpu")
    for _ in range(2):
        assert torch.equal(made(x), expected)
        assert made[0].weight.is_meta and made[0].weight.dtype == torch.bfloat16
        assert made.state_dict()["0.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_module_writes_into_the_dataclass_of_its_caller(offloaded: bool) -> None:
    @dataclasses.dataclass
    class Memory:
        calls: int = 0
        last: torch.Tensor = dataclasses.field(init=False)

    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: torch.Tensor, memory: Memory) -> torch.Tensor:
            memory.calls += 1
            memory.last = self.linear(x)
            return memory.last

    module = Remembering()
    if offloaded:
        cpu_offload(module, "cpu")
    add_hook_to_module(module, AlignDevicesHook(execution_device="cpu", io_same_device=True), append=offloaded)
    memory = Memory()
    out = module(torch.ones(1, 2), memory)
    assert memory.calls == 1 and torch.equal(memory.last, out)
