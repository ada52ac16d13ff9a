"""The browser the other tests use: what a page does wrong is seen."""

from __future__ import annotations

import pytest
from playwright.sync_api import Page

from tests.site.conftest import Browse


def test_a_page_that_does_nothing_wrong(page: Page) -> None:
    page.set_content("<h1>here</h1>")
    assert page.locator("h1").inner_text() == "here"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("<script>console.error('spilt')</script>", "console error: spilt"),
        ("<script>throw new Error('broken')</script>", "uncaught error: broken"),
        ("<img src='http://elsewhere.invalid/x.png'>", "external request: http://elsewhere.invalid/x.png"),
        ("<img src='http://127.0.0.1:9/x.png'>", "failed request: http://127.0.0.1:9/x.png"),
    ],
)
def test_what_is_wrong_is_written_down(content: str, complaint: str, page: Page, problems: list[str]) -> None:
    page.set_content(content, wait_until="load")
    while not any(problem.startswith(complaint) for problem in problems):
        page.wait_for_timeout(10)
    page.context.close()  # or more of the same could arrive later
    problems.clear()


def test_width_and_colours(browse: Browse) -> None:
    page = browse(width=390, dark=True)
    page.set_content("<p>text</p>")
    assert page.evaluate("[innerWidth, matchMedia('(prefers-color-scheme: dark)').matches]") == [390, True]
