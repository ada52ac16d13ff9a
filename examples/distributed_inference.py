"""Answer many questions with one copy of a model per process, and get the answers back in the order of the questions.

One process:    python examples/distributed_inference.py
Two processes:  accelerate launch --cpu --num_processes 2 examples/distributed_inference.py

`split_between_processes` is all that inference needs: no loader, nothing to prepare. It cuts any list, tensor or dict
of them into one part per process. The questions here are dates, and the model names the day of the week.
"""

import datetime
import json
from pathlib import Path

import torch
from torch import nn

from accelerate import PartialState
from accelerate.utils import gather_object, set_seed

DAYS = ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"]
FIRST = datetime.date(2024, 1, 1)


def encode(dates):
    """The number of days since the first one, as points on circles of different lengths."""
    days = torch.tensor([(datetime.date.fromisoformat(date) - FIRST).days for date in dates])
    angles = days[:, None] * 2 * torch.pi / torch.tensor([5.0, 7.0, 30.0, 365.0])
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def trained_model(steps=150):
    """The stand-in for a model that is downloaded: the same on every process."""
    set_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 7))
    dates = [FIRST + datetime.timedelta(days=number) for number in range(500)]
    inputs, answers = encode([date.isoformat() for date in dates]), torch.tensor([date.weekday() for date in dates])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), answers).backward()
        optimizer.step()
    return model.eval()


def main(questions=301, batch_size=32, folder="runs/inference"):
    state = PartialState()  # who am I, and which device is mine? Inference needs no Accelerator.
    model = trained_model().to(state.device)
    dates = [(FIRST + datetime.timedelta(days=500 + number)).isoformat() for number in range(questions)]

    answers = []
    # 301 questions on two processes: 151 here and 150 there. Parts need not be equal, as nobody waits in this block.
    with state.split_between_processes(dates) as mine, torch.no_grad():
        for start in range(0, len(mine), batch_size):
            batch = mine[start : start + batch_size]
            days = model(encode(batch).to(state.device)).argmax(dim=-1)
            answers += [{"date": date, "day": DAYS[day]} for date, day in zip(batch, days, strict=True)]

    # Anything that can be pickled, from all processes, first those of process 0: the order of the questions.
    here, answers = len(answers), gather_object(answers)
    shares = gather_object([here])

    if state.is_main_process:
        path = Path(folder, "answers.jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
        right = sum(datetime.date.fromisoformat(a["date"]).strftime("%A") == a["day"] for a in answers)
        print(f"answers by each process: {shares}; {right} of {len(answers)} are right")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
