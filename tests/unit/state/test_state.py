"""The state of a single process."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch

from accelerate import Accelerator
from accelerate.config.megatron import MegatronLMPlugin
from accelerate.errors import NotYetSupported
from accelerate.state import (
    AcceleratorState,
    DistributedType,
    GradientState,
    PartialState,
    ThreadLocalSharedDict,
    is_initialized,
)
from accelerate.state.processes import split_inputs


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")


def test_partial_state_is_one() -> None:
    assert PartialState._shared_state == {}
    first, second = PartialState(), PartialState(cpu=True)
    assert first.__dict__ is second.__dict__ is PartialState._shared_state
    first.noted = 1  # type: ignore[attr-defined]
    assert second.noted == 1
    PartialState._reset_state()
    assert PartialState._shared_state == {} and not hasattr(PartialState(), "noted")


def test_what_clients_read() -> None:
    state = PartialState()
    assert state.device == state.default_device == torch.device("cpu")
    assert state.distributed_type == DistributedType.NO and state.backend is None
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process and state.is_local_main_process and state.is_last_process
    assert state.initialized and not state.use_distributed and not state.debug and not state.fork_launched
    state.wait_for_everyone()
    state.set_device()
    state.destroy_process_group()


def test_repr() -> None:
    text = repr(PartialState())
    assert "DistributedType.NO" in text and "Num processes: 1\n" in text and "Device: cpu\n" in text
    assert "Mixed precision type: bf16" in repr(Accelerator(mixed_precision="bf16").state)
    assert "Sync Gradients: True" in repr(GradientState())


def test_an_instance_that_outlives_a_reset_says_so() -> None:
    state = PartialState()
    PartialState._reset_state()
    with pytest.raises(AttributeError, match="`num_processes` because it was reset"):
        state.num_processes  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        PartialState().nonsense  # noqa: B018


def test_the_settings_of_an_accelerator_say_so_too() -> None:
    state = Accelerator().state
    type(state)._reset_state()
    with pytest.raises(AttributeError, match="`dynamo_plugin` because it was reset"):
        state.dynamo_plugin  # noqa: B018


def test_accelerator_state_needs_an_accelerator() -> None:
    assert not is_initialized()
    with pytest.raises(ValueError, match="Accelerator"):
        AcceleratorState()
    assert not is_initialized() and AcceleratorState._shared_state == {}
    accelerator = Accelerator()
    assert is_initialized() and AcceleratorState().__dict__ is accelerator.state.__dict__
    assert AcceleratorState().deepspeed_plugin is None and getattr(AcceleratorState(), "fsdp_plugin", None) is None
    AcceleratorState._reset_state()
    assert not is_initialized() and PartialState._shared_state != {}
    Accelerator()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert PartialState._shared_state == {}


def test_a_second_accelerator_may_not_change_the_precision() -> None:
    Accelerator(mixed_precision="bf16")
    assert Accelerator().mixed_precision == Accelerator(mixed_precision="bf16").mixed_precision == "bf16"
    with pytest.raises(ValueError, match=r"'no'.*'bf16'"):
        Accelerator(mixed_precision="no")
    assert Accelerator(cpu=True).device == torch.device("cpu")


def test_cpu_after_another_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerator()
    monkeypatch.setitem(AcceleratorState._shared_state, "_cpu", False)
    with pytest.raises(ValueError, match="cpu=True"):
        Accelerator(cpu=True)


def test_mixed_precision_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "BF16")
    assert Accelerator().mixed_precision == "bf16"
    AcceleratorState._reset_state(True)
    assert Accelerator(mixed_precision="no").mixed_precision == "no"
    AcceleratorState._reset_state(True)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp12")
    with pytest.raises(
        ValueError, match=r"ACCELERATE_MIXED_PRECISION is 'fp12': choose one of no, fp8, fp16, bf16 \(did you"
    ):
        Accelerator()
    assert not is_initialized(), "a failed set-up must not look like a finished one"


@pytest.mark.parametrize(
    ("arguments", "environ", "error", "sentence"),
    [
        ({"megatron_lm_plugin": object()}, {}, TypeError, "pass a MegatronLMPlugin"),
        ({"megatron_lm_plugin": MegatronLMPlugin()}, {}, ImportError, "pip install megatron-core"),
        ({}, {"ACCELERATE_USE_MEGATRON_LM": "True"}, ImportError, "pip install megatron-core"),
        ({"mixed_precision": "fp8"}, {"ACCELERATE_USE_MEGATRON_LM": "True"}, NotYetSupported, "use 'bf16'"),
        (
            {},
            {"ACCELERATE_USE_MEGATRON_LM": "True", "ACCELERATE_USE_FSDP": "True"},
            ValueError,
            "either by FSDP or by Megatron-LM: leave out",
        ),
    ],
)
def test_megatron_is_refused_in_one_sentence(
    arguments: dict[str, Any],
    environ: dict[str, str],
    error: type[Exception],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("accelerate.state.accelerator.is_fp8_available", lambda: True)
    monkeypatch.setattr("accelerate.state.engines.megatron.has_package", lambda name: name != "megatron.core")
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=sentence) as caught:
        Accelerator(**arguments)
    assert "\n" not in str(caught.value)
    assert not is_initialized()


def test_an_engine_that_is_switched_off_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "0")
    accelerator = Accelerator()
    assert accelerator.distributed_type is DistributedType.NO and accelerator.state.deepspeed_plugin is None
    assert type(accelerator.prepare(torch.nn.Linear(1, 1))) is torch.nn.Linear


def test_accumulation_steps_from_the_environment_beat_the_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4")
    assert Accelerator(gradient_accumulation_steps=2).gradient_accumulation_steps == 4
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "four")
    with pytest.raises(ValueError, match="ACCELERATE_GRADIENT_ACCUMULATION_STEPS is 'four'"):
        Accelerator()


def test_gradient_state_is_shared_and_starts_in_sync() -> None:
    first, second = GradientState(), GradientState()
    assert first.__dict__ is second.__dict__
    assert first.sync_gradients and first.num_steps == 1 and first.remainder == -1
    assert not first.in_dataloader and not first.end_of_dataloader and first.active_dataloader is None
    first._set_sync_gradients(False)
    assert not second.sync_gradients
    GradientState._reset_state()
    assert GradientState().sync_gradients


def test_each_accelerator_keeps_its_accumulation_steps() -> None:
    first = Accelerator(gradient_accumulation_steps=4)
    second = Accelerator()
    assert (first.gradient_accumulation_steps, second.gradient_accumulation_steps) == (4, 1)
    assert GradientState().num_steps == 4
    second.gradient_state._set_sync_gradients(False)
    assert first.sync_gradients


def test_affinity_without_a_gpu_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("ACCELERATE_CPU_AFFINITY", "1")
    before = os.sched_getaffinity(0)
    PartialState()
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("name", ["ACCELERATE_DEBUG_MODE", "ACCELERATE_CPU_AFFINITY"])
def test_a_flag_with_nonsense_is_named_and_leaves_no_half_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "perhaps")
    with pytest.raises(ValueError, match=name):
        PartialState()
    assert PartialState._shared_state == {}


def test_every_decorator_runs_on_one_process() -> None:
    state = PartialState()
    ran: list[str] = []
    for decorator in (
        state.on_main_process,
        state.on_main_process(),
        state.on_local_main_process,
        state.on_local_main_process(),
        state.on_last_process,
        state.on_process(process_index=0),
        state.on_process(process_index=3),
        state.on_local_process(local_process_index=0),
    ):

        @decorator
        def note(word: str) -> str:
            ran.append(word)
            return word

        assert note("x") == "x"
    assert len(ran) == 8


def test_thread_local_shared_dict() -> None:
    class Shared:
        everywhere: Any = ThreadLocalSharedDict()
        here: Any = ThreadLocalSharedDict(thread_local=True)

    Shared().everywhere["x"] = Shared().here["x"] = 1
    seen: list[Any] = []
    thread = threading.Thread(target=lambda: seen.append((dict(Shared.everywhere), dict(Shared.here))))
    thread.start()
    thread.join()
    assert seen == [({"x": 1}, {})] and Shared().here == {"x": 1}
    Shared().everywhere = {"y": 2}
    thread = threading.Thread(target=lambda: seen.append(dict(Shared.everywhere)))
    thread.start()
    thread.join()
    assert seen[1] == {"y": 2}


def test_a_new_shared_dict_is_empty() -> None:
    for number in range(50):  # of which some lie where a collected one lay
        shared = ThreadLocalSharedDict()
        assert shared.__get__(None) == {}
        shared.__get__(None)["x"] = number
        del shared
        gc.collect(0)


def test_states_are_seen_from_other_threads() -> None:
    PartialState()
    seen: list[bool] = []
    thread = threading.Thread(target=lambda: seen.append(PartialState._shared_state == {}))
    thread.start()
    thread.join()
    assert seen == [False]


def parts(inputs: Any, count: int, padding: bool = False) -> list[Any]:
    return [split_inputs(inputs, index, count, padding) for index in range(count)]


@pytest.mark.parametrize(
    ("inputs", "count", "padding", "expected"),
    [
        ([1, 2, 3, 4, 5], 2, False, [[1, 2, 3], [4, 5]]),
        ([1, 2, 3, 4, 5], 2, True, [[1, 2, 3], [4, 5, 5]]),
        ([1, 2, 3, 4, 5], 3, False, [[1, 2], [3, 4], [5]]),
        ([1, 2, 3, 4], 3, True, [[1, 2], [3, 3], [4, 4]]),
        ((1, 2, 3), 2, True, [(1, 2), (3, 3)]),
        ([1], 3, False, [[1], [], []]),
        ([1], 3, True, [[1], [1], [1]]),
        ([], 2, True, [[], []]),
        ([[1, 2], [3], [4]], 2, False, [[[1, 2], [3]], [[4]]]),
        ({"a": [1, 2, 3], "b": ["x", "y", "z"]}, 2, False, [{"a": [1, 2], "b": ["x", "y"]}, {"a": [3], "b": ["z"]}]),
        ({"a": {"b": [1, 2, 3]}}, 2, True, [{"a": {"b": [1, 2]}}, {"a": {"b": [3, 3]}}]),
        ({}, 2, True, [{}, {}]),
        ([1, 2], 1, True, [[1, 2]]),
    ],
)
def test_split(inputs: Any, count: int, padding: bool, expected: list[Any]) -> None:
    before = repr(inputs)
    assert parts(inputs, count, padding) == expected
    assert repr(inputs) == before


@pytest.mark.parametrize("make", [torch.arange, np.arange])
def test_split_of_tensors_and_arrays(make: Any) -> None:
    assert [part.tolist() for part in parts(make(5), 2)] == [[0, 1, 2], [3, 4]]
    assert [part.tolist() for part in parts(make(5), 2, True)] == [[0, 1, 2], [3, 4, 4]]
    assert [part.tolist() for part in parts(make(1), 3, True)] == [[0], [0], [0]]
    assert [part.tolist() for part in parts(make(4).reshape(2, 2), 3, True)] == [[[0, 1]], [[2, 3]], [[2, 3]]]
    assert type(parts(make(5), 2, True)[1]) is type(make(1))


@pytest.mark.parametrize(
    ("inputs", "kind"),
    [
        ((item for item in "abc"), "a generator"),
        (map(str, [1, 2]), "a map"),
        (iter([1, 2]), "a list_iterator"),
        ({1, 2}, "a set"),
        ({"a": 1}.keys(), "a dict_keys"),
        ("hello", "a str"),
        (b"hello", "a bytes"),
        (5, "an int"),
        (None, "a NoneType"),
    ],
)
def test_what_cannot_be_cut_is_not_given_to_every_process(inputs: Any, kind: str) -> None:
    one = isinstance(inputs, (str, bytes, int)) or inputs is None
    for given in (inputs, {"a": ["x", "y"], "b": inputs}):
        with pytest.raises(TypeError) as refused:
            parts(given, 2)
        assert str(refused.value) == (
            f"`split_between_processes` was given {kind}, which cannot be cut into parts: pass a list, as in "
            f"`{'[inputs]' if one else 'list(inputs)'}`."
        )
    assert parts(inputs, 1) == [inputs]


def test_a_split_that_is_iterated_instead_of_entered() -> None:
    split: Any = PartialState(cpu=True).split_between_processes([1, 2])
    with pytest.raises(TypeError, match=r"^`split_between_processes` is for a `with`: .*\(inputs\) as part:`\.$"):
        list(split)


def test_split_of_unequal_values() -> None:
    with pytest.raises(ValueError, match="'a': 1, 'b': 2"):
        parts({"a": [1], "b": [1, 2]}, 2)


def test_a_world_without_a_rank_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="WORLD_SIZE is 2, but RANK is not set"):
        PartialState(cpu=True)
    assert not PartialState._shared_state
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert PartialState(cpu=True).num_processes == 1
