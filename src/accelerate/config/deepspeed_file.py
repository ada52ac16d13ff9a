"""A config of DeepSpeed, as a file or a dict has it: values are looked up and changed by keys with dots."""

from __future__ import annotations

import base64
import copy
import json
import os
from typing import Any


class HfDeepSpeedConfig:
    """Look up and change values of a DeepSpeed config. Nested keys are written with dots: "zero_optimization.stage".

    Args:
        config_file_or_dict: a dict, the path of a JSON file, or JSON, plain or in base64.
    """

    def __init__(self, config_file_or_dict: Any) -> None:
        self.config: dict[str, Any] = (
            copy.deepcopy(config_file_or_dict)
            if isinstance(config_file_or_dict, dict)
            else _read_config(config_file_or_dict)
        )
        self.set_stage_and_offload()

    def set_stage_and_offload(self) -> None:
        """Read the ZeRO stage, and whether anything is offloaded, from the config again."""
        self._stage = self.get_value("zero_optimization.stage", -1)
        devices = [
            self.get_value(f"zero_optimization.{part}.device") for part in ("offload_optimizer", "offload_param")
        ]
        self._offload = (self.is_zero2() or self.is_zero3()) and bool({"cpu", "nvme"} & set(devices))

    def find_config_node(self, ds_key_long: str) -> tuple[dict[str, Any] | None, str]:
        """Return the dict that a key is in, or None if there is none, and the last part of the key.

        Args:
            ds_key_long: the key.
        """
        *path, last = ds_key_long.split(".")
        node: Any = self.config
        for name in path:
            node = node.get(name)
            if node is None:
                return None, last
        return node, last

    def get_value(self, ds_key_long: str, default: Any = None) -> Any:
        """Return the value of a key.

        Args:
            ds_key_long: the key.
            default: the value if the config does not have it.
        """
        node, last = self.find_config_node(ds_key_long)
        return default if node is None else node.get(last, default)

    def del_config_sub_tree(self, ds_key_long: str, must_exist: bool = False) -> None:
        """Remove a key with everything below it.

        Args:
            ds_key_long: the key.
            must_exist: raise a `ValueError` if the config does not have it.
        """
        node, last = self.find_config_node(ds_key_long)
        if node is not None and last in node:
            del node[last]
        elif must_exist:
            raise ValueError(f"The DeepSpeed config has no {ds_key_long!r}: {self.config}")

    def is_true(self, ds_key_long: str) -> bool:
        """Tell whether the config has a key, and its value is true.

        Args:
            ds_key_long: the key.
        """
        value = self.get_value(ds_key_long)
        return value is not None and bool(value)

    def is_false(self, ds_key_long: str) -> bool:
        """Tell whether the config has a key, and its value is false.

        Args:
            ds_key_long: the key.
        """
        value = self.get_value(ds_key_long)
        return value is not None and not bool(value)

    def is_zero2(self) -> bool:
        """Tell whether gradients and optimizer states are sharded."""
        return bool(self._stage == 2)

    def is_zero3(self) -> bool:
        """Tell whether parameters are sharded as well."""
        return bool(self._stage == 3)

    def is_offload(self) -> bool:
        """Tell whether optimizer states or parameters are offloaded to the CPU or to disk."""
        return self._offload


def _read_config(source: Any) -> dict[str, Any]:
    text = source
    if isinstance(source, (str, os.PathLike)) and os.path.exists(source):
        with open(source, encoding="utf-8") as file:
            text = file.read()
    for reading in (lambda: text, lambda: base64.urlsafe_b64decode(text).decode()):
        try:
            config = json.loads(reading())
        except (ValueError, TypeError):
            continue
        if isinstance(config, dict):
            return config
    if str(source).endswith(".json") and not os.path.exists(source):
        raise ValueError(f"There is no DeepSpeed config file {os.path.abspath(source)}: correct the path.")
    raise ValueError(
        f"The DeepSpeed config {source!r} cannot be read: give a dict, the path of a JSON file, or JSON in base64."
    )
