"""Steps whose gradients are not finite: left out on all ranks, or the run ends and says where they came from."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.local_sgd import LocalSGD
from accelerate.state import AcceleratorState, GradientState
from accelerate.torch_internals.process_groups import collectives_begun
from accelerate.utils import FullyShardedDataParallelPlugin
from tests.harness import run_world
from tests.unit.accelerator.toys import assert_same_everywhere, weights


class Numbered(torch.utils.data.Dataset[tuple[torch.Tensor, int]]):
    """Samples that know their index."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((4,), 1.0 + index / 32), index


class Root(nn.Module):
    """Not finite for values below zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sqrt()


def network() -> nn.Sequential:
    torch.manual_seed(0)
    first, last = nn.Linear(4, 4), nn.Linear(4, 2)
    with torch.no_grad():
        first.weight.abs_()
        first.bias.fill_(0.5)
    return nn.Sequential(first, nn.Identity(), nn.Sequential(Root(), last))


def train(
    accelerator: Accelerator,
    bad: set[int],
    fails: str = "forward",
    workers: int = 0,
    shuffle: bool = False,
    seen: list[list[int]] | None = None,
    fused: bool = False,
    begun: list[int] | None = None,
) -> tuple[list[bool], Any, int]:
    """Trains an epoch, in which samples with these indices have something wrong with them; which steps were skipped.

    seen: is given the indices of each batch. begun: has gradients clipped, and is given how many collectives had begun
    after each step.
    """
    torch.manual_seed(1)
    loader: Any = DataLoader(Numbered(), batch_size=2, shuffle=shuffle, num_workers=workers)
    plain = network()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, fused=fused)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.99**step)
    model, optimizer, loader, scheduler = accelerator.prepare(plain, optimizer, loader, schedule)
    skipped = []
    for inputs, indices in loader:
        if seen is not None:
            seen.append(indices.tolist())
        with accelerator.accumulate(model):
            hit = bool(bad & set(indices.tolist()))
            outputs = model(inputs * -100 - 100 if hit and fails == "forward" else inputs)
            loss = outputs.square().mean()
            if hit and fails == "loss":
                loss = loss / 0
            if hit and fails == "gradient":
                outputs.register_hook(lambda gradient: gradient * float("inf"))
                loss = outputs.square().mean()
            accelerator.backward(loss)
            before = [parameter.detach().clone() for parameter in model.parameters()]
            if begun is not None and accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            if begun is not None:
                begun.append(collectives_begun())
            scheduler.step()
            optimizer.zero_grad()
            if accelerator.sync_gradients:
                skipped.append(accelerator.optimizer_step_was_skipped)
                after = list(model.parameters())
                assert skipped[-1] == all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return skipped, model, schedule.last_epoch


def fresh(**kwargs: Any) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(cpu=True, **kwargs)


def stopped(accelerator: Accelerator, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(FloatingPointError) as caught:
        train(accelerator, *args, **kwargs)
    return str(caught.value)


ADVICE = (
    "Look at these samples, lower the learning rate, or clip gradients; Accelerator(nonfinite='skip') skips such steps."
)


def test_on_one_process() -> None:
    skipped, _, steps = train(fresh(nonfinite="skip"), {3, 9})
    assert [number for number, each in enumerate(skipped) if each] == [1, 4] and steps == 14
    assert train(fresh(nonfinite="skip"), {3, 9}, fused=True)[0] == skipped
    assert "samples 8, 9" in stopped(fresh(nonfinite="stop"), {9}, fused=True)
    skipped, _, _ = train(fresh(nonfinite="skip", gradient_accumulation_steps=4), {9})
    assert skipped == [False, True, False, False]
    assert not any(train(fresh(nonfinite="stop"), set())[0])

    seen: list[list[int]] = []
    text = stopped(fresh(nonfinite="stop"), {9}, shuffle=True, workers=1, seen=seen)
    first, second = seen[-1]
    assert text == (
        f"Step {len(seen)} was not taken, because its gradients are not finite: on rank 0 the loss is nan (epoch 0, "
        f"batch {len(seen) - 1}, samples {first}, {second}), and `2.0` (Root) is the first module whose output is not "
        f"finite. {ADVICE}"
    )
    text = stopped(fresh(nonfinite="stop", gradient_accumulation_steps=4), {9}, "loss")
    assert "Step 2 was not" in text and "the loss is inf (epoch 0, batch 4, samples 8, 9), and every module's" in text
    text = stopped(fresh(nonfinite="stop"), {9}, "gradient")
    assert "every loss and every output is finite, but the gradient of `0.weight` is not" in text


class Own(torch.optim.Optimizer):
    """Not torch's."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= parameter.grad


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="nonfinite is 'ignore': pass 'skip' or 'stop', or leave it out"):
        Accelerator(cpu=True, nonfinite="ignore")
    accelerator = Accelerator(cpu=True, nonfinite="skip")
    parameter = nn.Parameter(torch.ones(1))
    optimizer = accelerator.prepare(torch.optim.SGD([parameter], lr=0.1))
    with pytest.raises(ValueError, match="Gradients that a closure computes"):
        optimizer.step(lambda: 0.0)
    optimizer.step()
    assert not accelerator.optimizer_step_was_skipped

    # `fused` may also be said of an optimizer that does not know what a scaler tells.
    own: Any = accelerator.prepare(Own([parameter], {"fused": True}))
    parameter.grad = torch.full((1,), float("nan"))
    own.step()
    assert own.step_was_skipped and parameter.isfinite().all()


class Masked(nn.Module):
    """Draws, counts its calls, and has an output that is infinite on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = nn.functional.dropout(self.layer(self.norm(x)), 0.5)
        return x, torch.full_like(x, float("-inf"))


def test_forwards_that_run_again_leave_nothing_behind() -> None:
    accelerator = fresh(mixed_precision="fp16", nonfinite="stop")
    plain = Masked()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for factor in (1e34, float("nan")):
        optimizer.zero_grad()
        accelerator.backward(model(torch.ones(2, 4))[0].sum() * factor + (0.0 if factor == factor else factor))
        counted, drawn = int(plain.norm.num_batches_tracked), torch.get_rng_state()  # type: ignore[arg-type]
        if factor == 1e34:
            optimizer.step()
            assert accelerator.optimizer_step_was_skipped
        else:
            with pytest.raises(FloatingPointError, match="the loss is nan, and the Masked itself is the first module"):
                optimizer.step()
        assert int(plain.norm.num_batches_tracked) == counted  # type: ignore[arg-type]
        assert torch.equal(torch.get_rng_state(), drawn)

    twin = pickle.loads(pickle.dumps(model))
    twin(torch.ones(2, 4))
    watching = accelerator._stops_at_nonfinite
    assert watching is not None and watching._last.forwards and not watching._window.forwards
    accelerator.free_memory()
    assert not watching._last.forwards


def test_a_parameter_that_is_bad_already_and_fp16() -> None:
    accelerator = fresh(nonfinite="stop")
    plain = network()
    model, optimizer = accelerator.prepare(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    with torch.no_grad():
        plain[2][1].weight[0, 0] = float("nan")  # type: ignore[index]
    accelerator.backward(model(torch.ones(1, 4)).sum())
    with pytest.raises(FloatingPointError, match=r"`2[.]1[.]weight` was already not finite before the step"):
        optimizer.step()

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision="fp16", nonfinite="stop")
    layer = nn.Linear(4, 4)
    model, optimizer = accelerator.prepare(layer, torch.optim.SGD(layer.parameters(), lr=0.1))
    accelerator.backward(model(torch.ones(1, 4)).sum() * 1e34)  # too large for the scaler's factor: its own business
    optimizer.step()
    assert accelerator.optimizer_step_was_skipped
    optimizer.zero_grad()
    accelerator.backward(model(torch.ones(1, 4)).sum() * float("nan"))
    with pytest.raises(FloatingPointError, match="the loss is nan, and every module's output is finite"):
        optimizer.step()


def on_two() -> dict[str, Any]:
    found: dict[str, Any] = {}
    skipped, model, steps = train(fresh(nonfinite="skip"), {9, 19})
    assert_same_everywhere(weights(model))
    found["skip"] = ([number for number, each in enumerate(skipped) if each], steps)
    found["accumulated"] = train(fresh(nonfinite="skip", gradient_accumulation_steps=2), {9})[0]
    found["stop"] = stopped(fresh(nonfinite="stop"), {10})
    found["dispatched"] = stopped(
        fresh(nonfinite="stop", dataloader_config=DataLoaderConfiguration(dispatch_batches=True)), {10}
    )
    accelerator = fresh(nonfinite="stop")
    with pytest.raises(ValueError, match="Under LocalSGD each process has its own gradients"):
        LocalSGD(accelerator, nn.Linear(1, 1), 2)
    with pytest.raises(ValueError, match="some processes take fewer steps"), accelerator.join_uneven_inputs([]):
        pass
    accelerator.even_batches = False
    accelerator.prepare(DataLoader(Numbered(), batch_size=2))
    with pytest.raises(ValueError, match="With even_batches=False, some processes get one batch fewer"):
        accelerator.prepare(DataLoader(Numbered(), batch_size=12))
    return found


def test_on_two_processes() -> None:
    first, second = run_world(on_two, 2)
    assert first == second
    # Batches of two go to the ranks in turn: sample 9 is in the third one of rank 0, 10 in the third of rank 1.
    assert first["skip"] == ([2, 4], 12)
    assert first["accumulated"] == [False, True, False, False]
    where = "on rank 1 the loss is nan (epoch 0, batch 2{}), and `2.0` (Root) is the first module whose output is not"
    start = "Step 3 was not taken, because its gradients are not finite: "
    assert first["stop"] == f"{start}{where.format(', samples 10, 11')} finite. {ADVICE}"
    assert first["dispatched"] == f"{start}{where.format('')} finite. {ADVICE.replace('Look at these samples, l', 'L')}"


def sharded(version: int) -> dict[str, Any]:
    def plugin() -> FullyShardedDataParallelPlugin:
        return FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=True)

    skipped, _, steps = train(fresh(nonfinite="skip", fsdp_plugin=plugin()), {9, 19})
    return {
        "skip": ([number for number, each in enumerate(skipped) if each], steps),
        "stop": stopped(fresh(nonfinite="stop", fsdp_plugin=plugin()), {10}),
        "clipped": train(fresh(nonfinite="skip", fsdp_plugin=plugin()), {9, 19}, begun=[])[0],
        "overflow": train(fresh(nonfinite="skip", fsdp_plugin=plugin()), {9, 19}, "gradient", begun=[])[0],
        "collectives": [collectives(fresh(nonfinite=choice, fsdp_plugin=plugin())) for choice in (None, "skip")],
    }


def collectives(accelerator: Accelerator) -> list[int]:
    """How many begin in each step but the first, with the norm of its clipping."""
    begun: list[int] = []
    train(accelerator, set(), begun=begun)
    return [later - earlier for earlier, later in itertools.pairwise(begun)]


@pytest.mark.parametrize("version", [1, 2])
def test_fsdp(version: int) -> None:
    first, second = run_world(sharded, 2, version)
    assert first == second
    assert first["skip"] == ([2, 4], 12)
    assert "on rank 1 the loss is nan (epoch 0, batch 2, samples 10, 11), and `2.0` (Root) is" in first["stop"]
    assert [number for number, each in enumerate(first["clipped"]) if each] == [2, 4]
    assert first["overflow"] == first["clipped"]
    # The norm that gradients are clipped by tells all ranks whether they are finite.
    without, with_skip = first["collectives"]
    assert without == with_skip and len(without) > 2
