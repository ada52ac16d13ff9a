"""Training in fp8 on one device, with the real torchao: emulated, as on any CPU."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, AutocastKwargs, available
from accelerate.logging import MultiProcessAdapter
from accelerate.state import AcceleratorState
from accelerate.utils import AORecipeKwargs, FP8BackendType, ao

if not available.is_torchao_available():
    assert "REQUIRE_FP8" not in os.environ, "torchao is not installed here"
    pytest.skip("torchao is not installed: `make fp8` runs these tests", allow_module_level=True)


class Net(nn.Module):
    """Linear layers that are converted (`wide`, `deep`) and such that are not: the first, the last, one of odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.wide = nn.Linear(64, 64)
        self.odd = nn.Linear(64, 40)
        self.deep = nn.Linear(64, 32, bias=False)
        self.last = nn.Linear(72, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wide(self.first(x).relu()).relu()
        return self.last(torch.cat([self.odd(x).relu(), self.deep(x).relu()], -1))


def made(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Net()


def trained(accelerator: Accelerator, model: Any, optimizer: Any, steps: int = 30, rows: int = 24) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(rows, 32, generator=generator)
    targets = inputs[:, :4].sign()
    losses = []
    for _ in range(steps):
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_converts_layers_and_keeps_everything_else(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    from torchao.float8.float8_linear import Float8Linear

    MultiProcessAdapter.warning_once.cache_clear()  # which library it is, is said once
    calls: list[str] = []
    net = made()
    before, layer = dict(net.named_parameters()), net.wide
    net.wide.register_forward_hook(lambda module, inputs, output: calls.append("hook"))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)  # made before `prepare`
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    with caplog.at_level(logging.INFO):
        model, optimizer = accelerator.prepare(net, optimizer)
    assert accelerator.fp8_backend == FP8BackendType.AO and accelerator.fp8_enabled and accelerator.native_amp
    lines = [record.getMessage() for record in caplog.records]
    assert any("fp8 is computed by torchao 0.18.0, the first of" in line for line in lines)
    assert any(
        "2 of the 5 linear layers of Net compute in fp8. Left alone: the first and the last (2), "
        "those whose sizes are not multiples of 16 (1)." in line
        for line in lines
    )
    assert [name for name, module in model.named_modules() if isinstance(module, Float8Linear)] == ["wide", "deep"]
    assert model.wide is layer and ao.has_ao_layers(model)
    assert optimizer.after_step == (), "only weights that are gathered in 8 bits need their scales after a step"
    assert all(parameter is before[name] for name, parameter in model.named_parameters())

    losses = trained(accelerator, model, optimizer)
    assert losses[-1] < losses[0] / 5 and calls
    assert model(torch.randn(5, 32)).dtype == torch.float32  # a number of rows that is no multiple of 16, too
    model.eval()
    with torch.no_grad(), accelerator.autocast(AutocastKwargs(enabled=False)):
        assert model.wide(torch.randn(3, 64)).dtype == torch.float32

    # The same names and plain tensors: what is saved is read without fp8, and the other way round.
    accelerator.save_model(model, tmp_path / "weights")
    accelerator.save_state(tmp_path / "state")
    saved = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    plain = made(1)
    plain, other = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.01))
    accelerator.load_state(tmp_path / "state")
    assert not ao.has_ao_layers(plain) and plain.state_dict().keys() == saved.keys()
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in saved.items())
    assert trained(accelerator, plain, other, steps=3)[0] < losses[0] / 5
    accelerator.save_state(tmp_path / "back")
    AcceleratorState._reset_state(True)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    again = made(2)
    again, optimizer = accelerator.prepare(again, torch.optim.AdamW(again.parameters(), lr=0.01))
    accelerator.load_state(tmp_path / "back")
    assert torch.equal(again.wide.weight, plain.wide.weight)
    from safetensors.torch import load_file

    assert load_file(tmp_path / "weights" / "model.safetensors").keys() == saved.keys()


def test_fp8_is_near_bf16_and_not_the_same() -> None:
    losses = {}
    for mode in ("bf16", "fp8"):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(mixed_precision=mode, cpu=True, gradient_accumulation_steps=2)
        net = made()
        net, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        losses[mode] = trained(accelerator, net, optimizer, steps=20)
    pairs = list(zip(losses["bf16"], losses["fp8"], strict=True))
    assert all(abs(a - b) < 0.05 * a for a, b in pairs)
    assert any(a != b for a, b in pairs)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_recipes_by_name(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_RECIPE", recipe)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    net = made()
    net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
    rows = getattr(net.wide.config.cast_config_weight.scaling_granularity, "value", None) == "axiswise"
    assert rows == (recipe != "tensorwise") and net.wide.config.emulate and net.wide.config.pad_inner_dim
    losses = trained(accelerator, net, optimizer, steps=10)
    assert losses[-1] < losses[0]


def test_a_filter_a_recipe_and_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'columnwise': choose one of tensorwise, rowwise, rowwise_with_gw_hp"):
        AORecipeKwargs(config="columnwise")
    assert not AORecipeKwargs(config="rowwise").config.enable_fsdp_float8_all_gather
    handler = AORecipeKwargs(config="rowwise", module_filter_func=lambda module, name: name in ("first", "odd"))
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])
    assert accelerator.ao_recipe_handler is handler
    model = torch.compile(made(), backend="eager")
    model = accelerator.prepare(model)
    assert type(model.first).__name__ == "Float8Linear" and type(model.wide) is nn.Linear
    assert type(model.odd) is nn.Linear, "its sizes do not suit fp8, whatever the filter says"
    model(torch.randn(16, 32)).sum().backward()
    assert model.first.weight.grad is not None
    never_trained = accelerator.prepare_model(made(), evaluation_mode=True)
    assert not ao.has_ao_layers(never_trained)

    AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match="AORecipeKwargs is for mixed_precision='fp8', but mixed_precision is 'bf16'"):
        Accelerator(mixed_precision="bf16", cpu=True, kwargs_handlers=[handler])
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    with pytest.raises(ValueError, match="with Transformer Engine here, since it is not installed: use"):
        Accelerator(mixed_precision="fp8", cpu=True)
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "apex")
    with pytest.raises(ValueError, match="'apex': choose one of auto, ao, te, msamp"):
        Accelerator(mixed_precision="fp8", cpu=True)
    assert Accelerator(mixed_precision="bf16", cpu=True).mixed_precision == "bf16", "refusals leave nothing behind"


def test_a_torchao_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchao.float8.config import Float8LinearConfig

    monkeypatch.delattr(Float8LinearConfig, "from_recipe_name")
    with pytest.raises(ImportError, match=r"The recipes of torchao take release 0\.9 or newer"):
        AORecipeKwargs()
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "ao")
    with pytest.raises(ValueError, match=r"since torchao 0.18.0 does not work .*; it needs 0.9 or newer\)"):
        Accelerator(mixed_precision="fp8", cpu=True)


def test_a_model_that_the_script_has_converted(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    net = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    ao.convert_model_to_fp8_ao(net, AORecipeKwargs().config, lambda module, name: True)
    with caplog.at_level(logging.INFO):
        accelerator.prepare(net)
    assert "2 of the 2 linear layers of Sequential compute in fp8." in caplog.records[-1].getMessage()
    assert caplog.records[-1].levelno == logging.INFO


@pytest.mark.parametrize("filtered", [False, True])
def test_layers_with_something_of_their_own_stay_as_they_are(filtered: bool) -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    shared = nn.Linear(32, 32)
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    net = nn.Sequential(nn.Linear(32, 32), Doubled(32, 32), normed, shared, shared, nn.Linear(32, 32))
    handlers: Any = [AORecipeKwargs(module_filter_func=lambda module, name: name not in "05")] if filtered else []
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=handlers)
    model = accelerator.prepare(net)
    kinds = [type(module).__name__ for module in model]
    assert kinds == ["Linear", "Doubled", "ParametrizedLinear", "Float8Linear", "Float8Linear", "Linear"]
    assert model[3] is model[4]
    model(torch.randn(16, 32)).sum().backward()
