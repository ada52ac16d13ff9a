import importlib
import os
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch

from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.test_utils import testing, training
from accelerate.test_utils.examples import clean_lines, compare_against_test, get_function_contents_by_name
from accelerate.test_utils.testing import (
    AccelerateTestCase,
    MockingTestCase,
    SubprocessCallException,
    TempDirTestCase,
    are_the_same_tensors,
    assert_exception,
    capture_call_output,
    execute_subprocess_async,
    get_backend,
    get_launch_command,
    path_in_accelerate_package,
    require_cpu,
    require_non_cpu,
    require_torch_min_version,
    run_command,
    skip,
    slow,
)
from tests.harness import run_world


def run(case: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    return result


def test_every_requirement_decorates() -> None:
    names = [name for name in testing.__all__ if name.startswith("require_")]
    assert len(names) > 50
    for name in names:
        kwargs = {"version": "1.0"} if name == "require_torch_min_version" else {}
        decorated = getattr(testing, name)(**kwargs) if kwargs else getattr(testing, name)
        assert callable(decorated(lambda self: None)), name


def test_requirements_skip_what_cannot_run() -> None:
    ran: list[str] = []

    class Case(unittest.TestCase):
        @require_cpu
        def test_cpu(self) -> None:
            ran.append("cpu")

        @require_non_cpu
        def test_other(self) -> None:
            ran.append("other")

        @require_torch_min_version(version="99.0")
        def test_future(self) -> None:
            ran.append("future")

        @slow
        def test_slow(self) -> None:
            ran.append("slow")

        @skip
        def test_never(self) -> None:
            ran.append("never")

    skipped = {test.id().rsplit(".", 1)[1]: reason for test, reason in run(Case).skipped}
    assert ran == ["cpu" if get_backend()[0] == "cpu" else "other"]
    assert skipped["test_future"] == "needs torch 99.0"
    assert {"test_slow", "test_never"} < set(skipped)


def test_temporary_folder() -> None:
    seen: list[Path] = []

    class Case(TempDirTestCase):
        def test_a(self) -> None:
            assert not os.listdir(self.tmpdir)
            (self.tmpdir / "folder").mkdir()
            (self.tmpdir / "file").touch()
            seen.append(self.tmpdir)

        test_b = test_a

    assert run(Case).wasSuccessful()
    assert len(seen) == 2
    assert seen[0] == seen[1]
    assert not seen[0].exists()


def test_cases_clean_up() -> None:
    class Case(AccelerateTestCase, MockingTestCase):
        def test_state(self) -> None:
            PartialState(cpu=True)
            self.add_mocks(mock.patch.dict(os.environ, {"MOCKED": "1"}))
            assert os.environ["MOCKED"] == "1"

    assert run(Case).wasSuccessful()
    assert not PartialState._shared_state
    assert "MOCKED" not in os.environ


def test_commands() -> None:
    assert run_command([sys.executable, "-c", "print(5)"]) is None
    assert run_command([sys.executable, "-c", "import sys; print(sys.argv[1])", 3], return_stdout=True) == "3\n"
    with pytest.raises(SubprocessCallException, match=r"code 3.*\n\nlast words"):
        run_command([sys.executable, "-c", "print('last words'); raise SystemExit(3)"])
    assert run_command(["/bin/sh", "-c", "echo $ONLY"], return_stdout=True, env={"ONLY": "this"}) == "this\n"


def test_commands_with_two_streams(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys; print(5); print(6, file=sys.stderr)"
    output = execute_subprocess_async([sys.executable, "-c", code])
    assert (output.returncode, output.stdout, output.stderr) == (0, ["5"], ["6"])
    assert "stdout: 5" in capfd.readouterr().out
    execute_subprocess_async([sys.executable, "-c", code], quiet=True, echo=False)
    assert capfd.readouterr().out == ""
    with pytest.raises(RuntimeError, match=r"code 3.*\nwhy"):
        execute_subprocess_async(["/bin/sh", "-c", "echo why >&2; exit 3"])


def test_commands_that_take_too_long() -> None:
    with pytest.raises(RuntimeError, match=r"more than 0.5 seconds"):
        # The child of the child holds the pipes open, too.
        execute_subprocess_async(["/bin/sh", "-c", "sleep 100 & wait"], timeout=0.5)


def test_launch_commands() -> None:
    assert get_launch_command(num_processes=2, use_cpu=True, same_network=False, machine_rank=None) == [
        "accelerate",
        "launch",
        "--num_processes=2",
        "--use_cpu",
        "--same_network=False",
    ]
    assert path_in_accelerate_package("test_utils", "testing.py").exists()


def test_workers_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    assert testing.get_torch_dist_unique_port() == 29500
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw3")
    assert testing.get_torch_dist_unique_port() == 29503


def test_expecting_exceptions() -> None:
    with assert_exception(ValueError, "ab"):
        raise ValueError("abc")
    for error in (ValueError("zz"), KeyError("ab")):
        with pytest.raises(AssertionError, match="expected"):
            with assert_exception(ValueError, "ab"):
                raise error
    with pytest.raises(AssertionError, match="nothing was raised"):
        with assert_exception(ValueError):
            pass


def test_captured_output() -> None:
    assert capture_call_output(print, "a", 3) == "a 3\n"


def compare(same: bool) -> bool:
    rank = PartialState().process_index
    return are_the_same_tensors(torch.tensor([1.0, 2.0]) + (0 if same else rank))


def test_comparing_tensors_of_all_ranks() -> None:
    assert run_world(compare, 2, True) == [True, True]
    assert run_world(compare, 2, False) == [False, False]


def test_regression_task(capsys: pytest.CaptureFixture[str]) -> None:
    dataset = training.RegressionDataset(length=8, seed=1)
    assert len(dataset) == 8
    assert abs(dataset[0]["y"] - (2 * dataset[0]["x"] + 3)) < 0.5
    model = training.RegressionModel(a=2, b=3)
    assert model(torch.tensor(1.0)).item() == 5
    model(torch.tensor(1.0))
    assert capsys.readouterr().out.count("torch.float32") == 3


def test_code_of_examples() -> None:
    lines = ["import os\n", "\n", "# c\n", "def main():\n", "    # c\n", "    pass\n", "\n", "x = 1\n"]
    assert get_function_contents_by_name(lines, "main") == lines[3:7]
    assert get_function_contents_by_name(lines, "training_function") == []
    assert clean_lines(lines) == ["import os\n", "def main():\n", "    pass\n", "x = 1\n"]
    with pytest.raises(ValueError, match="'helper'"):
        get_function_contents_by_name(lines, "helper")


PLAIN = """
def training_function(config, args):
    accelerator = Accelerator()
    train_dataloader, eval_dataloader = get_dataloaders(accelerator, batch_size)
    train()
def main():
    parser.add_argument("--cpu")
if __name__ == "__main__":
    main()
"""


def test_examples_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("examples").mkdir()
    Path("examples", "nlp_example.py").write_text(PLAIN)
    guarded = "    if os.environ.get('TESTING_MOCKED_DATALOADERS'):\n        config['num_epochs'] = 2\n    # why\n"
    feature = PLAIN.replace("    train()", f"{guarded}    new()\n    other()\n    train()")
    Path("feature.py").write_text(feature.replace('"--cpu")', '"--cpu")\n    parser.add_argument("--new")'))
    Path("complete.py").write_text(PLAIN.replace("    train()", "    extra()\n    new()\n    train()"))
    assert compare_against_test("complete.py", "feature.py", parser_only=False) == ["    other()\n"]
    assert compare_against_test("complete.py", "feature.py", True) == ['    parser.add_argument("--new")\n']
    Path("complete.py").write_text(Path("feature.py").read_text())
    assert compare_against_test("complete.py", "feature.py", False) == []
    # A line of the plain example for text that one for images does not have is not a feature.
    Path("feature.py").write_text(PLAIN.replace("    train()", "    main()\n    train()"))
    Path("complete.py").write_text(PLAIN)
    Path("images.py").write_text(PLAIN)
    assert compare_against_test("complete.py", "feature.py", False) == ["    main()\n"]
    assert compare_against_test("complete.py", "feature.py", False, "images.py") == []


def test_loaders_for_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    accelerator = Accelerator(cpu=True)
    train, evaluation = accelerator.prepare(*training.mocked_dataloaders(accelerator, 16))
    assert (len(train), len(evaluation)) == (8, 8)
    for batch in train:
        batch.to(accelerator.device)
        shape = batch["input_ids"].shape
        assert shape[0] == 2 and shape == batch["attention_mask"].shape == batch["token_type_ids"].shape
        assert batch["input_ids"].max() < 128
        assert (batch["input_ids"].ne(0) == batch["attention_mask"].bool()).all()
    assert {int(batch["labels"]) for batch in evaluation} == {0, 1}


def test_loaders_for_models_that_go_on_with_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "tests" / "test_samples" / "MRPC"
    folder.mkdir(parents=True)
    for name, rows in {"train.csv": 3, "dev.csv": 1}.items():
        lines = [f'equivalent,"one{" two" * row}",three\n' for row in range(rows)]
        (folder / name).write_text("label,sentence1,sentence2\n" + "".join(lines))
    accelerator = Accelerator(cpu=True)
    train, evaluation = training.mocked_dataloaders_for_autoregressive_models(accelerator)
    assert (len(train.dataset), len(train), len(evaluation)) == (3, 2, 1)
    batch = next(iter(train))
    words, labels = batch["input_ids"], batch["labels"]
    assert words.shape == labels.shape
    # Each label is the next word, and where there is none it does not count.
    assert labels[1].tolist() == [*words[1][1:].tolist(), -100]
    assert labels[0].tolist() == [*words[0][1:-1].tolist(), -100, -100]
    monkeypatch.setattr(accelerator.state, "_mixed_precision", "bf16")
    aligned, _ = training.mocked_dataloaders_for_autoregressive_models(accelerator)
    assert next(iter(aligned))["input_ids"].shape[1] % 8 == 0


# What clients' tests name in the scripts, besides `main`.
NAMES = {
    "test_script": "print_on process_execution_check rng_sync_check mock_training training_check test_trigger",
    "test_ops": "create_tensor test_gather test_gather_object test_broadcast test_reduce_max test_op_checker _mp_fn",
    "test_sync": "check_model_parameters step_model get_training_setup test_noop_sync test_dataloader_break _mp_fn",
    "test_cli": "",
    "test_notebook": "NUM_PROCESSES basic_function require_multi_process test_can_initialize test_monitoring",
    "test_ddp_comm_hook": "MockModel test_ddp_comm_hook",
    "test_merge_weights": "parser TinyModel setup mock_training check_weights test_merge_weights_command_pytorch",
    "test_distributed_data_loop": "NUM_ELEMENTS DummyDataset create_accelerator create_dataloader test_data_loader",
    "external_deps.test_metrics": "ListHandler get_basic_setup get_mrpc_setup generate_predictions test_mrpc _mp_fn",
    "external_deps.test_checkpointing": "EVAL_BATCH_SIZE get_dataloaders evaluation_loop training_function",
    "external_deps.test_performance": "MAX_GPU_BATCH_SIZE get_dataloaders training_function",
    "external_deps.test_peak_memory_usage": "b2mb TorchTracemalloc get_dataloaders training_function",
    "external_deps.test_pippy": "model_to_config get_model_and_data_for_text test_bert test_gpt2",
    "external_deps.test_ds_multiple_model": "NoiseModel get_dataloaders single_model_training multiple_model_training",
    "external_deps.test_ds_alst_ulysses_sp": "collate_fn",
    "external_deps.test_zero3_integration": "GPT2_TINY init_torch_dist_then_launch_deepspeed",
}


def test_names_of_the_scripts() -> None:
    for module, names in NAMES.items():
        script = importlib.import_module(f"accelerate.test_utils.scripts.{module}")
        missing = [name for name in ["main", *names.split()] if not hasattr(script, name)]
        assert not missing, module


def test_importing_needs_little() -> None:
    modules = [f"accelerate.test_utils.scripts.{module}" for module in NAMES]
    code = (
        "import sys\nsys.modules |= dict.fromkeys(['pytest', 'transformers', 'datasets', 'evaluate', 'deepspeed'])\n"
        f"import importlib\nfor name in ['accelerate.test_utils', *{modules}]: importlib.import_module(name)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
