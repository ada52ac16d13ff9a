"""How a model is compiled."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from accelerate.config.enums import DynamoBackend
from accelerate.config.environment import parse_flag_from_env
from accelerate.config.handlers import KwargsHandler

PREFIX = "ACCELERATE_DYNAMO_"

# What `torch.compile` does by itself: a value that came from the environment differs from it too.
_PLAIN = {
    "backend": "no",
    "mode": "default",
    "fullgraph": False,
    "dynamic": None,
    "options": None,
    "disable": False,
}


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Arguments for `torch.compile`; what is not given is read from the `ACCELERATE_DYNAMO_*` variables.

    Args:
        backend: the compiler: a member of `DynamoBackend`, or its name.
        mode: 'default', 'reduce-overhead', 'max-autotune' or a mode of your backend.
        fullgraph: fail if a model cannot be compiled as one graph.
        dynamic: compile for shapes that change.
        options: options for the backend.
        disable: make `torch.compile` do nothing.
        use_regional_compilation: compile the repeated blocks of a model once instead of the whole model.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        backend = os.environ.get(PREFIX + "BACKEND", "no") if self.backend is None else self.backend
        name = getattr(backend, "value", backend)
        if name.upper() not in DynamoBackend.list():
            from accelerate.text import did_you_mean

            known = [each.lower() for each in DynamoBackend.list()]
            near = did_you_mean(name.lower(), known)
            raise ValueError(f"The dynamo backend is {name!r}{near}: choose one of {', '.join(known)}.")
        self.backend = DynamoBackend(name.upper())
        if self.mode is None:
            self.mode = os.environ.get(PREFIX + "MODE", "default")
        if self.fullgraph is None:
            self.fullgraph = parse_flag_from_env(PREFIX + "USE_FULLGRAPH")
        if self.use_regional_compilation is None:
            self.use_regional_compilation = parse_flag_from_env(PREFIX + "USE_REGIONAL_COMPILATION")
        # Unset stays None, which lets torch find out by itself which sizes change.
        if self.dynamic is None and PREFIX + "USE_DYNAMIC" in os.environ:
            self.dynamic = parse_flag_from_env(PREFIX + "USE_DYNAMIC")

    def to_dict(self) -> dict[str, Any]:
        """Return a copy of the fields, with the backend as torch spells it."""
        fields = super().to_dict()
        fields["backend"] = str(fields["backend"]).lower()
        return fields

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for `torch.compile` that differ from the defaults."""
        fields = self.to_dict()
        return {name: fields[name] for name, plain in _PLAIN.items() if fields[name] != plain}
