"""Runs of the main job: starting one as a user does, and reading what it left.

Each way of starting one is used where it matters: a fresh interpreter, by a launcher or for the ranks that the script
launches itself, costs seconds, and one that has torch and fds already nothing.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.programs import Program

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "train_gpt.py"
sys.path.insert(0, str(EXAMPLES))  # as that of a script is

CLOCK = ("seconds", "tokens_per_s")  # what differs between two runs of the same thing


STRICT = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}  # one thread, warnings as errors; ranks inherit them


def command(*arguments: object) -> Program:
    """Start the script, whose own process need not import torch; the ranks that it launches are fresh."""
    return Program(SCRIPT, *arguments, env={**os.environ, **STRICT})


def fresh(*arguments: object, by: tuple[object, ...] = ()) -> subprocess.Popen:
    """Start the script in a fresh interpreter, or a launcher that does."""
    words = [sys.executable, *by, SCRIPT, *arguments]
    return subprocess.Popen(
        [str(word) for word in words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **STRICT},
    )


def as_ranks(number: int, *arguments: object) -> list[Program]:
    """Start the script once for each rank, in the environment that torchrun gives it, without what torchrun does."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    world = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [{**world, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(number)]
    return [Program(SCRIPT, *arguments, env={**os.environ, **STRICT, **rank}) for rank in ranks]


def lines(out: Path) -> list[dict]:
    """Read a log without its clock."""
    found = [json.loads(text) for text in (out / "log.jsonl").read_text().splitlines()]
    own = lambda name: name not in CLOCK and not name.startswith("elapsed_time_ms_")
    return [{name: value for name, value in line.items() if own(name)} for line in found]


def saved(out: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a run's last save, those of all ranks."""
    files = sorted((out / "save" / "last").glob("*.safetensors"))
    return {f"{file.name}: {name}": x for file in files for name, x in load_file(file).items()}
