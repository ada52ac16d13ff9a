"""fp8 with Transformer Engine and MS-AMP, against stand-ins that record the calls; and which library is chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, FullyShardedDataParallelPlugin, available
from accelerate.devices import CPU, Device
from accelerate.errors import NotYetSupported
from accelerate.precision import PRECISIONS, create, load
from accelerate.state import AcceleratorState
from accelerate.utils import (
    DistributedType,
    FP8BackendType,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    transformer_engine,
)
from tests.harness import run_world
from tests.unit.precision import stand_ins
from tests.unit.precision.stand_ins import CALLS


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    for mode, backend in PRECISIONS:
        load(mode, backend)
    stand_ins.install(monkeypatch)


def network() -> Any:
    torch.manual_seed(0)
    last = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 3))
    return nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), last)


@pytest.mark.usefixtures("libraries")
def test_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "te")
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "2")
    net = network()
    before = dict(net.named_parameters())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    accelerator = Accelerator(mixed_precision="fp8", cpu=True)
    assert accelerator.fp8_backend == FP8BackendType.TE and accelerator.te_recipe_handler is None
    model, optimizer = accelerator.prepare(net, optimizer)
    kinds = [type(module) for module in (model[0], model[1], model[2][0], model[2][1])]
    assert kinds == [stand_ins.Linear, stand_ins.LayerNorm, stand_ins.Linear, nn.Linear]
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    accelerator.backward(model(torch.randn(4, 16)).sum())
    optimizer.step()
    enabled, recipe = CALLS[0]
    assert enabled and (recipe.margin, recipe.fp8_format) == (2, stand_ins.Format.HYBRID)
    assert CALLS[1:] == ["linear", "linear", "left"]
    model.eval()
    CALLS.clear()
    assert model(torch.randn(4, 16)).dtype == torch.float32
    assert CALLS[0][0] is False, "evaluation computes in bf16, unless it is asked for"

    transformer_engine.convert_model(model, to_transformer_engine=False)
    assert [type(module) for module in (model[0], model[1], model[2][0])] == [nn.Linear, nn.LayerNorm, nn.Linear]
    assert model[2][0].bias is None
    assert all(parameter is before[name] for name, parameter in model.named_parameters())


@pytest.mark.usefixtures("libraries")
def test_transformer_engine_as_a_handler_says() -> None:
    handler = TERecipeKwargs(use_autocast_during_eval=True, use_mxfp8_block_scaling=True, fp8_format="E4M3")
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])
    model = accelerator.prepare(network())
    model.eval()(torch.randn(4, 16))
    enabled, recipe = CALLS[0]
    assert enabled and isinstance(recipe, stand_ins.MXFP8BlockScaling)
    assert recipe.fp8_format == stand_ins.Format.E4M3


@pytest.mark.usefixtures("libraries")
def test_ms_amp() -> None:
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    with pytest.warns(FutureWarning):
        handler = FP8RecipeKwargs(backend="MSAMP", opt_level="O1")
    accelerator = Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=[handler])
    with pytest.raises(ValueError, match="was given 1 models and 0 optimizers: pass one of each in one call"):
        accelerator.prepare(network())
    assert CALLS == []
    prepared: Any = accelerator.prepare(net, optimizer, scheduler)
    model, made, scheduler = prepared
    assert CALLS == ["O1"] and accelerator.fp8_backend == FP8BackendType.MSAMP
    assert type(made.optimizer) is stand_ins.LBAdamW
    accelerator.backward(model(torch.randn(4, 16)).sum())
    made.step()
    with pytest.warns(UserWarning, match="has been overridden"):  # says torch of any optimizer in another's place
        scheduler.step()
    assert made.optimizer.param_groups[0]["lr"] == 0.25
    AcceleratorState._reset_state(True)
    handlers: Any = [MSAMPRecipeKwargs(), TERecipeKwargs()]
    with pytest.raises(
        ValueError, match="TERecipeKwargs and MSAMPRecipeKwargs, but only one library can compute in fp8"
    ):
        Accelerator(mixed_precision="fp8", cpu=True, kwargs_handlers=handlers)
    # A refusal leaves nothing behind that would refuse the next one; without one, the state stays.
    assert Accelerator(mixed_precision="bf16", cpu=True).mixed_precision == "bf16"
    with pytest.raises(ValueError, match="already set up and cannot be changed to mixed_precision='fp8'"):
        Accelerator(mixed_precision="fp8", cpu=True)
    with pytest.raises(ValueError, match="TERecipeKwargs is for mixed_precision='fp8'"):
        Accelerator(cpu=True, kwargs_handlers=handlers[1:])
    assert AcceleratorState().mixed_precision == "bf16"


def test_where_no_library_can(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old(CPU):
        def lacks_fp8(self) -> str | None:
            return "it needs compute capability 8.9 or more, but this A100 has 8.0"

    for mode, backend in PRECISIONS:
        load(mode, backend)
    monkeypatch.setattr("accelerate.precision.ao.is_torchao_available", lambda: True)
    monkeypatch.setattr("accelerate.precision.msamp.is_msamp_available", lambda: False)
    monkeypatch.setattr("accelerate.precision.transformer_engine.is_transformer_engine_available", lambda: True)
    with pytest.raises(ValueError) as caught:
        create("fp8", Old())
    assert str(caught.value) == (
        "mixed_precision='fp8' is not available here (torchao: it needs compute capability 8.9 or more, but this A100 "
        "has 8.0; Transformer Engine: it needs a GPU; MS-AMP: it is not installed): use 'bf16', or provide what one of "
        "them lacks."
    )
    other = Device("xpu", backend="xccl", label="x")  # type: ignore[arg-type]
    assert not other.supports("fp8") and "this device is 'xpu'" in str(other.lacks_fp8())


def test_which_package_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torchao", "transformer_engine", "msamp"):
        monkeypatch.setattr(available, f"is_{name}_available", lambda: False)
    assert "needs torchao 0.9 or newer" in str(available.lacks_fp8_package())
    assert "needs MS-AMP; it is not installed here" in str(available.lacks_fp8_package("msamp"))
    monkeypatch.setattr(available, "is_transformer_engine_available", lambda: True)
    assert available.lacks_fp8_package() is None and available.lacks_fp8_package("te") is None
    assert available.lacks_fp8_package("ao") is not None


def ms_amp_in_pieces() -> str:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for mode, backend in PRECISIONS:
            load(mode, backend)
        stand_ins.install(monkeypatch)
        monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "msamp")
        with pytest.raises(NotYetSupported) as caught:
            Accelerator(mixed_precision="fp8", cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))
    accelerator = Accelerator(mixed_precision="bf16", cpu=True)
    assert (accelerator.distributed_type, accelerator.mixed_precision) == (DistributedType.MULTI_CPU, "bf16")
    return str(caught.value)


def test_ms_amp_does_not_shard() -> None:
    for said in run_world(ms_amp_in_pieces, 2):
        assert said.startswith("mixed_precision='fp8' with MSAMP and a sharded model is not part of this version")
