"""The settings of Megatron-LM, without it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate.utils import MegatronLMPlugin, add_model_config_to_megatron_parser, megatron_lm
from accelerate.utils.dataclasses import MODEL_CONFIGS_TO_MEGATRON_PARSERS

GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_embd": 8, "n_head": 4, "n_positions": 64}
LLAMA = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 8, "num_attention_heads": 4}
LLAMA["max_position_embeddings"] = 64
T5 = {"model_type": "t5", "num_layers": 2, "d_model": 8, "num_heads": 4, "n_positions": 64}


def model_of(config: dict[str, Any]) -> nn.Module:
    model: Any = nn.Module()
    model.config = SimpleNamespace(vocab_size=100, return_dict=True, **config)
    return model  # type: ignore[no-any-return]


def test_defaults_and_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "3")
    monkeypatch.setenv("MEGATRON_LM_SEQUENCE_PARALLELISM", "true")
    plugin = MegatronLMPlugin(tp_degree=2, other_megatron_args={"clip_grad": 9, "extra": 1})
    arguments = plugin.megatron_lm_default_args
    assert (arguments["tensor_model_parallel_size"], arguments["pipeline_model_parallel_size"]) == (2, 3)
    assert (arguments["sequence_parallel"], arguments["DDP_impl"]) == (True, "local")
    assert (arguments["clip_grad"], arguments["extra"], plugin.gradient_clipping) == (9, 1, 1.0)
    monkeypatch.setenv("MEGATRON_LM_PP_DEGREE", "many")
    with pytest.raises(ValueError, match="MEGATRON_LM_PP_DEGREE"):
        MegatronLMPlugin()


def test_recompute_activations_is_a_granularity(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MegatronLMPlugin().recompute_granularity == "full"
    for plugin in (
        MegatronLMPlugin(recompute_activations=True),
        MegatronLMPlugin(recompute_activations=True, recompute_granularity="selective"),
    ):
        assert plugin.recompute_granularity == plugin.megatron_lm_default_args["recompute_granularity"] == "selective"
    with pytest.raises(ValueError, match="recompute_granularity='full' asks for something else: leave out one"):
        MegatronLMPlugin(recompute_activations=True, recompute_granularity="full")
    monkeypatch.setenv("MEGATRON_LM_RECOMPUTE_ACTIVATIONS", "true")  # as a launch says it
    assert MegatronLMPlugin().recompute_granularity == "selective"
    monkeypatch.setenv("MEGATRON_LM_RECOMPUTE_GRANULARITY", "full")
    with pytest.raises(ValueError, match="leave out one"):
        MegatronLMPlugin()


@pytest.mark.parametrize("config", [GPT2, LLAMA, T5], ids=lambda config: config["model_type"])
@pytest.mark.parametrize("in_batch", [False, True])
def test_sizes_of_models(config: dict[str, Any], in_batch: bool) -> None:
    plugin = MegatronLMPlugin()
    batch = {"input_ids": torch.zeros(2, 17), "labels": torch.zeros(2, 5)} if in_batch else None
    plugin.set_network_size_args(model_of(config), batch)
    arguments = plugin.megatron_lm_default_args
    assert (arguments["num_layers"], arguments["hidden_size"], arguments["num_attention_heads"]) == (2, 8, 4)
    assert (arguments["orig_vocab_size"], arguments["max_position_embeddings"]) == (100, 64)
    length = 17 if in_batch else 64
    if config is T5:
        assert arguments["encoder_seq_length"] == length
        assert arguments["decoder_seq_length"] == (5 if in_batch else 64)
    else:
        assert arguments["seq_length"] == length


def test_a_model_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin, model = MegatronLMPlugin(), model_of({"model_type": "mine"})
    with pytest.raises(ValueError, match="'mine' model are not known"):
        plugin.set_network_size_args(model)
    monkeypatch.delitem(MODEL_CONFIGS_TO_MEGATRON_PARSERS, "mine", raising=False)

    @add_model_config_to_megatron_parser("mine")
    def parse(plugin: MegatronLMPlugin, model: Any, batch: Any) -> None:
        plugin.megatron_lm_default_args["num_layers"] = 7

    plugin.set_network_size_args(model)
    del MODEL_CONFIGS_TO_MEGATRON_PARSERS["mine"]
    assert plugin.megatron_lm_default_args["num_layers"] == 7


def test_training_optimizer_and_scheduler() -> None:
    plugin = MegatronLMPlugin(num_micro_batches=3, train_samples=10)
    plugin.set_training_args(micro_batch_size=4, dp_degree=2)
    optimizer = torch.optim.AdamW([nn.Parameter(torch.ones(1))], lr=0.1, betas=(0.8, 0.9))
    plugin.set_optimizer_type(optimizer)
    with pytest.warns(UserWarning, match="train_samples"):
        plugin.set_scheduler_args(megatron_lm.MegatronLMDummyScheduler(optimizer, 17, 7))
    arguments = plugin.megatron_lm_default_args
    assert (arguments["global_batch_size"], arguments["optimizer"], arguments["adam_beta1"]) == (24, "adam", 0.8)
    assert (arguments["train_iters"], arguments["lr_warmup_iters"], arguments["train_samples"]) == (8, 3, None)
    with pytest.raises(ValueError, match="Adagrad"):
        plugin.set_optimizer_type(torch.optim.Adagrad([nn.Parameter(torch.ones(1))]))


def test_values_of_an_optimizer_are_those_of_its_groups() -> None:
    plugin, parameters = MegatronLMPlugin(), [nn.Parameter(torch.ones(1)) for _ in range(2)]
    one: dict[str, Any] = {"params": parameters, "lr": 1e-6, "betas": (0.8, 0.9), "eps": 1e-5, "weight_decay": 0.3}
    plugin.set_optimizer_type(torch.optim.AdamW([one], lr=1e-3))
    wanted = {"lr": 1e-6, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_eps": 1e-5, "weight_decay": 0.3}
    assert wanted.items() <= plugin.megatron_lm_default_args.items()
    decays = [{"params": parameters[:1], "weight_decay": 0.2}, {"params": parameters[1:], "weight_decay": 0.0}]
    optimizer = torch.optim.SGD(decays, lr=0.5, momentum=0.7)
    torch.optim.lr_scheduler.LinearLR(optimizer, 0.1)  # which a script may have for itself: the rate is not that of now
    plugin.set_optimizer_type(optimizer)
    wanted = {"lr": 0.5, "sgd_momentum": 0.7, "weight_decay": 0.2}
    assert wanted.items() <= plugin.megatron_lm_default_args.items()


@pytest.mark.parametrize(
    ("kind", "name", "values"),
    [
        ("AdamW", "lr", (1.0, 2.0)),
        ("AdamW", "betas", ((0.1, 0.2), (0.1, 0.3))),
        ("AdamW", "eps", (1e-4, 1e-5)),
        ("AdamW", "weight_decay", (0.1, 0.2)),
        ("AdamW", "amsgrad", (True, True)),
        ("Adam", "maximize", (False, True)),
        ("SGD", "momentum", (0.1, 0.2)),
        ("SGD", "nesterov", (True, True)),
    ],
)
def test_an_optimizer_that_megatron_cannot_make(kind: str, name: str, values: tuple[Any, Any]) -> None:
    groups = [{"params": [nn.Parameter(torch.ones(1))], name: value} for value in values]
    more = {"momentum": 0.9} if name == "nesterov" else {}
    with pytest.raises(ValueError, match=f"`{name}`") as caught:
        MegatronLMPlugin().set_optimizer_type(getattr(torch.optim, kind)(groups, lr=0.1, **more))
    assert "\n" not in str(caught.value)


def test_consumed_samples_are_those_of_three_loaders() -> None:
    mine = [8]
    plugin = MegatronLMPlugin(consumed_samples=mine)
    assert plugin.consumed_samples == plugin.megatron_lm_default_args["consumed_samples"] == [8, 0, 0]
    assert mine == [8] and MegatronLMPlugin().consumed_samples is None


def test_masks_of_t5() -> None:
    step, mask = megatron_lm.T5TrainStep, torch.tensor([[1, 1, 0]])
    assert step.attn_mask_postprocess(mask).tolist() == [[[False, False, True], [False, False, True], [True] * 3]]
    assert step.get_decoder_mask(2, "cpu").tolist() == [[[False, True], [False, False]]]
    assert step.get_enc_dec_mask(mask, 2, "cpu").tolist() == [[[False, False, True]] * 2]
