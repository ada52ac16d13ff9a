"""What a tracking library wrote to disk, for `test_libraries.py`: `python read.py NAME` prints it as JSON.

Run where `train.py` ran. Files with a plain format are read as they are, others with the library itself.
"""

from __future__ import annotations

import csv
import json
import sqlite3
import sys
import zipfile
from pathlib import Path
from typing import Any

import yaml

Found = dict[str, Any]


def one(pattern: str) -> Path:
    [path] = Path().glob(pattern)
    return path


def tensorboard() -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator("project/digits")
    events.Reload()
    tags = events.Tags()
    return {
        "scalars": {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in tags["scalars"]},
        "config": yaml.safe_load(one("project/digits/*/hparams.yml").read_text()),
        "images": {tag: [event.step for event in events.Images(tag)] for tag in tags["images"]},
    }


def wandb() -> Found:
    from wandb.proto import wandb_internal_pb2

    from tests.trackers.journal import records

    found: Found = {"scalars": {}, "config": {}, "images": {}, "tables": {}, "ended": False}
    for record in records(one("wandb/offline-run-*/*.wandb")):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(record)
        if entry.HasField("config"):
            found["config"] |= {item.key: json.loads(item.value_json) for item in entry.config.update if item.key}
        found["ended"] |= entry.HasField("exit")
        if not entry.HasField("history"):
            continue
        values = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in entry.history.item}
        for name, value in values.items():
            if name.endswith("._type"):
                kind = "tables" if value == "table-file" else "images"
                found[kind].setdefault(name.removesuffix("._type"), []).append(values["_step"])
            elif "." not in name and not name.startswith("_"):
                found["scalars"].setdefault(name, []).append([values["_step"], value])
    return found


def swanlab() -> Found:
    from swanlab.proto.swanlab.record.v1 import record_pb2

    from tests.trackers.journal import records

    found: Found = {"scalars": {}, "images": {}, "ended": False}
    for record in records(one("swanlog/run-*/*.swanlab")):
        entry = record_pb2.Record()
        entry.ParseFromString(record)
        if entry.HasField("scalar"):
            scalar = entry.scalar
            found["scalars"].setdefault(scalar.key, []).append([scalar.step, scalar.value.number])
        if entry.HasField("media"):
            found["images"].setdefault(entry.media.key, []).append(entry.media.step)
        found["ended"] |= entry.HasField("finish")
    config = yaml.safe_load(one("swanlog/run-*/files/config.yaml").read_text())
    found["config"] = {key: value["value"] for key, value in config.items()}
    return found


def mlflow() -> Found:
    with sqlite3.connect("mlflow.db") as base:
        scalars: dict[str, list[Any]] = {}
        for name, step, value in base.execute("select key, step, value from metrics order by key, step"):
            scalars.setdefault(name, []).append([step, value])
        [(status, experiment)] = base.execute("select status, experiment_id from runs").fetchall()
        names = dict(base.execute("select experiment_id, name from experiments"))
        config = dict(base.execute("select key, value from params"))
    return {
        "scalars": scalars,
        "config": {key: yaml.safe_load(value) for key, value in config.items()},
        "ended": status == "FINISHED",
        "project": names[experiment],
    }


def comet_ml() -> Found:
    found: Found = {"scalars": {}, "config": {}}
    with zipfile.ZipFile(one(".cometml-runs/*.zip")) as archive:
        found["project"] = json.loads(archive.read("experiment.json"))["project_name"]
        for line in archive.read("messages.json").decode().splitlines():
            message = json.loads(line)
            metric = message["payload"].get("metric")
            # Comet adds some of its own.
            if metric is not None and not metric["metricName"].startswith(("sys.", "process ")):
                entry = [metric["step"], metric["metricValue"]]
                found["scalars"].setdefault(metric["metricName"], []).append(entry)
            parameter = message["payload"].get("param") or message["payload"].get("params")
            if parameter is not None and parameter["source"] == "manual" and parameter["step"] is None:
                found["config"][parameter["paramName"]] = parameter["paramValue"]
    return found


def aim() -> Found:
    import aim as library
    from aim.storage.context import Context

    [name] = library.Repo.from_path("project").list_all_runs()
    # As if to continue it: what is open for reading only has to be indexed by Aim's server first.
    run = library.Run(name, repo="project", system_tracking_interval=None, log_system_params=False)
    scalars = {}
    for metric in run.metrics():
        steps, (values, *_) = metric.data.numpy()
        if not metric.name.startswith("__system__"):
            scalars[metric.name] = [list(pair) for pair in zip(steps.tolist(), values.tolist(), strict=True)]
    pictures = run.get_image_sequence("picture", Context({}))
    images = {"picture": pictures.data.indices_list()} if pictures else {}
    return {"scalars": scalars, "config": run["hparams"], "images": images, "project": run.name}


def clearml() -> Found:
    folder = one(".clearml/cache/offline/offline-*/metrics.jsonl").parent
    found: Found = {"scalars": {}, "images": {}, "tables": {}}
    kinds = {"training_debug_image": "images", "plot": "tables"}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            name = event["metric"]
            if event["type"] == "training_stats_scalar" and not name.startswith(":monitor"):
                found["scalars"].setdefault(name, []).append([event["iter"], event["value"]])
            elif event["type"] in kinds:
                found[kinds[event["type"]]].setdefault(name, []).append(event["iter"])
    task = json.loads((folder / "task.json").read_text())
    lines = task["configuration"]["General"]["value"].splitlines()
    found["config"] = {key: yaml.safe_load(value) for key, value in (line.split(" = ") for line in lines)}
    found["project"] = task["project_name"]
    found["ended"] = folder.with_suffix(".zip").exists()
    return found


def dvclive() -> Found:
    scalars = {}
    for path in Path("dvclive/plots/metrics").glob("*.tsv"):
        with path.open() as file:
            scalars[path.stem] = [
                [int(step), float(value)] for step, value in list(csv.reader(file, delimiter="\t"))[1:]
            ]
    return {"scalars": scalars, "config": yaml.safe_load(Path("dvclive/params.yaml").read_text())}


def trackio() -> Found:
    scalars: dict[str, list[Any]] = {}
    with sqlite3.connect("trackio/digits.db") as base:
        for step, metrics in base.execute("select step, metrics from metrics order by step"):
            for name, value in json.loads(metrics).items():
                scalars.setdefault(name, []).append([step, value])
        [(config,)] = base.execute("select config from configs").fetchall()
    own = {key: value for key, value in json.loads(config).items() if not key.startswith("_")}
    return {"scalars": scalars, "config": own}


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]]()))
