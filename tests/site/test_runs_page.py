"""The page of runs in a browser, while a training goes on."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, Response

Browse = Callable[..., Page]

HOSTILE = "</script><img src=x onerror=\"document.title='broken'\"> <b>"
# Trains on while there is a file "go" that says how far; then waits for the next one.
TRAIN = """
import pathlib, sys, time
import torch
from accelerate import Accelerator

hostile = sys.argv[1]
first = Accelerator(cpu=True, log_with="local", project_dir=".")
first.init_trackers("first", config={"lr": 0.1, "layers": 2, hostile: hostile})
for step in range(3000):
    first.log({"loss": 10 + (step == 1500) * 90, hostile: 1.0}, step=step)
first.end_training()

accelerator = Accelerator(cpu=True, log_with="local", project_dir=".")
accelerator.init_trackers(hostile, config={"lr": 0.2, "layers": 2})
model, optimizer = accelerator.prepare(model := torch.nn.Linear(1, 1), torch.optim.SGD(model.parameters(), lr=0.1))
done = 0
while (wanted := int(pathlib.Path("go").read_text())) >= 0:
    for step in range(done, wanted):
        accelerator.backward(model(torch.ones(1, 1)).sum())
        optimizer.step()
        optimizer.zero_grad()
        accelerator.log({"loss": float(step % 7)}, step=step)
    if wanted > done:
        accelerator.save_state("state")
    done = max(done, wanted)
    time.sleep(0.1)
raise ValueError("enough " + hostile)
"""

# A run whose file has a million points, most of which no training has written.
LONG = """
import sqlite3
from accelerate import Accelerator

accelerator = Accelerator(cpu=True, log_with="local", project_dir=".")
accelerator.init_trackers("long")
accelerator.log({"loss": 1.0}, step=0)
accelerator.end_training()
with sqlite3.connect("runs.sqlite") as file:
    [point] = file.execute("SELECT id, number, time FROM points JOIN series ON id = series WHERE name = 'loss'")
    numbers = "WITH RECURSIVE numbers(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM numbers WHERE i < 999999)"
    file.execute(f"{numbers} INSERT INTO points SELECT ?, ? + i, i, ?, i % 97 FROM numbers", point)
"""


class Training:
    """A training that goes as far as it is told, and the page of its project."""

    def __init__(self, python: str, folder: Path) -> None:
        self.python, self.folder = python, folder
        self.go(100)
        script = folder / "train.py"
        script.write_text(TRAIN)
        self.process = subprocess.Popen([python, script.name, HOSTILE], cwd=folder, stderr=subprocess.DEVNULL)
        self.server: subprocess.Popen[str] | None = None

    def go(self, step: int) -> None:
        (self.folder / "next").write_text(str(step))
        (self.folder / "next").rename(self.folder / "go")

    def die(self) -> None:
        self.go(-1)
        self.process.wait()

    def serve(self) -> str:
        """The address of the page."""
        while not (self.folder / "runs.sqlite").exists() or (self.folder / "runs.sqlite").stat().st_size == 0:
            assert self.process.poll() is None, "the training has ended"
            time.sleep(0.1)
        command = [self.python, "-m", "accelerate", "runs", ".", "--serve"]
        self.server = subprocess.Popen(command, cwd=self.folder, stdout=subprocess.PIPE, text=True)
        assert self.server.stdout is not None
        return next(line.strip() for line in self.server.stdout if "http://" in line)

    def stop(self) -> None:
        for process in (self.process, self.server):
            if process is not None:
                process.kill()
                process.wait()
        if self.server is not None and self.server.stdout is not None:
            self.server.stdout.close()


@pytest.fixture
def training(training_python: str, tmp_path: Path) -> Iterator[Training]:
    started = Training(training_python, tmp_path)
    yield started
    started.stop()


def drag(page: Page, selector: str, start: float, end: float) -> None:
    """Over a chart, from one part of its width to another."""
    box = page.locator(selector).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * start, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * end, box["y"] + 60, steps=3)
    page.mouse.up()


def chart(name: str) -> str:
    return f'canvas[data-kind="metric"][data-name="{name}"]'


def number(page: Page, selector: str, what: str) -> float:
    return float(page.locator(selector).get_attribute(f"data-{what}") or "nan")


def wait_for(page: Page, selector: str, condition: str) -> None:
    """Until the chart, `c`, is so."""
    code = f"selector => {{ const c = document.querySelector(selector)?.dataset ?? {{}}; return {condition}; }}"
    page.wait_for_function(code, arg=selector)


def test_a_training_goes_on(training: Training, browse: Browse, tmp_path: Path) -> None:
    page = browse()
    page.goto(training.serve())
    wait_for(page, chart("loss"), "c.curves == 2 && c.stands == 3100")
    assert page.locator("#live").inner_text() == "live · 1 running"
    assert number(page, chart("loss"), "points") < 2000  # of 3100, as many as there is room for
    page.evaluate("window.mine = true")

    # The curve grows without a reload, and so do the marks of checkpoints.
    page.wait_for_function("() => document.querySelectorAll('#lanes .saved').length == 1")
    training.go(400)
    wait_for(page, chart("loss"), "c.stands == 3400")
    page.wait_for_function("() => document.querySelectorAll('#lanes .saved').length == 2")
    assert page.evaluate("window.mine") is True
    page.locator('canvas[data-kind="steps"]').scroll_into_view_if_needed()
    wait_for(page, 'canvas[data-kind="steps"]', "c.curves == 1")

    # Zoom: what lies between two places, for all charts; then the whole again.
    page.locator(chart("loss")).scroll_into_view_if_needed()
    box = page.locator(chart("loss")).bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 60)
    page.locator("#tip", has_text="first").filter(has_text="step").wait_for()
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.55, box["y"] + 60, steps=3)
    page.mouse.up()
    wait_for(page, chart("loss"), "c.stands < 1000 && c.left > 1000 && c.right < 2500")
    assert number(page, chart("loss"), "points") == number(page, chart("loss"), "stands")
    page.locator("#reset").click()
    wait_for(page, chart("loss"), "c.stands == 3400")

    # Smoothing changes the line; the axis of time has other ends.
    before = page.locator(chart("loss")).get_attribute("data-last")
    page.locator("#smoothing").fill("0.9")
    wait_for(page, chart("loss"), f"c.last != '{before}'")
    assert page.locator("#smoothed").inner_text() == "0.9"
    page.locator("#smoothing").fill("0")
    wait_for(page, chart("loss"), f"c.last == '{before}'")
    page.locator("#axis").select_option("time")
    wait_for(page, chart("loss"), "c.stands == 3400 && c.right < 2500")
    page.locator("#axis").select_option("step")
    wait_for(page, chart("loss"), "c.right > 2500")
    page.locator("#log").check()
    page.locator("#log").uncheck()

    # Names are text wherever they are shown, and only what differs of the configs is.
    settings = page.locator("#configs tbody tr").all_inner_texts()
    assert [row.split("\t") for row in settings] == [["lr", "0.1", "0.2"], [HOSTILE, HOSTILE, "\u2013"]]
    page.locator("#different").uncheck()
    names = [row.split("\t")[0] for row in page.locator("#configs tbody tr").all_inner_texts()]
    assert names[:3] == ["lr", "layers", HOSTILE] and {"command", "torch", "processes"} <= set(names[3:])
    assert HOSTILE in page.locator("#runs").inner_text()
    assert page.locator("figcaption", has_text=HOSTILE).count() == 1
    assert page.locator("img").count() == 0 and page.title() == "Runs"

    # The run dies, and the page says of what.
    training.die()
    page.wait_for_selector("#runs .pill.died")
    assert f"ValueError: enough {HOSTILE}" in page.locator("#runs").inner_text()
    assert page.locator("#live").inner_text() == "live"
    page.locator("#none").click()
    assert page.locator("canvas").count() == 0
    page.locator("#all").click()
    wait_for(page, chart("loss"), "c.curves == 2")

    # In the dark and on a telephone nothing sticks out; one file shows the same without a server.
    small = browse(width=390, height=844, dark=True)
    small.goto(page.url)
    wait_for(small, chart("loss"), "c.curves == 2")
    assert small.evaluate("document.documentElement.scrollWidth") <= 390
    assert small.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 17, 22)"
    small.locator("#theme").click()
    assert small.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(245, 246, 248)"
    small.close()
    command = [training.python, "-m", "accelerate", "runs", ".", "--export", "run.html"]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
    page.goto((tmp_path / "run.html").as_uri())
    wait_for(page, chart("loss"), "c.curves == 2 && c.stands == 3400")
    assert page.locator("#live").inner_text().startswith("as of ")
    assert page.locator("img").count() == 0 and page.title() == "Runs"
    drag(page, chart("loss"), 0.5, 0.6)
    wait_for(page, chart("loss"), "c.stands < 1000 && c.left > 1000")


def test_a_million_points_are_few_for_the_page(training_python: str, browse: Browse, tmp_path: Path) -> None:
    (tmp_path / "long.py").write_text(LONG)
    subprocess.run([training_python, "long.py"], cwd=tmp_path, check=True)
    command = [training_python, "-m", "accelerate", "runs", ".", "--serve"]
    page, received = browse(), list[Response]()
    page.on("response", lambda response: received.append(response) if "name=loss" in response.url else None)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            page.goto(next(line.strip() for line in server.stdout if "http://" in line))
            wait_for(page, chart("loss"), "c.stands == 1000000 && c.points <= 1000")
            # Zoomed in, it asks for what lies there, again and again, until each point is one.
            for _ in range(6):
                before = number(page, chart("loss"), "stands")
                page.locator(chart("loss")).scroll_into_view_if_needed()
                drag(page, chart("loss"), 0.5, 0.6)
                wait_for(page, chart("loss"), f"c.stands < {before / 4} && c.points <= 1000")
                if number(page, chart("loss"), "points") == number(page, chart("loss"), "stands"):
                    break
            else:
                raise AssertionError("no zoom has shown single points")
            page.locator("#reset").click()
            wait_for(page, chart("loss"), "c.stands == 1000000")
            assert len(received) >= 4
            for answer in received:
                assert all(len(curve["x"]) <= 1000 for curve in answer.json()) and len(answer.body()) < 200_000
        finally:
            server.kill()
