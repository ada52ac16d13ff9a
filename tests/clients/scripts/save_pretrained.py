"""Train with two groups of weights and save as transformers does: `save_pretrained.py LOG.json PLUGIN`.

The optimizer is made before `prepare`, with weight decay for some parameters only. PLUGIN: settings of FSDP.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from tiny import config
from transformers import LlamaForCausalLM

from accelerate import Accelerator, FullyShardedDataParallelPlugin

LAYERS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}


def main(file: str, told: str) -> None:
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS, **json.loads(told)))
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config())
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(groups, lr=1e-2))
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        tokens = torch.randint(3, 40, (4, 16), generator=generator).chunk(2)[accelerator.process_index]
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
        optimizer.step()
        optimizer.zero_grad()
    own = accelerator.unwrap_model(model)
    own.save_pretrained(
        f"{file}.out",
        is_main_process=accelerator.is_main_process,
        save_function=accelerator.save,
        state_dict=accelerator.get_state_dict(model),
    )
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        saved = LlamaForCausalLM.from_pretrained(f"{file}.out").state_dict()
        with open(file, "w") as log:
            json.dump({"width": own.config.hidden_size, **{name: value.tolist() for name, value in saved.items()}}, log)
    accelerator.end_training()


if __name__ == "__main__":
    main(*sys.argv[1:])
