"""A task on text for tests: does a second sentence agree with the first one? All of it is made here, offline."""

from __future__ import annotations

import csv
import itertools
import os
import random
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from accelerate.config.enums import DistributedType
from accelerate.state import PartialState
from accelerate.test_utils.checks import shared_folder

PAD, START, END = range(3)
# Every model of language has more words than this, so that the numbers of these fit all of them.
WORDS = 128
NO_LABEL = -100

_NOUNS = ("cat", "dog", "teacher", "river", "ship", "city")
_VERBS = ("sees", "likes", "finds", "follows", "remembers")
_ANSWERS = (("no", "never", "hardly"), ("yes", "indeed", "truly"))


class Pair(NamedTuple):
    """Two sentences, and 1 if they agree."""

    first: str
    second: str
    label: int


def make_pairs(number: int, seed: int = 0) -> list[Pair]:
    """As many pairs, every other one of which agrees."""
    draw = random.Random(seed)
    pairs = []
    for index in range(number):
        sentence = f"the {draw.choice(_NOUNS)} {draw.choice(_VERBS)} the {draw.choice(_NOUNS)}"
        label = index % 2
        pairs.append(Pair(sentence, " ".join([*draw.sample(_ANSWERS[label], 2), sentence]), label))
    return pairs


def read_pairs(path: Path) -> list[Pair]:
    """The pairs of a csv file with the columns sentence1, sentence2 and label."""
    with path.open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    labels = {label: number for number, label in enumerate(dict.fromkeys(row["label"] for row in rows))}
    return [Pair(row["sentence1"], row["sentence2"], labels[row["label"]]) for row in rows]


def numbers(sentence: str) -> list[int]:
    """The words of a sentence as numbers, the same in every process."""
    return [END + 1 + zlib.crc32(word.encode()) % (WORDS - END - 1) for word in sentence.lower().split()]


class PairDataset(Dataset[dict[str, Any]]):
    """Pairs as a model reads them: both sentences in one row."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.pairs = pairs

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        pair = self.pairs[index]
        first, second = [START, *numbers(pair.first), END], [*numbers(pair.second), END]
        return {
            "input_ids": first + second,
            "token_type_ids": [0] * len(first) + [1] * len(second),
            "attention_mask": [1] * (len(first) + len(second)),
            "labels": pair.label,
        }


class Batch(dict[str, torch.Tensor]):
    """A batch as tokenizers give it: a dict that moves to a device by itself."""

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """Moves every tensor, in place."""
        for name, tensor in self.items():
            self[name] = tensor.to(device, non_blocking=non_blocking)
        return self


def _rows(rows: list[list[int]], length: int, filler: int) -> torch.Tensor:
    return torch.tensor([row + [filler] * (length - len(row)) for row in rows])


def collate(examples: list[dict[str, Any]], length: int | None = None) -> Batch:
    """Pads to the longest row, or to `length`."""
    length = length or max(len(example["input_ids"]) for example in examples)
    padded = {
        name: _rows([example[name] for example in examples], length, PAD)
        for name in ("input_ids", "token_type_ids", "attention_mask")
    }
    return Batch(padded, labels=torch.tensor([example["labels"] for example in examples]))


def collate_next_words(examples: list[dict[str, Any]], length: int | None = None, multiple: int = 1) -> Batch:
    """Pads, and gives each word the next one for a label; where there is none, the label is left out of the loss.

    multiple: the length of the rows is a multiple of it, as formats of lower precision want.
    """
    rows = [example["input_ids"] for example in examples]
    length = length or max(map(len, rows))
    length = -(-length // multiple) * multiple
    labels = _rows([row[1:] for row in rows], length, NO_LABEL)
    return Batch(input_ids=_rows(rows, length, PAD), labels=labels)


def get_dataloaders(
    accelerator: Any, batch_size: int = 16, model_name: str = "bert-base-cased", n_train: int = 320, n_val: int = 160
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders for training and for evaluation; the numbers of words fit every model, whatever its name."""
    return loaders(accelerator, make_pairs(n_train), make_pairs(n_val, seed=1), batch_size, eval_size=32)


def loaders(
    accelerator: Any, train: list[Pair], evaluation: list[Pair], batch_size: int, eval_size: int
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders of two lists of pairs, the first one shuffled."""
    pad = _Collate(collate, accelerator)
    return (
        DataLoader(PairDataset(train), shuffle=True, collate_fn=pad, batch_size=batch_size),
        DataLoader(PairDataset(evaluation), collate_fn=pad, batch_size=eval_size),
    )


class _Collate:
    """A way to pad, as the accelerator needs it; an object, because workers of loaders have to unpickle it."""

    def __init__(self, function: Any, accelerator: Any, **options: Any) -> None:
        # XLA compiles again for each shape.
        self.length = 128 if accelerator.distributed_type == DistributedType.XLA else None
        self.function = function
        self.options = options

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        return self.function(examples, self.length, **self.options)


def next_word_loaders(
    accelerator: Any, train: list[Pair], evaluation: list[Pair], batch_size: int, eval_size: int
) -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Loaders for models that go on with a sentence, in order."""
    multiple = {"no": 1, "fp8": 16}.get(accelerator.mixed_precision, 8)
    pad = _Collate(collate_next_words, accelerator, multiple=multiple)
    first, second = (
        DataLoader(PairDataset(pairs), collate_fn=pad, batch_size=size)
        for pairs, size in ((train, batch_size), (evaluation, eval_size))
    )
    return first, second


class Output(NamedTuple):
    """What models of the transformers library return, as far as the scripts read it."""

    loss: torch.Tensor | None
    logits: torch.Tensor


class BertLayer(nn.Module):
    """A layer, under the name that settings for the model it stands for would tell FSDP to wrap."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the same shape."""
        return hidden + self.narrow(self.wide(self.norm(hidden)).relu())


class Classifier(nn.Module):
    """A small stand-in for a pretrained model of two classes."""

    def __init__(self, width: int = 32, layers: int = 2) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.segments = nn.Embedding(2, width)
        self.layers = nn.ModuleList(BertLayer(width) for _ in range(layers))
        self.head = nn.Linear(width, 2)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        token_type_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
    ) -> Output:
        """Returns the loss, if there are labels, and the logits."""
        hidden = self.words(input_ids) + self.segments(token_type_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        weight = attention_mask[..., None].to(hidden.dtype)
        logits = self.head((hidden * weight).sum(1) / weight.sum(1))
        return Output(None if labels is None else nn.functional.cross_entropy(logits.float(), labels), logits)


def load_classifier(name: str, dtype: torch.dtype | None = None, **options: Any) -> nn.Module:
    """The model of a folder; for any other name a small one, because nothing is downloaded.

    options: those of `from_pretrained`. The small model knows none of them: for them it is a tiny Llama.
    """
    if not options and not os.path.isdir(name):
        return Classifier().to(dtype or torch.float32)
    from transformers import AutoModelForSequenceClassification

    if os.path.isdir(name):
        return AutoModelForSequenceClassification.from_pretrained(name, dtype=dtype, **options)
    with shared_folder() as folder:
        if PartialState().is_main_process:
            AutoModelForSequenceClassification.from_config(tiny_llama()).save_pretrained(folder)
        PartialState().wait_for_everyone()
        return AutoModelForSequenceClassification.from_pretrained(folder, dtype=dtype, **options)


def tiny_llama() -> Any:
    """The configuration of a Llama that is as small as it gets."""
    from transformers import LlamaConfig

    sizes: dict[str, Any] = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64}
    return LlamaConfig(**sizes, num_hidden_layers=2, num_attention_heads=4, pad_token_id=PAD)


class Scores:
    """Accuracy and F1 of predictions, batch by batch."""

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []

    def add_batch(self, predictions: torch.Tensor, references: torch.Tensor) -> None:
        """Takes in what was predicted, and what is right."""
        self.pairs.extend(zip(predictions.tolist(), references.tolist(), strict=True))

    def compute(self) -> dict[str, float]:
        """Returns the scores of all batches so far, and begins again."""
        pairs, self.pairs = self.pairs, []
        right = sum(predicted == wanted for predicted, wanted in pairs)
        ones = sum(itertools.chain.from_iterable(pairs))
        return {"accuracy": right / len(pairs), "f1": 2 * pairs.count((1, 1)) / ones if ones else 0.0}


def evaluate(accelerator: Any, model: nn.Module, loader: Any, metric: Any) -> dict[str, float]:
    """The scores of a model on all samples of a loader, each of which counts once, on every process."""
    model.eval()
    for batch in loader:
        with torch.no_grad():
            predictions = model(**batch.to(accelerator.device)).logits.argmax(dim=-1)
        gathered = accelerator.gather_for_metrics((predictions, batch["labels"]))
        metric.add_batch(predictions=gathered[0], references=gathered[1])
    scores: dict[str, float] = metric.compute()
    return scores
