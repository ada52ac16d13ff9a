"""Run by the released package: what `accelerate launch` would tell its processes, case by case, without starting any.

python launch_capture.py CASES.json RESULT.json
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import types
import warnings
from typing import Any

warnings.filterwarnings("ignore")

import torch.distributed.run as torchrun  # noqa: E402

import accelerate.utils.launch as launch_utils  # noqa: E402
from accelerate.commands import launch  # noqa: E402

Popen = subprocess.Popen


class Stop(BaseException):
    def __init__(self, engine: str, env: dict[str, str], words: list[str] | None = None) -> None:
        self.engine, self.env, self.words = engine, env, words or []


class Captured(Popen):  # type: ignore[type-arg]
    """Lets questions to the machine through, and stops at the first real start."""

    def __init__(self, command: Any, *args: Any, env: Any = None, **kwargs: Any) -> None:
        if command[0] == "nvidia-smi" or "--version" in command:
            super().__init__(command, *args, env=env, **kwargs)
        else:
            raise Stop("process", dict(env or os.environ), list(map(str, command)))


def stop_elastic(args: Any) -> None:
    raise Stop("elastic", dict(os.environ))


def pretend() -> None:
    """DeepSpeed and fp8 are asked for by name only; what they would do is not looked at. Every port is free, whatever
    else runs on this machine."""
    for name in ("deepspeed", "deepspeed.launcher", "deepspeed.launcher.runner"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["deepspeed.launcher.runner"].DEEPSPEED_ENVIRONMENT_NAME = os.devnull  # type: ignore[attr-defined]
    launch.is_deepspeed_available = lambda: True
    launch_utils.is_fp8_available = lambda: True
    launch_utils.is_port_in_use = lambda port: False


def capture(case: dict[str, Any]) -> dict[str, Any]:
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        argv = [word.replace("FOLDER", folder) for word in case["argv"]]
        texts = dict(case.get("files", {}))
        if "config" in case:
            texts["config.json"] = json.dumps(case["config"]).replace("FOLDER", folder)
            argv = ["--config_file", os.path.join(folder, "config.json"), *argv]
        for name, text in texts.items():
            with open(os.path.join(folder, name), "w") as file:
                file.write(text)
        os.environ.update(case.get("environ", {}))
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                launch.launch_command(launch.launch_command_parser().parse_args(argv))
            return {"error": "nothing was started"}
        except Stop as stop:
            told = {
                name: value.replace(folder, "FOLDER") for name, value in stop.env.items() if before.get(name) != value
            }
            words = [word.replace(folder, "FOLDER") for word in stop.words]
            return {"engine": stop.engine, "env": told, "words": words}
        except BaseException as error:
            return {"error": type(error).__name__}
        finally:
            os.environ.clear()
            os.environ.update(before)


def main() -> None:
    cases, result = sys.argv[1:3]
    subprocess.Popen = Captured  # type: ignore[misc]
    torchrun.run = stop_elastic
    pretend()
    with open(cases) as file:
        asked = json.load(file)
    answers = {name: capture(case) for name, case in asked.items()}
    with open(result, "w") as file:
        json.dump(answers, file)


if __name__ == "__main__":
    main()
