"""The examples with transformers, peft, trl and diffusers do what they say, on one process and on two."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.examples.running import assert_learned, on_one_and_two


@pytest.mark.parametrize(
    ("name", "library", "left"),
    [
        ("language_model", "transformers", "runs/language_model/model.safetensors"),
        ("lora", "peft", "runs/lora/adapter_model.safetensors"),
        ("dpo", "trl", ""),
        ("diffusion", "diffusers", "runs/diffusion/cross_3.png"),
    ],
)
def test_learns(name: str, library: str, left: str, tmp_path: Path) -> None:
    pytest.importorskip(library, reason=f"needs {library}: make clients")
    for processes, lines in enumerate(on_one_and_two(f"{name}.py", tmp_path), start=1):
        assert_learned(lines[-1])
        assert Path(tmp_path, str(processes), left).exists()


def test_prompts_are_continued(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="needs transformers: make clients")
    for processes, lines in enumerate(on_one_and_two("generation.py", tmp_path), start=1):
        assert lines == [
            "seven eight nine ... ten eleven twelve thirteen",
            f"33 of 33 prompts were continued correctly, on {processes} process(es)",
        ]
