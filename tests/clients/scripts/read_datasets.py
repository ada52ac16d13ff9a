"""What each process reads of a sharded stream of Hugging Face datasets: `python read_datasets.py FILE` writes JSON."""

import json
import sys

from datasets import IterableDataset
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import gather_object


def samples(shards):
    for shard in shards:
        for number in range(4):
            yield {"x": shard * 100 + number}


def main() -> None:
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    read = {}
    for shards in (1, 2, 4):
        stream = IterableDataset.from_generator(samples, gen_kwargs={"shards": list(range(shards))})
        loader = accelerator.prepare(DataLoader(stream.with_format("torch"), batch_size=2))
        mine = [batch["x"].tolist() for batch in loader]
        read[shards] = gather_object([[type(loader.dataset).__name__, mine]])
    if accelerator.is_main_process:
        with open(sys.argv[1], "w") as file:
            json.dump(read, file)
    accelerator.end_training()


if __name__ == "__main__":
    main()
