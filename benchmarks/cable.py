"""A cable on this machine: two network namespaces joined at a rate, so that ranks meet a real, slow network.

It needs Linux, root and iproute2 (`ip`, `tc`). Each direction of the cable carries the rate by itself (a token bucket,
`tbf`), as a full-duplex Ethernet does; processes still share cores and memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import attrs

CLONE_NEWNET = 0x40000000  # setns(2)
FOLDER = Path("/var/run/netns")  # where `ip netns` keeps names


@attrs.frozen
class Node:
    """One end of a cable."""

    namespace: str
    interface: str
    master: str  # the address of the first node
    num_ranks: int

    def enter(self) -> dict[str, str]:
        """Move this process, which has one thread yet, to the node; return what it must add to its environment.

        Raises `OSError` where the kernel refuses.
        """
        with (FOLDER / self.namespace).open() as file:
            libc = ctypes.CDLL(None, use_errno=True)
            if libc.setns(file.fileno(), CLONE_NEWNET):
                code = ctypes.get_errno()
                raise OSError(code, f"setns: {os.strerror(code)}", self.namespace)
        here = {"GLOO_SOCKET_IFNAME": self.interface, "LOCAL_WORLD_SIZE": str(self.num_ranks)}
        return {"MASTER_ADDR": self.master, **here}


@contextlib.contextmanager
def joined(rate: str, num_ranks: int = 1) -> Iterator[list[Node]]:
    """Join two nodes, of so many ranks each, by a cable of a rate, written as `tc` does (1gbit), until the end.

    Raises `RuntimeError` with the words of `ip` or `tc` where they fail.
    """
    id = f"fds{os.getpid()}"
    nodes = [Node(f"{id}-{i}", f"v{id}-{i}"[-15:], "10.77.0.1", num_ranks) for i in (0, 1)]
    first, second = nodes
    try:
        for node in nodes:
            _run("ip", "netns", "add", node.namespace)
        _run(
            "ip",
            "link",
            "add",
            first.interface,
            "netns",
            first.namespace,
            "type",
            "veth",
            "peer",
            "name",
            second.interface,
            "netns",
            second.namespace,
        )
        for i, node in enumerate(nodes, start=1):
            inside = ("ip", "netns", "exec", node.namespace)
            _run(*inside, "ip", "addr", "add", f"10.77.0.{i}/24", "dev", node.interface)
            for interface in (node.interface, "lo"):
                _run(*inside, "ip", "link", "set", interface, "up")
            _run(
                *inside,
                "tc",
                "qdisc",
                "add",
                "dev",
                node.interface,
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "512kb",
                "latency",
                "100ms",
            )
        yield nodes
    finally:
        for node in nodes:
            if (FOLDER / node.namespace).exists():
                _run("ip", "netns", "del", node.namespace)


def missing() -> str:
    """Return why there is no cable here, or nothing."""
    if not all(map(shutil.which, ("ip", "tc"))):
        return "no iproute2: the commands ip and tc"
    try:
        with joined("1gbit"):
            return ""
    except RuntimeError as error:
        return f"{error}" if os.geteuid() == 0 else "not root"


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip()}")
