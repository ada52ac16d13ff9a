import subprocess
import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.compilation import (
    compile_regions,
    has_compiled_regions,
    has_repeated_blocks,
    is_compiled_module,
    is_repeated_blocks,
)
from accelerate.unwrap import extract_model_from_parallel

# torch's compiler asks for the gradient of a tensor that has none, and warns itself about it.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def test_asking_does_not_import_the_compiler() -> None:
    code = (
        "import sys, torch; from accelerate.compilation import is_compiled_module; "
        "assert not is_compiled_module(torch.nn.ReLU()); sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Bilinear(2, 2, 1)})
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.label = "net"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.heads["a"](x) * self.scale


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_what_repeats() -> None:
    assert is_repeated_blocks(nn.ModuleList([nn.Linear(1, 1)]))
    assert not is_repeated_blocks(nn.ModuleList())
    assert not is_repeated_blocks(nn.ModuleList([nn.Linear(1, 1), nn.ReLU()]))
    assert not is_repeated_blocks(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)))
    assert has_repeated_blocks(Net())
    assert not has_repeated_blocks(Block())


def test_regions() -> None:
    net = Net().eval()
    compiled = compile_regions(net, backend="eager")
    assert type(compiled) is Net
    assert compiled is not net
    assert (compiled.label, compiled.training) == ("net", False)
    assert compiled.scale is net.scale
    assert all(is_compiled_module(block) for block in compiled.blocks)
    assert has_compiled_regions(compiled)
    assert not is_compiled_module(compiled)
    # Names of a compiled block carry torch's own prefix; the original keeps its names.
    assert "blocks.0._orig_mod.linear.weight" in compiled.state_dict()
    assert not has_compiled_regions(net)
    x = torch.ones(4, 2)
    assert torch.equal(compiled(x), net(x))


def test_equal_blocks_are_compiled_once() -> None:
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        graphs.append(graph)
        return graph.forward

    blocks = nn.Sequential()
    blocks.layers = nn.ModuleList(Block() for _ in range(4))
    compiled = compile_regions(blocks, backend=backend)
    for layer in compiled.layers:
        layer(torch.ones(4, 2))
    assert len(graphs) == 1


def test_training_reaches_the_original() -> None:
    net = Net()
    compiled = compile_regions(net, backend="eager")
    compiled(torch.ones(4, 2)).sum().backward()
    assert net.scale.grad is not None
    assert net.blocks[0].linear.weight.grad is not None


def test_without_repeated_blocks_the_whole_is_compiled() -> None:
    assert is_compiled_module(compile_regions(Block(), backend="eager"))


def test_a_module_used_twice_stays_one() -> None:
    net = Net()
    net.again = net.heads["a"]
    compiled = compile_regions(net, backend="eager")
    assert compiled.again is compiled.heads["a"]


def test_a_forward_on_the_instance_runs_the_compiled_parts() -> None:
    def doubled(self: Net, x: torch.Tensor) -> torch.Tensor:
        return Net.forward(self, x) * 2 * len([b for b in self.blocks if is_compiled_module(b)])

    net = Net()
    net.forward = types.MethodType(doubled, net)  # type: ignore[method-assign]
    x = torch.ones(4, 2)
    assert torch.allclose(compile_regions(net, backend="eager")(x), Net.forward(net, x) * 6)


def test_unwrapping_compiled_models() -> None:
    net = Net()
    whole = torch.compile(net, backend="eager")
    regions = compile_regions(net, backend="eager")
    for model in (whole, regions):
        assert extract_model_from_parallel(model) is model
        assert extract_model_from_parallel(model, keep_torch_compile=False) is net


def test_unwrapping_parallel_models() -> None:
    net = Net()
    assert extract_model_from_parallel(net) is net
    assert extract_model_from_parallel(nn.DataParallel(net)) is net
    inside = nn.DataParallel(torch.compile(net, backend="eager"))  # type: ignore[arg-type]
    assert is_compiled_module(extract_model_from_parallel(inside))
    assert extract_model_from_parallel(inside, keep_torch_compile=False) is net


def test_unwrapping_leaves_the_compiled_wrapper_alone() -> None:
    parallel = nn.DataParallel(Net())
    outside: Any = torch.compile(parallel, backend="eager")
    unwrapped = extract_model_from_parallel(outside)
    assert is_compiled_module(unwrapped)
    assert unwrapped._orig_mod is parallel.module
    assert outside._orig_mod is parallel
    x = torch.ones(4, 2)
    assert torch.equal(unwrapped(x), parallel.module(x))
    assert extract_model_from_parallel(outside, keep_torch_compile=False) is parallel.module


def wrap_forward(net: Net) -> None:
    net._original_forward = net.forward  # type: ignore[assignment]
    net.forward = types.MethodType(lambda self, x: Net.forward(self, x) + 100, net)  # type: ignore[method-assign]


def test_the_fp32_wrapper() -> None:
    net = Net()
    wrap_forward(net)
    compiled: Any = torch.compile(net, backend="eager")
    assert extract_model_from_parallel(net) is net
    assert "_original_forward" in vars(net)
    assert extract_model_from_parallel(compiled, keep_fp32_wrapper=False) is compiled
    assert "_original_forward" not in vars(net)
    assert net.forward == types.MethodType(Net.forward, net)


def test_a_forward_that_was_on_the_instance_before_comes_back() -> None:
    net = Net()
    net.forward = lambda x: x + 1  # type: ignore[method-assign, misc, assignment]
    wrap_forward(net)
    assert extract_model_from_parallel(net, keep_fp32_wrapper=False)(torch.tensor(1.0)).item() == 2


def test_parts_are_unwrapped_when_asked_for() -> None:
    outer = nn.Sequential(nn.DataParallel(Net()), nn.ReLU())
    assert isinstance(extract_model_from_parallel(outer)[0], nn.DataParallel)
    assert isinstance(extract_model_from_parallel(nn.DataParallel(outer), recursive=True)[0], Net)
