"""The training that the worlds of this folder run: GPT-2 by Megatron-LM, and by plain PyTorch to compare with."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import MegatronLMPlugin

LENGTH = 12
BATCH = 8  # of all copies of the model together
LR = 5e-3


def model(seed: int = 0, layers: int = 2) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    return GPT2LMHeadModel(config)


class Tokens(Dataset[dict[str, torch.Tensor]]):
    def __init__(self, samples: int = 160) -> None:
        self.tokens = torch.randint(1, 64, (samples, LENGTH), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def plain(layers: int = 2, steps: int = 20, clip: float = 1.0) -> list[float]:
    """The losses of a plain loop, on one process."""
    net = model(layers=layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.1)
    losses = []
    for batch, _ in zip(DataLoader(Tokens(), batch_size=BATCH), range(steps), strict=False):
        loss = mean_loss(net(batch["input_ids"]).logits, batch["labels"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def mean_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())


class OwnTrainStep:
    """A train step as a script writes one."""

    model_output_class = None

    def __init__(self, args: Any, weight: float = 1.0) -> None:
        self.args = args
        self.weight = weight

    def forward_step(self, data_iterator: Any, part: torch.nn.Module) -> tuple[torch.Tensor, Any]:
        batch = next(data_iterator)
        places = torch.arange(LENGTH).expand_as(batch["input_ids"])
        following = torch.roll(batch["labels"], -1, dims=1)
        mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
        losses = part(batch["input_ids"], places, mask, labels=following)
        return losses, functools.partial(self.loss, self.weight)

    @staticmethod
    def loss(weight: float, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        from accelerate.utils.megatron_lm import avg_losses_across_data_parallel_group

        mean = losses[:, :-1].float().mean() * weight
        return mean, {"lm loss": avg_losses_across_data_parallel_group([mean])[0]}


def own_part(args: Any, pre_process: bool, post_process: bool) -> torch.nn.Module:
    """A model as a script provides it: the GPT of megatron-core itself, with the weights of `model`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from accelerate.engines.megatron.weights import load_transformers_weights

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        activation_func=functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        tensor_model_parallel_size=args["tp_degree"],
        pipeline_model_parallel_size=args["pp_degree"],
        pipeline_dtype=torch.float32,
    )
    part = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=64,
        max_sequence_length=16,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
    )
    net = model()
    load_transformers_weights([part], net.state_dict(), net.config)
    return part


def provided(**degrees: int) -> dict[str, Any]:
    """The settings of a plugin with a model and a train step of the script's own."""
    return {
        **degrees,
        "custom_model_provider_function": functools.partial(own_part, {"tp_degree": 1, "pp_degree": 1, **degrees}),
        "custom_train_step_class": OwnTrainStep,
    }


def accelerator(precision: str = "no", exact: bool = True, **settings: Any) -> Accelerator:
    from tests.megatron import on_cpu

    on_cpu.install()
    return Accelerator(
        cpu=True,
        mixed_precision=precision,
        dataloader_config=DataLoaderConfiguration(exact_resume=exact),
        megatron_lm_plugin=MegatronLMPlugin(**settings),
    )


def objects(acc: Accelerator, micro_batches: int = 1, layers: int = 2) -> tuple[Any, Any, Any]:
    """Model, optimizer and loader, as a script makes them."""
    net = model(layers=layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, weight_decay=0.1)
    copies = acc.state.megatron_lm_plugin
    size = BATCH // micro_batches // (acc.num_processes // (copies.tp_degree * copies.pp_degree))
    return net, optimizer, DataLoader(Tokens(), batch_size=size)


def train(
    steps: int = 20, precision: str = "no", micro_batches: int = 1, layers: int = 2, **settings: Any
) -> list[float]:
    """The losses of a training by Megatron-LM, as this process sees them."""
    acc = accelerator(precision, num_micro_batches=micro_batches, **settings)
    net, optimizer, loader = acc.prepare(*objects(acc, micro_batches, layers))
    losses = []
    net.train()
    for batch, _ in zip(loader, range(steps), strict=False):
        outputs = net(**batch)
        loss = outputs if isinstance(outputs, torch.Tensor) else outputs.loss
        acc.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    end(acc)
    return losses


def end(acc: Accelerator) -> None:
    """So that another training can follow in this process."""
    acc.free_memory()
    acc.state._reset_state(reset_partial_state=False)
