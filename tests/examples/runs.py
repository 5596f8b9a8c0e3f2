"""Runs of the main job: starting one as a user does, and reading what it left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_gpt.py"
sys.path.insert(0, str(EXAMPLES))  # as that of a script is

CLOCK = ("seconds", "tokens_per_s")  # what differs between two runs of the same thing


def command(*arguments: object, by: tuple[object, ...] = ()) -> subprocess.Popen:
    """Start the script, or a launcher that does; warnings as errors, one thread."""
    words = [sys.executable, *by, SCRIPT, *arguments]
    return subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"})  # fmt: skip


def lines(out: Path) -> list[dict]:
    """Read a log without its clock."""
    found = [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in CLOCK} for line in found]


def saved(out: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a run's last save, those of all ranks."""
    files = sorted((out / "save" / "last").glob("*.safetensors"))
    return {f"{file.name}: {name}": x for file in files for name, x in load_file(file).items()}
