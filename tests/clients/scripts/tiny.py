"""Small models, words and logs that the scripts of this folder share."""

from __future__ import annotations

import json
import os
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(40))]
# What a trainer logs that no two runs have in common.
_OF_THE_CLOCK = ("time", "per_second", "flos")


def config(**more: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=1,
        **more,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
    made.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    return made


def text(number: int, length: int) -> str:
    return " ".join(WORDS[3 + (number * 7 + position * 3) % 40] for position in range(length))


def arguments(folder: str, **more: Any) -> dict[str, Any]:
    """What every trainer of these scripts is told."""
    common = {
        "output_dir": folder,
        "per_device_train_batch_size": 4,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
    }
    return common | more


def keep_log(trainer: Any, name: str, file: str) -> None:
    """Write what a trainer has logged, under `name`, beside what is in the file already."""
    if not trainer.is_world_process_zero():
        return
    log = [
        {
            key: round(value, 5) if isinstance(value, float) else value
            for key, value in entry.items()
            if not any(word in key for word in _OF_THE_CLOCK)
        }
        for entry in trainer.state.log_history
    ]
    known = {}
    if os.path.exists(file):
        with open(file) as lines:
            known = json.load(lines)
    with open(file, "w") as lines:
        json.dump(known | {name: log}, lines)
