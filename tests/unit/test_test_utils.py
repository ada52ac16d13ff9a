import os
import sys
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch

from accelerate.state import PartialState
from accelerate.test_utils import testing, training
from accelerate.test_utils.examples import clean_lines, get_function_contents_by_name
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
