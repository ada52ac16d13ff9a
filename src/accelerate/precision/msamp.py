"""fp8 with MS-AMP, which replaces a model and its optimizer by those of its own."""

from __future__ import annotations

from typing import Any

from accelerate.available import is_msamp_available
from accelerate.bundle import Bundle
from accelerate.config.enums import FP8BackendType
from accelerate.config.fp8 import MSAMPRecipeKwargs
from accelerate.devices import Device
from accelerate.precision.fp8 import Fp8


class MSAMP(Fp8):
    fp8_backend = FP8BackendType.MSAMP
    title = "MS-AMP"
    package = "ms-amp"
    recipe_kind = MSAMPRecipeKwargs
    recipe: MSAMPRecipeKwargs
    can_be_sharded = False

    @classmethod
    def lacks(cls, device: Device) -> str | None:
        if not is_msamp_available():
            return "it is not installed"
        return "it needs a GPU" if device.name == "cpu" else device.lacks_fp8()

    def convert(self, bundle: Bundle) -> None:
        trained = [entry for entry in bundle.models if not entry.evaluation]
        if trained or bundle.optimizers:
            self._replace(bundle, trained)
        super().convert(bundle)

    def _replace(self, bundle: Bundle, trained: list[Any]) -> None:
        if len(trained) != 1 or len(bundle.optimizers) != 1:
            raise ValueError(
                f"MS-AMP converts a model and its optimizer together, but `prepare` was given {len(trained)} models "
                f"and {len(bundle.optimizers)} optimizers: pass one of each in one call."
            )
        import msamp

        model, optimizer = trained[0], bundle.optimizers[0]
        before = optimizer.value
        model.value, optimizer.value = msamp.initialize(model.value, before, opt_level=self.recipe.opt_level)
        for scheduler in bundle.schedulers:
            if getattr(scheduler.value, "optimizer", None) is before:
                scheduler.value.optimizer = optimizer.value
