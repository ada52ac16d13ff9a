"""Trainings on an XLA device end where those on the host end, and compile nothing once they have seen all shapes."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, DistributedType
from accelerate.utils import DataLoaderConfiguration, set_seed
from tests.xla.worlds import on_host, on_xla


class Tied(nn.Module):
    """Reads tokens with the weights that it answers with."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 8)
        self.hidden = nn.Linear(8, 8)
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.hidden(self.embed(tokens))))


def _data() -> DataLoader[Any]:
    tokens = torch.randint(0, 10, (34,))
    return DataLoader(TensorDataset(tokens, (tokens * 3) % 10), batch_size=4, shuffle=True)


def _parts(accelerator: Accelerator) -> tuple[Any, ...]:
    set_seed(0)
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 20))
    return accelerator.prepare(model, optimizer, _data(), scheduler)


def _train(accelerator: Accelerator, parts: tuple[Any, ...], epochs: int) -> list[float]:
    model, optimizer, loader, scheduler = parts
    losses = []
    for _ in range(epochs):
        for tokens, wanted in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(tokens), wanted)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.detach())
    return [float(loss) for loss in losses]


def trained(precision: str, accumulation: int) -> dict[str, Any]:
    accelerator = Accelerator(mixed_precision=precision, gradient_accumulation_steps=accumulation)
    parts = _parts(accelerator)
    losses = _train(accelerator, parts, epochs=3)
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(parts[0]).items()}
    return {"losses": losses, "weights": weights, "rate": parts[3].get_last_lr(), "type": accelerator.distributed_type}


@pytest.mark.parametrize(("precision", "accumulation", "tolerance"), [("no", 1, 1e-4), ("bf16", 2, 0.1)])
def test_ends_as_on_the_host(precision: str, accumulation: int, tolerance: float) -> None:
    here, there = on_xla(trained, precision, accumulation), on_host(trained, precision, accumulation)
    assert here["type"] == DistributedType.XLA and there["type"] == DistributedType.NO
    assert here["rate"] == there["rate"] and here["weights"].keys() == there["weights"].keys()
    assert here["losses"] == pytest.approx(there["losses"], abs=tolerance)
    assert here["losses"][-1] < here["losses"][0] / 2
    for name, value in there["weights"].items():
        torch.testing.assert_close(here["weights"][name], value, rtol=0, atol=tolerance)


def items() -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, loader, _ = _parts(accelerator)
    for tokens, wanted in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(tokens), wanted, reduction="sum")
            accelerator.backward(loss, num_items=len(tokens))
            optimizer.step()
            optimizer.zero_grad()
    return [float(value) for value in model.hidden.bias]


def test_sums_are_weighed_by_their_items() -> None:
    assert on_xla(items) == pytest.approx(on_host(items), abs=1e-4)


def compilations() -> tuple[int, int]:
    import torch_xla.debug.metrics as metrics

    def count() -> int:
        return int(metrics.metric_data("CompileTime")[0])

    accelerator = Accelerator(gradient_accumulation_steps=2)
    parts = _parts(accelerator)
    _train(accelerator, parts, epochs=1)
    first = count()
    _train(accelerator, parts, epochs=4)
    return first, count() - first


def test_nothing_is_compiled_once_all_shapes_were_seen() -> None:
    first, later = on_xla(compilations)
    assert first >= 2 and later <= 2


def tied() -> None:
    accelerator = Accelerator()
    model, evaluated = Tied(), Tied()
    before = {id(parameter) for parameter in model.parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    evaluated = accelerator.prepare_model(evaluated, evaluation_mode=True)
    for each in (model, evaluated):
        assert each.head.weight is each.embed.weight and each.head.weight.device.type == "xla"
    assert {id(parameter) for parameter in model.parameters()} == before
    assert {id(parameter) for group in optimizer.param_groups for parameter in group["params"]} == before


def test_parameters_stay_themselves_on_their_way() -> None:
    on_xla(tied)


def evaluates() -> None:
    accelerator = Accelerator()
    model, _, loader, _ = _parts(accelerator)
    seen = []
    with torch.no_grad():
        for tokens, wanted in loader:
            predicted, wanted = accelerator.gather_for_metrics((model(tokens).argmax(-1), wanted))
            assert predicted.device.type == "xla" and len(predicted) == len(wanted)
            seen += wanted.tolist()
    assert sorted(seen) == sorted(loader.dataset.tensors[1].tolist())
    one = torch.ones(2, device=accelerator.device)
    assert accelerator.gather(one).tolist() == accelerator.reduce(one).tolist() == [1.0, 1.0]
    assert accelerator.pad_across_processes(one).tolist() == [1.0, 1.0]


def test_evaluates() -> None:
    on_xla(evaluates)


def resumes(folder: str) -> None:
    accelerator = Accelerator(
        gradient_accumulation_steps=2, dataloader_config=DataLoaderConfiguration(exact_resume=True)
    )
    parts = _parts(accelerator)
    _train(accelerator, parts, epochs=1)
    accelerator.save_state(folder)
    expected, numbers = _train(accelerator, parts, epochs=2), torch.rand(3, device=accelerator.device).cpu()
    end = copy.deepcopy(accelerator.get_state_dict(parts[0]))
    accelerator.load_state(folder)
    assert parts[0].head.weight is parts[0].embed.weight
    assert _train(accelerator, parts, epochs=2) == expected
    assert torch.equal(torch.rand(3, device=accelerator.device).cpu(), numbers)
    for name, value in accelerator.get_state_dict(parts[0]).items():
        assert value.device.type == "cpu" and torch.equal(value, end[name]), name


def test_resumes_exactly(tmp_path: Path) -> None:
    on_xla(resumes, str(tmp_path / "state"))


def saved(folder: str, behind: bool) -> dict[str, torch.Tensor]:
    accelerator = Accelerator()
    parts = _parts(accelerator)
    _train(accelerator, parts, epochs=1)
    accelerator.save_state(folder, async_save=behind)
    accelerator.wait_for_checkpoint()
    accelerator.save_model(parts[0], f"{folder}-model")
    accelerator.save(parts[0].state_dict(), f"{folder}-weights.bin")
    return {name: value.cpu() for name, value in parts[0].state_dict().items()}


def loaded(folder: str) -> dict[str, torch.Tensor]:
    accelerator = Accelerator()
    parts = _parts(accelerator)
    accelerator.load_state(folder)
    losses = _train(accelerator, parts, epochs=1)
    assert losses[0] < 2.0  # as after an epoch, and not as at the start
    accelerator.load_state(folder)
    return {name: value.cpu() for name, value in parts[0].state_dict().items()}


@pytest.mark.parametrize("behind", [False, True])
def test_host_and_device_load_each_others_states(tmp_path: Path, behind: bool) -> None:
    for number, (save, load) in enumerate(((on_xla, on_host), (on_host, on_xla))):
        folder = str(tmp_path / str(number))
        expected, found = save(saved, folder, behind), load(loaded, folder)
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], value) for name, value in expected.items())
        weights = torch.load(f"{folder}-weights.bin", weights_only=True)
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        assert (tmp_path / f"{number}-model" / "model.safetensors").exists()


def downcasts() -> None:
    accelerator = Accelerator(mixed_precision="bf16")
    assert accelerator.state.downcast_bfloat
    parts = _parts(accelerator)
    model = parts[0]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert model.head.weight is model.embed.weight
    losses = _train(accelerator, parts, epochs=3)
    assert losses[-1] < losses[0] / 2
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    precise = accelerator.prepare(nn.Linear(2, 2, dtype=torch.float64))
    assert precise.weight.dtype is torch.float32


def test_parameters_in_bf16() -> None:
    on_xla(downcasts, ACCELERATE_DOWNCAST_BF16="true")


def refuses() -> None:
    with pytest.raises(ValueError, match="'fp16' does not run on this xla device: use 'bf16', or 'no'"):
        Accelerator(mixed_precision="fp16")
    with pytest.raises(ValueError, match="'inductor' does not run on an XLA device, where XLA compiles every step"):
        Accelerator(dynamo_backend="inductor")
    Accelerator(dynamo_backend="eager")


def test_what_does_not_run_is_refused_in_a_sentence() -> None:
    on_xla(refuses)
