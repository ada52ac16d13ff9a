"""What a script sees of a model that Megatron-LM trains: outputs, metrics, weights, data, and refusals."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM

from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import (
    MegatronLMDummyDataLoader,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    gather_across_data_parallel_groups,
)
from tests.harness import run_world
from tests.megatron import training


def every_way(folder: str) -> None:
    for number, settings in enumerate(
        ({"tp_degree": 2}, {"pp_degree": 2, "num_micro_batches": 2}, {"num_micro_batches": 2})
    ):
        evaluates(settings)
        trains_and_saves(settings, Path(folder, str(number)))
    starts_alike()
    groups_parameters()
    takes_megatron_datasets()
    takes_arguments_of_data()
    reads_indexed_datasets_and_logs(Path(folder))
    refuses()
    refuses_data()
    takes_batches()
    trains_again_after_the_end()


def evaluates(settings: dict[str, Any]) -> None:
    """Losses and logits are those of the model of transformers, each sample once, also of a smaller last batch."""
    acc = training.accelerator(return_logits=True, **settings)
    data = training.Tokens(13)
    net, loader = acc.prepare(
        training.model(), DataLoader(data, batch_size=4 // (settings.get("num_micro_batches", 1)))
    )
    net.eval()
    tokens, logits, losses = [], [], []
    for batch in loader:
        outputs = net(**batch)
        # As a script does that asks nobody which process it is on.
        tokens.append(acc.gather_for_metrics(batch["input_ids"]))
        logits.append(acc.gather_for_metrics(outputs.logits))
        losses.append(acc.gather_for_metrics(outputs.loss))
    assert torch.equal(torch.cat(tokens), data.tokens)
    plain = training.model().eval()
    with torch.no_grad():
        wanted = plain(data.tokens).logits
        first = training.mean_loss(wanted[:4], data.tokens[:4])
    torch.testing.assert_close(torch.cat(logits), wanted, rtol=1e-4, atol=1e-4)
    copies = acc.num_processes // (acc.state.megatron_lm_plugin.tp_degree * acc.state.megatron_lm_plugin.pp_degree)
    assert losses[0].shape == (copies,)
    if copies == 1:
        torch.testing.assert_close(losses[0][0], first, rtol=1e-4, atol=1e-4)
    assert gather_across_data_parallel_groups(torch.tensor(acc.process_index)).numel() == copies
    with pytest.raises(RuntimeError, match="prepared without an optimizer"):
        net.train()(**batch)
    training.end(acc)


def trains_and_saves(settings: dict[str, Any], folder: Path) -> None:
    """Weights that are saved as a whole are those of transformers, and no step is taken where none was asked for."""
    acc = training.accelerator(**settings)
    net, optimizer, loader = training.objects(acc, settings.get("num_micro_batches", 1))
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=100)
    net, optimizer, loader, scheduler = acc.prepare(net, optimizer, loader, scheduler)
    assert acc.state.megatron_lm_plugin.global_batch_size == training.BATCH
    assert acc.unwrap_model(net) is net.chunks[0]
    batches = iter(loader)
    batch = next(batches)
    with torch.no_grad():
        before = net(**batch).loss
    assert net(**batch).loss == pytest.approx(before.item(), abs=1e-5)  # no step was taken by the forward before
    with pytest.warns(UserWarning, match="set `gradient_clipping`"):
        norm = acc.clip_grad_norm_(net.parameters(), 7.0)
    assert norm.item() == pytest.approx(float(net.grad_norm)) and norm > 0
    assert not acc.optimizer_step_was_skipped
    assert 0 < scheduler.get_last_lr()[0] < training.LR
    with torch.no_grad():
        after = net(**batch).loss
    assert after < before
    state = acc.get_state_dict(net)
    assert bool(state) == acc.is_main_process
    acc.save_model(net, folder)
    acc.wait_for_everyone()
    from safetensors.torch import load_file

    again = GPT2LMHeadModel(training.model().config)
    again.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    again.tie_weights()
    with torch.no_grad():
        rows = gather_across_data_parallel_groups(batch["input_ids"])
        wanted = training.mean_loss(again.eval()(rows).logits, rows)
    assert after.item() == pytest.approx(wanted.item(), abs=1e-4)
    training.end(acc)


def starts_alike() -> None:
    """A script that sets no seed has another model on each process: that of the first one is trained."""
    for settings in ({"tp_degree": 2}, {"pp_degree": 2}, {}):
        for others_are_empty in (False, True):
            acc = training.accelerator(**settings)
            net = training.model(seed=acc.process_index)
            if others_are_empty and not acc.is_main_process:
                net = net.to("meta")
            prepared = acc.prepare(net)
            every = acc.gather_for_metrics(prepared.eval()(**_batch()).loss)
            with torch.no_grad():
                wanted = training.model(seed=0).eval()(**_batch()).loss
            assert every.tolist() == pytest.approx([wanted.item()] * len(every), abs=1e-4), settings
            training.end(acc)


def _batch() -> dict[str, torch.Tensor]:
    tokens = training.Tokens(4).tokens
    return {"input_ids": tokens, "labels": tokens}


def groups_parameters() -> None:
    """Conditions of the plugin, and groups of the script, decide on rates and weight decay, without a scheduler too."""

    def groups(several: bool, rate: float = training.LR, **settings: Any) -> dict[str, tuple[float, float]]:
        acc = training.accelerator(**settings)
        net = training.model()
        every = list(net.parameters())
        given: Any = [{"params": every[:5]}, {"params": every[5:], "weight_decay": 0.0}]
        if not several:
            given = [{"params": every, "lr": rate}]
        prepared, made = acc.prepare(net, torch.optim.AdamW(given, lr=training.LR, weight_decay=0.1))
        names = {id(parameter): name.split("module.")[-1] for name, parameter in prepared.named_parameters()}
        found = {
            names[id(p)]: (group["lr"], group["weight_decay"]) for group in made.param_groups for p in group["params"]
        }
        training.end(acc)
        return found

    rate = training.LR
    assert set(groups(False).values()) == {(rate, 0.1)}, "one group: as the script says"
    assert set(groups(False, 1e-6).values()) == {(1e-6, 0.1)}, "in the group itself, too"
    for name, found in groups(True).items():
        small = name.endswith("bias") or "norm" in name
        assert found == (rate, 0.0 if small else 0.1), name
    chosen = groups(
        False,
        no_wd_decay_cond=lambda name, parameter: "embedding" in name,
        scale_lr_cond=lambda name, parameter: "word" in name,
        lr_mult=0.5,
    )
    for name, found in chosen.items():
        wanted = (rate * 0.5 if "word" in name else rate, 0.0 if "embedding" in name else 0.1)
        assert found == wanted, name


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Samples as Megatron-LM's own datasets have them: one token more than the model is given."""

    def __init__(self, samples: int) -> None:
        self.text = torch.randint(1, 64, (samples, training.LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.text)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"text": self.text[index]}


def reads_indexed_datasets_and_logs(folder: Path) -> None:
    """Files as Megatron-LM's tools write them, and what TensorBoard is told."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_bin_path, get_idx_path

    acc = training.accelerator(
        tp_degree=2,
        megatron_dataset_flag=True,
        eval_iters=1,
        tensorboard_dir=str(folder / "board"),
        set_all_logging_options=True,
    )
    prefix = str(folder / "texts")
    if acc.is_main_process:
        builder = IndexedDatasetBuilder(get_bin_path(prefix), dtype=numpy.int32)
        for row in Texts(80).text:
            builder.add_document(row, [len(row)])
        builder.finalize(get_idx_path(prefix))
    acc.wait_for_everyone()
    net = training.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=training.LR)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=6)
    dummy = MegatronLMDummyDataLoader(
        micro_batch_size=4, data_path=[prefix], split="80,20,0", seq_length=training.LENGTH, seed=3
    )
    net, optimizer, scheduler, train, valid, _ = acc.prepare(net, optimizer, scheduler, dummy, dummy, dummy)
    batch = next(train)
    assert batch["text"].shape == (4, training.LENGTH + 1)
    losses = [net(**batch).loss.item() for _ in range(3)]
    assert losses[2] < losses[0]
    net.eval()
    net(**next(valid))
    net.train()
    acc.wait_for_everyone()
    if acc.is_main_process:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        board = EventAccumulator(str(folder / "board"))
        board.Reload()
        found = [event.value for event in board.Scalars("lm loss")]
        assert found == pytest.approx(losses, abs=1e-5)
        assert {"grad-norm", "learning-rate", "num-zeros", "lm loss validation"} <= set(board.Tags()["scalars"])
    training.end(acc)


def takes_megatron_datasets() -> None:
    asked = []

    def datasets(counts: list[int]) -> tuple[Any, Any, Any]:
        asked.append(counts)
        return Texts(counts[0]), Texts(counts[1]), None

    acc = training.accelerator(
        num_micro_batches=2,
        megatron_dataset_flag=True,
        custom_megatron_datasets_provider_function=datasets,
        seq_length=training.LENGTH,
        eval_iters=1,
        eval_interval=10,
        consumed_samples=[8],
    )
    net = training.model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=training.LR)
    scheduler = MegatronLMDummyScheduler(optimizer, total_num_steps=20)
    dummy = MegatronLMDummyDataLoader(micro_batch_size=2, splits_string="90,10,0")
    net, optimizer, scheduler, train, valid, test = acc.prepare(net, optimizer, scheduler, dummy, dummy, dummy)
    assert net.args.split == "90,10,0", "by the name that examples of the release have for it"
    copies = acc.num_processes
    assert asked == [[10 * 4 * copies, 2 * 4 * copies, 4 * copies]]
    assert (len(train), len(valid), len(test)) == (10 - 8 // (4 * copies), 2, 0)
    whole = Texts(asked[0][0]).text
    batch = next(train)
    start = 8 + acc.process_index * 4
    assert torch.equal(batch["text"], whole[start : start + 4]), "each copy of the model has its share"
    losses = [net(**batch).loss.item() for batch in (batch, next(train))]
    assert all(loss > 0 for loss in losses)
    seen = sum(1 for _ in valid)
    assert seen == 2
    training.end(acc)


def takes_arguments_of_data() -> None:
    """What the stand-in of a loader is given is known to stages and train step: lengths, and the ends of documents."""
    text = Texts(8).text
    end = int(text[0, 3])
    acc = training.accelerator(
        pp_degree=2, custom_megatron_datasets_provider_function=lambda counts: (Texts(8), None, None), train_iters=2
    )
    net = training.model()
    dummy = MegatronLMDummyDataLoader(
        micro_batch_size=4, seq_length=training.LENGTH, eos_token_id=end, eod_mask_loss=True, reset_position_ids=True
    )
    prepared, _, train = acc.prepare(net, torch.optim.AdamW(net.parameters(), lr=training.LR), dummy)
    found = prepared(**next(train)).loss.item()
    tokens, labels = text[:4, :-1], text[:4, 1:]
    ends = tokens == end
    positions = torch.zeros_like(tokens)
    for place in range(1, training.LENGTH):
        positions[:, place] = torch.where(ends[:, place - 1], 0, positions[:, place - 1] + 1)
    with torch.no_grad():
        logits = training.model()(tokens, position_ids=positions).logits
    wanted = torch.nn.functional.cross_entropy(logits[~ends], labels[~ends])
    assert found == pytest.approx(wanted.item(), abs=1e-4)
    training.end(acc)


def refuses() -> None:
    def refused(error: type[Exception], sentence: str, **settings: Any) -> None:
        with pytest.raises(error, match=sentence) as caught:
            training.accelerator(**settings)
        assert "\n" not in str(caught.value)

    refused(ValueError, "does not fit the 2 processes of this run: start a multiple of 3", tp_degree=3)
    refused(NotImplementedError, "cp_size", context_parallel_size=2)
    refused(NotImplementedError, "use FSDP", use_custom_fsdp=True)
    refused(ValueError, "set tp_degree to 2 or", sequence_parallelism=True)
    with pytest.raises(NotImplementedError, match="leave out `dynamo_backend`"):
        Accelerator(cpu=True, dynamo_backend="inductor", megatron_lm_plugin=MegatronLMPlugin())
    with pytest.raises(ValueError, match="set `num_micro_batches=4`"):
        Accelerator(cpu=True, gradient_accumulation_steps=4, megatron_lm_plugin=MegatronLMPlugin())
    acc = training.accelerator()
    net, optimizer, loader = training.objects(acc)
    with pytest.raises(ValueError, match="pass them to one call of `prepare`"):
        acc.prepare(optimizer)
    with pytest.raises(ValueError, match="pass them to one call of `prepare`"):
        acc.prepare(net, MegatronLMDummyScheduler(optimizer, total_num_steps=4))
    small = dict.fromkeys(("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads"), 2)
    other = GPTNeoXForCausalLM(GPTNeoXConfig(**small, intermediate_size=2))
    with pytest.raises(
        ValueError, match=r"type 'gpt_neox' cannot be built .* `MegatronLMPlugin\(custom_model_provider"
    ):
        acc.prepare(other)
    with pytest.raises(ValueError, match="pass a `MegatronLMDummyScheduler`"):
        acc.prepare(net, optimizer, loader, torch.optim.lr_scheduler.ConstantLR(optimizer))
    with pytest.raises(ValueError, match="no optimizer like Adagrad"):
        acc.prepare(net, torch.optim.Adagrad(net.parameters()), loader)
    every = list(net.parameters())
    with pytest.raises(ValueError, match=f"{len(every) - 1} of the {len(every)} parameters are not in the optimizer"):
        acc.prepare(net, torch.optim.AdamW(every[:1]), loader)
    with pytest.raises(ValueError, match="other `lr`"):
        acc.prepare(net, torch.optim.AdamW([{"params": every[:1], "lr": 1.0}, {"params": every[1:]}]), loader)
    every[0].requires_grad_(False)
    with pytest.raises(ValueError, match=r"`transformer\.wte\.weight` is frozen"):
        acc.prepare(net, optimizer, loader)
    every[0].requires_grad_(True)
    with pytest.raises(ValueError, match="`custom_model_provider_function`"):
        acc.prepare(torch.nn.Linear(2, 2), optimizer, loader)
    with pytest.raises(ValueError, match="trains one model"):
        acc.prepare(net, training.model(1))
    prepared = acc.prepare(net, optimizer, loader)[0]
    with pytest.raises(ValueError, match="only by their norm"):
        acc.clip_grad_value_(prepared.parameters(), 1.0)
    with pytest.raises(ValueError, match="trains one model"):
        acc.prepare(training.model(1))
    training.end(acc)


def refuses_data() -> None:
    """What stands for loaders and schedulers has known names alone, and is good for three loaders, once."""

    def refused(sentence: str, *given: Any, **settings: Any) -> None:
        acc = training.accelerator(
            custom_megatron_datasets_provider_function=lambda counts: (Texts(8), None, None), **settings
        )
        net, optimizer, _ = training.objects(acc)
        with pytest.raises(ValueError, match=sentence) as caught:
            acc.prepare(net, optimizer, *(each(optimizer) if callable(each) else each for each in given))
        assert "\n" not in str(caught.value)
        training.end(acc)

    dummy = MegatronLMDummyDataLoader
    refused(
        r"`MegatronLMDummyDataLoader` has unknown names: `micro_batch_sise` \(did you mean `micro_batch_size`\?\);",
        dummy(micro_batch_sise=4),
    )
    refused("cannot be used to set `tensor_model_parallel_size`: set `tp_degree`", dummy(tensor_model_parallel_size=2))
    refused(
        r"`MegatronLMDummyScheduler` has .*: `warmup_num_step` \(did you mean `warmup_num_steps`\?\)",
        lambda optimizer: MegatronLMDummyScheduler(optimizer, total_num_steps=4, warmup_num_step=2),
    )
    four = [dummy(micro_batch_size=4, seq_length=training.LENGTH)] * 4
    refused("4 of them were passed", *four, train_iters=2)
    refused(
        "made from one `MegatronLMDummyDataLoader`", dummy(micro_batch_size=4), dummy(micro_batch_size=2), train_iters=2
    )
    acc = training.accelerator(
        custom_megatron_datasets_provider_function=lambda counts: (Texts(8), Texts(8), None),
        train_iters=2,
        custom_train_step_class=training.OwnTrainStep,
    )
    acc.prepare(*training.objects(acc)[:2], dummy(micro_batch_size=4, mine="of the train step"))
    with pytest.raises(ValueError, match="in one call of `prepare`"):
        acc.prepare(dummy(micro_batch_size=4))
    training.end(acc)


def takes_batches() -> None:
    """What is no tensor of samples is the same for all micro-batches, and what does not fit is said on all stages."""
    for settings in ({"tp_degree": 2, "num_micro_batches": 2}, {"pp_degree": 2, "num_micro_batches": 2}):
        acc = training.accelerator(**settings)
        net, *_ = acc.prepare(*training.objects(acc, 2))
        batch, places = _batch(), torch.arange(training.LENGTH)[None]
        net.eval()
        wanted = net(**batch).loss.item()
        found = net(**batch, use_cache=False, attention_mask=None, position_ids=places, whole=torch.tensor(1.0)).loss
        assert found.item() == pytest.approx(wanted)
        with pytest.raises(TypeError, match="takes a batch as keyword arguments"):
            net(batch["input_ids"])
        with pytest.raises(ValueError, match="`labels` has 2 rows, but the batch has 4 samples"):
            net(input_ids=batch["input_ids"], labels=batch["labels"][:2])
        with pytest.raises(ValueError, match="have 17 tokens, but the model has only 16 positions"):
            net(input_ids=torch.ones(4, 17, dtype=torch.long))
        with pytest.raises(ValueError, match=r"have the shape \[12\], .* give the loader a `batch_size`"):
            net(input_ids=batch["input_ids"][0])
        if "tp_degree" in settings:  # else a stage waits for the one that has the error
            with pytest.raises(ValueError, match="needs `input_ids` of a batch, which has labels"):
                net(labels=batch["labels"])
        with pytest.raises(NotImplementedError, match="LocalSGD with Megatron, whose processes hold shards of a model"):
            LocalSGD(acc, net, 2)
        training.end(acc)


def trains_again_after_the_end() -> None:
    """The groups of Megatron-LM end with the training, and nothing keeps its model."""
    acc = training.accelerator(tp_degree=2)
    aside = torch.nn.Linear(2, 2)
    assert acc.prepare_model(aside, evaluation_mode=True) is aside
    net, optimizer, loader = acc.prepare(*training.objects(acc))
    first = net(**next(iter(loader))).loss.item()
    gone = weakref.ref(net)
    acc.free_memory()
    acc.end_training()
    del acc, net, optimizer, loader
    gc.collect()
    assert gone() is None
    again = training.accelerator(tp_degree=2)
    net, _, loader = again.prepare(*training.objects(again))
    assert net(**next(iter(loader))).loss.item() == pytest.approx(first)
    training.end(again)


def test_on_two_processes(tmp_path: Path) -> None:
    run_world(every_way, 2, str(tmp_path), timeout=150)
