"""Words for the sentences of errors."""

from __future__ import annotations

import pytest

from accelerate.errors import a_kind_of


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("int", "an int"),
        ("Linear", "a Linear"),
        ("_IterableOfTwo", "an _IterableOfTwo"),
        ("SGD", "an SGD"),
        ("UNet", "a UNet"),
        ("GPT2Model", "a GPT2Model"),
        ("A", "an A"),
    ],
)
def test_a_class_has_its_article(name: str, said: str) -> None:
    assert a_kind_of(type(name, (), {})()) == said
