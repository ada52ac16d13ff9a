"""Train with the Trainer of transformers, then go on from a checkpoint: `train_transformers.py LOG.json ARGUMENTS`."""

from __future__ import annotations

import json
import sys

import torch
from tiny import arguments, config, keep_log
from transformers import LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def main(file: str, told: str) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 40, (50, 16), generator=generator)
    data = [{"input_ids": row, "labels": row.clone()} for row in tokens]
    for name, checkpoint in (("whole", None), ("resumed", f"{file}.out/checkpoint-4")):
        set_seed(0)
        given = arguments(f"{file}.out", num_train_epochs=2, save_strategy="steps", save_steps=4, eval_strategy="epoch")
        trainer = Trainer(
            model=LlamaForCausalLM(config()),
            args=TrainingArguments(**given | json.loads(told)),
            train_dataset=data,
            eval_dataset=data[:13],
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        trainer.evaluate()
        keep_log(trainer, name, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
