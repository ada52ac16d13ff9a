"""transformers' Trainer with a DeepSpeed config, on CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, DeepSpeedPlugin
from tests.harness import run_world

CONFIG: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
    },
    "zero_optimization": {"stage": 2, "stage3_gather_16bit_weights_on_model_save": True},
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
}


class Lines(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 64, (8,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def small_model() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = GPT2Config(vocab_size=64, n_positions=8, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    sizes.resid_pdrop = sizes.embd_pdrop = sizes.attn_pdrop = 0.0
    return GPT2LMHeadModel(sizes)


def trained(folder: str, config: dict[str, Any] | None, resume: bool = False) -> tuple[list[float], list[float]]:
    from transformers import Trainer, TrainingArguments, set_seed

    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        report_to=[],
        deepspeed=config,
        max_steps=6,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        adam_epsilon=1e-2,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=3,
        disable_tqdm=True,
        max_grad_norm=0.5,
    )
    set_seed(0)
    net = small_model()
    trainer = Trainer(net, arguments, train_dataset=Lines())
    if config is not None:
        assert trainer.is_deepspeed_enabled
    trainer.train(resume_from_checkpoint=str(Path(folder, "checkpoint-3")) if resume else None)
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    trainer.save_model(str(Path(folder, "final")))
    return [entry["loss"] for entry in history], [entry["grad_norm"] for entry in history]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_same_losses_as_without_it(stage: int, tmp_path: Path) -> None:
    zero = {**CONFIG["zero_optimization"], "stage": stage}
    if stage == 3:
        zero |= {"reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": "auto"}
    # Without an optimizer in it: the Trainer makes its own.
    config = {name: value for name, value in CONFIG.items() if name not in ("optimizer", "scheduler")}
    config |= {"zero_optimization": zero}
    expected = run_world(trained, 2, str(tmp_path / "ddp"), None, timeout=150)[0]
    found = run_world(trained, 2, str(tmp_path / "zero"), config, timeout=150)[0]
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    again = run_world(trained, 2, str(tmp_path / "zero"), config, True, timeout=150)[0]
    torch.testing.assert_close(again[0][-3:], found[0][-3:], rtol=1e-5, atol=1e-5)
    assert (tmp_path / "zero" / "final" / "model.safetensors").exists()


def test_the_optimizer_and_the_scheduler_of_the_config(tmp_path: Path) -> None:
    config = {**CONFIG, "optimizer": {**CONFIG["optimizer"], "params": {**CONFIG["optimizer"]["params"]}}}
    config["optimizer"]["params"]["torch_adam"] = True
    losses, norms = run_world(trained, 2, str(tmp_path), config, timeout=150)[0]
    assert losses[-1] < losses[0]
    assert all(norm > 0 for norm in norms)


def from_pretrained(folder: str) -> None:
    from transformers import GPT2LMHeadModel

    acc = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))
    tokens = Lines()[acc.process_index]["input_ids"].unsqueeze(0)
    with acc.deepspeed_plugin.zero3_init_context_manager(enable=False):
        whole = GPT2LMHeadModel.from_pretrained(folder)
    assert all(parameter.numel() > 0 for parameter in whole.parameters())
    net = GPT2LMHeadModel.from_pretrained(folder)
    assert all(parameter.numel() == 0 for parameter in net.parameters()), "loaded in pieces"
    net = acc.prepare(net)
    net.eval()
    whole.eval()
    with torch.no_grad():
        torch.testing.assert_close(net(tokens).logits, whole(tokens).logits)


def test_pretrained_models_are_loaded_in_pieces(tmp_path: Path) -> None:
    small_model().save_pretrained(tmp_path)
    run_world(from_pretrained, 2, str(tmp_path), timeout=100)
