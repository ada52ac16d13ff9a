import io
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from accelerate.checkpoint.model_weights import clean_state_dict_for_safetensors, save
from accelerate.io.disk import replacing
from accelerate.io.safe_load import load
from accelerate.io.stored_tensors import each_once
from accelerate.state import PartialState
from tests.harness import run_world


class Stranger:
    """Something that a file of weights has no business with."""


@pytest.fixture(autouse=True)
def state() -> None:
    PartialState(cpu=True)


def test_saving_and_loading(tmp_path: Path) -> None:
    save({"a": torch.arange(3)}, tmp_path / "x.pt")
    assert load(tmp_path / "x.pt")["a"].tolist() == [0, 1, 2]
    assert os.listdir(tmp_path) == ["x.pt"]


def test_open_files(tmp_path: Path) -> None:
    file = io.BytesIO()
    save({"a": 1}, file)
    file.seek(0)
    assert load(file) == {"a": 1}


def test_safetensors(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, str(tmp_path / "x.safetensors"), safe_serialization=True)
    assert load_file(tmp_path / "x.safetensors")["a"].tolist() == [1, 1]
    file = io.BytesIO()
    save({"a": torch.ones(2)}, file, safe_serialization=True)
    assert file.getvalue() == (tmp_path / "x.safetensors").read_bytes()
    # Names of one tensor are not dropped behind the caller's back.
    tensor = torch.ones(2)
    with pytest.raises(RuntimeError, match="share memory"):
        save({"a": tensor, "b": tensor}, tmp_path / "y.safetensors", safe_serialization=True)
    assert os.listdir(tmp_path) == ["x.safetensors"]


def test_a_state_dict_with_ties_is_stored_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].weight = model[0].weight
    save(model.state_dict(), tmp_path / "x.safetensors", safe_serialization=True)
    assert set(load_file(tmp_path / "x.safetensors")) == {"0.weight", "0.bias", "1.bias"}
    [record] = caplog.records
    assert (record.name, record.levelname) == ("accelerate.utils.other", "WARNING")
    assert "1.weight" in record.getMessage()


def test_equal_contents_are_equal_files(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path / "x.pt")
    save({"a": torch.ones(2)}, tmp_path / "y.pt")
    assert (tmp_path / "x.pt").read_bytes() == (tmp_path / "y.pt").read_bytes()


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    save({"a": 1}, tmp_path / "x.pt")
    with pytest.raises(Exception, match="pickle"):
        save({"a": lambda: None}, tmp_path / "x.pt")
    assert load(tmp_path / "x.pt") == {"a": 1}
    assert os.listdir(tmp_path) == ["x.pt"]


def test_links_and_pipes_stay_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "real.pt").touch()
    (tmp_path / "link.pt").symlink_to(tmp_path / "real.pt")
    save({"a": 1}, tmp_path / "link.pt")
    assert (tmp_path / "link.pt").is_symlink()
    assert load(tmp_path / "real.pt") == {"a": 1}
    os.mkfifo(tmp_path / "pipe")
    with replacing(tmp_path / "pipe") as path:
        assert path == tmp_path / "pipe"


def test_foreign_classes_are_refused_unless_trusted(tmp_path: Path) -> None:
    torch.save(Stranger(), tmp_path / "x.pt")
    with pytest.raises(Exception, match="Stranger"):
        load(tmp_path / "x.pt")
    assert isinstance(load(tmp_path / "x.pt", weights_only=False), Stranger)


def test_random_states_of_numpy_are_allowed(tmp_path: Path) -> None:
    torch.save({"numpy": np.random.get_state()}, tmp_path / "x.pt")
    assert (load(tmp_path / "x.pt")["numpy"][1] == np.random.get_state()[1]).all()


def test_shared_tensors_are_stored_once() -> None:
    tied = torch.arange(4.0)
    cleaned = clean_state_dict_for_safetensors({"b": tied, "a": tied, "t": torch.ones(2, 3).t(), "text": "x"})
    assert list(cleaned) == ["b", "t", "text"]
    assert cleaned["t"].is_contiguous()


def test_two_names_of_one_part_of_a_memory_are_stored_once() -> None:
    """Whichever part of it came first."""
    whole = torch.arange(6.0)
    names = {"whole": whole, "part": whole[:3], "again": whole[:3], "turned": whole.view(2, 3).t(), "all": whole[:]}
    nothing = {"empty": torch.empty(0), "also empty": torch.empty(0), "number": 3}
    assert list(each_once({**names, **nothing})) == ["whole", "part", "turned", *nothing]


def test_other_parts_of_the_same_memory_are_kept(tmp_path: Path) -> None:
    whole = torch.arange(4.0)
    parts = {
        "first": whole[:2],
        "second": whole[2:],
        "whole": whole,
        "e1": torch.ones(0),
        "e2": torch.ones(0),
    }
    save(clean_state_dict_for_safetensors(parts), tmp_path / "x.safetensors", safe_serialization=True)
    stored = load_file(tmp_path / "x.safetensors")
    assert {name: value.tolist() for name, value in stored.items()} == {
        "first": [0, 1],
        "second": [2, 3],
        "whole": [0, 1, 2, 3],
        "e1": [],
        "e2": [],
    }


def save_with_rank(folder: str) -> None:
    state = PartialState()
    save({"rank": state.process_index}, os.path.join(folder, f"all{state.process_index}.pt"))
    save({"rank": state.process_index}, os.path.join(folder, "node.pt"), save_on_each_node=True)


def test_only_the_main_process_writes(tmp_path: Path) -> None:
    run_world(save_with_rank, 2, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["all0.pt", "node.pt"]
    assert load(tmp_path / "node.pt") == {"rank": 0}
