"""The log: one JSON line for each step and each evaluation, which a resumed run truncates and continues."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor


class Log:
    """A JSONL file and what is in it, as lists of steps and of evaluations.

    Everything in a line but `seconds` and `tokens_per_s` is a function of the run's options alone.
    """

    def __init__(self, path: Path, *, upto: int):
        """Open the log of a run that continues after step `upto`: later and incomplete lines are removed."""
        kept, end = _lines_upto(path, upto) if path.exists() else ([], 0)
        self.steps = [line for line in kept if "loss" in line]
        self.evaluations = [line for line in kept if "held_out" in line]
        self._waiting: list[tuple[int, Mapping[str, Tensor]]] = []
        self._seconds = kept[-1]["seconds"] if kept else 0.0
        self._start = self._last_read = time.perf_counter()
        self._file = path.open("a")
        if self._file.tell() > end:
            self._file.truncate(end)  # not written anew: a rank may be killed at any time

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def seconds(self) -> float:
        """Seconds that this run has taken so far, without interruptions."""
        return self._seconds + time.perf_counter() - self._start

    def step(self, number: int, metrics: Mapping[str, Tensor]) -> None:
        """Keep the metrics of a step, without synchronizing with the device."""
        self._waiting.append((number, metrics))

    def read(self, *, tokens_per_step: int) -> None:
        """Write the steps since the last call, with one synchronization for all of them."""
        if not self._waiting:
            return
        names = [name for name in self._waiting[0][1] if name != "step"]
        table = torch.stack([torch.stack([m[name].double() for name in names]) for _, m in self._waiting]).tolist()
        now = time.perf_counter()
        speed = round(len(table) * tokens_per_step / (now - self._last_read), 1)
        for (number, _), row in zip(self._waiting, table, strict=True):
            self._write(self.steps, {"step": number, **dict(zip(names, row, strict=True)), "tokens_per_s": speed})
        self._waiting, self._last_read = [], now

    def evaluation(self, number: int, bits_per_byte: float) -> None:
        """Write the held-out loss after a step; its time does not count as training speed."""
        self._write(self.evaluations, {"step": number, "held_out": bits_per_byte})

    def pause(self) -> None:
        """Exclude the time since the last reading from the training speed."""
        self._last_read = time.perf_counter()

    def _write(self, lines: list[dict], line: dict[str, Any]) -> None:
        line["seconds"] = round(self.seconds, 3)
        lines.append(line)
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


def smooth(values: list[float], *, decay: float = 0.97) -> list[float]:
    """Return the running means of values, weighted by powers of `decay`; non-finite values are skipped."""
    total, weight, out = 0.0, 0.0, []
    for value in values:
        if value - value == 0:
            total, weight = decay * total + value, decay * weight + 1
        out.append(total / weight if weight else value)
    return out


def _lines_upto(path: Path, upto: int) -> tuple[list[dict[str, Any]], int]:
    """Return the complete lines of a log up to a step, and the number of bytes that they take."""
    kept: list[dict[str, Any]] = []
    end = 0
    for text in path.read_bytes().splitlines(keepends=True):
        if not text.endswith(b"\n"):
            break  # the process was killed while writing
        line = json.loads(text)
        if line["step"] > upto:
            break
        kept.append(line)
        end += len(text)
    return kept, end
