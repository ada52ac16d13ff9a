"""Accumulate gradients over micro-batches that do not weigh the same.

Sentences have different lengths, so one micro-batch may hold three times as many tokens as the next. The mean of their
mean losses is then not the mean over all tokens. Give `backward` the sum of the losses and the number of tokens, and
the gradients are those of one big batch, however it is cut into micro-batches and processes:

One process:    python examples/gradient_accumulation.py --accumulate 4
Two processes:  accelerate launch --cpu --num_processes 2 \\
                    examples/gradient_accumulation.py --accumulate 2

Both make steps of 16 sentences (4 each time, accumulated 4 times, or 2 times on 2 processes), and both end with the
same loss.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.utils import set_seed

VOCABULARY = 20
PADDING = -100  # the label that cross_entropy leaves out


def make_sentences(count):
    """Sentences of 2 to 24 tokens in which each token follows from the one before it."""
    generator = torch.Generator().manual_seed(0)
    sentences = []
    for _ in range(count):
        length = int(torch.randint(2, 25, (), generator=generator))
        start = int(torch.randint(VOCABULARY, (), generator=generator))
        sentences.append((start + 3 * torch.arange(length)) % VOCABULARY)
    return sentences


def collate(sentences):
    """Inputs, and labels that are one token ahead; both as long as the longest sentence."""
    inputs = nn.utils.rnn.pad_sequence([s[:-1] for s in sentences], batch_first=True)
    labels = nn.utils.rnn.pad_sequence([s[1:] for s in sentences], batch_first=True, padding_value=PADDING)
    return {"inputs": inputs, "labels": labels}


def train(epochs, accumulate):
    accelerator = Accelerator(gradient_accumulation_steps=accumulate)
    set_seed(0)
    loader = DataLoader(make_sentences(96), batch_size=4, collate_fn=collate)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    mean = float("nan")
    for epoch in range(epochs):
        loss_of_epoch = torch.zeros(2, device=accelerator.device)  # sum of losses, number of tokens
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch["inputs"])
                tokens = (batch["labels"] != PADDING).sum()
                loss = nn.functional.cross_entropy(
                    logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=PADDING, reduction="sum"
                )
                accelerator.backward(loss, num_items=tokens)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            loss_of_epoch += torch.stack([loss.detach(), tokens])
        total, count = accelerator.reduce(loss_of_epoch, "sum").tolist()
        mean = total / count
        accelerator.print(f"epoch {epoch}: loss per token {mean:.4f} over {count:.0f} tokens")
    return mean


def main():
    parser = argparse.ArgumentParser(description="Accumulate gradients over sentences of different lengths.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches per optimizer step")
    args = parser.parse_args()
    train(args.epochs, args.accumulate)


if __name__ == "__main__":
    main()
