"""trl's SFTTrainer with a DeepSpeed config, on CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import run_world

pytest.importorskip("trl", reason="needs trl")

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]
AUTO = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def tuned(folder: str, stages: list[int | None]) -> list[list[tuple[float, float]]]:
    """Losses and norms of gradients. stages: None for DDP."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM, set_seed
    from trl import SFTConfig, SFTTrainer

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = LlamaConfig(vocab_size=len(WORDS), max_position_embeddings=32, pad_token_id=0, eos_token_id=1, **sizes)
    texts = [" ".join(WORDS[3 + (7 * i + 3 * j) % 40] for j in range(5 + i % 9)) for i in range(48)]
    found = []
    for stage in stages:
        zero = {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True}
        arguments = SFTConfig(
            str(Path(folder, str(stage))),
            deepspeed=None if stage is None else {"zero_optimization": zero, **dict.fromkeys(AUTO, "auto")},
            max_length=32,
            max_steps=5,
            per_device_train_batch_size=3,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            adam_epsilon=1e-2,
            max_grad_norm=0.5,
            logging_steps=1,
            save_strategy="no",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            disable_tqdm=True,
            report_to=[],
        )
        set_seed(0)
        trainer = SFTTrainer(
            model=LlamaForCausalLM(shape),
            args=arguments,
            train_dataset=Dataset.from_list([{"text": text} for text in texts]),
            processing_class=tokenizer(),
        )
        assert trainer.is_deepspeed_enabled == (stage is not None)
        trainer.train()
        trainer.save_model(arguments.output_dir)
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        found.append([(entry["loss"], entry["grad_norm"]) for entry in history])
        trainer.accelerator.free_memory()
        trainer.accelerator.state._reset_state(reset_partial_state=False)
    return found


def test_supervised_fine_tuning_as_with_ddp(tmp_path: Path) -> None:
    expected, *others = run_world(tuned, 2, str(tmp_path), [None, 2, 3], timeout=200)[0]
    assert len(expected) == 5 and expected[-1][0] < expected[0][0]
    for stage, found in zip((2, 3), others, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
        assert (tmp_path / str(stage) / "model.safetensors").exists()
