"""Checks that a model in stages, one on each process, computes what the whole model does.

`accelerate launch --num_processes 2 test_pippy.py`; it needs several processes, and the transformers library.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from accelerate.available import is_transformers_available
from accelerate.inference import prepare_pippy
from accelerate.random import set_seed
from accelerate.state import PartialState
from accelerate.test_utils.checks import expect, needs, run_checks

# Names, and not classes: this file can be imported without the library. The last one is the length of the text.
model_to_config = {
    "bert": ("BertForMaskedLM", "BertConfig", 64),
    "gpt2": ("GPT2ForSequenceClassification", "GPT2Config", 64),
}
_TINY: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False},
}


def get_model_and_data_for_text(model_name: str, device: Any, num_processes: int = 2) -> tuple[Any, Any, Any]:
    """A small model with random weights, an input to trace it with, and a batch of `num_processes` texts."""
    import transformers

    model_class, config_class, length = model_to_config[model_name]
    config = getattr(transformers, config_class)(vocab_size=128, **_TINY[model_name])
    model = getattr(transformers, model_class)(config).eval()
    first, batch = (torch.randint(1, 128, (size, length), device=device) for size in (1, num_processes))
    return model, first, batch


def _check(name: str, batch_size: int) -> None:
    state = PartialState()
    needs(state.num_processes > 1, "several processes")
    needs(is_transformers_available(), "the transformers library")
    set_seed(42)
    model, one, inputs = get_model_and_data_for_text(name, "cpu", batch_size)
    with torch.no_grad():
        # One at a time: a model without a padding token takes no more.
        wanted = torch.cat([model(text[None]).logits for text in inputs])
        whole = model._no_split_modules
        staged: Any = prepare_pippy(model, example_args=(one,), no_split_module_classes=whole, num_chunks=batch_size)
        output = staged(inputs.to(state.device))
    expect((output is None) != state.is_last_process, "the output should be on the last process, and only there")
    if state.is_last_process:
        torch.testing.assert_close(output["logits"].cpu(), wanted, rtol=1e-4, atol=1e-4)


def test_bert(batch_size: int = 2) -> None:
    """A model that fills in words."""
    _check("bert", batch_size)


def test_gpt2(batch_size: int = 2) -> None:
    """A model that sorts texts into classes."""
    _check("gpt2", batch_size)


def main() -> None:
    """Runs all checks."""
    run_checks(test_gpt2, functools.partial(test_bert, batch_size=4))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
