"""Use each compiled package that the command line names a little, in turn, and print a line before and after it.

A wheel that was built for another CPU ends the process at the first instruction that this one lacks, which an
import alone may not reach.
"""

from __future__ import annotations

import importlib
import io
import json
import sys
from collections.abc import Callable


def _torch() -> None:
    import torch

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, 64, dtype=dtype, requires_grad=True)
        (x @ x).softmax(-1).sum().backward()


def _numpy() -> None:
    import numpy

    numpy.linalg.inv(numpy.eye(8) @ numpy.eye(8))


def _safetensors() -> None:
    import numpy
    from safetensors.numpy import load, save

    load(save({"x": numpy.ones(3)}))


def _xxhash() -> None:
    import xxhash

    xxhash.xxh3_64_intdigest(bytes(1024))


def _matplotlib() -> None:
    from matplotlib.figure import Figure

    figure = Figure()
    figure.subplots().plot([0, 1], label="x")
    figure.legend()
    figure.savefig(io.BytesIO(), format="png", bbox_inches="tight")


MORE: dict[str, Callable[[], None]] = {  # package -> what to do beyond its import
    "numpy": _numpy,
    "torch": _torch,
    "safetensors": _safetensors,
    "xxhash": _xxhash,
    "matplotlib": _matplotlib,
}


def main() -> None:
    """Try the packages; one that raises is a line too."""
    for name in sys.argv[1:]:
        _print(name=name, begins=True)
        error = ""
        try:
            importlib.import_module(name)
            MORE.get(name, lambda: None)()
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}".split("\n")[0]
        _print(name=name, begins=False, error=error)


def _print(**line: object) -> None:
    print("\n" + json.dumps(line), flush=True)  # a package may have printed half a line


if __name__ == "__main__":
    main()
