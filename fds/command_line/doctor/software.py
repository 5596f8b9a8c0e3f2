"""Versions: Python, torch, and what fds stands on; which extras are there, and which of them end the process."""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from fds import __version__
from fds.command_line import version
from fds.command_line.doctor import Finding, Settings, run_together

TRIED = {"Python": ("3.11", "3.13"), "torch": ("2.11", "2.13")}  # the first and the last that fds was tried on
NEEDED = ("numpy", "attrs", "cattrs", "safetensors", "xxhash", "rich")
EXTRAS = {  # extra -> package, and what it is for
    "plot": ("matplotlib", "pictures: fds plans --png, and loss curves"),
    "hjson": ("hjson", "configurations with comments"),
    "tensorboard": ("tensorboard", "metrics as TensorBoard's events"),
    "wandb": ("wandb", "metrics at Weights & Biases"),
    "comet": ("comet_ml", "metrics at Comet"),
}
COMPILED = ("numpy", "torch", "safetensors", "xxhash", "triton", "matplotlib", "tensorboard", "wandb", "comet_ml")
LIMIT = 120.0  # seconds in which all of them are to be tried


def software(settings: Settings) -> Iterator[Finding]:
    """Find versions, and whether they are among those that fds was tried on."""
    spec = importlib.util.find_spec("fds")
    home = Path(spec.origin).parent if spec is not None and spec.origin else Path("?")
    yield Finding("fds", f"{__version__} in {home}", values={"version": __version__})
    yield in_range("Python", platform.python_version(), f"{platform.python_version()} at {sys.executable}")
    deadly = set[str]()
    if not settings.quick:
        for broken in trials([name for name in COMPILED if importlib.util.find_spec(name)]):
            if "exit_code" in broken.values:  # importing it raises in this process, in which other checks go on
                sys.modules[broken.what] = None  # pyright: ignore[reportArgumentType]
                deadly.add(broken.what)
            yield broken
    if "torch" not in deadly:
        yield _torch()
    for name in [name for name in NEEDED if name not in deadly]:
        installed = version(name)
        missing = installed == "not installed"
        yield Finding(name, installed, "problem" if missing else "ok", f"pip install {name}" if missing else "")
    yield _triton()
    for extra, (package, use) in EXTRAS.items():
        installed = version(package)
        missing = installed == "not installed"
        yield Finding(f"fds[{extra}]", f"{package} {installed}", advice=f"for {use}: pip install {package}" * missing)


def trials(names: Sequence[str]) -> Iterator[Finding]:
    """Try packages in a fresh process, which is started again behind each that ends it; find those that do not work."""
    left = list(names)
    while left:
        [ended] = run_together(
            "fds.command_line.doctor.trials", [{}], arguments=" ".join(["packages", *left]), limit=LIMIT
        )
        lines = [json.loads(line) for line in ended.out.splitlines() if line.startswith('{"name":')]
        for line in lines:
            if line.get("error"):
                advice = f"pip install --force-reinstall {line['name']}"
                yield Finding(line["name"], f"does not work: {line['error']}", "problem", advice)
        if ended.code == 0:
            return
        if not lines or not lines[-1]["begins"]:
            yield Finding("packages", f"were not tried: {ended.reason}", "note")
            return
        name = lines[-1]["name"]
        text = f"{version(name)}; a process that uses it: {ended.reason}"
        advice = "its wheel is for another CPU, or broken: install another release, or build it from its sources, "
        advice += f"if it has any: pip install --force-reinstall --no-binary {name} {name}"
        yield Finding(name, text, "problem", advice, {"exit_code": ended.code})
        left = left[left.index(name) + 1 :]


def in_range(name: str, number: str, text: str) -> Finding:
    """Return the finding of a version: older than what was tried is a problem, newer is a note."""
    oldest, newest = TRIED[name]
    values = {"version": number, "tried": [oldest, newest]}
    if _key(number) < _key(oldest):
        return Finding(name, text, "problem", f"fds needs {name} {oldest} or later", values)
    if _key(number)[:2] > _key(newest):
        return Finding(name, text, "note", f"fds was tried on {name} {oldest} to {newest}", values)
    return Finding(name, text, values=values)


def _key(number: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", number)[:2]))


def _torch() -> Finding:
    try:
        torch = importlib.import_module("torch")
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0]
        return Finding("torch", f"cannot be imported: {reason}", "problem", "pip install torch: https://pytorch.org")
    build = (
        f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}" * bool(torch.version.hip)
    )
    return in_range("torch", torch.__version__, f"{torch.__version__}, built for {build or 'the CPU'}")


def _triton() -> Finding:
    installed = version("triton")
    if installed == "not installed":
        advice = "kernels run as their references, in plain torch; on Linux: pip install triton"
        return Finding("triton", installed, "note" if sys.platform == "linux" else "ok", advice)
    return Finding("triton", installed)
