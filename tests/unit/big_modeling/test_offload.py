"""Whole models whose weights lie in memory or in files: outputs to the bit, wherever a weight is used."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections import UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from accelerate import Accelerator, cpu_offload, disk_offload, dispatch_model, init_empty_weights
from accelerate.hooks import (
    AlignDevicesHook,
    ModelHook,
    add_hook_to_module,
    attach_align_device_hook,
    remove_hook_from_submodules,
)
from accelerate.utils import align_module_device, has_offloaded_params, offload_state_dict
from tests.unit.big_modeling.toys import TOKENS, Layer, Model, model

Way = Callable[[Model, Path], nn.Module]
MIXED = {"scale": "cpu", "embed": "cpu", "head": "cpu", "unused": "disk"}
MIXED |= {"layers.0": "disk", "layers.1": "cpu", "layers.2.norm": "cpu", "layers.2.linear": "disk"}

WAYS: dict[str, Way] = {
    "memory": lambda made, folder: cpu_offload(made, "cpu"),
    "memory with buffers": lambda made, folder: cpu_offload(made, "cpu", offload_buffers=True),
    "layers at once": lambda made, folder: cpu_offload(made, "cpu", preload_module_classes=["Layer"]),
    "layers as a class": lambda made, folder: cpu_offload(made, "cpu", preload_module_classes=[Layer]),  # type: ignore[list-item]
    "model at once": lambda made, folder: cpu_offload(made, "cpu", preload_module_classes=["Model"]),
    "disk": lambda made, folder: disk_offload(made, folder, "cpu"),
    "disk with buffers": lambda made, folder: disk_offload(made, folder, "cpu", offload_buffers=True),
    "dispatched": lambda made, folder: dispatch_model(
        made, {**MIXED, "layers.2": "cpu"}, offload_dir=folder, offload_buffers=True
    ),
    "dispatched from memory": lambda made, folder: cpu_offload(made, "cpu", state_dict=dict(made.state_dict())),
}


@pytest.fixture(params=list(WAYS))
def offloaded(request: pytest.FixtureRequest, tmp_path: Path) -> nn.Module:
    return WAYS[request.param](model(), tmp_path)


def test_outputs_to_the_bit(offloaded: nn.Module) -> None:
    expected = model()(TOKENS)
    for _ in range(3):
        assert torch.equal(offloaded(TOKENS), expected)
        assert any(parameter.is_meta for parameter in offloaded.parameters())


def test_moving_is_refused_and_casting_is_not(offloaded: nn.Module) -> None:
    for move in (
        lambda: offloaded.to("cpu"),
        lambda: offloaded.layers[0].to(device="cpu", dtype=torch.float64),  # type: ignore[index,union-attr]
        lambda: offloaded.unused.cpu(),  # type: ignore[union-attr,operator]
        lambda: copy.deepcopy(offloaded).unused.cpu(),  # type: ignore[union-attr,operator]
        lambda: Accelerator(cpu=True).prepare(offloaded.unused),
    ):
        with pytest.raises(RuntimeError, match="cannot be moved"):
            move()
    assert offloaded.unused.weight.is_meta  # type: ignore[union-attr]
    assert torch.equal(offloaded(TOKENS), model()(TOKENS))
    offloaded.double()
    assert torch.equal(offloaded(TOKENS), model().double()(TOKENS))
    remove_hook_from_submodules(offloaded)
    assert not any("_apply" in vars(module) for module in offloaded.modules())
    offloaded.to("cpu")


def test_an_optimizer_of_offloaded_weights_is_warned_of(tmp_path: Path) -> None:
    made = dispatch_model(model(), {"": "cpu", "unused": "disk"}, offload_dir=tmp_path)
    with pytest.warns(UserWarning, match="This SGD has 2 parameters that are offloaded, so they get no gradients"):
        Accelerator(cpu=True).prepare(torch.optim.SGD(made.parameters(), lr=0.1))
    made.unused.requires_grad_(False)  # type: ignore[union-attr]
    Accelerator(cpu=True).prepare(torch.optim.SGD(made.parameters(), lr=0.1))


def test_models_without_values(tmp_path: Path) -> None:
    with init_empty_weights():
        empty = model()
    state = dict(model().state_dict())
    del state["layers.1.linear.bias"], state["head.weight"]  # the last is tied
    with pytest.raises(ValueError, match=r"no value for scale, embed\.weight, "):
        cpu_offload(empty, "cpu")
    with pytest.raises(ValueError, match=r"no value for layers\.1\.linear\.bias of this Model: load"):
        cpu_offload(empty, "cpu", state_dict=state)
    assert not any(hasattr(module, "_hf_hook") for module in empty.modules())


def test_state_dicts_hold_the_values(offloaded: nn.Module) -> None:
    expected = model().state_dict()
    for _ in range(2):
        found = offloaded.state_dict()
        assert list(found) == list(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        assert not any(value.requires_grad or isinstance(value, nn.Parameter) for value in found.values())
        offloaded(TOKENS)
    part = offloaded.layers.state_dict(prefix="x.")  # type: ignore[union-attr,operator]
    assert torch.equal(part["x.0.linear.weight"], expected["layers.0.linear.weight"])
    assert all(value.is_meta == parameter.is_meta for (_, value), parameter in zip(
        offloaded.named_parameters(), offloaded.parameters(), strict=True))  # fmt: skip


def test_ties_hold(offloaded: nn.Module) -> None:
    assert offloaded.head.weight is offloaded.embed.weight  # type: ignore[union-attr]
    offloaded(TOKENS)
    assert offloaded.head.weight is offloaded.embed.weight  # type: ignore[union-attr]


def test_weights_come_back(offloaded: nn.Module) -> None:
    remove_hook_from_submodules(offloaded)
    assert not any(tensor.is_meta for tensor in (*offloaded.parameters(), *offloaded.buffers()))
    assert all(type(parameter) is nn.Parameter for parameter in offloaded.parameters())
    expected = model()
    assert torch.equal(offloaded(TOKENS), expected(TOKENS))
    assert all(torch.equal(offloaded.state_dict()[name], value) for name, value in expected.state_dict().items())


def test_copies_are_independent(offloaded: nn.Module) -> None:
    expected = model()(TOKENS)
    other = copy.deepcopy(offloaded)
    assert torch.equal(other(TOKENS), expected)
    del offloaded
    assert torch.equal(other(TOKENS), expected)


def test_other_precisions(offloaded: nn.Module) -> None:
    expected = model().double()(TOKENS)
    assert torch.equal(offloaded.double()(TOKENS), expected)
    assert {value.dtype for value in offloaded.state_dict().values() if value.is_floating_point()} == {torch.float64}


def test_gradients_reach_the_inputs(offloaded: nn.Module) -> None:
    grads = []
    for subject in (model(), offloaded):
        x = torch.ones(2, 8, requires_grad=True)
        subject.layers[1](x).square().sum().backward()  # type: ignore[index,operator]
        grads.append(x.grad)
    assert torch.equal(*grads)  # type: ignore[arg-type]


def test_rnns_keep_no_weights_that_have_left(tmp_path: Path) -> None:
    """They have a list of them, besides their parameters."""
    plain, x = nn.Sequential(nn.LSTM(3, 4), nn.Identity()), torch.randn(5, 3)
    expected, _ = plain(x)
    model = disk_offload(copy.deepcopy(plain), tmp_path, "cpu")
    assert all(weight.is_meta for weight in model[0]._flat_weights)
    assert torch.equal(model(x)[0], expected)
    assert all(weight.is_meta for weight in model[0]._flat_weights)


def test_a_model_with_a_list_of_parameters_is_pickled() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ParameterList([torch.ones(3)]))
    loaded = pickle.loads(pickle.dumps(cpu_offload(copy.deepcopy(model), "cpu")))
    assert torch.equal(loaded[1][0] + 0, torch.ones(3)) and torch.equal(loaded[0](x := torch.ones(1, 2)), model[0](x))


def test_hooks_look_as_clients_expect() -> None:
    made = cpu_offload(model(), "cpu", offload_buffers=True)
    assert [type(hook) for hook in made._hf_hook.hooks] == [AlignDevicesHook, AlignDevicesHook]  # type: ignore[union-attr]
    assert made._hf_hook.hooks[0].io_same_device  # type: ignore[union-attr]
    hook: Any = made.layers[0].linear._hf_hook  # type: ignore[index]
    assert hook.offload and hook.execution_device == "cpu"
    assert torch.equal(hook.weights_map["weight"], model().layers[0].linear.weight)  # type: ignore[arg-type]
    assert "layers.0.linear.weight" in hook.weights_map.dataset


def test_a_model_without_parameters_of_its_own() -> None:
    made = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    x = torch.ones(1, 2)
    expected = made(x)
    cpu_offload(made, "cpu")
    assert type(made._hf_hook) is AlignDevicesHook
    assert torch.equal(made(x), expected)


def test_writing_goes_to_host_memory() -> None:
    made = cpu_offload(model(), "cpu")
    with torch.no_grad():
        made.embed.weight.data.zero_()  # type: ignore[union-attr,operator]
    changed = model()
    changed.embed.weight.data.zero_()
    assert torch.equal(made(TOKENS), changed(TOKENS))


def test_a_weight_that_was_exchanged_stays() -> None:
    made, plain = cpu_offload(model(), "cpu"), model()
    weight = torch.randn(8, 8)
    for subject in (made, plain):
        subject.layers[1].linear.weight = nn.Parameter(weight.clone())  # type: ignore[index,union-attr]
    for _ in range(2):
        assert torch.equal(made(TOKENS), plain(TOKENS))
    assert torch.equal(made.layers[1].linear.weight, weight)  # type: ignore[index,union-attr]


def test_a_weight_that_was_taken_away() -> None:
    """What pruning and parametrizations do: the weight is an attribute, computed from another parameter."""
    plain, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.randn(5, 3)
    model = cpu_offload(copy.deepcopy(plain), "cpu")
    for module in (plain[0], model[0]):
        prune.l1_unstructured(module, "weight", amount=4)
    assert torch.equal(model(x), plain(x))
    assert torch.equal(model(x), plain(x))


def test_disk_folders_are_used_again(tmp_path: Path) -> None:
    disk_offload(model(), tmp_path, "cpu")
    before = {path.name: path.stat().st_ino for path in tmp_path.glob("*.dat")}
    assert torch.equal(disk_offload(model(), tmp_path, "cpu")(TOKENS), model()(TOKENS))
    assert {path.name: path.stat().st_ino for path in tmp_path.glob("*.dat")} == before
    # Weights of another model in the folder are not taken for this one's.
    other = model()
    with torch.no_grad():
        other.scale.mul_(2)
    expected = copy.deepcopy(other)(TOKENS)
    assert torch.equal(disk_offload(other, tmp_path, "cpu")(TOKENS), expected)


def test_disk_folders_and_a_model_without_weights(tmp_path: Path) -> None:
    plain = model()
    offload_state_dict(tmp_path, plain.state_dict())
    empty = model()
    empty.layers.to("meta")
    for layer, filled in zip(empty.layers, plain.layers, strict=True):
        layer.shift = filled.shift.clone()  # not in a state dict
    disk_offload(empty, tmp_path, "cpu")
    assert torch.equal(empty(TOKENS), plain(TOKENS))
    remove_hook_from_submodules(empty)
    assert torch.equal(empty(TOKENS), plain(TOKENS))  # still brought in where it is used


def test_weights_stay_in_their_safetensors_files(tmp_path: Path) -> None:
    plain = model()
    weights = plain.layers.state_dict(prefix="layers.")
    file = tmp_path / "f.safetensors"
    save_file({f"their.{name}": value for name, value in weights.items()}, file)
    index = {
        name: {"safetensors_file": str(file), "weight_name": f"their.{name}", "dtype": "float32"}
        for name in weights
    }  # fmt: skip
    places = {"scale": "cpu", "embed": "cpu", "layers": "disk", "head": "cpu", "unused": "cpu"}
    made = dispatch_model(model(), places, offload_index=index)
    for _ in range(2):
        assert torch.equal(made(TOKENS), plain(TOKENS))
    assert [path.name for path in tmp_path.iterdir()] == ["f.safetensors"]
    assert made.layers[0].linear._hf_hook.weights_map.dataset.index is index  # type: ignore[index,union-attr]


def test_files_in_another_precision(tmp_path: Path) -> None:
    layer = nn.Linear(4, 4)
    save_file({"0.weight": layer.weight.detach(), "0.bias": layer.bias.detach()}, tmp_path / "f.safetensors")
    made = nn.Sequential(nn.Linear(4, 4, dtype=torch.bfloat16), nn.Linear(4, 4, dtype=torch.bfloat16))
    index = {f"0.{name}": {"safetensors_file": str(tmp_path / "f.safetensors")} for name in ("weight", "bias")}
    dispatch_model(made, {"0": "disk", "1": "cpu"}, offload_index=index)
    x = torch.ones(1, 4, dtype=torch.bfloat16)
    expected = torch.nn.functional.linear(x, layer.weight.bfloat16(), layer.bias.bfloat16())
    assert torch.equal(made[0](x), expected)


def test_aligned_modules(tmp_path: Path) -> None:
    made = disk_offload(model(), tmp_path, "cpu")
    linear: Any = made.layers[0].linear  # type: ignore[index]
    assert has_offloaded_params(linear) and not has_offloaded_params(made.layers)  # type: ignore[arg-type]
    with align_module_device(linear):
        assert linear.weight.device.type == "cpu" and type(linear.weight) is nn.Parameter
    assert linear.weight.is_meta
    for _ in range(2):
        add_hook_to_module(linear, ModelHook(), append=True)
    assert has_offloaded_params(linear)
    plain = nn.Linear(2, 2)
    with align_module_device(plain, torch.device("cpu")):
        assert plain.weight.device.type == "cpu"
    weight = plain.weight
    with align_module_device(plain, torch.device("meta")):
        assert plain.weight.is_meta
    assert plain.weight is weight


def test_a_state_dict_is_loaded_into_a_model_in_host_memory() -> None:
    """Without a word: torch takes weights that show as meta for empty ones, and would warn."""
    made = cpu_offload(model(), "cpu", offload_buffers=True)
    other = model()
    with torch.no_grad():
        for tensor in (*other.parameters(), *other.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(0.5)
    given = other.state_dict()
    kept = dict(given)
    assert not any(made.load_state_dict(given))
    assert all(given[name] is value for name, value in kept.items())
    assert all(torch.equal(made.state_dict()[name], value) for name, value in kept.items())
    assert all(parameter.is_meta for parameter in made.parameters())
    with pytest.raises(RuntimeError, match=r"size mismatch for scale"):
        made.load_state_dict({**given, "scale": torch.zeros(3)})
    made.load_state_dict({"scale": torch.zeros(8)}, strict=False, assign=True)
    assert not made.scale.is_meta and made.scale.sum() == 0


def test_a_state_dict_is_not_loaded_into_files(tmp_path: Path) -> None:
    made = disk_offload(model(), tmp_path, "cpu")
    with pytest.raises(RuntimeError, match="is offloaded to a file, so `copy_` cannot change it"):
        made.load_state_dict(model().state_dict())


def test_weights_of_another_shape(tmp_path: Path) -> None:
    """They are refused before anything is changed."""
    wrong = nn.Sequential(nn.Linear(4, 3))
    disk_offload(wrong, tmp_path / "folder", "cpu")
    save_file({name: value.clone() for name, value in wrong.state_dict().items()}, tmp_path / "f.safetensors")
    file = {"safetensors_file": str(tmp_path / "f.safetensors")}

    def made() -> nn.Module:
        with init_empty_weights():
            return nn.Sequential(nn.Linear(4, 6))

    def hooked(module: nn.Module) -> nn.Module:
        hook = AlignDevicesHook("cpu", offload=True, weights_map=wrong.state_dict(), place_submodules=True)
        return add_hook_to_module(module, hook)

    ways: list[Callable[[nn.Module], nn.Module]] = [
        lambda module: cpu_offload(module, "cpu", state_dict=wrong.state_dict()),
        lambda module: disk_offload(module, tmp_path / "folder", "cpu"),
        lambda module: dispatch_model(module, {"": "disk"}, offload_dir=tmp_path / "folder"),
        lambda module: dispatch_model(module, {"": "disk"}, offload_index={"0.weight": file, "0.bias": file}),
        hooked,
    ]
    for way in ways:
        module = made()
        with pytest.raises(
            ValueError,
            match=r"0\.weight has shape \(6, 4\), but its value has shape \(3, 4\), 0\.bias .*\(6,\).*\(3,\)",
        ):
            way(module)
        assert not any(hasattr(part, "_hf_hook") for part in module.modules())
        assert type(module[0].weight) is nn.Parameter  # type: ignore[index]


def test_an_empty_weight_of_another_shape_in_the_place_of_an_offloaded_one() -> None:
    made = cpu_offload(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), "cpu")
    made[1].weight = nn.Parameter(torch.empty(3, 2, device="meta"))  # type: ignore[index]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"1\.weight has shape \(3, 2\), but its value has shape \(2, 2\)"):
            made(torch.ones(1, 2))
    assert all(parameter.is_meta for parameter in made.parameters())


def test_scripted_modules(tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))), nn.Linear(2, 2))

    x = torch.ones(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch.jit is
        expected = made()(x)
        offloaded = [
            cpu_offload(made(), "cpu"),
            cpu_offload(made(), "cpu", preload_module_classes=["RecursiveScriptModule"]),
            disk_offload(made(), tmp_path / "1", "cpu"),
            dispatch_model(made(), {"": "cpu"}, force_hooks=True),
            dispatch_model(made(), {"0": "cpu", "1": "disk"}, offload_dir=tmp_path / "2"),
        ]
    state = made().state_dict()
    for subject in offloaded:
        for _ in range(2):
            assert torch.equal(subject(x), expected)
            assert all(torch.equal(value, state[name]) for name, value in subject.state_dict().items())
        remove_hook_from_submodules(subject)
        assert torch.equal(subject(x), expected)


def test_a_module_with_two_names_and_a_buffer_that_is_not_saved(tmp_path: Path) -> None:
    def made() -> nn.Module:
        layer = Layer(2)
        return nn.Sequential(layer, nn.ReLU(), layer).eval()

    x = torch.ones(1, 2)
    for way in (
        lambda module: cpu_offload(module, "cpu", offload_buffers=True),
        lambda module: cpu_offload(module, "cpu", preload_module_classes=["Sequential"]),
        lambda module: disk_offload(module, tmp_path / "1", "cpu", offload_buffers=True),
        lambda module: dispatch_model(module, {"": "disk"}, offload_dir=tmp_path / "2", offload_buffers=True),
    ):
        plain = made()
        expected = plain(x)
        model = way(plain)
        assert torch.equal(model(x), expected)
        assert not model[2].shift.is_meta


def test_casts_of_autocast_leave_with_their_weights() -> None:
    """Autocast keeps casts of leaves that require gradients until its end: the whole model, in the end."""
    casts = []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = function(*args, **(kwargs or {}))
            if function is torch.ops.aten._to_copy.default:
                casts.append(StorageWeakRef(result.untyped_storage()))
            return result

    plain = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    made, x = cpu_offload(copy.deepcopy(plain), "cpu"), torch.ones(1, 4)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16), Noting():
        made(x)
        assert len(casts) >= 3 and all(cast.expired() for cast in casts)
    with torch.autocast("cpu", dtype=torch.bfloat16), Noting():
        assert made(x).requires_grad and all(weight.requires_grad for weight in made.parameters())
        assert len(casts) >= 6 and all(cast.expired() for cast in casts)  # the graph is gone
    with torch.no_grad():
        remove_hook_from_submodules(made)
    assert all(weight.requires_grad for weight in made.parameters())


def test_autocast_with_a_frozen_part_that_is_offloaded() -> None:
    """Its casts are not kept by autocast, so there is nothing to clear, and others are not cast a second time."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trained, self.frozen = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.trained(self.frozen(self.trained(x)))

    torch.manual_seed(0)
    plain = Around()
    made = copy.deepcopy(plain)
    cpu_offload(made.frozen, "cpu")
    for one in (plain, made):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = one(torch.linspace(-1, 1, 32).view(4, 8)).float().square().sum()
        loss.backward()
    assert torch.equal(made.trained.weight.grad, plain.trained.weight.grad)  # type: ignore[arg-type]


def test_gradients_that_a_forward_takes_by_itself() -> None:
    class Inner(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return torch.autograd.grad((self.weight * x).sum(), self.weight)[0]

    plain, x = Inner(2, 2), torch.ones(2, 2)
    with torch.no_grad():
        assert torch.equal(cpu_offload(copy.deepcopy(plain), "cpu")(x), plain(x))


def test_offloaded_again_with_other_weights(tmp_path: Path) -> None:
    first, second, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2)

    def again(made: nn.Module) -> nn.Module:
        return cpu_offload(made, "cpu", state_dict=second.state_dict())

    def appended(made: nn.Module) -> nn.Module:
        hook = AlignDevicesHook("cpu", offload=True, weights_map=second.state_dict())
        return add_hook_to_module(made, hook, append=True)

    for way in (again, appended):
        made = way(cpu_offload(copy.deepcopy(first), "cpu"))
        assert torch.equal(made(x), second(x))
        remove_hook_from_submodules(made)
        assert not any(parameter.is_meta for parameter in made.parameters())


def test_weights_that_a_mapping_reads_are_left_to_it() -> None:
    class Reading(UserDict[str, torch.Tensor]):
        reads = 0

        def __getitem__(self, name: str) -> torch.Tensor:
            self.reads += 1
            return super().__getitem__(name)

    plain, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), torch.ones(1, 2)
    weights = Reading(plain.state_dict())
    made = copy.deepcopy(plain).to("meta")
    reads = weights.reads
    attach_align_device_hook(made, execution_device="cpu", offload=True, weights_map=weights)
    assert weights.reads == reads
    assert torch.equal(made(x), plain(x))


def test_a_parameter_with_two_names_beside_one_on_disk(tmp_path: Path) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = self.two = nn.Parameter(torch.ones(2))
            self.other = nn.Parameter(torch.full((2,), 3.0))

        def forward(self) -> torch.Tensor:
            return self.one + self.two * self.other

    made = dispatch_model(Twice(), {"one": "cpu", "two": "cpu", "other": "disk"}, offload_dir=tmp_path)
    assert torch.equal(made(), torch.full((2,), 4.0))
