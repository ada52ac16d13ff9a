"""Writing and reading the files of a checkpoint. Reading runs nothing of what is in them."""

from __future__ import annotations

import io
import json
import pickle
import pickletools
import re
import zipfile
from _compat_pickle import IMPORT_MAPPING as PYTHON_3_NAMES
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from accelerate import bounded, files
from accelerate.checkpoint import stream, torchfile
from accelerate.checkpoint.disk import Entry
from accelerate.errors import CheckpointError, MissingFile
from accelerate.torch_internals.serialization import names_taken


def write_torch(content: Any, path: Path, *, together: bool = False) -> Entry:
    """Write what `torch.load` reads. together: small tensors may become parts of one memory (see `together`)."""
    with naming(path.name):
        archive = torchfile.archive_of(content, together)
    return archive.write(path)


@contextmanager
def naming(name: str) -> Iterator[None]:
    """What goes wrong with something that cannot be copied or pickled, in one sentence with the file that it is for."""
    try:
        yield
    except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{name} cannot be written, since it is to hold something that cannot be pickled "
            f"({type(error).__name__}: {_first_line(error)}): have `state_dict` return tensors and plain values."
        ) from error


def write_safetensors(tensors: dict[str, Any], path: Path) -> Entry:
    order, header = safetensors_header(tensors)
    return stream.write_file(path, stream.joined([header, *[tensors[name] for name in order]]))


def safetensors_header(tensors: dict[str, Any]) -> tuple[list[str], bytes]:
    """The order in which tensors come in a file, and the bytes before the first; the tensors need no content."""
    entries = ['{"__metadata__":{"format":"pt"}']
    shapes: dict[torch.Size, str] = {}
    # The widest first, so that each starts at a multiple of its width.
    order = sorted(tensors, key=lambda name: (-_tensor(tensors[name], name).element_size(), name))
    offset = 0
    for name in order:
        tensor = tensors[name]
        kind = _safetensors_dtype(tensor.dtype)
        if kind is None:
            raise CheckpointError(
                f"{name} has dtype {tensor.dtype}, which safetensors has no place for: save with "
                "`safe_serialization=False`."
            )
        end = offset + tensor.numel() * tensor.element_size()
        shape = shapes.get(tensor.shape)
        if shape is None:
            shapes[tensor.shape] = shape = json.dumps(list(tensor.shape), separators=(",", ":"))
        entries.append(f'{json.dumps(name)}:{{"dtype":"{kind}","shape":{shape},"data_offsets":[{offset},{end}]}}')
        offset = end
    text = (",".join(entries) + "}").encode()
    text += b" " * (-len(text) % 8)
    return order, len(text).to_bytes(8, "little") + text


@cache
def _safetensors_dtype(dtype: torch.dtype) -> str | None:
    """What the installed safetensors calls a dtype; None for one that it could not read."""
    from safetensors.torch import save

    try:
        content = save({"x": torch.empty(0, dtype=dtype)})
    except Exception:
        return None
    name: str = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["x"]["dtype"]
    return name


def _tensor(value: Any, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"{name} in the state dict is a {type(value).__name__} and no tensor, which safetensors has no place for: "
            "save with `safe_serialization=False`."
        )
    return value


def read_torch(path: Path, map_location: Any = "cpu", **kwargs: Any) -> Any:
    """Read a file of tensors and plain values; anything else that it asks for is refused by name."""
    with explaining(path):
        bounded.check_plain(path)
        return files.load(path, map_location=map_location, **kwargs)


def refused(content: Any) -> str | None:
    """What in these contents would be refused when they are read, by name; None where all would be taken."""
    try:
        torchfile.try_to_read(content)
    except pickle.UnpicklingError as error:
        return _named_in(error) or _first_line(error)
    except Exception:  # it cannot be tried without its memory, as with some kinds of tensors; or not be written at all
        return None
    return None


def _named_in(error: Exception) -> str | None:
    named = re.search(r"(?:GLOBAL |but got <class ')([\w.<>]+)", str(error))
    return None if named is None else named.group(1)


def _asked_for(path: Path, error: Exception) -> str | None:
    """What a refused file wanted to be run or made, by name."""
    if (named := _named_in(error)) is not None:
        return named
    if _REFUSED not in str(error):
        return None
    # An older or newer kind of pickle, which is refused without a look at its names.
    always = names_taken()
    if always is None:
        return None
    taken = {*always, *map(files.name_of, files.TORCH_SAFE_GLOBALS)}
    with suppress(Exception):  # a damaged one
        return next(name for name in _names_in(path) if name not in taken)
    return None


def _names_in(path: Path) -> Iterator[str]:
    """What the pickles in a file of `torch.save` name, one after the other."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickled = archive.read(next(name for name in archive.namelist() if name.endswith("/data.pkl")))
    else:
        pickled = bounded.read_text(path)
    file = io.BytesIO(pickled)
    while file.tell() < len(pickled):
        words: list[str] = []
        memo: dict[int, str] = {}
        for operation, argument, _ in pickletools.genops(file):
            if operation.name in ("GLOBAL", "INST"):
                module, _, name = str(argument).partition(" ")
                yield f"{PYTHON_3_NAMES.get(module, module)}.{name}"  # protocol 2 has the names of Python 2
            elif operation.name == "STACK_GLOBAL":
                yield ".".join(words[-2:])
            elif operation.name == "MEMOIZE":
                memo[len(memo)] = words[-1] if words else ""
            elif "PUT" in operation.name:
                memo[int(argument or 0)] = words[-1] if words else ""
            elif "GET" in operation.name:
                words.append(memo.get(int(argument or 0), ""))
            elif operation.stack_after == [pickletools.pyunicode]:
                words.append(str(argument))


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU and without a copy where the system can map it."""
    from safetensors.torch import load_file

    with explaining(path):
        return load_file(path)


@contextmanager
def explaining(path: Path) -> Iterator[None]:
    """What goes wrong while a file is read, in one sentence."""
    try:
        yield
    except CheckpointError:
        raise
    except FileNotFoundError:
        raise missing(path) from None
    except Exception as error:
        asked = _asked_for(path, error)
        if asked is not None:
            way = "allow it with `torch.serialization.add_safe_globals`"
            # What torch never allows, as 1.x wrote it, and arrays of objects.
            if re.search("Can only (append|extend|SETITEM|read)", str(error)):
                way = "load it with `load_kwargs={'weights_only': False}`, and save it again"
            raise CheckpointError(
                f"{path} asks for {asked}, which is neither a tensor nor a plain value and is not run: "
                f"if you trust the file, {way}."
            ) from error
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {_first_line(error)}): load another checkpoint."
        ) from error


def missing(path: Path) -> CheckpointError:
    return MissingFile(f"{path} is missing: put it back, or load another checkpoint.")


_REFUSED = "Weights only load failed"


def _first_line(error: BaseException) -> str:
    text = str(error)
    if _REFUSED in text:  # torch advises to read it in another way, which would run what is in the file
        text = text.partition("WeightsUnpickler error:")[2].strip() or _REFUSED
    return (text.splitlines() or [""])[0].rstrip(".")
