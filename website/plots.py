"""Plots of the kept benchmark results, as drawings in docs/images: `make plots`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from website import scaling

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
# Who is measured: in the results, on the plot, and its color.
SUBJECTS = {
    "ours": ("this release", "c"),
    "peer": ("1.15", "b"),
    "plain": ("plain PyTorch", "a"),
    "limit": ("limit of the bus", "a"),
    "bf16": ("bf16", "a"),
    "fp8": ("fp8", "c"),
}
LEFT, WIDTH, BAR, GAP = 270, 760, 16, 14
# Colours come from the page (docs/assets/site.css); a drawing that is shown by itself has its own.
LIGHT = """--ink: #1f2328; --soft: #59636e; --a: #3f51b5; --b: #b35900; --c: #1a7f37;
  --a-soft: #dfe3f8; --b-soft: #fce8cf; --c-soft: #d9f2df;"""
DARK = """--ink: #e6e9f0; --soft: #a4acbb; --a: #9fa8ff; --b: #ffb366; --c: #7ee2a0;
  --a-soft: #343b6b; --b-soft: #5a4122; --c-soft: #234b31;"""
STYLE = f"""<style>
svg.figure {{ {LIGHT} }}
@media (prefers-color-scheme: dark) {{ svg.figure {{ {DARK} }} }}
svg.figure text {{ fill: var(--ink); font: 13px system-ui, sans-serif; }}
svg.figure .s {{ fill: var(--soft); font-size: 11.5px; }}
svg.figure .t {{ font-weight: 600; }}
svg.figure .e {{ text-anchor: end; }}
svg.figure .a {{ fill: var(--a-soft); stroke: var(--a); }}
svg.figure .b {{ fill: var(--b-soft); stroke: var(--b); }}
svg.figure .c {{ fill: var(--c-soft); stroke: var(--c); }}
</style>"""


@dataclass(frozen=True)
class Plot:
    """Bars side by side: each row is something that was measured, each bar one of those who did it."""

    title: str
    unit: str
    rows: dict[str, dict[str, float]]

    def svg(self) -> str:
        largest = max(value for row in self.rows.values() for value in row.values())
        parts = [f'<text x="10" y="20" class="t">{self.title}</text>']
        y = 38.0
        for label, row in self.rows.items():
            middle = y + len(row) * (BAR + 2) / 2 + 3
            parts.append(f'<text x="{LEFT - 12}" y="{middle:g}" class="e">{label}</text>')
            for subject, value in row.items():
                length = max(value, 0) / largest * (WIDTH - LEFT - 90)
                color = SUBJECTS[subject][1]
                parts.append(
                    f'<rect x="{LEFT}" y="{y:g}" width="{max(length, 1):.1f}" height="{BAR}" class="{color}"/>'
                )
                parts.append(f'<text x="{LEFT + length + 8:.1f}" y="{y + 12.5:g}" class="s">{self._said(value)}</text>')
                y += BAR + 2
            y += GAP
        x = LEFT
        for subject in dict.fromkeys(subject for row in self.rows.values() for subject in row):
            name, color = SUBJECTS[subject]
            parts.append(f'<rect x="{x}" y="{y:g}" width="14" height="14" class="{color}"/>')
            parts.append(f'<text x="{x + 20}" y="{y + 12:g}" class="s">{name}</text>')
            x += 130
        height = y + 24
        size = f'viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" height="{height:g}"'
        head = f'<svg class="figure" xmlns="http://www.w3.org/2000/svg" {size}>'
        return "\n".join([head, STYLE, *parts, "</svg>", ""])

    def _said(self, value: float) -> str:
        return f"{value:.3g} {self.unit}" if value > 0 else "within noise"


def plots() -> dict[str, Plot]:
    """Every plot, by the name of its file."""
    cpu, gpu = _figures("cpu-2-cores.json"), _figures("gpu-h200.json")
    return {
        "plot-step": Plot(
            "What is added to a step of a tiny network, beside the same loop by hand",
            "µs",
            {
                **_added(gpu, {"step, fp32, accumulation 1": "H200, fp32", "step, bf16, accumulation 1": "H200, bf16"}),
                **_added(
                    cpu,
                    {
                        "step, 1 process, fp32, accumulation 1": "CPU, one process",
                        "step, 2 processes, fp32, accumulation 1": "CPU, two processes",
                    },
                ),
            },
        ),
        "plot-transformer": Plot(
            "A bf16 step on an H200",
            "ms",
            _medians(
                gpu,
                1e3,
                {
                    "125M transformer, bf16, loss in the loop": "transformer of 125M parameters",
                    "113 MB batches, pinned": "batches of 113 MB, pinned",
                },
            ),
        ),
        "plot-feeding": Plot(
            "A step with 10 to 12 ms of compute on an H200, by how its data gets there",
            "ms",
            _medians(
                _figures("gpu-h200-feeding.json"),
                1e3,
                {
                    "113 MB batches, not pinned": "batches of 113 MB",
                    "113 MB batches, pin_memory=True": "… with pin_memory=True",
                    "113 MB batches, not pinned, dispatched": "… dispatched",
                    "1,000 tensors of 16 KB, not pinned": "1,000 tensors of 16 KB",
                },
            ),
        ),
        "plot-collectives": Plot(
            "Two processes on the CPU",
            "ms",
            _medians(
                cpu,
                1e3,
                {
                    "evaluation step with gather_for_metrics, 2 processes": "evaluation step with a gather",
                    "dispatched batch of 4 KB, 2 processes": "dispatched batch of 4 KB",
                    "dispatched batch of 1 MB, 2 processes": "dispatched batch of 1 MB",
                },
            ),
        ),
        "plot-start": Plot(
            "From the command to the first line of work",
            "s",
            _medians(
                cpu,
                1,
                {
                    "import accelerate": "import accelerate",
                    "accelerate launch --help": "accelerate launch --help",
                    "accelerate env": "accelerate env",
                    "accelerate launch, one process, over python": "accelerate launch, over python",
                },
            ),
        ),
        "plot-end-to-end": Plot(
            "Training 1.2 billion parameters on an H200",
            "thousand tokens/s",
            _end_to_end("gpu-h200-end-to-end.json"),
        ),
        "plot-checkpoint": Plot("A checkpoint of 4.5 GiB on an H200", "s", _checkpoint("gpu-h200-checkpoint.json")),
        "plot-offload": Plot(
            "A forward of 7.94 GiB of offloaded weights on an H200", "s", _offload("gpu-h200-offload.txt")
        ),
        "plot-fp8": Plot("fp8 beside bf16 on an H200", "ms", _fp8("gpu-h200-fp8.json")),
    }


def _fp8(file: str) -> dict[str, dict[str, float]]:
    found = json.loads((RESULTS / file).read_text())
    stack, decoder = found["stack"]["ms"], found["decoder"]
    return {
        "linear layers, by hand": {mode: stack[f"{mode} by hand"] for mode in ("bf16", "fp8")},
        "linear layers, Accelerator": {mode: stack[f"{mode}, Accelerator"] for mode in ("bf16", "fp8")},
        "decoder of 1.02B parameters": {mode: decoder[mode]["ms"] for mode in ("bf16", "fp8")},
    }


def _figures(file: str) -> dict[str, dict[str, Any]]:
    return {figure["figure"]: figure for figure in json.loads((RESULTS / file).read_text())["figures"]}


def _added(figures: dict[str, dict[str, Any]], wanted: dict[str, str]) -> dict[str, dict[str, float]]:
    """Microseconds that each subject adds to a step."""
    return {
        label: {who: figures[name]["median_added_seconds_per_step"][who] * 1e6 for who in ("ours", "peer")}
        for name, label in wanted.items()
    }


def _medians(figures: dict[str, dict[str, Any]], factor: float, wanted: dict[str, str]) -> dict[str, dict[str, float]]:
    rows = {}
    for name, label in wanted.items():
        found = figures[name].get("median_seconds_per_step") or figures[name]["median_seconds"]
        rows[label] = {who: found[who] * factor for who in ("ours", "peer", "plain") if who in found}
    return rows


def _checkpoint(file: str) -> dict[str, dict[str, float]]:
    found = json.loads((RESULTS / file).read_text())["1"]
    ours, peer = found["ours"]["times"], found["peer"]["times"]
    plain = median(ours["plain write of the same bytes, flushed"])
    return {
        "save_state": {"ours": median(ours["save"]), "peer": median(peer["save"]), "plain": plain},
        "async_save: training waits": {"ours": median(ours["asynchronous save: stall"])},
        "load_state": {"ours": median(ours["load"]), "peer": median(peer["load"])},
    }


def _end_to_end(file: str) -> dict[str, dict[str, float]]:
    found = json.loads((RESULTS / file).read_text())
    labels = {
        "tokens per second of a step": "steps alone",
        "tokens per second, all in": "with evaluations and checkpoints",
    }
    return {label: {who: found[who][key] / 1e3 for who in ("ours", "peer", "plain")} for key, label in labels.items()}


def _offload(file: str) -> dict[str, dict[str, float]]:
    """The first report of the file: its sections, each with its floor and its forwards."""
    text = (RESULTS / file).read_text()
    rows: dict[str, dict[str, float]] = {}
    labels = {"cpu": "cpu_offload", "disk": "disk_offload", "safetensors": "weights in safetensors files"}
    for section, label in labels.items():
        found = re.search(
            rf"^{section}: floor ([\d.]+) s$.*?^  forward +ours +([\d.]+) +peer +([\d.]+)", text, re.M | re.S
        )
        assert found is not None, f"{file} has no section {section}"
        limit, ours, peer = map(float, found.groups())
        rows[label] = {"ours": ours, "peer": peer, "limit": limit}
    return rows


def drawings() -> dict[str, str]:
    """Every plot as its file has it."""
    return {name: plot.svg() for name, plot in plots().items()} | {"plot-scaling": scaling.curves().svg(STYLE)}


def main() -> None:
    for name, drawing in drawings().items():
        (IMAGES / f"{name}.svg").write_text(drawing)


if __name__ == "__main__":
    main()
