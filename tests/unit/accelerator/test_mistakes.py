"""Mistakes of scripts that would go unnoticed, or that somebody else's error would hide: each is said in a sentence."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, init_empty_weights, skip_first_batches
from accelerate.state import AcceleratorState, PartialState
from accelerate.tracking import GeneralTracker
from accelerate.utils import (
    DataLoaderConfiguration,
    GradientAccumulationPlugin,
    GradScalerKwargs,
    ProjectConfiguration,
    RNGType,
)
from tests.harness import run_world
from tests.unit.accelerator.toys import Net

X = torch.linspace(-1, 1, 12).reshape(3, 4)


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def sgd(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for model in models for parameter in model.parameters()], lr=0.1)


def test_python_names_the_accelerator_where_arguments_do_not_fit() -> None:
    accelerator: Any = Accelerator(cpu=True)
    for name in ("init_trackers", "backward", "gather", "prepare_model", "no_sync", "trigger_sync_in_backward"):
        with pytest.raises(TypeError, match=rf"^Accelerator\.{name}\(\) missing 1 required positional argument"):
            getattr(accelerator, name)()
    with pytest.raises(TypeError, match=r"^Accelerator\.__init__\(\) got an unexpected keyword argument"):
        Accelerator(presicion="fp16")  # type: ignore[call-arg]


def test_a_project_folder_that_is_no_path_is_refused_before_anything_is_set_up() -> None:
    with pytest.raises(TypeError, match=r"^project_dir is 3, an int: pass a path"):
        Accelerator(cpu=True, project_dir=3)  # type: ignore[arg-type]
    assert AcceleratorState._shared_state == {}
    with pytest.raises(TypeError, match=r"^project_dir is 3, an int: pass a path"):
        Accelerator(cpu=True, project_dir=3, project_config=ProjectConfiguration())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "kind"), [(Net(), "a Net"), (nn.ModuleList(), "a ModuleList"), (None, "a NoneType"), (1.0, "a float")]
)
def test_something_else_where_parameters_are_clipped(wrong: Any, kind: str) -> None:
    accelerator = Accelerator(cpu=True)
    for clip in (accelerator.clip_grad_norm_, accelerator.clip_grad_value_):
        with pytest.raises(TypeError) as refused:
            clip(wrong, 1.0)
        assert str(refused.value) == f"Clipping takes parameters, but was given {kind}: pass `model.parameters()`."


def _failing_parameters() -> Iterator[torch.Tensor]:
    yield torch.ones(1)
    raise TypeError("of the script itself")


def test_an_error_of_the_parameters_themselves_is_shown_where_they_are_clipped() -> None:
    with pytest.raises(TypeError, match="of the script itself"):
        Accelerator(cpu=True).clip_grad_norm_(_failing_parameters(), 1.0)


def _a_number() -> None:
    accelerator = Accelerator()
    accelerator.prepare(Net())
    with silent(), pytest.raises(TypeError, match="needs the loss as a tensor, but was given a float"):
        accelerator.backward(0.5)  # type: ignore[arg-type]


def test_a_number_instead_of_a_loss_is_all_that_is_said() -> None:
    run_world(_a_number, 2)


# --- the prepared model is not the one that is trained ------------------------------------------------------------


def _bypassed() -> None:
    accelerator = Accelerator()
    accelerator.backward(accelerator.prepare(Net())(X).sum())  # in the first backward, all is well
    net = Net()
    _, optimizer = accelerator.prepare(net, sgd(net))
    accelerator.backward(net(X).sum())
    with pytest.warns(UserWarning, match="4 of the 4 parameters .* not averaged over the 2 processes") as caught:
        optimizer.step()
    assert len(caught) == 1 and caught[0].filename == __file__
    accelerator.backward(net(X).sum())
    with silent():
        optimizer.step()


def test_a_model_that_is_called_without_its_wrapper() -> None:
    run_world(_bypassed, 2)


class Pair(nn.Module):
    def __init__(self, one: nn.Module, two: nn.Module) -> None:
        super().__init__()
        self.one, self.two = one, two

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) + self.two(x)


def _used() -> None:
    accelerator = Accelerator()

    def step(optimizer: Any, loss: torch.Tensor) -> None:
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    with silent():
        # One of two models of an optimizer has not had its turn; the other has been looked at without its wrapper.
        first, second = Net(), Net()
        one, _two, both = accelerator.prepare(first, second, sgd(first, second))
        with torch.no_grad():
            second(X)
        step(both, one(X).sum())

        # A part of a model that is prepared by itself, too.
        pair = Pair(Net(), Net())
        whole, _part, optimizer, partly = accelerator.prepare(pair, pair.one, sgd(pair), sgd(pair.one))
        loss = whole(X).sum()
        step(optimizer, loss)
        accelerator.backward(whole(X).sum())
        partly.step()

        # Gradients that stay here for a while, as those of local SGD do.
        net = Net()
        model, optimizer = accelerator.prepare(net, sgd(net))
        with accelerator.no_sync(model):
            accelerator.backward(model(X).sum())
        optimizer.step()

        # Compiled after it was prepared.
        net = Net()
        model, optimizer = accelerator.prepare(net, sgd(net))
        step(optimizer, torch.compile(model, backend="eager")(X).sum())
        net = Net()
        model, optimizer = accelerator.prepare(net, sgd(net))
        model.compile(backend="eager")
        step(optimizer, model(X).sum())

        # Nothing to train: no wrapper; and nothing that has gradients.
        net = Net().requires_grad_(False)
        _, optimizer = accelerator.prepare(net, sgd(net))
        optimizer.step()
        net = Net()
        _, optimizer = accelerator.prepare(net, sgd(net))
        optimizer.step()


def test_models_that_are_called_through_their_wrappers_are_silent() -> None:
    run_world(_used, 2)


# --- backward -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"gradient_accumulation_steps": 2}, {"mixed_precision": "fp16"}])
@pytest.mark.parametrize("items", [None, 3])
@pytest.mark.parametrize(("loss", "kind"), [(0.5, "float"), (None, "NoneType"), ({"loss": X.sum()}, "dict")])
def test_a_loss_that_is_no_tensor(settings: dict[str, Any], items: int | None, loss: Any, kind: str) -> None:
    accelerator = Accelerator(cpu=True, **settings)
    accelerator.prepare(sgd(Net()))
    with pytest.raises(TypeError, match=rf"needs the loss as a tensor, .* a {kind}: .* `\.item\(\)`") as caught:
        accelerator.backward(loss, num_items=items)
    assert caught.value.__suppress_context__


def test_other_errors_of_a_backward_are_left_as_they_are() -> None:
    def fail(_: torch.Tensor) -> None:
        raise AttributeError("of a hook")

    loss = Net()(X).sum()
    loss.register_hook(fail)
    with pytest.raises(AttributeError, match="of a hook"):
        Accelerator(cpu=True).backward(loss)


@pytest.mark.parametrize("items", [None, 3])
def test_scaled_gradients_that_no_optimizer_divides_are_said_once(items: int | None) -> None:
    accelerator = Accelerator(cpu=True, mixed_precision="fp16")
    model = accelerator.prepare(Net())
    with pytest.warns(UserWarning, match="scales gradients by 65536, .* pass it to `accelerator.prepare") as caught:
        accelerator.backward(model(X).sum(), num_items=items)
    assert len(caught) == 1 and caught[0].filename == __file__
    with silent():
        accelerator.backward(model(X).sum(), num_items=items)


def test_gradients_that_are_not_scaled_need_no_prepared_optimizer() -> None:
    unscaled = GradScalerKwargs(enabled=False)
    with silent():
        for settings in ({}, {"mixed_precision": "bf16"}):
            accelerator = Accelerator(cpu=True, **settings)
            accelerator.backward(accelerator.prepare(Net())(X).sum())
            AcceleratorState._reset_state()
        accelerator = Accelerator(cpu=True, mixed_precision="fp16", kwargs_handlers=[unscaled])
        accelerator.backward(accelerator.prepare(Net())(X).sum())


# --- prepare ------------------------------------------------------------------------------------------------------


def test_a_dataset_is_no_loader_and_that_is_said() -> None:
    dataset = torch.utils.data.TensorDataset(X)
    with pytest.warns(
        UserWarning, match="a dataset, a TensorDataset, and returns it unchanged.* a DataLoader"
    ) as caught:
        assert Accelerator(cpu=True).prepare(dataset) is dataset
    assert len(caught) == 1 and caught[0].filename == __file__


def nothing_to_read(samples: int, **options: Any) -> list[str]:
    dispatched, split = options.pop("dispatched", False), options.pop("split", False)
    if options.pop("distributed", False):
        options["sampler"] = torch.utils.data.DistributedSampler(range(samples))  # type: ignore[arg-type]
    loader: Any = torch.utils.data.DataLoader(torch.arange(samples), **options)
    config = DataLoaderConfiguration(dispatch_batches=dispatched, split_batches=split)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "This loader's DistributedSampler")
        prepared = Accelerator(cpu=True, dataloader_config=config).prepare(loader)
    assert not prepared.length_asked
    if caught:
        assert caught[0].filename == __file__
        assert len(prepared) == 0
    return [str(warning.message) for warning in caught]


def _nothing_to_read() -> None:
    main = PartialState().is_main_process
    for dispatched in (False, True):
        said = nothing_to_read(40, batch_size=30, drop_last=True, dispatched=dispatched)
        assert len(said) == main
        for text in said:
            assert "its 40 samples, which are fewer than the 60 of one step of 2 processes; use a smaller" in text
        assert nothing_to_read(60, batch_size=30, drop_last=True, dispatched=dispatched) == []
        assert nothing_to_read(40, batch_size=30, drop_last=True, dispatched=dispatched, split=True) == []
        assert nothing_to_read(40, batch_size=30, dispatched=dispatched) == []
        assert nothing_to_read(0, batch_size=30, drop_last=True, dispatched=dispatched) == []
    assert nothing_to_read(30, batch_size=10, drop_last=True, distributed=True) == []


def test_a_loader_from_which_nothing_comes() -> None:
    run_world(_nothing_to_read, 2)


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(5))


def _filled_up() -> None:
    loaders: list[Any] = [
        torch.utils.data.DataLoader(Stream(), batch_size=2),
        torch.utils.data.DataLoader(torch.arange(5), batch_size=2),  # type: ignore[arg-type]
        torch.utils.data.DataLoader(Stream(), batch_size=2, drop_last=True),
    ]
    main = PartialState().is_main_process
    for dispatched, (stream, indices) in {True: ("dispatches", True), False: ("reads a stream", False)}.items():
        config = DataLoaderConfiguration(dispatch_batches=dispatched, even_batches=False)
        accelerator = Accelerator(cpu=True, dataloader_config=config)
        for loader, warned in zip(loaders, (True, indices, False), strict=True):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                accelerator.prepare(loader)
            assert len(caught) == (warned and main)
            assert all(each.filename == __file__ and f"because it {stream}: " in str(each.message) for each in caught)


def test_a_loader_that_is_filled_up_whatever_is_asked() -> None:
    run_world(_filled_up, 2)


def test_a_loader_from_which_nothing_comes_to_one_process() -> None:
    (said,) = nothing_to_read(20, batch_size=30, drop_last=True)
    assert "its 20 samples, which are fewer than the 30 of one step; use a smaller batch_size" in said
    assert nothing_to_read(40, batch_size=30, drop_last=True) == []
    assert nothing_to_read(4, batch_size=None) == []


def test_settings_that_are_below_their_least() -> None:
    with pytest.raises(ValueError, match="num_steps=-1: it must be at least 1"):
        Accelerator(cpu=True, gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=-1))
    with pytest.raises(TypeError, match=r"dataloader_config is .*: pass a DataLoaderConfiguration"):
        Accelerator(cpu=True, dataloader_config={"even_batches": False})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="num_batches is -1: it must be at least 0"):
        skip_first_batches(torch.utils.data.DataLoader(X), -1)
    for wrong in ("1", 1.5, None):
        with pytest.raises(TypeError, match=f"^num_batches is {wrong!r}: pass a whole number\\.$"):
            skip_first_batches(torch.utils.data.DataLoader(X), wrong)  # type: ignore[arg-type]
    for right in (2.0, torch.tensor(2)):
        assert len(list(skip_first_batches(torch.utils.data.DataLoader(X[:3]), right))) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize("safe", [True, False])
def test_weights_of_no_model(safe: bool, tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="and 'm' is a str: pass the model, and then the folder"):
        Accelerator(cpu=True).save_model("m", tmp_path, safe_serialization=safe)  # type: ignore[arg-type]


def test_weights_in_the_place_of_their_model(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match=r"^`save_model` .* and what was given is an OrderedDict: pass the model"):
        Accelerator(cpu=True).save_model(Net().state_dict(), tmp_path)  # type: ignore[arg-type]


def test_arguments_of_save_state_that_nobody_takes(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    sentence = (
        r"^`save_state` was given `async_sve` \(did you mean `async_save`\?\), `foo`, which has no effect: leave it"
    )
    with pytest.warns(UserWarning, match=sentence) as caught:
        folder = accelerator.save_state(tmp_path / "x", async_sve=True, foo=3)
    assert len(caught) == 1 and caught[0].filename == __file__
    with silent():
        accelerator.load_state(folder)
        accelerator.save_state(folder, exclude_frozen_parameters=True)  # DeepSpeed's


def test_a_path_and_an_object_in_each_others_places() -> None:
    with pytest.raises(AttributeError, match="`save` was given a dict to write to: pass the object, and then the path"):
        Accelerator(cpu=True).save("w.pt", {"x": 1})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [list, tuple])
def test_a_list_comes_back_as_it_is_and_that_is_said(kind: Any) -> None:
    net = Net()
    accelerator = Accelerator(cpu=True)
    objects = kind([net, sgd(net)])
    with pytest.warns(UserWarning, match=rf"a {kind.__name__} that holds a Net and an SGD .* `prepare\(\*") as caught:
        assert accelerator.prepare(objects) is objects
    assert len(caught) == 1 and caught[0].filename == __file__
    by_name = {"net": net, "steps": 3}
    with pytest.warns(UserWarning, match=r"a dict that holds a Net .* `prepare\(\*dict_of_objects\.values\(\)\)`"):
        assert accelerator.prepare(by_name) is by_name
    loader = torch.utils.data.DataLoader(X)
    others = kind([loader, torch.optim.lr_scheduler.StepLR(objects[1], 1)])
    with pytest.warns(UserWarning, match=rf"a {kind.__name__} that holds a DataLoader and a StepLR .* `prepare\(\*"):
        assert accelerator.prepare(others) is others
    with pytest.warns(UserWarning, match=r"a dict that holds a DataLoader .*\.values\(\)\)`"):
        accelerator.prepare({"train": loader})
    with silent():
        accelerator.prepare({"train": accelerator.prepare(loader)})  # as it should be
        assert accelerator.prepare([1, "a"], (None,)) == ([1, "a"], (None,))
        accelerator.prepare(nn.ModuleList([Net()]))


class NoOptimizer:
    """Has what an optimizer has, and is of no class of torch's."""

    param_groups: list[Any] = []
    state: dict[Any, Any] = {}

    def step(self) -> None: ...

    def zero_grad(self) -> None: ...


def test_objects_of_another_kind() -> None:
    accelerator = Accelerator(cpu=True)
    net = Net()
    optimizer = sgd(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    wrong: dict[str, tuple[str, list[Any]]] = {
        "prepare_model": ("model", [[net], optimizer, 3]),
        "prepare_optimizer": ("optimizer", [net, scheduler, [optimizer]]),
        "prepare_scheduler": ("scheduler", [net, optimizer, (scheduler,)]),
        "prepare_data_loader": ("DataLoader", [[1, 2], net, X]),
    }
    for method, (kind, items) in wrong.items():
        for item in items:
            sentence = rf"^`{method}` takes one {kind}, and was given an? {type(item).__name__}: pass the {kind} "
            for error in (TypeError, AttributeError):  # the release raises the latter, of what an object lacks
                with pytest.raises(error, match=sentence):
                    getattr(accelerator, method)(item)
    assert not (accelerator._models or accelerator._optimizers or accelerator._schedulers)
    stranger: Any = NoOptimizer()
    assert accelerator.prepare_optimizer(stranger).optimizer is stranger
    assert accelerator.prepare_scheduler(stranger).scheduler is stranger


def test_a_class_comes_back_as_it_is_and_that_is_said() -> None:
    with pytest.warns(UserWarning, match=r"was given the class Net and returns it unchanged: pass .* `Net\(\.\.\.\)`"):
        assert Accelerator(cpu=True).prepare(Net) is Net


def test_a_generator_comes_back_as_it_is_and_that_is_said() -> None:
    parameters = Net().parameters()
    with pytest.warns(UserWarning, match="was given a generator and returns it unchanged: pass the model or"):
        assert Accelerator(cpu=True).prepare(parameters) is parameters


def test_a_model_without_values() -> None:
    with init_empty_weights():
        net = Net()
    with pytest.raises(ValueError, match=r"4 of the 4 parameters .* no values .* load its weights") as caught:
        Accelerator(cpu=True).prepare(net)
    assert "to_empty" not in str(caught.value) and caught.value.__context__ is None


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"wrong": 1}, r"^Accelerator\.__init__\(\) got an unexpected keyword argument 'wrong'"),
        (
            {"kwargs_handlers": GradScalerKwargs()},
            r"kwargs_handlers is a GradScalerKwargs: .* `kwargs_handlers=\[GradScalerKwargs\(\.\.\.\)\]`",
        ),
        ({"project_config": "dir"}, "project_config is a str: pass .*`project_dir`"),
        ({"rng_types": ["generator", "numpy"]}, "rng_types contains 'numpy': choose from 'torch', .*, 'generator'"),
        ({"rng_types": ["torh"]}, r"rng_types contains 'torh' \(did you mean `torch`\?\): choose from"),
        ({"dynamo_backend": "inducto"}, r"backend is 'inducto' \(did you mean `inductor`\?\): choose one of no, eager"),
        ({"mixed_precision": True}, r"mixed_precision is True: choose one of no, fp8, fp16, bf16\.$"),
        ({"mixed_precision": torch.bfloat16}, r"is torch\.bfloat16: choose one of .* \(did you mean `bf16`\?\)\."),
        ({"mixed_precision": torch.float16}, r"is torch\.float16: choose one of .* \(did you mean `fp16`\?\)\."),
        ({"mixed_precision": "FP64"}, r"mixed_precision is 'FP64': choose one of no, fp8, fp16, bf16 "),
        ({"rng_types": "generator"}, r"rng_types is 'generator': pass a list, `rng_types=\['generator'\]`"),
        ({"device_placement": "bf16"}, "pass True or False, or did you mean `mixed_precision='bf16'`"),
        ({"cpu": "no"}, r"^cpu is 'no', a str: pass True or False\.$"),
        ({"split_batches": "false"}, r"^split_batches is 'false', a str: pass True or False\.$"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps is 0"),
        ({"gradient_accumulation_steps": 2, "gradient_accumulation_plugin": GradientAccumulationPlugin()}, "not both"),
        (
            {"gradient_accumulation_plugin": 2},
            "accumulation_plugin is an int: pass a GradientAccumulationPlugin",
        ),
    ],
)
def test_settings_of_the_wrong_kind(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises((TypeError, ValueError), match=sentence):
        Accelerator(**{"cpu": True, **settings})
    assert not PartialState._shared_state  # said before anything was set up


@pytest.mark.parametrize(
    "name",
    [field.name for field in dataclasses.fields(DataLoaderConfiguration) if str(field.type).startswith("bool")],
)
def test_flags_of_the_loaders_that_are_words(name: str) -> None:
    with pytest.raises(TypeError, match=rf"^{name} is 'yes', a str: pass True or False\.$"):
        DataLoaderConfiguration(**{name: "yes"})


def test_random_states_by_name_or_by_member() -> None:
    assert Accelerator(cpu=True, rng_types=["torch", RNGType.GENERATOR]).rng_types == ["torch", RNGType.GENERATOR]


# --- trackers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["log", "log_images", "log_table"])
def test_values_that_no_tracker_gets(method: str, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    send: Any = getattr(accelerator, method)
    values: Any = "table" if method == "log_table" else {"loss": 1.0}
    with pytest.warns(UserWarning, match=r"`accelerator.init_trackers\(") as caught:
        send(values)
    assert len(caught) == 1 and caught[0].filename == __file__
    with silent():
        send(values)


class Silent(GeneralTracker):
    name = "silent"
    requires_logging_directory = False
    tracker = None

    def store_init_configuration(self, values: dict[str, Any]) -> None: ...

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None: ...


def _tracked() -> None:
    with silent():
        Accelerator().log({"loss": 1.0})  # nobody has asked for a tracker
        accelerator = Accelerator(log_with=Silent())
        if accelerator.is_main_process:
            accelerator.init_trackers("run")  # and nowhere else, as scripts do
        accelerator.log({"loss": 1.0})
        accelerator = Accelerator(log_with=Silent())
        accelerator.trackers = [Silent()]
        accelerator.log({"loss": 1.0})
        accelerator.end_training()


def test_trackers_that_nobody_has_named() -> None:
    with pytest.warns(UserWarning, match="starts no tracker, so nothing that is logged is kept: name one") as caught:
        Accelerator(cpu=True).init_trackers("run")
    assert len(caught) == 1 and caught[0].filename == __file__


def test_a_config_in_the_place_of_the_project() -> None:
    accelerator = Accelerator(cpu=True, log_with=Silent())
    with pytest.raises(TypeError, match=r"^project_name is a dict: pass a name, and the settings of the run as"):
        accelerator.init_trackers({"lr": 1})  # type: ignore[arg-type]
    assert accelerator.trackers == []


def test_logging_by_the_rules_is_silent() -> None:
    run_world(_tracked, 2)


def test_a_backward_of_lomo_without_lomo() -> None:
    accelerator = Accelerator(cpu=True)
    loss = torch.ones((), requires_grad=True)
    with pytest.raises(ValueError, match="pass the learning rate"):
        accelerator.lomo_backward(loss, None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a LOMO optimizer, and none is prepared"):
        accelerator.backward(loss, learning_rate=0.1)
    assert loss.grad is None
