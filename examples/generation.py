"""Generate text for many prompts, shared out among the processes.

Needs:          pip install transformers
One process:    python examples/generation.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/generation.py

Each process has a copy of the model and answers its share of the prompts, in batches. (A model too big for that: see
big_model_inference.py.)
"""

import torch
from tiny import NUMBERS, make_model, make_texts, make_tokenizer, pretrain

from accelerate import PartialState
from accelerate.utils import gather_object, set_seed


def main(batch_size=8, new_words=4):
    state = PartialState()
    set_seed(0)
    tokenizer = make_tokenizer()
    model = pretrain(make_model(tokenizer), tokenizer, make_texts(1024)).to(state.device)

    # Prompts of different lengths. Filled up on the left (`padding_side="left"`), so that all of them end at the place
    # where the model goes on.
    prompts = [" ".join(NUMBERS[start : start + 2 + start % 3]) for start in range(33)]

    answers = []
    with state.split_between_processes(prompts) as mine:
        for start in range(0, len(mine), batch_size):
            batch = tokenizer(mine[start : start + batch_size], return_tensors="pt", padding=True).to(state.device)
            with torch.inference_mode():
                texts = model.generate(
                    input_ids=batch["input_ids"],
                    attention_mask=batch["attention_mask"],
                    max_new_tokens=new_words,
                    min_new_tokens=new_words,
                    do_sample=False,
                )
            answers += tokenizer.batch_decode(texts[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)

    answers = gather_object(answers)  # of all processes, in the order of the prompts
    right = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        after = NUMBERS.index(prompt.split()[-1]) + 1
        right += answer == " ".join(NUMBERS[after : after + new_words])
    state.print(f"{prompts[7]} ... {answers[7]}")
    state.print(f"{right} of {len(prompts)} prompts were continued correctly, on {state.num_processes} process(es)")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
