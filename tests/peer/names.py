"""Every name that can be reached in a module of the released package can be reached in the same module here.

Names that begin with an underscore are the release's own business, but for those that other packages import.

Usage: python tests/peer/names.py PATH_TO_THE_PYTHON_OF_THE_RELEASED_PACKAGE
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import warnings
from types import ModuleType

# Modules, each with the reason why it is not here.
MODULES_LEFT_OUT = {
    "accelerate.commands.menu": "the release's own menus for the terminal: questions are asked by questionary",
    "accelerate.test_utils.scripts": "programs, which are started; what they are made of is their own",
    "accelerate.utils.rich": "imports and says nothing but that rich is deprecated",
}
NAMES_LEFT_OUT = {
    "accelerate.commands.menu": MODULES_LEFT_OUT["accelerate.commands.menu"],
    "accelerate.commands.config.config_utils.BulletMenu": MODULES_LEFT_OUT["accelerate.commands.menu"],
    "accelerate.commands.config.config.description": "text for --help",
    "accelerate.commands.config.default.description": "text for --help",
    "accelerate.commands.config.update.description": "text for --help",
    "accelerate.commands.merge.description": "text for --help",
    "accelerate.commands.launch.options_to_group": "groups of flags are declared with the options",
    "accelerate.data_loader.additional_kwargs": "left behind by a loop",
    "accelerate.data_loader.v": "left behind by a loop",
}
PRIVATE_BUT_IMPORTED = {
    "accelerate.hooks": {"_accelerate_added_attributes"},
    "accelerate.utils.imports": {"_is_package_available"},
    "accelerate.utils.launch": {"_convert_nargs_to_dict"},
    "accelerate.utils.modeling": {"_get_proper_dtype"},
}


def left_out(module: str) -> bool:
    return any(f"{module}.".startswith(f"{other}.") for other in MODULES_LEFT_OUT)


def names() -> dict[str, list[str]]:
    """The names of every module that can be imported."""
    import accelerate

    sys.argv = ["accelerate"]
    found = {}
    modules = ["accelerate", *(module.name for module in pkgutil.walk_packages(accelerate.__path__, "accelerate."))]
    for module in modules:
        if not left_out(module):
            content = vars(importlib.import_module(module))
            asked = {name for name in content if not name.startswith("_")}
            found[module] = sorted(asked | PRIVATE_BUT_IMPORTED.get(module, set()))
    return found


def lacks(module: str, names: list[str]) -> list[str]:
    """What of these names does not resolve here."""
    here = importlib.import_module(module)
    missing = []
    for name in names:
        try:
            value = getattr(here, name)
        except Exception as error:
            missing.append(f"{module}.{name}: {type(error).__name__}: {error}")
        else:
            assert not isinstance(value, ModuleType) or value.__name__ in sys.modules
    return missing


def main(peer: str) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as folder:
        result = subprocess.run(
            [os.path.abspath(peer), os.path.abspath(__file__), "--answer"],
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=600,
        )
    if result.returncode != 0:
        raise SystemExit(result.stderr)
    asked: dict[str, list[str]] = json.loads(result.stdout)
    missing = []
    for module, there in asked.items():
        missing += lacks(module, [name for name in there if f"{module}.{name}" not in NAMES_LEFT_OUT])
    print("\n".join(missing))
    total = sum(map(len, asked.values()))
    print(f"{total} names in {len(asked)} modules: {len(missing)} missing, {len(NAMES_LEFT_OUT)} left out")
    if missing:
        raise SystemExit(1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "--answer":
        print(json.dumps(names()))
    else:
        main(sys.argv[1])
