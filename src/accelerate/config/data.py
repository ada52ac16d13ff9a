"""How data loaders are spread over processes."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class DataLoaderConfiguration:
    """How `Accelerator.prepare` treats data loaders."""

    split_batches: bool = field(
        default=False,
        metadata={"help": "Split each batch over the processes instead of giving each process whole batches."},
    )
    dispatch_batches: bool | None = field(
        default=None,
        metadata={"help": "Read on the main process and send out; by default only for iterable datasets."},
    )
    even_batches: bool = field(
        default=True,
        metadata={"help": "Repeat samples from the start until all processes have equally many full batches."},
    )
    use_seedable_sampler: bool = field(
        default=False,
        metadata={"help": "Shuffle with a sampler whose order depends only on the seed and the epoch."},
    )
    data_seed: int | None = field(
        default=None, metadata={"help": "The seed of that sampler; by default torch's current seed."}
    )
    non_blocking: bool = field(
        default=False, metadata={"help": "Copy batches to the device without waiting; needs pinned memory."}
    )
    use_stateful_dataloader: bool = field(
        default=False, metadata={"help": "Use torchdata's StatefulDataLoader, which can save its position."}
    )
    exact_resume: bool = field(
        default=False,
        metadata={"help": "After `load_state`, have each loader start by itself at the next unseen sample."},
    )
    shuffle: str | None = field(
        default=None,
        metadata={
            "help": "How loaders with shuffle=True shuffle: None as torch does, with a list of all indices; 'indexed' "
            "with none, by seed and epoch, for datasets of any size."
        },
    )

    def __post_init__(self) -> None:
        if self.shuffle not in (None, "indexed"):
            raise ValueError(f"shuffle is {self.shuffle!r}: choose None or 'indexed'.")
