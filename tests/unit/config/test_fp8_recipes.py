"""The settings of fp8, and what can be known about models without its libraries."""

from __future__ import annotations

import pytest
from torch import nn

from accelerate import Accelerator, available
from accelerate.utils import (
    AORecipeKwargs,
    FP8BackendType,
    FP8RecipeKwargs,
    MSAMPRecipeKwargs,
    TERecipeKwargs,
    ao,
    transformer_engine,
)


@pytest.fixture
def with_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "is_transformer_engine_available", lambda: True)


@pytest.mark.usefixtures("with_transformer_engine")
def test_transformer_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = TERecipeKwargs()
    assert (recipe.fp8_format, recipe.margin, recipe.interval, recipe.amax_history_len) == ("HYBRID", 0, 1, 1024)
    assert (recipe.amax_compute_algo, recipe.override_linear_precision) == ("most_recent", (False, False, False))
    monkeypatch.setenv("ACCELERATE_FP8_FORMAT", "e4m3")
    monkeypatch.setenv("ACCELERATE_FP8_MARGIN", "3")
    monkeypatch.setenv("ACCELERATE_FP8_OVERRIDE_WGRAD", "true")
    recipe = TERecipeKwargs(amax_compute_algo="MAX")  # type: ignore[arg-type]
    assert (recipe.fp8_format, recipe.margin, recipe.amax_compute_algo) == ("E4M3", 3, "max")
    assert recipe.override_linear_precision == (False, False, True)
    assert TERecipeKwargs(margin=4).to_kwargs() == {"margin": 4}
    with pytest.raises(ValueError, match="fp8_format"):
        TERecipeKwargs(fp8_format="E9M9")  # type: ignore[arg-type]


@pytest.mark.usefixtures("with_transformer_engine")
def test_the_older_form() -> None:
    with pytest.warns(FutureWarning, match="older form"):
        recipe = FP8RecipeKwargs(backend="te", margin=2)  # type: ignore[arg-type]
    assert isinstance(recipe, TERecipeKwargs)
    assert (recipe.backend, recipe.margin, recipe.fp8_format) == ("TE", 2, "HYBRID")
    with pytest.warns(FutureWarning):
        recipe = FP8RecipeKwargs(backend="MSAMP")
    assert (recipe.backend, recipe.opt_level, recipe.margin) == ("MSAMP", "O2", None)
    with pytest.warns(FutureWarning), pytest.raises(ValueError, match="backend"):
        FP8RecipeKwargs(backend="other")  # type: ignore[arg-type]


def test_ms_amp(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MSAMPRecipeKwargs().opt_level == "O2"
    monkeypatch.setenv("ACCELERATE_FP8_OPT_LEVEL", "O3")
    with pytest.raises(ValueError, match="O3"):
        MSAMPRecipeKwargs()


@pytest.mark.skipif(available.is_torchao_available(), reason="is about an environment without torchao")
def test_without_the_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(available, "is_transformer_engine_available", lambda: False)
    for make in (AORecipeKwargs, TERecipeKwargs):
        with pytest.raises(ImportError, match=make.__name__):
            make()
    with pytest.raises(ImportError, match="torchao"):
        ao.has_ao_layers(nn.Linear(1, 1))
    with pytest.raises(ImportError, match="TransformerEngine"):
        transformer_engine.convert_model(nn.Linear(1, 1))


def test_a_recipe_needs_fp8() -> None:
    with pytest.raises(ValueError, match="MSAMPRecipeKwargs is for mixed_precision='fp8'"):
        Accelerator(kwargs_handlers=[MSAMPRecipeKwargs()])
    accelerator = Accelerator(cpu=True)
    assert (accelerator.fp8_backend, accelerator.fp8_enabled) == (FP8BackendType.NO, False)


def test_which_layers_suit_fp8() -> None:
    model = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 32), nn.ReLU()), nn.Linear(32, 15))
    assert ao.find_first_last_linear_layers(model) == ("0", "2")
    assert ao.find_first_last_linear_layers(nn.ReLU()) == (None, None)
    assert ao.filter_linear_layers(model[1][0], "1.0", ["0", "2"])
    assert not ao.filter_linear_layers(model[0], "0", ["0", "2"])
    assert not ao.filter_linear_layers(model[2], "2", [])
    assert ao.filter_first_and_last_linear_layers(model, "1.0")
    assert not ao.filter_first_and_last_linear_layers(model, "0")
