"""The parts of a run on a GPU, in their order, and how long each may take of half an hour."""

from __future__ import annotations

import attrs


@attrs.frozen
class Part:
    """A part: a module with `cases(setting)`, or none for the tests, which pytest runs."""

    name: str
    what: str
    seconds: float  # of all calls together, where the others are asked for too
    module: str = ""


PARTS = {
    part.name: part
    for part in (
        Part("tests", "the tests on CUDA, against float64 and hand-written loops", 360),
        Part("kernels", "every kernel beside torch, torch.compile and peers", 600, "benchmarks.kernels"),
        Part("step", "whole steps of GPT-2 124M beside torch's", 480, "benchmarks.gpu.step"),
        Part("counters", "compute-sanitizer on tiny shapes of every kernel", 300, "benchmarks.gpu.counters"),
    )
}
