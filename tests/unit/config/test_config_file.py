"""The config file: its place, what loads, what is refused, what is brought up to date."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from accelerate.config import file
from accelerate.config.enums import ComputeEnvironment, DistributedType
from accelerate.config.file import ClusterConfig, SageMakerConfig, load_config_from_file

# As the releases wrote them: 0.11, 0.15, 0.20, 1.0.
OLD_FILES: dict[str, dict[str, Any]] = {
    "fp16 as a switch": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "fp16": True,
        "machine_rank": 0,
        "main_process_ip": None,
        "main_process_port": None,
        "main_training_function": "main",
        "num_machines": 1,
        "num_processes": 2,
    },
    "compiler at the top": {
        "compute_environment": "LOCAL_MACHINE",
        "deepspeed_config": {},
        "distributed_type": "MULTI_GPU",
        "downcast_bf16": "no",
        "dynamo_backend": "INDUCTOR",
        "fsdp_config": {},
        "mixed_precision": "fp16",
        "num_processes": 2,
        "use_cpu": False,
    },
    "apple": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MPS",
        "mixed_precision": "no",
        "use_mps_device": True,
        "num_processes": 1,
    },
    "tpu": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "TPU",
        "downcast_bf16": "no",
        "mixed_precision": "bf16",
        "num_processes": 8,
        "tpu_name": None,
        "tpu_zone": None,
    },
    "intel": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_CPU",
        "ipex_config": {"ipex": True},
        "mpirun_config": {"mpirun_ccl": "1", "mpirun_hostfile": "/hosts"},
        "mixed_precision": "bf16",
        "num_processes": 2,
        "use_cpu": True,
    },
    "numbered sharding": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP",
        "fsdp_config": {
            "sharding_strategy": 1,
            "min_num_params": 2000,
            "fsdp_backward_prefetch_policy": "BACKWARD_PRE",
        },
        "mixed_precision": "no",
        "num_processes": 2,
    },
    "tensor parallel": {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU",
        "tp_config": {"tp_size": 2},
        "mixed_precision": "no",
        "num_processes": 2,
    },
}


def write(folder: Path, content: Any, name: str = "config.yaml") -> Path:
    path = folder / name
    path.write_text(json.dumps(content) if name.endswith("json") else yaml.safe_dump(content))
    return path


def load(path: Path) -> ClusterConfig:
    config = load_config_from_file(path)
    assert isinstance(config, ClusterConfig)
    return config


UNQUOTED = {
    "0.11": (
        "compute_environment: LOCAL_MACHINE\ndistributed_type: NO\nmixed_precision: no\nnum_processes: 1\n"
        "deepspeed_config: {}\nfsdp_config: {}\nmachine_rank: 0\nnum_machines: 1\nmain_process_ip: null\n"
    ),
    "0.12": "distributed_type: NO\ndowncast_bf16: no\ndynamo_backend: NO\nmixed_precision: no\nuse_cpu: false\n",
    "0.30": "distributed_type: No\ndynamo_config: {dynamo_backend: NO}\nmixed_precision: no\n",
    "0.30 of SageMaker": (
        "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: NO\nmixed_precision: no\n"
        "ec2_instance_type: ml.p3.2xlarge\niam_role_name: trainer\nuse_cpu: false\ndebug: false\n"
    ),
}


@pytest.mark.parametrize("name", UNQUOTED)
def test_no_without_quotes_is_the_word(tmp_path: Path, name: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(UNQUOTED[name])
    config = load_config_from_file(path)
    assert config.distributed_type.value == "NO"
    assert config.mixed_precision == "no"
    assert getattr(config, "dynamo_config") in ({}, {"dynamo_backend": "NO"})  # noqa: B009  (of both kinds of config)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HOME": "/a"}, "/a/accelerate/default_config.yaml"),
        ({"HF_HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/a/accelerate/default_config.yaml"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/huggingface/accelerate/default_config.yaml"),
        ({}, str(Path("~/.cache/huggingface/accelerate/default_config.yaml").expanduser())),
    ],
)
def test_place_of_the_default_file(environ: dict[str, str], expected: str) -> None:
    assert str(file.default_path(environ)) == expected


def test_json_is_the_default_file_only_where_there_is_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "accelerate").mkdir()
    environ = {"HF_HOME": str(tmp_path)}
    write(tmp_path / "accelerate", {}, "default_config.json")
    assert file.default_path(environ).suffix == ".json"
    write(tmp_path / "accelerate", {}, "default_config.yaml")
    assert file.default_path(environ).suffix == ".yaml"


@pytest.mark.parametrize("name", OLD_FILES)
@pytest.mark.parametrize("ending", ["yaml", "json"])
def test_files_of_earlier_releases_load_and_come_up_to_date(tmp_path: Path, name: str, ending: str) -> None:
    path = write(tmp_path, OLD_FILES[name], f"config.{ending}")
    config = load(path)
    file.write(config.to_dict(), path)
    again = load(path)
    assert again == config
    assert file.migrate(file.read(path))[1] == []


def test_what_earlier_names_become(tmp_path: Path) -> None:
    def loaded(name: str) -> ClusterConfig:
        return load(write(tmp_path, OLD_FILES[name]))

    assert loaded("fp16 as a switch").mixed_precision == "fp16"
    assert loaded("compiler at the top").dynamo_config == {"dynamo_backend": "INDUCTOR"}
    assert loaded("apple").distributed_type == DistributedType.NO
    assert loaded("tpu").distributed_type == DistributedType.XLA
    assert loaded("intel").mpirun_config == {"mpirun_hostfile": "/hosts"}
    assert loaded("tensor parallel").parallelism_config == {"parallelism_config_tp_size": 2}
    sharded = loaded("numbered sharding").values()
    assert sharded["fsdp_sharding_strategy"] == "FULL_SHARD"
    assert sharded["fsdp_min_num_params"] == 2000
    assert sharded["fsdp_backward_prefetch"] == "BACKWARD_PRE"


def test_all_unknown_keys_are_named_in_one_error(tmp_path: Path) -> None:
    path = write(tmp_path, {"distributed_type": "NO", "nonsense": 1, "also_nonsense": 2, "num_processes": 1})
    with pytest.raises(ValueError, match=r"unknown keys: also_nonsense, nonsense;"):
        load_config_from_file(path)


def test_a_key_that_is_nearly_right_is_corrected(tmp_path: Path) -> None:
    path = write(tmp_path, {"distributed_type": "NO", "num_proceses": 1, "nonsense": 2})
    with pytest.raises(ValueError, match=r"unknown keys: nonsense, num_proceses \(did you mean `num_processes`\?\);"):
        load_config_from_file(path)


def test_unknown_keys_of_sections_are_found(tmp_path: Path) -> None:
    path = write(tmp_path, {"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2, "typo": 1}})
    assert load(path).unknown_in_sections() == ["fsdp_config.typo"]


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"There is no config file .*missing\.yaml"):
        load_config_from_file(tmp_path / "missing.yaml")


@pytest.mark.parametrize(("name", "text"), [("config.yaml", "a: [1"), ("config.json", "{"), ("config.yaml", "- 1")])
def test_a_file_that_cannot_be_read_says_so(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=name) as caught:
        load_config_from_file(path)
    assert "<unicode" not in str(caught.value)  # the name that PyYAML has for it


INDENTED = b"compute_environment: LOCAL_MACHINE\n  distributed_type: MULTI_CPU\n"
AROUND = "check the indentation (spaces alone), colons, quotes and brackets there and in the lines before."


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        (
            "c.yaml",
            INDENTED,
            f"is not YAML at line 2, column 19 (mapping values are not allowed in this context): {AROUND}",
        ),
        ("c.yaml", b"a: [1\nb: 2\n", f"is not YAML at line 2, column 2 (did not find expected ',' or ']'): {AROUND}"),
        ("c.yaml", b"a: 1\n\tb: 2\n", f"found a tab character that violates indentation): {AROUND}"),
        ("c.yaml", b"a: \x07\n", " characters are not allowed): remove that character."),
        (
            "c.json",
            b'{"a": 1,\n "b" 2}',
            "is not JSON at line 2, column 6 (Expecting ':' delimiter): check commas, quotes ",
        ),
        ("c.yaml", "a: 1".encode("utf-16"), "is not UTF-8 text (byte 0xff at position 0): save it as UTF-8."),
    ],
)
def test_where_and_why_a_file_cannot_be_read(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError) as told:
        load_config_from_file(path)
    assert str(told.value).startswith(f"The config file {path} is not ")
    assert sentence in str(told.value)


@pytest.mark.parametrize("text", ["", "# nothing yet\n"])
def test_an_empty_file_is_called_so(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"The config file .*config\.yaml is empty: make one with `accelerate config`"):
        load_config_from_file(path)


def test_json_inside_a_yaml_name(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"distributed_type": "NO", "mixed_precision": "bf16"}, indent=2))
    assert load(path).mixed_precision == "bf16"


def test_a_wrong_type_of_run_names_the_right_ones(tmp_path: Path) -> None:
    path = write(tmp_path, {"distributed_type": "MANY", "num_processes": 1})
    with pytest.raises(ValueError, match="is 'MANY': choose one of NO, MULTI_CPU"):
        load_config_from_file(path)


def test_without_a_distributed_type_the_rest_tells(tmp_path: Path) -> None:
    assert load(write(tmp_path, {"num_processes": 2})).distributed_type == DistributedType.MULTI_GPU
    assert load(write(tmp_path, {"num_processes": 2, "use_cpu": True})).distributed_type == DistributedType.MULTI_CPU
    assert load(write(tmp_path, {"fsdp_config": {"fsdp_version": 2}})).distributed_type == DistributedType.FSDP
    assert load(write(tmp_path, {})).distributed_type == DistributedType.NO


def test_what_is_written_holds_no_empty_keys(tmp_path: Path) -> None:
    config = load(write(tmp_path, {"num_processes": 2, "fsdp_config": {"fsdp_version": 2}}))
    written = config.to_dict()
    assert written["fsdp_config"] == {"fsdp_version": 2}
    assert written["compute_environment"] == "LOCAL_MACHINE"
    assert "deepspeed_config" not in written
    assert "gpu_ids" not in written


def test_a_file_for_deepspeed_is_written_as_it_was_read(tmp_path: Path) -> None:
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "deepspeed_config": {
            "deepspeed_exclusion_filter": "worker-2:1",
            "deepspeed_hostfile": "hosts",
            "deepspeed_moe_layer_cls_names": "MixtralSparseMoeBlock",
            "deepspeed_multinode_launcher": "pdsh",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": 1.0,
            "offload_optimizer_device": "nvme",
            "offload_optimizer_nvme_path": "/nvme",
            "offload_param_device": "cpu",
            "zero3_init_flag": True,
            "zero3_save_16bit_model": True,
            "zero_stage": 3,
        },
        "distributed_type": "DEEPSPEED",
        "downcast_bf16": False,
        "enable_cpu_affinity": False,
        "machine_rank": 0,
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29500,
        "main_training_function": "main",
        "mixed_precision": "bf16",
        "num_machines": 2,
        "num_processes": 8,
        "rdzv_backend": "static",
        "same_network": True,
        "tpu_use_cluster": False,
        "tpu_use_sudo": False,
        "use_cpu": False,
    }
    config = load(write(tmp_path, content))
    assert config.to_dict() == content
    assert config.unknown_in_sections() == []


def test_sagemaker(tmp_path: Path) -> None:
    content = {
        "compute_environment": "AMAZON_SAGEMAKER",
        "distributed_type": "DATA_PARALLEL",
        "ec2_instance_type": "ml.p3.2xlarge",
        "iam_role_name": "role",
        "mixed_precision": "fp16",
    }
    config = load_config_from_file(write(tmp_path, content))
    assert isinstance(config, SageMakerConfig)
    assert config.compute_environment == ComputeEnvironment.AMAZON_SAGEMAKER
    assert config.to_dict()["distributed_type"] == "DATA_PARALLEL"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (
            {"num_processes": "two"},
            r"config\.yaml, `num_processes` should be a whole number of at least 1, not 'two'\.$",
        ),
        ({"distributed_type": "SOME"}, r"config\.yaml, `distributed_type` is 'SOME': choose one of NO, "),
        ({"distributed_type": "MULTI_CUP"}, r"is 'MULTI_CUP' \(did you mean `MULTI_CPU`\?\): choose one of NO, "),
        ({"fsdp_config": 3}, r"`fsdp_config` in .*config\.yaml should hold names and values, but holds int\.$"),
        ({"compute_environment": "AMAZON_SAGEMAKER"}, r"config\.yaml, there is no ec2_instance_type, iam_role_name: "),
    ],
)
def test_a_wrong_value_is_named_with_its_file(tmp_path: Path, content: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        load_config_from_file(write(tmp_path, content))


def test_an_empty_variable_is_no_place() -> None:
    assert file.folder({"HF_HOME": "", "XDG_CACHE_HOME": ""}) == Path.home() / ".cache/huggingface/accelerate"


@pytest.mark.parametrize(
    ("text", "where", "key"),
    [
        ("dynamo_config: {on: 1}", "`dynamo_config` in", "True, a bool"),
        ("fsdp_config: {1: 2, a: 3}", "`fsdp_config` in", "1, an int"),
        ("foo: 2\n3: 4\n", "The config file", "3, an int"),
        ("null: 3", "The config file", "None, a NoneType"),
    ],
)
def test_a_key_that_is_no_word_is_named(tmp_path: Path, text: str, where: str, key: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"^{where} .*config.yaml has the key {key}, where a name belongs"):
        load_config_from_file(path)
