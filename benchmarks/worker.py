"""One process of one subject: builds what a figure measures, then times blocks of steps when asked.

Talks JSON lines with the coordinator (harness.py) over stdin and stdout and waits, blocked on the pipe, in
between. With `fork` a figure runs in a fork of this process: torch is imported once, and each starts clean.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

Block = Callable[[int], None]


class Pipe:
    """The coordinator's end; whatever else prints to stdout goes to stderr instead."""

    def __init__(self) -> None:
        self.requests = os.fdopen(os.dup(0), "rb", buffering=0)
        self.answers = os.dup(1)
        os.dup2(2, 1)

    def read(self) -> dict[str, Any]:
        line = self.requests.readline()
        return json.loads(line) if line else {"do": "close"}

    def write(self, answer: dict[str, Any]) -> None:
        data = (json.dumps(answer) + "\n").encode()
        while data:
            data = data[os.write(self.answers, data) :]


def timed(block: Block, steps: int) -> float:
    """Seconds for `steps` steps, with all ranks starting together and the device idle before and after."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_initialized()
    if dist.is_initialized():
        dist.barrier()
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    block(steps)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def serve(pipe: Pipe, request: dict[str, Any]) -> None:
    """Build the figure's blocks, warm them up, and time them, each in turn, until told to close."""
    try:
        os.environ.update(request["env"])
        module = importlib.import_module(request["module"])
        blocks: dict[str, Block] = {body: getattr(module, body)(**request["args"]) for body in request["bodies"]}
        for block in blocks.values():
            timed(block, request["warmup"])
        pipe.write({"ready": True})
        order = list(blocks)
        while (request := pipe.read())["do"] == "block":
            pipe.write({"seconds": {body: timed(blocks[body], request["steps"]) for body in order}})
            order.reverse()
    except BaseException:
        pipe.write({"error": traceback.format_exc()})


def serve_in_fork(pipe: Pipe, request: dict[str, Any]) -> None:
    child = os.fork()
    if child == 0:
        serve(pipe, request)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if status != 0:
        pipe.write({"error": f"the measured process ended with wait status {status}"})


def main() -> None:
    pipe = Pipe()
    hello: dict[str, Any] = {}
    try:
        import torch
        import torch._dynamo  # the first optimizer would import it, a second or more in every fork

        hello["torch"] = torch.__version__
        if sys.argv[1] == "prepared":
            import accelerate
            from accelerate import Accelerator  # noqa: F401  (its import must not be part of any figure)

            hello["accelerate"] = accelerate.__version__
            hello["path"] = os.path.dirname(accelerate.__file__)
    except Exception:
        hello["error"] = traceback.format_exc()
    pipe.write(hello)
    while (request := pipe.read())["do"] == "open":
        if request["fork"]:
            serve_in_fork(pipe, request)
        else:
            serve(pipe, request)
    # Nothing measured is worth an orderly teardown, and teardown of process groups can hang.
    os._exit(0)


if __name__ == "__main__":
    main()
