"""Each side loads what the other has saved: this package, and the released one in an environment of its own.

Usage: python tests/peer/checkpoints.py PATH_TO_THE_PYTHON_OF_THE_RELEASED_PACKAGE
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TRAIN = Path(__file__).with_name("train.py")


def run(python: str, processes: int, *arguments: str) -> None:
    command = [python, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    command = command if processes > 1 else [python]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environ |= {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    # Elsewhere than in the repository, where `accelerate` might be found by its folder.
    result = subprocess.run(
        [*command, str(TRAIN), *arguments], cwd=arguments[1], env=environ, capture_output=True, text=True, timeout=300
    )
    if result.returncode != 0:
        raise SystemExit(f"{' '.join(result.args)} failed:\n{result.stdout}\n{result.stderr}")


def check(writer: str, reader: str, processes: int, safe: str, precision: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run(writer, processes, "save", folder, safe, precision)
        kept = sorted(os.listdir(Path(folder, "checkpoints")))
        assert kept == ["checkpoint_1", "checkpoint_2"], kept
        run(reader, processes, "load", folder, safe, precision)
        for rank in range(processes):
            saved, loaded = (json.loads(Path(folder, f"{a}-{rank}.json").read_text()) for a in ("save", "load"))
            for part, value in saved.items():
                assert loaded.get(part, value) == value, f"rank {rank}: {part} is {loaded[part]}, was {value}"


def main(peer: str) -> None:
    # Not resolved: the python of an environment is a link to another one.
    peer = os.path.abspath(peer)
    ours = sys.executable
    cases = [(1, "safe", "no"), (1, "torch", "no"), (2, "safe", "no"), (2, "torch", "bf16"), (1, "safe", "fp16")]
    for processes, safe, precision in cases:
        for names in (("released", "this"), ("this", "released"), ("this", "this")):
            writer, reader = ({"released": peer, "this": ours}[name] for name in names)
            check(writer, reader, processes, safe, precision)
            print(f"written by {names[0]}, read by {names[1]}: {processes} processes, {safe}, {precision}: ok")


if __name__ == "__main__":
    main(*sys.argv[1:])
