"""One of two ranks that meet over gloo, sum tensors, and print how long that took, as JSON."""

from __future__ import annotations

import json
import statistics
import time

import torch

import fds.collectives as collectives

TIMEOUT = 30.0  # seconds that a rank waits for the other
LARGE = 4 * 2**20  # elements, of 4 bytes


def handshake() -> dict[str, float]:
    """Meet the other rank and sum with it; return seconds of the rendezvous, latency, bytes a second.

    Raises `AssertionError` for a wrong sum, and what `init_distributed` raises.
    """
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
    return {
        "rendezvous_s": rendezvous,
        "latency_us": seconds["small"] * 1e6,
        "large_bytes": num_bytes,
        "bandwidth_bytes_per_s": num_bytes / seconds["large"],
    }


if __name__ == "__main__":
    print(json.dumps(handshake()))
