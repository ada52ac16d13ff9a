"""What a tracking library wrote to disk, for the tests: `python read.py NAME` prints it as JSON.

Run where `train.py` or `same.py` ran. Files with a plain format are read as they are, others with the library itself.
Under "content" is what images, tables, texts and files hold, without what differs from run to run.
"""

from __future__ import annotations

import csv
import hashlib
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


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def tensorboard() -> Found:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def opened(folder: Path) -> Any:
        events = EventAccumulator(str(folder))
        events.Reload()
        return events

    def scalars(events: Any) -> dict[str, Any]:
        return {tag: [[event.step, event.value] for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}

    events = opened(Path("project/digits"))
    tags = events.Tags()
    plots = sorted({path.parent for path in Path("project/digits").glob("several_*/events*")})
    return {
        "scalars": scalars(events),
        "config": yaml.safe_load(one("project/digits/*/hparams.yml").read_text()),
        "images": {tag: [event.step for event in events.Images(tag)] for tag in tags["images"]},
        "content": {
            "images": {
                tag: [digest(event.encoded_image_string) for event in events.Images(tag)] for tag in tags["images"]
            },
            "texts": {
                tag: [[event.step, event.tensor_proto.string_val[0].decode()] for event in events.Tensors(tag)]
                for tag in tags["tensors"]
            },
            "plots": {folder.name: scalars(opened(folder)) for folder in plots},
        },
    }


def wandb() -> Found:
    from wandb.proto import wandb_internal_pb2

    from tests.trackers.journal import records

    found: Found = {"scalars": {}, "config": {}, "images": {}, "tables": {}, "ended": False, "content": []}
    folder = one("wandb/offline-run-*/*.wandb").parent
    for record in records(one("wandb/offline-run-*/*.wandb")):
        entry = wandb_internal_pb2.Record()
        entry.ParseFromString(record)
        if entry.HasField("config"):
            found["config"] |= {item.key: json.loads(item.value_json) for item in entry.config.update if item.key}
        found["ended"] |= entry.HasField("exit")
        if not entry.HasField("history"):
            continue
        values = {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in entry.history.item}
        # Artifacts have a number of their own in each run, and names of files count calls.
        found["content"].append(
            {
                name: digest(b"".join((folder / "files" / file).read_bytes() for file in value))
                if name.endswith(".filenames")
                else value
                for name, value in sorted(values.items())
                if name not in ("_timestamp", "_runtime") and not name.endswith(("artifact_path", ".path"))
            }
        )
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

    found: Found = {"scalars": {}, "images": {}, "ended": False, "content": []}
    for record in records(one("swanlog/run-*/*.swanlab")):
        entry = record_pb2.Record()
        entry.ParseFromString(record)
        if entry.HasField("scalar"):
            scalar = entry.scalar
            found["scalars"].setdefault(scalar.key, []).append([scalar.step, scalar.value.number])
        if entry.HasField("media"):
            media = entry.media
            found["images"].setdefault(media.key, []).append(media.step)
            found["content"].append([media.key, media.step, str(media.value)])  # with the digest of each image
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
        [(artifacts,)] = base.execute("select artifact_uri from runs").fetchall()
    folder = Path(artifacts.removeprefix("file://"))
    return {
        "scalars": scalars,
        "config": {key: yaml.safe_load(value) for key, value in config.items()},
        "ended": status == "FINISHED",
        "project": names[experiment],
        "content": {
            str(path.relative_to(folder)): digest(path.read_bytes()) for path in folder.rglob("*") if path.is_file()
        },
    }


def comet_ml() -> Found:
    found: Found = {"scalars": {}, "config": {}, "content": []}
    with zipfile.ZipFile(one(".cometml-runs/*.zip")) as archive:
        found["project"] = json.loads(archive.read("experiment.json"))["project_name"]
        for line in archive.read("messages.json").decode().splitlines():
            message = json.loads(line)
            metric = message["payload"].get("metric")
            # Comet adds some of its own.
            if metric is not None and not metric["metricName"].startswith(("sys.", "process ")):
                entry = [metric["step"], metric["metricValue"]]
                found["scalars"].setdefault(metric["metricName"], []).append(entry)
            if message["type"] == "log_other":
                found["content"].append([message["payload"]["key"], message["payload"]["value"]])
            parameter = message["payload"].get("param") or message["payload"].get("params")
            if parameter is not None and parameter["paramName"] == "curr_step":
                found["content"].append(parameter)
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
    content = {}
    for name, context in (("picture", {}), ("with words", {}), ("more", {"a": "b"})):
        sequence = run.get_image_sequence(name, Context(context))
        if sequence:
            shown = [
                [image.caption, image.format, digest(image.to_pil_image().tobytes())]
                for image in sequence.data.values_list()[0]
            ]
            content[name] = [sequence.data.indices_list(), shown]
    return {"scalars": scalars, "config": run["hparams"], "images": images, "project": run.name, "content": content}


def clearml() -> Found:
    folder = one(".clearml/cache/offline/offline-*/metrics.jsonl").parent
    found: Found = {"scalars": {}, "images": {}, "tables": {}, "content": []}
    kinds = {"training_debug_image": "images", "plot": "tables"}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        for event in json.loads(line):
            name = event["metric"]
            if event["type"] == "training_stats_scalar" and not name.startswith(":monitor"):
                found["scalars"].setdefault(name, []).append([event["iter"], event["value"]])
            elif event["type"] in kinds:
                found[kinds[event["type"]]].setdefault(name, []).append(event["iter"])
            if not name.startswith(":monitor"):
                what = event.get("plot_str") or (digest(Path(event["url"]).read_bytes()) if "url" in event else None)
                found["content"].append([name, event["variant"], event["iter"], event.get("value", what)])
    task = json.loads((folder / "task.json").read_text())
    lines = task["configuration"]["General"]["value"].splitlines()
    found["config"] = {key: yaml.safe_load(value) for key, value in (line.split(" = ") for line in lines)}
    found["project"] = task["project_name"]
    found["ended"] = folder.with_suffix(".zip").exists()
    return found


def dvclive() -> Found:
    scalars, content = {}, {}
    for path in Path("dvclive/plots/metrics").glob("*.tsv"):
        with path.open() as file:
            rows = list(csv.reader(file, delimiter="\t"))[1:]
        if path.stem == "text":
            content[path.stem] = rows
        else:
            scalars[path.stem] = [[int(step), float(value)] for step, value in rows]
    content["summary"] = json.loads(Path("dvclive/metrics.json").read_text())
    return {"scalars": scalars, "config": yaml.safe_load(Path("dvclive/params.yaml").read_text()), "content": content}


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
