"""Run a fast part of the tests with each version of torch and Python that fds says it takes.

    python -m tests.package.matrix                            # or: make test-matrix
    python -m tests.package.matrix --only 2.11                # rows whose text has this in it
    python -m tests.package.matrix --cuda FOLDER              # torch alone, with the CUDA libraries in FOLDER/nvidia

Each row has an environment of its own under .venv-matrix, kept from run to run. pip takes GPU builds of torch, with
2.4 GB of CUDA packages each, unless it finds others (PIP_FIND_LINKS, PIP_INDEX_URL); they run on a CPU too.
The exit code is 0 if all rows ran and passed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import attrs

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-matrix"
PARTS = ["fds", "tests/unit", "tests/transforms", "tests/optim", "tests/laws", "tests/kernels/test_elementwise.py"]
CHECKS = {"ruff", "pyright", "pre-commit", "build"}  # which need no other version
TORCHS_OWN = ["filelock", "typing_extensions", "sympy", "networkx", "jinja2", "fsspec"]  # beside CUDA and Triton


@attrs.frozen
class Row:
    """One environment."""

    python: str
    torch: str
    triton: str  # the one that a GPU build of this torch requires
    numpy: str = "numpy"

    def __str__(self) -> str:
        return f"python{self.python}-torch{self.torch}"


ROWS = [
    Row("3.11", "2.11.0", "3.6.0", "numpy<2.4"),  # which Triton 3.6 interprets with
    Row("3.12", "2.12.1", "3.7.1"),
    Row("3.12", "2.13.0", "3.7.1"),
    Row("3.13", "2.13.0", "3.7.1"),
]


class NotHadError(Exception):
    """There is no such environment on this machine, nor can one be made."""


def main() -> int:
    """Run every row, and say how each went."""
    options, outcomes = parse(), {}
    for row in [row for row in ROWS if options.only in str(row)]:
        print(f"== {row}", flush=True)
        try:
            python = environment(row, options.cuda)
        except NotHadError as error:
            outcomes[row] = f"NOT TRIED: {error}"
            continue
        command = [python, "-m", "pytest", "-q", "-n", str(options.jobs), "-p", "no:cacheprovider", *PARTS]
        environ = {**os.environ, "PYTHONPATH": str(ROOT)}
        outcomes[row] = "FAILED" if subprocess.run(command, cwd=ROOT, env=environ).returncode else "passed"
    print(*(f"{row}: {outcome}" for row, outcome in outcomes.items()), sep="\n")
    return 0 if outcomes and set(outcomes.values()) == {"passed"} else 1


def environment(row: Row, cuda: Path | None) -> Path:
    """Return the interpreter of a row's environment, which is made unless it is there."""
    folder = ENVIRONMENTS / str(row)
    python, ready = folder / "bin" / "python", folder / ".ready"
    wanted = "\n".join([repr(row), str(cuda), *requirements()])
    if ready.exists() and ready.read_text() == wanted:
        return python
    call(interpreter(row.python), "-m", "venv", "--clear", folder)
    pins = folder / "constraints.txt"
    own = re.compile(r"(torch|triton|numpy|setuptools)==")
    kept = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not own.match(line)]
    pins.write_text("\n".join(kept) + "\n")
    pip = [python, "-m", "pip", "install", "-q", "-c", pins]
    call(*pip, *(["--no-deps"] if cuda else []), f"torch=={row.torch}", f"triton=={row.triton}")
    if cuda:
        paths = sysconfig.get_paths("venv", {"base": str(folder), "platbase": str(folder)})
        site = Path(paths["purelib"].replace(f"python{sysconfig.get_python_version()}", f"python{row.python}"))
        (site / "nvidia").symlink_to(cuda.resolve() / "nvidia")
    call(*pip, row.numpy, *(TORCHS_OWN if cuda else []), *requirements())
    call(python, "-c", "import torch, triton")
    ready.write_text(wanted)
    return python


def requirements() -> list[str]:
    """Return what fds and its tests require, but torch and Triton."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = [re.match(r"[\w-]+", line)[0] for line in [*project["dependencies"], *extras["dev"], *extras["plot"]]]
    return [name for name in names if name not in CHECKS | {"torch", "triton", "numpy"}]


def interpreter(version: str) -> str:
    """Return a Python of this version: from the path, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for path in [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]:
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return str(path)
    raise NotHadError(f"no Python {version} here")


def call(*command: object) -> None:
    """Run a command; raise `NotHadError` with the end of what it said if it fails."""
    ran = subprocess.run([str(word) for word in command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if ran.returncode:
        last = ran.stdout.decode(errors="replace").strip().splitlines()[-1:]
        raise NotHadError(f"{Path(str(command[0])).name} {command[1]} {command[2]}: {' '.join(last)}")


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the name of rows, such as torch2.11")
    parser.add_argument("--jobs", default=2, type=int, help="processes of pytest (%(default)s)")
    parser.add_argument("--cuda", type=Path, help="folder with a folder `nvidia` of CUDA libraries, for all rows")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
