"""The checks that every strategy passes, with DeepSpeed."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from accelerate.state import AcceleratorState, GradientState
from tests.contract.test_training import CHECKS
from tests.harness import run_world

# What DeepSpeed does in another way, as docs/deepspeed.md says; other tests of this folder are about it.
OTHERWISE = {
    "trains": "states of the optimizer are pieces of flat tensors",
    "keeps_optimizer_state": "states that an optimizer has before are not taken over, as a warning says",
    "prepares_in_any_order_and_number": "a model and its optimizer come in one call",
    "places_what_it_is_told": "the engine places models",
    "accumulates": "gradients are clipped by their norm alone",
}


def passes(folder: str) -> None:
    """In 32 bits: in 16, the outputs of models stay so."""
    for stage in (1, 2):
        config: dict[str, Any] = {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0}
        config |= {"train_micro_batch_size_per_gpu": 4, "train_batch_size": "auto"}
        config["gradient_accumulation_steps"] = "auto"
        path = Path(folder, f"{stage}-{os.environ['RANK']}.json")
        path.write_text(json.dumps(config))
        os.environ["ACCELERATE_DEEPSPEED_CONFIG_FILE"] = str(path)
        for name, check in CHECKS.items():
            if name not in OTHERWISE:
                AcceleratorState._reset_state()
                GradientState._reset_state()
                check("no")


def test_the_checks_of_every_strategy(tmp_path: Path) -> None:
    assert OTHERWISE.keys() < CHECKS.keys()
    variables = {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_USE_CPU": "true"}
    run_world(passes, 2, str(tmp_path), env=variables, timeout=100)
