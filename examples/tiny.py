"""A language model and a tokenizer that are made in a moment, in place of ones that would have to be downloaded.

The examples with language models learn to count in words. For your own work replace both by

    tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
"""

import random

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SMALL = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
SMALL += ["thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen"]
NUMBERS = SMALL + [
    ten if one == "zero" else f"{ten}-{one}" for ten in ("twenty", "thirty", "forty") for one in SMALL[:10]
]


def make_tokenizer():
    """One token for each word."""
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<end>", *NUMBERS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<end>", padding_side="left", model_max_length=64
    )


def make_model(tokenizer, width=64):
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=width,
            intermediate_size=2 * width,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.eos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )


def make_texts(count, step=1, seed=0):
    """`three four five six`, or with `step=-1` downwards; 5 to 12 numbers each."""
    draw = random.Random(seed)
    texts = []
    for _ in range(count):
        start, length = draw.randrange(len(NUMBERS)), draw.randrange(5, 13)
        texts.append(" ".join(NUMBERS[(start + step * place) % len(NUMBERS)] for place in range(length)))
    return texts


def pretrain(model, tokenizer, texts, steps=80):
    """What somebody else has done with the model that you download. No process knows of another here."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(steps):
        batch = tokenizer(texts[step * 32 % len(texts) :][:32], return_tensors="pt", padding=True)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        model(batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()
