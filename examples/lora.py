"""Fine-tune a language model with LoRA: the model stays as it is, and a few small matrices beside it are trained.

Needs:          pip install transformers peft
One process:    python examples/lora.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/lora.py

The model has learned to count upwards. The adapter teaches it to count downwards, in a file a fraction of the model's
size.
"""

import torch
from peft import LoraConfig, get_peft_model
from tiny import make_model, make_texts, make_tokenizer, pretrain
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed


def main(epochs=2, batch_size=32, folder="runs/lora"):
    accelerator = Accelerator()
    set_seed(0)
    tokenizer = make_tokenizer()
    model = pretrain(make_model(tokenizer), tokenizer, make_texts(1024))

    # Which layers get an adapter, and how wide it is. All other parameters are frozen.
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained, everything = model.get_nb_trainable_parameters()
    accelerator.print(f"{trained} of {everything} parameters are trained")

    def collate(texts):
        batch = tokenizer(texts, return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"], "labels": labels}

    # The optimizer gets what is trained: no states are kept, and no gradients exchanged, for the rest.
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    loader = DataLoader(
        make_texts(1024, step=-1), batch_size // accelerator.num_processes, shuffle=True, collate_fn=collate
    )
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    model.train()
    for epoch in range(epochs):
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        accelerator.print(f"epoch {epoch}: loss {losses[-1]:.3f}")

    # The adapter alone. Load it with `PeftModel.from_pretrained(base_model, folder)`.
    accelerator.unwrap_model(model).save_pretrained(
        folder, is_main_process=accelerator.is_main_process, save_function=accelerator.save
    )
    accelerator.print(f"adapter in {folder}; loss fell from {losses[0]:.3f} to {losses[-1]:.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
