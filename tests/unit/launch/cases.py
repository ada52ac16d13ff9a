"""Command lines and config files, each with the variables that its processes are told.

FOLDER stands for the folder in which the files of a case lie.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from accelerate.commands.launch import launch_command_parser
from accelerate.launch.machine import Accelerators
from accelerate.launch.plan import plan
from accelerate.launch.resolve import resolve

FILE = Path(__file__).with_name("cases.json")
CASES: dict[str, dict[str, Any]] = json.loads(FILE.read_text()) if FILE.exists() else {}
NO_DEVICES = Accelerators("cpu", 0, "the tests say so")


def outcome(case: dict[str, Any]) -> dict[str, Any]:
    """What this package would do: engine, command and variables, or the error."""
    with tempfile.TemporaryDirectory() as folder:
        words = [word.replace("FOLDER", folder) for word in case["argv"]]
        for name, text in case.get("files", {}).items():
            (Path(folder) / name).write_text(text)
        if "config" in case:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(case["config"]).replace("FOLDER", folder))
            words = ["--config_file", str(path), *words]
        environ = {"HF_HOME": folder, **case.get("environ", {})}
        try:
            settings = resolve(launch_command_parser().parse_args(words), environ, NO_DEVICES, lambda port: False)
            planned = plan(settings)
        except (ValueError, OSError) as error:
            return {"error": type(error).__name__, "says": str(error).replace(folder, "FOLDER")}
    env = {name: value.replace(folder, "FOLDER") for name, value in planned.env.items()}
    if settings.of["num_cpu_threads_per_process"].source != "flag":
        env.pop("OMP_NUM_THREADS", None)  # depends on the machine
    command = [word.replace(sys.executable, "python").replace(folder, "FOLDER") for word in planned.argv]
    command = [word for word in command if word != "-P"]  # which Python 3.10 does not have
    ours = ("/worker.py", "/program.py", "/function.py", "/pod.py")
    command = [Path(word).name if word.endswith(ours) else word for word in command]
    if "--main_process_port" in case["argv"] and "0" in case["argv"]:
        command = [word.split("=")[0] if word.startswith("--master_port") else word for word in command]
    return {
        "engine": "elastic" if planned.becomes else "process",
        "command": command,
        "env": env,
        **({"refused": True} if planned.refused else {}),
    }
