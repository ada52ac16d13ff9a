"""No setting of a `MegatronLMPlugin` is silent: each is read, passed to megatron-core, or refused in one sentence."""

from __future__ import annotations

import ast
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.config.megatron import ARGUMENTS
from accelerate.utils import MegatronLMPlugin
from tests.harness import run_world
from tests.megatron import tiny

PACKAGE = Path(__file__).parents[2] / "src" / "accelerate"
PLUGIN = PACKAGE / "config" / "megatron.py"
READERS = [
    PLUGIN,
    PACKAGE / "strategies" / "megatron.py",
    PACKAGE / "engines" / "megatron_lm.py",
    *(PACKAGE / "engines" / "megatron").rglob("*.py"),
]
# Values other than those a setting has without being given, for what is passed to megatron-core as it is.
OTHERS: dict[type, Any] = {int: 2, float: 0.5, str: "block"}


def read_by_the_engine() -> set[str]:
    """Names that are looked up: `plugin.name`, `args.name`, `settings["name"]`, `arguments.get("name")`."""
    found = set()
    for path in READERS:
        holders = {"plugin", "megatron_lm_plugin", "args", "plugin_of", *(["self"] if path == PLUGIN else [])}
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _name(node.value) in holders:
                found.add(node.attr)
            keys = [node.slice] if isinstance(node, ast.Subscript) else node.args if isinstance(node, ast.Call) else []
            found |= {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}
    return found


def _name(node: ast.expr) -> str:
    """The last word of `self.plugin`, `args` or `plugin_of(...)`."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def configs(**settings: Any) -> tuple[Any, ...]:
    """What megatron-core is given for a plugin."""
    from accelerate.engines.megatron.arguments import arguments, optimizer_config, reduction_config
    from accelerate.engines.megatron.models import transformer_config

    plugin = MegatronLMPlugin(**settings)
    args = arguments(plugin)
    model = transformer_config(plugin, tiny.DECODERS["llama, shared keys"][1], torch.float32)
    described = {name: value for name, value in vars(model).items() if not callable(value)}
    return described, vars(optimizer_config(args, None)), vars(reduction_config(args))


def passed_on(names: list[str]) -> dict[str, bool]:
    """Whether another value of a setting makes other configs."""
    usual, plugin = configs(), MegatronLMPlugin()
    changed = {}
    for name in names:
        value = getattr(plugin, name)
        changed[name] = configs(**{name: not value if isinstance(value, bool) else OTHERS[type(value)]}) != usual
    return changed


def test_every_setting_is_read_or_passed_on() -> None:
    read = read_by_the_engine()
    fields = [field.name for field in dataclasses.fields(MegatronLMPlugin)]
    assert len(fields) > 60 and "no_such_name" not in read
    left = [name for name in fields if name not in read and ARGUMENTS.get(name, name) not in read]
    # Of those that are passed on alone: megatron-core knows them, and nothing here takes them away.
    assert set(left) > {"attention_dropout", "recompute_num_layers", "calculate_per_token_loss"}
    [changed] = run_world(passed_on, 1, left)
    assert [name for name, yes in changed.items() if not yes] == []


def names_of_attention() -> dict[str, str]:
    from megatron.core.transformer.enums import AttnBackend

    from accelerate.engines.megatron.models import attention_backend

    def chosen(asked: Any, engine: bool) -> str:
        found = attention_backend(asked, transformer_engine=engine)
        assert isinstance(found, AttnBackend)
        return found.name

    assert [chosen(asked, True) for asked in (True, False, "flash", AttnBackend.fused)] == [
        *("auto", "unfused", "flash", "fused")
    ]
    assert [chosen(asked, False) for asked in (True, False, "local")] == ["auto", "auto", "local"]
    said = {}
    for asked, engine in (("flash", False), ("fast", True)):
        with pytest.raises((ImportError, ValueError)) as caught:
            chosen(asked, engine)
        said[asked] = str(caught.value)
    return said


def test_kernels_of_attention() -> None:
    [said] = run_world(names_of_attention, 1)
    assert "'flash' needs Transformer Engine: `pip install" in said["flash"]
    assert "'fast' is not one of megatron-core's: flash, fused, unfused, local, auto." in said["fast"]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"use_custom_fsdp": True}, "use FSDP"),
    ({"context_parallel_size": 2}, "cp_size"),
    ({"pipeline_model_parallel_split_rank": 1}, "which megatron-core no longer has"),
    ({"sequence_parallelism": True}, "set tp_degree to 2"),
    ({"tp_degree": -1, "pp_degree": -2}, "tp_degree=-1 of the MegatronLMPlugin must be a whole number of at least 1"),
    ({"num_micro_batches": 0}, "num_micro_batches=0"),
    ({"tp_degree": "2"}, "tp_degree='2' of the MegatronLMPlugin must be a whole number of at least 1"),
    ({"recompute_num_layers": 0}, "recompute_num_layers=0"),  # of which megatron-core would make chunks without end
    ({"eval_interval": 0}, "eval_interval=0"),
    ({"recompute_granularity": "half"}, "recompute_granularity='half' .*: choose one of full, selective"),
    ({"recompute_method": "blocks"}, "recompute_method='blocks' .*: choose one of uniform, block"),
    ({"lr_decay_style": "cosin"}, "lr_decay_style='cosin' .*: choose one of constant, linear, cosine"),
    ({"weight_decay_incr_style": "step"}, "weight_decay_incr_style='step' .*: choose one of constant, linear, cosine"),
    ({"gradient_clipping": -1.0}, r"gradient_clipping=-1\.0 .* use 0\.0 for none"),
    ({"consumed_samples": [1, 2, 3, 4]}, "there are 4 numbers"),
    ({"custom_train_step_kwargs": {"weight": 1.0}}, "arguments of a `custom_train_step_class`"),
    ({"overlap_cpu_optimizer_d2h_h2d": True}, "set optimizer_cpu_offload=True as well"),
    ({"use_precision_aware_optimizer": True}, "needs use_distributed_optimizer=True, and Transformer Engine"),
    ({"use_precision_aware_optimizer": True, "use_distributed_optimizer": True}, "Transformer Engine"),
    (
        {"other_megatron_args": {"hiden_dropout": 0.1, "zzz": 1}},
        r"`hiden_dropout` \(did you mean `hidden_dropout`\?\), `zzz`;",
    ),
    ({"other_megatron_args": {"tp_degree": 2}}, r"`tp_degree` \(a field of the MegatronLMPlugin itself\)"),
    ({"other_megatron_args": {"tensor_model_parallel_size": 2}}, "`tensor_model_parallel_size`: set `tp_degree`"),
    (
        {"other_megatron_args": {"lr_decay_style": "cosine"}},
        "cannot be used to set `lr_decay_style`: set `lr_decay_style` of",
    ),
]


class OwnStep:
    """Takes whatever its script gives it."""


def refusals() -> list[str]:
    from accelerate.engines.megatron.parallel import check

    for fine in (
        {"clip_grad": 0.5, "recompute_granularity": None, "initial_loss_scale": 1.0, "overlap_grad_reduce": True},
        {"padded_vocab_size": 128, "tensor_model_parallel_size": 1, "eos_token_id": 3, "lr_warmup_init": 0.1},
    ):
        check(MegatronLMPlugin(other_megatron_args=fine))
    check(MegatronLMPlugin(other_megatron_args={"mine": 1}, custom_train_step_class=OwnStep))
    said = []
    for settings, _ in REFUSED:
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            check(MegatronLMPlugin(**settings))
        said.append(str(caught.value))
    return said


def test_what_cannot_be_is_refused_before_anything_is_made() -> None:
    [said] = run_world(refusals, 1)
    for (settings, sentence), found in zip(REFUSED, said, strict=True):
        assert re.search(sentence, found) and "\n" not in found, (settings, found)
