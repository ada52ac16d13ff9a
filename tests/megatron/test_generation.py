"""`megatron_generate` says what transformers' `generate` says, over tensor- and pipeline-parallel ranks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.harness import run_world
from tests.megatron import tiny, training


def engine(settings: Any, original: Any) -> SimpleNamespace:
    from accelerate.engines.megatron.weights import load_transformers_weights

    stages = tiny.chunks(settings, original.config)
    load_transformers_weights(stages, original.state_dict(), original.config)
    return SimpleNamespace(chunks=stages, model_config=original.config)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(3, tiny.VOCABULARY, (3, 6), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(tokens)
    mask[1, :2] = mask[2, :4] = 0
    return tokens, mask


def greedy(tensor: int, pipeline: int, **settings: Any) -> None:
    from accelerate.engines.megatron.generation import megatron_generate

    tokens, mask = prompts()
    for name, (kind, config) in tiny.DECODERS.items():
        original = tiny.model(kind, config)
        spread = engine(tiny.plugin(tensor, pipeline, **settings), original)
        spread.chunks[0].train()
        for padding in (torch.ones_like(mask), mask):
            given = {"inputs": tokens.masked_fill(padding == 0, 0), "attention_mask": padding, "pad_token_id": 0}
            # The first prompt ends after three tokens or less, and goes on with padding.
            end = original.generate(**given, max_new_tokens=3, do_sample=False, eos_token_id=-1)[0, -1].item()
            given |= {"max_new_tokens": 8, "eos_token_id": end}
            expected = original.generate(**given, do_sample=False)
            found = megatron_generate(spread, **given)
            assert torch.equal(found, expected), f"{name}, {padding}:\n{found}\n{expected}"
        assert spread.chunks[0].training
        searched(name, original, spread)


def searched(name: str, original: Any, spread: Any) -> None:
    """Several texts side by side, some of which end before others."""
    from accelerate.engines.megatron.generation import megatron_generate

    tokens, mask = prompts()
    for width, penalty, ends in ((2, 1.0, [7]), (3, 0.0, [7, 20, 41]), (4, 2.0, list(range(3, 60)))):
        given = {"inputs": tokens, "attention_mask": mask, "pad_token_id": 1, "max_new_tokens": 7}
        given |= {"num_beams": width, "length_penalty": penalty, "eos_token_id": ends}
        expected = original.generate(**given, do_sample=False)
        found = megatron_generate(spread, **given)
        assert torch.equal(found, expected), f"{name}, {width} beams:\n{found}\n{expected}"


def everything(tensor: int, pipeline: int) -> None:
    tiny.begin(tensor, pipeline)
    greedy(tensor, pipeline)
    if tensor > 1:
        greedy(tensor, pipeline, sequence_parallelism=True)
    sampling(tensor, pipeline)
    if pipeline > 1:
        stages_that_take_turns()


def stages_that_take_turns() -> None:
    """Four parts of a model on two ranks; from the engine of a script."""
    kind, config = tiny.DECODERS["llama, shared keys"]
    config = copy.deepcopy(config)
    config.num_hidden_layers = 4
    acc = training.accelerator(pp_degree=2, num_layers_per_virtual_pipeline_stage=1)
    original = tiny.model(kind, config)
    tokens, mask = prompts()
    loader = DataLoader([{"input_ids": row, "labels": row} for row in tokens], batch_size=3)
    model, _ = acc.prepare(original, loader)
    assert len(model.chunks) == 2
    given = {"inputs": tokens, "attention_mask": mask, "max_new_tokens": 5, "pad_token_id": 0, "eos_token_id": -1}
    assert torch.equal(model.megatron_generate(**given), original.generate(**given, do_sample=False))
    weights, expected = acc.get_state_dict(model), original.state_dict()
    assert weights.keys() == (expected.keys() if acc.is_main_process else set())
    assert all(torch.equal(value, expected[name]) for name, value in weights.items())
    training.end(acc)


def sampling(tensor: int, pipeline: int) -> None:
    """All ranks get the same draws, which are among those that may be drawn."""
    from accelerate.engines.megatron.generation import megatron_generate

    tokens, _ = prompts()
    original = tiny.model(*tiny.DECODERS["gpt2"])
    spread = engine(tiny.plugin(tensor, pipeline), original)
    ways: list[dict[str, Any]] = [{"top_k": 3}, {"top_p": 0.7}, {"temperature": 5.0, "top_k": 50, "top_p": 0.9}]
    for way in ways:
        first, again, other = (
            megatron_generate(spread, tokens, max_length=12, eos_token_id=-1, seed=seed, **way) for seed in (1, 1, 2)
        )
        assert torch.equal(first, again) and first.shape == (3, 12)
        gathered = [torch.empty_like(first) for _ in range(tensor * pipeline)]
        torch.distributed.all_gather(gathered, first)
        assert all(torch.equal(one, first) for one in gathered)
        if way.get("top_k") == 3:
            logits = original(first).logits[:, 5:-1]
            best = logits.topk(3).indices
            assert (best == first[:, 6:, None]).any(-1).all()
        if "temperature" in way:
            assert not torch.equal(first, other)
    likely = megatron_generate(spread, tokens, max_length=12, eos_token_id=-1)
    assert torch.equal(megatron_generate(spread, tokens, max_length=12, eos_token_id=-1, top_k=1), likely)


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (1, 2)])
def test_as_transformers(tensor: int, pipeline: int) -> None:
    run_world(everything, tensor * pipeline, tensor, pipeline)


def test_who_may_be_drawn() -> None:
    """What is left by top_k and top_p, beside transformers' own."""
    transformers = pytest.importorskip("transformers")
    from accelerate.engines.megatron.generation import _Choice

    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)) * 3
    for top_k, top_p in ((7, None), (None, 0.6), (12, 0.5), (None, 0.01)):
        expected = logits / 0.8
        if top_k is not None:
            expected = transformers.TopKLogitsWarper(top_k)(None, expected)
        if top_p is not None:
            expected = transformers.TopPLogitsWarper(top_p)(None, expected)
        choice = _Choice(0.8, top_k, top_p)
        assert torch.equal(choice.kept(logits / 0.8), expected)


def refused() -> list[str]:
    from accelerate.engines.megatron.generation import megatron_generate

    tiny.begin(1, 1)
    spread = engine(tiny.plugin(1, 1), tiny.model(*tiny.DECODERS["gpt2"]))
    tokens, mask = prompts()
    said = []
    asked: list[dict[str, Any]] = [
        {},
        {"max_new_tokens": 4, "num_beams": 2, "top_k": 5},
        {"max_new_tokens": 4, "temperature": 0.0},
        {"max_new_tokens": 4, "top_p": 1.5},
        {"max_new_tokens": 27},
        {"max_new_tokens": 4, "attention_mask": mask.flip(1)},
    ]
    for way in asked:
        with pytest.raises((ValueError, NotImplementedError)) as error:
            megatron_generate(spread, tokens, **way)
        said.append(str(error.value))
    return said


def test_what_cannot_be_done_is_said() -> None:
    both, beams, cold, likely, long, right = run_world(refused, 1)[0]
    assert "either `max_length` or `max_new_tokens`" in both
    assert "Beam search does not sample" in beams and "num_beams" in beams
    assert "`temperature`" in cold and "`top_p`" in likely
    assert long == "33 tokens are more than the 32 positions that this model has learned."
    assert "padded on the left" in right
