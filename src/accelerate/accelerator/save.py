"""Saving: models and files."""

from __future__ import annotations

import os
from typing import Any

import torch

from accelerate.accelerator.base import AcceleratorBase
from accelerate.files import save
from accelerate.unwrap import extract_model_from_parallel


class Saving(AcceleratorBase):
    def unwrap_model(
        self, model: torch.nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True
    ) -> Any:
        """The model as it was before `prepare`.

        keep_fp32_wrapper: leave mixed precision in its forward. keep_torch_compile: leave it compiled.
        """
        return extract_model_from_parallel(model, keep_fp32_wrapper, keep_torch_compile)

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """The whole state dict of a prepared model; unwrap: with the names it had before `prepare`."""
        if unwrap:
            model = self.unwrap_model(model, keep_torch_compile=False)
        return self._strategy.state_dict(model)

    def save(self, obj: Any, f: str | os.PathLike[str], safe_serialization: bool = False) -> None:
        """Write an object to a file, once (or once per machine, if the project configuration says so).

        safe_serialization: write a dict of tensors as safetensors.
        """
        save(
            obj,
            f,
            save_on_each_node=self.project_configuration.save_on_each_node,
            safe_serialization=safe_serialization,
        )
