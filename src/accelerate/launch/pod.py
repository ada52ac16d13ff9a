"""Runs a command for each machine of a pod, side by side: until all are through, or one has failed.

    python pod.py '["worker 0", "gcloud", ...]' '["worker 1", "gcloud", ...]'

What they print comes with the name of the machine before each line.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading


def run(machines: dict[str, list[str]]) -> int:
    """Run them all; returns the code of the first that fails, whose failure ends the others, or 0."""
    running = {
        name: subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for name, words in machines.items()
    }
    failed: list[tuple[str, int]] = []
    lock = threading.Lock()

    def follow(name: str, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            with lock:
                sys.stdout.buffer.write(f"[{name}] ".encode() + line)
                sys.stdout.buffer.flush()
        code = process.wait()
        with lock:
            if not code or failed:
                return
            failed.append((name, code))
        for other in running.values():
            if other.poll() is None:
                other.terminate()

    threads = [threading.Thread(target=follow, args=item) for item in running.items()]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        for process in running.values():
            if process.poll() is None:
                process.terminate()
    if not failed:
        return 0
    name, code = failed[0]
    print(f"accelerate: {name} ended with code {code}, and the others were ended.", file=sys.stderr)
    return code if code > 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run({name: words for name, *words in map(json.loads, sys.argv[1:])}))
