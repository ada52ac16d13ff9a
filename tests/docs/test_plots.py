"""The plots of the documents show the results that are kept."""

from __future__ import annotations

import pytest

from website import scaling
from website.plots import IMAGES, drawings


@pytest.mark.parametrize("name", drawings())
def test_plots_are_those_of_the_results(name: str) -> None:
    assert (IMAGES / f"{name}.svg").read_text() == drawings()[name], "make plots"


def test_the_table_is_that_of_the_results() -> None:
    text = scaling.DOCUMENT.read_text()
    assert scaling.TABLE.search(text) and scaling.with_table(text) == text, "make bench-scale"
