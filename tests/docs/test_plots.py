"""The plots of the documents show the results that are kept."""

from __future__ import annotations

import pytest

from website.plots import IMAGES, plots


@pytest.mark.parametrize("name", plots())
def test_plots_are_those_of_the_results(name: str) -> None:
    assert (IMAGES / f"{name}.svg").read_text() == plots()[name].svg(), "make plots"
