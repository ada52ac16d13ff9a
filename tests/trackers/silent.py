"""A training whose tracking server stops answering once the run is open, for `test_libraries.py`.

    python silent.py NAME [INIT_KWARGS as JSON]

The library is the real one; the server knows just enough of its protocol to let a run begin. What comes after that is
accepted and never answered.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import threading
from typing import Any

from accelerate import Accelerator

RUN = {"run_id": "0" * 32, "run_uuid": "0" * 32, "experiment_id": "1", "status": "RUNNING", "start_time": 1}
PROJECT = {
    "cuid": "p",
    "name": "digits",
    "path": "me/digits",
    "group": {"username": "me"},
    "_count": {"experiments": 0},
}
# What is answered, by the end of the path: anything else is not.
ANSWERS: dict[str, dict[str, Any]] = {
    "experiments/search": {"experiments": [{"experiment_id": "1", "name": "digits", "lifecycle_stage": "active"}]},
    "runs/create": {"run": {"info": RUN, "data": {}}},
    "login/api_key": {"sid": "s", "expiredAt": "2100-01-01T00:00:00.000Z", "userInfo": {"username": "me"}},
    "project/me/digits": PROJECT,
    "project/me/digits/experiment": {"cuid": "e", "slug": "e", "name": "e", "user": {"username": "me"}},
}


class Server(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        found = [answer for end, answer in ANSWERS.items() if path.endswith(f"/{end}")]
        if not found:
            print("unanswered", path, flush=True)
            threading.Event().wait()
        body = json.dumps(found[0]).encode()
        self.send_response(201 if path.endswith("/experiment") else 200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = do_PUT = do_PATCH = answer

    def log_message(self, *args: Any) -> None:
        """Says nothing."""


def main() -> None:
    name, init_kwargs = sys.argv[1], json.loads(sys.argv[2]) if len(sys.argv) > 2 else {}
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    os.environ |= {"MLFLOW_TRACKING_URI": address, "SWANLAB_API_HOST": address, "SWANLAB_API_KEY": "k" * 21}
    os.environ["ACCELERATE_TRACKER_TIMEOUT"] = "2"
    handler = signal.getsignal(signal.SIGINT)
    accelerator = Accelerator(cpu=True, log_with=name)
    accelerator.init_trackers("digits", init_kwargs={name: init_kwargs})
    if "log" in sys.argv:
        accelerator.log({"loss": 1.0}, step=0)
    accelerator.end_training()
    assert signal.getsignal(signal.SIGINT) is handler
    if name == "mlflow":
        import mlflow

        assert mlflow.active_run() is None
    print("ended", flush=True)


if __name__ == "__main__":
    main()
