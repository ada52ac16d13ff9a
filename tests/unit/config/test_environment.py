import asyncio
import os
from collections.abc import Iterator

import pytest

from accelerate.config import environment
from accelerate.config.environment import (
    CPUInformation,
    are_libraries_initialized,
    clear_environment,
    convert_dict_to_env_variables,
    get_cpu_distributed_information,
    get_int_from_env,
    parse_choice_from_env,
    parse_flag_from_env,
    patch_environment,
    purge_accelerate_environment,
    str_to_bool,
)


@pytest.fixture
def foo(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("ACCELERATE_FOO", "1")
    yield
    # Tests that purge must themselves leave it as it was.
    assert os.environ["ACCELERATE_FOO"] == "1"


def test_yes_and_no() -> None:
    assert [str_to_bool(word) for word in ("y", "YES", "t", "true", "on", "1")] == [1] * 6
    assert [str_to_bool(word) for word in ("n", "no", "f", "FALSE", "off", "0")] == [0] * 6
    assert str_to_bool("yes", to_bool=True) is True
    for word in ("2", "", " true"):
        with pytest.raises(ValueError, match="neither yes nor no"):
            str_to_bool(word)


def test_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_flag_from_env("SOME_FLAG") is False
    assert parse_flag_from_env("SOME_FLAG", True) is True
    monkeypatch.setenv("SOME_FLAG", "yes")
    assert parse_flag_from_env("SOME_FLAG") is True
    monkeypatch.setenv("SOME_FLAG", "perhaps")
    with pytest.raises(ValueError, match=r"SOME_FLAG.*'perhaps'"):
        parse_flag_from_env("SOME_FLAG")
    assert parse_choice_from_env("SOME_FLAG") == "perhaps"
    assert parse_choice_from_env("OTHER_FLAG") == "no"


def test_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIRST", "-3")
    monkeypatch.setenv("SECOND", "0")
    assert get_int_from_env(["NOT_SET", "FIRST", "SECOND"], 7) == 0
    assert get_int_from_env(["NOT_SET", "FIRST"], 7) == 7
    monkeypatch.setenv("FIRST", "4.5")
    with pytest.raises(ValueError, match=r"FIRST is '4.5'"):
        get_int_from_env(["FIRST"], 7)


def test_patching_restores_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OLD", "old")
    with pytest.raises(KeyError):
        with patch_environment(old=3, new=True):
            assert (os.environ["OLD"], os.environ["NEW"]) == ("3", "True")
            del os.environ["OLD"]
            raise KeyError
    assert os.environ["OLD"] == "old"
    assert "NEW" not in os.environ


def test_clearing() -> None:
    before = dict(os.environ)
    with pytest.raises(KeyError):
        with clear_environment():
            assert dict(os.environ) == {}
            os.environ["INSIDE"] = "1"
            raise KeyError
    assert dict(os.environ) == before


def test_purging_a_function(foo: None) -> None:
    @purge_accelerate_environment
    def change() -> str:
        seen = os.environ.pop("ACCELERATE_FOO")
        os.environ["ACCELERATE_BAR"] = "2"
        return seen

    assert change() == "1"
    assert change.__name__ == "change"
    assert "ACCELERATE_BAR" not in os.environ


def test_purging_a_coroutine(foo: None) -> None:
    @purge_accelerate_environment
    async def change() -> None:
        os.environ["ACCELERATE_BAR"] = "2"

    asyncio.run(change())
    assert "ACCELERATE_BAR" not in os.environ


def test_purging_a_class_and_its_children(foo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    @purge_accelerate_environment
    class Base:
        def test_method(self) -> None:
            os.environ["ACCELERATE_A"] = "1"

        @staticmethod
        def test_static() -> None:
            os.environ["ACCELERATE_B"] = "1"

        @classmethod
        def test_class(cls) -> type:
            os.environ["ACCELERATE_C"] = "1"
            return cls

        def helper(self) -> None:
            os.environ["ACCELERATE_KEPT"] = "1"

    class Child(Base):
        def test_more(self) -> None:
            os.environ["ACCELERATE_D"] = "1"

    monkeypatch.setenv("ACCELERATE_KEPT", "0")
    Child().test_method()
    Child.test_static()
    assert Child.test_class() is Child
    Child().test_more()
    Child().helper()
    assert {name for name in os.environ if name.startswith("ACCELERATE_")} == {
        "ACCELERATE_FOO",
        "ACCELERATE_KEPT",
    }
    assert os.environ["ACCELERATE_KEPT"] == "1"


def test_lines_for_a_file(caplog: pytest.LogCaptureFixture) -> None:
    variables = {
        "A": "1",
        "B": "x=y",
        "N": 3,
        "SPACE": "x y",
        "EMPTY": "",
        "SEMI": "x;y",
        "": "z",
        "LT": "a<b",
    }
    assert convert_dict_to_env_variables(variables) == ["A=1\n", "B=x=y\n", "N=3\n"]
    assert [name for name in variables if any(f"{name!r} is left out" in text for text in caplog.messages)] == [
        "SPACE",
        "EMPTY",
        "SEMI",
        "",
        "LT",
    ]
    assert {record.name for record in caplog.records} == {"accelerate.utils.environment"}


def test_imported_libraries() -> None:
    assert are_libraries_initialized("os", "no_such_module") == ["os"]


@pytest.mark.parametrize(
    "names",
    [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        (
            "OMPI_COMM_WORLD_RANK",
            "OMPI_COMM_WORLD_SIZE",
            "OMPI_COMM_WORLD_LOCAL_RANK",
            "OMPI_COMM_WORLD_LOCAL_SIZE",
        ),
        (
            "MV2_COMM_WORLD_RANK",
            "MV2_COMM_WORLD_SIZE",
            "MV2_COMM_WORLD_LOCAL_RANK",
            "MV2_COMM_WORLD_LOCAL_SIZE",
        ),
    ],
)
def test_place_among_the_processes(names: tuple[str, ...]) -> None:
    with clear_environment():
        assert get_cpu_distributed_information() == CPUInformation(0, 1, 0, 1)
        os.environ.update(zip(names, ("3", "8", "1", "2"), strict=True))
        assert get_cpu_distributed_information() == CPUInformation(3, 8, 1, 2)


def test_lists_of_processors() -> None:
    assert environment._parse_cpu_list("0-3,8\n") == {0, 1, 2, 3, 8}
    assert environment._parse_cpu_list("\n") == set()


def test_questions_to_the_driver(tmp_path: os.PathLike[str], monkeypatch: pytest.MonkeyPatch) -> None:
    script = os.path.join(tmp_path, "nvidia-smi")

    def driver(version: str) -> None:
        with open(script, "w") as file:
            file.write(
                "#!/bin/sh\ncase $1 in *=name) echo 'NVIDIA RTX 4090'; echo 'NVIDIA RTX 4090';; "
                f"*=driver_version) echo {version};; esac\n"
            )
        os.chmod(script, 0o755)

    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError):
        environment.get_gpu_info()
    assert environment.check_cuda_p2p_ib_support() is True
    driver("535.10")
    assert environment.get_gpu_info() == (["NVIDIA RTX 4090"] * 2, 2)
    assert environment.get_driver_version() == "535.10"
    assert environment.check_cuda_p2p_ib_support() is False
    driver("550.40.07")
    assert environment.check_cuda_p2p_ib_support() is True
