"""Where each value comes from: flags, then the file, then the machine or the cluster, then defaults."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from accelerate.commands.launch import launch_command_parser
from accelerate.config.options import option
from accelerate.launch.machine import Accelerators
from accelerate.launch.plan import plan
from accelerate.launch.resolve import resolve
from accelerate.launch.settings import Setting, Settings

NONE = Accelerators("cpu", 0, "the tests say so")
FOUR = Accelerators("cuda", 4, "the driver knows 4")


def settings(
    *words: str,
    file: dict[str, Any] | None = None,
    folder: Path = Path("/nowhere"),
    devices: Accelerators = NONE,
    busy: tuple[int, ...] = (),
    **environ: str,
) -> Settings:
    if file is not None:
        (folder / "accelerate").mkdir()
        (folder / "accelerate" / "default_config.json").write_text(json.dumps(file))
    args = launch_command_parser().parse_args([*words, "x.py"])
    return resolve(args, {"HF_HOME": str(folder), **environ}, devices, lambda port: port in busy)


def test_flags_beat_the_file_and_the_file_beats_defaults(tmp_path: Path) -> None:
    file = {"num_processes": 2, "mixed_precision": "bf16", "rdzv_backend": "c10d", "enable_cpu_affinity": True}
    found = settings("--num_processes", "3", "--rdzv_backend", "static", file=file, folder=tmp_path)
    assert found.of["num_processes"] == Setting(3, "flag")
    assert found.of["mixed_precision"] == Setting("bf16", "file")
    assert found.of["enable_cpu_affinity"] == Setting(True, "file")
    # Given, though it is also the default.
    assert found.of["rdzv_backend"] == Setting("static", "flag")
    assert found.of["num_machines"] == Setting(1, "default")


def test_a_section_of_the_file_gives_way_to_flags_one_by_one(tmp_path: Path) -> None:
    file = {"distributed_type": "FSDP", "num_processes": 2, "fsdp_config": {"version": 2, "offload_params": True}}
    found = settings("--fsdp_offload_params", "false", file=file, folder=tmp_path)
    assert found.use_fsdp is True
    assert found.of["fsdp_version"] == Setting("2", "file")
    assert found.of["fsdp_offload_params"] == Setting("false", "flag")


def test_an_engine_named_by_a_flag_beats_the_type_in_the_file(tmp_path: Path) -> None:
    found = settings("--use_fsdp", file={"distributed_type": "MULTI_GPU", "num_processes": 2}, folder=tmp_path)
    assert found.use_fsdp
    assert not found.multi_gpu


@pytest.mark.parametrize(("kind", "engine"), [("FSDP", True), ("MULTI_GPU", False)])
def test_the_cpu_as_a_flag_leaves_the_engine_of_the_file(kind: str, engine: bool, tmp_path: Path) -> None:
    found = settings("--cpu", file={"distributed_type": kind, "num_processes": 2}, folder=tmp_path)
    assert found.cpu and found.use_fsdp is engine and not found.multi_gpu


def test_devices_are_counted_when_nothing_says_how_many() -> None:
    found = settings(devices=FOUR)
    assert found.of["num_processes"] == Setting(4, "detected", "the driver knows 4")
    assert settings("--gpu_ids", "0,2", devices=FOUR).num_processes == 2
    assert settings("--cpu", devices=FOUR).num_processes == 1
    assert (
        settings("--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "h", devices=FOUR).num_processes
        == 8
    )


def test_a_namespace_made_by_hand_counts_as_flags() -> None:
    args = launch_command_parser().parse_args(["x.py"])
    args.num_processes = 2
    assert resolve(args, {"HF_HOME": "/nowhere"}, NONE, lambda port: False).of["num_processes"] == Setting(2, "flag")
    bare = argparse.Namespace(training_script="x.py", training_script_args=[], cpu=True)
    assert resolve(bare, {"HF_HOME": "/nowhere"}, NONE, lambda port: False).cpu is True


def test_flags_of_an_engine_that_was_not_asked_for_are_mentioned() -> None:
    flags = ["--gradient_accumulation_steps", "4", "--fsdp_version", "2", "--fsdp_offload_params", "true"]
    assert settings(*flags).notes == [
        "`--gradient_accumulation_steps` has no effect without `--use_deepspeed`.",
        "`--fsdp_version`, `--fsdp_offload_params` have no effect without `--use_fsdp`.",
    ]
    assert not any("--fsdp" in note for note in settings("--use_fsdp", *flags[2:]).notes)


def test_variables_for_a_pod_that_was_not_asked_for_are_mentioned() -> None:
    assert settings("--env", "FOO=1", "--env", "BAR=2").notes == [
        "`--env` has no effect without `--tpu_cluster`: set variables before the command, as in `FOO=1 BAR=2 "
        "accelerate launch ...`."
    ]


def test_a_compiler_that_is_nearly_one() -> None:
    words = r"^(?!.*torhchxla).*neuron, not 'torchxla_trace_onc' \(did you mean `torchxla_trace_once`\?\)"
    with pytest.raises(ValueError, match=words):
        option("dynamo_backend").check("torchxla_trace_onc")
    assert option("dynamo_backend").check("torhchxla_trace_once") == "torhchxla_trace_once"


def test_old_and_unknown_keys_are_mentioned(tmp_path: Path) -> None:
    section = {"typo": 1, "fsdp_versoin": 2, "offload_parms": True}
    file = {"distributed_type": "FSDP", "num_processes": 2, "fp16": True, "fsdp_config": section}
    notes = settings(file=file, folder=tmp_path).notes
    assert any("accelerate config update" in note for note in notes)
    assert any("fsdp_config.typo, " in note for note in notes)
    assert any("fsdp_config.fsdp_versoin (did you mean `fsdp_version`?), " in note for note in notes)
    assert any("fsdp_config.offload_parms (did you mean `offload_params`?)." in note for note in notes)


def test_threads_share_the_cores_on_the_cpu() -> None:
    one, two = settings("--cpu"), settings("--cpu", "--num_processes", "2")
    assert one.num_cpu_threads_per_process >= two.num_cpu_threads_per_process >= 1
    assert one.of["num_cpu_threads_per_process"].source == "detected"
    assert settings(devices=FOUR).num_cpu_threads_per_process == 1
    assert settings("--cpu", OMP_NUM_THREADS="5").num_cpu_threads_per_process is None


def test_the_port_is_any_free_one_for_0_or_when_the_default_is_busy() -> None:
    several = ("--cpu", "--num_processes", "2")
    assert settings(*several).of["main_process_port"] == Setting(29500, "default")
    for found in (settings(*several, "--main_process_port", "0"), settings(*several, busy=(29500,))):
        assert found.main_process_port not in (0, 29500)
        assert found.of["main_process_port"].source == "detected"


def test_only_a_port_that_was_asked_for_has_to_be_that_one(tmp_path: Path) -> None:
    several = ("--cpu", "--num_processes", "2")
    for words, any_port in (
        ((), True),
        (("--main_process_port", "0"), True),
        (("--main_process_port", "29500"), False),
        (("--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "h"), False),
    ):
        assert ("--any_port" in plan(settings(*several, *words)).argv) is any_port
    assert "--any_port" not in plan(settings(*several, file={"main_process_port": 29500}, folder=tmp_path)).argv


def test_a_busy_port_that_was_asked_for_is_an_error() -> None:
    with pytest.raises(ConnectionError, match="already listens on port 4321"):
        settings("--num_processes", "2", "--main_process_port", "4321", busy=(4321,))
    # On another machine than the first, nobody listens there.
    words = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "h", "--main_process_port", "4321"]
    settings(*words, "--machine_rank", "1", busy=(4321,))
    with pytest.raises(ConnectionError, match="4321"):
        settings(*words, "--machine_rank", "0", busy=(4321,))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--num_machines", "2"], "give the address of the first"),
        (["--num_machines", "2", "--main_process_ip", "h"], "Which of the 2 machines is this"),
        (["--num_machines", "2", "--main_process_ip", "h", "--machine_rank", "2"], "count from 0 to 1"),
        (["--num_machines", "2", "--main_process_ip", "h", "--machine_rank", "0", "--num_processes", "3"], "evenly"),
        (["--use_parallelism_config"], "add `--use_fsdp --fsdp_version 2`"),
        (["--use_deepspeed", "--use_fsdp"], "exclude each other"),
        (["--nnodes", "1:2", "--num_machines", "2"], "`--nnodes` and `--num_machines` mean the same"),
        (["--nnodes", "1:2", "--rdzv_backend", "static"], "lets machines come and go"),
        (["--nnodes", "1:2", "--main_process_ip", "h", "--num_processes", "2"], "with `--max_restarts`"),
    ],
)
def test_contradictions_are_refused(words: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        settings(*words)


@pytest.mark.parametrize(
    ("file", "sentence"),
    [
        ({"num_processes": 0}, "should be a whole number of at least 1, not 0"),
        ({"num_processes": -1, "distributed_type": "MULTI_GPU"}, "should be a whole number of at least 1, not -1"),
        ({"hang_timeout": -5}, "should be 0 or more seconds, not -5"),
        ({"mixed_precision": "bf61"}, "not 'bf61' \\(did you mean `bf16`\\?\\)"),
    ],
)
def test_a_wrong_number_in_the_file_is_that_of_the_file(tmp_path: Path, file: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        settings(file=file, folder=tmp_path)
    assert "default_config.json" in str(error.value) and "--" not in str(error.value)


def test_machines_that_come_and_go_need_no_rank() -> None:
    words = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "h", "--rdzv_backend", "c10d"]
    assert settings(*words).machine_rank == 0


def test_a_range_of_machines() -> None:
    words = ["--num_processes", "4", "--main_process_ip", "h", "--cpu"]
    found = settings("--nnodes", "1:2", "--max_restarts", "3", *words)
    assert (found.least_machines, found.num_machines, found.local_processes, found.rdzv_backend) == (1, 2, 2, "c10d")
    assert "--nnodes=1:2" in plan(found).argv and plan(found).engine.startswith("2 processes on each of 1 to 2 machin")
    # Without a range, only those that are to be started again have to find each other anew.
    words += ["--nnodes", "2", "--machine_rank", "1"]
    assert settings(*words).rdzv_backend == "static"
    assert settings(*words, "--max_restarts", "1").rdzv_backend == "c10d"
    assert settings(*words, "--max_restarts", "1", "--rdzv_backend", "static").rdzv_backend == "static"


SLURM = {
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
ONE_EACH = {**SLURM, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1", "SLURM_LOCALID": "0"} | {
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)"
}


def test_slurm_with_several_tasks_per_node_is_one_process_each(tmp_path: Path) -> None:
    # The file is for a machine of its own; the job knows better.
    found = settings(file={"distributed_type": "NO", "num_processes": 1}, folder=tmp_path, **SLURM)
    planned = plan(found)
    assert not planned.becomes
    assert planned.env["RANK"] == "3"
    assert planned.env["WORLD_SIZE"] == "4"
    assert planned.env["LOCAL_RANK"] == "1"
    assert planned.env["MASTER_ADDR"] == "n1"
    assert found.of["num_processes"].source == "detected"


def test_slurm_with_one_task_per_node_starts_a_process_per_device() -> None:
    found = settings(devices=FOUR, **ONE_EACH)
    assert (found.num_machines, found.machine_rank, found.num_processes) == (2, 1, 8)
    command = plan(found).argv
    assert "--nproc_per_node=4" in command
    assert "--node_rank=1" in command
    assert any(word.startswith("--rdzv_endpoint=n1:") for word in command)


def test_slurm_with_one_task_per_node_and_no_device_is_one_process_each() -> None:
    assert plan(settings("--cpu", **ONE_EACH)).env["WORLD_SIZE"] == "2"
    found = settings("--cpu", "--num_processes", "4", **ONE_EACH)
    assert "--nproc_per_node=2" in plan(found).argv
    assert found.of["num_processes"].source == "flag"
    with pytest.raises(ValueError, match="3 processes cannot be divided evenly over 2 nodes"):
        settings("--cpu", "--num_processes", "3", **ONE_EACH)


def test_flags_about_machines_beat_slurm() -> None:
    words = ["--num_machines", "2", "--machine_rank", "0", "--main_process_ip", "h", "--num_processes", "2"]
    assert settings(*words, **ONE_EACH).machine_rank == 0


def test_inside_mpirun_a_launch_is_one_process_of_it() -> None:
    mpi = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
    planned = plan(settings("--cpu", "--num_processes", "2", OMPI_COMM_WORLD_LOCAL_SIZE="2", **mpi))
    assert not planned.becomes
    assert planned.env["RANK"] == "1"


def test_a_wrong_value_of_the_file_is_named_with_the_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"`mixed_precision` in .*default_config\.json should be one of no, fp16"):
        settings(file={"mixed_precision": "half"}, folder=tmp_path)


@pytest.mark.parametrize(("flag", "value"), [("--main_process_port", "99999"), ("--tee", "7"), ("--tee", "0:3,x")])
def test_values_that_the_engine_would_choke_on_are_refused(
    capsys: pytest.CaptureFixture[str], flag: str, value: str
) -> None:
    with pytest.raises(SystemExit):
        settings(flag, value)
    assert f"not '{value}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "file", "asked"),
    [
        (["--multi_gpu", "--num_processes", "2"], None, "`--multi_gpu`"),
        (["--gpu_ids", "0,1"], None, "`--gpu_ids 0,1`"),
        ([], {"distributed_type": "MULTI_GPU", "num_processes": 2}, "distributed_type is MULTI_GPU"),
        ([], {"distributed_type": "NO", "gpu_ids": "1"}, "`gpu_ids` is 1"),
    ],
)
def test_a_gpu_that_was_asked_for_and_is_not_there_is_mentioned(
    tmp_path: Path, words: list[str], file: dict[str, Any] | None, asked: str
) -> None:
    found = settings(*words, file=file, folder=tmp_path)
    assert found.on_cpu
    [note] = found.notes
    assert asked in note and "will run on the CPU" in note and NONE.reason in note
    assert not settings(*words, folder=tmp_path, devices=FOUR).notes
    assert not settings("--cpu", "--gpu_ids", "0,1", folder=tmp_path).notes
    if found.num_processes == 2:
        assert plan(found).notes == ["starting 2 processes, on the CPU, with gloo"]


def test_where_files_of_output_go_is_said() -> None:
    assert "add `--tee 3`" in settings("--log_dir", "logs").notes[0]
    assert "a new folder /tmp/torchelastic_*" in settings("--tee", "3").notes[0]
    assert settings("--tee", "3", "--log_dir", "logs").notes == []


def test_a_number_of_processes_asks_for_no_gpu(tmp_path: Path) -> None:
    found = settings(file={"num_processes": 2}, folder=tmp_path)
    assert found.notes == []
    assert plan(found).notes == ["starting 2 processes, on the CPU, with gloo"]


def test_ids_of_gpus_that_are_not_there_start_nothing_on_the_cpu() -> None:
    assert settings("--gpu_ids", "0,1").num_processes == 1
    assert settings("--gpu_ids", "0,1", devices=FOUR).num_processes == 2
    assert settings("--tee", "0:3,1:1").tee == "0:3,1:1"


def hosts(folder: Path, text: str = "a slots=2\nb slots=2\n") -> str:
    (folder / "hosts").write_text(text)
    return str(folder / "hosts")


def test_machines_and_processes_come_from_a_hostfile(tmp_path: Path) -> None:
    found = settings("--use_deepspeed", "--deepspeed_hostfile", hosts(tmp_path, "a slots=2\nb slots=1\n"))
    assert (found.num_machines, found.num_processes) == (2, 3)
    assert found.of["num_processes"].source == "detected"
    assert "--num_gpus" not in plan(found).argv


def test_a_hostfile_with_this_machine_alone_starts_no_other(tmp_path: Path) -> None:
    found = settings("--use_deepspeed", "--deepspeed_hostfile", hosts(tmp_path, "localhost slots=2\n"))
    assert found.hosts is None and plan(found).becomes


def test_a_filter_counts_more_than_numbers(tmp_path: Path) -> None:
    words = ["--use_deepspeed", "--deepspeed_hostfile", hosts(tmp_path), "--deepspeed_inclusion_filter", "b"]
    found = settings(*words, "--num_machines", "2", "--num_processes", "4")
    assert (found.num_machines, found.num_processes) == (1, 2)
    assert len(found.notes) == 2 and all("the filter leaves of" in note for note in found.notes)


def test_devices_of_this_machine_say_nothing_of_others(tmp_path: Path) -> None:
    words = ["--use_deepspeed", "--deepspeed_hostfile", hosts(tmp_path, "a slots=8\nb slots=8\n")]
    assert settings(*words, devices=FOUR).notes == []


def test_filters_that_do_nothing_are_named() -> None:
    found = settings("--use_deepspeed", "--num_processes", "2", "--deepspeed_exclusion_filter", "a")
    assert ["does nothing" in note for note in found.notes] == [True]


def test_the_port_of_another_machine_is_not_looked_at_here(tmp_path: Path) -> None:
    words = ["--use_deepspeed", "--deepspeed_hostfile", hosts(tmp_path), "--main_process_port", "4321"]
    assert settings(*words, busy=(4321,)).main_process_port == 4321


@pytest.mark.parametrize(
    "words",
    [
        ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED"],
        ["--fsdp_backward_prefetch", "BEFORE"],
        ["--fsdp_state_dict_type", "WHOLE"],
    ],
)
def test_values_of_fsdp_that_there_are_not(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    settings("--use_fsdp", "--fsdp_auto_wrap_policy", "no_wrap")
    settings("--use_fsdp", "--fsdp_backward_prefetch", "1", "--fsdp_state_dict_type", "3")
    with pytest.raises(SystemExit):
        settings("--use_fsdp", *words)
    assert f"{words[0]}: should be one of " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["--deepspeed_multinode_launcher", "pbs"], ["--zero_stage", "4"], ["--nnodes", "2:1"]]
)
def test_values_that_there_are_not(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings("--use_deepspeed", *words)
    assert "should be " in capsys.readouterr().err


def test_variables_that_are_not_there_are_not_mentioned(tmp_path: Path) -> None:
    told = settings(file={"mixed_precision": "bf16", "dynamo_backend": "EAGER"}, folder=tmp_path)
    assert [note for note in told.notes if "replaces" in note] == []


def test_variables_that_a_launch_replaces_by_defaults_are_mentioned(tmp_path: Path) -> None:
    told = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}
    assert [note for note in settings(**told).notes if "replaces" in note] == [
        "ACCELERATE_MIXED_PRECISION is 'bf16' here, and a launch replaces it by its default 'no': give "
        "`--mixed_precision bf16`.",
        "ACCELERATE_DYNAMO_BACKEND is 'INDUCTOR' here, and a launch replaces it by its default 'no': give "
        "`--dynamo_backend INDUCTOR`.",
    ]
    assert not any("MIXED" in note for note in settings("--mixed_precision", "no", **told).notes)
    assert not any("MIXED" in note for note in settings(ACCELERATE_MIXED_PRECISION="").notes)
    (tmp_path / "c.yaml").write_text("mixed_precision: fp16\nnum_processes: 1\n")
    (note,) = [n for n in settings("--config_file", str(tmp_path / "c.yaml"), **told).notes if "MIXED" in n]
    assert "replaces it by that of " in note and "c.yaml, 'fp16': give `--mixed_precision bf16`." in note
    assert settings(ACCELERATE_MIXED_PRECISION="no", ACCELERATE_DYNAMO_BACKEND="NO").notes == settings().notes


def test_flags_about_other_machines_on_one_machine_are_mentioned() -> None:
    alone = "has no effect without `--num_machines`: all processes start on this machine."
    assert f"`--machine_rank` {alone}" in settings("--machine_rank", "1", "--num_processes", "2").notes
    both = settings("--machine_rank", "1", "--main_process_ip", "10.0.0.1", "--num_processes", "2").notes
    assert any(note.startswith("`--machine_rank` and `--main_process_ip` have no effect") for note in both)
    here = ["--num_machines", "1", "--machine_rank", "0", "--main_process_ip", "127.0.0.1", "--num_processes", "2"]
    assert not any("num_machines" in note for note in settings(*here).notes)


def test_a_rendezvous_that_nobody_knows() -> None:
    with pytest.raises(ValueError, match=r"`--rdzv_backend` is 'foo': choose one of static, c10d, etcd"):
        settings("--num_processes", "2", "--rdzv_backend", "foo")
    assert settings("--num_processes", "2", "--rdzv_backend", "etcd-v2").rdzv_backend == "etcd-v2"


@pytest.mark.parametrize(
    ("flag", "wrong", "right"),
    [
        ("--rdzv_conf", "a", "timeout=900,is_host=1"),
        ("--fsdp_sharding_strategy", "FULLSHARD", "hybrid_shard"),
        ("--fsdp_sharding_strategy", "6", "2"),
    ],
)
def test_words_that_torch_would_refuse_in_every_process(
    flag: str, wrong: str, right: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings("--use_fsdp", flag, right)
    with pytest.raises(SystemExit):
        settings("--use_fsdp", flag, wrong)
    assert f"should be {'names and values' if 'conf' in flag else 'one of FULL_SHARD'}" in capsys.readouterr().err


def test_logs_in_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "logs"):
        with pytest.raises(ValueError, match=r"cannot be made: .*file is not a folder"):
            settings("--num_processes", "2", "--tee", "3", "--log_dir", str(folder))
    settings("--num_processes", "2", "--tee", "3", "--log_dir", str(tmp_path / "new" / "logs"))
    assert not (tmp_path / "new").exists()


def test_flags_after_the_script_are_mentioned_if_they_are_hardly_the_scripts() -> None:
    def notes(*words: str) -> list[str]:
        args = launch_command_parser().parse_args(["x.py", *words])
        return [n for n in resolve(args, {"HF_HOME": "/nowhere"}, NONE, lambda port: False).notes if "x.py" in n]

    said = "comes after x.py and goes to the script: put it before, if it is for the launch."
    assert notes("--lr", "1", "--num-processes=2") == [f"`--num_processes` {said}"]
    assert notes("--cpu", "--mixed_precision", "bf16", "--config_file", "c.json") == []
    assert notes("--lr", "1", "--", "--num_processes", "2") == []  # who writes that knows whose flags they are
