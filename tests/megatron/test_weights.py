"""Weights of transformers give the same logits on megatron-core, spread in any way, and come back the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests.harness import run_world
from tests.megatron import tiny

LAYOUTS = [(1, 1), (2, 1), (1, 2)]
LENGTH, BATCH = 12, 2


def drawn(high: int, *shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def close(found: torch.Tensor, expected: torch.Tensor, name: str) -> None:
    assert expected.std() > 0.05, f"{name}: logits that are all alike would show nothing"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4, msg=lambda text: f"{name}: {text}")


def loaded(settings: Any, original: Any) -> Any:
    from accelerate.engines.megatron.weights import load_transformers_weights

    stages = tiny.chunks(settings, original.config)
    load_transformers_weights(stages, original.state_dict(), original.config)
    return stages[0]


def back(stage: Any, original: Any, name: str) -> None:
    from accelerate.engines.megatron.weights import transformers_state_dict

    found, expected = transformers_state_dict([stage], original.config), original.state_dict()
    if torch.distributed.get_rank() != 0:
        assert found is None
        return
    assert found is not None and found.keys() == expected.keys(), name
    for key in expected:
        assert torch.equal(found[key], expected[key]), f"{name}: {key}"
        assert found[key].is_contiguous(), f"{name}: {key}"


def decoders(tensor: int, pipeline: int) -> None:
    tokens = drawn(tiny.VOCABULARY, BATCH, LENGTH)
    positions = torch.arange(LENGTH).expand_as(tokens)
    for name, (kind, config) in tiny.DECODERS.items():
        original = tiny.model(kind, config)
        stage = loaded(tiny.plugin(tensor, pipeline), original)
        logits = tiny.run(stage, (LENGTH, BATCH, 32), tokens, positions, None)
        if logits is not None:
            close(tiny.whole(logits), original(tokens).logits, name)
        back(stage, original, name)


def bert(tensor: int, pipeline: int) -> None:
    tokens, types = drawn(tiny.VOCABULARY, BATCH, LENGTH), drawn(2, BATCH, LENGTH)
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    original = tiny.model(transformers.MegatronBertForPreTraining, tiny.BERT)
    stage = loaded(tiny.plugin(tensor, pipeline, other_megatron_args={"bert_binary_head": True}), original)
    output = tiny.run(stage, (LENGTH, BATCH, 32), tokens, mask, tokentype_ids=types)
    if output is not None:
        expected = original(tokens, attention_mask=mask, token_type_ids=types)
        close(tiny.whole(output[0])[mask == 1], expected.prediction_logits[mask == 1], "BERT, words")
        torch.testing.assert_close(output[1], expected.seq_relationship_logits, rtol=1e-4, atol=1e-4)
    back(stage, original, "BERT")


def t5(tensor: int) -> None:
    from accelerate.engines.megatron.train_steps import T5TrainStep

    tokens, answers = drawn(tiny.VOCABULARY, BATCH, LENGTH), drawn(tiny.VOCABULARY, BATCH, 7, seed=4)
    mask = torch.ones_like(tokens)
    mask[1, 9:] = 0
    masks = [
        T5TrainStep.attn_mask_postprocess(mask),
        T5TrainStep.get_decoder_mask(7, "cpu"),
        T5TrainStep.get_enc_dec_mask(mask, 7, "cpu"),
    ]
    for name, config in tiny.T5S.items():
        original = tiny.model(transformers.T5ForConditionalGeneration, config)
        stage = loaded(tiny.plugin(tensor, 1), original)
        logits = tiny.run(stage, (), tokens, answers, *(mask.unsqueeze(1) for mask in masks))
        expected = original(input_ids=tokens, attention_mask=mask, decoder_input_ids=answers).logits
        close(tiny.whole(logits), expected, name)
        back(stage, original, name)


def all_kinds(tensor: int, pipeline: int) -> None:
    tiny.begin(tensor, pipeline)
    decoders(tensor, pipeline)
    bert(tensor, pipeline)
    if pipeline == 1:
        t5(tensor)


@pytest.mark.parametrize(("tensor", "pipeline"), LAYOUTS)
def test_there_and_back(tensor: int, pipeline: int) -> None:
    run_world(all_kinds, tensor * pipeline, tensor, pipeline)


def other_state_dicts() -> list[str]:
    from accelerate.engines.megatron.weights import load_transformers_weights

    tiny.begin(1, 1)
    kind, config = tiny.DECODERS["gpt2"]
    original = tiny.model(kind, config)
    stages = tiny.chunks(tiny.plugin(1, 1), config)

    # A file of the model without its head, with the buffers of older releases.
    bare = {name.removeprefix("transformer."): weight for name, weight in original.state_dict().items()}
    del bare["lm_head.weight"]
    bare["h.0.attn.bias"] = torch.ones(1)
    load_transformers_weights(stages, bare, config)
    back(stages[0], original, "without a head")

    said = []
    for change in (
        lambda weights: weights.pop("transformer.h.1.mlp.c_fc.bias"),
        lambda weights: weights.update({"score.weight": torch.ones(2, 32)}),
        lambda weights: weights.update({"transformer.wpe.weight": torch.ones(16, 32)}),
    ):
        weights = original.state_dict()
        change(weights)
        try:
            load_transformers_weights(stages, weights, config)
        except (KeyError, ValueError) as error:
            said.append(str(error))
    return said


def test_other_state_dicts() -> None:
    missing, unknown, size = run_world(other_state_dicts, 1)[0]
    assert "has no 'transformer.h.1.mlp.c_fc.bias'" in missing
    assert unknown == "1 weights have no counterpart in a gpt2 model of Megatron-LM: score.weight."
    assert "transformer.wpe.weight" in size and "[16, 32]" in size and "[32, 32]" in size
