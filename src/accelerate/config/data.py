"""How data loaders are spread over processes."""

from __future__ import annotations

from dataclasses import dataclass

from accelerate.errors import check_flag

_FLAGS = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking",
          "use_stateful_dataloader", "exact_resume")  # fmt: skip


@dataclass
class DataLoaderConfiguration:
    """How `Accelerator.prepare` treats data loaders.

    Args:
        split_batches: split each batch over the processes instead of giving each process whole batches.
        dispatch_batches: read on the main process and send out; by default only for iterable datasets.
        even_batches: repeat samples from the start until all processes have equally many full batches.
        use_seedable_sampler: shuffle with a sampler whose order depends only on the seed and the epoch.
        data_seed: the seed of that sampler; by default torch's current seed.
        non_blocking: copy batches to the device without waiting; needs pinned memory.
        use_stateful_dataloader: use torchdata's StatefulDataLoader, which can save its position.
        exact_resume: after `load_state`, have each loader start by itself at the next unseen sample.
        shuffle: how loaders with shuffle=True shuffle: None as torch does, with a list of all indices; 'indexed' with
            none, by seed and epoch, for datasets of any size.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    exact_resume: bool = False
    shuffle: str | None = None

    def __post_init__(self) -> None:
        for name in _FLAGS:
            check_flag(name, getattr(self, name))
        if self.shuffle not in (None, "indexed"):
            raise ValueError(f"shuffle is {self.shuffle!r}: choose None or 'indexed'.")
