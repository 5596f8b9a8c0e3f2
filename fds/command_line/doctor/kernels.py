"""Kernels: which run where, why, and whether one gives what its reference gives."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

from fds.command_line.doctor.check import Finding, Level, Settings, run_together
from fds.kernels import chosen
from fds.kernels.choice import explanations
from fds.kernels.language import is_there

LIMIT = 120.0  # seconds; compiling takes a few


def kernels(settings: Settings) -> Iterator[Finding]:
    """Find which kernels run on every kind of device at hand, and run one of Triton's in a fresh process."""
    kinds = ["cuda"] * torch.cuda.is_available() + ["cpu"]
    for kind in kinds:
        yield from _chosen(torch.device(kind))
    for kind in kinds:
        if is_there and not settings.quick:
            yield _trial(kind)


def _chosen(device: torch.device) -> Iterator[Finding]:
    """Find what runs for every kernel, and why; kernels of which the same is true are one finding."""
    kernels: dict[str, list[str]] = {}
    for kernel, text in explanations(device).items():
        kernels.setdefault(text, []).append(kernel)
    for text, names in kernels.items():
        which = f"{', '.join(names)}: " if len(kernels) > 1 else ""
        is_left = device.type == "cuda" and chosen(names[0], device) == "reference"
        advice = "fds.triton_kernels() runs the kernels" if is_left else ""
        yield Finding(f"on {device.type}", which + text, advice=advice, values={"kernels": names})


def _trial(kind: str) -> Finding:
    interprets = kind == "cpu"
    what = "interpreter" if interprets else f"trial on {kind}"
    [ended] = run_together(
        "fds.command_line.doctor.trials",
        [{"TRITON_INTERPRET": "1" if interprets else "0"}],
        arguments=f"kernel {kind}",
        limit=LIMIT,
    )
    is_used = not interprets and chosen("rms_norm", torch.device(kind)) == "triton"
    level: Level = "problem" if is_used else "note"
    around = "compose with fds.reference_kernels()" if is_used else "leave fds.triton_kernels() out"
    if ended.code != 0:
        needed = "only tests of kernels need it" if interprets else around
        return Finding(what, f"a kernel does not run: {ended.reason}", level, needed)
    values = json.loads(ended.out)
    found = f"rms_norm and its gradients, {values['max_error']:.1e} from the reference"
    if values["max_error"] > values["bound"]:
        advice = f"more than rounding, {values['bound']:.1e}: {around}, and please report it"
        return Finding(what, found, level, advice, values)
    return Finding(what, found, values=values)
