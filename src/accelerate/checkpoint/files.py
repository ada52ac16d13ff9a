"""Writing and reading the files of a checkpoint. Reading runs nothing of what is in them."""

from __future__ import annotations

import json
import pickletools
import re
from pathlib import Path
from typing import Any

import torch

from accelerate import files
from accelerate.checkpoint import disk
from accelerate.checkpoint.disk import Entry
from accelerate.checkpoint.host import on_host
from accelerate.errors import CheckpointError

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_torch(obj: Any, path: Path) -> Entry:
    output = disk.Output(path)
    sums = torch.serialization.get_crc32_options()
    # torch takes checksums of its own, slowly, and looks at them never.
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(on_host(obj, untouched=False), output)  # type: ignore[arg-type]
    except BaseException as error:
        output.abandon()
        # torch hides an error of the file behind one of its own, which speaks of something else.
        hidden = error.__context__
        if isinstance(error, RuntimeError) and isinstance(hidden, OSError):
            raise hidden from None
        raise
    finally:
        torch.serialization.set_crc32_options(sums)
    return output.close()


def write_safetensors(tensors: dict[str, Any], path: Path) -> Entry:
    """Write tensors one by one, so that no more than one of them is in memory a second time."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    # The widest first, so that each starts at a multiple of its width.
    order = sorted(tensors, key=lambda name: (-_tensor(tensors[name], name).element_size(), name))
    offset = 0
    for name in order:
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{name} has dtype {tensor.dtype}, which safetensors has no place for: save with "
                "`safe_serialization=False`."
            )
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    output = disk.Output(path)
    try:
        output.write(len(text).to_bytes(8, "little"))
        output.write(text)
        for name in order:
            if tensors[name].numel():
                flat = on_host(tensors[name].detach().contiguous(), untouched=False).reshape(-1)
                output.write(flat.view(torch.uint8).numpy())
    except BaseException:
        output.abandon()
        raise
    return output.close()


def _tensor(value: Any, name: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise CheckpointError(
            f"{name} in the state dict is a {type(value).__name__} and no tensor, which safetensors has no place for: "
            "save with `safe_serialization=False`."
        )
    return value


def read_torch(path: Path, map_location: Any = "cpu", **kwargs: Any) -> Any:
    """Read a file of tensors and plain values; anything else that it asks for is refused by name."""
    try:
        return files.load(path, map_location=map_location, **kwargs)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: put it back, or load another checkpoint.") from None
    except Exception as error:
        asked = _asked_for(path, error)
        if asked is not None:
            raise CheckpointError(
                f"{path} asks for {asked}, which is neither a tensor nor a plain value and is not run: "
                "if you trust the file, allow it with `torch.serialization.add_safe_globals`."
            ) from error
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {_first_line(error)}): load another checkpoint."
        ) from error


def _asked_for(path: Path, error: Exception) -> str | None:
    """What a refused file wanted to be run or made, by name."""
    named = re.search(r"GLOBAL ([\w.<>]+)", str(error))
    if named:
        return named.group(1)
    if "Weights only load failed" not in str(error):
        return None
    # A newer kind of pickle, which is refused without a look at its names.
    words: list[str] = []
    try:
        for operation, argument, _ in pickletools.genops(path.read_bytes()):
            if operation.name == "STACK_GLOBAL":
                return ".".join(words[-2:])
            if isinstance(argument, str):
                words.append(argument)
    except Exception:
        return None
    return None


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, on the CPU and without a copy where the system can map it."""
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: put it back, or load another checkpoint.") from None
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read ({type(error).__name__}: {_first_line(error)}): load another checkpoint."
        ) from error


def read_weights(path: Path) -> dict[str, Any]:
    weights: dict[str, Any] = read_safetensors(path) if path.suffix == ".safetensors" else read_torch(path)
    return weights


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0].rstrip(".")
