"""What a config leaves as "auto" is filled in; what does not fit is one error."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.config.deepspeed import DummyOptim, DummyScheduler
from accelerate.strategies.deepspeed_settings import Objects, fill
from tests.deepspeed import training
from tests.harness import run_world

AUTO: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 2,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
    },
    "bf16": {"enabled": "auto"},
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
}


class Wide(nn.Linear):
    class config:
        hidden_size = 10


def objects(optimizer: Any, scheduler: Any = None, **settings: Any) -> Objects:
    model = settings.pop("model", None) or Wide(2, 2)
    values = {"batch_sizes": [4, 8], "processes": 2, "split_batches": False, "accumulation_steps": 3, **settings}
    return Objects(model, optimizer, scheduler, **values)


def test_auto_is_what_the_script_has() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=AUTO)
    plugin.set_mixed_precision("no")
    optimizer = DummyOptim([], lr=0.5, weight_decay=0.25)
    fill(plugin, objects(optimizer, DummyScheduler(optimizer, total_num_steps=11, warmup_num_steps=0)))
    config = plugin.deepspeed_config
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (4, 3)
    assert (config["train_batch_size"], config["gradient_clipping"]) == (24, 1.0)
    assert config["optimizer"]["params"] == {"lr": 0.5, "weight_decay": 0.25, "torch_adam": True}
    assert config["scheduler"]["params"] == {
        "warmup_min_lr": 0,
        "warmup_max_lr": 0.5,
        "warmup_num_steps": 1,
        "total_num_steps": 6,
    }
    zero = config["zero_optimization"]
    assert (zero["reduce_bucket_size"], zero["stage3_prefetch_bucket_size"]) == (100, 90)
    assert zero["stage3_param_persistence_threshold"] == 100


def test_split_batches_are_shared_out_already() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=AUTO, is_train_batch_min=False)
    plugin.set_mixed_precision("no")
    optimizer = DummyOptim([])
    fill(plugin, objects(optimizer, DummyScheduler(optimizer, total_num_steps=11), split_batches=True))
    assert plugin.get_value("train_micro_batch_size_per_gpu") == 4
    assert plugin.get_value("scheduler.params.total_num_steps") == 11


def test_everything_that_does_not_fit_is_one_error() -> None:
    config = {**AUTO, "train_batch_size": 7, "train_micro_batch_size_per_gpu": 4, "zero_something": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    own = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(own, 1)
    with pytest.raises(ValueError) as caught:
        fill(plugin, objects(own, schedule, model=nn.Linear(1, 1)))
    text = str(caught.value)
    for part in (
        "'optimizer' is in the config, and the script has made SGD",
        "'scheduler' is in the config, and the script has made a StepLR",
        "train_batch_size is 7 in the config, and 4 samples x 3 accumulation steps x 2 processes are 24",
        "Linear has neither `config.hidden_size`",
        "zero_something is 'auto', and there is nothing",
    ):
        assert part in text, text
    assert plugin.is_auto("gradient_clipping"), "nothing was filled in"


def test_stand_ins_need_what_they_stand_for() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2)
    optimizer = DummyOptim([])
    with pytest.raises(ValueError, match="no 'optimizer' that it stands for") as caught:
        fill(plugin, objects(optimizer, DummyScheduler(optimizer), batch_sizes=[]))
    assert "no loader was prepared" in str(caught.value)
    assert "no 'scheduler' it stands for" in str(caught.value)
    with pytest.raises(ValueError, match="needs a DummyScheduler"):
        schedule = torch.optim.lr_scheduler.StepLR(torch.optim.SGD([nn.Parameter(torch.ones(1))]), 1)
        fill(DeepSpeedPlugin(hf_ds_config={**AUTO, "scheduler": {}}), objects(optimizer, schedule))


def trained_by_a_file(path: str) -> dict[str, Any]:
    acc = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision="no")
    assert acc.gradient_accumulation_steps == 1, "the file counts"
    net = training.model()
    optimizer = DummyOptim(net.parameters(), lr=0.02, weight_decay=0.0)
    scheduler = DummyScheduler(optimizer, total_num_steps=40, warmup_num_steps=4)
    loader = DataLoader(training.data(), batch_size=4)
    # In any order, and loaders before the rest.
    loader = acc.prepare(loader)
    scheduler, net, optimizer = acc.prepare(scheduler, net, optimizer)
    rates = []
    for inputs, targets in loader:
        loss = training.loss_of(net(inputs), targets)
        acc.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        rates.append(scheduler.get_last_lr()[0])
    assert not acc.optimizer_step_was_skipped
    assert type(scheduler).__name__ == "DeepSpeedSchedulerWrapper"
    assert type(optimizer).__name__ == "DeepSpeedOptimizerWrapper"
    gathered = acc.gather_for_metrics(torch.tensor([acc.process_index]))
    return {"rates": rates, "loss": loss.item(), "stage": acc.deepspeed_plugin.zero_stage, "all": gathered.tolist()}


def test_optimizer_and_scheduler_of_a_file(tmp_path: Path) -> None:
    config = {**AUTO, "gradient_accumulation_steps": 1}
    zero = {"stage": 3, "reduce_bucket_size": 100, "stage3_prefetch_bucket_size": 90}
    config["zero_optimization"] = {**zero, "stage3_param_persistence_threshold": 1}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    variables = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(path),
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto",
    }
    found = run_world(trained_by_a_file, 2, str(path), env=variables, timeout=120)
    assert found[0]["stage"] == 3
    assert found[0]["all"] == [0, 1]
    rates = found[0]["rates"]
    assert max(rates) > rates[-1] and rates[0] < max(rates), rates


def refused() -> list[str]:
    sentences = []

    def attempt(action: Any) -> None:
        try:
            action()
        except Exception as error:
            sentences.append(f"{type(error).__name__}: {error}")
        else:
            sentences.append("nothing")

    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    acc = training.accelerator(2)
    net = training.model()
    optimizer = torch.optim.AdamW(net.parameters())
    attempt(lambda: acc.prepare(optimizer))
    attempt(lambda: acc.prepare(net, optimizer, torch.optim.SGD(net.parameters(), lr=0.1)))
    attempt(lambda: Accelerator(cpu=True, deepspeed_plugin=training.plugin(3)))
    net, optimizer, loader = acc.prepare(net, optimizer, DataLoader(training.data(), batch_size=4))
    inputs, targets = next(iter(loader))
    acc.backward(training.loss_of(net(inputs), targets))
    attempt(lambda: acc.backward(training.loss_of(net(inputs), targets)))
    attempt(lambda: acc.clip_grad_value_(net.parameters(), 1.0))
    attempt(lambda: acc.clip_grad_norm_(net.parameters(), 1.0, norm_type=1))
    attempt(lambda: optimizer.step(lambda: 1.0))
    optimizer.zero_grad()  # what was not stepped with is gone
    before = training.weights(acc, net)
    optimizer.step()
    torch.testing.assert_close(training.weights(acc, net), before, rtol=0, atol=0)
    with acc.no_sync(net):
        acc.backward(training.loss_of(net(inputs), targets))
    attempt(optimizer.step)
    acc.backward(training.loss_of(net(inputs), targets))
    optimizer.step()
    acc.free_memory()
    acc.state._reset_state()
    attempt(lambda: training.accelerator(2, precision="fp16"))
    return sentences


def test_refusals_are_one_sentence() -> None:
    found = run_world(refused, 1, timeout=120)[0]
    expected = (
        "ValueError: DeepSpeed makes one engine of a model and its optimizer",
        "ValueError: This Sequential has 2 optimizers",
        "NotImplementedError: This process has its DeepSpeed plugins",
        "RuntimeError: DeepSpeed would lose the gradients",
        "ValueError: DeepSpeed clips gradients by their norm alone",
        "ValueError: DeepSpeed clips gradients by their norm of type 2",
        "ValueError: DeepSpeed's optimizers take no closure",
        "RuntimeError: The gradients of this DeepSpeed engine are not complete",
        "ValueError: DeepSpeed has no fp16 on this cpu",
    )
    for sentence, start in zip(found, expected, strict=True):
        assert sentence.startswith(start), found


def without_what_it_needs(folder: str) -> dict[str, str | None]:
    """What is said where operations of DeepSpeed cannot be compiled: before anything else is done."""
    from deepspeed.ops.op_builder.cpu import AsyncIOBuilder

    def said(stage: int, **settings: Any) -> str:
        acc = training.accelerator(stage, **settings)
        net = training.model()
        with pytest.raises(ImportError) as caught:
            acc.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(training.data(), batch_size=4))
        acc.state._reset_state(reset_partial_state=False)
        return str(caught.value)

    found: dict[str, str | None] = {"disk": None}
    if not AsyncIOBuilder().is_compatible(verbose=False):
        paths = {"offload_optimizer_nvme_path": folder, "offload_param_nvme_path": folder}
        found["disk"] = said(3, offload_optimizer_device="nvme", offload_param_device="nvme", **paths)
    path, os.environ["PATH"] = os.environ["PATH"], "/nothing"
    found["exchange"] = said(2)
    os.environ["PATH"] = path
    acc = training.accelerator(2)
    net = training.model()
    used = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 6)).sum().backward()
    used.step()
    with pytest.warns(UserWarning, match="states of this AdamW are not taken over"):
        acc.prepare(net, used, DataLoader(training.data(), batch_size=4))
    acc.save_state(Path(folder, "state"))  # DeepSpeed by itself fails where old states are left
    acc.free_memory()
    acc.state._reset_state(reset_partial_state=False)
    os.environ["PATH"] = "/nothing"
    found["optimizer"] = said(2, offload_optimizer_device="cpu")
    return found


def test_operations_that_cannot_be_compiled_are_one_sentence(tmp_path: Path) -> None:
    found = run_world(without_what_it_needs, 1, str(tmp_path), timeout=60)[0]
    ninja = "due to ninja not being installed.): install g++ and ninja"
    assert found["exchange"] is not None and ninja in found["exchange"]
    assert found["exchange"].startswith(
        "Training on a CPU needs an operation of DeepSpeed that cannot be compiled here"
    )
    assert found["optimizer"] is not None and ninja in found["optimizer"]
    assert "zero_force_ds_cpu_optimizer=false" in found["optimizer"]
    if found["disk"] is None:
        pytest.skip("needs a machine without libaio's headers")
    assert found["disk"].startswith("Offloading to a disk needs DeepSpeed's async_io, which cannot be compiled here")
