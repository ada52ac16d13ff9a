"""The picture of the site that README shows, taken in a headless Chromium: `make screenshot`, after `make docs`."""

from __future__ import annotations

import shutil
from pathlib import Path

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "site" / "concepts" / "memory.html"
PICTURE = ROOT / "docs" / "images" / "site.png"


def main() -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.goto(PAGE.as_uri(), wait_until="load")
        page.screenshot(path=PICTURE)
        browser.close()


if __name__ == "__main__":
    main()
