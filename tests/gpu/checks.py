"""What must hold on a machine with an NVIDIA GPU. Plain asserts: the GPU machine needs no pytest.

PYTHONPATH=src python3 -m tests.gpu.run
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset, IterableDataset

CHECKS: list[Callable[[], None]] = []
WORLDS: list[tuple[int, Callable[[], None]]] = []


def check(function: Callable[[], None]) -> Callable[[], None]:
    CHECKS.append(function)
    return function


def world(processes: int) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def register(function: Callable[[], None]) -> Callable[[], None]:
        WORLDS.append((processes, function))
        return function

    return register


def reset() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(True)
    GradientState._reset_state()


class Samples(Dataset[Any]):
    def __init__(self, count: int = 64, width: int = 16) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(count, width, generator=generator)
        self.y = (self.x.sum(1) > 0).long()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.GELU(), torch.nn.Linear(64, 2))


@check
def steps_that_are_not_finite_are_left_out_without_waiting() -> None:
    accelerator, model, step = _with_nonfinite("skip")
    _leaves_one_out(model, step)
    assert accelerator.optimizer_step_was_skipped
    step(1.0)
    assert not accelerator.optimizer_step_was_skipped


@check
def a_step_that_is_not_finite_ends_the_run_one_step_later() -> None:
    _, model, step = _with_nonfinite("stop")
    _leaves_one_out(model, step)
    try:
        step(1.0)
    except FloatingPointError as error:
        assert "Step 5 was not taken" in str(error) and "`0` (Linear) is the first module" in str(error), error
    else:
        raise AssertionError("a step that was left out did not end the run")


def _with_nonfinite(choice: str) -> tuple[Any, torch.nn.Module, Callable[[float], None]]:
    from accelerate import Accelerator

    reset()
    accelerator = Accelerator(nonfinite=choice)
    plain = network()
    fused = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(fused, lambda step: 1.0)
    model, optimizer, scheduler = accelerator.prepare(plain, fused, schedule)

    def step(value: float) -> None:
        accelerator.backward(model(torch.full((4, 16), value, device="cuda")).square().mean())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

    return accelerator, model, step


def _leaves_one_out(model: torch.nn.Module, step: Callable[[float], None]) -> None:
    """The fifth step, with none of the steps waiting for the device."""
    step(1.0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            step(1.0)
        before = [parameter.detach().clone() for parameter in model.parameters()]
        step(float("nan"))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


@check
def detects_the_gpu() -> None:
    from accelerate import Accelerator, DistributedType

    accelerator = Accelerator()
    assert accelerator.device.type == "cuda", accelerator.device
    assert accelerator.distributed_type == DistributedType.NO
    memory = accelerator.state.device_kind.memory()
    assert 0 < memory.free <= memory.total
    assert accelerator.state.device_kind.supports("bf16")


@check
def trains_like_plain_pytorch() -> None:
    from accelerate import Accelerator

    for mode, dtype in (("no", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        reset()
        model = network().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cuda", enabled=mode == "fp16")
        expected = []
        for x, y in DataLoader(Samples(), batch_size=8):
            x, y = x.cuda(), y.cuda()
            with torch.autocast("cuda", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                logits = model(x)
            loss = F.cross_entropy(logits.float(), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            expected.append(loss.item())

        accelerator = Accelerator(mixed_precision=mode)
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Samples(), batch_size=8))
        seen = []
        for x, y in loader:
            assert x.is_cuda and y.is_cuda
            logits = model(x)
            assert logits.dtype is torch.float32
            loss = F.cross_entropy(logits, y)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        torch.testing.assert_close(seen, expected, rtol=1e-5, atol=1e-6)


class Bag:
    """A batch that only knows how to move itself."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, device: torch.device, non_blocking: bool = False) -> Bag:
        return Bag(self.values.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Bag:
        return Bag(self.values.pin_memory())


class Bags(Dataset[Any]):
    def __len__(self) -> int:
        return 30

    def __getitem__(self, index: int) -> Any:
        return Bag(torch.full((1_000_000,), float(index)))


def _first(samples: list[Any]) -> Any:
    return samples[0]


@check
def objects_with_to_are_moved() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Bags(), batch_size=1, collate_fn=_first, pin_memory=True))
    means = [bag.values.mean() for bag in loader]
    assert [mean.item() for mean in means] == [float(i) for i in range(30)]


@check
def workers_and_pinned_memory() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(Samples(101), batch_size=4, num_workers=2, pin_memory=True))
    for _ in range(2):
        got = torch.cat([x for x, _ in loader])
        assert got.is_cuda and torch.equal(got.cpu(), Samples(101).x)


@check
def skipped_steps_are_known() -> None:
    from accelerate import Accelerator, GradScalerKwargs

    for fused in (False, True):
        reset()
        accelerator = Accelerator(mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)])
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
        skipped = []
        for step in range(4):
            loss = model(torch.ones(2, 16, device="cuda")).sum() * (float("inf") if step == 1 else 1.0)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            skipped.append(accelerator.optimizer_step_was_skipped)
        assert skipped == [False, True, False, False], (fused, skipped)
        assert scheduler.get_last_lr() == [1e-2 * 0.5**3], (fused, scheduler.get_last_lr())


@check
def items_window_on_the_gpu() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=3)
    reference = network().double().cuda()
    model = accelerator.prepare(network().double())
    x = torch.randn(30, 16, dtype=torch.double, device="cuda")
    F.mse_loss(reference(x), torch.zeros(30, 2, dtype=torch.double, device="cuda"), reduction="sum").div(30).backward()
    for part in x.split([5, 24, 1]):
        with accelerator.accumulate(model):
            loss = model(part).pow(2).sum()
            accelerator.backward(loss, num_items=torch.tensor(len(part), device="cuda"))
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-9, atol=0)


@check
def seeds_and_memory() -> None:
    from accelerate import Accelerator
    from accelerate.utils import release_memory, set_seed, synchronize_rng_states

    accelerator = Accelerator()
    set_seed(3)
    first = torch.randn(4, device="cuda")
    set_seed(3)
    assert torch.equal(first, torch.randn(4, device="cuda"))
    synchronize_rng_states(["torch", "cuda"])
    big = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    before = torch.cuda.memory_reserved()
    (big,) = release_memory(big)
    assert big is None and torch.cuda.memory_reserved() < before
    accelerator.set_trigger()
    assert accelerator.check_trigger() and not accelerator.check_trigger()


@check
def compiled_training() -> None:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    plugin = TorchDynamoPlugin(backend="inductor")
    accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=plugin)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    x = torch.randn(8, 16, device="cuda")
    losses = []
    for _ in range(5):
        loss = model(x).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert isinstance(accelerator.unwrap_model(model, keep_torch_compile=False), torch.nn.Sequential)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for index in range(23):
            yield {"x": torch.full((3,), float(index)), "name": f"sample {index}"}


@world(1)
def one_process_of_nccl() -> None:
    from accelerate import Accelerator, DistributedType

    accelerator = Accelerator()
    assert accelerator.distributed_type == DistributedType.MULTI_GPU
    assert accelerator.state.backend == "nccl", accelerator.state.backend
    assert "gloo" in str(dist.get_backend_config())
    _collectives(accelerator)
    _trains(accelerator)


@world(1)
def one_process_of_nccl_alone() -> None:
    from accelerate import Accelerator, InitProcessGroupKwargs

    dist.init_process_group("nccl")
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="nccl")])
    _collectives(accelerator)


@world(2)
def two_processes_share_a_gpu() -> None:
    from accelerate import Accelerator, InitProcessGroupKwargs

    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    assert accelerator.num_processes == 2 and accelerator.device.type == "cuda"
    _collectives(accelerator)
    _trains(accelerator)


def _collectives(accelerator: Any) -> None:
    from accelerate.utils import broadcast, gather_object, pad_across_processes

    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    mine = torch.full((rank + 1, 2), float(rank), device=device)
    gathered = accelerator.gather({"device": mine, "host": mine.cpu(), "flag": torch.tensor(True, device=device)})
    expected = torch.cat([torch.full((r + 1, 2), float(r)) for r in range(size)])
    if size > 1:
        assert gathered["device"].is_cuda and torch.equal(gathered["device"].cpu(), expected)
        assert not gathered["host"].is_cuda and torch.equal(gathered["host"], expected)
        assert gathered["flag"].tolist() == [True] * size
    large = accelerator.gather(torch.full((100_000,), rank, device=device, dtype=torch.bfloat16))
    assert large.is_cuda and large.float().sum().item() == 100_000 * sum(range(size))
    total = accelerator.reduce(torch.ones(5, device=device), "sum")
    assert total.is_cuda and total.tolist() == [float(size)] * 5
    source = broadcast(torch.full((3,), float(rank), device=device), from_process=size - 1)
    assert source.tolist() == [float(size - 1)] * 3
    assert pad_across_processes(mine).shape[0] == size
    assert gather_object([rank]) == list(range(size))
    accelerator.wait_for_everyone()
    seen = []
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=4))
    for batch in loader:
        assert batch["x"].is_cuda and isinstance(batch["name"][0], str)
        seen += accelerator.gather_for_metrics(batch["x"][:, 0]).tolist()
    assert seen == [float(i) for i in range(23)], seen


def _trains(accelerator: Any) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(Samples(), batch_size=8 // accelerator.num_processes, pin_memory=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    plain = network().cuda()
    stepper = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = []
    for x, y in DataLoader(Samples(), batch_size=8):
        loss = F.cross_entropy(plain(x.cuda()), y.cuda())
        loss.backward()
        stepper.step()
        stepper.zero_grad()
        expected.append(loss.item())
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-5)


@check
def a_checkpoint_brings_back_the_run_on_the_device() -> None:
    """Weights, optimizer, fp16's scaler and the device's random state, saved at once and behind the training."""
    import tempfile

    from accelerate import Accelerator

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        accelerator = Accelerator(mixed_precision="fp16")
        net = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
        return (accelerator, *accelerator.prepare(net, torch.optim.AdamW(net.parameters())))

    def train(accelerator: Any, model: Any, optimizer: Any) -> list[float]:
        losses = []
        for _ in range(3):
            loss = model(torch.ones(8, 64, device=accelerator.device)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return [*losses, *(p.sum().item() for p in model.parameters())]

    for behind in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            reset()
            run = made(1)
            train(*run)
            run[0].save_state(folder, async_save=behind)
            expected = train(*run)
            run[0].wait_for_checkpoint()
            reset()
            other = made(2)
            other[0].load_state(folder)
            assert train(*other) == expected


@check
def a_large_checkpoint_goes_through_blocks() -> None:
    """Tensors of several blocks and an odd size: saved from the device, at once and behind, and read back to it."""
    import tempfile
    from pathlib import Path

    from accelerate import Accelerator
    from accelerate.checkpointing import verify_checkpoint

    def made(seed: int) -> Any:
        torch.manual_seed(seed)
        accelerator = Accelerator()
        net = torch.nn.Sequential(torch.nn.Linear(3001, 3001), torch.nn.Linear(3001, 1, bias=False))
        return (accelerator, *accelerator.prepare(net, torch.optim.AdamW(net.parameters())))

    def step(accelerator: Any, model: Any, optimizer: Any) -> None:
        accelerator.backward(model(torch.ones(2, 3001, device=accelerator.device)).sum())
        optimizer.step()
        optimizer.zero_grad()

    def state(model: Any, optimizer: Any) -> list[torch.Tensor]:
        values = [v for values in optimizer.state.values() for v in values.values()]
        return [value.detach().clone() for value in (*model.parameters(), *values)]

    for behind in (False, True):
        for safe in (True, False):
            with tempfile.TemporaryDirectory() as folder:
                reset()
                run = made(1)
                step(*run)
                expected = state(*run[1:])
                run[0].save_state(folder, safe, async_save=behind)
                step(*run)  # what is written is the state of before
                run[0].wait_for_checkpoint()
                verify_checkpoint(folder)
                loaded = torch.load(Path(folder, "optimizer.bin"), weights_only=True)
                assert torch.equal(loaded["state"][0]["exp_avg"], expected[3 + 1].cpu())
                reset()
                other = made(2)
                step(*other)
                other[0].load_state(folder)
                found = state(*other[1:])
                assert [value.device for value in found] == [value.device for value in expected]
                assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))


@check
def what_is_in_another_order_is_saved_from_the_device() -> None:
    """Models in `channels_last`, brought in order block by block, and a conjugate; at once and behind."""
    import tempfile

    from accelerate import Accelerator
    from accelerate.io.blocks import BLOCK, FILES, WRITERS

    most = FILES * WRITERS * BLOCK  # of all threads that write at once: half of a model
    for behind in (False, True):
        with tempfile.TemporaryDirectory() as folder:
            reset()
            accelerator = Accelerator()
            nets = [torch.nn.Conv2d(2049, 2048, 3).to(memory_format=torch.channels_last) for _ in range(2)]
            for net in nets:
                net.register_buffer("x", torch.randn(1000, dtype=torch.complex64, device=accelerator.device))
                net.register_buffer("y", net.x.conj())
            models = accelerator.prepare(*nets)
            assert not models[0].weight.is_contiguous()
            expected = [value.clone() for model in models for value in model.state_dict().values()]
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            accelerator.save_state(folder, async_save=behind)
            grown = torch.cuda.max_memory_allocated() - before
            assert behind or grown <= most < models[0].weight.nbytes, grown
            accelerator.wait_for_checkpoint()
            with torch.no_grad():
                for model in models:
                    model.weight.zero_()
                    model.x.zero_()
            accelerator.load_state(folder)
            found = [value for model in models for value in model.state_dict().values()]
            assert all(torch.equal(one, two) for one, two in zip(found, expected, strict=True))
