"""`python -m benchmarks.gpu`: run the parts that are asked for, or all, within one call's time; go on in the next call.

python -m benchmarks.gpu --out results                   # all parts; call it until nothing is left
python -m benchmarks.gpu tests kernels --out results     # of them
python -m benchmarks.gpu --out new --resume results      # go on in another folder; `results` is only read
python -m benchmarks.gpu --device cpu --out try          # tiny shapes on the CPU: does it all run?
python -m benchmarks.gpu merge --out results             # write results.* of the records again
python -m benchmarks.gpu record --out results            # the kernels that passed, into fds/kernels/passed.json
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu import evidence, merging, running, testing
from benchmarks.gpu.needed import TO_TEST, what_is_missing
from benchmarks.gpu.parts import PARTS, Part
from benchmarks.gpu.records import NAME, NO_TIME, PASSED, WRONG, Record, Records, counted
from benchmarks.gpu.worker import LISTED
from fds.kernels.evidence import RECORD

OF_THE_GPU = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "clocks_event_reasons.active")
END_S = 8.0  # of a call's time, kept for ending processes and writing files
PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "attrs",
    "cattrs",
    "safetensors",
    "xxhash",
    "rich",
    "hypothesis",
    "pytest",
    "pytest-xdist",
)


def main() -> int:
    """Run from the command line; return 1 if a case failed, or nothing was recorded, and 0 if cases are only left."""
    options = parse()
    if options.parts in (["merge"], ["record"]):
        records = existing(options.out)
        merging.write(records)
        return recorded(options.out, records) if options.parts == ["record"] else 0
    if (not options.parts or {*testing.PARTS} & {*options.parts}) and (told := what_is_missing(TO_TEST)):
        sys.exit(told)
    records = resumed(options.out, options.resume)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # through `finally`: processes end with it
    return run(options, records)


def recorded(out: Path, records: Records) -> int:
    """Record the kernels that passed, and say what came of each; return 1 if none passed."""
    if not any(head["head"].get("device") == "cuda" for head in records.heads):
        sys.exit(f"fds: no call into {out} ran on a GPU, so that nothing is recorded")
    told = evidence.record(out / merging.RESULTS, RECORD)
    for kernel, words in told.items():
        print(f"{kernel:<22}{words}")
    return 1 if all(words.startswith(evidence.NOT_RECORDED) for words in told.values()) else 0


def run(options: argparse.Namespace, records: Records) -> int:
    """Run a call: each part within its own time, then what was left with what time is left.

    It ends after a part that must pass and did not.
    """
    until = time.monotonic() + options.seconds - END_S
    select, jobs = tuple(options.tests.split()), options.jobs
    call = running.Call(options.out, options.device, jobs, select, Writer())
    parts = [part for part in map(PARTS.get, options.parts or PARTS) if part.module or testing.paths(part.name, select)]
    records.begin({**facts(options.device), "parts": " ".join(part.name for part in parts), "seconds": options.seconds})
    try:
        for part, limit in turns(options.device, parts, records, until):
            tell(f"{part.name}: {part.what}, {limit:.0f} s at most")
            note_gpu(options.device, part.name, records, "before")
            running.run(call, part, records, time.monotonic() + limit)
            note_gpu(options.device, part.name, records, "after")
            tell(f"{part.name}: {summary(records, part.name)}")
            if part.must_pass and any(r.status in WRONG for r in merging.cases_of(records, part.name)):
                tell(f"{part.name} has to pass before anything else is worth its time")
                break
        for part in parts:
            if not records.latest(part.name):
                records.add(Record(part.name, LISTED, NO_TIME))
    finally:
        records.refresh()
        merging.write(records)
    return outcome(records, [part.name for part in parts])


def turns(device: str, parts: list[Part], records: Records, until: float) -> Iterator[tuple[Part, float]]:
    """Yield each part with the seconds of its own, then those that are not finished with what time is left."""
    for again in (False, True):
        for i, part in enumerate(parts):
            left_s = until - time.monotonic()
            limit = left_s if again or len(parts) == 1 else share(device, parts[i:], records, left_s)
            if limit > 1 and not finished(records, part.name):
                yield part, limit


def share(device: str, waiting: list[Part], records: Records, left_s: float) -> float:
    """Return the seconds of the first of the parts that wait: on a GPU its own, on the CPU those left, divided."""
    if device == "cpu":  # where it is to be seen that each runs
        return left_s / len(waiting)
    return min(left_s, waiting[0].seconds - spent(records, waiting[0].name))


def outcome(records: Records, parts: list[str]) -> int:
    """Say what failed and what is left; return 1 if a case failed, 0 if not."""
    latest = [r for part in parts for r in merging.cases_of(records, part)]
    failed = sum(r.status in WRONG for r in latest)
    if failed:
        tell(f"{failed} cases failed: {records.path.parent / merging.PAGE} says which")
    if left := merging.not_reached(latest):
        tell(f"{left}: call again")
    return 1 if failed else 0


class Writer:
    """Writes the files when something was done, though not more often than every two seconds."""

    def __init__(self):
        self.next = 0.0

    def __call__(self, records: Records) -> None:
        if time.monotonic() >= self.next:
            begun = time.monotonic()
            merging.write(records)
            self.next = time.monotonic() + max(2.0, 10 * (time.monotonic() - begun))


def existing(folder: Path) -> Records:
    """Return the records of a folder. Raises `SystemExit` where it has none."""
    if not (folder / NAME).is_file():
        sys.exit(f"fds: {folder} holds no {NAME}, which a call with --out writes")
    return Records(folder)


def resumed(out: Path, earlier: Path | None) -> Records:
    """Return the records of a folder, which begin with those of another one where it has none.

    Raises `SystemExit` where that other one has none either, and where the folder has records that begin otherwise.
    """
    if earlier is not None:
        existing(earlier)
    out.mkdir(parents=True, exist_ok=True)
    if earlier is not None:
        if not (out / NAME).exists():
            shutil.copyfile(earlier / NAME, out / NAME)
        elif _first_line(out / NAME) != _first_line(earlier / NAME):
            sys.exit(f"fds: {out} has records of its own: leave --resume out, or give another --out")
    return Records(out)


def _first_line(path: Path) -> str:
    with path.open(encoding="utf-8") as file:
        return file.readline()


def spent(records: Records, part: str) -> float:
    """Return the seconds that a part took in earlier calls, from its first record in each to its last."""
    moments: dict[int, list[float]] = {}
    for r in records.records:
        if r.part == part and r.call < records.call:
            moments.setdefault(r.call, []).append(r.at)
    return sum(max(some) - min(some) for some in moments.values())


def finished(records: Records, part: str) -> bool:
    """Say whether every case of a part has passed, or ended in this call; one that never said its cases has not."""
    over = records.done(part) | records.tried(part)
    # from the listings too: a call that was killed recorded no more than the cases that it came to
    listings = [r.figures.get("left", []) for r in records.records if r.part == part and r.case == LISTED]
    cases = {r.case for r in merging.cases_of(records, part)}.union(*listings)
    return bool(over) and over >= cases


def summary(records: Records, part: str) -> str:
    """Return how many cases of a part came to what."""
    return ", ".join(f"{n} {status}" for status, n in counted(merging.cases_of(records, part)).items()) or "nothing"


def facts(device: str) -> dict[str, Any]:
    """Return the machine, the versions and the code, without importing what a part may break."""
    versions = {name: version(name) for name in PACKAGES}
    return {
        "device": device,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "GPU": gpu() if device == "cuda" else "none",
        "Python": platform.python_version(),
        **versions,
        "code": fingerprint(),
        "kernels": evidence.fingerprints(),
    }


def note_gpu(device: str, part: str, records: Records, when: str) -> None:
    """Record the clocks, the power and what throttles the GPU: a slow kernel on a slow clock is no slow kernel."""
    if device == "cuda":
        command = ["nvidia-smi", f"--query-gpu={','.join(OF_THE_GPU)}", "--format=csv,noheader"]
        try:
            told = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split(", ")
        except (OSError, subprocess.TimeoutExpired) as error:  # what is measured does not depend on it
            told = [f"{type(error).__name__}: {error}"]
        figures = dict(zip(OF_THE_GPU, [word.strip() for word in told], strict=False))
        records.add(Record(part, f"(the GPU {when})", PASSED, figures=figures))


def gpu() -> str:
    """Return the name of the GPU. Raises `SystemExit` where torch sees none."""
    import torch

    if not torch.cuda.is_available():
        sys.exit(
            "fds: torch sees no GPU; GPU_PYTHON=... names a Python whose torch does, --device cpu tries all without one"
        )
    about = torch.cuda.get_device_properties(0)
    return f"{about.name}, sm_{about.major}{about.minor}, {about.total_memory >> 20} MiB, CUDA {torch.version.cuda}"


def version(package: str) -> str:
    """Return the version of an installed package, "none" where it is not."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def fingerprint() -> str:
    """Return 12 hexadecimal digits of the code of fds: results of two calls are of one program where they are equal."""
    found = hashlib.sha256()
    for path in sorted((running.ROOT / "fds").rglob("*.py")):
        found.update(path.relative_to(running.ROOT).as_posix().encode() + path.read_bytes())
    return found.hexdigest()[:12]


def tell(text: str) -> None:
    """Say something at once."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all), or merge, or record")
    parser.add_argument(
        "--out", type=Path, default=Path("gpu-results"), help="where results go, and go on (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call (%(default)s)")
    parser.add_argument("--resume", type=Path, help="a folder with the results of earlier calls, which is only read")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: tiny shapes, to see that all runs"
    )
    parser.add_argument("--tests", default="", help="paths of tests, in quotes (those that make sense on a GPU)")
    parser.add_argument("--jobs", type=int, default=12, help="workers of pytest (%(default)s)")
    options = parser.parse_args()
    alone = options.parts in (["merge"], ["record"])
    if unknown := [name for name in options.parts if name not in PARTS and not alone]:
        parser.error(f"no part is called {', '.join(unknown)}; there are {', '.join(PARTS)}")
    options.out, options.resume = options.out.resolve(), options.resume and options.resume.resolve()
    return options
