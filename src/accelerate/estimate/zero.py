"""What training with DeepSpeed takes on each rank, by the stage of ZeRO and by what is kept off the device."""

from __future__ import annotations

from accelerate.estimate.usage import MASTER, Usage, Workload

# Numbers that are sent at once: DeepSpeed's `reduce_bucket_size`, unless a config says otherwise.
BUCKET = 500_000_000


def zero_usage(task: Workload, processes: int, bucket: int = BUCKET) -> dict[str, Usage]:
    """What one rank of `processes` needs under ZeRO, stage by stage, without and with offloading to the CPU.

    task: weights and gradients have `compute_bytes` each; beside them DeepSpeed keeps weights in float32 to step with.
    bucket: gradients are sent from a buffer of so many numbers, which is there whatever the size of the model.
    """
    half = task.compute_bytes < MASTER
    weights, gradients = task.parameters * task.compute_bytes, task.trained * task.compute_bytes
    copies, states = task.trained * MASTER, task.trained * task.state_bytes
    # A step is taken with gradients in float32, too.
    stepped = copies if half else 0
    # Stage 0 steps the weights themselves, where they are in float32.
    whole = states + (copies if half else 0)
    share, kept = processes, task.activations
    optimizer = (copies + states) // share
    buffer = bucket * task.compute_bytes
    # The layer at work and the next one, fetched ahead.
    gathered = 2 * task.largest_layer * task.compute_bytes + buffer
    on_host = optimizer + copies // share  # and the gradients, in float32
    return {
        "ZeRO 0": Usage(weights, gradients + stepped, whole, activations=kept),
        "ZeRO 1": Usage(weights, gradients + stepped // share, optimizer, buffer, kept),
        "ZeRO 1, optimizer on the CPU": Usage(weights, gradients, 0, buffer, kept, on_host),
        "ZeRO 2": Usage(weights, (gradients + stepped) // share, optimizer, buffer, kept),
        "ZeRO 2, optimizer on the CPU": Usage(weights, 0, 0, buffer, kept, on_host),
        "ZeRO 3": Usage(weights // share, (gradients + stepped) // share, optimizer, gathered, kept),
        "ZeRO 3, optimizer on the CPU": Usage(weights // share, 0, 0, gathered, kept, on_host),
        "ZeRO 3, all on the CPU": Usage(0, 0, 0, gathered, kept, on_host + weights // share),
    }
