"""Inference with a model in stages: each process has one, and batches flow through them in pieces."""

from __future__ import annotations

import difflib
import functools
import math
import operator
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from accelerate.big_modeling.device_map import infer_auto_device_map
from accelerate.big_modeling.device_memory import as_classes
from accelerate.big_modeling.sizes import compute_module_sizes
from accelerate.comm.ops import broadcast_data
from accelerate.comm.tree import ignorant_find_batch_size, leaves, recursively_apply, replace_leaves, send_to_device
from accelerate.state import PartialState
from accelerate.torch_internals import pytree
from accelerate.torch_internals.fake_tensors import without_content
from accelerate.torch_internals.pipelines import greet_in_one_dtype, waits_for_every_tensor


def generate_device_map(
    model: nn.Module,
    num_processes: int = 1,
    no_split_module_classes: list[str] | None = None,
    max_memory: dict[int | str, int | str] | None = None,
) -> dict[str, Any]:
    """Plan which rank gets which part of a model, in the order of the parts.

    Args:
        model: the model.
        num_processes: the number of ranks.
        no_split_module_classes: names of classes that are never split.
        max_memory: how much memory each rank may use. By default all get about the same share.

    Returns:
        The rank of each module.
    """
    if num_processes == 1 or max_memory is not None:
        return dict(
            infer_auto_device_map(
                model,
                max_memory=max_memory,
                no_split_module_classes=no_split_module_classes,
                clean_result=False,
            )
        )
    sizes = compute_module_sizes(model)
    parts = list(_parts(model, "", set(as_classes(no_split_module_classes))))
    weights = [int(sizes[name]) for name in parts]
    return dict(zip(parts, _even_shares(weights, num_processes), strict=True))


def _parts(module: nn.Module, name: str, whole: set[str]) -> Iterator[str]:
    """The smallest modules that may be separated, in their order. Those without weights go with the one before."""
    children = [(f"{name}.{child}" if name else child, part) for child, part in module.named_children()]
    if not children or type(module).__name__ in whole or any(True for _ in module.parameters(recurse=False)):
        if name and any(True for _ in module.parameters()):
            yield name
        return
    for child, part in children:
        yield from _parts(part, child, whole)


def _even_shares(weights: list[int], shares: int) -> list[int]:
    """Which share each weight is in, in order, so that the largest share is as small as can be."""

    def cut(limit: int) -> list[int]:
        places, place, filled = [], 0, 0
        for number, weight in enumerate(weights):
            left = len(weights) - number
            # Also where the rest would not be enough to give every share one.
            if filled and (filled + weight > limit or left <= shares - 1 - place):
                place, filled = place + 1, 0
            places.append(place)
            filled += weight
        return places

    low, high = max(weights, default=0), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if cut(middle)[-1] < shares:
            high = middle
        else:
            low = middle + 1
    return cut(low) if weights else []


def find_pippy_batch_size(args: Any, kwargs: Any) -> int | None:
    """Return the length of the first tensor in the arguments of a call, or None if there is none.

    Args:
        args: the positional arguments.
        kwargs: the keyword arguments.
    """
    for values in (args, kwargs):
        for value in values.values() if isinstance(values, dict) else values or ():
            found = ignorant_find_batch_size(value)
            if found is not None:
                return found
    return None


def build_pipeline(model: nn.Module, split_points: list[str], args: Any, kwargs: Any, num_chunks: int) -> Any:
    """Trace a model, split it before the named modules, and return the schedule of this rank's stage.

    Args:
        model: the model.
        split_points: names of the modules before which it is split.
        args: positional arguments of an example call, with one chunk of a batch.
        kwargs: keyword arguments of that call.
        num_chunks: the number of chunks a batch is split into.

    Returns:
        The schedule, of `torch.distributed.pipelining`.
    """
    return _schedule(_traced(model, split_points, args, kwargs), num_chunks)


def _traced(model: nn.Module, split_points: list[str], args: Any, kwargs: Any) -> Any:
    from torch.distributed.pipelining import SplitPoint, pipeline

    modules = [name for name, _ in model.named_modules() if name]
    for point in split_points:
        if point not in modules:
            close = difflib.get_close_matches(point, modules, n=5, cutoff=0) or ["none"]
            raise ValueError(
                f"The split point {point!r} is not a module of this {type(model).__name__}: give the name of one, such "
                f"as {', '.join(close)}."
            )
    state = PartialState()
    pipe = pipeline(
        model,
        mb_args=tuple(args or ()),
        mb_kwargs=dict(kwargs or {}),
        split_spec=dict.fromkeys(split_points, SplitPoint.BEGINNING),
    )
    if pipe.num_stages != state.num_processes:
        raise ValueError(
            f"Cut at {', '.join(split_points) or 'no module'}, the model has {pipe.num_stages} stages, but there "
            f"are {state.num_processes} processes: give one split point fewer than processes."
        )
    return pipe


def _schedule(pipe: Any, num_chunks: int) -> Any:
    from torch.distributed.pipelining import ScheduleGPipe

    state = PartialState()
    for number in range(pipe.num_stages):
        _hand_on_in_one_piece(pipe.get_stage_module(number), receives=number > 0)
    stage = pipe.build_stage(state.process_index, device=state.device)
    greet_in_one_dtype(stage)
    return ScheduleGPipe(stage, num_chunks)


def _hand_on_in_one_piece(stage: Any, receives: bool) -> None:
    """Have a stage give its outputs, and expect what it receives, without gaps: backends send nothing else."""

    def filled(node: torch.fx.Node) -> torch.fx.Node:
        if not isinstance(value := node.meta.get("val"), torch.Tensor) or value.is_contiguous():
            return node
        made = stage.graph.call_method("contiguous", (node,))
        made.meta["val"] = value.contiguous()
        return made

    for node in stage.graph.find_nodes(op="placeholder") if receives else ():
        if isinstance(value := node.meta.get("val"), torch.Tensor):
            node.meta["val"] = value.contiguous()
    (output,) = stage.graph.find_nodes(op="output")
    with stage.graph.inserting_before(output):
        output.args = torch.fx.map_arg(output.args, filled)
    stage.recompile()


def pippy_forward(forward: Callable[..., Any], num_chunks: int, gather_output: bool, *args: Any, **kwargs: Any) -> Any:
    """Send a batch through the stages: the first rank feeds it in, the last one has the output.

    The batch is padded until it can be split into chunks, and the padding is removed from the output.

    Args:
        forward: the `step` of the schedule.
        num_chunks: the number of chunks a batch is split into.
        gather_output: give the output to all ranks.
        args: positional arguments of the model.
        kwargs: keyword arguments of the model.

    Returns:
        The output, on the ranks that get it; None on the others.
    """
    state = PartialState()
    size = find_pippy_batch_size(args, kwargs)
    if size is None:
        raise ValueError(
            "The batch size cannot be told from the arguments of the model: give at least one tensor, on every process."
        )
    full = math.ceil(size / num_chunks) * num_chunks
    output = None
    if state.process_index == 0:
        args, kwargs = (send_to_device(_fill(values, size, full), state.device) for values in (args, kwargs))
        output = forward(*args, **kwargs)
    else:
        output = forward()
    if state.process_index == state.num_processes - 1:
        output = recursively_apply(_rows, output, size=full, start=0, stop=size)
    if gather_output:
        return broadcast_data(output, state.num_processes - 1)
    return output if state.process_index == state.num_processes - 1 else None


def _fill(values: Any, size: int, full: int) -> Any:
    """Repeat the last sample: unlike zeros, it is something the model can compute with.

    All without gaps, as the model was traced: some releases of torch (2.9) refuse other strides.
    """

    def fill(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 0 or len(tensor) != size or size == full:
            return tensor.contiguous()
        return torch.cat([tensor, tensor[-1:].expand(full - size, *tensor.shape[1:])])

    return recursively_apply(fill, values)


def _rows(value: torch.Tensor, size: int, start: int, stop: int) -> torch.Tensor:
    """Some samples of a tensor that has one row for each of `size` samples."""
    return value[start:stop] if value.ndim and len(value) == size else value


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Split a model into one stage per rank, for inference. Call it, and the model, on every rank with the same inputs.

    Args:
        model: the model.
        split_points: names of the modules before which it is split, or "auto".
        no_split_module_classes: names of classes that "auto" never splits.
        example_args: positional arguments of a call like those to come. Batches of another size are padded, or sent in
            several rounds.
        example_kwargs: keyword arguments of that call.
        num_chunks: how many chunks a batch is split into, so that all stages have work. By default one per rank.
        gather_output: give the output to all ranks, not only to the last one.

    Returns:
        The model of this rank's stage, which is called like the original.
    """
    state = PartialState()
    args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    chunks = num_chunks or state.num_processes
    model.eval()
    if state.num_processes == 1:
        model.hf_split_points = []  # type: ignore[assignment]
        return model.to(state.device)
    if split_points == "auto" or split_points is None:
        split_points = _find_split_points(model, state.num_processes, no_split_module_classes)
    elif isinstance(split_points, str):
        split_points = [split_points]
    size = find_pippy_batch_size(args, kwargs)
    if size is None:
        raise ValueError(
            "The model cannot be traced without an input: give example_args or example_kwargs with tensors."
        )
    piece = math.ceil(size / chunks)
    args, kwargs = send_to_device(recursively_apply(_rows, (args, kwargs), size=size, start=0, stop=piece), "cpu")
    args, kwargs = recursively_apply(torch.Tensor.contiguous, (args, kwargs))
    structure = _output_structure(model, args, kwargs)
    pipe = _traced(model, split_points, args, kwargs)
    _refuse_late_inputs(model, pipe)
    _refuse_several_tensors(model, pipe)
    outputs = _outputs(model, pipe)
    stage = _schedule(pipe, chunks)
    model._original_forward = model.forward  # type: ignore[assignment]
    model._original_call = model.__call__  # type: ignore[assignment]
    model.pippy_stage = stage
    model.hf_split_points = split_points  # type: ignore[assignment]
    step = functools.partial(_step, stage, structure, outputs)
    run = functools.partial(_in_rounds, step, chunks, bool(gather_output), piece * chunks)
    model.forward = functools.update_wrapper(run, model.forward)
    return model


def _find_split_points(model: nn.Module, stages: int, no_split_module_classes: list[str] | None) -> list[str]:
    places = generate_device_map(model, stages, no_split_module_classes)
    first: dict[Any, str] = {}
    for name, place in places.items():
        first.setdefault(place, name)
    if len(first) < stages:
        raise ValueError(
            f"This {type(model).__name__} has {len(places)} parts that can be separated ({', '.join(places)}), but "
            f"there are {stages} processes: start no more processes than it has parts."
        )
    return [first[number] for number in range(1, stages)]


def _output_structure(model: nn.Module, args: Any, kwargs: Any) -> Any:
    """What the model returns, as stages only pass on tensors. Nothing is computed."""
    with without_content("a model in stages on several processes"), torch.no_grad():
        values, structure = pytree.flatten(model(*args, **kwargs))
    for number, value in enumerate(values):
        if isinstance(value, torch.Tensor) and value.ndim == 0:
            raise ValueError(
                f"Output {number} of this {type(model).__name__} is a single number, which cannot be combined from "
                "the chunks of a batch: let the model return one for each sample."
            )
    return structure


def _refuse_late_inputs(model: nn.Module, pipe: Any) -> None:
    """Raise an error if a stage needs something that the previous one does not compute."""
    stages = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    for number, stage in enumerate(stages):
        # What is neither an input nor computed by a stage is left out of all of them by torch.
        known = ("placeholder",) if number == 0 else ()
        late = [node.name for node in stage.all_input_nodes if node.op not in known and not _of_stage(node)]
        if late:
            raise ValueError(
                f"Stage {number} of this {type(model).__name__} needs {', '.join(late)}, but only the first stage "
                "gets the inputs of the model, and nothing else: compute it inside the first stage and pass it on "
                "from there, or split the model at another point."
            )


def _refuse_several_tensors(model: nn.Module, pipe: Any) -> None:
    """Raise an error if ranks on the CPU would wait forever, because torch is too old."""
    if PartialState().device.type != "cpu" or waits_for_every_tensor():
        return
    for number in range(1, pipe.num_stages):
        tensors = len(pipe.get_stage_module(number).graph.find_nodes(op="placeholder"))
        if tensors > 1:
            raise RuntimeError(
                f"Stage {number} of this {type(model).__name__} receives {tensors} tensors, but torch "
                f"{torch.__version__} can receive only one on CPUs: update torch, or split the model at another "
                "point."
            )


def _of_stage(node: torch.fx.Node) -> bool:
    return node.op == "call_module" or (node.target is operator.getitem and _of_stage(cast(Any, node.args[0])))


class _FromLast(NamedTuple):
    """An output of the model that is this output of the last stage."""

    number: int


def _outputs(model: nn.Module, pipe: Any) -> list[Any]:
    """For each output of the model, which one of the last stage it is, or the value itself where that is no tensor."""
    nodes = list(pipe.split_gm.graph.nodes)
    last = [node for node in nodes if node.op == "call_module"][-1]
    found: list[Any] = []
    values, _ = pytree.flatten(nodes[-1].args[0])
    for number, value in enumerate(values):
        if value is last:
            found.append(_FromLast(0))
        elif not isinstance(value, torch.fx.Node):
            found.append(value)
        elif value.target is operator.getitem and value.args[0] is last:
            place: Any = value.args[1]
            found.append(_FromLast(place))
        else:
            raise ValueError(
                f"Output {number} of this {type(model).__name__} is computed before the last stage, but only the "
                "last stage returns outputs: let the model return only what it computes last, or split it at "
                "another point."
            )
    return found


def _step(schedule: Any, structure: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
    output = schedule.step(*args, **kwargs)
    if output is None:
        return None
    tensors = [output] if isinstance(output, torch.Tensor) else list(output)
    return pytree.unflatten([tensors[out.number] if isinstance(out, _FromLast) else out for out in outputs], structure)


def _in_rounds(
    forward: Callable[..., Any], num_chunks: int, gather_output: bool, room: int, *args: Any, **kwargs: Any
) -> Any:
    """Send a batch through stages that were traced for `room` samples."""
    size = find_pippy_batch_size(args, kwargs)
    if size is None or size == room:
        return pippy_forward(forward, num_chunks, gather_output, *args, **kwargs)
    outputs = []
    for start in range(0, size, room):
        count = min(room, size - start)
        part = recursively_apply(_rows, (args, kwargs), size=size, start=start, stop=start + count)
        part_args, part_kwargs = _fill(part, count, room)
        output = pippy_forward(forward, num_chunks, gather_output, *part_args, **part_kwargs)
        outputs.append(recursively_apply(_rows, output, size=room, start=0, stop=count))
    if outputs[0] is None or len(outputs) == 1:
        return outputs[0]
    return replace_leaves(outputs[0], [torch.cat(parts) for parts in zip(*map(leaves, outputs), strict=True)])
