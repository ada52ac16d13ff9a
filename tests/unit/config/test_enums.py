import pytest

from accelerate.config.enums import (
    DDPCommunicationHookType,
    DistributedType,
    DynamoBackend,
    LoggerType,
    PrecisionType,
)


def test_members_equal_their_text() -> None:
    assert DistributedType.MULTI_GPU == "MULTI_GPU"
    assert {DistributedType.NO: 1}["NO"] == 1  # type: ignore[index]
    assert PrecisionType.BF16 == "bf16"
    assert LoggerType.WANDB != "wandb"


def test_what_they_print() -> None:
    assert str(DistributedType.MULTI_CPU) == f"{DistributedType.MULTI_CPU}" == "DistributedType.MULTI_CPU"
    assert str(PrecisionType.FP16) == f"{PrecisionType.FP16}" == "fp16"
    assert str(DDPCommunicationHookType.POWER_SGD) == "power_sgd"


def test_asking_for_a_value() -> None:
    assert "fp16" in PrecisionType
    assert PrecisionType.FP16 in PrecisionType
    assert "fp17" not in PrecisionType
    assert 3 not in PrecisionType
    assert PrecisionType.list() == ["no", "fp8", "fp16", "bf16"]
    assert DynamoBackend.list()[:2] == ["NO", "EAGER"]


def test_a_value_has_one_spelling() -> None:
    with pytest.raises(ValueError, match="eager"):
        DynamoBackend("eager")


def test_the_old_name_of_xla_is_answered_with_a_hint() -> None:
    asks = [lambda: DistributedType.TPU, lambda: DistributedType["TPU"], lambda: DistributedType("TPU")]
    for ask in asks:
        with pytest.warns(FutureWarning, match=r"called `DistributedType.XLA` now"):
            assert ask() is DistributedType.XLA
    assert "TPU" not in [member.name for member in DistributedType] and not hasattr(DistributedType, "TPV")
