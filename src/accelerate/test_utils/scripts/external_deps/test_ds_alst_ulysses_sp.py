"""Checks DeepSpeed's sequence parallelism: two processes with half of each text train as one with all of it.

`accelerate launch --num_processes 2 test_ds_alst_ulysses_sp.py`; it needs deepspeed, transformers and two GPUs.
"""

from __future__ import annotations

from typing import Any

import torch

from accelerate.accelerator import Accelerator
from accelerate.available import is_transformers_available
from accelerate.config.parallel import DeepSpeedSequenceParallelConfig
from accelerate.parallelism_config import ParallelismConfig
from accelerate.random import set_seed
from accelerate.state import PartialState
from accelerate.test_utils.checks import expect, expect_equal, needs, needs_deepspeed, run_checks
from accelerate.test_utils.sentence_pairs import NO_LABEL, WORDS, tiny_llama

world_size = 2
samples = 4
seqlen = 32


def collate_fn(batch: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One text: its words, their places, and the words again as labels."""
    ((words, places),) = batch
    return {"input_ids": words[None], "position_ids": places[None], "labels": words[None]}


def _model() -> Any:
    from transformers import LlamaForCausalLM

    set_seed(42)
    return LlamaForCausalLM(tiny_llama())


def _loss(model: Any, logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
    """The mean over the words of all processes, each of which has labels of its own number."""
    from torch.distributed.nn.functional import all_reduce

    mean = model.loss_function(logits=logits, labels=None, shift_labels=labels, vocab_size=WORDS)
    count = (labels != NO_LABEL).sum()
    return all_reduce(mean * count, group=group) / all_reduce(count, group=group)


def test_sequence_parallel() -> None:
    """The loss of a text in two halves is that of the whole text."""
    needs_deepspeed()
    needs(is_transformers_available(), "the transformers library")
    needs(PartialState().num_processes == world_size, f"{world_size} processes")
    settings: dict[str, Any] = {"sp_seq_length_is_variable": True, "sp_attn_implementation": "sdpa"}
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length=seqlen, **settings)
    accelerator = Accelerator(
        parallelism_config=ParallelismConfig(sp_backend="deepspeed", sp_size=world_size, sp_handler=handler)
    )
    words = torch.arange(samples * seqlen).view(samples, seqlen) % WORDS
    places = torch.arange(seqlen).expand(samples, seqlen)
    data = torch.utils.data.TensorDataset(words, places)
    loader = torch.utils.data.DataLoader(data, batch_size=1, collate_fn=collate_fn)
    whole, model = _model().to(accelerator.device), _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-5)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    from deepspeed.utils import groups

    for text, batch in zip(words.to(accelerator.device), loader, strict=True):
        expect_equal(batch["input_ids"].shape[1], seqlen // world_size, "the words of a process")
        inputs = {name: batch[name].to(accelerator.device) for name in ("input_ids", "position_ids")}
        labels = batch["shift_labels"].to(accelerator.device)
        logits = model(**inputs).logits
        loss = _loss(accelerator.unwrap_model(model), logits, labels, groups._get_sequence_parallel_group())
        wanted = whole(input_ids=text[None], labels=text[None]).loss
        # The steps are too small to matter.
        expect(abs(loss.item() - wanted.item()) < 0.05, f"the loss is {loss.item()}, and {wanted.item()} of the whole")
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()


def main() -> None:
    """Runs the check."""
    run_checks(test_sequence_parallel)


if __name__ == "__main__":
    main()
