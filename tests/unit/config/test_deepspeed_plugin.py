"""The settings of DeepSpeed, without it."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

import accelerate.state.engines.deepspeed as engine
from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.state import PartialState
from accelerate.utils import DistributedType, DummyOptim, DummyScheduler
from accelerate.utils.deepspeed import HfDeepSpeedConfig, get_active_deepspeed_plugin


def test_defaults() -> None:
    plugin = DeepSpeedPlugin()
    assert (plugin.zero_stage, plugin.gradient_accumulation_steps, plugin.gradient_clipping) == (2, "auto", "auto")
    assert plugin.zero3_init_flag is False
    assert plugin.deepspeed_config["zero_optimization"]["offload_param"] == {"device": "none", "nvme_path": None}
    assert plugin.deepspeed_config["steps_per_print"] == float("inf")


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/fast",
    }.items():
        monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin(gradient_accumulation_steps=4)
    assert (plugin.zero_stage, plugin.gradient_clipping, plugin.zero3_init_flag) == (3, 0.5, True)
    assert plugin.hf_ds_config.is_zero3()
    assert plugin.hf_ds_config.is_offload()
    assert plugin.get_value("zero_optimization.offload_param.nvme_path") == "/fast"
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "three")
    with pytest.raises(ValueError, match="ACCELERATE_DEEPSPEED_ZERO_STAGE"):
        DeepSpeedPlugin()


def test_a_file_wins_but_for_what_it_leaves_open(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": "auto"}
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    for source in (str(path), config, base64.urlsafe_b64encode(path.read_bytes()).decode()):
        with pytest.warns(UserWarning, match=r"zero_stage=2 \(zero_optimization.stage is 3 there\): write 'auto'"):
            plugin = DeepSpeedPlugin(hf_ds_config=source, zero_stage=2, gradient_clipping=2.0)
        assert (plugin.zero_stage, plugin.gradient_clipping, plugin.offload_optimizer_device) == (3, 2.0, "cpu")
        assert plugin.gradient_accumulation_steps == 1
    assert "gradient_accumulation_steps" not in config, "a dict of the script is not written to"


def test_arguments_beside_a_file_that_do_not_count_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = {"zero_optimization": {"stage": 2}, "gradient_clipping": 1}
    with pytest.warns(UserWarning) as caught:
        DeepSpeedPlugin(
            hf_ds_config=config,
            zero_stage=2,
            gradient_accumulation_steps=4,
            gradient_clipping=1.0,
            offload_optimizer_device="cpu",
            offload_param_device="none",
            zero3_save_16bit_model=False,
        )
    assert [str(each.message) for each in caught] == [
        "The DeepSpeed config takes precedence, so these arguments of the DeepSpeedPlugin have no effect: "
        "gradient_accumulation_steps=4 "
        "(gradient_accumulation_steps is 1 there), offload_optimizer_device='cpu' "
        "(zero_optimization.offload_optimizer.device is not there): write 'auto' into the config, or leave them out."
    ]
    with pytest.warns(UserWarning, match=r"gradient_clipping=0.0 \(gradient_clipping is not there\)"):
        DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}}, gradient_clipping=0.0)
    # What a launch says is compared by the launcher, or stands in for what the script does not say.
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    assert DeepSpeedPlugin(hf_ds_config=config).zero_stage == 2


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"zero_stage": 9}, "zero_stage is 9 for DeepSpeed: choose one of 0, 1, 2, 3."),
        (
            {"offload_param_device": "disk"},
            "offload_param_device is 'disk' for DeepSpeed: choose one of none, ",
        ),
        ({"hf_ds_config": {"zero_optimization": {"stage": "2"}}}, "zero_stage is '2' for DeepSpeed: choose one of"),
    ],
)
def test_a_stage_or_a_place_that_does_not_exist(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)):
        DeepSpeedPlugin(**settings)


@pytest.mark.parametrize("source", ["nosuchfile", 3, "[1]"])
def test_a_config_that_cannot_be_read(source: Any) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        DeepSpeedPlugin(hf_ds_config=source)


def test_a_config_file_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"^There is no DeepSpeed config file {tmp_path}/ds\.json: correct the path"):
        DeepSpeedPlugin(hf_ds_config="ds.json")


def test_settings_told_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,deepspeed_hostfile")
    with pytest.raises(ValueError, match="says zero_stage"):
        DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}})


def test_auto_is_filled_in_and_differences_are_one_error() -> None:
    config = {"zero_optimization": {"stage": 2}, "optimizer": {"params": {"lr": "auto", "eps": 1}}}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    assert plugin.is_auto("optimizer.params.lr")
    with pytest.raises(ValueError, match=r"'optimizer\.params\.lr' as 'auto'"):
        plugin.deepspeed_config_process()
    values: dict[str, Any] = {"optimizer.params.lr": 5, "optimizer.params.eps": 2}
    with pytest.raises(ValueError, match=r"optimizer\.params\.eps is 1 in the config, but 2 here"):
        plugin.deepspeed_config_process(**values)
    assert plugin.get_value("optimizer.params.lr") == 5
    plugin.deepspeed_config_process(must_match=False, **values)


@pytest.mark.parametrize(
    ("mode", "fp16", "bf16"),
    [
        ("no", {"enabled": False}, {"enabled": False}),
        ("fp16", {"enabled": True, "auto_cast": True}, {"enabled": False}),
        ("bf16", {"enabled": False}, {"enabled": True}),
    ],
)
def test_precision(mode: str, fp16: dict[str, bool], bf16: dict[str, bool]) -> None:
    plugin = DeepSpeedPlugin()
    plugin.set_mixed_precision(mode)
    assert (plugin.deepspeed_config["fp16"], plugin.deepspeed_config["bf16"]) == (fp16, bf16)
    other = DeepSpeedPlugin(hf_ds_config={"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}})
    if mode == "fp16":
        with pytest.raises(ValueError, match="bf16 enabled"):
            other.set_mixed_precision(mode)
    else:
        other.set_mixed_precision(mode)
        assert other.deepspeed_config["bf16"]["enabled"]


def test_questions_about_a_config() -> None:
    config = HfDeepSpeedConfig({"a": {"b": {"yes": 1, "no": 0}}})
    assert config.find_config_node("a.b.yes") == ({"yes": 1, "no": 0}, "yes")
    assert config.find_config_node("a.x.y") == (None, "y")
    assert (config.is_true("a.b.yes"), config.is_false("a.b.no"), config.is_false("a.b.other")) == (True, True, False)
    config.del_config_sub_tree("a.b.yes")
    assert config.get_value("a.b.yes", "gone") == "gone"
    with pytest.raises(ValueError, match=r"no 'q\.r'"):
        config.del_config_sub_tree("q.r", must_exist=True)


def test_init_in_pieces_needs_stage_3() -> None:
    with pytest.warns(UserWarning, match="stage 3"):
        assert not DeepSpeedPlugin(zero_stage=2, zero3_init_flag=True).is_zero3_init_enabled()


def test_a_plugin_is_selected_by_the_state() -> None:
    plugin = DeepSpeedPlugin()
    with pytest.raises(ValueError, match="by name"):
        plugin.select()
    with pytest.raises(NotImplementedError):
        plugin.selected = True
    state = Accelerator(cpu=True).state
    assert state.deepspeed_plugin is None
    with pytest.raises(ValueError, match="not the engine"):
        state.get_deepspeed_plugin("one")
    with pytest.raises(ValueError, match="no active"):
        get_active_deepspeed_plugin(state)
    state.distributed_type, state.deepspeed_plugins = DistributedType.DEEPSPEED, {"one": plugin}
    plugin._selected = True
    with pytest.raises(KeyError, match="No DeepSpeed plugin is named 'two': there are one"):
        state.select_deepspeed_plugin("two")
    assert state.deepspeed_plugin is state.get_deepspeed_plugin("one") is plugin


def test_what_is_missing_or_wrong_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="deepspeed_plugin is an object: pass a DeepSpeedPlugin"):
        Accelerator(deepspeed_plugin=object())
    with pytest.raises(TypeError, match=r"deepspeed_plugins\['one'\] is an int: pass a DeepSpeedPlugin"):
        Accelerator(deepspeed_plugins={"one": 1})
    with pytest.raises(ValueError, match="either `deepspeed_plugin` or `deepspeed_plugins`"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin(), deepspeed_plugins={"one": DeepSpeedPlugin()})
    monkeypatch.setattr(engine, "is_deepspeed_available", lambda: False)
    with pytest.raises(ImportError, match=r"^DeepSpeed was requested but is not installed: pip install deepspeed$"):
        Accelerator(deepspeed_plugin=DeepSpeedPlugin())
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(ImportError, match="not installed"):
        Accelerator()
    monkeypatch.setattr(engine, "is_deepspeed_available", lambda: True)
    monkeypatch.setattr(engine, "compare_versions", lambda *args: True)
    with pytest.raises(ImportError, match=r"older than 0\.16\.4"):
        Accelerator()


def test_fp8_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = [
        {"enable_msamp": True},
        {"hf_ds_config": {"zero_optimization": {"stage": 2}, "msamp": {"enabled": True}}},
    ]
    for settings in asked:
        with pytest.raises(NotImplementedError, match=r"^MS-AMP with DeepSpeed \(`enable_msamp`\) is not part of this"):
            Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(**settings))
    with pytest.raises(ValueError, match="msamp_opt_level is 'O7': choose one of O1, O2"):
        DeepSpeedPlugin(msamp_opt_level="O7")
    with pytest.raises(NotImplementedError, match="MS-AMP does not work with stage 3 of ZeRO"):
        DeepSpeedPlugin(enable_msamp=True, zero_stage=3)
    monkeypatch.setattr(engine, "is_deepspeed_available", lambda: True)
    monkeypatch.setattr(engine, "compare_versions", lambda *args: False)
    monkeypatch.setattr("accelerate.state.accelerator.is_fp8_available", lambda: True)
    plugin = DeepSpeedPlugin()
    with pytest.raises(NotImplementedError, match="mixed_precision='fp8' with DeepSpeed is not part of this version"):
        Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="fp8")
    assert PartialState._shared_state == {}
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "MSAMP")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    with pytest.raises(NotImplementedError, match="MS-AMP with DeepSpeed"):
        Accelerator(cpu=True)


def test_stand_ins_keep_what_they_are_given() -> None:
    optimizer = DummyOptim([], lr=0.5, betas=(0.1, 0.2))
    scheduler = DummyScheduler(optimizer, 10, 2)
    assert (optimizer.lr, optimizer.weight_decay, optimizer.kwargs) == (0.5, 0, {"betas": (0.1, 0.2)})
    assert (scheduler.total_num_steps, scheduler.warmup_num_steps, scheduler.optimizer) == (10, 2, optimizer)
