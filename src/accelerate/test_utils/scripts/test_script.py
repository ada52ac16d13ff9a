"""What `accelerate test` launches: a real check of this machine, set up as the config says.

Each check talks to the other processes first and compares afterwards, so that a process that finds a fault has left
nobody waiting. Then all tell each other what they found, and the main process prints one line.
"""

from __future__ import annotations

import functools
import importlib
import os
import platform
import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import accelerate
from accelerate.accelerator import Accelerator
from accelerate.available import is_datasets_available
from accelerate.comm import ops
from accelerate.config.enums import DistributedType
from accelerate.config.environment import parse_flag_from_env
from accelerate.config.handlers import InitProcessGroupKwargs
from accelerate.precision import kinds_of
from accelerate.precision.fp8 import best_of
from accelerate.random import set_seed, synchronize_rng_states
from accelerate.state import AcceleratorState
from accelerate.test_utils import process_checks
from accelerate.test_utils.checks import expect, shared_folder

# The parts of checks have the names of the release, for those who call them one by one.
from accelerate.test_utils.process_checks import *  # noqa: F403

# Mixed precision rounds to 3 (bf16, fp8) or 4 digits (fp16).
TOLERANCE = {"no": 1e-5, "fp16": 5e-3, "bf16": 3e-2, "fp8": 1e-1}


def processes() -> str:
    """Everybody is here, once, and on a device of its own."""
    accelerator = Accelerator()
    state = accelerator.state
    mine = (accelerator.process_index, socket.gethostname(), accelerator.local_process_index, str(accelerator.device))
    everyone = ops.gather_object([mine])
    ranks = [rank for rank, *_ in everyone]
    expect(ranks == list(range(accelerator.num_processes)), f"the ranks are {ranks}")
    places = {(host, device) for _, host, _, device in everyone if not device.startswith(("cpu", "mps"))}
    shared = bool(places) and len(places) < len(everyone)
    expect(not shared or accelerator.num_processes == 1, f"several processes share a device: {everyone}")
    hosts = {host for _, host, *_ in everyone}
    backend = f", {state.backend}" if state.backend else ""
    return f"{len(everyone)} on {len(hosts)} machine(s), {accelerator.device.type}{backend}, {state.world.started_by}"


def collectives() -> str:
    """Values travel unchanged, also where lengths differ."""
    accelerator = Accelerator()
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    one = torch.tensor([float(rank)], device=device)
    gathered = accelerator.gather(one)
    uneven = accelerator.gather(torch.full((rank + 1,), rank, device=device))
    padded = accelerator.gather(accelerator.pad_across_processes(torch.ones(rank + 1, device=device)))
    total = accelerator.reduce(one, "sum")
    mean = accelerator.reduce(one, "mean")
    first = ops.broadcast(one + 7.0)
    objects = ops.gather_object([{"rank": rank}])
    everything = list(range(size))
    expect(gathered.tolist() == everything, f"gather gave {gathered.tolist()}")
    expect(uneven.tolist() == [r for r in everything for _ in range(r + 1)], f"uneven gather gave {uneven.tolist()}")
    expect(padded.shape[0] == size * size, f"padding gave {padded.tolist()}")
    expect(padded.sum().item() == sum(r + 1 for r in everything), f"padding gave {padded.tolist()}")
    expect(total.item() == sum(everything), f"reduce gave the sum {total.item()}")
    expect(abs(mean.item() - sum(everything) / size) < 1e-6, f"reduce gave the mean {mean.item()}")
    expect(first.item() == 7.0, f"broadcast gave {first.item()}")
    expect(objects == [{"rank": r} for r in everything], f"gather_object gave {objects}")
    return "gather, reduce, broadcast, padding, objects"


class Counter(IterableDataset[torch.Tensor]):
    """The numbers below a limit, as a stream."""

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def __iter__(self) -> Any:
        return iter(torch.arange(self.limit))


def data() -> str:
    """Each sample reaches one process, once an epoch: in order, shuffled, and read by rank 0 for all."""
    accelerator = Accelerator()
    length = 10 * accelerator.num_processes + 1  # which several processes cannot share evenly
    numbers = TensorDataset(torch.arange(length))
    epochs = {}
    for kind, loader in {
        "in order": DataLoader(numbers, batch_size=4),
        "shuffled": DataLoader(numbers, batch_size=4, shuffle=True),
        "dispatched": DataLoader(Counter(length), batch_size=4),
    }.items():
        prepared = accelerator.prepare(loader)
        batches = [batch[0] if isinstance(batch, list) else batch for batch in _collected(accelerator, prepared)]
        epochs[kind] = torch.cat(batches).tolist()
    for kind, seen in epochs.items():
        expect(sorted(seen) == list(range(length)), f"{kind}, the samples of an epoch were {seen}")
    return f"{length} samples, each once: {', '.join(epochs)}"


def _collected(accelerator: Accelerator, loader: Any) -> list[Any]:
    return [accelerator.gather_for_metrics(batch) for batch in loader]


def _model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 8))


def _task(length: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(length, 8, generator=generator)
    return TensorDataset(inputs, inputs.roll(1, dims=1) / 2)


def _train(accelerator: Accelerator, parts: Any) -> None:
    model, optimizer, loader = parts
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(torch.nn.functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()


def training() -> str:
    """Training with accumulation on all processes gives what one process gives that sees all samples at once."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    size, steps = accelerator.num_processes, 4
    task = _task(4 * 2 * size * steps)
    model = _model()
    parts = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(task, batch_size=4))
    _train(accelerator, parts)
    mine = accelerator.get_state_dict(parts[0])

    reference = _model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for inputs, targets in DataLoader(task, batch_size=4 * 2 * size):
        torch.nn.functional.mse_loss(reference(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        for name, wanted in reference.state_dict().items():
            difference = (mine[name].detach().float().cpu() - wanted).abs().max().item()
            expect(difference < TOLERANCE[accelerator.mixed_precision], f"{name} differs by {difference:.2g}")
    return (
        f"{steps} steps of 2 x {size} batches equal {steps} steps of one process ({accelerator.distributed_type.value})"
    )


def randomness() -> str:
    """One seed gives all processes the same numbers, or each its own; a drifted generator is brought back."""
    accelerator = Accelerator()
    set_seed(42)
    same = accelerator.gather(torch.rand(1).to(accelerator.device)).tolist()
    set_seed(42, device_specific=True)
    own = accelerator.gather(torch.rand(1).to(accelerator.device)).tolist()
    torch.rand(accelerator.process_index)
    synchronize_rng_states(["torch"])
    back = accelerator.gather(torch.rand(1).to(accelerator.device)).tolist()
    expect(len(set(same)) == 1, f"one seed gave {same}")
    expect(len(set(own)) == accelerator.num_processes, f"seeds of their own gave {own}")
    expect(len(set(back)) == 1, f"after synchronizing, the numbers were {back}")
    return "seeds, and generators in step"


def checkpoint() -> str:
    """A run that was saved, trained on and loaded goes the same way again: weights, optimizer, order of the data."""
    accelerator = Accelerator()
    task = _task(8 * accelerator.num_processes)
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    parts = accelerator.prepare(model, optimizer, DataLoader(task, batch_size=4, shuffle=True))
    with shared_folder() as folder:
        _train(accelerator, parts)
        accelerator.save_state(str(folder / "saved"))
        saved = _copy(accelerator, parts[0])
        _train(accelerator, parts)
        trained, drawn = _copy(accelerator, parts[0]), torch.rand(3)
        accelerator.load_state(str(folder / "saved"))
        loaded = _copy(accelerator, parts[0])
        _train(accelerator, parts)
        again, drawn_again = _copy(accelerator, parts[0]), torch.rand(3)
    if accelerator.is_main_process:
        expect(not _same(saved, trained), "training changed nothing")
        expect(_same(saved, loaded), "the loaded weights are not the saved ones")
        expect(_same(trained, again), "training after loading went another way than after saving")
    expect(torch.equal(drawn, drawn_again), "the random numbers after loading are not those after saving")
    return "saved, loaded and trained on, twice the same way"


def _same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(some[name], others[name], rtol=1e-5, atol=1e-6) for name in some)


def _copy(accelerator: Accelerator, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone().cpu() for name, value in accelerator.get_state_dict(model).items()}


def precision() -> str:
    """The forward pass computes in the format of the config, and what comes out can be trained on."""
    accelerator = Accelerator()
    seen: list[torch.dtype] = []
    # Sizes that fp8 can multiply; a first and a last layer are left in bf16 by it.
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 32), torch.nn.Linear(32, 16))
    model.get_submodule("0").register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    before = float("nan")
    for _ in range(3):
        output = model(torch.ones(4, 16, device=accelerator.device))
        loss = output.pow(2).mean()
        before = loss.item() if before != before else before
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    wanted = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.bfloat16}.get(accelerator.mixed_precision)
    expect(wanted is None or seen[0] == wanted, f"the forward pass computed in {seen[0]}")
    expect(output.dtype == torch.float32, f"the output is {output.dtype}")
    expect(loss.item() < before, f"the loss went from {before:.4g} to {loss.item():.4g}")
    library, why = best_of(kinds_of("fp8"), accelerator.state.device_kind)
    fp8 = f"not here ({why})" if library is None else f"by {why}"
    computes = str(seen[0]).removeprefix("torch.")
    return f"{accelerator.mixed_precision}: computes in {computes}, returns float32; fp8 {fp8}"


def control() -> str:
    """Functions run where they should, and data are split between the processes."""
    checks: list[Callable[[], Any]] = [
        process_checks.init_state_check,
        process_checks.process_execution_check,
        process_checks.test_split_between_processes_list,
        process_checks.test_split_between_processes_nested_dict,
        process_checks.test_split_between_processes_tensor,
        process_checks.test_split_between_processes_evenly,
        process_checks.test_trigger,
        process_checks.test_reinstantiated_state,
    ]
    if is_datasets_available():
        dataset = importlib.import_module("datasets").Dataset
        checks.append(functools.partial(process_checks.test_split_between_processes_dataset, dataset))
    _each(checks)
    return "order of processes, decorators, parts of data, the flag to stop"


def loaders() -> str:
    """Every way of preparing a loader gives each sample once, and seeds decide about the order."""
    checks: list[Callable[[], Any]] = [
        process_checks.rng_sync_check,
        process_checks.dl_preparation_check,
        process_checks.central_dl_preparation_check,
        process_checks.custom_sampler_check,
        process_checks.check_seedable_sampler,
        process_checks.check_seedable_sampler_with_data_seed,
    ]
    if AcceleratorState().num_processes > 1:
        checks.append(process_checks.check_seedable_sampler_in_batch_sampler_shard)
    _each(checks)
    return "split, dispatched, own samplers, seeds"


def _each(checks: list[Callable[[], Any]]) -> None:
    """Runs parts of a check; all processes hear of a fault before the next part, in which they would wait for it."""
    for check in checks:
        _, wrong = _attempt(check)
        expect(not wrong, f"{getattr(check, '__name__', check)}: {wrong}")


CHECKS: tuple[Callable[[], str], ...] = (
    processes,
    collectives,
    control,
    data,
    loaders,
    training,
    randomness,
    checkpoint,
    precision,
)


def run(check: Callable[[], Any]) -> tuple[str, dict[int, str]]:
    """What a check says, and what went wrong on which ranks; nothing of it is left behind."""
    outcome = _attempt(check)
    Accelerator().free_memory()
    return outcome


def _attempt(check: Callable[[], Any]) -> tuple[str, dict[int, str]]:
    said, wrong = "", None
    try:
        said = check()
    except Exception as error:
        wrong = f"{type(error).__name__}: {error}".splitlines()[0]
    everyone = ops.gather_object([wrong])
    return said, {rank: error for rank, error in enumerate(everyone) if error is not None}


def main() -> None:
    """Run all checks; the exit code is 1 if one of them failed."""
    start = time.perf_counter()
    # The layers that a config names are those of the user's model, which the models of these checks do not have.
    if os.environ.pop("FSDP_TRANSFORMER_CLS_TO_WRAP", None) is not None:
        os.environ["FSDP_AUTO_WRAP_POLICY"] = "NO_WRAP"
    # Where processes do not hear from each other, waiting half an hour for them tells nothing new.
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(minutes=3))])
    utf8 = (sys.stdout.encoding or "").lower().startswith("utf")
    tick, cross = ("\u2714", "\u2718") if utf8 else ("ok  ", "FAIL")
    failed = []
    for check in CHECKS:
        said, wrong = run(check)
        if wrong:
            failed.append(check.__name__)
            said = "; ".join(f"rank {rank}: {error}" for rank, error in wrong.items())
        if accelerator.is_main_process:
            print(f"{cross if wrong else tick} {check.__name__:<12} {said}", flush=True)
    if accelerator.is_main_process:
        print(_last_line(accelerator, failed, time.perf_counter() - start), flush=True)
    accelerator.end_training()
    if failed:
        sys.exit(1)


def _last_line(accelerator: Accelerator, failed: list[str], seconds: float) -> str:
    """All that a report of a problem needs, in one line."""
    state = accelerator.state
    facts = [
        f"accelerate {accelerate.__version__}",
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
        platform.platform(),
        f"{accelerator.num_processes} x {state.device} ({state.backend or 'alone'})",
        f"{accelerator.distributed_type.value} {accelerator.mixed_precision}",
    ]
    passed = len(CHECKS) - len(failed)
    verdict = f"{passed} of {len(CHECKS)} checks passed in {seconds:.1f} s"
    asked = parse_flag_from_env("ACCELERATE_USE_FSDP") and accelerator.distributed_type != DistributedType.FSDP
    untried = "; FSDP was not tried, since one process has nobody to share with" if asked else ""
    return f"{', '.join(facts)}: {verdict}{untried}" + (f"; failed: {', '.join(failed)}" if failed else "")


if __name__ == "__main__":
    main()
