"""Checkpoints of every stage: resumed exactly, in the layout of the released package, all or nothing."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.checkpointing import verify_checkpoint
from accelerate.errors import CheckpointError
from tests.deepspeed import training
from tests.harness import run_world, world_outcomes
from tests.world.crashing import kill_at

SETTINGS: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "precision": "bf16"},
    {"stage": 3},
    {"stage": 3, "precision": "bf16", "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
]


def prepared(settings: dict[str, Any], seed: int = 0) -> tuple[Accelerator, Any, Any, Any, Any]:
    acc = training.accelerator(**settings)
    net = training.model(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    return (acc, *acc.prepare(net, optimizer, scheduler, DataLoader(training.data(), batch_size=4, shuffle=True)))


def steps(acc: Accelerator, net: Any, optimizer: Any, scheduler: Any, batches: Any) -> list[float]:
    losses = []
    for inputs, targets in batches:
        loss = training.loss_of(net(inputs), targets)
        acc.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def end(acc: Accelerator) -> None:
    acc.free_memory()
    acc.state._reset_state(reset_partial_state=False)


def resume(folder: str, asynchronous: bool) -> None:
    for number, settings in enumerate(SETTINGS):
        target = Path(folder, str(number))
        torch.manual_seed(7)
        acc, net, optimizer, scheduler, loader = prepared(settings)
        batches = iter(loader)
        steps(acc, net, optimizer, scheduler, [next(batches) for _ in range(3)])
        acc.save_state(target, async_save=asynchronous)
        expected = steps(acc, net, optimizer, scheduler, batches)
        weights = training.weights(acc, net)
        acc.wait_for_checkpoint()
        main = acc.is_main_process
        end(acc)
        if main:
            verify_checkpoint(target)
            assert (target / "latest").read_text() == "pytorch_model"
            if settings["stage"] > 0:
                assert (target / "zero_to_fp32.py").exists()
        acc, net, optimizer, scheduler, loader = prepared(settings, seed=5)
        acc.load_state(target)
        found = steps(acc, net, optimizer, scheduler, loader)
        now = training.weights(acc, net)
        torch.testing.assert_close(
            (found, now), (expected, weights), rtol=0, atol=0, msg=lambda text, at=settings: f"{at}: {text}"
        )
        end(acc)


@pytest.mark.parametrize(("processes", "asynchronous"), [(1, True), (2, False)])
def test_training_goes_on_as_it_was(processes: int, asynchronous: bool, tmp_path: Path) -> None:
    run_world(resume, processes, str(tmp_path), asynchronous, timeout=200)


def by_deepspeed_itself(folder: str) -> None:
    """What the released package does: `save_checkpoint` and `load_checkpoint` of the engine, with tag and folder."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    for stage in (2, 3):
        ours, theirs = Path(folder, f"ours_{stage}"), Path(folder, f"theirs_{stage}")
        acc, net, optimizer, scheduler, loader = prepared({"stage": stage})
        batches = [batch for batch, _ in zip(loader, range(3), strict=False)]
        steps(acc, net, optimizer, scheduler, batches)
        saved = training.weights(acc, net)
        acc.save_state(ours)
        net.save_checkpoint(str(theirs), tag="pytorch_model")
        if acc.is_main_process:
            whole = get_fp32_state_dict_from_zero_checkpoint(str(ours), tag="pytorch_model")
            torch.testing.assert_close(dict(whole), saved)
            for path in ours.iterdir():
                if path.name.startswith(("random_states", "scheduler")):
                    (theirs / path.name).write_bytes(path.read_bytes())
        acc.wait_for_everyone()
        expected = steps(acc, net, optimizer, scheduler, batches)
        acc.load_state(theirs)
        torch.testing.assert_close(training.weights(acc, net), saved, rtol=0, atol=0)
        assert steps(acc, net, optimizer, scheduler, batches) == expected
        end(acc)
        acc, net, optimizer, scheduler, _ = prepared({"stage": stage}, seed=5)
        net.load_checkpoint(str(ours), tag="pytorch_model")
        torch.testing.assert_close(training.weights(acc, net), saved, rtol=0, atol=0)
        end(acc)


def test_each_reads_what_the_other_has_written(tmp_path: Path) -> None:
    run_world(by_deepspeed_itself, 2, str(tmp_path), timeout=120)


def refusals(folder: str) -> list[str]:
    """What cannot be loaded is said before anything has changed."""
    acc, net, optimizer, scheduler, loader = prepared({"stage": 2, "accumulate": 2})
    before = training.weights(acc, net)
    found = []

    def attempt(where: Path) -> None:
        try:
            acc.load_state(where)
        except CheckpointError as error:
            found.append(str(error))
        torch.testing.assert_close(training.weights(acc, net), before, rtol=0, atol=0)

    own = Path(folder, "own")
    inputs, targets = next(iter(loader))
    with acc.accumulate(net):
        acc.backward(training.loss_of(net(inputs), targets))
        acc.save_state(own)  # in the middle of a window, which begins anew after a load
    acc.load_state(own)
    for _ in range(2):
        with acc.accumulate(net):
            acc.backward(training.loss_of(net(inputs), targets))
            optimizer.step()
    assert acc.sync_gradients
    before = training.weights(acc, net)
    states = next(own.glob("pytorch_model/*optim_states.pt"))
    content = bytearray(states.read_bytes())
    content[len(content) // 2] ^= 1
    states.write_bytes(content)
    attempt(own)
    end(acc)
    acc = training.accelerator(2)
    net = torch.nn.Linear(6, 3)
    net, optimizer, _ = acc.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(training.data(), batch_size=4))
    before = training.weights(acc, net)
    acc._schedulers.append(scheduler)
    attempt(Path(folder, "one"))
    return found


OTHER_SIZES: list[dict[str, Any]] = [
    {"stage": 0},
    {"stage": 1},
    {"stage": 2, "precision": "bf16"},
    {"stage": 2, "offload_optimizer_device": "cpu"},
    {"stage": 3},
    {"stage": 3, "precision": "bf16", "offload_optimizer_device": "cpu", "offload_param_device": "cpu"},
]


def with_two_groups(settings: dict[str, Any], seed: int = 0) -> tuple[Accelerator, Any, Any, Any]:
    acc = training.accelerator(**settings)
    net = training.model(seed)
    groups = [{"params": list(net[0].parameters())}, {"params": list(net[2:].parameters()), "lr": 0.005}]
    optimizer = torch.optim.AdamW(groups, lr=0.02)
    if settings["stage"] == 3:
        # So that the groups of ZeRO are others, too.
        acc.deepspeed_plugin.deepspeed_config["zero_optimization"]["sub_group_size"] = 80
    return (acc, *acc.prepare(net, optimizer, DataLoader(training.data(), batch_size=4)))


def two_steps(acc: Accelerator, net: Any, optimizer: Any) -> list[float]:
    """On the same batch on every process, so that their number does not matter."""
    losses = []
    for _ in range(2):
        inputs, targets = (tensor[:8] for tensor in training.data().tensors)
        loss = training.loss_of(net(inputs), targets)
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def around_two_steps(acc: Accelerator, net: Any, optimizer: Any) -> tuple[Any, Any]:
    """What was saved or loaded, and what two steps with the states of the optimizer make of it."""
    before = training.weights(acc, net), [group["lr"] for group in optimizer.param_groups]
    losses = two_steps(acc, net, optimizer)
    return before, (losses, training.weights(acc, net))


def saved_on_two(folder: str) -> list[Any]:
    found = []
    for number, settings in enumerate(OTHER_SIZES):
        acc, net, optimizer, _ = with_two_groups(settings)
        two_steps(acc, net, optimizer)
        acc.save_state(Path(folder, f"two_{number}"))
        found.append(around_two_steps(acc, net, optimizer))
        end(acc)
    return found


def loaded_on_others(folder: str, source: str, target: str | None) -> list[Any]:
    found = []
    for number, settings in enumerate(OTHER_SIZES):
        acc, net, optimizer, _ = with_two_groups(settings, seed=5)
        acc.load_state(Path(folder, f"{source}_{number}"))
        if target is not None:
            acc.save_state(Path(folder, f"{target}_{number}"))
        found.append(around_two_steps(acc, net, optimizer))
        end(acc)
    return found


def test_other_numbers_of_processes(tmp_path: Path) -> None:
    expected = run_world(saved_on_two, 2, str(tmp_path), timeout=100)[0]
    fewer = run_world(loaded_on_others, 1, str(tmp_path), "two", "one", timeout=100)[0]
    more = run_world(loaded_on_others, 3, str(tmp_path), "one", None, timeout=100)[0]
    for settings, (before, after), *others in zip(OTHER_SIZES, expected, fewer, more, strict=True):
        close = {"rtol": 1e-4, "atol": 1e-5} if "precision" not in settings else {"rtol": 0.02, "atol": 5e-3}
        for other_before, other_after in others:
            at = functools.partial("{}: {}".format, settings)
            torch.testing.assert_close(other_before, before, rtol=0, atol=0, msg=at)
            torch.testing.assert_close(other_after, after, **close, msg=at)


def frozen() -> tuple[Accelerator, torch.nn.Module]:
    acc = training.accelerator(3)
    net = training.model()
    net[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(net[2:].parameters())
    net, _, _ = acc.prepare(net, optimizer, DataLoader(training.data(), batch_size=4))
    return acc, net


def save_one(folder: str) -> None:
    acc, *_ = prepared({"stage": 2})
    acc.save_state(Path(folder, "one"))
    end(acc)
    acc, _ = frozen()
    acc.save_state(Path(folder, "frozen"))
    end(acc)


def refusals_of_two(folder: str) -> list[str]:
    acc, net = frozen()
    before = training.weights(acc, net)
    found = []
    for name in ("frozen", "one"):
        with pytest.raises(CheckpointError) as caught:
            acc.load_state(Path(folder, name))
        found.append(str(caught.value))
        torch.testing.assert_close(training.weights(acc, net), before, rtol=0, atol=0)
    return found


def test_what_does_not_fit_is_one_sentence(tmp_path: Path) -> None:
    run_world(save_one, 1, str(tmp_path), timeout=60)
    damage, shapes = run_world(refusals, 1, str(tmp_path), timeout=60)[0]
    assert "is damaged: its checksum differs from the one it was written with" in damage
    assert "are not those of this Linear: 0.bias (24,) for nothing" in shapes
    pieces, stage = run_world(refusals_of_two, 2, str(tmp_path), timeout=60)[0]
    assert "was saved on 1 processes, but there are 2: in stage 3, shards of frozen parameters" in pieces
    assert "was saved in another stage of ZeRO, whose shards differ from those of stage 3" in stage


def killed(folder: str, rank: int, moment: int) -> None:
    acc, net, optimizer, scheduler, loader = prepared({"stage": 3})
    batches = [batch for batch, _ in zip(loader, range(2), strict=False)]
    for number in range(2):
        steps(acc, net, optimizer, scheduler, batches[number : number + 1])
        weights = training.weights(acc, net)
        if acc.is_main_process:
            torch.save(weights, Path(folder, f"weights_{number}.pt"))
        acc.wait_for_everyone()
        if number == 1 and acc.process_index == rank:
            kill_at(moment)
        acc.save_state(Path(folder, "same"))


def is_old_or_new(folders: list[str]) -> list[bool]:
    acc, net, *_ = prepared({"stage": 3}, seed=9)
    found = []
    for folder in folders:
        acc.load_state(Path(folder, "same"))
        now = training.weights(acc, net)
        known = [torch.load(Path(folder, f"weights_{number}.pt")) for number in range(2)]
        found.append(any(all(torch.equal(now[name], one[name]) for name in now) for one in known))
    return found


def test_killed_during_a_save(tmp_path: Path) -> None:
    folders = []
    for rank, moment in ((0, 5), (0, 22), (1, 2)):
        folder = tmp_path / f"{rank}_{moment}"
        folder.mkdir()
        folders.append(str(folder))
        outcomes = world_outcomes(killed, 2, str(folder), rank, moment, timeout=60, grace=1.0)
        assert outcomes[rank].signal == "SIGKILL", outcomes[rank]
    assert run_world(is_old_or_new, 2, folders, timeout=60)[0] == [True, True, True]
