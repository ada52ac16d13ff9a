"""Models of every kind train on megatron-core with the losses that they have in transformers."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader, Dataset

from accelerate.engines.megatron.train_steps import GPTTrainStep, train_step_for
from accelerate.utils import MegatronLMPlugin
from tests.harness import run_world
from tests.megatron import tiny, training

LENGTH = 12
LR = 1e-2


def tokens(*shape: int, seed: int, high: int = tiny.VOCABULARY) -> torch.Tensor:
    return torch.randint(3, high, shape, generator=torch.Generator().manual_seed(seed))


def texts() -> dict[str, torch.Tensor]:
    """Two of them shorter than the others."""
    inputs, mask = tokens(4, LENGTH, seed=1), torch.ones(4, LENGTH, dtype=torch.long)
    mask[1, 9:] = mask[3, 7:] = 0
    return {"input_ids": inputs, "attention_mask": mask}


def continued() -> dict[str, torch.Tensor]:
    batch = texts()
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


def padded_in_front() -> dict[str, torch.Tensor]:
    """transformers would have the first word of a text follow from the padding before it, unless it has no label."""
    batch = {name: value.flip(1) for name, value in continued().items()}
    before = torch.nn.functional.pad(batch["attention_mask"][:, :-1], (1, 0))
    return {**batch, "labels": batch["labels"].masked_fill(before == 0, -100)}


def masked() -> dict[str, torch.Tensor]:
    batch = continued()
    hidden = tokens(4, LENGTH, seed=2, high=6) == 3
    types = (torch.arange(LENGTH) > 5).long().expand(4, -1)
    return {**batch, "token_type_ids": types, "labels": batch["labels"].masked_fill(~hidden, -100)}


def pairs() -> dict[str, torch.Tensor]:
    return {**masked(), "next_sentence_label": torch.tensor([0, 1, 1, 0])}


def classified() -> dict[str, torch.Tensor]:
    return {**texts(), "labels": torch.tensor([0, 2, 1, 2])}


def measured() -> dict[str, torch.Tensor]:
    return {**texts(), "labels": torch.tensor([0.5, -1.0, 2.0, 0.0])}


def answered() -> dict[str, torch.Tensor]:
    labels = tokens(4, 7, seed=3)
    labels[2, 5:] = -100
    return {**texts(), "labels": labels}


def bert(**settings: Any) -> Any:
    changed = copy.deepcopy(tiny.BERT)
    for name, value in settings.items():
        setattr(changed, name, value)
    return changed


# The model, a batch, and settings of the plugin. Dropout is that of the plugin, which has none.
KINDS: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
    "gpt2": (*tiny.DECODERS["gpt2"], continued, {}),
    "gpt2, padded in front": (*tiny.DECODERS["gpt2"], padded_in_front, {}),
    "llama": (*tiny.DECODERS["llama, shared keys"], continued, {}),
    "bert, words": (transformers.MegatronBertForMaskedLM, tiny.BERT, masked, {}),
    "bert, words and sentences": (transformers.MegatronBertForPreTraining, tiny.BERT, pairs, {}),
    "bert, classes": (transformers.MegatronBertForSequenceClassification, bert(num_labels=3), classified, {}),
    "bert, numbers": (transformers.MegatronBertForSequenceClassification, bert(num_labels=1), measured, {}),
    "t5": (transformers.T5ForConditionalGeneration, tiny.T5S["t5"], answered, {}),
    "t5, gated, nothing computed again": (
        transformers.T5ForConditionalGeneration,
        tiny.T5S["t5, gated"],
        answered,
        {"other_megatron_args": {"recompute_granularity": None}},
    ),
    "llama, attention computed again": (
        *tiny.DECODERS["llama, shared keys"],
        continued,
        {"recompute_granularity": "selective"},
    ),
}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """The same batch again and again."""

    def __init__(self, batch: dict[str, torch.Tensor], times: int) -> None:
        self.batch, self.times = batch, times

    def __len__(self) -> int:
        return 4 * self.times

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: value[index % 4] for name, value in self.batch.items()}


def train(kind: Any, config: Any, batch: Any, **settings: Any) -> list[float]:
    acc = training.accelerator(**settings)
    net = tiny.model(kind, config)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    net, optimizer, loader = acc.prepare(net, optimizer, DataLoader(Rows(batch(), 3), batch_size=4))
    net.train()
    losses = []
    for rows in loader:
        output = net(**rows)
        losses.append((output.loss if hasattr(output, "loss") else output).item())
    training.end(acc)
    return losses


def expected(kind: Any, config: Any, batch: Any) -> list[float]:
    """The losses of a plain loop."""
    net = tiny.model(kind, config)
    for module in net.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR)
    losses = []
    for _ in range(3):
        loss = net(**batch()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def all_kinds(tensor: int, pipeline: int) -> tuple[dict[str, list[float]], list[torch.Tensor]]:
    """The losses of each kind, and logits of one."""
    losses = {}
    for name, (kind, config, batch, settings) in KINDS.items():
        impossible = name.startswith("t5") if pipeline > 1 else False
        if not impossible:
            losses[name] = train(kind, config, batch, tp_degree=tensor, pp_degree=pipeline, **settings)
    if tensor > 1:
        kind, config, batch, _ = KINDS["llama"]
        losses["llama"] = train(kind, config, batch, tp_degree=tensor, sequence_parallelism=True)
    return losses, logits(tensor, pipeline)


def logits(tensor: int, pipeline: int) -> list[torch.Tensor]:
    acc = training.accelerator(tp_degree=tensor, pp_degree=pipeline, return_logits=True)
    kind, config, batch, _ = KINDS["gpt2"]
    net, loader = acc.prepare(tiny.model(kind, config), DataLoader(Rows(batch(), 1), batch_size=4))
    net.eval()
    found = [net(**rows).logits for rows in loader]
    training.end(acc)
    return found


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 1), (1, 2)])
def test_losses_are_those_of_transformers(tensor: int, pipeline: int) -> None:
    (found, [first]), (same, [second]) = run_world(all_kinds, 2, tensor, pipeline)
    assert found == same
    kind, config, batch, _ = KINDS["gpt2"]
    with torch.no_grad():
        wanted = tiny.model(kind, config)(**batch()).logits
    seen = batch()["attention_mask"] == 1
    for logits in (first, second):
        torch.testing.assert_close(logits[seen], wanted[seen], rtol=1e-4, atol=1e-4)
    for name, losses in found.items():
        assert losses == pytest.approx(expected(*KINDS[name][:3]), rel=1e-3), name
        assert abs(losses[-1] - losses[0]) > 0.01, name


def test_documents_in_one_row() -> None:
    """With their ends known, they neither look at each other nor count positions on."""
    plugin = SimpleNamespace(custom_get_batch_function=None, custom_loss_function=None)
    accelerator = SimpleNamespace(state=SimpleNamespace(megatron_lm_plugin=plugin))
    args = SimpleNamespace(
        eos_token_id=9,
        reset_position_ids=True,
        reset_attention_mask=True,
        eod_mask_loss=True,
        return_logits=False,
        megatron_dataset_flag=False,
        model_return_dict=False,
    )
    step = GPTTrainStep(accelerator, args)
    row = torch.tensor([[4, 5, 9, 6, 9, 7, 8]])
    found, labels, loss_mask, mask, positions = step.get_batch(iter([{"input_ids": row}]))
    assert torch.equal(found, row)
    assert labels.tolist() == [[5, 9, 6, 9, 7, 8, 0]]
    assert loss_mask.tolist() == [[1, 1, 0, 1, 0, 1, 0]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1]]
    document = [0, 0, 0, 1, 1, 2, 2]
    for query in range(7):
        for key in range(7):
            assert mask[0, 0, query, key] == (key > query or document[key] != document[query])
    args.eos_token_id = None
    with pytest.raises(ValueError, match="ends of documents are not known"):
        GPTTrainStep(accelerator, args).get_batch(iter([{"input_ids": row}]))


def test_no_step_for_other_models() -> None:
    with pytest.raises(ValueError, match="no train step for models of the kind 'vit'"):
        train_step_for(None, SimpleNamespace(model_type_name="vit"))


def fields() -> tuple[list[dict[str, Any]], list[str]]:
    """Of configs for megatron-core, and what is said about those that cannot be."""
    from tests.megatron import on_cpu

    on_cpu.install()
    from accelerate.engines.megatron.models import padded_vocab_size, transformer_config

    gpt2, llama = tiny.DECODERS["gpt2"][1], tiny.DECODERS["llama, shared keys"][1]
    shown = []
    for config, dtype, settings in (
        (gpt2, torch.bfloat16, {"other_megatron_args": {"bias_dropout_fusion": True}}),
        (
            llama,
            torch.float32,
            {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "recompute_granularity": "full"},
        ),
        (tiny.BERT, torch.float16, {"hidden_dropout": 0.2, "recompute_granularity": "selective"}),
        (tiny.T5S["t5, gated"], torch.float32, {"tp_degree": 2, "sequence_parallelism": True}),
    ):
        made = transformer_config(MegatronLMPlugin(**settings), config, dtype)
        shown.append({name: getattr(made, name) for name in SHOWN})

    said = []
    changed = {"gpt2": copy.deepcopy(gpt2), "llama": copy.deepcopy(llama), "yarn": copy.deepcopy(llama)}
    changed["gpt2"].scale_attn_by_inverse_layer_idx = True
    changed["llama"].attention_bias = True
    changed["yarn"].rope_parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    tanh = copy.deepcopy(gpt2)
    tanh.activation_function = "tanh"
    three, odd, keys = copy.deepcopy(gpt2), copy.deepcopy(gpt2), copy.deepcopy(llama)
    three.n_layer, odd.n_inner, keys.num_key_value_heads, keys.num_attention_heads = 3, 45, 3, 12
    keys.head_dim = 8
    transformer_config(MegatronLMPlugin(pp_degree=2, decoder_last_pipeline_num_layers=1), three, torch.float32)
    refused: list[tuple[Any, dict[str, Any]]] = [
        (changed["gpt2"], {}),
        (changed["llama"], {}),
        (changed["yarn"], {}),
        (tanh, {}),
        (transformers.BertConfig(), {}),
        (tiny.T5S["t5"], {"pp_degree": 2}),
        (tiny.BERT, {"tp_degree": 2, "sequence_parallelism": True}),
        (gpt2, {"tp_degree": 3}),
        (gpt2, {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 3}),
        (gpt2, {"context_parallel_size": 2}),
        (gpt2, {"expert_model_parallel_size": 2}),
        (llama, {"use_rotary_position_embeddings": False}),
        (tiny.BERT, {"return_logits": True}),
        (gpt2, {"other_megatron_args": {"attention_backend": "flash"}}),
        (three, {"pp_degree": 2}),
        (gpt2, {"pp_degree": 4}),
        (gpt2, {"decoder_last_pipeline_num_layers": 1}),
        (odd, {"tp_degree": 2}),
        (keys, {"tp_degree": 2}),
    ]
    for config, settings in refused:
        with pytest.raises((ValueError, ImportError)) as error:
            transformer_config(MegatronLMPlugin(**settings), config, torch.float32)
        said.append(str(error.value))
    assert padded_vocab_size({}, 50257, 2) == 50432
    assert padded_vocab_size({"make_vocab_size_divisible_by": 8}, 99, 2) == 112
    with pytest.raises(ValueError, match="does not fit into padded_vocab_size=100 over 3"):
        padded_vocab_size({"padded_vocab_size": 100}, 99, 3)
    return shown, said


SHOWN = (
    "hidden_size",
    "num_query_groups",
    "normalization",
    "gated_linear_unit",
    "params_dtype",
    "bias_dropout_fusion",
    "hidden_dropout",
    "recompute_granularity",
    "recompute_method",
    "virtual_pipeline_model_parallel_size",
    "sequence_parallel",
)


def test_configs() -> None:
    shown, said = run_world(fields, 1)[0]
    layer = ("LayerNorm", False)
    root = ("RMSNorm", True)
    assert [tuple(one.values()) for one in shown] == [
        (32, 4, *layer, torch.bfloat16, True, 0.0, "full", "uniform", None, False),
        (32, 2, *root, torch.float32, False, 0.0, "full", "uniform", None, False),
        (32, 4, *layer, torch.float16, False, 0.2, "selective", None, None, False),
        (32, 4, *root, torch.float32, False, 0.0, "full", "uniform", None, True),
    ]
    expected = (
        "scale_attn_by_inverse_layer_idx=True",
        "attention_bias=True and mlp_bias=False",
        "'yarn'",
        "no activation 'tanh'",
        "'bert' cannot be built for Megatron-LM, only gpt2, llama, megatron-bert, t5",
        "no pipeline for models with an encoder and a decoder",
        "no sequence parallelism without apex",
        "4 attention heads cannot be divided over 3",
        "2 layers cannot be divided into 2 pipeline stages of 3 layers",
        "needs Transformer Engine",
        "No model that is built here has experts",
        "positions of a llama are rotary, and",
        "a megatron-bert returns no logits",
        "'flash' needs Transformer Engine",
        "3 layers cannot be divided evenly into 2 pipeline stages: change pp_degree, or set decoder_last",
        "2 layers cannot be divided evenly into 4 pipeline stages",
        "2 layers cannot be divided evenly into 1 pipeline stages, of which the last has 1: change pp_degree",
        "45 hidden sizes of an MLP cannot be divided over 2",
        "3 key-value heads cannot be divided over 2",
    )
    for words, sentence in zip(expected, said, strict=True):
        assert words in sentence, sentence
