"""The command line itself: its table, its help, its errors, and what it does not import."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from accelerate.commands.accelerate_cli import COMMANDS, get_parser
from accelerate.commands.launch import clean_option, launch_command_parser
from accelerate.commands.utils import one_sentence
from accelerate.errors import CommandFailed


def accelerate(
    *words: str, code: str = "from accelerate.commands.accelerate_cli import main; main()"
) -> tuple[int, str, str]:
    program = f"import sys; sys.argv = ['accelerate', *{list(words)!r}]\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def test_help_names_every_command() -> None:
    code, out, _ = accelerate("--help")
    assert code == 0
    assert all(name in out for name in COMMANDS)


def test_version() -> None:
    import accelerate as package

    line = accelerate("--version")[1].strip()
    assert line.startswith(f"accelerate {package.__version__}, torch {metadata.version('torch')}, Python ")
    assert line.endswith((", device: cpu", " x cuda", " x mps"))
    code = "from accelerate.commands.accelerate_cli import main; main(); print('torch' in sys.modules)"
    assert accelerate("--version", code=code)[1].split()[-1] == "False"


def test_the_package_is_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "accelerate", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == accelerate("--version")[1]


def test_a_closed_pipe_ends_a_command_quietly() -> None:
    run = "from accelerate.commands.accelerate_cli import main; main()"
    for words in (["help"], ["env", "--json"]):
        program = f"import sys; sys.argv = ['accelerate', *{words!r}]; {run}"
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run([sys.executable, "-c", program], stdout=writer, stderr=subprocess.PIPE, text=True)
        os.close(writer)
        assert (done.returncode, done.stderr) == (141, ""), words


def test_without_a_command_the_help_is_shown() -> None:
    code, out, _ = accelerate()
    assert code == 1
    assert "usage: accelerate" in out


def test_every_command_has_a_parser_that_knows_what_to_call() -> None:
    subparsers = next(action for action in get_parser()._actions if action.dest == "command")
    assert isinstance(subparsers.choices, dict)
    assert set(subparsers.choices) == set(COMMANDS)
    for name, parser in subparsers.choices.items():
        assert callable(parser.get_default("func")), name


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nonsense"], "there is no command 'nonsense'; choose one of config"),
        (["launch"], "accelerate launch: name the script to run; "),
        (["launch", "--use_megatron_lm", "x.py"], "`--use_megatron_lm` needs Megatron-LM: pip install megatron-core"),
        (["config", "--confg_file", "x"], "unrecognized arguments: --confg_file (did you mean `--config_file`?);"),
        (["config", "defualt"], "there is no 'defualt' (did you mean `default`?); choose one of default, update;"),
        (["test", "--config_file", "/nowhere.yaml"], "accelerate test: There is no config file /nowhere.yaml"),
        (["help", "lanch"], "there is no command 'lanch' (did you mean `launch`?);"),
        (["launch", "--nproc-per-node", "2", "x.py"], "--nproc-per-node (here it is `--num_processes`, of"),
        (
            ["launch", "--main_process_ip", "a:1", "x.py"],
            "should be an address without spaces and without a port, which",
        ),
        (["launch", "--main_process_ip", "my host", "x.py"], "should be an address without spaces and without a port"),
        (["launch", "--nofile"], "unrecognized arguments: --nofile;"),
        (["launch", "--cpu=2", "x.py"], "--cpu: this flag takes no value;"),
        (["launch", "--config_file", "/", "x.py"], "The config file / is a folder: give a file, such as `/my.yaml`."),
        (["launch", "--master_port=1", "x.py"], "--master_port=1 (here it is `--main_process_port`);"),
        (["launch", "--nonsense", "x.py"], "accelerate launch: unrecognized arguments: --nonsense; "),
        (["launch", "--num_processes", "two", "x.py"], "should be a whole number of at least 1, not 'two'"),
        (["launch", "--cpu", "--multi_gpu", "x.py"], "`--multi_gpu` and `--cpu` exclude each other"),
        (["launch", "-m", "--no_python", "x.py"], "`--module` and `--no_python` exclude each other"),
        (["launch", "--config_file", "/nowhere.yaml", "x.py"], "There is no config file /nowhere.yaml"),
        (["launch", "--tpu", "--num_processes", "8", "x.py"], "A TPU needs torch_xla"),
        (["launch", "--tpu", "x.py"], "A TPU needs torch_xla"),
        (["launch", "nowhere.py"], "There is no script nowhere.py"),
        (["launch", "--bf16", "x.py"], "--bf16 (here it is `--mixed_precision bf16`);"),
        (["launch", "-n", "2", "x.py"], "-n (here it is `--num_processes`)"),
        (["launch", "python_trian.py"], "There is no script python_trian.py"),
        (["launch", "python3.11", "train.py"], "leave it out, for scripts are run by Python anyway"),
        (["launch", "python", "train.py"], "leave it out, for scripts are run by Python anyway, and name the script."),
        (["launch", "-m", "pkg/train.py"], "pkg/train.py is that of a file: write `-m pkg.train`, or leave out `-m`"),
        (["launch", "-m", "/pkg/train.py"], "and /pkg/train.py is that of a file: leave out `-m`."),
        (["launch", "-m", "json.toll"], "There is no module json.toll (did you mean `json.tool`?) in the package"),
        (["launch", "--num_processes", "0", "x.py"], "should be a whole number of at least 1, not '0'"),
        (["launch", "--hang_timeout", "-5", "x.py"], "--hang_timeout: should be 0 or more seconds, not '-5'"),
        (["launch", "--mixed_precision", "bf61", "x.py"], "no, fp16, bf16, fp8, not 'bf61' (did you mean `bf16`?)"),
        (["launch", "--mixed_precision", "fp8", "x.py"], "Training in fp8 needs torchao 0.9 or newer"),
        (["launch", "--cpu", "--num_processes", "2", "/"], "/ is a folder without a `__main__.py`: name the script"),
        (["launch", "--num_proceses", "2", "x.py"], "--num_proceses (did you mean `--num_processes`?);"),
        (["launch", "--num-proceses=2", "x.py"], "--num-proceses=2 (did you mean `--num-processes`?);"),
        (["env", "--jsno"], "--jsno (did you mean `--json`?);"),
        (["lanch", "x.py"], "there is no command 'lanch' (did you mean `launch`?);"),
        (["merge-weights", "/nowhere", "/tmp"], "There is no folder /nowhere"),
        (["launch", "--no_python", "/nowhere/program"], "There is no program /nowhere/program"),
    ],
)
def test_mistakes_end_with_one_sentence(words: list[str], sentence: str) -> None:
    code, _, err = accelerate(*words)
    assert code in (1, 2)
    assert sentence in err
    assert len(err.strip().splitlines()) == 1, err


def test_a_config_file_or_a_misspelt_name_in_the_place_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "conf.yaml").touch()
    (tmp_path / "train.py").touch()
    code, _, err = accelerate("launch", str(tmp_path / "conf.yaml"))
    assert code == 1 and "conf.yaml is no Python script: for a config file, write `--config_file /" in err
    code, _, err = accelerate("launch", str(tmp_path / "trian.py"))
    assert code == 1 and f"trian.py (did you mean `{tmp_path / 'train.py'}`?) (in " in err


def test_a_busy_port_ends_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "x.py").touch()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        words = ["launch", "--cpu", "--num_processes", "2", "--main_process_port", port, str(tmp_path / "x.py")]
        code, _, err = accelerate(*words)
        dry = accelerate("launch", "--dry_run", *words[1:])
    assert code == 1
    assert f"already listens on port {port}" in err
    assert len(err.strip().splitlines()) == 1
    assert dry[0] == 0 and f"--master_port={port}" in dry[1]  # which starts nothing


@pytest.mark.parametrize(
    "words",
    [["--help"], ["launch", "--help"], ["config", "--help"], ["launch", "--nonsense"], ["launch", "--dry_run", "x.py"]],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(words: list[str]) -> None:
    code = """
from accelerate.commands.accelerate_cli import main
try:
    main()
except SystemExit:
    pass
print("HEAVY", sorted({"torch", "numpy", "questionary", "huggingface_hub"} & set(sys.modules)))
"""
    assert accelerate(*words, code=code)[1].splitlines()[-1] == "HEAVY []"


def test_flags_may_be_written_with_hyphens() -> None:
    args = launch_command_parser().parse_args(["--num-processes=2", "--use-fsdp", "--fsdp-version", "2", "x.py"])
    assert (args.num_processes, args.use_fsdp, args.fsdp_version) == (2, True, "2")
    assert clean_option("--num-processes") == "--num_processes"


@pytest.mark.parametrize(
    "rest",
    [["--num_processes", "7"], ["--", "--lr", "1"], ["-m", "--", "--"], ["--help"], ["a b", "--x=1", ""]],
    ids=str,
)
def test_what_follows_the_script_is_untouched(rest: list[str]) -> None:
    args = launch_command_parser().parse_args(["--cpu", "x.py", *rest])
    assert (args.training_script, args.training_script_args) == ("x.py", rest)


def test_two_dashes_before_the_script_are_allowed() -> None:
    args = launch_command_parser().parse_args(["--cpu", "--", "x.py", "--", "1"])
    assert (args.training_script, args.training_script_args) == ("x.py", ["--", "1"])


def test_help_as_a_command() -> None:
    assert accelerate("help") == accelerate("--help")
    assert accelerate("help", "env") == accelerate("env", "--help")


def test_a_program_of_this_folder_needs_its_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program.sh"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert "write ./program.sh." in accelerate("launch", "--no_python", "program.sh")[2]
    program.chmod(0o644)
    assert "is not executable: make it so with `chmod +x`" in accelerate("launch", "--no_python", "program.sh")[2]


def test_help_shows_values_as_they_are_typed_and_nothing_that_is_not_there() -> None:
    out = accelerate("launch", "--help")[1]
    assert not {"True", "False", "torhchxla_trace_once"} & set(re.findall(r"\w+", out))
    assert "--megatron_lm_tp_degree" in out and "--aws_access_key_id" not in out and "flags of AWS." in out
    assert "--megatron_lm_tp_degree" in accelerate("launch", "--use_megatron_lm", "--help")[1]


def test_help_of_one_engine_leaves_the_others_out() -> None:
    assert "--zero_stage" in accelerate("launch", "--help")[1]
    out = accelerate("launch", "--use_fsdp", "--help")[1]
    assert "--fsdp_version" in out
    assert "--zero_stage" not in out
    assert "DeepSpeed:" not in out


def test_the_installed_programs_start() -> None:
    for name in ("accelerate", "accelerate-launch", "accelerate-config"):
        program = Path(sys.executable).with_name(name)
        done = subprocess.run([program, "--help"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "usage: " in done.stdout


def test_a_mistake_of_the_user_is_a_sentence_and_a_fault_of_the_package_a_traceback() -> None:
    with pytest.raises(SystemExit, match="accelerate x: there is no mpirun"), one_sentence("accelerate x"):
        raise CommandFailed("there is no mpirun")
    with pytest.raises(RuntimeError, match="a fault"), one_sentence("accelerate x"):
        raise RuntimeError("a fault")
