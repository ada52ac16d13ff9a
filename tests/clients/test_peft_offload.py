"""Adapters of peft on a model whose weights lie in memory and on disk: it answers as the model in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from accelerate import cpu_offload, disk_offload, dispatch_model

peft = pytest.importorskip("peft", reason="needs peft: make clients")

pytestmark = pytest.mark.filterwarnings("ignore")  # of the clients' own code
TOKENS = torch.arange(1, 9)[None]
INSIDE = "base_model.model."


def plain() -> Any:
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def adapted(base: Any) -> Any:
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return peft.get_peft_model(base, settings).eval()


def answer(model: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=TOKENS).logits
    return logits


def test_a_model_with_adapters_is_dispatched(tmp_path: Path) -> None:
    expected = answer(adapted(plain()))
    places = {"": "cpu", f"{INSIDE}model.layers.1": "disk", f"{INSIDE}model.layers.2.self_attn": "disk"}
    made = dispatch_model(adapted(plain()), places, offload_dir=tmp_path / "a")
    gone = [name for name, parameter in made.named_parameters() if parameter.is_meta]
    assert any("lora_A" in name for name in gone) and not any("layers.0" in name for name in gone)
    for model in (made, cpu_offload(adapted(plain()), "cpu"), disk_offload(adapted(plain()), tmp_path / "b", "cpu")):
        assert torch.equal(answer(model), expected)
    made.save_pretrained(tmp_path / "adapter")
    assert torch.equal(answer(peft.PeftModel.from_pretrained(plain(), tmp_path / "adapter").eval()), expected)


def test_adapters_on_a_frozen_model_in_memory_and_on_disk_get_the_same_gradients(tmp_path: Path) -> None:
    """The frozen weights are elsewhere, the adapters are not."""
    gradients = []
    for offloaded in (False, True):
        model = adapted(plain()).train()
        if offloaded:
            places = {"": "cpu", **{f"{INSIDE}model.layers.{index}.mlp": "disk" for index in range(3)}}
            dispatch_model(model, places, offload_dir=tmp_path)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    assert len(gradients[0]) == 12
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


def test_adapters_are_loaded_into_an_offloaded_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # peft writes the weights with its adapters below where it runs
    adapted(plain()).save_pretrained("adapter")
    plain().save_pretrained("base")
    places: dict[str, Any] = {"device_map": "auto", "offload_folder": "offload"}
    base = transformers.LlamaForCausalLM.from_pretrained("base", max_memory={"cpu": 14_000}, **places).eval()
    assert set(base.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(answer(base), answer(plain()))
    model = peft.PeftModel.from_pretrained(base, "adapter", max_memory={"cpu": 14_000}, **places).eval()
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(answer(model), answer(adapted(plain())))
    with model.disable_adapter():
        assert torch.equal(answer(model), answer(plain()))
    merged = model.merge_and_unload()
    torch.testing.assert_close(answer(merged), answer(adapted(plain())))
