"""Reading large files straight to where their tensors belong, with a look at the checksums on the way."""

from __future__ import annotations

import json
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from accelerate.checkpoint import files, stream, torchfile
from accelerate.checkpoint.disk import Entry

CPU = torch.device("cpu")

# Which device a tensor of a file goes to, by the keys under which it is found there.
Device = Callable[[tuple[Any, ...]], torch.device]


@dataclass
class Reader:
    """Reads the files of one checkpoint.

    unchecked: what the manifest says of files whose checksums nobody has compared; those that are read here leave it.
    share: which of how many processes this one is that read the same files at once: each compares its part.
    """

    folder: Path
    unchecked: dict[str, Entry] = field(default_factory=dict)
    share: tuple[int, int] = (0, 1)

    def weights(self, name: str, devices: Mapping[str, torch.device]) -> dict[str, Any]:
        """The weights in a file, on the devices of their names."""

        def device(keys: tuple[Any, ...]) -> torch.device:
            return devices.get(keys[0], CPU)

        if name.endswith(".safetensors"):
            return self._safetensors(name, device)
        found: dict[str, Any] = self.content(name, device)
        return found

    def content(self, name: str, device: Device = lambda keys: CPU) -> Any:
        """What is in a file of `torch.save`; large tensors on the devices that `device` says."""
        path = self.folder / name
        if not path.exists() or not zipfile.is_zipfile(path):
            return files.read_torch(path)  # as torch did before 1.6; it is compared later on
        with files.explaining(path):
            opened = torchfile.Opened(path)
        places = dict(opened.places)
        for address, users in _users(opened.content).items():
            if address not in places:
                continue
            offset, memory = places[address]
            targets = {device(keys) for _, keys, _ in users}
            whole = all(t.is_contiguous() and t.nbytes == len(memory) for _, _, t in users)
            if not whole or targets == {CPU} or len(targets) > 1 or len({_kind(t) for _, _, t in users}) > 1:
                continue
            moved = torch.empty_like(users[0][2], device=targets.pop())
            for holder, keys, _ in users:
                holder[keys[-1]] = moved
            places[address] = (offset, stream.flat(moved))
        self._fill(name, list(places.values()))
        return opened.content

    def _safetensors(self, name: str, device: Device) -> dict[str, torch.Tensor]:
        path = self.folder / name
        mapped = files.read_safetensors(path)
        away = {key: target for key in mapped if (target := device((key,))).type != "cpu"}
        places = []
        if away:
            with open(path, "rb") as file:
                length = int.from_bytes(file.read(8), "little")
                header = json.loads(file.read(length))
            for key, target in away.items():
                mapped[key] = torch.empty_like(mapped[key], device=target)
                places.append((8 + length + header[key]["data_offsets"][0], stream.flat(mapped[key])))
        self._fill(name, places)
        return mapped

    def _fill(self, name: str, places: list[tuple[int, torch.Tensor]]) -> None:
        places = sorted((place for place in places if len(place[1])), key=lambda place: place[0])
        with files.explaining(self.folder / name):
            stream.read_file(self.folder / name, places, self.unchecked.pop(name, None), self.share)


def _kind(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape


def _users(content: Any) -> dict[int, list[tuple[Any, tuple[Any, ...], torch.Tensor]]]:
    """The tensors in nested contents, by their memory: what holds each, under which keys."""
    found: dict[int, list[tuple[Any, tuple[Any, ...], torch.Tensor]]] = defaultdict(list)

    def look(holder: Any, keys: tuple[Any, ...], value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                return
            found[value.untyped_storage().data_ptr()].append((holder, keys, value))
        elif isinstance(value, (dict, list, tuple)):
            for key, item in _items(value):
                look(value, (*keys, key), item)

    look(None, (), content)
    return found


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    return iter(list(value.items()) if isinstance(value, dict) else list(enumerate(value)))
