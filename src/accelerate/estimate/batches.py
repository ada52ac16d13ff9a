"""A training step of a model of transformers or timm, with a batch of the right shapes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

MOST_TOKENS = 512


@dataclass(frozen=True)
class Step:
    """How to make a model, how to call it with a batch, and what that is in words."""

    build: Callable[[], nn.Module]
    run: Callable[[nn.Module], Any]
    words: str


def of_transformers(config: Any, batch_size: int, tokens: int | None, trust_remote_code: bool) -> Step:
    """The model that the config names as its architecture, head and all; without one, the bare model."""
    import transformers

    architecture = getattr(transformers, (getattr(config, "architectures", None) or [""])[0], None)

    def build() -> nn.Module:
        if architecture is not None:
            return architecture(config)
        return transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)

    text: Any = config.get_text_config() if hasattr(config, "get_text_config") else config
    limit = getattr(text, "max_position_embeddings", None) or MOST_TOKENS
    length = tokens or min(limit, MOST_TOKENS)
    if tokens is not None and tokens > limit:
        raise ValueError(f"The sequence length is {tokens}, but the model takes at most {limit} tokens.")

    def run(model: nn.Module) -> Any:
        return _call(
            model, _inputs(str(getattr(model, "main_input_name", "input_ids")), config, text, batch_size, length)
        )

    sees_text = "input_ids" in str(getattr(architecture, "main_input_name", "input_ids"))
    shape = f"{batch_size} x {length} tokens" if sees_text else f"{batch_size} sample(s)"
    return Step(build, run, shape)


def of_timm(build: Callable[[], nn.Module], batch_size: int) -> Step:
    """A model of timm, with images of the size it was made for."""

    def run(model: nn.Module) -> Any:
        size = getattr(model, "default_cfg", {}).get("input_size", (3, 224, 224))
        return model(torch.zeros(batch_size, *size))

    return Step(build, run, f"{batch_size} image(s)")


def _inputs(name: str, config: Any, text: Any, batch_size: int, length: int) -> dict[str, torch.Tensor]:
    vision = getattr(config, "vision_config", config)
    audio_features = getattr(config, "num_mel_bins", 80)
    if name == "pixel_values":
        side = getattr(vision, "image_size", 224)
        sides = (side, side) if isinstance(side, int) else tuple(side)
        return {name: torch.zeros(batch_size, getattr(vision, "num_channels", 3), *sides)}
    if name == "input_values":
        return {name: torch.zeros(batch_size, length * 160)}  # samples of sound, a hundredth of a second each
    if name == "input_features":
        return {name: torch.zeros(batch_size, audio_features, length)}
    tokens = torch.zeros(batch_size, length, dtype=torch.long)
    batch = {"input_ids": tokens}
    if getattr(config, "is_encoder_decoder", False):
        batch["decoder_input_ids"] = tokens
    return batch


def _call(model: nn.Module, batch: dict[str, torch.Tensor]) -> Any:
    """The loss where tokens are their own labels, else the output: the loss of a class is next to nothing."""
    if "input_ids" in batch and getattr(model, "can_generate", lambda: False)():
        return model(**batch, labels=batch["input_ids"])
    return model(**batch)
