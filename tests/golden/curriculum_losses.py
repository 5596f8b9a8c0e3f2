"""Record the lengths and losses of a small training by DeepSpeed's engine whose JSON has a curriculum by length.

    DS_ACCELERATOR=cpu .venv-peers/bin/python tests/golden/curriculum_losses.py

curriculum_losses.json, per schedule: of each of 12 steps of two microbatches, on one rank, the `lengths` that the model
was told and the mean `losses`.
"""

import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).parent
STEPS, ROWS, LENGTH, WORDS = 12, 3, 24, 13
SCHEDULES = {
    "fixed_linear": {"total_curriculum_step": 8, "difficulty_step": 4},
    "fixed_root": {"total_curriculum_step": 10, "difficulty_step": 2, "root_degree": 2},
    "fixed_discrete": {"difficulty": [4, 10, 24, 8], "max_step": [3, 6, 8]},
}


def config(schedule: str) -> dict:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "curriculum_learning": {
            "enabled": True,
            "curriculum_type": "seqlen",
            "min_difficulty": 4,
            "max_difficulty": LENGTH,
            "schedule_type": schedule,
            "schedule_config": SCHEDULES[schedule],
        },
    }


class Model(nn.Module):
    """It returns its loss, the mean over tokens; DeepSpeed tells it a length, by which it cuts what it is given."""

    def __init__(self):
        super().__init__()
        draw = torch.Generator().manual_seed(7)
        self.embed, self.place, self.head = nn.Embedding(WORDS, 16), nn.Embedding(LENGTH, 16), nn.Linear(16, WORDS)
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=draw) / 4

    def forward(self, tokens, targets, curriculum_seqlen=LENGTH):
        tokens, targets = tokens[:, :curriculum_seqlen], targets[:, :curriculum_seqlen]
        self.told = curriculum_seqlen
        x = self.embed(tokens) + self.place(torch.arange(tokens.shape[1]))
        before = x.cumsum(1) / torch.arange(1, tokens.shape[1] + 1)[:, None]  # what a token knows of those before it
        return F.cross_entropy(self.head(torch.tanh(x + before)).flatten(0, 1), targets.flatten())


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the rows of every step, of both microbatches."""
    tokens = torch.randint(0, WORDS, (STEPS, 2 * ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(3))
    return [(rows[:, :-1], rows[:, 1:]) for rows in tokens]


def by_deepspeed(schedule: str) -> dict:
    import deepspeed  # pyright: ignore[reportMissingImports]

    model, lengths, losses = Model(), [], []
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(schedule))
    for tokens, targets in batches():
        parts = []
        for x, y in zip(tokens.split(ROWS), targets.split(ROWS), strict=True):
            loss = engine(x, y)
            engine.backward(loss)
            engine.step()
            parts.append(float(loss))
        lengths.append(model.told)
        losses.append(sum(parts) / 2)
    return {"schedule": schedule, "lengths": lengths, "losses": losses}


def main() -> None:
    """Write the file, as the only rank."""
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29543",
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
    }
    import deepspeed  # pyright: ignore[reportMissingImports]

    deepspeed.init_distributed(dist_backend="gloo")
    lines = ",\n".join(json.dumps(by_deepspeed(schedule)) for schedule in SCHEDULES)
    versions = json.dumps({"deepspeed": deepspeed.__version__, "torch": torch.__version__})
    (HERE / "curriculum_losses.json").write_text(f'{{"versions": {versions}, "cases": [\n{lines}\n]}}\n')
    print(f"curriculum_losses.json: {len(SCHEDULES)} cases")


if __name__ == "__main__":
    main()
