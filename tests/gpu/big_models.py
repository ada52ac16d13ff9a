"""Offloaded models on a GPU: outputs to the bit, memory within its limits, whatever the order. See checks.py."""

from __future__ import annotations

import copy
import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn

from tests.gpu.checks import check

# So that the weights of linear layers are locked where they lie, and those of other sizes are not.
WIDTH = 1536
BIGGEST = WIDTH * WIDTH * 4 * 4  # bytes of the largest weight below


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Positions(nn.Module):
    """Returns a view of its weight: the memory lives on after its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(4096, WIDTH))

    def forward(self, length: int) -> torch.Tensor:
        return self.table[:length]


class Net(nn.Module):
    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(512, WIDTH)
        self.positions = Positions()
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, 512, bias=False)
        self.head.weight = self.embed.weight
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, tokens: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
        positions = self.positions(tokens.shape[-1])
        x = self.embed(tokens) + positions
        for index in range(len(self.layers)) if order is None else order:
            x = self.layers[index](x) + positions
        x = x * self.scale
        # The weight of a module that is not called, and one with two names.
        return self.head(x) + F.linear(x, self.embed.weight) + x @ self.layers[0].up.weight[:512].T


def network() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def tokens(length: int = 64) -> torch.Tensor:
    return torch.arange(length, device="cuda")[None] * 7 % 512


def expected(model: nn.Module, *args: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = copy.deepcopy(model).cuda()(*args)
    return result


def settle(model: nn.Module) -> None:
    """Wait until host memory and files are locked."""
    for module in model.modules():
        hook: Any = getattr(module, "_hf_hook", None)
        for part in getattr(hook, "hooks", (hook,)):
            streamer = getattr(part, "_streamer", None)
            if streamer is not None:
                streamer.copier._locks.wait()
                streamer.copier._files.wait()


def offloaded(kind: str, folder: str) -> nn.Module:
    from accelerate import cpu_offload, disk_offload, dispatch_model

    model = network()
    if kind == "memory":
        return cpu_offload(model, "cuda")
    if kind == "disk":
        return disk_offload(model, folder, "cuda")
    places: dict[str, Any] = {"embed": 0, "positions": "cpu", "head": 0, "scale": 0}
    places |= {f"layers.{index}": ("cpu", "disk", 0)[index % 3] for index in range(8)}
    return dispatch_model(model, places, offload_dir=folder)


def each_kind(test: Callable[[str, nn.Module], None]) -> None:
    for kind in ("memory", "disk", "mixed"):
        with tempfile.TemporaryDirectory() as folder:
            test(kind, offloaded(kind, folder))
        gc.collect()


@check
def offloaded_outputs_are_exact() -> None:
    reference = expected(network(), tokens())

    def test(kind: str, model: nn.Module) -> None:
        for turn in range(6):
            if turn == 3:
                settle(model)
            with torch.no_grad():
                output = model(tokens())
            assert torch.equal(output, reference), (kind, turn, (output - reference).abs().max())
            assert model.layers[0].up.weight.is_meta

    each_kind(test)


@check
def state_dicts_of_offloaded_models_are_on_the_cpu() -> None:
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    def test(kind: str, model: nn.Module) -> None:
        found = {value.device.type for value in get_state_dict_offloaded_model(model).values()}
        assert found == {"cpu"}, f"{kind}: {found}"

    each_kind(test)


@check
def offloaded_memory_is_bounded() -> None:
    """The current block and two more, and nothing is left behind."""
    for kind in ("memory", "disk"):
        with tempfile.TemporaryDirectory() as folder:
            expected(network(), tokens())  # memory that torch keeps for itself is taken now
            model = offloaded(kind, folder)
            unused = torch.cuda.memory_allocated()
            with torch.no_grad():
                model(tokens())
                settle(model)
                torch.cuda.synchronize()
                before = torch.cuda.memory_allocated()
                assert before - unused < BIGGEST // 16, (kind, before, unused)
                for _ in range(3):
                    torch.cuda.reset_peak_memory_stats()
                    output = model(tokens())
                    torch.cuda.synchronize()
                    peak = torch.cuda.max_memory_allocated() - before
                    # Besides the blocks: the table of positions, which the model keeps, and activations.
                    limit = 3 * BIGGEST + 4096 * WIDTH * 4 + 64 * 4 * WIDTH * 4 * 6
                    assert peak <= limit, (kind, peak, limit)
                    del output
                    assert torch.cuda.memory_allocated() == before, kind


@check
def offloaded_weights_are_not_overwritten_early() -> None:
    """The GPU is kept behind the host, and memory that is given back is written to at once."""
    weight = torch.randn(4096, 4096, device="cuda")
    reference = expected(network(), tokens())

    def test(kind: str, model: nn.Module) -> None:
        settle(model)
        outputs = []
        for _ in range(8):
            h = weight
            for _ in range(4):
                h = torch.tanh(h @ weight)
            with torch.no_grad():
                outputs.append(model(tokens()) + h.sum() * 0)
            torch.full((BIGGEST // 4,), float("nan"), device="cuda")
        assert all(torch.equal(output, reference) for output in outputs), kind

    each_kind(test)


@check
def offloaded_order_may_change() -> None:
    orders = [
        [0, 1, 2, 3],
        [3, 2, 1, 0],
        [5, 5, 5, 6],
        [0, 1, 2, 3],
        [0, 1, 7, 3],
        [4],
        list(range(8)),
        [0, 1, 2, 3],
    ] * 3
    plain = network().cuda()
    with torch.no_grad():
        references = [plain(tokens(), order) for order in orders]

    def test(kind: str, model: nn.Module) -> None:
        for order, reference in zip(orders, references, strict=True):
            with torch.no_grad():
                assert torch.equal(model(tokens(), order), reference), (kind, order)

    each_kind(test)


@check
def offloaded_without_locked_memory() -> None:
    """Where memory cannot be locked, weights go through buffers."""
    reference = expected(network(), tokens())
    with mock.patch("accelerate.devices.page_lock.lock", lambda device, flags, address, size: False):

        def test(kind: str, model: nn.Module) -> None:
            for _ in range(4):
                with torch.no_grad():
                    assert torch.equal(model(tokens()), reference)
                settle(model)

        each_kind(test)


@check
def offloaded_gradients_reach_the_input() -> None:
    plain = network().cuda().requires_grad_(False)
    model = offloaded("memory", "").requires_grad_(False)
    for _ in range(3):
        grads = []
        for subject in (plain, model):
            x = torch.randn(
                1, 16, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1)
            ).requires_grad_()
            h = x
            for layer in subject.layers:
                h = layer(h)
            h.square().sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)


@check
def offloaded_on_another_stream() -> None:
    reference = expected(network(), tokens())
    model = offloaded("memory", "")
    side = torch.cuda.Stream()
    for turn in range(6):
        with torch.no_grad(), torch.cuda.stream(side if turn % 2 else torch.cuda.default_stream()):
            output = model(tokens())
        torch.cuda.synchronize()
        assert torch.equal(output, reference), turn


@check
def offloaded_under_inference_mode_then_gradients() -> None:
    model = offloaded("memory", "").requires_grad_(False)
    with torch.inference_mode():
        model(tokens())
        first = model(tokens())
    x = torch.randn(1, 4, WIDTH, device="cuda", requires_grad=True)
    model.layers[0](x).sum().backward()
    with torch.no_grad():
        assert torch.equal(model(tokens()), first)
    assert x.grad is not None


@check
def locked_memory_is_unlocked() -> None:
    from accelerate import cpu_offload

    model = network()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    large, other = weights["layers.0.up.weight"], weights["positions.table"]
    cpu_offload(model, "cuda", state_dict=weights)
    with torch.no_grad():
        model(tokens())
        settle(model)
        assert large.is_pinned() and not other.is_pinned()
        model(tokens())
    del model
    gc.collect()
    assert not large.is_pinned()
    assert torch.equal(large.cuda().cpu(), large)


@check
def memory_of_two_models_stays_locked_until_both_are_gone() -> None:
    """What `remove_all_hooks` and offloading anew do: the old hooks are collected later."""
    from accelerate import cpu_offload

    weights = {name: tensor.clone() for name, tensor in network().state_dict().items()}
    large, reference = weights["layers.0.up.weight"], expected(network(), tokens())
    first = cpu_offload(network(), "cuda", state_dict=dict(weights))
    settle(first)
    second = cpu_offload(network(), "cuda", state_dict=dict(weights))
    settle(second)
    del first
    gc.collect()
    assert large.is_pinned()
    with torch.no_grad():
        assert torch.equal(second(tokens()), reference)
    del second
    gc.collect()
    assert not large.is_pinned()


@check
def offloaded_rnns_leave_nothing_behind() -> None:
    from accelerate import cpu_offload

    plain = nn.Sequential(nn.LSTM(512, 512, num_layers=2), nn.Identity())
    x = torch.randn(7, 512, device="cuda")
    with torch.no_grad():
        wanted = copy.deepcopy(plain).cuda()(x)[0]
        model = cpu_offload(plain, "cuda")
        for _ in range(3):
            torch.testing.assert_close(model(x)[0], wanted)
            assert all(weight.is_meta for weight in plain[0]._flat_weights)


@check
def a_process_may_end_while_memory_is_being_locked() -> None:
    program = (
        "import tempfile, torch; from tests.gpu.big_models import offloaded, tokens\n"
        "model = offloaded(KIND, tempfile.mkdtemp())\n"
        "with torch.no_grad(): print(model(tokens()).sum().item())"
    )
    for kind in ("memory", "disk"):
        done = subprocess.run(
            [sys.executable, "-c", program.replace("KIND", repr(kind))], capture_output=True, text=True
        )
        assert done.returncode == 0 and "Traceback" not in done.stderr, (kind, done.returncode, done.stderr)


def copiers(model: nn.Module) -> list[Any]:
    hooks = [getattr(module, "_hf_hook", None) for module in model.modules()]
    parts = [part for hook in hooks for part in getattr(hook, "hooks", (hook,))]
    return list({id(p._streamer.copier): p._streamer.copier for p in parts if getattr(p, "_streamer", None)}.values())


@check
def files_are_read_where_the_system_keeps_them() -> None:
    reference = expected(network(), tokens())
    with tempfile.TemporaryDirectory() as folder:
        model = offloaded("disk", folder)
        with torch.no_grad():
            for _ in range(4):
                assert torch.equal(model(tokens()), reference)
                settle(model)
        (copier,) = copiers(model)
        assert len(copier._files._usable) == len(os.listdir(folder)) - 1, "without the index"
        with torch.no_grad(), mock.patch.object(copier._stager, "bring", side_effect=AssertionError("read again")):
            assert torch.equal(model(tokens()), reference)
        del model, copier
        gc.collect()
        assert folder not in Path("/proc/self/maps").read_text()


@check
def memory_beside_locked_memory_can_be_copied() -> None:
    """CUDA refuses to copy what is locked in part: only pages that nothing else lies in may be locked."""
    from accelerate import cpu_offload

    sizes = [100, 5000, 64 * 1024, 200_000, 2**20, 5 * 2**20, 2**25 - 4096]
    others, weights = [], {}
    model = network()
    for turn, (name, tensor) in enumerate(model.state_dict().items()):
        others.append(torch.full((sizes[turn % len(sizes)],), turn % 256, dtype=torch.uint8))
        weights[name] = tensor.clone()
    cpu_offload(model, "cuda", state_dict=weights)
    with torch.no_grad():
        model(tokens())
        settle(model)
        assert any(tensor.is_pinned() for tensor in weights.values())
        for turn, tensor in enumerate([*others, *weights.values()]):
            assert torch.equal(tensor.cuda().cpu(), tensor), turn
            # Memory that is taken anew may lie beside, too.
            assert torch.equal(tensor.clone().cuda().cpu(), tensor), turn
    del model
    gc.collect()
    assert all(torch.equal(tensor.cuda().cpu(), tensor) for tensor in [*others, *weights.values()])


@check
def offloaded_weights_that_are_mapped() -> None:
    """Weights that are pieces of a mapped file share pages: they go through buffers."""
    from safetensors.torch import load_file, save_file

    from accelerate import cpu_offload

    model = network()
    reference = expected(model, tokens())
    with tempfile.TemporaryDirectory() as folder:
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
        save_file(weights, f"{folder}/model.safetensors")
        mapped = load_file(f"{folder}/model.safetensors")
        mapped["head.weight"] = mapped["embed.weight"]
        cpu_offload(model, "cuda", state_dict=mapped)
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(model(tokens()), reference)
            settle(model)
        assert not any(tensor.is_pinned() for tensor in mapped.values())
        assert all(torch.equal(tensor.cuda().cpu(), tensor) for tensor in mapped.values())


@check
def an_unreadable_weight_is_an_error_and_no_more() -> None:
    """Whatever was on its way is waited for, and the model goes on when the file is whole again."""
    reference = expected(network(), tokens())
    with tempfile.TemporaryDirectory() as folder:
        model = offloaded("disk", folder)
        file = Path(folder, "layers.4.up.weight.dat")
        content = file.read_bytes()
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(model(tokens()), reference)
                os.truncate(file, 100)
                try:
                    model(tokens())
                except OSError as error:
                    assert "ended while an offloaded weight was being read" in str(error)
                else:
                    raise AssertionError("nothing was missing")
                with file.open("r+b") as again:
                    again.write(content)
                assert torch.equal(model(tokens()), reference)


@check
def offloaded_files_may_lose_their_names() -> None:
    """Another model in the same folder, or no folder at all: the first model has its weights."""
    from accelerate import disk_offload

    reference = expected(network(), tokens())
    folder = tempfile.mkdtemp()
    model = offloaded("disk", folder)
    other = network()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    other_reference = expected(other, tokens())
    other = disk_offload(other, folder, "cuda")
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(tokens()), reference)
            assert torch.equal(other(tokens()), other_reference)
        shutil.rmtree(folder)
        for _ in range(3):
            assert torch.equal(model(tokens()), reference)
            assert torch.equal(other(tokens()), other_reference)


@check
def offloaded_tensors_of_other_kinds() -> None:
    """Tensors that are made of others have no address, and those with a conjugate bit are not what their bytes say."""
    from torch.testing._internal.two_tensor import TwoTensor

    from accelerate import cpu_offload

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(6)))
        for index, layer in enumerate(layers):
            value = layer.weight.detach()
            layer.weight = nn.Parameter(TwoTensor(value, value * (index + 2)))
        return layers

    x = torch.randn(4, 64, device="cuda")
    plain = made()
    halves = []
    for part in ("a", "b"):
        h = x
        for layer in plain:
            h = F.linear(h, getattr(layer.weight, part).cuda())
        halves.append(h)
    model = cpu_offload(made(), "cuda")
    for turn in range(5):
        with torch.no_grad(), torch.cuda.stream(torch.cuda.Stream() if turn == 4 else torch.cuda.default_stream()):
            found: Any = model(x)
            torch.cuda.synchronize()
            assert type(found) is TwoTensor and torch.equal(found.a, halves[0]) and torch.equal(found.b, halves[1])

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            turned = torch.randn(64, 64, dtype=torch.complex64).conj()
            self.weight = nn.Parameter(turned)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    turned = Turned()
    assert turned.weight.is_conj()
    wanted = x.to(torch.complex64) @ turned.weight.detach().resolve_conj().cuda()
    cpu_offload(turned, "cuda")
    for _ in range(3):
        with torch.no_grad():
            torch.testing.assert_close(turned(x.to(torch.complex64)), wanted)


@check
def offloaded_weights_written_while_they_are_on_their_way() -> None:
    class Writes(Net):
        def forward(self, tokens: torch.Tensor, order: list[int] | None = None) -> torch.Tensor:
            x = self.layers[0](self.embed(tokens))
            with torch.no_grad():
                self.layers[1].up.weight.mul_(1.01)
                self.layers[1].norm.bias.add_(0.01)
            return self.layers[2](self.layers[1](x))

    from accelerate import cpu_offload

    torch.manual_seed(0)
    plain = Writes().cuda()
    torch.manual_seed(0)
    model = cpu_offload(Writes(), "cuda")
    with torch.no_grad():
        for turn in range(6):
            if turn == 3:
                settle(model)
            # The host multiplies, and the GPU does: not to the last bit.
            torch.testing.assert_close(model(tokens()), plain(tokens()), rtol=1e-3, atol=1e-3)


@check
def offloaded_weights_written_right_after_a_forward() -> None:
    """The GPU is behind the host: its copies out of locked memory are queued when the host writes there."""
    from accelerate import cpu_offload

    torch.manual_seed(0)
    model: Any = cpu_offload(nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(4))), "cuda")
    x = torch.ones(1, 4096, device="cuda")
    others: Any = torch.randn(4096, 4096)
    writes: list[Callable[[], Any]] = [
        lambda: model[3].weight.mul_(2),
        lambda: setattr(model[2].weight, "data", others),
        lambda: model.load_state_dict({f"{index}.weight": others for index in range(4)}),
    ]
    with torch.no_grad():
        for write in writes:
            reference = model(x)
            settle(model)
            model(x)
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000_000)
            output = model(x)
            write()
            torch.cuda.synchronize()
            assert torch.equal(output, reference)
            assert not torch.equal(model(x), reference)


@check
def offloaded_weights_used_on_a_second_stream_meanwhile() -> None:
    """While one stream waits for the copy of a block, another one that uses the block waits as well."""
    from accelerate import cpu_offload

    side = torch.cuda.Stream()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4096, 4096))

        def forward(self, x: torch.Tensor, on_side: bool = True) -> Any:
            if not on_side:
                return x @ self.weight
            with torch.cuda.stream(side):
                there = self(x, on_side=False)
            return x @ self.weight, there

    torch.manual_seed(0)
    twice = Twice()
    x = torch.ones(1, 4096, device="cuda")
    with torch.no_grad():
        reference = x @ twice.weight.cuda()
        model = cpu_offload(nn.Sequential(twice), "cuda")
        for _ in range(3):
            model(x)
            settle(model)
            torch.full((4096, 4096), float("nan"), device="cuda")  # what the memory holds that the weight gets
            torch.cuda.synchronize()
            torch.cuda._sleep(1_000_000_000)
            outputs = model(x)
            torch.cuda.synchronize()
            for output in outputs:
                torch.testing.assert_close(output, reference)


@check
def casts_of_autocast_leave_with_their_weights() -> None:
    from accelerate import cpu_offload

    model = cpu_offload(nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(12))), "cuda")
    x = torch.ones(1, WIDTH, device="cuda")
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        for _ in range(3):
            model(x)
            settle(model)
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model(x)
        torch.cuda.synchronize()
        block = WIDTH * WIDTH * 4
        # Three blocks, the cast of the current one, and activations.
        assert torch.cuda.max_memory_allocated() - before < 4 * block
        assert torch.cuda.memory_allocated() - before < block // 2


@check
def offloaded_models_called_by_other_methods() -> None:
    """What is called is not the model's forward, and it may fail: nothing stays on the GPU."""

    class Coder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
            self.dec = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.dec(self.enc(x))

    from accelerate import cpu_offload

    torch.manual_seed(0)
    plain = Coder()
    model = cpu_offload(copy.deepcopy(plain), "cuda")
    plain.cuda()
    x = torch.randn(4, WIDTH, device="cuda")
    with torch.no_grad():
        references = plain(x), plain.dec(x), plain.enc[2](x)
        model(x)
        settle(model)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        for _ in range(4):
            for call, reference in zip((model, model.dec, model.enc[2]), references, strict=True):
                output = call(x)
                assert torch.equal(output, reference)
                del output
                assert torch.cuda.memory_allocated() == before
            for call in (model, model.dec, model.dec[3]):
                try:
                    call(torch.randn(4, 3, device="cuda"))
                except RuntimeError:
                    pass
                else:
                    raise AssertionError("3 columns fit")
                gc.collect()  # the traceback
                assert torch.cuda.memory_allocated() == before


@check
def maps_with_entries_inside_of_others() -> None:
    """What lies elsewhere does not visit the GPU on the way there; a single tensor has its own place."""
    from accelerate import dispatch_model

    reference = expected(network(), tokens())
    for rest, others in (
        (0, {"layers": "cpu", "layers.0": 0}),
        (0, {"layers": "disk"}),
        ("cpu", {"scale": 0, "embed": 0}),
    ):
        plain = network()
        size = sum(parameter.nbytes for parameter in plain.layers.parameters())
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with tempfile.TemporaryDirectory() as folder:
            model = dispatch_model(plain, {"": rest, **others}, main_device=0, offload_dir=folder)
            assert torch.cuda.max_memory_allocated() - before < size
            for _ in range(3):
                with torch.no_grad():
                    assert torch.equal(model(tokens()), reference)


@check
def offloaded_from_safetensors() -> None:
    """Weights are read where they lie: nothing is written."""
    from safetensors.torch import save_file

    from accelerate import dispatch_model

    plain = network()
    reference = expected(plain, tokens())
    with tempfile.TemporaryDirectory() as folder:
        weights = {name: tensor.clone() for name, tensor in plain.layers.state_dict(prefix="layers.").items()}
        save_file(weights, f"{folder}/layers.safetensors")
        index = {
            name: {"safetensors_file": f"{folder}/layers.safetensors", "weight_name": name, "dtype": "float32"}
            for name in weights
        }
        model = dispatch_model(
            plain, {"embed": 0, "positions": 0, "layers": "disk", "head": 0, "scale": 0}, offload_index=index
        )
        for _ in range(3):
            with torch.no_grad():
                assert torch.equal(model(tokens()), reference)
        assert len(list(Path(folder).iterdir())) == 1


@check
def offloaded_and_compiled() -> None:
    model = offloaded("memory", "")
    with torch.no_grad():
        reference = model(tokens())
        compiled = torch.compile(model)
        for _ in range(3):
            torch.testing.assert_close(compiled(tokens()), reference, rtol=1e-4, atol=1e-4)


@check
def dispatched_models_say_why_they_cannot_move() -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = offloaded("mixed", folder)
        try:
            model.to("cuda")
        except RuntimeError as error:
            assert "device map" in str(error)
        else:
            raise AssertionError("moved")


@check
def transformers_generate_the_same() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=1000, max_position_embeddings=128,
    )  # fmt: skip
    torch.manual_seed(0)
    plain = LlamaForCausalLM(config).eval()
    prompt = torch.arange(1, 9)[None]
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        plain.cuda()
        reference = plain.generate(prompt.cuda(), max_new_tokens=20, do_sample=False, pad_token_id=0)
        for memory in ({0: "6MB", "cpu": "4MB"}, {0: "6MB", "cpu": "1GB"}):
            model = LlamaForCausalLM.from_pretrained(
                folder, device_map="auto", max_memory=memory, offload_folder=f"{folder}/off"
            )
            kinds = {str(device) for device in model.hf_device_map.values()}
            assert "0" in kinds and len(kinds) > 1, model.hf_device_map
            output = model.generate(prompt.cuda(), max_new_tokens=20, do_sample=False, pad_token_id=0)
            assert torch.equal(output, reference), json.dumps(model.hf_device_map, default=str)
