"""Train with the trainers of trl, one after the other: `train_trl.py LOG.json ARGUMENTS`."""

from __future__ import annotations

import json
import sys
from typing import Any

from datasets import Dataset
from tiny import arguments, config, keep_log, text, tokenizer
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, set_seed
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

SAMPLES = range(48)


def sft(told: dict[str, Any]) -> Any:
    data = Dataset.from_list([{"text": text(i, 5 + i % 9)} for i in SAMPLES])
    return SFTTrainer(
        model=LlamaForCausalLM(config()),
        args=SFTConfig(max_length=32, **told),
        train_dataset=data,
        processing_class=tokenizer(),
    )


def dpo(told: dict[str, Any]) -> Any:
    rows = [{"prompt": text(i, 4), "chosen": " " + text(i + 1, 4), "rejected": " " + text(i + 2, 5)} for i in SAMPLES]
    return DPOTrainer(
        model=LlamaForCausalLM(config()),
        ref_model=LlamaForCausalLM(config()),
        args=DPOConfig(max_length=32, **told),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


def reward(told: dict[str, Any]) -> Any:
    rows = [{"chosen": text(i + 1, 8), "rejected": text(i + 2, 9)} for i in SAMPLES]
    return RewardTrainer(
        model=LlamaForSequenceClassification(config(num_labels=1)),
        args=RewardConfig(max_length=32, **told),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer(),
    )


def grpo(told: dict[str, Any]) -> Any:
    def likes_some(completions: list[str], **_: Any) -> list[float]:
        return [float(len(completion) % 7) for completion in completions]

    return GRPOTrainer(
        model=LlamaForCausalLM(config()),
        reward_funcs=likes_some,
        args=GRPOConfig(num_generations=4, max_completion_length=8, **told),
        train_dataset=Dataset.from_list([{"prompt": text(i, 4)} for i in SAMPLES]),
        processing_class=tokenizer(),
    )


def main(file: str, told: str) -> None:
    common = {"max_steps": 6, "bf16": False, "gradient_accumulation_steps": 2, "save_strategy": "no"}
    for make in (sft, dpo, reward, grpo):
        set_seed(0)
        trainer = make(arguments(f"{file}.out", gradient_checkpointing=False, **common) | json.loads(told))
        trainer.train()
        keep_log(trainer, make.__name__, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
