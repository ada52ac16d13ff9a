"""Fine-tune a language model of transformers, with a loop of your own.

Needs:          pip install transformers
One process:    python examples/language_model.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/language_model.py
Every GPU:      accelerate launch --mixed_precision bf16 examples/language_model.py

The model is tiny, and what it learns is to count: `seven eight nine ten`. See tiny.py for where your own model goes.
"""

import math

import torch
from tiny import make_model, make_texts, make_tokenizer
from torch.utils.data import DataLoader
from transformers import get_cosine_schedule_with_warmup

from accelerate import Accelerator
from accelerate.utils import set_seed


@torch.no_grad()
def perplexity(accelerator, model, loader):
    """How many words the model hesitates between, on average over all words of all texts."""
    model.eval()
    losses, words = 0.0, 0
    for batch in loader:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].mT, batch["labels"][:, 1:], reduction="none")
        # A number for each text, so that texts which were repeated to fill the last batch can be left out.
        here = loss.sum(dim=1), (batch["labels"][:, 1:] != -100).sum(dim=1)
        summed, counted = accelerator.gather_for_metrics(here)
        losses += summed.sum().item()
        words += counted.sum().item()
    model.train()
    return math.exp(losses / words)


def main(epochs=3, batch_size=32, folder="runs/language_model"):
    accelerator = Accelerator()
    set_seed(0)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer)

    def collate(texts):
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        # The model shifts the labels itself. What is only there to fill up a row is not to be learned.
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}

    batch_size //= accelerator.num_processes
    train_loader = DataLoader(make_texts(1024), batch_size, shuffle=True, collate_fn=collate)
    test_loader = DataLoader(make_texts(150, seed=1), batch_size, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 10, epochs * len(train_loader))
    model, optimizer, schedule, train_loader, test_loader = accelerator.prepare(
        model, optimizer, schedule, train_loader, test_loader
    )

    before = perplexity(accelerator, model, test_loader)
    for epoch in range(epochs):
        for batch in train_loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        after = perplexity(accelerator, model, test_loader)
        accelerator.print(f"epoch {epoch}: loss {loss.item():.3f}, perplexity {after:.3f}")

    # A folder that `from_pretrained` reads. `get_state_dict` makes it whole where FSDP or DeepSpeed have spread it.
    accelerator.unwrap_model(model).save_pretrained(
        folder,
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    if accelerator.is_main_process:
        tokenizer.save_pretrained(folder)
    accelerator.print(f"saved to {folder}; perplexity fell from {before:.3f} to {after:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
