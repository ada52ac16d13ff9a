"""Sequences cut into parts, one for each process: as one process that has all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accelerate import Accelerator, skip_first_batches
from accelerate.utils import DeepSpeedSequenceParallelConfig, ParallelismConfig
from tests.deepspeed import training
from tests.harness import run_world

LENGTH, WORDS, IGNORED = 16, 64, -100


def texts() -> list[dict[str, torch.Tensor]]:
    """With labels for some of the words alone, so that the parts have different numbers of them."""
    found = []
    for index in range(10):
        words = torch.randint(0, WORDS, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = words.clone()
        labels[: index + 1] = IGNORED
        found.append({"input_ids": words, "position_ids": torch.arange(LENGTH), "labels": labels})
    return found


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": LENGTH}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, attn_implementation="sdpa"))


def adamw(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, eps=0.01)


def summed(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def by_one(accumulate: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    net = llama()
    optimizer = adamw(net)
    losses, sums, counts = [], [], []
    batches = list(DataLoader(texts(), batch_size=1))
    for number, batch in enumerate(batches, 1):
        labels = torch.nn.functional.pad(batch.pop("labels"), (0, 1), value=IGNORED)[:, 1:]
        sums.append(summed(net(**batch).logits, labels))
        counts.append(int((labels != IGNORED).sum()))
        losses.append(sums[-1].item() / counts[-1])
        if number % accumulate == 0 or number == len(batches):
            (torch.stack(sums).sum() / sum(counts)).backward()
            optimizer.step()
            optimizer.zero_grad()
            sums, counts = [], []
    return losses, {name: p.detach().clone() for name, p in net.named_parameters()}


def by_two(stage: int, accumulate: int) -> tuple[Accelerator, Any, list[float]]:
    expected = by_one(accumulate)
    handler = DeepSpeedSequenceParallelConfig(sp_attn_implementation="sdpa")
    acc = Accelerator(
        cpu=True,
        gradient_accumulation_steps=accumulate,
        deepspeed_plugin=training.plugin(stage),
        parallelism_config=ParallelismConfig(sp_size=2, sp_handler=handler),
    )
    net: Any = llama()
    plain = DataLoader(texts(), batch_size=1)
    net, optimizer, loader = acc.prepare(net, adamw(net), plain)
    assert acc.deepspeed_plugin.deepspeed_config["train_batch_size"] == accumulate
    assert acc.deepspeed_ulysses_dl_adapter(loader, net) is loader
    assert len(loader) == 10
    for _ in loader:
        break  # an iteration that is broken off leaves nothing behind
    losses = []
    for batch in loader:
        with acc.accumulate(net):
            labels = batch.pop("shift_labels")
            assert labels.shape == batch["input_ids"].shape == (1, LENGTH // 2)
            loss = summed(net(**batch).logits, labels)
            count = (labels != IGNORED).sum()
            acc.backward(loss, num_items=count)
            optimizer.step()
            optimizer.zero_grad()
        total = acc.reduce(torch.stack([loss.detach(), count.float()]))
        losses.append((total[0] / total[1]).item())
    assert acc.sync_gradients, "the last batch ends a window"
    torch.testing.assert_close((losses, training.weights(acc, net)), expected, rtol=1e-4, atol=1e-5)
    return acc, loader, losses


def by_two_twice(stage: int, accumulate: int) -> None:
    acc, loader, losses = by_two(stage, accumulate)
    assert skip_first_batches(loader) is loader
    with pytest.raises(NotImplementedError, match="leave the first batches out in the loop, with `continue`"):
        skip_first_batches(loader, 3)
    assert not hasattr(type(loader).__new__(type(loader)), "dataset")
    acc.free_memory()
    net: Any = llama()
    optimizer = adamw(net)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    net, optimizer, scheduler, loader = acc.prepare(net, optimizer, scheduler, DataLoader(texts(), batch_size=1))
    labels = (batch := next(iter(loader))).pop("shift_labels")
    loss = summed(net(**batch).logits, labels)
    total = acc.reduce(torch.stack([loss.detach(), (labels != IGNORED).sum().float()]))
    torch.testing.assert_close((total[0] / total[1]).item(), losses[0], rtol=1e-4, atol=1e-5)
    acc.backward(loss)
    optimizer.step()
    scheduler.step()
    if acc.sync_gradients:
        assert scheduler.scheduler.last_epoch == 1, "one text a step"


@pytest.mark.parametrize(("stage", "accumulate"), [(2, 4), (3, 1)])
def test_as_one_process_with_whole_sequences(stage: int, accumulate: int) -> None:
    run_world(by_two_twice, 2, stage, accumulate, timeout=100)


def refused() -> list[str]:
    found = []

    def attempt(action: Any) -> None:
        with pytest.raises((ValueError, RuntimeError)) as caught:
            action()
        found.append(str(caught.value))

    acc = Accelerator(cpu=True, deepspeed_plugin=training.plugin(2), parallelism_config=ParallelismConfig(sp_size=2))
    net = training.model()
    loader = DataLoader(training.data(), batch_size=4)
    attempt(lambda: acc.deepspeed_ulysses_dl_adapter(loader, net))
    attempt(lambda: acc.prepare(net, adamw(net), loader))
    eager: Any = llama()
    eager.set_attn_implementation("eager")
    attempt(lambda: acc.prepare(eager, adamw(eager), loader))
    return found


def test_refusals_are_one_sentence() -> None:
    early, no_config, attention = run_world(refused, 2, timeout=60)[0]
    assert early.startswith("No model splits its sequences yet")
    assert no_config.startswith("sp_size=2 needs a model of transformers")
    assert attention.startswith("This LlamaForCausalLM has the attention 'eager'")
