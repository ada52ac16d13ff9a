from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate import cpu_offload, disk_offload
from tests.unit.big_modeling.toys import TOKENS, model


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@torch.no_grad()
@pytest.mark.parametrize("way", ["memory", "disk"])
def test_an_offloaded_model_is_compiled(way: str, tmp_path: Path) -> None:
    """Also where a parent uses the weights of a child that is not called."""
    expected = model()(TOKENS)
    made = cpu_offload(model(), "cpu") if way == "memory" else disk_offload(model(), tmp_path, "cpu")
    compiled = torch.compile(made, backend="eager")
    for _ in range(3):
        assert torch.equal(compiled(TOKENS), expected)
    assert all(parameter.is_meta for parameter in made.parameters())


@torch.no_grad()
def test_the_forward_of_a_module_is_in_a_graph() -> None:
    """Hooks run between graphs; what is between hooks is compiled."""
    graphs = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        graphs.append(graph)
        return graph.forward

    made = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.LayerNorm(3))
    x = torch.ones(2, 3)
    expected = made(x)
    cpu_offload(made, "cpu")
    compiled = torch.compile(made, backend=backend)
    assert torch.equal(compiled(x), expected)
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert all(any(name in target for target in targets) for name in ("linear", "layer_norm"))
    count = len(graphs)
    assert torch.equal(compiled(x), expected)
    assert len(graphs) == count
