"""Adapters of peft on a frozen model that is sharded: trained, saved alone, and loaded by peft itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.errors import CheckpointError
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import (
    load_fsdp_model,
    load_fsdp_optimizer,
    merge_fsdp_weights,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from tests.harness import run_world

LAYERS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
# "peft": with the policy that peft makes for a model, where what is trained is apart from what is not.
ENGINES: dict[str, dict[str, Any]] = {
    "fsdp2": {"fsdp_version": 2, **LAYERS},
    "fsdp2-peft": {"fsdp_version": 2},
    "fsdp1-own": {"fsdp_version": 1, "use_orig_params": True, **LAYERS},
    "fsdp1-peft": {"fsdp_version": 1},
}


def _model(seed: int = 0) -> Any:
    import peft
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=16,
    )
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config)
    # Both halves of each adapter are random, so that a swap of any two shows.
    lora = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(model, lora)


def _tokens(step: int, rank: int, ranks: int) -> torch.Tensor:
    batch = torch.randint(0, 32, (4, 8), generator=torch.Generator().manual_seed(step))
    return batch[rank * 4 // ranks : (rank + 1) * 4 // ranks]


def _optimizer(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def _alone(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = _model()
    optimizer = _optimizer(model)
    losses = []
    for step in range(steps):
        loss = model(input_ids=_tokens(step, 0, 1), labels=_tokens(step, 0, 1)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, model.state_dict()


def _train(accelerator: Accelerator, model: Any, optimizer: Any, steps: range) -> list[float]:
    losses = []
    for step in steps:
        tokens = _tokens(step, accelerator.process_index, accelerator.num_processes)
        loss = model(input_ids=tokens, labels=tokens).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(accelerator.reduce(loss.detach(), "mean")))
    return losses


def _prepared(settings: dict[str, Any]) -> tuple[Accelerator, Any, Any]:
    from peft.utils.other import fsdp_auto_wrap_policy

    AcceleratorState._reset_state()
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**settings))
    model = _model(seed=accelerator.process_index)  # only rank 0's counts
    if "auto_wrap_policy" not in settings:
        accelerator.state.fsdp_plugin.auto_wrap_policy = fsdp_auto_wrap_policy(model)
    model, optimizer = accelerator.prepare(model, _optimizer(model))
    return accelerator, model, optimizer


def _adapter_of(state: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in state.items() if "lora_" in name}


def _same(found: dict[str, Any], expected: dict[str, Any], tolerance: float = 0.0) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance)


def _fits(weights: Any, expected: dict[str, Any]) -> None:
    """peft takes these weights as those of an adapter."""
    import peft

    fresh = _model(seed=9)
    result = peft.set_peft_model_state_dict(fresh, weights)
    assert not result.unexpected_keys and not any("lora_" in name for name in result.missing_keys)
    _same(_adapter_of(fresh.state_dict()), _adapter_of(expected))


def _adapters(folder: str) -> None:
    import peft
    import safetensors.torch

    losses, weights = _alone(3)
    before = _model().state_dict()
    for name, settings in ENGINES.items():
        accelerator, model, optimizer = _prepared(settings)
        plugin = accelerator.state.fsdp_plugin
        first = accelerator.is_main_process
        assert _train(accelerator, model, optimizer, range(3)) == pytest.approx(losses, abs=1e-5), name
        state = accelerator.get_state_dict(model)
        if first:
            _same(state, weights, 1e-5)
            changed = {key for key in state if not torch.equal(state[key], before[key])}
            assert changed == set(_adapter_of(state))
            if settings["fsdp_version"] == 2:  # peft does not find its layers inside wrappers
                accelerator.unwrap_model(model).save_pretrained(f"{folder}/{name}", state_dict=state)
                _fits(peft.load_peft_weights(f"{folder}/{name}"), state)

        for kind in ("SHARDED_STATE_DICT", "FULL_STATE_DICT"):
            target = Path(folder, f"{name}-{kind}")
            plugin.set_state_dict_type(kind)
            save_fsdp_model(plugin, accelerator, model, target, adapter_only=True)
            save_fsdp_optimizer(plugin, accelerator, optimizer, model, target)
            further = _train(accelerator, model, optimizer, range(3, 5))
            load_fsdp_model(plugin, accelerator, model, target, adapter_only=True)
            load_fsdp_optimizer(plugin, accelerator, optimizer, model, target, adapter_only=True)
            assert _train(accelerator, model, optimizer, range(3, 5)) == further, (name, kind)
            load_fsdp_model(plugin, accelerator, model, target, adapter_only=True)
            load_fsdp_optimizer(plugin, accelerator, optimizer, model, target, adapter_only=True)
            again = accelerator.get_state_dict(model)
            if kind == "SHARDED_STATE_DICT":
                merge_fsdp_weights(str(target / "pytorch_model_fsdp_0"), str(target))
            if first:
                _same(again, state)
                found = (
                    safetensors.torch.load_file(target / "model.safetensors")
                    if kind == "SHARDED_STATE_DICT"
                    else torch.load(target / "pytorch_model_fsdp.bin", weights_only=True)
                )
                _same(found, peft.get_peft_model_state_dict(_model(), state_dict=state))
                _fits(found, state)

        # One file for each process.
        plugin.set_state_dict_type("SHARDED_STATE_DICT")
        save_fsdp_model(plugin, accelerator, model, f"{folder}/{name}-own", adapter_only=True, use_dcp=False)
        _train(accelerator, model, optimizer, range(1))
        load_fsdp_model(plugin, accelerator, model, f"{folder}/{name}-own", adapter_only=True, use_dcp=False)
        again = accelerator.get_state_dict(model)
        if first:
            _same(again, state)
        with pytest.raises(CheckpointError, match="give the same adapter_only"):
            load_fsdp_model(plugin, accelerator, model, f"{folder}/{name}-own", use_dcp=False)

        accelerator.save_state(f"{folder}/{name}-state")
        further = _train(accelerator, model, optimizer, range(3, 5))
        accelerator.load_state(f"{folder}/{name}-state")
        assert _train(accelerator, model, optimizer, range(3, 5)) == further, name


def test_adapters(tmp_path: Path) -> None:
    run_world(_adapters, 2, str(tmp_path), timeout=110)
