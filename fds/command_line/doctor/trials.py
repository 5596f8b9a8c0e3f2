"""What the doctor runs in fresh processes: packages that may end them, a kernel, one of two ranks that meet.

`python -m fds.command_line.doctor.trials packages torch numpy` prints JSON. What a trial tries is imported inside it.
"""

from __future__ import annotations

import importlib
import io
import json
import statistics
import sys
import time
from collections.abc import Callable

TIMEOUT = 30.0  # seconds that a rank waits for the other
LARGE = 4 * 2**20  # elements, of 4 bytes, that two ranks sum
ROWS, COLUMNS = 33, 130  # of a kernel's input: no multiples of a block


def packages(*names: str) -> None:
    """Use each package a little, in turn, and print a line before and after it; one that raises is a line too.

    A wheel that was built for another CPU ends the process at the first instruction that this one lacks, which an
    import alone may not reach.
    """
    for name in names:
        _print(name=name, begins=True)
        error = ""
        try:
            importlib.import_module(name)
            MORE.get(name, lambda: None)()
        except Exception as failed:
            error = f"{type(failed).__name__}: {failed}".split("\n")[0]
        _print(name=name, begins=False, error=error)


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


def kernel(device: str) -> None:
    """Run a kernel of Triton's and its reference; print how much they differ, and the rounding of so many terms."""
    import torch

    from fds.kernels import only, rms_norm

    generator = torch.Generator().manual_seed(0)
    x, weight, upstream = (
        torch.randn(shape, generator=generator).to(device) for shape in ((ROWS, COLUMNS), (COLUMNS,), (ROWS, COLUMNS))
    )
    results = []
    for kind in ("triton", "reference"):
        inputs = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with only(kind):
            y = rms_norm(*inputs)
            results.append((y.detach(), *torch.autograd.grad(y, inputs, upstream)))
    error = max(float((a - b).abs().max()) for a, b in zip(*results, strict=True))
    largest = max(float(b.abs().max()) for b in results[1])
    _print(max_error=error, bound=COLUMNS * torch.finfo(torch.float32).eps * largest)


def handshake() -> None:
    """Meet the other rank and sum with it; print seconds of the rendezvous, latency, bytes a second.

    Raises `AssertionError` for a wrong sum, and what `init_distributed` raises.
    """
    import torch

    from fds import collectives

    start = time.perf_counter()
    collectives.init_distributed("gloo", timeout=TIMEOUT)
    axis = collectives.mesh(dp=-1)["dp"]
    total = axis.all_reduce(torch.tensor([1.0, axis.index]))
    rendezvous = time.perf_counter() - start
    assert total.tolist() == [2.0, 1.0], f"1 + 1 and 0 + 1 are not {total.tolist()}"
    small, large = torch.ones(1), torch.ones(LARGE)
    seconds = {}
    for name, x, times in (("small", small, 50), ("large", large, 5)):
        spent = []
        for _ in range(times):
            axis.barrier()
            start = time.perf_counter()
            axis.start_all_reduce(x.fill_(1.0)).wait()
            spent.append(time.perf_counter() - start)
        assert bool((x == 2.0).all()), "1 + 1 is not 2 everywhere"
        seconds[name] = statistics.median(spent)
    num_bytes = large.numel() * large.itemsize
    _print(
        rendezvous_s=rendezvous,
        latency_us=seconds["small"] * 1e6,
        large_bytes=num_bytes,
        bandwidth_bytes_per_s=num_bytes / seconds["large"],
    )


def _print(**line: object) -> None:
    print("\n" + json.dumps(line), flush=True)  # a package may have printed half a line


if __name__ == "__main__":
    {"packages": packages, "kernel": kernel, "handshake": handshake}[sys.argv[1]](*sys.argv[2:])
