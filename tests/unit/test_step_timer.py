"""The step timer, on a clock that moves only when a piece of the loop says so: every number is exact."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate import Accelerator
from accelerate.comm import current
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SkipDataLoader
from accelerate.step_timer import StepTimer, clocks, table
from accelerate.step_timer.hints import Facts, facts_of, hints
from tests.harness import run_world
from tests.unit.tracking.toys import ListTracker

TAKES = {"data": 0.003, "forward": 0.005, "backward": 0.004, "optimizer": 0.002, "other": 0.001}


class Clock:
    """Stands in for the module `time`, in the one function that the timer uses."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def spend(self, phase: str) -> None:
        self.now += TAKES[phase]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clock]:
    clock = Clock()
    monkeypatch.setattr(clocks, "time", clock)
    yield clock


class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, clock: Clock) -> torch.Tensor:
        ctx.clock = clock
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        ctx.clock.spend("backward")
        return grads[0], None


class Model(nn.Module):
    def __init__(self, clock: Clock, forward: float = TAKES["forward"]) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.clock = clock
        self.takes = forward

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.clock.now += self.takes
        outputs: torch.Tensor = Slow.apply(self.linear(inputs), self.clock)
        return outputs


class SGD(torch.optim.SGD):
    clock: Clock

    def step(self, closure: Any = None) -> Any:
        self.clock.spend("optimizer")
        return super().step(closure)


def parts(clock: Clock, accelerator: Accelerator, batches: int = 6, **kwargs: Any) -> tuple[Any, Any, Any]:
    def collate(samples: list[torch.Tensor]) -> torch.Tensor:
        clock.spend("data")
        return torch.stack(samples)

    model = Model(clock, **kwargs)
    optimizer = SGD(model.parameters(), lr=0.1)
    optimizer.clock = clock
    data = torch.randn(batches * 2 * accelerator.num_processes, 2)
    prepared: tuple[Any, Any, Any] = accelerator.prepare(
        model,
        optimizer,
        DataLoader(data, batch_size=2, collate_fn=collate),  # type: ignore[arg-type]
    )
    return prepared


def train(clock: Clock, accelerator: Accelerator, model: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        loss = model(batch).sum()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        clock.spend("other")


def test_where_the_time_goes(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    tracker = ListTracker()
    accelerator = Accelerator(cpu=True, log_with=tracker)
    accelerator.init_trackers("x")
    model, optimizer, loader = parts(clock, accelerator, batches=6)
    with accelerator.step_timer(warmup=2) as timer:
        train(clock, accelerator, model, optimizer, loader)
    # The loader is one batch ahead: of the last 4 steps, the very last has nothing left to wait for.
    assert timer.steps == 4
    [seconds] = timer.seconds
    assert seconds == pytest.approx(TAKES | {"data": 0.003 * 2 / 4, "communication": 0.0})
    assert timer.slowest == 0
    printed = capsys.readouterr().out
    assert "mean of 4 steps" in printed
    assert "slowest" not in printed  # among one
    assert facts_of(accelerator) == Facts(workers=0)
    assert printed.endswith("hint: num_workers=2 or more in the DataLoader: worth up to 1.50 ms (11%) of a step\n")
    values = dict(tracker.seen[-1][1])
    assert values["step_time/forward_ms"] == pytest.approx(5.0)
    assert values["step_time/step_ms"] == pytest.approx(13.5)
    accelerator.end_training()


def test_epochs_and_breaks_count_together(clock: Clock) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(clock, accelerator, batches=3)
    with accelerator.step_timer(warmup=0) as timer:
        train(clock, accelerator, model, optimizer, loader)
        clock.now += 100  # between two epochs, and so in no step
        for batch in loader:
            accelerator.backward(model(batch).sum())
            break
        train(clock, accelerator, model, optimizer, accelerator.skip_first_batches(loader, 1))
    assert timer.steps == 3 + 1 + 2
    assert timer.seconds[0]["optimizer"] == pytest.approx(5 * 0.002 / 6)
    assert timer.seconds[0]["other"] == pytest.approx(5 * 0.001 / 6)


def evaluate(model: Any, loader: Any) -> None:
    with torch.no_grad():
        for batch in loader:
            model(batch)


def test_evaluation_is_not_a_step(clock: Clock) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(clock, accelerator, batches=6)
    others = accelerator.prepare(DataLoader(torch.randn(8, 2), batch_size=2))  # type: ignore[arg-type]
    with accelerator.step_timer(warmup=2) as timer:
        evaluate(model, others)  # before the training,
        for step, batch in enumerate(loader):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            clock.spend("other")
            if step % 3 == 2:
                evaluate(model, others)  # in a step of it,
        evaluate(model, others)  # and after it
    assert timer.steps == 4
    assert timer.seconds[0] == pytest.approx(TAKES | {"data": 0.003 * 2 / 4, "communication": 0.0})


def test_loaders_side_by_side(clock: Clock) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(clock, accelerator, batches=6)
    second = accelerator.prepare(DataLoader(torch.randn(12, 2), batch_size=2))  # type: ignore[arg-type]
    with accelerator.step_timer(warmup=2) as timer:
        for batch, _ in zip(loader, second, strict=True):
            accelerator.backward(model(batch).sum())
            optimizer.step()
            clock.spend("other")
    assert timer.steps == 4
    assert timer.seconds[0] == pytest.approx(TAKES | {"data": 0.003 * 2 / 4, "communication": 0.0})


def test_a_loop_in_a_loop(clock: Clock) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(clock, accelerator, batches=3)
    tasks = accelerator.prepare(DataLoader(torch.randn(2, 2)))  # type: ignore[arg-type]
    with accelerator.step_timer(warmup=0) as timer:
        for _ in tasks:
            clock.now += 100
            train(clock, accelerator, model, optimizer, loader)
    assert timer.steps == 6
    assert timer.seconds[0] == pytest.approx(TAKES | {"communication": 0.0})


def test_batches_by_hand(clock: Clock) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(clock, accelerator, batches=6)
    with accelerator.step_timer(warmup=1) as timer:
        batches = iter(loader)
        for _ in range(3):
            accelerator.backward(model(next(batches)).sum())
            optimizer.step()
    assert timer.steps == 2  # the last of them goes on to the end of the block
    assert timer.seconds[0]["forward"] == pytest.approx(TAKES["forward"])


def test_used_twice_it_measures_anew(clock: Clock) -> None:
    accelerator = Accelerator(cpu=True)
    loop = parts(clock, accelerator, batches=6)
    timer = accelerator.step_timer(warmup=2)
    for _ in range(2):
        with timer:
            train(clock, accelerator, *loop)
        assert timer.steps == 4
        assert timer.seconds[0]["forward"] == pytest.approx(TAKES["forward"])


def test_too_short_for_the_warm_up(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True)
    loop = parts(clock, accelerator, batches=1)
    with accelerator.step_timer() as timer:
        train(clock, accelerator, *loop)
    assert timer.steps == 0
    assert "no step was measured, because the loop ended after 1 of 1 warm-up steps" in capsys.readouterr().out
    with pytest.raises(ValueError, match="warmup is -1"):
        accelerator.step_timer(warmup=-1)


def test_why_there_are_no_steps(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    accelerator = Accelerator(cpu=True)
    model, _, loader = parts(clock, accelerator, batches=3)
    with accelerator.step_timer():
        evaluate(model, loader)
    assert "because none of 3 batches was trained on: call `accelerator.backward`" in capsys.readouterr().out
    with accelerator.step_timer():
        for batch in DataLoader(torch.randn(4, 2)):  # type: ignore[arg-type]
            accelerator.backward(model(batch).sum())
    assert "because no prepared data loader was iterated in the block" in capsys.readouterr().out


def test_what_waiting_for_data_consists_of(clock: Clock) -> None:
    timer = StepTimer(Accelerator(cpu=True))
    with timer:
        timer._clock.open()
        timer._enter("data")
        timer._enter("communication")  # a batch that comes from another rank
        clock.now += 1
        timer._leave()
        timer._leave()
        timer._enter("backward")
        clock.now += 2
        timer._enter("communication")
        clock.now += 3
        timer._leave()
        clock.now += 4
        timer._leave()
        timer._clock.close(keep=True)
        assert timer._clock.totals() == {"data": 1, "backward": 6, "communication": 3, "other": 0}


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_stays(fails: bool) -> None:
    clock = Clock()
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(clock, accelerator)
    kinds = (DataLoaderShard, DataLoaderDispatcher, SkipDataLoader)
    owners = [accelerator, optimizer, current(), *kinds]
    before = [dict(vars(owner)) for owner in owners]
    iteration = None
    try:
        with accelerator.step_timer():
            assert "backward" in vars(accelerator)
            iteration = iter(loader)
            next(iteration)
            if fails:
                raise KeyError("in the loop")
    except KeyError:
        assert fails
    for owner, attributes in zip(owners, before, strict=True):
        left = {name: value for name, value in vars(owner).items() if attributes.get(name) is not value}
        left.pop("_steps", None)
        assert not set(left) & {"backward", "step", "zero_grad", "clip_grad_norm_", "__iter__", "gather", "barrier"}
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert len(list(iteration)) == 5  # what began inside goes on


def test_compiled_models(clock: Clock) -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = nn.Linear(2, 1)
    loader = DataLoader(torch.randn(4, 2), batch_size=2)  # type: ignore[arg-type]
    model, loader = accelerator.prepare(model, loader)
    model.register_forward_pre_hook(lambda *_: clock.spend("forward"))
    with accelerator.step_timer(warmup=0) as timer:
        for batch in loader:
            accelerator.backward(model(batch).sum())
    assert timer.seconds[0]["forward"] == pytest.approx(0.005)


def on_two_ranks(accumulate: int) -> tuple[list[dict[str, float]], int, int, str]:
    import contextlib
    import io

    clock = Clock()
    clocks.time = clock  # type: ignore[assignment]
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
    model, optimizer, loader = parts(clock, accelerator, forward=0.02 if accelerator.process_index == 1 else 0.001)
    output = io.StringIO()
    with contextlib.redirect_stdout(output), accelerator.step_timer() as timer:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
                optimizer.step()
                optimizer.zero_grad()
    return timer.seconds, timer.slowest, timer.steps, output.getvalue()


class Noting:
    """DDP's logger, and how long each exchange took beyond its backward, as read from it."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self.exposed: dict[int, float] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)

    def _get_ddp_logging_data(self) -> Any:
        data = self._logger._get_ddp_logging_data()
        numbers = data.ints_map
        if end := numbers.get("backward_comm_time_end"):
            exposed = numbers["backward_comm_time"] - numbers["backward_compute_comm_overlap_time"]
            self.exposed[end] = max(exposed, 0) / 1e9
        return data


def exchanges(before: int, warmup: int) -> tuple[list[float], float]:
    """Those of some steps before the timer and of six within, and what the timer took down."""
    clock = Clock()
    clocks.time = clock  # type: ignore[assignment]
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = parts(clock, accelerator)
    model.logger = Noting(model.logger)

    def step(batch: torch.Tensor) -> None:
        accelerator.backward(model(batch).sum())
        optimizer.step()

    for _ in range(before):
        step(torch.ones(2, 2))
    with accelerator.step_timer(warmup=warmup) as timer:
        for batch in loader:
            step(batch)
    return list(model.logger.exposed.values()), timer._reductions[0].seconds


@pytest.mark.parametrize(("before", "warmup"), [(0, 0), (1, 0), (0, 1), (0, 5)])
def test_which_exchanges_count(before: int, warmup: int) -> None:
    for exposed, seconds in run_world(exchanges, 2, before, warmup):
        assert len(exposed) == before + 6 and min(exposed) > 0
        # Not those before it and of the warm-up, and the last one too, after which there is no other forward.
        assert seconds == pytest.approx(sum(exposed[before + warmup :]))


def after_a_timer() -> bool:
    accelerator = Accelerator(cpu=True)
    model, _, loader = parts(Clock(), accelerator, batches=12)
    with accelerator.step_timer():
        for batch in loader:
            accelerator.backward(model(batch).sum())
    numbers = []
    for batch in loader:
        model(batch).sum().backward()
        numbers.append(model.logger._get_ddp_logging_data().ints_map["forward_compute_time_start"])
    return len(set(numbers)) == 1


def test_ddp_measures_every_iteration_only_meanwhile() -> None:
    # On a GPU, each such iteration waits for the backward before it.
    assert run_world(after_a_timer, 2) == [True, True]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_slowest_rank(accumulate: int) -> None:
    results = run_world(on_two_ranks, 2, accumulate)
    for seconds, slowest, steps, _ in results:
        assert slowest == 1
        assert steps == 5
        assert [rank["forward"] for rank in seconds] == pytest.approx([0.001, 0.02])
        for rank in seconds:
            # The exchange of gradients is real, and comes out of the backward: together they are what that takes.
            assert rank["communication"] > 0
            assert rank["backward"] + rank["communication"] == pytest.approx(0.004)
    assert results[0][0] == results[1][0]
    assert "1 (slowest)" in results[0][3]
    assert results[1][3] == ""


class Device:
    """Stands in for a module like torch.cuda: events get their time when the device comes to them."""

    def __init__(self, clock: Clock, behind: int) -> None:
        self.clock, self.behind = clock, behind
        self.recorded: list[Any] = []

    def Event(self, enable_timing: bool) -> Any:
        device = self

        class Event:
            def record(self, stream: None) -> None:
                self.at = device.clock.now
                self.number = len(device.recorded)
                device.recorded.append(self)

            def query(self) -> bool:
                return len(device.recorded) - self.number > device.behind

            def elapsed_time(self, later: Any) -> float:
                return float(1000 * (later.at - self.at))

        return Event()

    def current_stream(self) -> None:
        return None

    def synchronize(self) -> None:
        self.behind = 0


@pytest.mark.parametrize("behind", [0, 10, 1000])
def test_a_device_behind_the_host_adds_up_to_the_same(clock: Clock, behind: int) -> None:
    pair = clocks.HostClock(), clocks.EventClock(Device(clock, behind))
    for each in pair:
        each.begin()
    choose = random.Random(0)
    depth = 0
    for step in range(2000):
        clock.now += choose.random()
        kind = choose.choice(["mark", "mark", "open", "close", "merge"])
        phase = choose.choice(table.PHASES)
        for each in pair:
            if kind == "mark":
                each.mark(phase)
            elif kind == "open":
                each.open()
            elif kind == "close" and depth:
                each.close(keep=step % 2 == 0)
            elif kind == "merge" and depth:
                each.merge()
        depth += {"open": 1, "mark": 0}.get(kind, -1 if depth else 0)
    first, second = (each.totals() for each in pair)
    assert set(first) == set(table.PHASES)
    assert second == pytest.approx(first)


def made_up(count: int) -> list[dict[str, float]]:
    return [dict.fromkeys(table.PHASES, 0.001) | {"forward": rank / 1000} for rank in range(count)]


def test_many_ranks() -> None:
    lines = table.rows(made_up(40), slowest=39)
    assert lines[0][:3] == ["mean", "1.00", "19.50"]
    assert [line[0] for line in lines[1:4]] == ["39 (slowest)", "38", "37"]
    assert len(lines) == 17


def test_without_rich(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(table, "has_package", lambda name: False)
    table.print_table(made_up(2), slowest=1, steps=7)
    assert capsys.readouterr().out.splitlines() == [
        "milliseconds per step, mean of 7 steps",
        "rank         data  forward  backward  communication  optimizer  other  step",
        "0            1.00     0.00      1.00           1.00       1.00   1.00  5.00",
        "1 (slowest)  1.00     1.00      1.00           1.00       1.00   1.00  6.00",
    ]


def test_with_rich_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    table.print_table(made_up(2), slowest=1, steps=7)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["rank", *table.PHASES, "step"] in lines
    assert ["1", "(slowest)", "1.00", "1.00", "1.00", "1.00", "1.00", "1.00", "6.00"] in lines


STEP = {"data": 0.004, "forward": 0.003, "backward": 0.006, "communication": 0.002, "optimizer": 0.005, "other": 0.0}


def test_hints_name_the_change_and_the_most_it_is_worth() -> None:
    assert hints(STEP, Facts(unfused=("AdamW",), workers=0, full_float32=True)) == [
        'hint: mixed_precision="bf16", or torch.set_float32_matmul_precision("high"): '
        "worth up to 9.00 ms (45%) of a step",
        "hint: fused=True in AdamW: worth up to 5.00 ms (25%) of a step",
        "hint: num_workers=2 or more in the DataLoader: worth up to 4.00 ms (20%) of a step",
        "hint: larger batches or gradient_accumulation_steps: worth up to 2.00 ms (10%) of a step",
    ]


def test_nothing_is_said_of_what_takes_no_time() -> None:
    quick = STEP | {"data": 0.0001, "communication": 0.0, "optimizer": 0.0001}
    assert hints(quick, Facts(unfused=("SGD",), workers=2)) == []
    assert hints(dict.fromkeys(STEP, 0.0), Facts(workers=0)) == []
