"""A transformers model under `device_map="auto"` and too little memory: it writes the same text as ever."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from accelerate.hooks import AlignDevicesHook

PROMPT = torch.arange(1, 9)[None]


def new_model(tied: bool) -> Any:
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=200,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


def text(model: Any) -> list[int]:
    output = model.generate(PROMPT, max_new_tokens=6, do_sample=False, pad_token_id=0)
    tokens: list[int] = output[0].tolist()
    return tokens


@pytest.mark.filterwarnings("default")  # of transformers' own code
@pytest.mark.parametrize(("memory", "tied"), [({"cpu": 250_000}, True), ({"cpu": "250KB", "disk": "1GB"}, False)])
def test_generates_the_same(memory: Mapping[Any, Any], tied: bool, tmp_path: Path) -> None:
    plain = new_model(tied)
    plain.save_pretrained(tmp_path / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(
        tmp_path / "model", device_map="auto", max_memory=dict(memory), offload_folder=tmp_path / "offload"
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert any(parameter.is_meta for parameter in model.parameters())
    assert isinstance(model._hf_hook, AlignDevicesHook)
    # Nothing was written again: the weights stay in the checkpoint's own file.
    assert not list((tmp_path / "offload").glob("*"))
    assert text(model) == text(plain)

    with pytest.raises(RuntimeError, match="cannot be moved"):
        model.to("cpu")
    model.save_pretrained(tmp_path / "again")
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "again").eval()
    assert text(again) == text(plain)
    assert all(torch.equal(again.state_dict()[name], value) for name, value in model.state_dict().items())


@pytest.mark.filterwarnings("default")
def test_a_layer_that_runs_elsewhere_by_hand(tmp_path: Path) -> None:
    """A device map written by hand, and a model that is dispatched after it was made."""
    from accelerate import cpu_offload, disk_offload, dispatch_model

    expected = text(new_model(True))
    places = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "disk", "model.rotary_emb": "cpu"}
    places |= {f"model.layers.{index}": "disk" if index % 2 else "cpu" for index in range(3)}
    assert text(dispatch_model(new_model(True), places, offload_dir=tmp_path / "a")) == expected
    assert text(cpu_offload(new_model(True), "cpu")) == expected
    assert text(disk_offload(new_model(True), tmp_path / "b", "cpu")) == expected
