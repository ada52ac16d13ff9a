"""Sizes, limits and device maps of many random models, by this package and by the released one: they are the same.

Usage: python tests/peer/device_maps.py PATH_TO_THE_PYTHON_OF_THE_RELEASED_PACKAGE [HOW_MANY]
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from typing import Any

import torch
from torch import nn

CLASSES = ("Alpha", "Beta", "Gamma")
DTYPES = (torch.float32, torch.float16, torch.int64, torch.bool, torch.uint8)


class Alpha(nn.Module):
    pass


class Beta(nn.Module):
    pass


class Gamma(nn.Module):
    pass


def tree(pick: random.Random, depth: int, names: list[int]) -> nn.Module:
    """A module with some tensors and children; no name in the model is part of another one."""
    module: nn.Module = {"Alpha": Alpha, "Beta": Beta, "Gamma": Gamma}[pick.choice(CLASSES)]()
    children = pick.randint(0, 4) if depth else 0
    # The released package loses buffers that are saved, of a module that it splits.
    for _ in range(pick.choice((0, 1, 1, 2)) if children else pick.randint(1, 3)):
        shape = (pick.randint(1, 6), pick.randint(1, 6))
        name = fresh(names)
        if pick.random() < 0.25:
            buffer = torch.zeros(shape, dtype=pick.choice(DTYPES))
            module.register_buffer(name, buffer, persistent=not children and pick.random() < 0.5)
        else:
            dtype = pick.choice((torch.float32, torch.float16))
            module.register_parameter(name, nn.Parameter(torch.zeros(shape, dtype=dtype)))
    for _ in range(children):
        module.add_module(fresh(names), tree(pick, depth - 1, names))
    return module


def fresh(names: list[int]) -> str:
    names[0] += 1
    return f"n{names[0]}e"


def tie(pick: random.Random, model: nn.Module) -> None:
    """Gives parameters of different modules to each other: two from anywhere, or some from one child of the model each.

    The released package counts a module as often as it holds parameters that are tied to the one at hand, and fails
    with tied parameters of the model itself: such ties are left out.
    """
    children = [
        [(module, name) for module in child.modules() for name, _ in module.named_parameters(recurse=False)]
        for child in model.children()
    ]
    children = [places for places in children if places]
    if pick.random() < 0.5:
        places = [place for child in children for place in child]
        groups = [pick.sample(places, 2)] if len(places) > 1 else []
    else:
        pick.shuffle(children)
        singles = [pick.choice(child) for child in children]
        groups = [singles[:2], singles[2:]]
    for first, *others in filter(None, groups):
        for module, name in others:
            setattr(module, name, getattr(*first))


def answers(seed: int) -> dict[str, Any]:
    from accelerate.utils import modeling

    pick = random.Random(seed)
    model = tree(pick, pick.randint(1, 4), [0])
    if pick.random() < 0.6:
        tie(pick, model)
    dtype = pick.choice((None, None, torch.float16, "float32"))
    parameters = [name for name, _ in model.named_parameters()]
    special = {name: torch.float16 for name in parameters if pick.random() < 0.1} or None
    no_split = [name for name in CLASSES if pick.random() < 0.3]
    sizes = modeling.compute_module_sizes(model, dtype=dtype, special_dtypes=special)
    whole = max(sizes[""], 1)
    limits: dict[Any, Any] = {gpu: int(whole * pick.random() * 0.8) for gpu in range(pick.randint(0, 3))}
    if pick.random() < 0.8:
        limits["cpu"] = int(whole * pick.random())
    if pick.random() < 0.2:
        limits["disk"] = int(whole)
    found: dict[str, Any] = {"sizes": dict(sizes), "leaves": modeling.get_module_leaves(sizes)}
    found["buffers"] = modeling.compute_module_total_buffer_size(model, dtype=dtype, special_dtypes=special)
    found["maximum"] = modeling.calculate_maximum_sizes(model)
    found["layer"] = modeling.get_max_layer_size(list(model.named_children()), sizes, no_split)
    found["ties"] = sorted(modeling.find_tied_parameters(model))
    found["missing"] = attempt(lambda: modeling.check_device_map(model, dict.fromkeys(parameters[1:], 0))) is None
    for low_zero in (False, True):
        if not low_zero or all(gpu in limits and limits[gpu] > 0 for gpu in (0, 1)):
            # The released package takes no limit for the disk here.
            memory = {device: limit for device, limit in limits.items() if device != "disk"}
            balanced = modeling.get_balanced_memory(
                model, memory, no_split or None, dtype=dtype, special_dtypes=special, low_zero=low_zero
            )
            found[f"balanced {low_zero}"] = list(balanced.items())
    for fallback in (False, True):
        for clean in (False, True):
            found[f"map fallback={fallback} clean={clean}"] = attempt(
                lambda fallback=fallback, clean=clean: modeling.infer_auto_device_map(
                    model,
                    dict(limits),
                    no_split,
                    dtype=dtype,
                    special_dtypes=special,
                    clean_result=clean,
                    offload_buffers=pick.random() < 0.5,
                    fallback_allocation=fallback,
                )
            )
    return found


def attempt(function: Any) -> Any:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # The released package may search for ever.
        signal.signal(signal.SIGALRM, give_up)
        signal.alarm(2)
        try:
            result = function()
        except Exception as error:
            return f"{type(error).__name__}"
        finally:
            signal.alarm(0)
    told = sorted({w.category.__name__ for w in caught})
    return [sorted(result.items(), key=str) if result is not None else None, told]


def give_up(*_: Any) -> None:
    raise TimeoutError


def ask(python: str, count: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        command = [python, os.path.abspath(__file__), "--answer", str(count)]
        # Ties are found in the order of a set by the released package.
        environ |= {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"}
        result = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        raise SystemExit(result.stderr)
    found: list[dict[str, Any]] = json.loads(result.stdout)
    return found


def main(peer: str, count: int = 500) -> None:
    ours, theirs = ask(sys.executable, count), ask(os.path.abspath(peer), count)
    different = 0
    refused: Counter[str] = Counter()
    for seed, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for question, answer in mine.items():
            if isinstance(other[question], str) and not isinstance(answer, str):
                refused[other[question]] += 1  # an error of the released package where there is an answer
            elif answer != other[question]:
                different += 1
                print(f"seed {seed}, {question}:\n  here     {answer}\n  released {other[question]}")
    questions = sum(len(mine) for mine in ours)
    print(f"{questions} answers about {count} models: {different} differ; only here: {dict(refused)}")
    if different:
        raise SystemExit(1)


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    if sys.argv[1] == "--answer":
        print(json.dumps([answers(seed) for seed in range(int(sys.argv[2]))]))
    else:
        main(sys.argv[1], *(int(argument) for argument in sys.argv[2:]))
