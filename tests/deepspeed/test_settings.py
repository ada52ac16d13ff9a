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
from accelerate.state import AcceleratorState
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
        "'optimizer' is in the config, but the script has created SGD",
        "'scheduler' is in the config, but the script has created a StepLR",
        "train_batch_size is 7 in the config, but 4 samples x 3 accumulation steps x 2 processes are 24",
        "Linear has neither `config.hidden_size`",
        "zero_something is 'auto', but there is nothing",
    ):
        assert part in text, text
    assert plugin.is_auto("gradient_clipping"), "nothing was filled in"


def test_stand_ins_need_what_they_stand_for() -> None:
    plugin = DeepSpeedPlugin(zero_stage=2)
    optimizer = DummyOptim([])
    with pytest.raises(ValueError, match="no 'optimizer' that it stands for") as caught:
        fill(plugin, objects(optimizer, DummyScheduler(optimizer), batch_sizes=[]))
    assert "no loader was prepared" in str(caught.value)
    assert "no 'scheduler' that it stands for" in str(caught.value)
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
    attempt(lambda: training.accelerator(2, enable_msamp=True))
    AcceleratorState._reset_state()
    other = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}})
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    attempt(lambda: Accelerator(cpu=True, deepspeed_plugins={"one": training.plugin(2), "other": other}))
    return sentences


def test_refusals_are_one_sentence() -> None:
    found = run_world(refused, 1, timeout=120)[0]
    expected = (
        "ValueError: DeepSpeed makes one engine of a model and its optimizer",
        "ValueError: This Sequential has 2 optimizers",
        "NotImplementedError: The first `Accelerator()` of this process has set its DeepSpeed plugins",
        "RuntimeError: DeepSpeed would lose the gradients",
        "ValueError: DeepSpeed clips gradients only by their norm:",
        "ValueError: DeepSpeed clips gradients only by their 2-norm",
        "ValueError: DeepSpeed's optimizers take no closure",
        "RuntimeError: The gradients of this DeepSpeed engine are not complete",
        "ValueError: DeepSpeed has no fp16 on this cpu",
        "NotYetSupported: MS-AMP with DeepSpeed (`enable_msamp`) is not part of this version",
        "ValueError: DeepSpeed has no fp16 on this cpu",
    )
    for sentence, start in zip(found, expected, strict=True):
        assert sentence.startswith(start), found


def joint_losses() -> list[str]:
    """What is said of a loss of two engines: in stage 2 while gradients of one wait, and in fp16."""
    from deepspeed.accelerator import get_accelerator

    acc, first, second, optimizers = two_engines("no")
    inputs = torch.ones(4, 6)
    before = training.weights(acc, second)
    acc.backward(first(inputs).sum())
    sentences = []
    for joint in (first(inputs).sum() + second(inputs).sum(), second(inputs).sum() + first(inputs).sum()):
        with pytest.raises(RuntimeError) as caught:
            acc.backward(joint)
        sentences.append(str(caught.value))
    optimizers[1].step()
    torch.testing.assert_close(training.weights(acc, second), before, rtol=0, atol=0)
    optimizers[0].step()
    acc.backward(first(inputs).sum() + second(inputs).sum())
    acc.free_memory()
    acc.state._reset_state(reset_partial_state=False)

    with pytest.MonkeyPatch.context() as patch:  # DeepSpeed says no where fp16 is slow; torch computes it everywhere
        patch.setattr(type(get_accelerator()), "is_fp16_supported", lambda self: True)
        acc, first, second, optimizers = two_engines("fp16")
        with pytest.raises(NotImplementedError) as refusal:
            acc.backward(first(inputs).sum() + second(inputs).sum())
        sentences.append(str(refusal.value))
        for net, optimizer in zip((first, second), optimizers, strict=True):
            acc.backward(net(inputs).float().mean())
            optimizer.step()
        acc.free_memory()
    return sentences


def two_engines(precision: str) -> tuple[Accelerator, Any, Any, list[Any]]:
    acc = training.accelerator(2, precision=precision)
    nets = [training.model(seed) for seed in (1, 2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.1) for net in nets]
    first, second, *prepared, _ = acc.prepare(*nets, *optimizers, DataLoader(training.data(), batch_size=4))
    return acc, first, second, prepared


def test_a_loss_of_two_engines_loses_no_gradients() -> None:
    waits, waits_too, fp16 = run_world(joint_losses, 1, timeout=60)[0]
    assert waits.startswith("DeepSpeed would lose the gradients of the backward before this one")
    assert waits_too == waits
    assert fp16.startswith("A loss of several DeepSpeed engines in fp16 is not part of this version")


def unlikely() -> list[str]:
    """What trains otherwise than a script may expect, or not at all."""
    sentences = []

    def prepared(stage: int, net: nn.Module, **settings: Any) -> tuple[Accelerator, Any, Any]:
        acc = training.accelerator(stage, **settings)
        loader = DataLoader(training.data(), batch_size=4)
        return acc, *acc.prepare(net, torch.optim.AdamW(net.parameters()), loader)[:2]

    def end(acc: Accelerator) -> None:
        acc.free_memory()
        acc.state._reset_state(reset_partial_state=False)

    for stage, settings in ((2, {"offload_param_device": "cpu"}), (0, {"offload_optimizer_device": "cpu"})):
        with pytest.warns(UserWarning, match="nothing is offloaded") as warned:
            acc, net, optimizer = prepared(stage, training.model(), **settings)
        sentences += [str(each.message) for each in warned if "is offloaded" in str(each.message)]
        assert "CPU" not in type(net.basic_optimizer).__name__
        end(acc)
    acc, net, optimizer = prepared(2, training.model())
    net(torch.ones(4, 6)).sum().backward()
    with pytest.warns(UserWarning, match="did nothing") as warned:
        optimizer.step()
    sentences += [str(each.message) for each in warned]
    optimizer.step()  # said once
    end(acc)
    with pytest.raises(ValueError) as caught:
        prepared(2, training.model().requires_grad_(False))
    sentences.append(str(caught.value))
    return sentences


def test_what_trains_nothing_or_stays_where_it_is_is_said() -> None:
    assert run_world(unlikely, 1, timeout=120)[0] == [
        "DeepSpeed has offload_param for stage 3 of ZeRO, but this is stage 2: nothing is offloaded.",
        "DeepSpeed has offload_optimizer for stages 1, 2, 3 of ZeRO, but this is stage 0: nothing is offloaded.",
        "`optimizer.step()` did nothing, because DeepSpeed steps only with gradients of `accelerator.backward(loss)`: "
        "call that instead of `loss.backward()`.",
        "None of the parameters that this AdamW trains needs a gradient, so DeepSpeed has nothing to train: prepare "
        "the Sequential without an optimizer, or unfreeze some of them.",
    ]


def wrong_disks(folder: str) -> list[str]:
    sentences = []
    for stage, settings in (
        (3, {"offload_optimizer_device": "nvme"}),
        (2, {"offload_optimizer_device": "nvme", "offload_optimizer_nvme_path": folder}),
    ):
        acc = training.accelerator(stage, **settings)
        net = training.model()
        with pytest.raises(ValueError) as caught:
            acc.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(training.data(), batch_size=4))
        sentences.append(str(caught.value))
        acc.state._reset_state(reset_partial_state=False)
    return sentences


def test_a_disk_needs_a_folder_and_stage_3(tmp_path: Path) -> None:
    found = run_world(wrong_disks, 1, str(tmp_path), timeout=60)[0]
    assert found[0].startswith("offload_optimizer is set to a disk, but the DeepSpeed config has no folder for it")
    assert found[1].startswith("DeepSpeed would keep offload_optimizer in memory, not on a disk, in stage 2")


def two_stand_ins() -> None:
    config = {**AUTO, "zero_optimization": {"stage": 2}}
    del config["scheduler"]
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    acc = Accelerator(cpu=True, deepspeed_plugin=plugin)
    nets = [training.model(seed) for seed in (1, 2)]
    stand_ins = [DummyOptim(net.parameters(), lr=rate) for net, rate in zip(nets, (0.25, 0.5), strict=True)]
    *_, first, second = acc.prepare(DataLoader(training.data(), batch_size=4), *nets, *stand_ins)
    assert [each.param_groups[0]["lr"] for each in (first, second)] == [0.25, 0.5]
    assert plugin.deepspeed_config["optimizer"]["params"]["lr"] == 0.5, "as the last engine has it"
    assert plugin.deepspeed_config["gradient_clipping"] == 1.0
    assert [each._stepper.fixed_clip for each in (first, second)] == [None, None]
    plugin.deepspeed_config["gradient_clipping"] = 3.0
    net = training.model()
    _, third = acc.prepare(net, DummyOptim(net.parameters(), lr=0.75))
    assert (third.param_groups[0]["lr"], third._stepper.fixed_clip) == (0.75, 3.0)
    acc.free_memory()


def test_auto_is_filled_in_for_each_engine() -> None:
    run_world(two_stand_ins, 1, timeout=60)


def without_what_it_needs(folder: str) -> dict[str, str]:
    """What is said where operations of DeepSpeed cannot be compiled: before anything else is done."""
    from deepspeed import git_version_info

    def said(stage: int, **settings: Any) -> str:
        acc = training.accelerator(stage, **settings)
        net = training.model()
        with pytest.raises(ImportError) as caught:
            acc.prepare(net, torch.optim.AdamW(net.parameters()), DataLoader(training.data(), batch_size=4))
        acc.state._reset_state(reset_partial_state=False)
        return str(caught.value)

    path, os.environ["PATH"] = os.environ["PATH"], "/nothing"
    found = {"disk": said(3, offload_optimizer_device="nvme", offload_optimizer_nvme_path=folder)}
    found["exchange"] = said(2)
    with pytest.MonkeyPatch.context() as patch:  # as in a wheel with compiled operations, made for another torch
        patch.setitem(git_version_info.installed_ops, "deepspeed_shm_comm", True)
        patch.setattr(git_version_info, "accelerator_name", "cpu")
        patch.setattr(git_version_info, "torch_info", {"version": "1.9"})
        found["another torch"] = said(2)
    os.environ["PATH"] = path
    acc = training.accelerator(2)
    net = training.model()
    used = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 6)).sum().backward()
    used.step()
    with pytest.warns(UserWarning, match="states of this AdamW are dropped"):
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
    assert ninja in found["exchange"]
    assert found["exchange"].startswith(
        "Training on a CPU needs an operation of DeepSpeed that cannot be compiled here"
    )
    assert f"DeepSpeed that was compiled for another torch than {torch.__version__} (" in found["another torch"]
    assert found["another torch"].endswith("install deepspeed again, in this environment.")
    assert ninja in found["optimizer"]
    assert "zero_force_ds_cpu_optimizer=false" in found["optimizer"]
    assert found["disk"].startswith("Offloading to a disk needs DeepSpeed's async_io, which cannot be compiled here")


def asked_in_vain() -> list[str]:
    """What is said of the second of two models, or of the optimizer of a config, while no engine is made."""
    import deepspeed

    sentences = []

    def attempt(plugin: DeepSpeedPlugin, make: Any) -> None:
        os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
        acc = Accelerator(cpu=True, deepspeed_plugin=plugin)
        first, second = training.model(1), training.model(2)
        loader = DataLoader(training.data(), batch_size=4)
        with pytest.MonkeyPatch.context() as patch, pytest.raises((ValueError, ImportError)) as caught:
            patch.setattr(deepspeed, "initialize", lambda **kwargs: pytest.fail("an engine is made"))
            acc.prepare(loader, first, *make(first, second))
        sentences.append(str(caught.value))
        assert type(first) is nn.Sequential
        acc.state._reset_state(reset_partial_state=False)

    def adam(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters())

    def sgd(net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=0.1)

    attempt(training.plugin(2), lambda one, two: (adam(one), adam(two)))
    attempt(training.plugin(2), lambda one, two: (adam(one), two, adam(two), sgd(two)))
    attempt(training.plugin(2, offload_optimizer_device="cpu"), lambda one, two: (adam(one), two, sgd(two)))
    config = {**AUTO, "zero_optimization": {"stage": 2}, "scheduler": {}}
    for kind in ("SGD", "Nothing", "AdamW"):
        if kind == "AdamW":  # compiled at its first use, which cannot be
            os.environ["PATH"] = "/nothing"
        config["optimizer"] = {"type": kind, "params": {"lr": "auto"}}
        own = DeepSpeedPlugin(hf_ds_config=config, gradient_accumulation_steps=1)
        attempt(own, lambda one, two: (DummyOptim(one.parameters()),))
    return sentences


def test_what_is_wrong_is_said_before_any_engine_is_made() -> None:
    found = run_world(asked_in_vain, 1, timeout=60)[0]
    expected = (
        "DeepSpeed makes one engine of a model and its optimizer, but AdamW came without its model",
        "This Sequential has 2 optimizers",
        "DeepSpeed has no SGD on the host: use Adam, AdamW or Adagrad",
        "DeepSpeed does not vouch for ZeRO with the optimizer 'SGD' of its config",
        "The DeepSpeed config asks for an optimizer 'Nothing'",
        "The optimizer of the DeepSpeed config needs an operation of DeepSpeed that cannot be compiled here",
    )
    for sentence, start in zip(found, expected, strict=True):
        assert sentence.startswith(start), found
    assert "zero_allow_untested_optimizer" in found[3]
    assert "torch_adam" in found[5]


def trained_by_untested() -> None:
    config = {**AUTO, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True}
    config["optimizer"] = {"type": "SGD", "params": {"lr": "auto"}}
    del config["scheduler"]
    acc = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    net = training.model()
    net, optimizer, loader = acc.prepare(
        net, DummyOptim(net.parameters(), lr=0.5), DataLoader(training.data(), batch_size=4)
    )
    inputs, targets = next(iter(loader))
    before = training.loss_of(net(inputs), targets)
    acc.backward(before)
    optimizer.step()
    assert training.loss_of(net(inputs), targets) < before
    acc.free_memory()


def test_an_untested_optimizer_that_is_allowed_trains() -> None:
    run_world(trained_by_untested, 1, timeout=60)


def several_numbers() -> list[str]:
    """Plugins that accumulate differently: the loop follows the first that trains, and a second one has to agree."""
    sentences = []

    def config(steps: int | str | None) -> dict[str, Any]:
        own = {} if steps is None else {"gradient_accumulation_steps": steps}
        return {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": "auto", **own}

    def pair(seed: int) -> tuple[Any, Any]:
        net = training.model(seed)
        return net, torch.optim.AdamW(net.parameters())

    steps = {"judge": None, "one": 4, "two": 2, "open": "auto"}
    plugins = {
        name: DeepSpeedPlugin(hf_ds_config=config(number), zero3_init_flag=False) for name, number in steps.items()
    }
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    acc = Accelerator(cpu=True, deepspeed_plugins=plugins)
    acc.prepare(DataLoader(training.data(), batch_size=4))
    acc.prepare(training.model())  # which is not trained
    acc.state.select_deepspeed_plugin("one")
    acc.prepare(*pair(1))
    assert acc.gradient_accumulation_steps == 4
    acc.state.select_deepspeed_plugin("two")
    with pytest.raises(ValueError) as caught:
        acc.prepare(*pair(2))
    sentences.append(str(caught.value))
    acc.prepare(training.model())  # its config need not agree
    acc.state.select_deepspeed_plugin("open")
    net, _ = acc.prepare(*pair(3))
    assert net.gradient_accumulation_steps() == acc.gradient_accumulation_steps == 4
    acc.gradient_accumulation_steps = 2
    net, _ = acc.prepare(*pair(4))
    assert net.gradient_accumulation_steps() == 2
    acc.free_memory()
    acc.state._reset_state(reset_partial_state=False)

    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    both = {name: DeepSpeedPlugin(hf_ds_config=config(number)) for name, number in (("a", 2), ("b", 3))}
    acc = Accelerator(cpu=True, deepspeed_plugins=both, gradient_accumulation_steps=2)
    acc.state.select_deepspeed_plugin("b")
    acc.prepare(DataLoader(training.data(), batch_size=4))
    with pytest.warns(UserWarning) as warned:
        acc.prepare(*pair(1))
    sentences += [text for each in warned if "accumulation" in (text := str(each.message))]
    assert acc.gradient_accumulation_steps == 3
    acc.free_memory()
    return sentences


def test_plugins_that_accumulate_differently() -> None:
    differs, follows = run_world(several_numbers, 1, timeout=60)[0]
    assert differs.startswith(
        "The DeepSpeed plugin 'two' says gradient_accumulation_steps=2, but the engines that were"
    )
    assert "accumulate 4:" in differs
    assert follows.startswith(
        "The DeepSpeed config says gradient_accumulation_steps=3, but the Accelerator was given 2"
    )
