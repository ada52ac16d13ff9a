"""Mixed precision around a model's forward, and its settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.precision import PRECISIONS, Scaler, get_grad_scaler
from accelerate.state import AcceleratorState
from accelerate.utils import AutocastKwargs, GradScalerKwargs
from tests.unit.accelerator.toys import Net


class Seeing(Net):
    """Remembers the dtype it computed in."""

    seen: torch.dtype | None = None

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        self.seen = hidden.dtype
        return self.last(hidden)


DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("mode", [mode for mode, backend in PRECISIONS if backend == "torch"])
def test_the_model_computes_in_it_and_hands_out_fp32(mode: str) -> None:
    model = Accelerator(mixed_precision=mode).prepare(Seeing())
    assert model(torch.ones(1, 4)).dtype is torch.float32
    assert model.seen is DTYPES[mode]
    assert all(p.dtype is torch.float32 for p in model.parameters())


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_autocast_that_is_switched_off(mode: str) -> None:
    accelerator = Accelerator(mixed_precision=mode, kwargs_handlers=[AutocastKwargs(enabled=False)])
    model = accelerator.prepare(Seeing())
    model(torch.ones(1, 4))
    assert model.seen is torch.float32
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32
    # One block may differ from the setting.
    with accelerator.autocast(AutocastKwargs(enabled=True)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is DTYPES[mode]


def test_a_block_in_full_precision() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    with accelerator.autocast(AutocastKwargs(enabled=False)):
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


def test_native_amp_switched_off_before_prepare() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    accelerator.native_amp = False
    model = accelerator.prepare(Seeing())
    model(torch.ones(1, 4))
    assert model.seen is torch.float32 and "forward" not in vars(model)
    with accelerator.autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is torch.float32


@pytest.mark.parametrize("mode", ["no", "bf16"])
def test_autocast_as_a_decorator(mode: str) -> None:
    @Accelerator(mixed_precision=mode).autocast()
    def product() -> torch.Tensor:
        return torch.ones(2, 2) @ torch.ones(2, 2)

    for _ in range(2):
        assert product().dtype is DTYPES.get(mode, torch.float32)


def test_nested_outputs_become_fp32() -> None:
    @dataclass
    class Output:
        logits: torch.Tensor
        other: Any

    class Nested(Net):
        def forward(self, x: torch.Tensor) -> Any:
            value = self.first(x)
            return {"a": [value, (value, "text")], "b": Output(value, None), "ids": torch.ones(1, dtype=torch.long)}

    out = Accelerator(mixed_precision="bf16").prepare(Nested())(torch.ones(1, 4))
    assert out["a"][0].dtype is out["a"][1][0].dtype is out["b"].logits.dtype is torch.float32
    assert out["a"][1][1] == "text" and out["b"].other is None and out["ids"].dtype is torch.long


def test_a_forward_of_the_instance() -> None:
    """Clients put functions on instances; unwrapping gives theirs back."""
    model = Seeing()
    mine = model.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        return mine(x) + 1

    model.forward = forward  # type: ignore[method-assign]
    accelerator = Accelerator(mixed_precision="bf16")
    prepared = accelerator.prepare(model)
    assert prepared(torch.ones(1, 4)).dtype is torch.float32
    assert model.seen is torch.bfloat16
    assert accelerator.unwrap_model(prepared, keep_fp32_wrapper=False).forward is forward
    prepared(torch.ones(1, 4))
    assert model.seen is torch.float32


def test_the_signature_of_forward_stays() -> None:
    import inspect

    model = Accelerator(mixed_precision="bf16").prepare(Net())
    assert list(inspect.signature(model.forward).parameters) == ["x"]


def test_a_frozen_fp16_copy_beside_a_trained_model() -> None:
    """The way diffusers casts its frozen parts to the precision of training."""
    accelerator = Accelerator(mixed_precision="bf16")
    frozen = Net().to(torch.bfloat16).requires_grad_(False)
    model = accelerator.prepare(Net())
    x = torch.ones(1, 4)
    with accelerator.autocast():
        target = frozen(x)
    loss = nn.functional.mse_loss(model(x), target.float())
    accelerator.backward(loss)
    assert torch.isfinite(model.first.weight.grad).all()


def test_get_grad_scaler() -> None:
    Accelerator()
    scaler = get_grad_scaler(init_scale=4.0)
    assert isinstance(scaler, Scaler) and scaler.get_scale() == 4.0


def test_an_unknown_precision() -> None:
    with pytest.raises(ValueError, match="int3"):
        Accelerator(mixed_precision="int3")


@pytest.mark.parametrize("asked", ["argument", "variable"])
def test_fp8_without_a_library_for_it(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.state.accelerator.is_fp8_available", lambda: False)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8" if asked == "variable" else "no")
    with pytest.raises(ValueError, match="needs torchao, Transformer Engine or MS-AMP, but none of them is installed"):
        Accelerator(mixed_precision="fp8" if asked == "argument" else None)
    assert not AcceleratorState._shared_state


def test_the_scaler_survives_a_round_trip() -> None:
    accelerator = Accelerator(mixed_precision="fp16")
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 4)).sum() * float("inf"))
    optimizer.step()
    state = accelerator.scaler.state_dict()
    assert state["scale"] == 32768.0
    assert accelerator.scaler._scale.item() == 32768.0
    accelerator.scaler.load_state_dict(state | {"scale": 8.0})
    assert accelerator.scaler.get_scale() == 8.0


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("used_before", [False, True])
def test_a_model_that_was_compiled_before_prepare(used_before: bool) -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    net = nn.Linear(4, 2)
    compiled = torch.compile(net, backend="eager")
    x = torch.rand(3, 4)
    if used_before:
        compiled(x)
    model = accelerator.prepare(compiled)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = nn.functional.linear(x, net.weight, net.bias).float()
    outputs = model(x)
    assert outputs.dtype is torch.float32
    torch.testing.assert_close(outputs, expected, rtol=0, atol=0)
    plain = accelerator.unwrap_model(model, keep_fp32_wrapper=False, keep_torch_compile=False)
    assert plain is net and not {"forward", "_original_forward"} & set(vars(net))


def test_gradients_in_accumulation_follow_the_scale() -> None:
    """Another optimizer's step may change the scale in the middle of a window."""
    handler = GradScalerKwargs(init_scale=2.0, growth_interval=1)
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=2, kwargs_handlers=[handler])
    first, second = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    steppers = [torch.optim.SGD(model.parameters(), lr=0.0) for model in (first, second)]
    first, second, *steppers = accelerator.prepare(first, second, *steppers)
    seen = []
    with accelerator.accumulate(second):  # from here on the windows of the two overlap
        accelerator.backward(second(torch.ones(1, 1)).sum())
    for _ in range(5):
        for model, optimizer in zip((first, second), steppers, strict=True):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 1)).sum())
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1e9)
                    seen.append(model.weight.grad.item())
                optimizer.step()
                optimizer.zero_grad()
    assert seen == [1.0] * len(seen) and len(seen) >= 4
