"""The page's data, its server, and the file that is one page."""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from accelerate.runs import store
from accelerate.runs.page import FILES, Page, file, one_file, to_json
from accelerate.runs.read import Project
from accelerate.runs.serve import Server
from tests.unit.runs.toys import HOSTILE, write


@pytest.fixture
def project(tmp_path: Path) -> Project:
    write(tmp_path, "a", [{"loss": 2.0, HOSTILE: 1.0}, {"loss": 1.0, HOSTILE: float("inf")}], {"lr": 1}, steps=3)
    return Project(write(tmp_path, HOSTILE, [{"loss": 4.0}], {HOSTILE: HOSTILE}, "died", HOSTILE))


@pytest.fixture
def server(project: Project) -> Iterator[Server]:
    with Server(Page(project)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=60)  # type: ignore[arg-type]
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), dict(answer.getheaders())
    connection.close()
    return found


def test_the_server_answers_who_has_the_token(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for name, kind in FILES.items():
        status, text, headers = ask(server, f"/{server.token}/{name}")
        assert (status, text, headers["Content-Type"]) == (200, file(name), kind)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
        assert headers["Referrer-Policy"] == "no-referrer"
    assert ask(server, f"/{server.token}/")[1] == file("index.html")
    assert ask(server, f"/{server.token}/", Host=f"localhost:{server.server_port}")[0] == 200
    for path in ("/", "/index.html", "/wrong/", f"/{server.token}x/", f"/{server.token[:-1]}/", "/%ff/"):
        status, text, _ = ask(server, path)
        assert status == 403 and server.token not in text
    assert ask(server, f"/{server.token}/../serve.py")[0] == 404
    assert ask(server, f"/{server.token}/nothing")[0] == 404


def test_the_server_refuses_other_names_and_methods(server: Server) -> None:
    for name in ("evil.example", f"evil.example:{server.server_port}", "127.0.0.1", ""):
        assert ask(server, f"/{server.token}/", Host=name)[0] == 403
    assert f"localhost:{server.server_port}" in ask(server, "/", Host="127.0.0.1:1")[1]
    assert ask(server, "x://[")[0] == 400
    status, text, _ = ask(server, "/" + "x" * 70000)
    assert (status, "GET" in text) == (414, False)
    for method in ("POST", "PUT", "DELETE", "HEAD", "OPTIONS"):
        assert ask(server, f"/{server.token}/", method)[0] == 405


def test_the_server_gives_data(server: Server) -> None:
    overview = json.loads(ask(server, f"/{server.token}/overview.json")[1])
    first, second = overview["runs"]
    assert (second["name"], second["state"], second["reason"]) == (HOSTILE, "died", HOSTILE)
    assert second["config"] == {HOSTILE: HOSTILE}
    assert [(each["name"], each["last"]) for each in first["series"] if each["kind"] == "metric"] == [
        ("loss", 1.0),
        (HOSTILE, "inf"),
    ]

    def curves(query: str) -> Any:
        status, text, _ = ask(server, f"/{server.token}/curves.json?{query}")
        return json.loads(text) if status == 200 else status

    both = curves("kind=metric&name=loss&axis=step&runs=1,2")
    assert [(curve["run"], curve["x"], curve["y"]) for curve in both] == [(1, [0, 1], [2, 1]), (2, [0], [4])]
    assert [curve["y"] for curve in curves("kind=metric&name=loss&axis=step&runs=1&low=1&high=1")] == [[1]]
    [hostile] = curves(f"kind=metric&name={quote(HOSTILE)}&axis=time&runs=1,2")
    assert (hostile["y"], len(hostile["bad"])) == ([1], 1)
    [times] = curves("kind=steps&axis=step&runs=1,2")
    assert (times["run"], times["rank"], times["x"]) == (1, 0, [2])
    assert curves("kind=metric&name=nothing&axis=step&runs=1") == []
    # The charts of a page go by the overview that it has just got.
    server.page._recent = time.monotonic() + 1000, {"runs": []}
    assert curves("kind=metric&name=loss&axis=step&runs=1,2") == []
    server.page._recent = time.monotonic() - 1000, {"runs": []}
    assert len(curves("kind=metric&name=loss&axis=step&runs=1,2")) == 2
    for wrong in ("", "kind=metric&axis=step", "kind=metric&name=loss&axis=step&runs=x"):
        assert curves(wrong) == 400


def test_a_browser_that_leaves_is_no_error(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    for error in (ConnectionResetError(), BrokenPipeError(), ValueError("of ours")):
        try:
            raise error
        except Exception:
            server.handle_error(None, ("127.0.0.1", 1))
    said = capsys.readouterr().err
    assert "of ours" in said and "ConnectionResetError" not in said and "BrokenPipeError" not in said


def test_steps_that_are_no_numbers_and_many_events(tmp_path: Path) -> None:
    texts = [("text", str(number)) for number in range(400)]
    path = write(tmp_path, "a", [{"loss": 1.0}], events=[("saved", "/c/1"), *texts, ("loaded", "/c/1")])
    with store.writing(path) as connection:  # as earlier releases wrote them
        connection.execute("UPDATE points SET step = 9e999")
    page = Page(Project(path))
    [run] = page.overview()["runs"]
    kinds = [event["kind"] for event in run["events"]]
    assert (kinds[0], kinds[-1], kinds.count("text"), run["events"][1]["text"]) == ("saved", "loaded", 300, "100")
    assert {series["step"] for series in run["series"] if series["kind"] == "metric"} == {"inf"}
    assert "Infinity" not in to_json(page.overview()) + one_file(page).split('id="data">')[1].split("</script>")[0]


def test_one_file_holds_everything(project: Project) -> None:
    text = one_file(Page(project, [1, 2]))
    # Nothing of it comes from elsewhere, and what others have named ends nothing.
    outside = text.replace("http://www.w3.org/2000/svg", "")  # the name of a language, which nobody asks for
    assert re.findall(r"(?:src|href)=\S+", outside.split("<script")[0]) == ['href="data:,">']
    assert "http" not in outside.replace("http-equiv", "")
    assert text.count("</script>") == text.count("<script") == 2
    assert "<img" not in text
    [data] = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    data = json.loads(data)
    assert [run["name"] for run in data["overview"]["runs"]] == ["a", HOSTILE]
    assert {(each["kind"], each["name"], each["axis"]) for each in data["curves"]} >= {
        ("metric", "loss", "step"),
        ("metric", HOSTILE, "time"),
        ("steps", "", "step"),
    }
    assert data["overview"]["runs"][0]["facts"] == {"torch": "2"}  # and not the command of a person, nor the machine
    assert "host" not in data["overview"]["runs"][0]["processes"][0]
    only = one_file(Page(project, [1]))
    assert only.count('"number":') == 1


def test_the_page_asks_nobody_else() -> None:
    for name in FILES:
        text = file(name).replace("http://www.w3.org/2000/svg", "")
        assert not re.search(
            r"https?:|//[a-z]|@import|url\(|innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", text
        )
