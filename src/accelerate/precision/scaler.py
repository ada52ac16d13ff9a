"""The gradient scaler of fp16 training, safe for several optimizers."""

from __future__ import annotations

from typing import Any

import torch


class Scaler(torch.amp.GradScaler):
    """torch's GradScaler that updates its factor once per backward, when every optimizer has stepped.

    torch asks for one `update()` after all optimizers of an iteration. An update after each of them would forget
    that the gradients of the others are unscaled already, and unscale them a second time.
    """

    optimizers = 0
    _update_pending = False

    def finish_step(self) -> None:
        """An optimizer has stepped: update now if it is the only one, else when all the others had their chance."""
        if self.optimizers <= 1:
            self.update()
        else:
            self._update_pending = True

    def flush(self) -> None:
        if self._update_pending:
            self._update_pending = False
            self.update()

    def scale(self, outputs: Any) -> Any:
        self.flush()
        return super().scale(outputs)

    def get_scale(self) -> float:
        self.flush()
        return super().get_scale()

    def state_dict(self) -> dict[str, Any]:
        self.flush()
        return super().state_dict()
