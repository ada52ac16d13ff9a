"""The config file under its public names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from accelerate.config import file
from accelerate.config.file import BaseConfig, ClusterConfig, SageMakerConfig, load_config_from_file

__all__ = [
    "BaseConfig",
    "ClusterConfig",
    "SageMakerConfig",
    "load_config_from_file",
]

_PLACES = {
    "hf_cache_home": lambda: file.folder().parent,
    "cache_dir": file.folder,
    "default_config_file": file.default_path,
    "default_yaml_config_file": lambda: file.folder() / "default_config.yaml",
    "default_json_config_file": lambda: file.folder() / "default_config.json",
}


hf_cache_home: str
cache_dir: str
default_config_file: str
default_yaml_config_file: str
default_json_config_file: str

if not TYPE_CHECKING:  # names that are not declared above are errors

    def __getattr__(name: str) -> Any:
        # The places depend on the environment, so they are looked up when they are asked for.
        if name in _PLACES:
            return str(_PLACES[name]())
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
