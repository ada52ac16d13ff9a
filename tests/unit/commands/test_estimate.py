"""`accelerate estimate-memory`, and the counting behind it."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from torch import nn

from accelerate.available import has_package
from accelerate.commands import estimate
from accelerate.estimate import models
from accelerate.estimate.usage import Workload, measure, usage
from accelerate.estimate.zero import zero_usage
from accelerate.utils import convert_bytes

needs_transformers = pytest.mark.skipif(not has_package("transformers"), reason="needs transformers")


def arguments(*words: str) -> object:
    return estimate.estimate_command_parser().parse_args([*words])


def test_training_in_each_format() -> None:
    assert estimate.estimate_training_usage(1000, "float32") == {
        "model": 1000,
        "optimizer": 2000,
        "gradients": 1000,
        "step": 4000,
    }
    half = {"model": 1000, "optimizer": 2000, "gradients": 1500, "step": 2000}
    assert estimate.estimate_training_usage(1000, "float16") == half
    assert estimate.estimate_training_usage(1000, "bfloat16") == half
    assert set(estimate.estimate_training_usage(1000, "int8").values()) == {-1}


def test_a_row_per_format(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Embedding(100, 8, device="meta"), nn.Linear(8, 8, device="meta"))
    monkeypatch.setattr(estimate, "create_empty_model", lambda *args: model)
    rows = estimate.gather_data(arguments("some/model", "--dtypes", "float32", "bfloat16", "int4"))  # type: ignore[arg-type]
    assert [row[:3] for row in rows] == [["float32", 3200, 3488], ["bfloat16", 1600, 1744], ["int4", 400, 436]]


@pytest.mark.parametrize("flag", ["num_processes", "batch_size", "sequence_length"])
def test_numbers_that_cannot_be(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments("some/model", f"--{flag}", "0")
    assert f"--{flag}: should be at least 1, not 0;" in capsys.readouterr().err


def test_a_table() -> None:
    table = estimate.create_ascii_table(["a", "bc"], [["1", "2"], ["333", "4"]], "A long title")
    lines = table.splitlines()
    assert len(lines) == 8 and len({len(line) for line in lines}) == 1
    assert "A long title" in lines[1] and "333" in lines[6]


def test_what_each_rank_keeps() -> None:
    task = Workload(parameters=1000, trained=800, largest_layer=100, activations=50, weight_copies=7, compute_bytes=2)
    ranks = usage(task, 4)
    ddp, fsdp, offloaded = ranks["DDP"], ranks["FSDP"], ranks["FSDP with CPU offload"]
    assert (ddp.parameters, ddp.gradients, ddp.optimizer, ddp.at_work) == (4000, 2 * 3200, 6400, 7)
    assert (fsdp.parameters, fsdp.gradients, fsdp.optimizer, fsdp.at_work) == (1000, 800, 1600, 600)
    assert fsdp.device == 1000 + 800 + 1600 + 600 + 50
    assert offloaded.device == 650 and offloaded.host == 1000 + 800 + 1600
    assert usage(task, 1)["one process"].gradients == 3200


def test_what_each_stage_of_zero_keeps() -> None:
    task = Workload(parameters=1000, trained=800, largest_layer=100, activations=50, compute_bytes=2)
    stages = zero_usage(task, 4, bucket=10)
    parts = {name: (used.parameters, used.gradients, used.optimizer) for name, used in stages.items()}
    assert parts["ZeRO 0"] == (2000, 1600 + 3200, 3200 + 6400)
    assert parts["ZeRO 1"] == (2000, 1600 + 800, 800 + 1600)
    assert parts["ZeRO 2"] == (2000, 400 + 800, 800 + 1600)
    assert parts["ZeRO 3"] == (500, 400 + 800, 800 + 1600)
    assert [used.at_work for used in stages.values()] == [0, *[20] * 4, *[420] * 3]
    host = {name: used.host for name, used in stages.items() if "CPU" in name}
    assert host == {
        "ZeRO 1, optimizer on the CPU": 3200,
        "ZeRO 2, optimizer on the CPU": 3200,
        "ZeRO 3, optimizer on the CPU": 3200,
        "ZeRO 3, all on the CPU": 3700,
    }
    assert stages["ZeRO 3, all on the CPU"].device == 420 + 50
    # In float32, stage 0 steps the weights themselves.
    assert zero_usage(dataclasses.replace(task, compute_bytes=4), 4)["ZeRO 0"].optimizer == 6400


def rows_of(document: str, start: str) -> list[list[str]]:
    """The cells of a table whose rows begin with something."""
    lines = Path(__file__).parents[3].joinpath("docs", document).read_text().splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if re.match(rf"\| {start}", line)]


def test_the_documents_show_what_is_printed() -> None:
    parameters, processes = 8_000_000, 8
    stages = zero_usage(Workload(parameters, parameters, 0, 0, compute_bytes=2), processes, bucket=0)
    formulas = rows_of("deepspeed.md", r"[0-3]\b")
    assert len(formulas) == 4
    for stage, *cells in formulas:
        used = stages[f"ZeRO {stage[0]}"]
        found = [eval(cell.strip("`"), {"P": parameters, "N": processes}) for cell in cells]
        assert found == [used.parameters, used.gradients, used.optimizer, used.device], stage
    seven = Workload(7_000_000_000, 7_000_000_000, largest_layer=200_000_000, activations=0, compute_bytes=2)
    shown = {name: cells for name, *cells in rows_of("deepspeed-launch.md", "ZeRO")}
    for name, used in zero_usage(seven, 8).items():
        sizes = (used.parameters, used.gradients, used.optimizer, used.at_work, used.device, used.host)
        assert shown.pop(name) == [convert_bytes(size) if size else "-" for size in sizes], name
    assert not shown


class Block(nn.Module):
    """Everything a transformer does, small."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.norm = nn.LayerNorm(32)
        self.qkv = nn.Linear(32, 96)
        self.out = nn.Linear(32, 50, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return nn.functional.cross_entropy(self.out(nn.functional.gelu(x)).flatten(0, 1), tokens.flatten())


def really_saved(model: nn.Module, tokens: torch.Tensor, mixed_precision: str) -> int:
    """The same count over a pass that computes."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (place := tensor.untyped_storage().data_ptr()) not in own:
            saved[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed_precision == "bf16"):
            model(tokens)
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_activations_are_those_of_a_real_pass(mixed_precision: str) -> None:
    with torch.device("meta"):
        empty = Block()
    activations, copies = measure(empty, lambda model: model(torch.zeros(4, 24, dtype=torch.long)), mixed_precision)
    real = really_saved(Block(), torch.zeros(4, 24, dtype=torch.long), mixed_precision)
    # torch's small helper tensors, such as seeds, may or may not be counted
    assert abs(activations + copies - real) <= 64
    assert (copies > 0) == (mixed_precision == "bf16")


@needs_transformers
def test_a_local_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=64, n_head=4, vocab_size=1000, n_positions=128)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path)
    words = [str(tmp_path), "--num_processes", "4", "--batch_size", "3", "--dtypes", "float32", "bfloat16"]
    estimate.estimate_command(arguments(*words))  # type: ignore[arg-type]
    text = capsys.readouterr().out
    weights = 4 * sum(p.numel() for p in transformers.GPT2Model(config).parameters())
    assert f"{weights / 2**10:.2f} KB"[:4] in text
    assert "GPT2LMHeadModel, 3 x 128 tokens each" in text and "on 4 ranks" in text
    ways = [line.split("│")[1].strip() for line in text.splitlines() if line.count("│") == 10]
    assert ways == [
        *("Per rank", "DDP", "FSDP", "FSDP with CPU offload"),
        *("Per rank", "ZeRO 0", "ZeRO 1", "ZeRO 1, optimizer on the CPU", "ZeRO 2", "ZeRO 2, optimizer on the CPU"),
        *("ZeRO 3", "ZeRO 3, optimizer on the CPU", "ZeRO 3, all on the CPU"),
    ]
    assert all("yes" in line for line in text.splitlines() if "│" in line and ("DDP" in line or "FSDP" in line))
    with pytest.raises(ValueError, match="at most 128 tokens"):
        estimate.estimate_command(arguments(str(tmp_path / "config.json"), "--sequence_length", "500"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (False, "There is no model some/model"),
        ("gated", "is gated: ask for access"),
        (type("Info", (), {"library_name": None})(), "pass --library_name"),
        (type("Info", (), {"library_name": "keras"})(), "is a model of 'keras'"),
    ],
)
def test_models_that_cannot_be_built(answer: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "verify_on_hub", lambda *args: answer)
    with pytest.raises(ValueError, match=words):
        estimate.create_empty_model("some/model", None)


def test_without_the_hub_and_without_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object) -> None:
        raise OSError("no network")

    monkeypatch.setattr(models, "verify_on_hub", unreachable)
    with pytest.raises(ValueError, match="name a local folder"):
        estimate.create_empty_model("some/model", None)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        estimate.create_empty_model(str(tmp_path), None)
    for missing in ("./none", "none.json"):
        with pytest.raises(ValueError, match=f"There is no folder or file {missing} here"):
            estimate.create_empty_model(missing, None)
    (tmp_path / "config.json").write_text("[")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        estimate.create_empty_model(str(tmp_path), None)


def test_names_of_timm() -> None:
    assert estimate.add_timm_hub_prefix("timm/resnet50") == "hf-hub:timm/resnet50"
    assert estimate.add_timm_hub_prefix("resnet50") == "resnet50"
    assert estimate.check_has_model(RuntimeError("Unknown model (x)")) == "timm"
    assert estimate.check_has_model(OSError("x does not appear to have a file named config.json")) == "transformers"
    assert estimate.check_has_model(OSError("other")) == "unknown"
