"""Runs one function of a script, for scripts that do not call it by themselves.

python function.py NAME script train.py --lr 1
python function.py NAME module package.train --lr 1
"""

from __future__ import annotations

import importlib
import os
import sys


def main() -> None:
    name, kind, target, *arguments = sys.argv[1:]
    sys.argv = [target, *arguments]
    if kind == "module":
        sys.path[0] = os.getcwd()
    else:
        sys.path[0], target = os.path.dirname(os.path.abspath(target)), os.path.splitext(os.path.basename(target))[0]
    function = getattr(importlib.import_module(target), name, None)
    if not callable(function):
        sys.exit(f"There is no function {name!r} in {sys.argv[0]}: correct `--main_training_function`.")
    function()


if __name__ == "__main__":
    main()
