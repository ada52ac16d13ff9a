"""Every option of DDP arrives there, and every communication hook trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from accelerate.utils import DDPCommunicationHookType as Hook
from accelerate.utils import DistributedDataParallelKwargs
from tests.harness import run_world
from tests.unit.accelerator.toys import Net, assert_same_everywhere, loader, weights


def fresh(**kwargs: Any) -> Accelerator:
    AcceleratorState._reset_state()
    GradientState._reset_state()
    return Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**kwargs)])


class Branches(Net):
    """Has a head that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


def train(accelerator: Accelerator, net: Any, lr: float = 0.05) -> tuple[Any, list[float]]:
    model, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=lr), loader(64))
    losses = []
    for _ in range(4):
        for x, y in batches:
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    assert_same_everywhere(weights(model))
    return model, losses


def _fields() -> None:
    model = fresh(
        dim=1,
        broadcast_buffers=False,
        bucket_cap_mb=7,
        find_unused_parameters=True,
        gradient_as_bucket_view=True,
        static_graph=False,
    ).prepare(Net())
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert (model.dim, model.broadcast_buffers, model.find_unused_parameters) == (1, False, True)
    assert model.bucket_bytes_cap == 7 * 1024 * 1024
    assert model.gradient_as_bucket_view is True and model.static_graph is False
    assert fresh(static_graph=True).prepare(Net()).static_graph is True
    plain = fresh().prepare(Net())
    assert plain.broadcast_buffers is True and plain.find_unused_parameters is False

    reference = weights(train(fresh(), Net())[0])
    for kwargs in ({"static_graph": True}, {"gradient_as_bucket_view": True}, {"bucket_cap_mb": 1}):
        torch.testing.assert_close(weights(train(fresh(**kwargs), Net())[0]), reference)
    model, _ = train(fresh(find_unused_parameters=True), Branches())
    used = torch.cat([p.detach().flatten() for name, p in model.named_parameters() if "spare" not in name])
    torch.testing.assert_close(used, reference)


def test_every_field_arrives() -> None:
    run_world(_fields, 2)


def _static_graph_in_windows() -> None:
    ends = []
    for static in (False, True):
        accelerator = fresh(static_graph=static)
        accelerator.gradient_accumulation_steps = 2
        net = Net()
        model, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05), loader(40))
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
        ends.append(weights(model))
    torch.testing.assert_close(ends[1], ends[0])


def test_a_static_graph_under_accumulation() -> None:
    run_world(_static_graph_in_windows, 2)


def _hooks() -> None:
    reference = weights(train(fresh(), Net())[0])
    options = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 2}
    for kwargs, tolerance in (
        ({"comm_hook": Hook.FP16}, 1e-2),
        ({"comm_hook": "fp16"}, 1e-2),
        ({"comm_hook": Hook.POWER_SGD, "comm_state_option": options}, 0.2),
        ({"comm_hook": Hook.POWER_SGD, "comm_wrapper": Hook.FP16, "comm_state_option": options}, 0.2),
    ):
        model, losses = train(fresh(**kwargs), Net())
        difference = (weights(model) - reference).norm() / reference.norm()
        assert 0 < difference < tolerance, (kwargs, difference)
        assert sum(losses[-8:]) < sum(losses[:8]), kwargs


def test_communication_hooks_train() -> None:
    run_world(_hooks, 2)


def _state_options() -> None:
    seen: list[Any] = []
    original = nn.parallel.DistributedDataParallel.register_comm_hook

    def register(self: Any, state: Any, hook: Any) -> None:
        seen.append((hook.__name__, getattr(state, "matrix_approximation_rank", None)))
        original(self, state, hook)

    nn.parallel.DistributedDataParallel.register_comm_hook = register  # type: ignore[method-assign]
    option = {"matrix_approximation_rank": 3}
    fresh(comm_hook="power_sgd", comm_state_option=option).prepare(Net())
    fresh(comm_hook=Hook.BATCHED_POWER_SGD, comm_state_option=option).prepare(Net())
    fresh(comm_hook="fp16").prepare(Net())
    fresh(comm_hook="no").prepare(Net())
    assert seen == [("powerSGD_hook", 3), ("batched_powerSGD_hook", 3), ("fp16_compress_hook", None)]


def test_hooks_and_their_options_arrive() -> None:
    run_world(_state_options, 2)


def test_an_unknown_hook() -> None:
    with pytest.raises(Exception, match="'int4'"):
        run_world(_unknown, 2)


def _unknown() -> None:
    fresh(comm_hook="int4").prepare(Net())
