"""What `torch_internals` does where torch no longer has a private name: the same, or what its docstring says."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy
from torch.nn.utils import parametrizations

from accelerate.torch_internals import data_loader, grad_scaler, modules, process_groups, tensors
from tests.unit.torch_names import without


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 2, bias=False)
        self.same = self.one
        self.weight = nn.Parameter(torch.ones(2))
        self.also = self.weight
        self.register_buffer("kept", torch.zeros(1))
        self.register_buffer("left_out", torch.zeros(1), persistent=False)


@pytest.mark.parametrize(
    ("table", "name", "new"),
    [
        ("parameters_of", "_parameters", nn.Parameter(torch.zeros(2))),
        ("buffers_of", "_buffers", torch.ones(1)),
        ("children_of", "_modules", nn.Linear(1, 1)),
    ],
)
def test_tables_of_a_module(table: str, name: str, new: Any) -> None:
    nets = [Net(), Net()]
    usual, other = getattr(modules, table)(nets[0]), getattr(without(name, "modules"), table)(nets[1])
    assert type(other) is not dict and list(other) == list(usual) and len(other) == len(usual)
    first = next(iter(usual))
    usual[first] = other[first] = new
    assert getattr(nets[1], first) is other[first] is usual[first] is new
    assert list(other) == list(usual) and ("nothing" in other) is False
    del usual[first], other[first]
    assert list(other) == list(usual)
    assert nets[1].state_dict().keys() == nets[0].state_dict().keys()


def test_buffers_that_are_not_saved() -> None:
    hidden = without("_non_persistent_buffers_set", "modules")
    assert hidden.non_persistent_buffers(Net()) == modules.non_persistent_buffers(Net()) == {"left_out"}
    assert hidden.non_persistent_buffers(nn.BatchNorm1d(2)) == set()


def test_a_copy_with_children_of_its_own() -> None:
    for kind in (modules, without("_modules", "modules")):
        net = Net()
        twin = kind.with_own_children(net)
        assert twin.weight is net.weight and twin.kept is net.kept and twin.one is net.one
        twin.one = nn.Linear(2, 3)
        assert twin.one is not net.one


def test_who_takes_part_in_loading() -> None:
    hooked = nn.Linear(1, 1)
    hooked.register_load_state_dict_post_hook(lambda module, keys: None)
    assert modules.has_post_load_hooks(hooked) and not modules.has_pre_load_hooks(hooked)
    assert modules.loads_by_code_of(nn.Linear(1, 1)) == "torch.nn.modules.module"
    plain = nn.Linear(1, 1)
    assert without("_load_state_dict_post_hooks", "modules").has_post_load_hooks(plain)
    assert without("_load_state_dict_pre_hooks", "modules").has_pre_load_hooks(plain)
    assert without("_load_from_state_dict", "modules").loads_by_code_of(plain) == ""


def test_weights_of_an_rnn() -> None:
    for kind in (modules, without("_update_flat_weights", "modules")):
        rnn = nn.GRU(2, 2)
        old = rnn(torch.ones(1, 2))[0]
        modules.parameters_of(rnn)["weight_ih_l0"] = nn.Parameter(torch.zeros(6, 2))
        kind.refresh_flat_weights(rnn)
        assert not torch.equal(rnn(torch.ones(1, 2))[0], old)
        assert any(weight is rnn.weight_ih_l0 for weight in rnn.all_weights[0])


def test_a_model_that_cannot_be_given_memory_any_more() -> None:
    with pytest.raises(RuntimeError, match=r"torch \S+ has no nn\.Module\._apply\w*, which spreading a model .* needs"):
        without("_apply", "modules").apply_to_tensors(nn.Linear(1, 1), torch.clone)


def test_many_tensors_at_once() -> None:
    for kind in (tensors, without("_foreach_mul_", "tensors"), without("_foreach_norm", "tensors")):
        values = [torch.arange(4.0), torch.full((2, 2), -3.0)]
        assert torch.stack(kind.norms(values, 2.0)).tolist() == [pytest.approx(14**0.5), 6.0]
        assert torch.stack(kind.norms(values, float("inf"))).tolist() == [3.0, 3.0]
        kind.multiply_(values, torch.tensor(2.0))
        assert values[0].tolist() == [0.0, 2.0, 4.0, 6.0]
    for kind in (tensors, without("_foreach_copy_", "tensors"), without("_unflatten_dense_tensors", "tensors")):
        values = [torch.zeros(()), torch.zeros(2, 3), torch.zeros(0)]
        kind.copy_all_(values, kind.split_like(torch.arange(7), values))
        assert [value.tolist() for value in values] == [0.0, [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], []]


def test_whether_a_tensor_was_written_to() -> None:
    for kind in (tensors, without("_version", "tensors")):
        tensor = torch.ones(3)
        mark = kind.change_mark(tensor)
        assert kind.change_mark(tensor) == mark
        tensor.add_(1)
        assert kind.change_mark(tensor) != mark


def test_sparse_tensors() -> None:
    sparse = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (4,), check_invariants=True)
    indices, values, coalesced = tensors.sparse_parts(sparse)
    assert (indices.tolist(), values.tolist(), coalesced) == ([[1, 1]], [2.0, 3.0], False)
    indices, values, coalesced = without("_indices", "tensors").sparse_parts(sparse)
    assert (indices.tolist(), values.tolist(), coalesced) == ([[1]], [5.0], True)


def scaled_step(kind: Any) -> tuple[list[float], bool]:
    """What clipping twice and a step with an infinite gradient come to."""
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=1.0, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    assert not grad_scaler.has_scaled(scaler)
    scaler.scale(parameter.sum()).backward()
    assert kind.has_scaled(scaler) and kind.factor_of(scaler).item() == 4.0
    kind.unscale_once(scaler, optimizer)
    kind.unscale_once(scaler, optimizer)
    scaler.step(optimizer)
    finite = not any(map(bool, kind.found_inf(scaler, optimizer)))
    scaler.update()
    optimizer.zero_grad()
    scaler.scale(parameter.sum() * float("inf")).backward()
    scaler.step(optimizer)
    return parameter.tolist(), finite and any(map(bool, kind.found_inf(scaler, optimizer)))


@pytest.mark.parametrize("name", ["nothing", "_scale", "_per_optimizer_states"])
def test_scaler(name: str) -> None:
    assert scaled_step(without(name, "grad_scaler")) == ([0.0, 0.0], True)


def test_scaler_of_pieces() -> None:
    for name in ("_unscale_grads_", "_maybe_opt_step", "_per_optimizer_states"):
        with pytest.raises(RuntimeError, match=rf"GradScaler\.{name}\w*, which fp16 .* needs: use bf16"):
            without(name, "grad_scaler").GradScalerOfPieces("cpu")
    hidden = without("_amp_foreach_non_finite_check_and_unscale_", "grad_scaler")
    for kind in (grad_scaler, hidden):
        found, piece = torch.zeros(1), torch.tensor([2.0, 4.0])
        kind._unscale([piece], found, torch.tensor(0.5))
        assert (piece.tolist(), found.item()) == ([1.0, 2.0], 0.0)
        kind._unscale([torch.tensor([1.0, float("nan")])], found, torch.tensor(0.5))
        assert found.item() == 1.0


def test_optimizers() -> None:
    plain = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    fused = torch.optim.SGD([nn.Parameter(torch.ones(1))], fused=True)
    for name in ("nothing", "_step_supports_amp_scaling"):
        kind = without(name, "optimizers")
        assert kind.decides_on_the_device(fused) and not kind.decides_on_the_device(plain)
    assert not without("nothing", "optimizers").has_load_hooks(plain)
    assert without("_optimizer_load_state_dict_pre_hooks", "optimizers").has_load_hooks(plain)


def test_compiled_modules() -> None:
    inner = nn.Linear(1, 1)
    compiled = torch.compile(inner, backend="eager")
    for name in ("nothing", "_orig_mod"):
        kind = without(name, "compile")
        assert kind.is_compiled(compiled) and not kind.is_compiled(inner)
        assert kind.original_of(compiled) is inner and kind.original_of(inner) is inner
    other = nn.Linear(1, 1)
    assert without("nothing", "compile").original_of(kind.compiled_like(compiled, other)) is other


def test_storages_in_a_file() -> None:
    typed = torch.storage.TypedStorage(3, dtype=torch.float16, _internal=True)
    for name in ("nothing", "_untyped_storage", "_size", "_pickle_storage_type"):
        memory, dtype, length, kind = without(name, "serialization").storage_parts(typed)
        assert (memory.nbytes(), dtype, length, kind) == (6, torch.float16, 3, torch.HalfStorage)


def test_what_files_may_have() -> None:
    from accelerate.io import torch_format

    pickled = torch_format._pickled({"a": torch.ones(2), "b": copy.copy})[0]
    for name in ("nothing", "_internal"):
        with pytest.raises(Exception, match=r"copy\.copy"):
            without(name, "serialization").try_weights_only(pickled)
    hidden = without("_weights_only_unpickler", "serialization")
    hidden.try_weights_only(pickled)
    assert hidden.names_taken() is None
    assert "torch.Size" in (without("nothing", "serialization").names_taken() or ())


def test_seeds_of_workers() -> None:
    for name in ("nothing", "_generate_state"):
        kind = without(name, "data_loader")
        seeds = [kind.numpy_seed(123, worker) for worker in range(3)]
        for seed in seeds:
            np.random.RandomState(seed)
        assert len({str(seed) for seed in seeds}) == 3
    batch = [torch.ones(1)]
    assert without("_utils", "data_loader").pin_memory(batch) is batch


def test_numbers_of_workers() -> None:
    from torch.utils.data._utils.worker import WorkerInfo

    info: Any = WorkerInfo(id=1, num_workers=3, seed=11, dataset=None)  # type: ignore[arg-type]
    data_loader.renumber(info, 2)
    assert (info.id, info.seed, info.num_workers) == (2, 12, 3)

    class Fixed(NamedTuple):
        id: int
        seed: int

    fixed = Fixed(1, 11)
    data_loader.renumber(fixed, 2)
    assert fixed == (1, 11)


def test_before_the_first_read() -> None:
    class Fetcher:
        def fetch(self, indices: int) -> int:
            events.append("read")
            return indices

    events: list[str] = []

    def note() -> None:
        events.append("called")

    class Batches:
        def __init__(self) -> None:
            self._dataset_fetcher: Any = Fetcher()

    for name, expected in (("nothing", ["called", "read", "read"]), ("_dataset_fetcher", ["read", "read"])):
        events.clear()
        batches = Batches()
        possible = without(name, "data_loader").before_first_read(batches, note)
        assert [batches._dataset_fetcher.fetch(1), batches._dataset_fetcher.fetch(2)] == [1, 2]
        assert (events, possible) == (expected, name == "nothing")


def test_policies() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU())
    custom, by_class = CustomPolicy(lambda module: isinstance(module, nn.ReLU)), ModuleWrapPolicy({nn.Linear})
    kind, hidden = without("nothing", "wrap_policies"), without("_run_policy", "wrap_policies")
    assert kind.chosen_by(custom, model, []) == {model[1]} and kind.chosen_by(by_class, model, []) == {model[0]}
    assert hidden.chosen_by(by_class, model, []) is None
    with pytest.raises(RuntimeError, match=r"has no CustomPolicy\._run_policy\w*, which this policy needs"):
        hidden.chosen_by(custom, model, [])


def test_gathering_without_a_method_of_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    class Group:
        """Without a method, as none may have one of that name any more."""

    asked: list[Any] = []

    def gather(*tensors: Any, **options: Any) -> None:
        asked.append((tensors, options))

    monkeypatch.setattr(torch.distributed, "all_gather", gather)
    group, outs, tensor = Group(), [torch.zeros(1), torch.zeros(1)], torch.zeros(1)
    process_groups.all_gather_on(group)(outs, tensor)()
    assert asked == [((outs, tensor), {"group": group, "async_op": True})]


def test_exchange_of_context() -> None:
    hidden = without("_attention", "mesh")
    hidden.set_exchange_of_context("allgather")
    with pytest.raises(RuntimeError, match="cp_comm_strategy='alltoall' needs: leave it at 'allgather'"):
        hidden.set_exchange_of_context("alltoall")


def test_when_cuda_starts() -> None:
    without("_lazy_call", "cuda").when_started(lambda: pytest.fail("CUDA is not there"))


def test_a_parametrized_module() -> None:
    """Its parameters are not where their names say."""
    net = parametrizations.weight_norm(nn.Linear(2, 2))
    hidden = without("_parameters", "modules")
    for part in net.modules():
        assert list(hidden.parameters_of(part)) == list(modules.parameters_of(part))
