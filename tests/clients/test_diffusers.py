"""Models and pipelines of diffusers in too little memory: they paint the same as ever."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.hooks import AlignDevicesHook, CpuOffload

diffusers = pytest.importorskip("diffusers", reason="needs diffusers: make clients")

pytestmark = pytest.mark.filterwarnings("ignore")  # of diffusers' own code
IMAGE = torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1))
TEXT = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(2))
BLOCKS: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 3,
    "out_channels": 3,
    "layers_per_block": 1,
    "block_out_channels": (16, 32),
    "norm_num_groups": 4,
    "attention_head_dim": 8,
}


def unet() -> Any:
    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    return diffusers.UNet2DModel(**BLOCKS, **kinds).eval()


def told() -> Any:
    """One that is told what to paint, and that says which of its parts stay whole."""
    torch.manual_seed(0)
    kinds = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    return diffusers.UNet2DConditionModel(**BLOCKS, **kinds, cross_attention_dim=8).eval()


def pipeline() -> Any:
    return diffusers.DDPMPipeline(unet(), diffusers.DDPMScheduler(num_train_timesteps=10))


def painted(model: Any) -> torch.Tensor:
    more = (TEXT,) if isinstance(model, diffusers.UNet2DConditionModel) else ()
    with torch.no_grad():
        sample: torch.Tensor = model(IMAGE, torch.tensor(3), *more).sample
    return sample


def images(made: Any) -> Any:
    made.set_progress_bar_config(disable=True)
    return made(num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np").images


def assert_same(found: Any, expected: Any) -> None:
    """To rounding: on some processors convolutions add up in another order where weights lie at another address."""
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shards", ["1GB", "100KB"])
@pytest.mark.parametrize(
    "places", [{"": "cpu", "mid_block": "disk", "up_blocks.1": "disk"}, "auto", "balanced"], ids=str
)
def test_a_model_is_loaded_into_memory_and_onto_disk(
    places: str | Mapping[str, str], shards: str, tmp_path: Path
) -> None:
    new = unet if isinstance(places, Mapping) else told
    new().save_pretrained(tmp_path / "model", max_shard_size=shards)
    model = type(new()).from_pretrained(
        tmp_path / "model",
        device_map=places,
        max_memory=None if isinstance(places, Mapping) else {"cpu": 700_000},
        offload_folder=tmp_path / "offload",
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert any(parameter.is_meta for parameter in model.parameters())
    assert_same(painted(model), painted(new()))
    model.save_pretrained(tmp_path / "again")
    assert_same(painted(type(model).from_pretrained(tmp_path / "again")), painted(new()))


@pytest.mark.parametrize("low", [False, True])
def test_a_model_is_loaded_without_a_map(low: bool, tmp_path: Path) -> None:
    unet().save_pretrained(tmp_path)
    model = diffusers.UNet2DModel.from_pretrained(tmp_path, low_cpu_mem_usage=low)
    weights = unet().state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert_same(painted(model), painted(unet()))


@pytest.mark.parametrize("places", ["balanced", "cpu"])
def test_a_pipeline_is_loaded_with_a_map(places: str, tmp_path: Path) -> None:
    pipeline().save_pretrained(tmp_path)
    made = diffusers.DDPMPipeline.from_pretrained(tmp_path, device_map=places)
    assert_same(images(made), images(pipeline()))


def test_the_parts_of_a_pipeline_take_turns() -> None:
    class Two(diffusers.DiffusionPipeline):  # type: ignore[misc, name-defined]
        model_cpu_offload_seq = "first->second"

        def __init__(self, first: Any, second: Any) -> None:
            super().__init__()
            self.register_modules(first=first, second=second)

        @torch.no_grad()
        def __call__(self) -> torch.Tensor:
            found = self.first(IMAGE.to(self._execution_device), torch.tensor(3)).sample
            found = self.second(found, torch.tensor(3)).sample
            self.maybe_free_model_hooks()
            return found

    made = Two(unet(), unet())
    expected = made()
    made.enable_model_cpu_offload(device="cpu")
    assert isinstance(made.first._hf_hook, CpuOffload) and len(made._all_hooks) == 2
    for _ in range(2):
        assert_same(made(), expected)


def test_a_pipeline_brings_in_one_layer_at_a_time_and_then_whole_parts() -> None:
    expected = images(pipeline())
    made = pipeline()
    made.enable_sequential_cpu_offload(device="cpu")
    assert all(parameter.is_meta for parameter in made.unet.parameters())
    assert isinstance(made.unet.conv_in._hf_hook, AlignDevicesHook)
    assert_same(images(made), expected)
    made.enable_model_cpu_offload(device="cpu")
    assert not any(parameter.is_meta for parameter in made.unet.parameters())
    assert_same(images(made), expected)
    made.remove_all_hooks()
    assert_same(images(made), expected)


def test_the_offloading_of_diffusers_itself_does_not_mix_with_ours(tmp_path: Path) -> None:
    made = pipeline()
    made.enable_sequential_cpu_offload(device="cpu")
    with pytest.raises(ValueError, match="from Accelerate"):
        made.unet.enable_group_offload(onload_device=torch.device("cpu"), offload_type="leaf_level")
    for model, folder in ((unet(), None), (unet(), str(tmp_path))):
        model.enable_group_offload(
            onload_device=torch.device("cpu"), offload_type="leaf_level", offload_to_disk_path=folder
        )
        assert_same(painted(model), painted(unet()))


def test_weights_in_a_small_dtype() -> None:
    model = unet()
    model.enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    assert torch.float8_e4m3fn in {parameter.dtype for parameter in model.parameters()}
    torch.testing.assert_close(painted(model), painted(unet()), atol=0.2, rtol=0.2)
