"""Fields of dataclasses, described by the help that stands in their metadata."""

from __future__ import annotations

import ast
from typing import Any

import griffe


class FieldHelp(griffe.Extension):
    """An extension of griffe: `field(metadata={"help": ...})` becomes the docstring of the attribute."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is not None or attr.value is None or "metadata" not in str(attr.value):
            return
        call = ast.parse(str(attr.value), mode="eval").body
        if not isinstance(call, ast.Call):
            return
        for keyword in call.keywords:
            if keyword.arg == "metadata" and isinstance(keyword.value, ast.Dict):
                attr.docstring = _docstring(keyword.value)
            elif keyword.arg == "default":
                attr.value = ast.unparse(keyword.value)


def _docstring(metadata: ast.Dict) -> griffe.Docstring | None:
    for key, value in zip(metadata.keys, metadata.values, strict=True):
        if isinstance(key, ast.Constant) and key.value == "help" and isinstance(value, ast.Constant):
            return griffe.Docstring(str(value.value))
    return None
