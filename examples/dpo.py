"""Teach a language model what people prefer, with DPO and the trainer of trl.

Needs:          pip install trl
One process:    python examples/dpo.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/dpo.py

trl's trainers are built on this package: whatever `accelerate launch` and a config file say (processes, precision,
FSDP, DeepSpeed) holds for them, and the script does not mention it. The model here can count upwards and downwards;
people prefer upwards.
"""

import copy

from datasets import Dataset
from tiny import NUMBERS, make_model, make_texts, make_tokenizer, pretrain
from trl import DPOConfig, DPOTrainer

from accelerate.utils import set_seed


def make_preferences(count):
    """A question, the answer that was liked better, and the other one."""
    rows = []
    for number in range(count):
        start = number % len(NUMBERS)
        up = [NUMBERS[(start + step) % len(NUMBERS)] for step in range(1, 4)]
        down = [NUMBERS[(start - step) % len(NUMBERS)] for step in range(1, 4)]
        rows.append({"prompt": NUMBERS[start], "chosen": " " + " ".join(up), "rejected": " " + " ".join(down)})
    return Dataset.from_list(rows)


def main(folder="runs/dpo"):
    set_seed(0)
    tokenizer = make_tokenizer()
    both_ways = [text for pair in zip(make_texts(512), make_texts(512, step=-1), strict=True) for text in pair]
    model = pretrain(make_model(tokenizer), tokenizer, both_ways)

    trainer = DPOTrainer(
        model=model,
        ref_model=copy.deepcopy(model),  # what the model was: answers are compared with its own
        args=DPOConfig(
            output_dir=folder,
            per_device_train_batch_size=8,
            max_steps=20,
            learning_rate=1e-3,
            beta=0.5,  # how far the model may move away from what it was
            logging_steps=10,
            logging_first_step=True,
            save_strategy="no",
            bf16=False,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=make_preferences(400),
        processing_class=tokenizer,
    )
    trainer.train()

    # Of two answers, how often is the better one more likely than it was, compared with the other?
    log = [entry for entry in trainer.state.log_history if "rewards/margins" in entry]
    preferred = f"{log[-1]['rewards/accuracies']:.0%} of the better answers are preferred"
    trainer.accelerator.print(f"{preferred}; loss fell from {log[0]['loss']:.3f} to {log[-1]['loss']:.3f}")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
