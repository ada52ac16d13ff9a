"""The examples that need torch alone do what they say, on one process and on two."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.examples.running import QUIET, as_script, assert_learned, on_one_and_two, printed
from tests.harness import world_outcomes


def numbers(lines: list[str]) -> list[float]:
    return [float(number) for line in lines for number in re.findall(r"\d+\.\d+", line)]


@pytest.mark.parametrize("name", ["early_stopping", "gan"])
def test_learns(name: str, tmp_path: Path) -> None:
    for lines in on_one_and_two(f"{name}.py", tmp_path):
        assert_learned(lines[-1])


def test_the_best_classifier_is_kept(tmp_path: Path) -> None:
    for processes, lines in enumerate(on_one_and_two("image_classification.py", tmp_path), start=1):
        _, best = assert_learned(lines[-1])
        assert best == max(numbers([line.split("accuracy")[1] for line in lines[:-1]])) > 0.9
        weights = load_file(tmp_path / str(processes) / "runs/image_classification/model.safetensors")
        assert weights["9.weight"].shape == (3, 128)


def test_negatives_of_all_processes_are_those_of_one_big_batch(tmp_path: Path) -> None:
    alone, together = on_one_and_two("contrastive.py", tmp_path)
    assert_learned(alone[-1])
    assert numbers(together) == pytest.approx(numbers(alone), abs=0.01)


def test_a_stream_is_read_once(tmp_path: Path) -> None:
    alone, together = on_one_and_two("streaming.py", tmp_path)
    assert_learned(alone[-1])
    assert "each process: [16000];" in alone[-1] and "each process: [16000, 0];" in together[-1]
    assert numbers(together) == pytest.approx(numbers(alone), abs=2e-3)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_preempted_run_ends_as_one_that_was_not(processes: int, tmp_path: Path) -> None:
    whole = printed("resume_after_preemption.py", processes, tmp_path)
    words = ("resume_after_preemption.py", "--preempt_at", "20")
    (tmp_path / "runs/preemption/checkpoints").mkdir(parents=True)  # all that is left of a kill during the first save
    for outcome in world_outcomes(as_script, processes, *words, env=QUIET, cwd=tmp_path, timeout=150):
        assert outcome.killed or (outcome.error, outcome.message) == ("SystemExit", "75"), outcome
    rest = printed("resume_after_preemption.py", processes, tmp_path)
    assert_learned(whole[-1])
    # The ranks agree on a step that none of them has passed.
    assert re.fullmatch(r"going on in epoch 1 at step 2\d", rest[0])
    assert rest[1:] == whole


def test_answers_come_in_the_order_of_the_questions(tmp_path: Path) -> None:
    alone, together = on_one_and_two("distributed_inference.py", tmp_path)
    assert alone == ["answers by each process: [301]; 301 of 301 are right"]
    assert together == ["answers by each process: [151, 150]; 301 of 301 are right"]
    one, two = ((tmp_path / count / "runs/inference/answers.jsonl").read_text() for count in ("1", "2"))
    assert one == two and json.loads(one.splitlines()[0]) == {"date": "2025-05-15", "day": "Thursday"}


def test_a_big_model_is_mostly_on_disk_and_answers_as_ever(tmp_path: Path) -> None:
    for lines in on_one_and_two("big_model_inference.py", tmp_path):
        found = re.fullmatch(r"(\d+) of (\d+) bytes in memory; 6 of 6 answers are those of the original", lines[-1])
        assert found is not None and 0 < int(found[1]) <= int(found[2]) / 3, lines
        assert "'blocks.0': 'cpu'" in lines[0] and "'blocks.7': 'disk'" in lines[0]


def test_split_and_sharded_layers_train_as_on_one_process(tmp_path: Path) -> None:
    alone, pair = on_one_and_two("fsdp2_tensor_parallel.py", tmp_path)
    four = printed("fsdp2_tensor_parallel.py", 4, tmp_path)
    assert_learned(alone[-1])
    held = [int(lines[0].split()[0]) for lines in (alone, pair, four)]
    assert held[0] > 1.9 * held[1] > 3.6 * held[2]
    for lines in (pair, four):
        assert numbers(lines[1:]) == pytest.approx(numbers(alone[1:]), abs=1e-3)


def test_a_profile_of_three_steps(tmp_path: Path) -> None:
    for processes, lines in enumerate(on_one_and_two("profiling.py", tmp_path), start=1):
        assert_learned(lines[-1])
        assert any("# of Calls" in line for line in lines)
        for rank in range(processes):
            trace = json.loads((tmp_path / str(processes) / f"runs/profiling/profile_{rank}.json").read_text())
            assert sum(event.get("name") == "backward" for event in trace["traceEvents"]) == 3


def test_every_digit_is_tested_once(tmp_path: Path) -> None:
    for lines in on_one_and_two("k_fold.py", tmp_path):
        assert_learned(lines[-1])
        right = [int(re.findall(r"(\d+) of 599 right", line)[0]) for line in lines[:-1]]
        assert lines[-1].startswith(f"{sum(right)} of 1797 right") and sum(right) > 1600
