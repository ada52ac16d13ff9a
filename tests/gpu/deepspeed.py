"""ZeRO on one GPU: a world of one process over NCCL, where every stage runs all the same.

With deepspeed on the path: `PYTHONPATH=src python3 -m tests.gpu.deepspeed [name ...]`. The released package is that of
the same python3, without `src`.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader

from tests.gpu.checks import CHECKS, Samples, check

DEVICE = torch.device("cuda")
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# How far losses may be apart that were computed in the same steps, in another order.
CLOSE = {"no": 1e-4, "bf16": 4e-2, "fp16": 2e-3}
STAGES = (0, 1, 2, 3)
ON_THE_HOST = {"device": "cpu", "pin_memory": True}
LOSSES = "--losses"


def _network() -> torch.nn.Module:
    torch.manual_seed(0)
    block = [torch.nn.Linear(256, 256), torch.nn.GELU()]
    layers = [copy.deepcopy(layer) for _ in range(4) for layer in block]
    return torch.nn.Sequential(torch.nn.Linear(16, 256), *layers, torch.nn.LayerNorm(256), torch.nn.Linear(256, 2))


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    # With a large eps: else the sign alone counts of a small gradient, which a rounding may change.
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, eps=1e-2)


def _config(stage: int, accumulate: int = 1, **zero: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
        "gradient_clipping": 1.0,
        "gradient_accumulation_steps": accumulate,
        "train_micro_batch_size_per_gpu": 8,
        "train_batch_size": 8 * accumulate,
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "initial_scale_power": 10, "hysteresis": 1},
        "zero_allow_untested_optimizer": True,
    }


def _prepared(precision: str, config: dict[str, Any]) -> tuple[Any, ...]:
    from accelerate import Accelerator, DeepSpeedPlugin

    plugin = DeepSpeedPlugin(hf_ds_config=config, zero3_init_flag=False)
    accelerator = Accelerator(mixed_precision=precision, deepspeed_plugin=plugin)
    assert accelerator.device.type == DEVICE.type, accelerator.device
    model = _network()
    optimizer = _optimizer(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    loader = DataLoader(Samples(128), batch_size=8)
    return (accelerator, *accelerator.prepare(model, optimizer, scheduler, loader))


def _steps(accelerator: Any, model: Any, optimizer: Any, scheduler: Any, batches: Any) -> list[float]:
    losses = []
    for x, y in batches:
        with accelerator.accumulate(model):
            logits = model(x.to(DTYPES[accelerator.mixed_precision]))
            loss = F.cross_entropy(logits.float(), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _end(accelerator: Any) -> None:
    """The group of processes stays: DeepSpeed keeps groups that it has made of it."""
    accelerator.free_memory()
    accelerator.state._reset_state(reset_partial_state=False)


def _trained(precision: str, config: dict[str, Any]) -> list[float]:
    accelerator, model, optimizer, scheduler, loader = _prepared(precision, config)
    losses = _steps(accelerator, model, optimizer, scheduler, loader)
    _end(accelerator)
    return losses


def _plain(precision: str, accumulate: int = 1) -> list[float]:
    """Without any package: weights in 16 bits, and those that are trained in 32."""
    dtype = DTYPES[precision]
    large = _network().to(DEVICE)
    small = copy.deepcopy(large).to(dtype)
    optimizer = _optimizer(large)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + 0.1 * step))
    scale = 1024.0 if precision == "fp16" else 1.0
    losses = []
    for number, (x, y) in enumerate(DataLoader(Samples(128), batch_size=8)):
        loss = F.cross_entropy(small(x.to(DEVICE, dtype)).float(), y.to(DEVICE))
        (loss * scale / accumulate).backward()
        losses.append(loss.item())
        if number % accumulate < accumulate - 1:
            continue
        for one, other in zip(large.parameters(), small.parameters(), strict=True):
            assert other.grad is not None
            one.grad, other.grad = other.grad.float() / scale, None
        torch.nn.utils.clip_grad_norm_(large.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for one, other in zip(large.parameters(), small.parameters(), strict=True):
                other.copy_(one)
    return losses


def _close(found: list[float], expected: list[float], tolerance: float, where: str) -> None:
    apart = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    assert apart < tolerance, f"{where}: {apart} apart\n{found}\n{expected}"


def _every_stage(name: str) -> None:
    for accumulate in (1, 2):
        expected = _plain(name, accumulate)
        for stage in STAGES:
            found = _trained(name, _config(stage, accumulate))
            _close(found, expected, CLOSE[name], f"{name}, stage {stage}, {accumulate} micro-batches")


@check
def every_stage_trains_as_plain_pytorch() -> None:
    _every_stage("no")


@check
def every_stage_trains_as_plain_pytorch_in_bf16() -> None:
    _every_stage("bf16")


@check
def every_stage_trains_as_plain_pytorch_in_fp16() -> None:
    _every_stage("fp16")


@check
def a_host_that_runs_ahead_trains_the_same() -> None:
    """Without DeepSpeed's timer nothing makes the host wait: losses are read when all is over."""
    for stage in STAGES:
        found = []
        for timers in ({"throughput": {"enabled": True}}, None):
            config = _config(stage) if timers is None else {**_config(stage), "timers": timers}
            accelerator, model, optimizer, scheduler, loader = _prepared("bf16", config)
            assert model.tput_timer.config.enabled is (timers is not None)
            losses = []
            for _ in range(4):
                for x, y in loader:
                    losses.append(F.cross_entropy(model(x).float(), y))
                    accelerator.backward(losses[-1])
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
            found.append(torch.stack(losses).tolist())
            _end(accelerator)
        assert found[0] == found[1], f"stage {stage}:\n{found[0]}\n{found[1]}"


@check
def losses_are_those_of_the_released_package() -> None:
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if Path(path).name != "src"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1)}
    env.pop("ACCELERATE_USE_DEEPSPEED", None)
    run = [sys.executable, "-m", "tests.gpu.deepspeed", LOSSES]
    done = subprocess.run(run, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    from accelerate import __version__

    assert said["version"] != __version__, f"a released package is needed beside this one, and found was {said}"
    for key, expected in said["losses"].items():
        precision, stage = key.split()
        _close(_trained(precision, _config(int(stage))), expected, CLOSE[precision], key)
    for stage, expected in said["trainer"].items():
        _close(_trainer_losses(int(stage)), expected, CLOSE["no"], f"the Trainer in stage {stage}")


def print_losses() -> None:
    """Those of every stage, and of transformers' Trainer, as JSON: with whatever package is called accelerate."""
    from accelerate import __version__

    # Not without ZeRO: there DeepSpeed by itself takes a first step without gradients, and forgets to scale losses.
    losses = {
        f"{precision} {stage}": _trained(precision, _config(stage)) for precision in DTYPES for stage in STAGES[1:]
    }
    trainer = {stage: _trainer_losses(stage) for stage in (2, 3)}
    print("\n" + json.dumps({"version": __version__, "losses": losses, "trainer": trainer}), flush=True)


@check
def fp16_skips_steps() -> None:
    for stage in STAGES:
        accelerator, model, optimizer, scheduler, loader = _prepared("fp16", _config(stage))
        skipped, rates = [], []
        for number, (x, y) in zip(range(4), loader, strict=False):
            loss = F.cross_entropy(model(x).float(), y) * (float("inf") if number == 1 else 1.0)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
            rates.append(scheduler.get_last_lr()[0])
        assert skipped == [False, True, False, False], (stage, skipped)
        assert rates[1] == rates[0] > rates[2] > rates[3], (stage, rates)
        losses = [_steps(accelerator, model, optimizer, scheduler, loader) for _ in range(3)]
        assert sum(losses[-1]) < sum(losses[0]), (stage, losses)
        _end(accelerator)


@check
def clipping_and_items_are_exact() -> None:
    """With a norm that the script says, and a loss by its number of items, in two micro-batches."""
    batches = [batch for batch, _ in zip(DataLoader(Samples(128), batch_size=8), range(4), strict=False)]
    plain = _network().to(DEVICE)
    optimizer: Any = _optimizer(plain)
    expected = []
    for first, second in zip(batches[::2], batches[1::2], strict=True):
        x, y = (torch.cat(parts).to(DEVICE) for parts in zip((first[0][:3], first[1][:3]), second, strict=True))
        F.cross_entropy(plain(x), y).backward()
        expected.append(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1).item())
        optimizer.step()
        optimizer.zero_grad()
    for stage in STAGES:
        config = {**_config(stage, 2), "gradient_clipping": "auto"}
        accelerator, model, optimizer, *_ = _prepared("no", config)
        norms = []
        for number, (x, y) in enumerate(batches):
            rows = 3 if number % 2 == 0 else 8
            with accelerator.accumulate(model):
                loss = F.cross_entropy(model(x[:rows].to(DEVICE)), y[:rows].to(DEVICE), reduction="sum")
                accelerator.backward(loss, num_items=rows)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
                optimizer.step()
                optimizer.zero_grad()
        _end(accelerator)
        _close(norms, expected, 2e-5, f"stage {stage}")


@check
def training_is_resumed_exactly() -> None:
    for precision in ("bf16", "fp16"):
        for stage in STAGES:
            with tempfile.TemporaryDirectory() as folder:
                accelerator, model, optimizer, scheduler, loader = _prepared(precision, _config(stage))
                batches = list(loader)
                _steps(accelerator, model, optimizer, scheduler, batches[:6])
                accelerator.save_state(folder, async_save=stage % 2 == 1)
                expected = _steps(accelerator, model, optimizer, scheduler, batches[6:])
                accelerator.wait_for_checkpoint()
                _end(accelerator)
                accelerator, model, optimizer, scheduler, loader = _prepared(precision, _config(stage))
                _steps(accelerator, model, optimizer, scheduler, batches[:2])
                accelerator.load_state(folder)
                found = _steps(accelerator, model, optimizer, scheduler, batches[6:])
                _end(accelerator)
                assert found == expected, f"{precision}, stage {stage}:\n{found}\n{expected}"


@check
def whole_weights_of_pieces() -> None:
    from safetensors.torch import load_file

    wanted = {name: value.to(torch.bfloat16) for name, value in _network().state_dict().items()}
    for stage in STAGES:
        config = _config(stage, stage3_gather_16bit_weights_on_model_save=True)
        accelerator, model, *_ = _prepared("bf16", config)
        found = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_model(model, folder)
            torch.testing.assert_close(load_file(Path(folder, "model.safetensors")), wanted, rtol=0, atol=0)
        _end(accelerator)


def _trainer_losses(stage: int | None) -> list[float]:
    """Those of transformers' Trainer. stage: None for no DeepSpeed."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

    class Lines(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 32

        def __getitem__(self, index: int) -> Any:
            tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
            return {"input_ids": tokens, "labels": tokens}

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = LlamaConfig(vocab_size=64, max_position_embeddings=8, pad_token_id=0, **sizes)
    zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
    automatic = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size")
    config = {"zero_optimization": zero, **dict.fromkeys((*automatic, "train_micro_batch_size_per_gpu"), "auto")}
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            report_to=[],
            deepspeed=None if stage is None else config,
            max_steps=6,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            adam_epsilon=1e-2,
            logging_steps=1,
            save_strategy="no",
            disable_tqdm=True,
        )
        set_seed(0)
        trainer = Trainer(LlamaForCausalLM(shape), arguments, train_dataset=Lines())
        trainer.train()
        trainer.save_model(folder)
        assert Path(folder, "model.safetensors").exists()
    _end(trainer.accelerator)
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@check
def trains_models_of_transformers() -> None:
    expected = _trainer_losses(None)
    for stage in (2, 3):
        _close(_trainer_losses(stage), expected, 2e-3, f"stage {stage}")


@check
def states_and_parameters_lie_on_the_host() -> None:
    """With DeepSpeed's own Adam for the host, which it compiles at its first use."""
    expected = _plain("bf16")
    for stage, zero in (
        (1, {"offload_optimizer": ON_THE_HOST}),
        (2, {"offload_optimizer": ON_THE_HOST}),
        (3, {"offload_optimizer": ON_THE_HOST, "offload_param": ON_THE_HOST}),
    ):
        accelerator, model, optimizer, scheduler, loader = _prepared("bf16", _config(stage, **zero))
        assert type(model.basic_optimizer).__name__ == "DeepSpeedCPUAdam", type(model.basic_optimizer)
        losses = _steps(accelerator, model, optimizer, scheduler, loader)
        _close(losses, expected, CLOSE["bf16"], f"stage {stage}")
        states = [value for state in model.basic_optimizer.state.values() for value in state.values()]
        devices = {value.device.type for value in states if isinstance(value, torch.Tensor)}
        assert devices == {"cpu"}, (stage, devices)
        if stage == 3:
            pieces = {parameter.ds_tensor.device.type for parameter in model.module.parameters()}
            assert pieces == {"cpu"}, pieces
        _end(accelerator)


def main() -> int:
    from tests.gpu import run
    from tests.gpu.sharding import launched

    own = [one.__name__ for one in CHECKS if one.__module__ == __name__]
    with launched():
        return run.main(sys.argv[1:] or own)


if __name__ == "__main__":
    if sys.argv[1:] == [LOSSES]:
        print_losses()
    else:
        sys.exit(main())
